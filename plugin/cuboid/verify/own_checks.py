"""What is checked on the sharded side alone, without plain transformers: dropout's masks, and sums in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import set_checkpoint_early_stop

from cuboid.models.architectures.transformers_names import checkpoint_activations, stop_checkpointing
from cuboid.models.certification.sides import run_backward
from cuboid.models.kinds.registry import kind_of
from cuboid.models.pipeline.training_pipeline import Pipeline
from cuboid.models.sharded.sharded_model import mesh_of
from cuboid.verify.masks import MasksByName, compare_masks, probe_masks
from cuboid.verify.plan import Plan
from cuboid.verify.probe import own_modules
from cuboid.verify.sums import probe_sums
from cuboid.verify.task_inputs import run_forward

#: Errors by name, each with the largest that passes.
Errors = dict[str, tuple[float, float]]
Batch = Mapping[str, torch.Tensor]


def check_alone(model: Any, plan: Plan, batch: Batch, pipeline: Pipeline | None = None) -> dict[str, Errors]:
    """The checks by their kind, see :attr:`cuboid.verify.training.RunOutcome.own_checks`. Collective, before any step.

    Args:
        model: on this rank.
        plan: the run that follows.
        batch: one of its micro-batches.
        pipeline: that runs the model, if it is a stage.
    """
    mesh = mesh_of(model)
    kept = probe_masks(own_modules(model), model, lambda: _forwards(model, batch, pipeline, 1))
    # All stages run the same, or none does: most models drop nothing, which one forward shows.
    drops = any(_from_ranks(bool(kept)))
    if drops:
        kept = probe_masks(own_modules(model), model, lambda: _forwards(model, batch, pipeline, 2))
    again: MasksByName = {}
    if drops and model.supports_gradient_checkpointing:
        checkpoint_activations(model, {"use_reentrant": False, "context_fn": plan.recompute_contexts})
        with set_checkpoint_early_stop(False):  # the last masks of a block, too
            again = probe_masks(own_modules(model), model, lambda: _backward(model, batch, pipeline))
        stop_checkpointing(model)
        model.zero_grad()
    errors_by_kind = {"dropout": compare_masks(kept, again, mesh), "sum": probe_sums(model, mesh)}
    return {kind: worst_of_ranks(errors) for kind, errors in errors_by_kind.items()}


def _forwards(model: Any, batch: Batch, pipeline: Pipeline | None, count: int) -> None:
    with torch.no_grad():
        if pipeline is not None:
            pipeline.evaluate(iter([batch] * count), count)
            return
        for _ in range(count):
            run_forward(model, batch)


def _backward(model: Any, batch: Batch, pipeline: Pipeline | None) -> None:
    if pipeline is not None:
        pipeline.train(iter([batch]), 1)
        return
    device = next(model.parameters()).device
    inputs = {name: x.to(device) for name, x in batch.items()}
    run_backward(model, kind_of(type(model), model.config), inputs)


def worst_of_ranks(errors: Errors) -> Errors:
    """Of each name the largest error on any rank, on all ranks. Collective over the world."""
    worst: Errors = {}
    for name, (error, most) in (item for of_rank in _from_ranks(errors) for item in of_rank.items()):
        worst[name] = (max(error, worst.get(name, (0.0, 0.0))[0]), most)
    return worst


def _from_ranks(value: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every
