"""The functions by which Cuboid starts collectives, for proofs that put others in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from cuboid.distributed import collectives


@contextmanager
def replaced_collectives(
    gather: Callable[..., Any],
    reduce_scatter: Callable[..., Any],
    all_to_all: Callable[..., Any],
    all_reduce: Callable[..., Any],
) -> Iterator[None]:
    """Inside, these are called for all collectives of a mesh."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_gather", gather)
        patch.setattr(collectives, "_reduce_scatter", reduce_scatter)
        patch.setattr(dist, "all_to_all_single", all_to_all)
        patch.setattr(dist, "all_reduce", all_reduce)
        yield
