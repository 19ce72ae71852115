"""The side to check: the same plan on a mesh or a pipeline, in Cuboid's core and in the whole DeepSpeed engine."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

import cuboid
from cuboid import Mesh, MeshShape
from cuboid.hf.certification.float64 import precision
from cuboid.hf.pipeline import Pipeline
from cuboid.hf.stage_model import StageModel
from cuboid.verify.plan import Plan, vocabulary_of
from cuboid.verify.probe import probe, probe_stage, residual_part
from cuboid.verify.reference import device, load_plain
from cuboid.verify.storage import write, write_part
from cuboid.verify.training import Outcome, Tensors, prepare, run_replicas, train


class OnMesh:
    """One rank of ``data_parallel`` meshes."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def backward(self, model: Any, plan: Plan, step: int) -> float:
        """The one replica that this rank belongs to."""
        loss = run_replicas(model, plan, step, [self._mesh.coordinate.data])
        self.sum_over_replicas(loss)
        return loss.item()

    def sum_over_replicas(self, tensor: torch.Tensor) -> None:
        """All-reduce over the ranks with the same shards."""
        if self._mesh.topology.data > 1:
            dist.all_reduce(tensor, group=self._mesh.data_parallel_group)

    def sum_over_model(self, tensor: torch.Tensor) -> None:
        """All-reduce over the meshes of all stages."""
        if len(self._mesh.copy_ranks) > 1:
            dist.all_reduce(tensor, group=self._mesh.model_parallel_group)

    def counted(self, model: Any) -> list[nn.Parameter]:
        """Those that the model counts here."""
        return model.counted_parameters()

    def gradients(self, model: nn.Module) -> Tensors:
        """Whole, on rank 0."""
        return cuboid.full_gradients(model)

    def weights(self, model: nn.Module) -> Tensors:
        """Whole, on rank 0."""
        return cuboid.full_state_dict(model)


class OnStages(OnMesh):
    """One rank of ``data_parallel`` pipelines."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline.mesh)
        self._pipeline = pipeline

    def backward(self, model: Any, plan: Plan, step: int) -> float:
        """All stages of the replica that this rank belongs to."""
        batches = plan.micro_batches(step, self._mesh.coordinate.data, vocabulary_of(model))
        return self._pipeline.train(iter(batches), plan.accumulate).item()


def run_core(plan: Plan, config: dict[str, Any], directory: str) -> MeshShape:
    """Job of every rank: the plan on the mesh of each stage, with torch's own optimizer. Rank 0 writes the outcome.

    Returns:
        The mesh, which ``"mesh": "auto"`` leaves open until the model is known.
    """
    model = _load(plan, config)
    mesh = cuboid.mesh_of(model)
    mesh.connect()
    batch = plan.micro_batches(0, mesh.coordinate.data, vocabulary_of(model))[0]
    logits: Tensors = {}
    is_stage = isinstance(model, StageModel)
    with precision(keep_float64=plan.keep_float64):
        if is_stage:
            pipeline = Pipeline(model)
            outputs = probe_stage(pipeline, model, batch)
            outcome = train(model, plan, OnStages(pipeline))
        else:
            outputs, logits["logits"] = probe(model, batch)
            outcome = train(model, plan, OnMesh(mesh))
    if mesh.coordinate.data == 0:
        hidden = model.config.get_text_config().hidden_size
        parts = residual_part(outputs, mesh.shape, plan.batch, plan.sequence_length, hidden)
        write_part(parts, Path(directory), mesh.rank)
    outcome.logits = logits
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
    with contextlib.redirect_stdout(io.StringIO()):  # some of its optimizers print how much memory they take
        engine, *_ = deepspeed.initialize(model=model, config=config)
    mesh = cuboid.mesh_of(engine)
    vocabulary = vocabulary_of(engine.module)
    outcome = Outcome()
    for step in range(plan.steps):
        batches = plan.micro_batches(step, mesh.coordinate.data, vocabulary)
        run_step = _pipeline_step if isinstance(engine.module, StageModel) else _engine_step
        outcome.losses.append(run_step(engine, batches, mesh))
        norm = engine.get_global_grad_norm()
        if norm is not None:  # in float32 without ZeRO, DeepSpeed clips and tells nobody
            outcome.norms.append(float(norm))
    outcome.weights = cuboid.full_state_dict(engine)
    if mesh.rank == 0:
        write(outcome, Path(directory))
    return mesh.shape


def _engine_step(engine: Any, batches: list[Tensors], mesh: Mesh) -> float:
    losses = []
    for batch in batches:
        loss = engine(**{name: x.to(engine.device) for name, x in batch.items()}, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    mean = torch.stack(losses).double().mean() / mesh.topology.data
    OnMesh(mesh).sum_over_replicas(mean)
    return mean.item()


def _pipeline_step(engine: Any, batches: list[Tensors], _: Mesh) -> float:
    return float(engine.train_batch(iter(batches)))


def _load(plan: Plan, config: dict[str, Any]) -> Any:
    if plan.shard_in_memory:
        return cuboid.shard(load_plain(plan), config)
    with cuboid.scope(config):
        model = AutoModelForCausalLM.from_pretrained(plan.checkpoint, **plan.loading_options())
    return model.to(device())
