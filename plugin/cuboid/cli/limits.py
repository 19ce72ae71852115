"""What several commands take from the command line: limits of numbers, which typer checks, and the trust in code."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import typer

#: Option of all commands that read a model's config or tokenizer. Without it they raise: they never ask.
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes with the model, if it needs its own. Read it first."),
]
#: All random number generators accept it, even with the offset that is added for each replica.
LARGEST_SEED = 2**32 - 1
#: Sizes of small models, far above any useful ones.
LARGEST_VOCABULARY = 2**20
MOST_LAYERS = 1024
MOST_HEADS = 1024
#: Processes that are started on this machine alone.
MOST_PROCESSES = 256
#: Maximum number of units of a schedule to draw: 32 ranks of 4 chunks, 64 micro-batches and 16 segments, in a minute.
MOST_UNITS = 32 * 4 * 64 * 16
#: Longest time in a simulation, far above any useful one; matplotlib draws no numbers near the largest float.
LONGEST_TIME = 1e9


def finite(value: float | None) -> float | None:
    """An option's ``callback`` that rejects numbers that aren't finite.

    Raises:
        BadParameter: it is infinite or NaN.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def chunk_count(text: str | None) -> int | Literal["auto"] | None:
    """Parse ``--chunks``, the number of stages on each rank; None if it isn't given.

    Raises:
        BadParameter: it is neither ``auto`` nor a number of at least 1.
    """
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"--chunks {text!r} is neither auto nor a number of at least 1")
    return int(text)
