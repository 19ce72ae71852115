"""What a trainer's class says, without importing transformers' ``Trainer``, which takes long."""

from __future__ import annotations

from typing import Any


def trainer_of_trl(trainer: type[Any]) -> type[Any] | None:
    """The class of TRL that a trainer is or is derived from; None if there is none."""
    return next((cls for cls in trainer.__mro__ if cls.__module__.partition(".")[0] == "trl"), None)


def is_cuboid_trainer(trainer: type[Any]) -> bool:
    """Whether a trainer is a :class:`~cuboid.integrations.trainer.CuboidTrainer`."""
    return any(cls.__module__ == "cuboid.integrations.trainer" for cls in trainer.__mro__)
