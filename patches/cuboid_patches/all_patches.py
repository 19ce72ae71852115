"""All patches, in the order in which they are applied. Importing this imports what they stand on: torch and more."""

from __future__ import annotations

from cuboid_patches import accelerate, colossalai, deepspeed, interpreter, peft, torch_loops, transformers, trl
from cuboid_patches.base import Patch
from cuboid_patches.deepspeed import SharedMemoryBuild
from cuboid_patches.torch_loops import StepCheck

PATCHES: list[Patch | SharedMemoryBuild | StepCheck] = [
    *transformers.PATCHES,
    *accelerate.PATCHES,
    *peft.PATCHES,
    *trl.PATCHES,
    *colossalai.PATCHES,
    *deepspeed.PATCHES,
    *torch_loops.PATCHES,
    *interpreter.PATCHES,
]
