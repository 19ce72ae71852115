"""The outputs of a model's modules, so that a difference can be traced to where it begins."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from cuboid.distributed.topology import Coordinate, MeshShape
from cuboid.models.pipeline.pipeline import Pipeline
from cuboid.models.stages.stage_model import StageModel, Staging

#: Outputs by module, one for each call: a whole sequence's, or one segment's after the other.
Outputs = dict[str, list[torch.Tensor]]
#: Of elements that dropout keeps while it is looked at.
HALF = 0.5


def probe(model: Any, batch: Mapping[str, torch.Tensor]) -> tuple[Outputs, torch.Tensor]:
    """Run a micro-batch in evaluation.

    Returns:
        The three-dimensional output of every module that has one, this process's part of it, in forward order; and the
        logits.
    """
    with _evaluation(model), torch.no_grad(), _captured(model.named_modules()) as outputs:
        logits = run_forward(model, batch).logits
    # A module that is called again has begun something else.
    return {name: calls[:1] for name, calls in outputs.items()}, logits.cpu()


def run_forward(model: Any, batch: Mapping[str, torch.Tensor]) -> Any:
    """A forward without labels."""
    device = next(model.parameters()).device
    inputs = {name: x.to(device) for name, x in batch.items() if name != "labels"}
    return model(**inputs, use_cache=False)


def probe_stage(pipeline: Pipeline, model: Any, batch: Mapping[str, torch.Tensor]) -> Outputs:
    """Like :func:`probe`, of one stage of a pipeline, without logits: segment after segment. Collective."""
    with _evaluation(model), _captured(_own_modules(model, model.staging)) as outputs:
        pipeline.evaluate(iter([batch]), 1)
    return outputs


def _own_modules(model: nn.Module, staging: Staging) -> Iterator[tuple[str, nn.Module]]:
    """Those that compute on this stage what they compute in a whole model."""
    outline, cut = staging.outline, staging.cut
    roots = [outline.layer(index) for index in range(cut.first, cut.stop)]
    roots += outline.before if cut.is_first else ()
    roots += outline.after if cut.is_last else ()
    for name, module in model.named_modules():
        if any(name == root or name.startswith(f"{root}.") for root in roots):
            yield name, module


def probe_dropout(model: nn.Module, run: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """What dropout keeps on this rank, in a training forward for which all ranks were seeded alike.

    Args:
        model: whose ``nn.Dropout`` modules drop half for this once.
        run: the forward.

    Returns:
        For each such module that ran, which elements of its output it kept, flattened.
    """
    own = _own_modules(model, model.staging) if isinstance(model, StageModel) else model.named_modules()
    drops = {name: module for name, module in own if isinstance(module, nn.Dropout)}
    rates = {name: module.p for name, module in drops.items()}
    kept: dict[str, torch.Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            kept.setdefault(name, (output.detach() != 0).flatten().cpu())

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in drops.items()]
    was_training = model.training
    model.train()
    for module in drops.values():
        module.p = HALF
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            run()
    finally:
        model.train(was_training)
        for name, module in drops.items():
            module.p = rates[name]
        for hook in hooks:
            hook.remove()
    return kept


def likeness(masks: Sequence[torch.Tensor]) -> tuple[float, float]:
    """How far what ranks keep is from chance, 1 for equal masks or none at all, and how far chance may bring it."""
    deviations = [abs(mask.double().mean().item() - HALF) / HALF for mask in masks]
    for one, other in combinations(masks, 2):
        if one.shape == other.shape:
            deviations.append(abs((one == other).double().mean().item() - HALF) / HALF)
    return max(deviations), 6 / math.sqrt(min(mask.numel() for mask in masks))


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
    hooks = [_capture(module, name, outputs) for name, module in modules if name]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _capture(module: nn.Module, name: str, outputs: Outputs) -> RemovableHandle:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor) and first.dim() == 3 and first.is_floating_point():
            outputs.setdefault(name, []).append(first.detach().cpu())

    return module.register_forward_hook(hook)


def residual_part(outputs: Outputs, shape: MeshShape, batch: int, length: int, hidden: int) -> Outputs:
    """Those outputs that may be a rank's ``[B/b, S'/s, H/h]`` part of the residual stream, S' ≥ S."""

    def fits(calls: list[torch.Tensor]) -> bool:
        tokens = sum(x.shape[1] for x in calls) * shape.sequence
        return tokens >= length and all(
            x.shape[0] * shape.batch == batch and x.shape[2] * shape.hidden == hidden for x in calls
        )

    return {name: calls for name, calls in outputs.items() if fits(calls)}


def assemble(parts: Sequence[torch.Tensor], at: Sequence[Coordinate], shape: MeshShape) -> torch.Tensor:
    """Whole ``[B, S', H]`` from the parts of the ranks of a mesh that stand at the coordinates ``at``."""
    by_place = {(c.batch, c.sequence, c.hidden): part for c, part in zip(at, parts, strict=True)}

    def row(batch: int, sequence: int) -> torch.Tensor:
        return torch.cat([by_place[batch, sequence, hidden] for hidden in range(shape.hidden)], dim=2)

    def rows(batch: int) -> torch.Tensor:
        return torch.cat([row(batch, sequence) for sequence in range(shape.sequence)], dim=1)

    return torch.cat([rows(batch) for batch in range(shape.batch)], dim=0)
