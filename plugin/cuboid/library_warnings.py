"""Only what the user needs to see: warnings of the libraries below are for those who build on them."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import transformers


@contextlib.contextmanager
def progress_bars_of(*, shown: bool) -> Iterator[None]:
    """Context in which transformers draws its progress bars only if ``shown``, for what all ranks do alike."""
    hides = not shown and transformers.logging.is_progress_bar_enabled()
    if hides:
        transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        if hides:
            transformers.logging.enable_progress_bar()


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
