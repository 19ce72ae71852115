"""Errors for the user to fix. Each message names the key or tensor, the reason, and what would work."""

from __future__ import annotations

from pathlib import Path
from typing import Self


class CuboidError(ValueError):
    """Base class. Raised before process groups are created or memory is allocated, if the cause can be found by then.

    Attributes:
        rank: the rank on which it arose; None if all ranks find the same error, which is then printed once.
        shared: whether all ranks raise it already, so that it needn't be reported to the others.
    """

    rank: int | None = None
    shared: bool = False

    def arising_on(self, rank: int) -> Self:
        """Set :attr:`rank` unless it is set already; returns the error itself."""
        if self.rank is None:
            self.rank = rank
        return self


class ConfigError(CuboidError):
    """A key of the configuration is unknown, malformed, or doesn't fit the world or the framework."""


class MeshError(CuboidError):
    """The mesh doesn't divide the model or the world."""


class UnsupportedModelError(CuboidError):
    """A module, an option of the model, or an argument of its forward isn't supported yet."""


class OptimizerError(CuboidError):
    """An optimizer can't step on a rank's shards as it would on the full model, or isn't one of this model."""


class CheckpointError(CuboidError):
    """A checkpoint can't be read or written, or doesn't fit the model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's files aren't what was written.

    Attributes:
        intact: the newest intact checkpoint beside it; None if there is none.
    """

    def __init__(self, message: str, intact: Path | None) -> None:
        super().__init__(message)
        self.intact = intact


class RankError(CuboidError):
    """A rank failed with an error that isn't the user's; on that rank, it is chained as ``__cause__``."""


class PeerLostError(CuboidError):
    """Another rank exited, or didn't reach a rendezvous in time; its own output says why."""
