"""The side to check: the same plan on a mesh, in Cuboid's core and in the whole DeepSpeed engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

import cuboid
from cuboid import Mesh, MeshShape
from cuboid.verify.float64 import precision
from cuboid.verify.plan import Plan, vocabulary_of
from cuboid.verify.probe import probe, residual_part
from cuboid.verify.reference import device, load_plain
from cuboid.verify.storage import write, write_part
from cuboid.verify.training import Outcome, Tensors, prepare, train


class OnMesh:
    """One rank of ``data_parallel`` meshes."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def replicas(self, _: Plan, /) -> list[int]:
        """The one that this rank belongs to."""
        return [self._mesh.coordinate.data]

    def sum_over_replicas(self, tensor: torch.Tensor) -> None:
        """All-reduce over the ranks with the same shards."""
        if self._mesh.topology.data > 1:
            dist.all_reduce(tensor, group=self._mesh.data_parallel_group)

    def sum_over_model(self, tensor: torch.Tensor) -> None:
        """All-reduce over the mesh: every parameter element has one owner there, so the plain sum is right."""
        if self._mesh.shape.size > 1:
            dist.all_reduce(tensor, group=self._mesh.model_parallel_group)

    def gradients(self, model: nn.Module) -> Tensors:
        """Whole, on rank 0."""
        return cuboid.full_gradients(model)

    def weights(self, model: nn.Module) -> Tensors:
        """Whole, on rank 0."""
        return cuboid.full_state_dict(model)


def run_core(plan: Plan, config: dict[str, Any], directory: str) -> MeshShape:
    """Job of every rank: the plan on the mesh, with torch's own optimizer. Rank 0 writes the outcome.

    Returns:
        The mesh, which ``"mesh": "auto"`` leaves open until the model is known.
    """
    model = _load(plan, config)
    mesh = cuboid.mesh_of(model)
    mesh.connect()
    batch = plan.micro_batches(0, 0, vocabulary_of(model))[0]
    with precision(keep_float64=plan.keep_float64):
        activations, logits = probe(model, batch)
        outcome = train(model, plan, OnMesh(mesh))
    if mesh.coordinate.data == 0:
        hidden = model.config.get_text_config().hidden_size
        parts = residual_part(activations, mesh.shape, plan.batch, plan.sequence_length, hidden)
        write_part(parts, Path(directory), mesh.rank)
    outcome.logits = {"logits": logits}
    if mesh.rank == 0:
        write(outcome, Path(directory))
    return mesh.shape


def run_engine(plan: Plan, config: dict[str, Any], directory: str) -> MeshShape:
    """Job of every rank: the plan through ``deepspeed.initialize`` and its engine. Rank 0 writes the outcome.

    Losses, gradient norms and weights only: with ZeRO, gradients are DeepSpeed's own. The processes can't be used
    again, for DeepSpeed keeps what it knows of the world until they end.
    """
    model = _load(plan, config)
    prepare(model, plan)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    mesh = cuboid.mesh_of(engine)
    vocabulary = vocabulary_of(engine.module)
    outcome = Outcome()
    for step in range(plan.steps):
        batches = plan.micro_batches(step, mesh.coordinate.data, vocabulary)
        losses = [_engine_step(engine, batch) for batch in batches]
        mean = torch.stack(losses).double().mean() / plan.data_parallel
        OnMesh(mesh).sum_over_replicas(mean)
        outcome.losses.append(mean.item())
        norm = engine.get_global_grad_norm()
        if norm is not None:  # in float32 without ZeRO, DeepSpeed clips and tells nobody
            outcome.norms.append(float(norm))
    outcome.weights = cuboid.full_state_dict(engine)
    if mesh.rank == 0:
        write(outcome, Path(directory))
    return mesh.shape


def _engine_step(engine: Any, batch: Tensors) -> torch.Tensor:
    loss = engine(**{name: x.to(engine.device) for name, x in batch.items()}, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


def _load(plan: Plan, config: dict[str, Any]) -> Any:
    if plan.shard_in_memory:
        return cuboid.shard(load_plain(plan), config)
    with cuboid.scope(config):
        model = AutoModelForCausalLM.from_pretrained(
            plan.checkpoint, config=plan.model_config(), dtype=plan.torch_dtype
        )
    return model.to(device())
