"""Only what the user needs to see: warnings of the libraries below are for those who build on them."""

from __future__ import annotations

import logging
import warnings

import transformers


def quiet() -> None:
    """Let DeepSpeed, transformers and torch report errors only. For a command's own process alone."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
