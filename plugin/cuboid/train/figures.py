"""Collect the figures of a finished run into its report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

import cuboid
from cuboid.integrations.callbacks import memory_use
from cuboid.train.checkpoints import RunCheckpoints
from cuboid.train.job import TrainJob
from cuboid.train.loop import History, Loop
from cuboid.train.process import World, gather
from cuboid.train.reporting.report import (
    Losses,
    MeshSizes,
    PipelineFigures,
    RankFigures,
    Speed,
    TraceFigures,
    TrainReport,
    versions,
)


def make_report(
    checkpoints: RunCheckpoints, loop: Loop, history: History, world: World, device: torch.device
) -> TrainReport:
    """The report of a finished run; collective."""
    job, mesh = checkpoints.job, cuboid.mesh_of(loop.engine)
    shape, options = mesh.shape, job.options
    return TrainReport(
        model=str(options.architecture),
        data=checkpoints.data.source,
        device=str(device),
        dtype=str(job.dtype).removeprefix("torch."),
        world_size=world.size,
        mesh=MeshSizes(
            batch=shape.batch, sequence=shape.sequence, hidden=shape.hidden, data_parallel=loop.share.replicas
        ),
        pipeline=pipeline_figures(job, loop.engine, history.times.count) if job.has_pipeline else None,
        steps=job.steps,
        resumed_after=checkpoints.resumed_after,
        seed=options.seed,
        sequence_length=options.sequence_length,
        micro_batch=job.micro_batch,
        gradient_accumulation=job.accumulation,
        losses=Losses(
            first=_known(history.losses[0]),
            last=_known(history.losses[-1]),
            heldout_first=history.heldout[0].loss,
            heldout_last=history.heldout[-1].loss,
        ),
        speed=Speed(
            tokens=loop.tokens_per_step * job.steps,
            tokens_per_s=loop.tokens_per_step / history.times.mean_s,
            step_s=history.times.mean_s,
            wall_s=checkpoints.wall_s,
        ),
        # Tied parameters are counted on the first stage only.
        parameters=sum(gather(sum(p.numel() for p in loop.engine.module.counted_parameters()), world))
        // loop.share.replicas,
        memory_kind=memory_use.kind(),
        ranks=gather(rank_figures(loop.engine, history.sent_bytes), world),
        train_losses=list(map(_known, history.losses)),
        heldout_losses=history.heldout,
        config=job.config,
        versions=versions(),
    )


def _known(loss: float) -> float | None:
    return None if math.isnan(loss) else loss


def rank_figures(engine: Any, sent_bytes: dict[str, int]) -> RankFigures:
    """This rank's part of the report; ``sent_bytes`` are those of one optimizer step, by axis."""
    return RankFigures(
        stage=cuboid.mesh_of(engine).coordinate.pipe,
        parameters=sum(parameter.numel() for parameter in engine.module.parameters()),
        peak_memory_bytes=memory_use.peak_bytes(),
        sent_bytes_per_step=sent_bytes,
    )


def pipeline_figures(job: TrainJob, engine: Any, steps: int) -> PipelineFigures:
    """How the layers and sequences of full length were divided, and the trace, if one was taken.

    This process has made ``steps`` optimizer steps. A trace of a later one is of an earlier process, before the run was
    resumed.
    """
    pipeline_config = engine.module.staging.plan.config.pipeline
    traced = pipeline_config.trace and pipeline_config.trace_step <= steps
    lengths = engine.pipeline.segment_lengths(job.options.sequence_length, job.accumulation)
    return PipelineFigures(
        stages=pipeline_config.stages,
        chunks=pipeline_config.chunks,
        layers=list(engine.pipeline.layers),
        segment_lengths=list(lengths),
        schedule=pipeline_config.schedule,
        trace=_trace_figures(Path(str(pipeline_config.trace)), pipeline_config.trace_step) if traced else None,
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
