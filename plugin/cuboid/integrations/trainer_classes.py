"""What a trainer's class says, without importing transformers' ``Trainer``, which takes long."""

from __future__ import annotations

import sys
from typing import Any


def trainer_of_trl(trainer: type[Any]) -> type[Any] | None:
    """The class of TRL that a trainer is or is derived from; None if there is none."""
    return next((cls for cls in trainer.__mro__ if cls.__module__.partition(".")[0] == "trl"), None)


def name_in_trl(of_trl: type[Any]) -> str:
    """The name of a class of TRL; with its module, if it is an experimental one, which may have another's name."""
    name, module = of_trl.__name__, of_trl.__module__
    is_other = module.startswith("trl.experimental.") and getattr(sys.modules.get("trl"), name, None) is not of_trl
    return f"{module}.{name}" if is_other else name


def is_cuboid_trainer(trainer: type[Any]) -> bool:
    """Whether a trainer is a :class:`~cuboid.integrations.trainer.CuboidTrainer`."""
    return any(cls.__module__ == "cuboid.integrations.trainer" for cls in trainer.__mro__)
