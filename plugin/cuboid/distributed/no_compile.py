"""What ``torch.compile`` is to leave alone: it compiles what is between, of layers that it is given whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., object])


def uncompiled(function: F) -> F:
    """Run as it is inside a compiled layer too: for collectives, and for hooks that start and await them."""
    return cast(F, torch.compiler.disable(function))
