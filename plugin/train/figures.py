"""The report's figures of one rank, and of the pipeline if there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cuboid
from cuboid.train import memory
from cuboid.train.job import Job
from cuboid.train.report import PipelineFigures, RankFigures, TraceFigures


def rank_figures(engine: Any, sent_bytes: dict[str, int]) -> RankFigures:
    """This rank's part of the report.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        sent_bytes: in one optimizer step, by axis.
    """
    return RankFigures(
        stage=cuboid.mesh_of(engine).coordinate.pipe,
        parameters=sum(parameter.numel() for parameter in engine.module.parameters()),
        peak_memory_bytes=memory.peak_bytes(),
        sent_bytes_per_step=sent_bytes,
    )


def own_parameters(engine: Any) -> int:
    """Parameters that count on this rank: without its copies of tied ones that the first stage has too."""
    return sum(parameter.numel() for parameter in engine.module.counted_parameters())


def pipeline_figures(job: Job, engine: Any) -> PipelineFigures:
    """How the model and sequences of full length were cut, and the trace that was taken."""
    asked = cuboid.parse_config(job.config).pipeline
    assert asked is not None
    lengths = engine.pipeline.segment_lengths(job.options.sequence_length, job.accumulation)
    return PipelineFigures(
        stages=asked.stages,
        layers=list(engine.pipeline.layers),
        segment_lengths=list(lengths),
        schedule=asked.schedule,
        trace=_trace_figures(Path(str(asked.trace)), asked.trace_step) if asked.trace else None,
    )


def _trace_figures(folder: Path, step: int) -> TraceFigures | None:
    """What the first rank wrote; None where another machine's files aren't seen."""
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
