"""Parameters of a compiled layer: their blocks, which are there before its graph runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cuboid.tensor3d.layers.whole_block import KeptWhole
from cuboid.tensor3d.running_forward import check_called_inside, forward_runs
from cuboid.tensor3d.sharding.sharded_param import ShardedModule


def block_of(module: ShardedModule, name: str) -> torch.Tensor:
    """A parameter's block."""
    # Dynamo can't ask a context variable.
    if not (torch.compiler.is_compiling() or forward_runs()):
        check_called_inside(module, module.mesh)
    parameter: torch.Tensor = module._parameters[name]  # type: ignore[assignment]
    return parameter if module.sharded_params[name].ranks == 1 else module.prefetched_params[name]


@contextmanager
def in_place(modules: Sequence[ShardedModule]) -> Iterator[None]:
    """In the ``with`` block, modules whose own code runs have blocks in the place of their parameters."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in modules:
            for name, param in module.sharded_params.items():
                if param.ranks > 1:
                    block = block_of(module, name)
                    if isinstance(module, KeptWhole):
                        # This many ranks compute the same gradient, and the reduce-scatter sums all of them.
                        block = _Averaged.apply(block, param.mesh.size("sequence", "hidden"))
                    replaced.append((module._parameters, name, module._parameters[name]))
                    module._parameters[name] = block  # type: ignore[assignment]
        yield
    finally:
        for parameters, name, shard in replaced:
            parameters[name] = shard


class _Averaged(torch.autograd.Function):
    """The identity; its backward divides by a number of ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient if ctx.ranks == 1 else gradient / ctx.ranks, None
