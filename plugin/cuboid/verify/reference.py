"""The reference side: plain transformers in a single process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import cuboid
from cuboid.errors import CuboidError
from cuboid.models.certification.float64 import precision, widen
from cuboid.models.sharded.sharded_model import unwrap
from cuboid.verify.adapter import check_complete, with_adapter
from cuboid.verify.plan import Plan, width_of
from cuboid.verify.probe import probe
from cuboid.verify.storage import SAVED, write
from cuboid.verify.task_inputs import micro_batches
from cuboid.verify.training import Tensors, run_replicas, train


class OneProcess:
    """The :class:`~cuboid.verify.training.Side` of one process, which has all replicas and all of the model."""

    def backward(self, model: Any, plan: Plan, step: int) -> float:
        """Runs all replicas, one after the other."""
        return run_replicas(model, plan, step, range(plan.data_parallel)).item()

    def sum_over_replicas(self, tensor: torch.Tensor) -> None:
        """No-op."""

    def sum_over_model(self, tensor: torch.Tensor) -> None:
        """No-op."""

    def counted(self, model: nn.Module) -> list[nn.Parameter]:
        """All parameters."""
        return list(model.parameters())

    def gradients(self, model: nn.Module) -> Tensors:
        """The parameters' gradients; tied ones have an entry for each of their names."""
        named = model.named_parameters(remove_duplicate=False)
        return {name: p.grad.detach().cpu().clone() for name, p in named if p.grad is not None}


def run_reference(plan: Plan, directory: str, moments: bool = False) -> None:
    """Worker job for one process: run the plan with plain transformers and write the outcome into ``directory``."""
    with _without_cuboid():
        adapted = with_adapter(load_plain(plan), plan)
        check_complete(adapted, plan)
        model: Any = unwrap(adapted)
        if plan.rounded:
            _round(model)
        batch = micro_batches(plan, model, 0, 0)[0]
        try:
            with precision(keep_float64=plan.keep_float64):
                activations, logits = probe(model, batch)
                outcome = train(model, plan, OneProcess(), moments=moments)
        except CuboidError:
            raise
        except Exception as error:
            other = "; --dtype float32 may do" if plan.dtype == "float64" else ""
            raise CuboidError(
                f"there is nothing to compare with: {type(model).__name__} fails in plain transformers, in "
                f"{plan.dtype}: {type(error).__name__}: {error}{other}"
            ) from error
        adapted.save_pretrained(
            Path(directory, SAVED), **({} if plan.adapter is None else {"save_embedding_layers": False})
        )
    # Of images, the length in the layers isn't known here: their outputs aren't compared, apart from the model's own.
    hidden_shape = (*batch["input_ids"].shape, width_of(model)) if "input_ids" in batch else ()
    outcome.activations = {name: x for name, (x,) in activations.items() if tuple(x.shape) == hidden_shape}
    outcome.logits = logits
    write(outcome, Path(directory))


def load_plain(plan: Plan) -> Any:
    """The plan's full model on this process's device."""
    model = plan.auto_class.from_pretrained(plan.checkpoint, **plan.loading_options())
    return widened(model, plan).to(device())


def _round(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().to(parameter.dtype)


def widened(model: Any, plan: Plan) -> Any:
    """The model; in place, if casts to float32 are skipped, without the weights that it keeps in float32 for them."""
    if plan.keep_float64 and plan.torch_dtype == torch.float64:
        widen(model)
    return model


def device() -> torch.device:
    """This worker's device."""
    return torch.device("cpu" if dist.get_backend() == "gloo" else "cuda")


@contextlib.contextmanager
def _without_cuboid() -> Iterator[None]:
    cuboid.unregister()
    try:
        yield
    finally:
        cuboid.register()
