"""Silence the underlying libraries' warnings and progress bars that are meant for developers, not for users."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import transformers


@contextlib.contextmanager
def progress_bars_of(*, shown: bool) -> Iterator[None]:
    """Context in which transformers draws its progress bars only if ``shown``; for work that all ranks do alike."""
    hides = not shown and transformers.logging.is_progress_bar_enabled()
    if hides:
        transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        if hides:
            transformers.logging.enable_progress_bar()


def quiet(speaks: bool = True) -> None:
    """Make the libraries below report errors only. Global state, so only for processes of a command.

    Args:
        speaks: whether this process prints Cuboid's own warnings, which are the same on all ranks.
    """
    if not speaks:
        logging.getLogger("cuboid").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for library in ("DeepSpeed", "accelerate"):
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
