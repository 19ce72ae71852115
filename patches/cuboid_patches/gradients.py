"""Patches of torch's norms of gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from cuboid.integrations.gradient_norm import norm_over_ranks
from cuboid_patches.base import Patch


def _total_norm(original: Any) -> Any:
    @functools.wraps(original)
    def get_total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        norm = norm_over_ranks(gradients, float(norm_type), lambda x: original(x, norm_type, foreach=foreach))
        if norm is None:
            norm = original(gradients, norm_type, error_if_nonfinite, foreach)
        elif error_if_nonfinite and not norm.isfinite():
            # Torch's own words, of a norm that isn't finite.
            original([norm], norm_type, error_if_nonfinite=True)
        return norm

    return get_total_norm


PATCHES = [
    Patch(
        # clip_grad_norm_, from wherever a script has it, looks the first one up when it is called.
        target=target,
        package="torch",
        reason="take the norm of whole gradients where a rank has shards of them, or ranks would clip by other norms",
        parameters=("tensors", "norm_type", "error_if_nonfinite", "foreach"),
        replace=_total_norm,
    )
    for target in ("torch.nn.utils.clip_grad:_get_total_norm", "torch.nn.utils:get_total_norm")
]
