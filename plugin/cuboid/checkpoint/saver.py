"""Write a checkpoint: all ranks together, at once or behind training's back, complete or not at all."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cuboid.checkpoint.contents import Contents
from cuboid.checkpoint.format.folder import INCOMPLETE, abandon, begin, commit, point_latest, prune, sweep
from cuboid.checkpoint.format.manifest import FileRecord, Manifest, record_of
from cuboid.checkpoint.format.state_file import write_state
from cuboid.checkpoint.optimizer_state import merged
from cuboid.checkpoint.partial_saves import TakenOver, add_kept, take_over
from cuboid.checkpoint.writer import Written, write_families, write_indices
from cuboid.config.schema import CheckpointConfig
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.rank_agreement import agreement_lane, gather_objects, raise_on_all_ranks, run_on_all_ranks
from cuboid.errors import CheckpointError, CuboidError

logger = logging.getLogger(__name__)


class Saver:
    """Writes the checkpoints of one model.

    Args:
        mesh: of this rank.
        settings: of the ``checkpoint`` section.
    """

    def __init__(self, mesh: Mesh, settings: CheckpointConfig) -> None:
        self._mesh = mesh
        self._settings = settings
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    def save(self, root: Path, tag: str, contents: Contents, *, latest: bool = True) -> bool:
        """Write ``root/tag``. Collective over the world.

        A checkpoint of that name gives way; but if its document has the same ``id``, what it has besides stays.

        If asynchronous, this returns when the contents are copied; :meth:`wait`, which the next call does too, tells
        how it went.

        Args:
            root: folder of checkpoints, the same on all ranks.
            tag: name of this one.
            contents: of this rank.
            latest: whether ``root/latest`` is to name it.

        Returns:
            Whether it is there, or on its way.

        Raises:
            CheckpointError: on every rank, where any of them failed; unless ``on_failure`` is ``warn``.
        """
        self.wait()
        self._mesh.connect_host()
        if not self._settings.asynchronous:
            return self._tell(self._attempt(root, tag, contents, latest))
        copied = contents.copied()

        def work() -> None:
            with agreement_lane("checkpoint"):
                self._failure = self._attempt(root, tag, copied, latest)
            if self._failure is not None:
                # At once, in case that nobody waits.
                logger.error("%s", self._failure)

        self._thread = threading.Thread(target=work, name=f"checkpoint {tag}")
        self._thread.start()
        return True

    def wait(self) -> bool:
        """Wait for a checkpoint that is on its way.

        Returns:
            False where it could not be written and ``on_failure`` is ``warn``.

        Raises:
            CheckpointError: as :meth:`save`.
        """
        if self._thread is None:
            return True
        self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        return self._tell(failure)

    def _tell(self, failure: CheckpointError | None) -> bool:
        if failure is None:
            return True
        if self._settings.on_failure == "raise":
            raise failure
        if self._mesh.rank == 0:
            logger.warning("no checkpoint was written, and training goes on: %s", failure)
        return False

    def _attempt(self, root: Path, tag: str, contents: Contents, latest: bool) -> CheckpointError | None:
        try:
            run_on_all_ranks(lambda: self._write(root, tag, contents, latest), self._mesh, what=f"save of {tag}")
        except CheckpointError as error:
            return error
        except Exception as error:
            # Such as a connection to a rank that is gone; in a thread nobody else would hear of it.
            failure = CheckpointError(f"{root / tag} can't be written: {error}")
            failure.__cause__ = error
            if isinstance(error, CuboidError):
                # All ranks know of it.
                failure.rank, failure.shared = error.rank, error.shared
                return failure
            return failure.arising_on(self._mesh.rank)
        return None

    def _write(self, root: Path, tag: str, contents: Contents, latest: bool) -> None:
        folder, taken = self._begin(root, tag, contents)
        longest = self._settings.max_file_bytes
        try:
            with self._bar(tag) as bar:
                results = write_families(
                    contents.families, folder, self._mesh, max_file_bytes=longest, advance=bar.update
                )
            own = results[self._mesh.rank]
            raise_on_all_ranks(self._fault(folder, own), self._mesh)
            document = add_kept(self._document(contents), taken.document)
            self._on_first(lambda: self._finish(root, tag, folder, contents, document, results, taken, latest))
        except BaseException:
            if self._mesh.rank == 0:
                abandon(root, tag)
            raise

    def _begin(self, root: Path, tag: str, contents: Contents) -> tuple[Path, TakenOver]:
        asked = gather_objects((str(root), tag), self._mesh)
        if len(set(asked)) > 1:
            other = next(rank for rank, one in enumerate(asked) if one != asked[0])
            raise CheckpointError(f"rank 0 saves {asked[0]}, but rank {other} saves {asked[other]}; give all the same")

        taken = TakenOver()

        def prepare() -> None:
            nonlocal taken
            sweep(root)
            taken = take_over(root / tag, begin(root, tag), contents)

        self._on_first(prepare)
        folder = root / f"{tag}{INCOMPLETE}"
        missing = None
        if not folder.is_dir():
            missing = CheckpointError(
                f"{folder}: was made by rank 0, but rank {self._mesh.rank} doesn't see it; checkpoints need a folder "
                "that all ranks share"
            )
        raise_on_all_ranks(missing, self._mesh)
        return folder, taken

    def _bar(self, tag: str) -> Any:
        # Of the first rank's stage, whose files are all written at the same time as the others'.
        hidden = None if self._mesh.rank == 0 else True
        form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
        return tqdm(total=1.0, desc=f"checkpoint {tag}", disable=hidden, bar_format=form, leave=False)

    def _fault(self, folder: Path, written: Written) -> CheckpointError | None:
        """What is wrong with this rank's files."""
        if written.failure is not None:
            return CheckpointError(written.failure)
        if not self._settings.verify:
            return None
        try:
            differing = [name for name, record in written.records.items() if _read_back(folder / name) != record]
        except OSError as error:
            return CheckpointError(f"{error.filename}: can't be read back: {error.strerror}")
        if differing:
            return CheckpointError(f"{folder / differing[0]}: reads back differently than it was written")
        return None

    def _document(self, contents: Contents) -> dict[str, Any]:
        """The first rank's document with what only the others know; whole on the first rank."""
        at = self._mesh.coordinate
        speaks = self._mesh.rank == self._mesh.stage_ranks[0][0]
        optimizer = contents.optimizer
        told = None
        if optimizer is not None and speaks:
            # Their names alone; a stage that is frozen as a whole may have none.
            told = dataclasses.replace(optimizer, quantities={name: {} for name in optimizer.quantities})
        place = {"pipe": at.pipe, "data": at.data, "mesh": self._mesh.mesh_ranks.index(self._mesh.rank)}
        parts = gather_objects((told, {**place, "state": dict(contents.random)}), self._mesh)
        document = {**contents.document, "random": [random for _, random in parts]}
        if optimizer is not None:
            states = [state for state, _ in parts if state is not None]
            numbers, groups = merged(states)
            names = sorted({name for state in states for name in state.quantities})
            document["optimizer"] = {
                "class": optimizer.kind,
                "quantities": names,
                "numbers": numbers,
                "groups": groups,
            }
        return document

    def _finish(
        self,
        root: Path,
        tag: str,
        folder: Path,
        contents: Contents,
        document: Mapping[str, Any],
        results: Sequence[Written],
        taken: TakenOver,
        latest: bool,
    ) -> None:
        write_indices(folder, results)
        contents.auxiliary_files(folder)
        write_state(folder, document)
        records: dict[str, FileRecord] = dict(taken.records)
        for written in results:
            records.update(written.records)
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in records:
                records[name] = record_of(path)
        commit(root, tag, Manifest(step=contents.step, files=dict(sorted(records.items()))))
        if latest:
            point_latest(root, tag)
        if self._settings.keep_last is not None:
            prune(root, self._settings.keep_last)

    def _on_first(self, action: Callable[[], object]) -> None:
        """Do something on the first rank; raise on all if it fails."""
        run_on_all_ranks(lambda: action() if self._mesh.rank == 0 else None, self._mesh, what="work of the first rank")


def _read_back(path: Path) -> FileRecord:
    return record_of(path, from_disk=True)
