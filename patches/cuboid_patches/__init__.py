"""All of Cuboid's patches of other packages; nothing outside this package assigns to a foreign attribute."""

from __future__ import annotations

from cuboid_patches import accelerate, deepspeed, interpreter, peft, transformers

_ALL = [*transformers.PATCHES, *accelerate.PATCHES, *peft.PATCHES, *deepspeed.PATCHES, *interpreter.PATCHES]


def register() -> None:
    """Apply all patches, so that frameworks accept Cuboid's keys. ``import cuboid`` calls it; more calls do nothing."""
    for patch in _ALL:
        patch.apply()


def unregister() -> None:
    """Restore all patched packages exactly as they were. Sharded models can't run before another :func:`register`."""
    for patch in reversed(_ALL):
        patch.revert()
