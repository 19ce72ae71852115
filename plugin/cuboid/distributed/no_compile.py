"""Exclusions from ``torch.compile``: in whole layers, it compiles only the code between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., object])


def uncompiled(function: F) -> F:
    """Run uncompiled, also inside a compiled layer: for collectives, and for hooks that start and wait for them."""
    return cast(F, torch.compiler.disable(function))
