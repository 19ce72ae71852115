"""All that Cuboid changes in other people's code; nothing outside this package assigns to a foreign attribute."""

from __future__ import annotations

import sys
from typing import Any

from cuboid.patches import accelerate, deepspeed, interpreter, transformers

_ALWAYS = [*transformers.PATCHES, *accelerate.PATCHES, *deepspeed.PATCHES, *interpreter.PATCHES]


def _all() -> list[Any]:
    # ColossalAI is imported, and mended, only where somebody uses its plugin.
    colossalai = sys.modules.get(f"{__name__}.colossalai")
    return [*_ALWAYS, *(colossalai.PATCHES if colossalai else ())]


def register() -> None:
    """Make DeepSpeed and transformers understand Cuboid's keys. ``import cuboid`` does it; twice is once."""
    for patch in _all():
        patch.apply()


def unregister() -> None:
    """Restore both exactly as they were. Sharded models that exist go on working."""
    for patch in reversed(_all()):
        patch.revert()
