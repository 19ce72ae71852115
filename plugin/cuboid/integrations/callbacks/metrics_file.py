"""``metrics.jsonl``: the figures of each step of a run, one JSON object a line.

The file is written as the run goes. Checkpoints have only a hash of the losses in it, so that they don't grow with the
run; a resumed run cuts the file back to the step that it goes on after.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cuboid.distributed.mesh import Mesh
from cuboid.errors import CheckpointError
from cuboid.failures.rank_agreement import run_on_all_ranks

#: Name of the file in a run's folder.
METRICS = "metrics.jsonl"
#: More than any line has, so that a damaged file isn't read into memory as one line.
_LONGEST_LINE = 4096


def digest_of(losses: Sequence[float]) -> str:
    """A hash of losses to the last bit. All losses that aren't numbers are alike."""
    known = np.asarray(losses, dtype="<f8")
    return hashlib.sha256(np.where(np.isfinite(known), known, np.nan).astype("<f8").tobytes()).hexdigest()


def evaluation_losses(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The losses of evaluations in a log of a Trainer's, whose last one has the mean of the training losses."""
    return {name: value for name, value in logs.items() if name.endswith("_loss") and name != "train_loss"}


def check_metrics(path: Path) -> None:
    """Check that a run may write its metrics to a path.

    Raises:
        CheckpointError: another file is there.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(_LONGEST_LINE)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
    if line and _record(line) is None:
        raise CheckpointError(f"{path} isn't a file of metrics, and the run writes its own there; move it away")


def read_losses(path: Path, steps: int, digest: str | None) -> list[float] | None:
    """The losses of the first ``steps`` steps; None if the file doesn't have them, or others than ``digest`` is of."""
    losses: list[float] = []
    try:
        for _, record in _records(path):
            if len(losses) == steps:
                break
            if "loss" not in record:
                continue
            if record["step"] != len(losses) + 1:
                return None
            losses.append(math.nan if record["loss"] is None else float(record["loss"]))
    except (OSError, ValueError, TypeError):
        return None
    return losses if len(losses) == steps and digest_of(losses) == digest else None


class MetricsFile:
    """Writes a run's metrics. A line is in the file once its step is done.

    If it can't be written, that is said once and training goes on; the lines wait for the next step. A checkpoint needs
    them: see :meth:`sync`.

    Args:
        path: of the file.
        warn: called with a message.
        mesh: of this rank, if there is one; the other ranks learn by it whether :meth:`begin` and :meth:`sync` failed.
        is_written: whether this rank writes it, as one does.
    """

    def __init__(
        self, path: Path, warn: Callable[[str], object], mesh: Mesh | None = None, *, is_written: bool = True
    ) -> None:
        self.is_written = is_written
        self._path, self._warn, self._mesh = path, warn, mesh
        self._waiting: list[str] = []
        self._has_warned = False

    def begin(self, step: int, *, is_evaluated: bool = True) -> None:
        """Drop all lines of later steps than ``step``; at no time the earlier ones are missing. Collective.

        Args:
            step: that the run goes on after.
            is_evaluated: whether the evaluation after that step isn't made again.

        Raises:
            CheckpointError: there is another file, or it can't be written.
        """

        def begin() -> None:
            if self.is_written:
                self._cut_back(step, is_evaluated=is_evaluated)

        run_on_all_ranks(begin, self._mesh, what="start of the metrics")

    def _cut_back(self, step: int, *, is_evaluated: bool) -> None:
        def stays(record: dict[str, Any]) -> bool:
            return record["step"] < step or (record["step"] == step and (is_evaluated or "loss" in record))

        check_metrics(self._path)
        beside = self._path.with_name(f"{self._path.name}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with beside.open("wb") as file:
                if step and self._path.exists():
                    file.writelines(line for line, record in _records(self._path) if stays(record))
            beside.replace(self._path)
        except OSError as error:
            raise CheckpointError(f"{self._path} can't be written: {error.strerror}") from error

    def add(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Append one line. What isn't known, or isn't a finite number, is null there."""
        if not self.is_written:
            return
        known = {name: value if value is None or math.isfinite(value) else None for name, value in figures.items()}
        self._waiting.append(json.dumps({"step": step, **known}) + "\n")
        try:
            self._write()
        except OSError as error:
            if not self._has_warned:
                self._warn(f"{self._path} can't be written ({error.strerror}); training goes on")
            self._has_warned = True

    def sync(self) -> None:
        """Bring the file up to date on its device; collective.

        Raises:
            CheckpointError: that isn't possible.
        """

        def sync() -> None:
            try:
                if self.is_written:
                    self._write(sync=True)
            except OSError as error:
                raise CheckpointError(f"{self._path} can't be written: {error.strerror}") from error

        run_on_all_ranks(sync, self._mesh, what="save of the metrics")

    def _write(self, *, sync: bool = False) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            while self._waiting:
                line = self._waiting[0].encode()
                # A part of a line, on a disk that became full, would make the next one unreadable.
                end = os.lseek(descriptor, 0, os.SEEK_END)
                if os.write(descriptor, line) < len(line):
                    os.ftruncate(descriptor, end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                del self._waiting[0]
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a file and what they say, until the first that isn't complete."""
    with path.open("rb") as file:
        while (line := file.readline(_LONGEST_LINE)).endswith(b"\n"):
            record = _record(line)
            if record is None:
                return
            yield line, record


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_step = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if is_step else None
