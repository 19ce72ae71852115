"""Errors for the user to fix. Each message says which key or tensor, why, and what would work."""

from __future__ import annotations

from pathlib import Path
from typing import Self


class CuboidError(ValueError):
    """Base class. Raised before any process group or allocation wherever the cause can be known then.

    Attributes:
        rank: where it arose; None for what all ranks find alike, which is then said once.
        shared: whether all ranks raise it, so that nobody has to be told any more.
    """

    rank: int | None = None
    shared: bool = False

    def arising_on(self, rank: int) -> Self:
        """The same error, as one that arose on this rank alone, unless it has a rank."""
        if self.rank is None:
            self.rank = rank
        return self


class ConfigError(CuboidError):
    """A key of the configuration is unknown, malformed, or doesn't fit the world or the framework."""


class MeshError(CuboidError):
    """The mesh doesn't divide the model or the world."""


class UnsupportedModelError(CuboidError):
    """A module, an option of the model, or an argument of its forward has no rule yet."""


class OptimizerError(CuboidError):
    """An optimizer can't step on what a rank holds as it would on the whole model, or isn't the model's."""


class CheckpointError(CuboidError):
    """A checkpoint lacks a tensor, or holds one that doesn't fit."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint isn't what was written.

    Attributes:
        whole: the newest one beside it that is; None where there is none.
    """

    def __init__(self, message: str, whole: Path | None) -> None:
        super().__init__(message)
        self.whole = whole


class RankError(CuboidError):
    """An error that isn't the user's stopped a rank; there, it is the cause of this one."""


class PeerLostError(CuboidError):
    """Another rank went away, or didn't come; its own message says why."""
