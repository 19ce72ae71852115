"""All patches, in the order in which they are applied. Importing this imports what they stand on: torch and more."""

from __future__ import annotations

from cuboid_patches import accelerate, deepspeed, gradients, interpreter, peft, transformers, trl
from cuboid_patches.base import Patch
from cuboid_patches.deepspeed import SharedMemoryBuild

PATCHES: list[Patch | SharedMemoryBuild] = [
    *transformers.PATCHES,
    *accelerate.PATCHES,
    *peft.PATCHES,
    *trl.PATCHES,
    *deepspeed.PATCHES,
    *gradients.PATCHES,
    *interpreter.PATCHES,
]
