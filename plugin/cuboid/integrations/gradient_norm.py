"""The norm of gradients that a script takes by torch's functions, of which a rank has shards only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES
from cuboid.errors import CuboidError
from cuboid.models.sharded.sharded_model import sharded_models
from cuboid.optim.grad_norm import total_norm
from cuboid.optim.taken_gradients import readable


@torch.no_grad()
def norm_over_ranks(
    gradients: Sequence[torch.Tensor], norm_type: float, norm_of: Callable[[Sequence[torch.Tensor]], torch.Tensor]
) -> torch.Tensor | None:
    """The norm of gradients as one vector, those of sharded models whole; None if there are none of these.

    Collective over the ranks of such a model, whether or not this rank's stages have gradients.

    Args:
        gradients: any tensors; the ``.grad`` of a sharded model's parameters are the shards of theirs.
        norm_type: the p of the p-norm.
        norm_of: torch's norm of tensors that are whole.

    Raises:
        CuboidError: this rank's stages have no gradients, and it isn't known which model's norm the others take; or the
            gradients are an optimizer's, which hasn't reduced them or has them elsewhere.
    """
    check_reduced(gradients, "clip_grad_norm_ (get_total_norm) of torch")
    norms, rest, waiting = [], {id(x): x for x in gradients}, {}
    for model in sharded_models():
        mesh = model.cuboid.mesh
        if len(mesh.copy_ranks) == 1:
            continue
        with readable(model.parameters()):
            shards = {id(p.grad) for p in model.parameters() if p.grad is not None and id(p.grad) in rest}
        if not shards:
            if mesh.topology.pipe > 1:
                waiting[tuple(mesh.copy_ranks)] = model
            continue
        # In a pipeline, the last stage may have a tied weight that the first one counts.
        counted = [p.grad for p in model.counted_parameters() if id(p.grad) in shards]
        norms.append(_norm_of_copy(model, counted, norm_type))
        rest = {key: x for key, x in rest.items() if key not in shards}
    if not gradients and waiting:
        if len(waiting) > 1:
            raise CuboidError(
                "a norm of gradients is taken on stages that have none, and there are several models whose norm the "
                "other stages may take; clip by the config's gradient_clipping"
            )
        (model,) = waiting.values()
        norms.append(_norm_of_copy(model, [], norm_type))
    if not norms:
        return None
    if rest:
        norms.append(norm_of(list(rest.values())).to(norms[0]))
    stacked = torch.stack(norms)
    norm = stacked.max() if math.isinf(norm_type) else torch.linalg.vector_norm(stacked, norm_type)
    return norm.to(gradients[0].dtype) if gradients else norm


def check_reduced(gradients: Sequence[torch.Tensor], call: str) -> None:
    """Check that gradients of sharded models are what their optimizers step on, where these keep them elsewhere.

    Raises:
        CuboidError: they aren't; names ``call``, by which a script looks at them.
    """
    ids = {id(gradient) for gradient in gradients}
    for model in sharded_models():
        owner = None if model.cuboid.state.optimizer is None else model.cuboid.state.optimizer()
        if owner is None or not owner.is_of(model):
            continue
        parameters = [*model.parameters(), *owner.parameters]
        with readable(parameters):
            # In bf16 there are none in ``.grad`` of the model's.
            looks = not ids or any(id(parameter.grad) in ids for parameter in parameters)
        if looks:
            owner.check_gradients(call)


def _norm_of_copy(model: Any, gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    mesh: Mesh = model.cuboid.mesh
    groups = [mesh.along(*AXES).process_group] if mesh.shape.size > 1 else []
    if mesh.topology.pipe > 1:
        groups.append(mesh.pipe_group)
    assert None not in groups, "a mesh that isn't connected"
    return total_norm(gradients, filter(None, groups), norm_type, next(model.parameters()))
