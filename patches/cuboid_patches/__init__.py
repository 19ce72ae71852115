"""All that Cuboid changes in other people's code; nothing outside this package assigns to a foreign attribute."""

from __future__ import annotations

from cuboid_patches import accelerate, deepspeed, interpreter, peft, transformers

_ALL = [*transformers.PATCHES, *accelerate.PATCHES, *peft.PATCHES, *deepspeed.PATCHES, *interpreter.PATCHES]


def register() -> None:
    """Make DeepSpeed and transformers understand Cuboid's keys. ``import cuboid`` does it; twice is once."""
    for patch in _ALL:
        patch.apply()


def unregister() -> None:
    """Restore both exactly as they were. Sharded models that exist go on working."""
    for patch in reversed(_ALL):
        patch.revert()
