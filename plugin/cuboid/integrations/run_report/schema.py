"""``report.json``: the figures of a run."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cuboid import requirements

#: Names of the report and of its picture in a run's folder.
REPORT, CURVE = "report.json", "loss.png"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MeshSizes(_Section):
    """Ranks along each axis of the mesh, and replicas of it."""

    batch: int
    sequence: int
    hidden: int
    data_parallel: int


class HeldoutPoint(_Section):
    """The held-out loss after some optimizer steps, in nats per token, and by name that of other texts.

    A Trainer with several evaluation sets has these alone.
    """

    step: int
    loss: float | None
    others: dict[str, float] = Field(default_factory=dict)


class Losses(_Section):
    """Losses in nats per token. The first two are None if the run was resumed without its file of losses, the next two
    if nothing was evaluated.

    The last two fields are None until a separate process has loaded the result with plain transformers and computed
    the held-out loss on the same blocks.
    """

    first: float | None
    last: float | None
    heldout_first: float | None
    heldout_last: float | None
    heldout_transformers: float | None = None
    relative_difference: float | None = None


class Speed(_Section):
    """Tokens of all replicas; times in seconds. The first step, which includes warm-up, counts in ``wall_s`` only.

    If the run was resumed, ``tokens`` and ``wall_s`` cover the whole run, and the others only the time since then.
    """

    tokens: int | None
    tokens_per_s: float | None
    step_s: float
    wall_s: float


class RankFigures(_Section):
    """One rank: its number of parameters, its peak memory, and the bytes that it sends in a step by axis.

    Bytes that are sent to other stages are under ``pipe``.
    """

    stage: int
    parameters: int
    peak_memory_bytes: int
    sent_bytes_per_step: dict[str, int]


class TraceFigures(_Section):
    """The trace of one step: its files, and the measured and simulated share of time that stages are idle."""

    step: int
    picture: str
    perfetto: str
    measured_bubble: float
    simulated_bubble: float


class PipelineFigures(_Section):
    """How layers and sequences were divided. ``trace`` is None unless the config asks for one."""

    stages: int
    chunks: int = 1
    layers: list[int]
    segment_lengths: list[int]
    schedule: str
    trace: TraceFigures | None = None


class TrainReport(_Section):
    """The contents of ``report.json``. What a Trainer doesn't know is None.

    Losses are of the whole run, which was resumed after each of the steps in ``resumed_after``. They are None for the
    steps before a resumption without the run's file of losses.
    """

    model: str
    data: str | None
    device: str
    dtype: str
    world_size: int
    mesh: MeshSizes
    pipeline: PipelineFigures | None = None
    steps: int
    resumed_after: list[int] = Field(default_factory=list)
    seed: int
    sequence_length: int | None
    micro_batch: int
    gradient_accumulation: int
    losses: Losses
    speed: Speed
    parameters: int
    memory_kind: str
    ranks: list[RankFigures]
    sample: str | None = None
    train_losses: list[float | None]
    heldout_losses: list[HeldoutPoint]
    config: dict[str, Any]
    trainer_args: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str]

    @property
    def layout(self) -> str:
        """Stages and mesh as text."""
        mesh = f"mesh {self.mesh.batch}×{self.mesh.sequence}×{self.mesh.hidden}"
        if self.pipeline is None:
            return mesh
        chunks = f" of {self.pipeline.chunks} chunks" if self.pipeline.chunks > 1 else ""
        return f"{self.pipeline.stages} stages{chunks} × {mesh}"

    def write(self, folder: Path) -> Path:
        """Write the report into a run's folder."""
        path = folder / REPORT
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        return path


def versions() -> dict[str, str]:
    """Versions of the packages that the result depends on."""
    packages = ("cuboid", "torch", "transformers", "deepspeed", "tokenizers", "safetensors")
    return {"python": platform.python_version(), **requirements.versions(*packages)}
