"""A tied parameter has a copy on the first and on the last stage, of which a script may change one alone.

Training keeps the copies alike: they have the same summed gradient. But the head is on the last stage only, so that
what a script does to it leaves the first stage's copy as it is; and random numbers that it draws may differ by stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError
from cuboid.models.stages.stage_cut import half_frozen

#: How many elements of each row are compared. What changes a token's row, or all of them, changes these.
_COLUMNS = 4
#: How far an element of one copy may be from the other's, relative to it and to the root mean square: kernels may round
#: an element in another way at the end of a flat tensor than inside it, in each step.
_TOLERANCE, _OF_ALL = 2**-6, 1e-3
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_ties(
    names: Sequence[str], held: Mapping[str, nn.Parameter], mesh: Mesh, device: torch.device, *, training: bool
) -> None:
    """Check that both copies of each tied parameter have the same values, and are both trained or both frozen.

    Collective over the pipeline.

    Args:
        names: of the parameters that the first and the last stage both have.
        held: this rank's copies, if it has one of these stages.
        mesh: this rank's.
        device: of the model.
        training: whether a step is about to begin.

    Raises:
        ConfigError: on all ranks of the pipeline, if one copy is frozen and the other is to be trained.
        CuboidError: likewise, if one has other values.
    """
    ends = (mesh.placement[0], mesh.placement[-1])
    if not names or ends[0] == ends[1]:
        return
    facts = torch.zeros((2, 2, len(names)), dtype=torch.int64, device=device)
    if mesh.coordinate.pipe in ends:
        of_this_end = facts[ends.index(mesh.coordinate.pipe)]
        of_this_end[0] = torch.tensor([held[name].requires_grad for name in names], device=device)
        of_this_end[1] = torch.stack([_checksum(_sample(held[name])) for name in names])
    dist.all_reduce(facts, group=mesh.pipe_group)
    (trains_first, sum_first), (trains_last, sum_last) = facts.tolist()
    for index, name in enumerate(names):
        if training and trains_first[index] != trains_last[index]:
            raise half_frozen(name, trains_first=bool(trains_first[index]))
        if sum_first[index] != sum_last[index]:
            _check_close(name, held.get(name), mesh, device)


def _sample(parameter: nn.Parameter) -> torch.Tensor:
    rows = parameter.detach().flatten(1) if parameter.dim() > 1 else parameter.detach()[:, None]
    return rows[:, :: max(1, rows.shape[1] // _COLUMNS)]


def _checksum(values: torch.Tensor) -> torch.Tensor:
    bits = values.contiguous().view(_BITS[values.element_size()]).flatten().long()
    # Odd factors, by which no bit is lost, tell values in another order.
    return (bits * (torch.arange(len(bits), device=bits.device) * 2 + 1)).sum()


def _check_close(name: str, parameter: nn.Parameter | None, mesh: Mesh, device: torch.device) -> None:
    """Raise an error unless two copies that aren't bitwise equal differ by rounding only."""
    excess = torch.zeros((), dtype=torch.float64, device=device)
    if parameter is not None:
        sample = _sample(parameter).double()
        both = torch.zeros((2, *sample.shape), dtype=torch.float64, device=device)
        both[0 if mesh.has_first_stage else 1] = sample
        dist.all_reduce(both, group=mesh.channel(0, len(mesh.placement) - 1))
        first, last = both
        allowed = _TOLERANCE * first.abs() + _OF_ALL * first.square().mean().sqrt()
        excess = ((first - last).abs() - allowed).max()
    dist.all_reduce(excess, dist.ReduceOp.MAX, group=mesh.pipe_group)
    if float(excess) > 0:
        raise CuboidError(
            f"{name} is tied to a parameter of the last stage, and the two stages' copies of it have become different: "
            "a script changed one of them, such as through the head, of which other stages have a placeholder, or drew "
            "random numbers for each. Change both alike: through model.get_input_embeddings(), or by the name in "
            "model.named_parameters(), which both stages have; and draw after torch.manual_seed with the same number "
            "for each parameter"
        )
