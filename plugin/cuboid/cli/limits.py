"""What several commands take from the command line: limits of numbers, which typer checks, and the trust in code."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def trust_option(panel: str | None = None) -> Any:
    """The option of all commands that read a model's config or tokenizer. Without it they raise: they never ask."""
    text = "Run code that comes with the model, if it needs its own. Read it first."
    return typer.Option("--trust-remote-code", help=text, rich_help_panel=panel)


TrustRemoteCode = Annotated[bool, trust_option()]
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
#: Units of a duration.
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def finite(value: float | None) -> float | None:
    """An option's ``callback`` that rejects numbers that aren't finite.

    Raises:
        BadParameter: it is infinite or NaN.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def named_path(text: str, option: str) -> tuple[str, Path]:
    """Parse ``NAME=PATH``.

    Raises:
        BadParameter: it isn't so.
    """
    name, separator, path = text.partition("=")
    if not separator or not path:
        raise typer.BadParameter(f"{text!r} isn't NAME=PATH", param_hint=option)
    return name, Path(path)


def mixed_path(text: str, option: str) -> tuple[str, Path, Fraction]:
    """Parse ``NAME=PATH:SHARE``, with a share between 0 and 1.

    Raises:
        BadParameter: it isn't so.
    """
    named, _, share = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{0,6}\.?[0-9]{1,6}", share) or not 0 < Fraction(share) < 1:
        raise typer.BadParameter(f"{text!r} isn't NAME=PATH:SHARE with a share such as 0.25", param_hint=option)
    return *named_path(named, option), Fraction(share)


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


def duration(text: str) -> float:
    """Parse a duration in seconds: ``5400``, ``90m``, ``1.5h``, ``1:30:00``, or ``2-00:00:00`` with days, as Slurm's.

    Raises:
        BadParameter: it isn't one, or not positive.
    """
    match = re.fullmatch(
        r"(?:(?:([0-9]{1,6})-)?([0-9]{1,6}):)?([0-9]{1,6}):([0-9]{1,6})|([0-9]{1,12}(?:\.[0-9]{1,6})?)([smhd]?)", text
    )
    if match is None:
        raise typer.BadParameter(f"{text!r} is no duration; write seconds, 90m, 12h, 1:30:00 or 2-00:00:00")
    days, hours, minutes, seconds, number, unit = match.groups(default="")
    if number:
        total_s = float(number) * _SECONDS[unit]
    else:
        total_s = ((int(days or 0) * 24 + int(hours or 0)) * 60 + int(minutes)) * 60.0 + int(seconds)
    if total_s <= 0:
        raise typer.BadParameter(f"{text!r} is no time at all")
    return total_s
