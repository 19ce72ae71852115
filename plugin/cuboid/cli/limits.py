"""Bounds of numbers on the command line, and what else can be said of them before anything is imported."""

from __future__ import annotations

import math

import typer

#: What every generator of random numbers takes, with some added to it for each replica.
LARGEST_SEED = 2**32 - 1
#: Sizes of small models, far above what is of any use.
LARGEST_VOCABULARY = 2**20
MOST_LAYERS = 1024
MOST_HEADS = 1024
#: Processes that are started on this machine alone.
MOST_PROCESSES = 256
#: Units of a schedule that can be drawn; more would take hours to simulate.
MOST_UNITS = 100_000


def finite(value: float | None) -> float | None:
    """A number that can be compared with others, for an option's ``callback``.

    Raises:
        BadParameter: it is infinite, or no number.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value
