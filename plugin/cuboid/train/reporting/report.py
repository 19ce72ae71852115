"""``report.json``: what a run did, in numbers."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

#: Names of the files that a run leaves in its folder.
REPORT, CURVE, MODEL, BLOCKS, TRACE = "report.json", "loss.png", "model", "heldout_blocks.npy", "trace"
#: The folder for those that a run is interrupted at and resumes from.
CHECKPOINTS = "checkpoints"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MeshSizes(_Section):
    """Ranks along each axis of the mesh, and replicas of it."""

    batch: int
    sequence: int
    hidden: int
    data_parallel: int


class HeldoutPoint(_Section):
    """The held-out loss after some optimizer steps, in nats per token."""

    step: int
    loss: float


class Losses(_Section):
    """Losses in nats per token.

    The last two fields are None until a fresh process with plain transformers has opened the result and
    computed the held-out loss on the same blocks.
    """

    first: float
    last: float
    heldout_first: float
    heldout_last: float
    heldout_transformers: float | None = None
    relative_difference: float | None = None


class Speed(_Section):
    """Tokens of all replicas; times in seconds. The first step, which warms up, counts in ``wall_s`` only.

    Of a run that was resumed, ``tokens`` and ``wall_s`` are of all of it, and the others of the time since.
    """

    tokens: int
    tokens_per_s: float
    step_s: float
    wall_s: float


class RankFigures(_Section):
    """One rank: the parameters that it holds, its peak memory, the bytes that it sends in a step by axis.

    ``sent_bytes_per_step`` has what goes to other stages under ``pipe``.
    """

    stage: int
    parameters: int
    peak_memory_bytes: int
    sent_bytes_per_step: dict[str, int]


class TraceFigures(_Section):
    """The measured schedule of one step: its files, and the idle share of its stages beside the simulated one."""

    step: int
    picture: str
    perfetto: str
    measured_bubble: float
    simulated_bubble: float


class PipelineFigures(_Section):
    """How the model and its sequences were cut. ``trace`` is None unless the config asked for it."""

    stages: int
    layers: list[int]
    segment_lengths: list[int]
    schedule: str
    trace: TraceFigures | None = None


class Report(_Section):
    """Everything that ``report.json`` holds.

    Losses are of the whole run, also where it was resumed: after ``resumed_after`` optimizer steps, each time.
    """

    model: str
    data: str
    device: str
    dtype: str
    world_size: int
    mesh: MeshSizes
    pipeline: PipelineFigures | None = None
    steps: int
    resumed_after: list[int] = Field(default_factory=list)
    seed: int
    sequence_length: int
    micro_batch: int
    gradient_accumulation: int
    losses: Losses
    speed: Speed
    parameters: int
    memory_kind: str
    ranks: list[RankFigures]
    sample: str | None = None
    train_losses: list[float]
    heldout_losses: list[HeldoutPoint]
    config: dict[str, Any]
    versions: dict[str, str]

    @property
    def layout(self) -> str:
        """Stages and mesh in a few words."""
        mesh = f"mesh {self.mesh.batch}×{self.mesh.sequence}×{self.mesh.hidden}"
        return mesh if self.pipeline is None else f"{self.pipeline.stages} stages × {mesh}"

    def write(self, folder: Path) -> Path:
        """Write the report into a run's folder."""
        path = folder / REPORT
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        return path


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    packages = ("cuboid", "torch", "transformers", "deepspeed", "tokenizers", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
