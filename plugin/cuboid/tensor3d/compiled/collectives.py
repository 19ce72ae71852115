"""Collectives along mesh axes inside of a compiled graph, differentiable; along axes of one rank, the input itself.

They are torch's functional collectives, which Inductor schedules, and whose transposes it differentiates.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from cuboid.distributed.mesh import AxisGroup


def _group(along: AxisGroup) -> dist.ProcessGroup:
    assert along.process_group is not None, "a mesh that isn't connected"
    return along.process_group


def gather(x: torch.Tensor, dim: int, along: AxisGroup) -> torch.Tensor:
    """All-gather along a dim: ``[..., n, ...]`` on each rank to ``[..., ranks·n, ...]``."""
    if along.size == 1:
        return x
    return cast(torch.Tensor, functional.all_gather_single_autograd(x, dim % x.dim(), _group(along)))


def scatter(x: torch.Tensor, dim: int, along: AxisGroup) -> torch.Tensor:
    """Reduce-scatter along a dim: partial sums ``[..., ranks·n, ...]`` to a slice of the sum, ``[..., n, ...]``."""
    if along.size == 1:
        return x
    return cast(torch.Tensor, functional.reduce_scatter_single_autograd(x, "sum", dim % x.dim(), _group(along)))


def sum_over(x: torch.Tensor, along: AxisGroup) -> torch.Tensor:
    """All-reduce of partial sums. Each rank uses them for what is its own, so that the backward is the same sum."""
    return x if along.size == 1 else functional.all_reduce(x, "sum", _group(along))
