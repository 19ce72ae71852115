"""Limits of numbers on the command line, which typer checks before a command runs."""

from __future__ import annotations

import math

import typer

#: All random number generators accept it, also with the offset that is added for each replica.
LARGEST_SEED = 2**32 - 1
#: Sizes of small models, far above any useful ones.
LARGEST_VOCABULARY = 2**20
MOST_LAYERS = 1024
MOST_HEADS = 1024
#: Processes that are started on this machine alone.
MOST_PROCESSES = 256
#: Maximum number of units of a schedule to draw; more would take hours to simulate.
MOST_UNITS = 100_000


def finite(value: float | None) -> float | None:
    """An option's ``callback`` that rejects numbers that aren't finite.

    Raises:
        BadParameter: it is infinite or NaN.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value
