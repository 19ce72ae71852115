"""What a checkpoint of ``cuboid train`` says of its run, so that another process can go on with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from cuboid import CheckpointError, CuboidError
from cuboid.checkpoint.format.bounded_files import is_plain_name
from cuboid.checkpoint.format.folder import complete, is_intact, others_beside, resolve
from cuboid.checkpoint.format.manifest import Manifest, check_sizes
from cuboid.checkpoint.format.state_file import read_state
from cuboid.checkpoint.loader import suggest_intact
from cuboid.errors import DamagedCheckpointError
from cuboid.train.reporting.report import CHECKPOINTS, HeldoutPoint

#: How differences between two runs are told.
_TOLD = {
    "seed": "--seed {was}, not {now}",
    "sequence_length": "--sequence-length {was}, not {now}",
    "heldout_blocks": "--heldout-blocks {was}, not {now}",
    "global_batch": "{was} sequences of all ranks in a step, not {now}",
    "model_sha256": "another model (another config.json)",
    "data_fingerprint": "other data (other tokens)",
}


class RunState(BaseModel):
    """The client state of a checkpoint.

    Attributes:
        program: who saved it.
        step: optimizer steps so far.
        steps: of the whole run.
        seed: of the order of the data.
        sequence_length: tokens of a block.
        global_batch: sequences of one optimizer step, over all ranks.
        heldout_blocks: of the held-out loss, at most.
        model_sha256: of the model's architecture.
        data_fingerprint: of the tokens.
        train_losses: of each step so far.
        heldout_losses: so far.
        step_s: mean seconds of a step.
        wall_s: seconds so far, of all processes that went on with the run.
        resumed_after: steps after which a process went on with it.
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
    train_losses: list[float]
    heldout_losses: list[HeldoutPoint]
    step_s: float
    wall_s: float
    resumed_after: list[int]


@dataclass(frozen=True)
class Resumed:
    """A run to go on with.

    Attributes:
        path: of the checkpoint.
        state: what it says.
    """

    path: Path
    state: RunState

    def refuse_differences(self, **asked: int | str) -> None:
        """Refuse to go on as another run.

        Args:
            asked: what this run has in place of the state's entries of these names.

        Raises:
            CuboidError: names all that differ.
        """
        found = {name: getattr(self.state, name) for name in asked}
        differing = [_TOLD[name].format(was=found[name], now=now) for name, now in asked.items() if found[name] != now]
        if differing:
            raise CuboidError(
                f"--resume: the run in {self.path} had {'; '.join(differing)}. Give the same again, or begin another "
                "run in another --out"
            )


def find_run(out: Path, name: str | None = None) -> Resumed:
    """The run that left its checkpoints in ``out``, as far as it got.

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
    try:
        manifest = Manifest.read(path)
        check_sizes(path, manifest)
        client = read_state(path, manifest).get("client")
    except CheckpointError as error:
        intact = next((other for other in others_beside(path) if is_intact(other, lambda found: found.files)), None)
        damaged = DamagedCheckpointError(suggest_intact(str(error), intact), intact)
        raise CheckpointError(f"--resume can't resume from a damaged checkpoint: {with_remedy(damaged)}") from error
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
    """What is wrong with a checkpoint, and how to resume from another one."""
    if error.whole is None:
        return str(error)
    name = error.whole.name
    return f"{error}. Resume from that one: --resume-from {name} (make train RESUME={name})"


def refuse_other_run(out: Path) -> None:
    """Don't begin a run where another one has left what it could be resumed from.

    Raises:
        CuboidError: as said.
    """
    found = complete(out / CHECKPOINTS)
    if found:
        raise CuboidError(
            f"{out / CHECKPOINTS} has checkpoints of another run (the newest is {found[-1].name}). Go on with it: "
            "--resume (make train RESUME=1); or begin another one in another --out (NAME=…), or after removing that "
            "folder"
        )
