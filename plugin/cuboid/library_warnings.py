"""Only what the user needs to see: warnings of the libraries below are for those who build on them."""

from __future__ import annotations

import logging
import warnings

import transformers


def quiet(speaks: bool = True) -> None:
    """Let DeepSpeed, transformers and torch report errors only. For a command's own process alone.

    Args:
        speaks: whether this process is the one to pass on warnings that all ranks have alike.
    """
    if not speaks:
        logging.getLogger("cuboid").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
