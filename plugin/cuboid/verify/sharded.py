"""The side under test: the same plan on a mesh or a pipeline, in Cuboid's core and in the full DeepSpeed engine."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import cuboid
from cuboid import Mesh, MeshShape
from cuboid.integrations.deepspeed.optimizer_state import adapt_optimizer
from cuboid.models.certification.float64 import precision
from cuboid.models.certification.sides import run_backward
from cuboid.models.kinds.registry import kind_of
from cuboid.models.pipeline.training_pipeline import Pipeline
from cuboid.models.sharded.sharded_model import unwrap
from cuboid.models.stages.stage_model import StageModel
from cuboid.verify.adapter import with_adapter
from cuboid.verify.own_checks import check_alone
from cuboid.verify.plan import Plan, vocabulary_of, width_of
from cuboid.verify.probe import probe, probe_stage, residual_part
from cuboid.verify.reference import device, load_plain, widened
from cuboid.verify.resume import check_resume
from cuboid.verify.storage import SAVED, write, write_part
from cuboid.verify.task_inputs import micro_batches
from cuboid.verify.training import MOMENT, RunOutcome, Tensors, parameter_groups, prepare, run_replicas, train
from cuboid.weights.save import full_values


class OnMesh:
    """The :class:`~cuboid.verify.training.Side` of one rank of ``data_parallel`` meshes."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def backward(self, model: Any, plan: Plan, step: int) -> float:
        """Runs the replica that this rank belongs to."""
        cut_logits(model, plan, step, self._mesh)
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
        """The parameters to count on this rank, so that each element of the model counts once."""
        return model.counted_parameters()

    def gradients(self, model: nn.Module) -> Tensors:
        """Full gradients on rank 0."""
        return cuboid.full_gradients(model)


class OnStages(OnMesh):
    """The :class:`~cuboid.verify.training.Side` of one rank of ``data_parallel`` pipelines."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline.mesh)
        self._pipeline = pipeline

    def backward(self, model: Any, plan: Plan, step: int) -> float:
        """Runs all stages of the replica that this rank belongs to."""
        batches = micro_batches(plan, model, step, self._mesh.coordinate.data)
        cut_logits(model, plan, step, self._mesh)
        return self._pipeline.train(iter(batches), plan.accumulate).item()


def run_core(plan: Plan, config: dict[str, Any], directory: str) -> MeshShape:
    """Worker job: the plan on the mesh of each stage, with torch's own optimizer. Rank 0 writes the outcome.

    Returns:
        The mesh's shape; ``"mesh": "auto"`` determines it only once the model is known.
    """
    model = _load(plan, config)
    mesh = cuboid.mesh_of(model)
    mesh.connect()
    batch = micro_batches(plan, model, 0, mesh.coordinate.data)[0]
    logits: Tensors = {}
    is_stage = isinstance(model, StageModel)
    with precision(keep_float64=plan.keep_float64):
        if is_stage:
            pipeline = Pipeline(model)
            outputs = probe_stage(pipeline, model, batch)
            alone_checks = check_alone(model, plan, batch, pipeline)
            outcome = train(model, plan, OnStages(pipeline))
        else:
            outputs, logits = probe(model, batch)
            alone_checks = check_alone(model, plan, batch)
            outcome = train(model, plan, OnMesh(mesh))
    # The first replica's activations are compared; the others ran another micro-batch.
    if mesh.coordinate.data == 0:
        parts = residual_part(outputs, mesh.shape, plan.batch, plan.case(0).length, width_of(model))
        write_part(parts, Path(directory), mesh.rank)
    outcome.logits, outcome.own_checks = logits, alone_checks
    cuboid.save_pretrained(model, Path(directory, SAVED))
    if mesh.rank == 0:
        write(outcome, Path(directory))
    return mesh.shape


def run_engine(plan: Plan, config: dict[str, Any], directory: str) -> MeshShape:
    """Worker job: the plan through ``deepspeed.initialize`` and its engine. Rank 0 writes the outcome.

    Adam's first moments are compared instead of gradients, which ZeRO doesn't expose. The processes can't be reused,
    because DeepSpeed keeps global state about its world.
    """
    model = _load(plan, config)
    prepare(model, plan)
    with contextlib.redirect_stdout(io.StringIO()):  # some of its optimizers print their memory use
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameter_groups(model, plan), config=config)
    mesh = cuboid.mesh_of(engine)
    outcome = RunOutcome()

    def run(step: int) -> float:
        batches = micro_batches(plan, engine.module, step, mesh.coordinate.data)
        cut_logits(engine.module, plan, step, mesh)
        if isinstance(engine.module, StageModel):
            return float(engine.train_batch(iter(batches)))
        return _engine_step(engine, batches, mesh)

    for step in range(plan.steps):
        outcome.losses.append(run(step))
        norm = engine.get_global_grad_norm()
        if norm is not None:  # None in float32 without ZeRO and without clipping
            outcome.norms.append(float(norm))
    outcome.moments = _moments(engine, mesh)
    saved = Path(directory, SAVED)
    cuboid.save_pretrained(engine, saved)
    resumed = check_resume(engine, lambda: run(plan.steps), Path(directory, "runs"), mesh, saved, outcome.moments)
    outcome.own_checks = {"resume": resumed}
    if mesh.rank == 0:
        write(outcome, Path(directory))
    return mesh.shape


def cut_logits(model: Any, plan: Plan, step: int, mesh: Mesh) -> None:
    """Set the size of the loss's chunks for a step, so that both the single-chunk and the chunked loss are tested."""
    share = mesh.size("batch") * mesh.size("hidden")
    few = plan.chunk_bytes(step, vocabulary_of(model), share)
    model.cuboid.state.chunk_bytes = few


def _moments(engine: Any, mesh: Mesh) -> Tensors:
    """Adam's first moments as full tensors, on rank 0."""
    parameters = dict(engine.module.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    runs = adapt_optimizer(engine.optimizer, names).state().quantities[MOMENT]
    averages: dict[int, torch.Tensor] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        run = runs[name]
        # Row 0: each element's value. Row 1: how many replicas have it, which is all of them, or one under ZeRO.
        held = torch.zeros(2, parameter.numel(), dtype=run.values.dtype, device=parameter.device)
        held[0, run.start : run.stop], held[1, run.start : run.stop] = run.values, 1
        OnMesh(mesh).sum_over_replicas(held)
        averages[id(parameter)] = (held[0] / held[1]).view_as(parameter)
    return full_values(engine.module, lambda parameter: averages.get(id(parameter)))


def _engine_step(engine: Any, batches: list[Tensors], mesh: Mesh) -> float:
    losses, kind = [], kind_of(type(engine.module), engine.module.config)
    for batch in batches:
        inputs = {name: x.to(engine.device) for name, x in batch.items()}
        losses.append(run_backward(engine, kind, inputs, engine.backward))
        engine.step()
    mean = torch.stack(losses).double().mean() / mesh.topology.data
    OnMesh(mesh).sum_over_replicas(mean)
    return mean.item()


def _load(plan: Plan, config: dict[str, Any]) -> Any:
    if plan.shard_in_memory:
        model = cuboid.shard(load_plain(plan), config)
    else:
        with cuboid.scope(config):
            model = plan.auto_class.from_pretrained(plan.checkpoint, **plan.loading_options())
        model = widened(model, plan).to(device())
    return unwrap(with_adapter(model, plan))
