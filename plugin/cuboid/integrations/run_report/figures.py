"""Collect the figures of a finished run into its report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from cuboid.integrations.callbacks import memory_use
from cuboid.integrations.callbacks.step_times import StepTimes
from cuboid.integrations.run_report.schema import (
    HeldoutPoint,
    Losses,
    MeshSizes,
    PipelineFigures,
    RankFigures,
    Speed,
    TraceFigures,
    TrainReport,
    versions,
)
from cuboid.models.sharded.sharded_model import mesh_of, unwrap
from cuboid.models.stages.stage_model import StageModel

T = TypeVar("T")


def make_report(
    engine: Any,
    *,
    model: str,
    data: str | None,
    config: dict[str, Any],
    steps: int,
    resumed_after: list[int],
    seed: int,
    sequence_length: int | None,
    train_losses: Sequence[float],
    heldout: list[HeldoutPoint],
    tokens_per_step: float | None,
    times: StepTimes,
    wall_s: float,
    sent_bytes: dict[str, int],
    trainer_args: Mapping[str, Any] | None = None,
) -> TrainReport:
    """The report of a finished run, of whose engine's ranks each gives its part; collective.

    Args:
        engine: DeepSpeed's, of Cuboid.
        model, data: where they come from.
        config: DeepSpeed's.
        steps: optimizer steps of the whole run.
        resumed_after: see :class:`~cuboid.integrations.run_report.schema.TrainReport`.
        seed: of the data's order.
        sequence_length: of all sequences; None if they differ.
        train_losses: of each step; NaN where it isn't known.
        heldout: evaluations so far.
        tokens_per_step: over all replicas; None if it isn't known.
        times: of the steps of this process.
        wall_s: seconds of the whole run.
        sent_bytes: what this rank has sent in one optimizer step, by axis.
        trainer_args: of the Trainer's, what isn't the config's.
    """
    mesh = mesh_of(engine)
    shape, replicas = mesh.shape, mesh.topology.data
    module: Any = unwrap(engine.module)
    is_staged = isinstance(module, StageModel)
    return TrainReport(
        model=model,
        data=data,
        device=str(engine.device),
        dtype=str(next(module.parameters()).dtype).removeprefix("torch."),
        world_size=dist.get_world_size(),
        mesh=MeshSizes(batch=shape.batch, sequence=shape.sequence, hidden=shape.hidden, data_parallel=replicas),
        pipeline=pipeline_figures(module, engine, sequence_length, times.count) if is_staged else None,
        steps=steps,
        resumed_after=resumed_after,
        seed=seed,
        sequence_length=sequence_length,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        gradient_accumulation=engine.gradient_accumulation_steps(),
        losses=Losses(
            first=_known(train_losses[0]) if train_losses else None,
            last=_known(train_losses[-1]) if train_losses else None,
            heldout_first=heldout[0].loss if heldout else None,
            heldout_last=heldout[-1].loss if heldout else None,
        ),
        speed=Speed(
            tokens=None if tokens_per_step is None else round(tokens_per_step * steps),
            tokens_per_s=tokens_per_step / times.mean_s if tokens_per_step and times.mean_s else None,
            step_s=times.mean_s,
            wall_s=wall_s,
        ),
        # Tied parameters are counted on the first stage only.
        parameters=sum(_of_ranks(sum(p.numel() for p in module.counted_parameters()))) // replicas,
        memory_kind=memory_use.kind(),
        ranks=_of_ranks(
            RankFigures(
                stage=mesh.coordinate.pipe,
                parameters=sum(p.numel() for p in module.parameters()),
                peak_memory_bytes=memory_use.peak_bytes(),
                sent_bytes_per_step=sent_bytes,
            )
        ),
        train_losses=list(map(_known, train_losses)),
        heldout_losses=heldout,
        config=config,
        trainer_args=dict(trainer_args or {}),
        versions=versions(),
    )


def pipeline_figures(stage: Any, engine: Any, sequence_length: int | None, steps: int) -> PipelineFigures:
    """How the layers and sequences of full length were divided, and the trace, if one was taken.

    This process has made ``steps`` optimizer steps. A trace of a later one is of an earlier process, before the run was
    resumed.
    """
    config = stage.staging.plan.config.pipeline
    is_traced = config.trace and config.trace_step <= steps
    accumulation = engine.gradient_accumulation_steps()
    lengths = () if sequence_length is None else engine.pipeline.segment_lengths(sequence_length, accumulation)
    return PipelineFigures(
        stages=config.stages,
        chunks=config.chunks,
        layers=list(engine.pipeline.layers),
        segment_lengths=list(lengths),
        schedule=config.schedule,
        trace=_trace_figures(Path(str(config.trace)), config.trace_step) if is_traced else None,
    )


def _trace_figures(folder: Path, step: int) -> TraceFigures | None:
    """The trace that rank 0 wrote; None on machines that don't see its files."""
    perfetto = folder / f"step_{step}.json"
    if not perfetto.is_file():
        return None
    figures = json.loads(perfetto.read_text(encoding="utf-8"))["otherData"]
    return TraceFigures(
        step=step,
        picture=str(perfetto.with_suffix(".png")),
        perfetto=str(perfetto),
        measured_bubble=figures["bubble"],
        simulated_bubble=figures["simulated_bubble"],
    )


def _known(loss: float) -> float | None:
    return None if math.isnan(loss) else loss


def _of_ranks(item: T) -> list[T]:
    """An item of each rank, in rank order; collective."""
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items
