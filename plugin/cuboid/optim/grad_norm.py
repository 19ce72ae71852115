"""The norm of a gradient that is sharded over ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from cuboid.errors import CuboidError


def total_norm(
    gradients: Sequence[torch.Tensor],
    groups: Iterable[dist.ProcessGroup],
    norm_type: float,
    like: torch.Tensor,
) -> torch.Tensor:
    """The norm of all ranks' gradients as one vector. Collective over the groups.

    Args:
        gradients: this rank's; no other rank of the groups may have the same elements.
        groups: over which the gradient is sharded; reduced one after the other.
        norm_type: the p of the p-norm; infinity for the largest absolute value.
        like: a tensor of the model's dtype on its device.

    Returns:
        A tensor without dims, the same on all ranks; in float64 for a model in float64, else in float32.

    Raises:
        CuboidError: ``norm_type`` isn't that of a norm.
    """
    if not norm_type > 0:
        raise CuboidError(f"norm_type={norm_type}: a norm's is above 0, such as 2.0, or 'inf' for the largest element")
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=dtype) for gradient in gradients if gradient.numel()]
    own_norms = torch.stack(norms) if norms else torch.zeros(1, dtype=dtype, device=like.device)
    largest = math.isinf(norm_type)
    total = own_norms.max() if largest else own_norms.pow(norm_type).sum()
    for group in groups:
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return total if largest else total.pow(1.0 / norm_type)


def scale_to(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients of a given norm to ``max_norm`` if it is larger, as ``torch.nn.utils.clip_grad_norm_`` does."""
    # Computed on the device: an ``if`` on the norm would make the host wait for it.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
