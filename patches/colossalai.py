"""What Cuboid changes in ColossalAI, and what it adds: a plugin for its ``Booster``."""

from __future__ import annotations

from cuboid.patches.base import Patch
from cuboid.patches.colossalai_plugin import CuboidPlugin

__all__ = ["PATCHES", "CuboidPlugin"]

PATCHES: list[Patch] = []
