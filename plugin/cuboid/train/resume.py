"""The state of a run in its checkpoints, by which another process can find and resume it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from cuboid import CheckpointError, CuboidError
from cuboid.checkpoint.format.bounded_files import is_plain_name
from cuboid.checkpoint.format.folder import complete, has_any, is_intact, others_beside, resolve
from cuboid.checkpoint.format.manifest import Manifest, check_sizes
from cuboid.checkpoint.format.state_file import read_state
from cuboid.checkpoint.loader import suggest_intact
from cuboid.errors import DamagedCheckpointError
from cuboid.integrations.run_report.schema import REPORT, HeldoutPoint
from cuboid.train.run_folder import CHECKPOINTS

logger = logging.getLogger(__name__)

#: Messages for differences between two runs.
_DIFFERENCES = {
    "seed": "--seed {was}, not {now}",
    "sequence_length": "--sequence-length {was}, not {now}",
    "heldout_blocks": "--heldout-blocks {was}, not {now}",
    "global_batch": "{was} sequences of all ranks in a step, not {now}",
    "model_sha256": "another model (another config.json)",
    "data_fingerprint": "other data (other tokens)",
    "trainer_args": "--trainer-args with {was}, not {now}",
}


class RunState(BaseModel):
    """The client state of a checkpoint.

    Attributes:
        program: the program that saved it.
        step: optimizer steps so far.
        steps: length of the run.
        seed: of the order of the data.
        sequence_length: tokens of a block.
        global_batch: sequences of one optimizer step, over all ranks.
        heldout_blocks: maximum number of blocks for the held-out loss.
        model_sha256: hash of the model's architecture.
        data_fingerprint: hash of the tokens.
        losses_digest: of the loss of each step so far; see :mod:`cuboid.integrations.callbacks.metrics_file`.
        train_losses: these losses themselves, in checkpoints of earlier versions.
        heldout_losses: the held-out losses so far.
        loss_guard: by which the next steps' losses are judged; None in checkpoints of earlier versions.
        step_s: mean seconds of a step.
        wall_s: seconds so far, including earlier processes.
        resumed_after: steps after which the run was resumed.
        trainer_args: of the arguments of the Trainer's, as JSON, those that say what is trained.
        trainer_schedule: state of a schedule of the learning rate that the engine doesn't have.
        trainer_schedule_groups: names of the parameters in each of its groups.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    program: Literal["cuboid train"] = "cuboid train"
    step: int
    steps: int
    seed: int
    sequence_length: int
    global_batch: int
    heldout_blocks: int
    model_sha256: str
    data_fingerprint: str
    losses_digest: str | None = None
    train_losses: list[float] | None = None
    heldout_losses: list[HeldoutPoint]
    loss_guard: dict[str, Any] | None = None
    step_s: float
    wall_s: float
    resumed_after: list[int]
    trainer_args: str = "{}"
    trainer_schedule: dict[str, Any] | None = None
    trainer_schedule_groups: list[list[str]] | None = None


@dataclass(frozen=True)
class Resumed:
    """A run to resume: the folder of the checkpoint, and the run's state in it."""

    path: Path
    state: RunState

    def check_same_run(self, other: Resumed) -> None:
        """Check that another checkpoint is of a run with the same settings.

        Raises:
            CuboidError: names all that differ.
        """
        other.reject_differences(**{name: getattr(self.state, name) for name in _DIFFERENCES})

    def reject_differences(self, **settings: int | str) -> None:
        """Raise an error unless the resumed run has these settings, named after fields of :class:`RunState`."""
        recorded = {name: getattr(self.state, name) for name in settings}
        differing = [
            _DIFFERENCES[name].format(was=recorded[name], now=now)
            for name, now in settings.items()
            if recorded[name] != now
        ]
        if differing:
            raise CuboidError(
                f"--resume: the run in {self.path} had {'; '.join(differing)}. Give the same again, or begin another "
                "run in another --out"
            )


def find_run_if_any(out: Path) -> Resumed | None:
    """As :func:`find_run`, but None if no checkpoint was ever finished in ``out``.

    Instead of a damaged checkpoint, the newest one beside it that isn't is taken, with a warning.

    Raises:
        CheckpointError: all are damaged, or the newest intact one isn't one of ``cuboid train``.
    """
    if not has_any(out / CHECKPOINTS):
        return None
    try:
        return find_run(out)
    except CheckpointError as error:
        intact = getattr(error.__cause__, "intact", None)
        if intact is None:
            raise
        logger.warning("%s. Resuming from %s", error.__cause__, intact.name)
        return find_run(out, intact.name)


def find_run(out: Path, name: str | None = None) -> Resumed:
    """Find the run whose checkpoints are in ``out``.

    Args:
        out: folder of the run.
        name: of the checkpoint to resume from; None for the latest.

    Raises:
        CheckpointError: there is none, or it is damaged, or it isn't one of ``cuboid train``.
    """
    root = out / CHECKPOINTS
    if name is not None and not is_plain_name(name):
        raise CheckpointError(f"--resume-from {name!r} isn't the name of a checkpoint in {root}")
    try:
        path = resolve(root, name)
    except CheckpointError as error:
        raise CheckpointError(f"--resume has nothing to resume from: {error}") from error
    # Check only sizes and state.json; by default, the engine compares all checksums when it loads the checkpoint.
    try:
        manifest = Manifest.read(path)
        check_sizes(path, manifest)
        client = read_state(path, manifest).get("client")
    except CheckpointError as error:
        intact = next(
            (other for other in others_beside(path) if is_intact(other, lambda manifest: manifest.files)), None
        )
        damaged = DamagedCheckpointError(suggest_intact(str(error), intact), intact)
        raise CheckpointError(f"--resume can't resume from a damaged checkpoint: {with_remedy(damaged)}") from damaged
    try:
        return Resumed(path, RunState.model_validate(client))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise CheckpointError(
            f"--resume: {path} isn't a checkpoint that this version of `cuboid train` saved: its client state: {key}: "
            f"{problem['msg']}"
        ) from None


def with_remedy(error: DamagedCheckpointError) -> str:
    """The error's message, extended by how to resume from the intact checkpoint that it suggests."""
    if error.intact is None:
        return str(error)
    name = error.intact.name
    return f"{error}. Resume from that one: --resume-from {name} (make train RESUME={name})"


def reject_other_run(out: Path, results: Sequence[str] = (REPORT,)) -> None:
    """Raise an error if a new run in ``out`` would overwrite one that could be resumed, or that has finished.

    ``results`` are the names of a finished run's files that it would replace.
    """
    checkpoints = complete(out / CHECKPOINTS)
    if checkpoints:
        raise CuboidError(
            f"{out / CHECKPOINTS} has checkpoints of another run (the newest is {checkpoints[-1].name}). Go on with "
            "it: --resume (make train RESUME=1); or begin another one in another --out (NAME=…), or after removing "
            "that folder"
        )
    files = [name for name in results if (out / name).exists()]
    if files:
        raise CuboidError(
            f"{out} has the result of another run ({', '.join(files)}), which would be replaced. Begin this one in "
            "another --out (NAME=…), or after moving or removing that folder"
        )
