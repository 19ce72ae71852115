"""The outputs of a model's modules, so that a difference can be traced to where it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from cuboid.topology import Coordinate, MeshShape
from cuboid.verify.training import Tensors


def probe(model: Any, batch: Mapping[str, torch.Tensor]) -> tuple[Tensors, torch.Tensor]:
    """Run a micro-batch in evaluation.

    Returns:
        The three-dimensional output of every module that has one, this process's part of it, in forward order; and the
        logits.
    """
    captured: Tensors = {}
    hooks = [_capture(module, name, captured) for name, module in model.named_modules() if name]
    was_training = model.training
    device = next(model.parameters()).device
    inputs = {name: x.to(device) for name, x in batch.items() if name != "labels"}
    try:
        model.eval()
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return captured, logits.cpu()


def _capture(module: nn.Module, name: str, captured: Tensors) -> RemovableHandle:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor) and first.dim() == 3 and first.is_floating_point() and name not in captured:
            captured[name] = first.detach().cpu()

    return module.register_forward_hook(hook)


def residual_part(activations: Tensors, shape: MeshShape, batch: int, length: int, hidden: int) -> Tensors:
    """Those activations that may be a rank's ``[B/b, S'/s, H/h]`` part of the residual stream, S' ≥ S."""

    def fits(x: torch.Tensor) -> bool:
        rows, tokens, width = x.shape
        return rows * shape.batch == batch and tokens * shape.sequence >= length and width * shape.hidden == hidden

    return {name: x for name, x in activations.items() if fits(x)}


def assemble(parts: Sequence[torch.Tensor], at: Sequence[Coordinate], shape: MeshShape, length: int) -> torch.Tensor:
    """Whole ``[B, S, H]`` from the parts of the ranks of a mesh that stand at the coordinates ``at``."""
    by_place = {(c.batch, c.sequence, c.hidden): part for c, part in zip(at, parts, strict=True)}

    def row(batch: int, sequence: int) -> torch.Tensor:
        return torch.cat([by_place[batch, sequence, hidden] for hidden in range(shape.hidden)], dim=2)

    def rows(batch: int) -> torch.Tensor:
        return torch.cat([row(batch, sequence) for sequence in range(shape.sequence)], dim=1)

    return torch.cat([rows(batch) for batch in range(shape.batch)], dim=0)[:, :length]
