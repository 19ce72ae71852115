"""Are sums of 16-bit numbers over ranks rounded once?

A sum that is passed on in bfloat16 from rank to rank is rounded at each of them. Among the rounding of a whole step
that can't be told apart, so the model's own reductions are given numbers whose exact sum is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from cuboid.distributed.axis_collectives import reduce_scatter
from cuboid.distributed.mesh import AxisGroup, Mesh
from cuboid.distributed.topology import AXES
from cuboid.tensor3d.sharding.bucketing import start_reduce_scatters
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, ShardedParam

_DTYPE = torch.bfloat16
#: Half of the distance between neighbours, relative to a number: what one rounding changes.
_ROUNDING = torch.finfo(_DTYPE).eps / 2
#: What adding in float32 may change, relative to the sum of the absolute values.
_WIDE = 2.0**-20
_COLUMNS = 64


def probe_sums(model: nn.Module, mesh: Mesh) -> dict[str, tuple[float, float]]:
    """Reduce known numbers as gradients of weights, and as partial sums of activations. Collective over the mesh.

    Returns:
        By what was summed, the error on this rank in units of the largest that the roundings explain, and 1.
    """
    errors, device = {}, next(model.parameters()).device
    for axes, param in _distinct(model):
        blocks = [_numbers(param.block_shape, number, device) for number in range(param.ranks)]
        index = param.along.index
        exact = torch.stack([param.stacked(block)[index].double() for block in blocks])
        roundings = 1 if _exchanges(param) else param.ranks - 1
        # Alone, and in a bucket with another.
        for count, bucket in ((1, ""), (2, ", in a bucket")):
            reducing = start_reduce_scatters([param] * count, [blocks[index].clone() for _ in range(count)])
            excess = max(_excess(reduction.wait(), exact, roundings) for reduction in reducing)
            errors[f"gradients over {axes}{bucket}"] = (excess, 1.0)
    for axis in AXES:
        along = mesh.along(axis)
        if along.size > 1:
            wholes = [_numbers((along.size, _COLUMNS), number, device) for number in range(along.size)]
            exact = torch.stack([piece[along.index].double() for piece in wholes])
            scattered = reduce_scatter(wholes[along.index].clone(), along)
            roundings = 1 if _is_exchanged(along) else along.size - 1
            errors[f"partial sums over {axis}"] = (_excess(scattered, exact, roundings), 1.0)
    return errors


def _distinct(model: nn.Module) -> Iterator[tuple[str, ShardedParam]]:
    """One parameter for each set of axes, among those that are summed over several ranks."""
    seen: set[tuple[str, ...]] = set()
    for module in model.modules():
        for param in module.sharded_params.values() if isinstance(module, ShardedModule) else ():
            axes = tuple(axis for axis in param.spec.fsdp_axes if param.mesh.size(axis) > 1)
            if axes and axes not in seen:
                seen.add(axes)
                yield " × ".join(axes), param


def _numbers(shape: tuple[int, ...], rank: int, device: torch.device) -> torch.Tensor:
    """The numbers of a rank, known to all: large ones that cancel out in part, so that a rounding on the way shows."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).to(device, _DTYPE)


def _exchanges(param: ShardedParam) -> bool:
    return param.exchanges or _is_exchanged(param.along)


def _is_exchanged(along: AxisGroup) -> bool:
    """Whether ranks exchange what they add, whatever a reduction asks for."""
    return along.process_group is None or dist.get_backend(along.process_group) == "gloo"


def _excess(result: torch.Tensor, terms: torch.Tensor, roundings: int) -> float:
    """The largest error, over what so many roundings explain: the last of the sum, earlier ones of sums on the way."""
    exact, total = terms.sum(0), terms.abs().sum(0)
    explained = _ROUNDING * (exact.abs() + (roundings - 1) * total) + _WIDE * total
    excess = float(((result.double().view_as(exact) - exact).abs() / explained.clamp(min=1e-30)).max())
    return excess if math.isfinite(excess) else math.inf
