"""Collectives along mesh axes inside of a compiled graph, differentiable; along axes of one rank, the input itself.

They are torch's functional collectives, which Inductor schedules, and whose transposes it differentiates.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from cuboid.distributed.mesh import AxisGroup

# torch 2.13 warns of the older names, which are all that earlier versions have.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def _group(along: AxisGroup) -> dist.ProcessGroup:
    assert along.process_group is not None, "a mesh that isn't connected"
    return along.process_group


def gather(x: torch.Tensor, dim: int, along: AxisGroup) -> torch.Tensor:
    """All-gather along a dim: ``[..., n, ...]`` on each rank to ``[..., ranks·n, ...]``."""
    if along.size == 1:
        return x
    dim = dim % x.dim()
    parts = torch.unflatten(_all_gather(x, 0, _group(along)), 0, (along.size, x.shape[0]))
    # No copy where all dims before it have one element, such as that of a single row.
    return torch.flatten(torch.movedim(parts, 0, dim), dim, dim + 1)


def scatter(x: torch.Tensor, dim: int, along: AxisGroup) -> torch.Tensor:
    """Reduce-scatter along a dim: partial sums ``[..., ranks·n, ...]`` to a slice of the sum, ``[..., n, ...]``."""
    if along.size == 1:
        return x
    return cast(torch.Tensor, _reduce_scatter(x, "sum", dim % x.dim(), _group(along)))


def sum_over(x: torch.Tensor, along: AxisGroup) -> torch.Tensor:
    """All-reduce of partial sums. Each rank uses them for what is its own, so that the backward is the same sum."""
    return x if along.size == 1 else functional.all_reduce(x, "sum", _group(along))
