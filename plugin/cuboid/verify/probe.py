"""Capture the outputs of a model's modules, so that a difference can be traced to the first module that has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from cuboid.distributed.topology import Coordinate, MeshShape
from cuboid.models.pipeline.training_pipeline import Pipeline
from cuboid.models.stages.stage_model import StageModel
from cuboid.verify.task_inputs import run_forward

NamedTensors = dict[str, torch.Tensor]
#: Outputs by module, one for each call: a single one for the full sequence, or one for each segment.
Outputs = dict[str, list[torch.Tensor]]


def probe(model: Any, batch: Mapping[str, torch.Tensor]) -> tuple[Outputs, NamedTensors]:
    """Run a micro-batch in evaluation mode.

    Returns:
        This rank's part of the output of every module with a three-dimensional one, in forward order; and the model's
        own outputs by name, such as logits.
    """
    with _evaluation(model), torch.no_grad(), _captured(model.named_modules()) as outputs:
        predictions = run_forward(model, batch)
    # If a module is called several times, such as a shared one, only the first call is compared.
    return {name: calls[:1] for name, calls in outputs.items()}, {name: x.cpu() for name, x in predictions.items()}


def probe_stage(pipeline: Pipeline, model: Any, batch: Mapping[str, torch.Tensor]) -> Outputs:
    """Like :func:`probe`, for one stage of a pipeline, by segments and without logits. Collective."""
    staging = model.staging
    with _evaluation(model), _captured(own_modules(model)) as outputs:
        pipeline.evaluate(iter([batch]), 1)
    layers = [staging.plan.outline.layer(index) for cut in staging.plan.cuts for index in range(cut.first, cut.stop)]
    segments = max((len(outputs.get(name, ())) for name in layers), default=0)
    # Leaves out modules that are called several times per segment: their calls can't be assigned to segments.
    return {name: calls for name, calls in outputs.items() if len(calls) <= segments}


def own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that run here; of a stage, those whose outputs are the same as in a full model."""
    if not isinstance(model, StageModel):
        yield from model.named_modules()
        return
    staging = model.staging
    outline, roots, others = staging.plan.outline, set[str](), set[str]()
    for cut in staging.plan.cuts:
        others.update(cut.absent_branches(outline))
        if cut.ends_inside:
            # What it returns is between its halves. The next stage's is the layer's.
            others.add(outline.layer(cut.stop - 1))
        roots.update(map(outline.layer, range(cut.first, cut.stop)))
        roots.update(outline.before if cut.is_first else (), outline.after if cut.is_last else ())
    for name, module in model.named_modules():
        if name not in others and any(name == root or name.startswith(f"{root}.") for root in roots):
            yield name, module


@contextlib.contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextlib.contextmanager
def _captured(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[Outputs]:
    outputs: Outputs = {}
    # Factors of adapters are cut in another way than what goes from layer to layer.
    hooks = [_capture(module, name, outputs) for name, module in modules if name and ".lora_" not in name]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _capture(module: nn.Module, name: str, outputs: Outputs) -> RemovableHandle:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor) and first.dim() == 3 and first.is_floating_point():
            # A copy: Falcon adds attention to its MLP's output in place.
            outputs.setdefault(name, []).append(first.detach().to("cpu", copy=True))

    return module.register_forward_hook(hook)


def residual_part(outputs: Outputs, shape: MeshShape, batch: int, length: int, hidden: int) -> Outputs:
    """The outputs that have the shape of a rank's part of the residual stream: ``[B/b, S'/s, H/h]`` with S' ≥ S."""

    def fits(calls: list[torch.Tensor]) -> bool:
        tokens = sum(x.shape[1] for x in calls) * shape.sequence
        # Inside a block that every rank computes as a whole, each rank has the full sequence.
        is_whole = shape.sequence > 1 and tokens >= shape.sequence * length
        return (
            tokens >= length
            and not is_whole
            and all(x.shape[0] * shape.batch == batch and x.shape[2] * shape.hidden == hidden for x in calls)
        )

    return {name: calls for name, calls in outputs.items() if fits(calls)}


def assemble(parts: Sequence[torch.Tensor], at: Sequence[Coordinate], shape: MeshShape) -> torch.Tensor:
    """The full ``[B, S', H]`` tensor from the parts of a mesh's ranks, whose coordinates are ``at``."""
    by_place = {(c.batch, c.sequence, c.hidden): part for c, part in zip(at, parts, strict=True)}
    rows = []
    for batch in range(shape.batch):
        columns = [
            torch.cat([by_place[batch, sequence, hidden] for hidden in range(shape.hidden)], dim=2)
            for sequence in range(shape.sequence)
        ]
        rows.append(torch.cat(columns, dim=1))
    return torch.cat(rows, dim=0)
