"""Write a checkpoint on all ranks, synchronously or in the background, and publish it atomically."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from tqdm import tqdm

from cuboid.checkpoint.contents import OPTIMIZER, Contents
from cuboid.checkpoint.format.folder import INCOMPLETE, abandon, begin, commit, point_latest, prune, sweep
from cuboid.checkpoint.format.manifest import FileRecord, Manifest, record_of
from cuboid.checkpoint.format.state_file import STATE, TENSORS, read_state, write_state
from cuboid.checkpoint.optimizer_state import merge_stages
from cuboid.checkpoint.writer import Written, write_families, write_indices
from cuboid.config.schema import CheckpointConfig
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CheckpointError, CuboidError
from cuboid.failures.rank_agreement import agreement_lane, gather_objects, raise_on_all_ranks, run_on_all_ranks

logger = logging.getLogger(__name__)
#: By mesh, its last save in the background, which has the mesh's host groups to itself until it ends.
_in_background: WeakKeyDictionary[Mesh, threading.Thread] = WeakKeyDictionary()
#: Keys of ``state.json`` that only one of several partial saves (model, optimizer, scheduler) has a value for.
_CARRIED_KEYS = ("optimizer", "scheduler", "scheduler_class", "scheduler_groups")


class Saver:
    """Writes the checkpoints of one model.

    Args:
        mesh: this rank's mesh.
        settings: the config's ``checkpoint`` section.
    """

    def __init__(self, mesh: Mesh, settings: CheckpointConfig) -> None:
        self._mesh = mesh
        self._settings = settings
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        #: What was saved outside of a run's own folder of checkpoints, where other runs may save too.
        self._own: set[Path] = set()

    def save(self, root: Path, tag: str, contents: Contents, *, latest: bool = True) -> bool:
        """Write ``root/tag``. Collective over the world.

        An existing checkpoint of that name is replaced. If its document has the same ``id``, the parts that
        ``contents`` lacks are carried over from it.

        An asynchronous save returns once the contents are copied to host memory; :meth:`wait`, which the next save
        calls first, reports its outcome.

        Args:
            root: folder of checkpoints, the same on all ranks.
            tag: name of the checkpoint.
            contents: this rank's part.
            latest: whether to point ``root/latest`` to it. If not, ``root`` is no folder of this run alone, and of
                other checkpoints in it only those that this saver wrote may be removed.

        Returns:
            Whether it was written, or is being written.

        Raises:
            CheckpointError: on every rank if any of them failed, unless ``on_failure`` is ``warn``.
        """
        self.wait()
        join_background_save(self._mesh)
        self._mesh.connect_host()
        if not self._settings.asynchronous:
            return self._report(self._attempt(lambda: self._write(root, tag, contents, latest), root, tag))
        snapshot = contents

        def copy() -> None:
            nonlocal snapshot
            snapshot = contents.snapshot()

        failure = self._attempt(copy, root, tag)
        if failure is not None:
            return self._report(failure)

        def work() -> None:
            # A separate lane, so that this thread's rank agreements aren't matched with those of training.
            with agreement_lane("checkpoint"):
                self._failure = self._attempt(lambda: self._write(root, tag, snapshot, latest), root, tag)
            if self._failure is not None:
                # Log it at once: the next save, which raises it, may be hours away or never come.
                logger.error("%s", self._failure)

        self._thread = threading.Thread(target=work, name=f"checkpoint {tag}")
        _in_background[self._mesh] = self._thread
        self._thread.start()
        return True

    def wait(self) -> bool:
        """Wait for a checkpoint that is being written in the background.

        Returns:
            False if it could not be written and ``on_failure`` is ``warn``.

        Raises:
            CheckpointError: as :meth:`save`.
        """
        if self._thread is None:
            return True
        self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        return self._report(failure)

    def _report(self, failure: CheckpointError | None) -> bool:
        if failure is None:
            return True
        if self._settings.on_failure == "raise":
            raise failure
        if self._mesh.rank == 0:
            logger.warning("no checkpoint was written, and training continues: %s", failure)
        return False

    def _attempt(self, action: Callable[[], None], root: Path, tag: str) -> CheckpointError | None:
        """Run a part of a save on all ranks; what failed on any of them is returned on all."""
        try:
            run_on_all_ranks(action, self._mesh, what=f"save of {tag}")
        except CheckpointError as error:
            return error
        except Exception as error:
            # All exceptions, such as a lost connection to another rank: raised in a thread, one would go unnoticed.
            failure = CheckpointError(f"{root / tag} can't be written: {error}")
            failure.__cause__ = error
            if isinstance(error, CuboidError):
                # All ranks have agreed on this error already; keep the rank that raised it.
                failure.rank, failure.shared = error.rank, error.shared
                return failure
            return failure.arising_on(self._mesh.rank)
        return None

    def _write(self, root: Path, tag: str, contents: Contents, latest: bool) -> None:
        folder, carried = self._begin(root, tag, contents, is_own_folder=latest)
        longest = self._settings.max_file_bytes
        # Rank 0 shows the progress of its own stage; the other stages write at the same time.
        bar_format = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
        # With ``disable=None``, tqdm shows the bar on terminals only.
        hidden = None if self._mesh.rank == 0 else True
        try:
            with tqdm(
                total=1.0, desc=f"checkpoint {tag}", disable=hidden, bar_format=bar_format, leave=False
            ) as progress:
                results = write_families(
                    contents.families, folder, self._mesh, max_file_bytes=longest, advance=progress.update
                )
            own = results[self._mesh.rank]
            raise_on_all_ranks(self._fault(folder, own), self._mesh)
            document = carried.added_to(self._document(contents))
            self._on_first(lambda: self._finish(root, tag, folder, contents, document, results, carried, latest))
        except BaseException:
            if self._mesh.rank == 0:
                abandon(root, tag)
            raise

    def _begin(self, root: Path, tag: str, contents: Contents, *, is_own_folder: bool) -> tuple[Path, CarriedOver]:
        # Ranks that write into different folders would each publish a part of a checkpoint.
        asked = gather_objects((str(root), tag), self._mesh)
        if len(set(asked)) > 1:
            other = next(rank for rank, one in enumerate(asked) if one != asked[0])
            raise CheckpointError(f"rank 0 saves {asked[0]}, but rank {other} saves {asked[other]}; give all the same")

        carried = CarriedOver()

        def prepare() -> None:
            nonlocal carried
            if is_own_folder:
                sweep(root)
            carried = carry_over(root / tag, begin(root, tag), contents)

        self._on_first(prepare)
        folder = root / f"{tag}{INCOMPLETE}"
        missing = None
        if not folder.is_dir():
            missing = CheckpointError(
                f"{folder}: was made by rank 0, but rank {self._mesh.rank} doesn't see it; checkpoints need a folder "
                "that all ranks share"
            )
        raise_on_all_ranks(missing, self._mesh)
        return folder, carried

    def _fault(self, folder: Path, written: Written) -> CheckpointError | None:
        """Check the files that this rank wrote; returns what is wrong with them, if anything."""
        if written.failure is not None:
            return CheckpointError(written.failure)
        if not self._settings.verify:
            return None
        try:
            differing = [
                name for name, record in written.records.items() if record_of(folder / name, from_disk=True) != record
            ]
        except OSError as error:
            return CheckpointError(f"{error.filename}: can't be read back: {error.strerror}")
        if differing:
            return CheckpointError(f"{folder / differing[0]}: reads back differently than it was written")
        return None

    def _document(self, contents: Contents) -> dict[str, Any]:
        """Contents of ``state.json``: this rank's document, and the states gathered from all ranks. Collective."""
        at = self._mesh.coordinate
        optimizer = contents.optimizer
        own_state = None
        if optimizer is not None and self._mesh.rank == self._mesh.stage_ranks[0][0]:
            # One rank per stage is enough. Quantities are reduced to their names, as their tensors are in the files.
            own_state = replace(optimizer, quantities={name: {} for name in optimizer.quantities})
        place = {"pipe": at.pipe, "data": at.data, "mesh": self._mesh.mesh_ranks.index(self._mesh.rank)}
        parts = gather_objects((own_state, {**place, "state": dict(contents.random)}), self._mesh)
        document = {**contents.document, "random": [random for _, random in parts]}
        if optimizer is not None:
            states = [state for state, _ in parts if state is not None]
            numbers, groups = merge_stages(states)
            # The union over all stages, because a stage whose parameters are all frozen has no quantities.
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
        carried: CarriedOver,
        latest: bool,
    ) -> None:
        """Write everything but the tensors, and publish the checkpoint; rank 0 only."""
        write_indices(folder, results)
        contents.auxiliary_files(folder)
        write_state(folder, document)
        records: dict[str, FileRecord] = dict(carried.records)
        for written in results:
            records.update(written.records)
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in records:
                records[name] = record_of(path)
        commit(root, tag, Manifest(step=contents.step, files=dict(sorted(records.items()))))
        if latest:
            point_latest(root, tag)
        else:
            self._own.add(root / tag)
        if self._settings.keep_last is not None:
            among = None if latest else {path.name for path in self._own if path.parent == root}
            prune(root, self._settings.keep_last, tag, among)

    def _on_first(self, action: Callable[[], object]) -> None:
        """Run something on rank 0; if it fails, raise on all ranks."""
        run_on_all_ranks(lambda: action() if self._mesh.rank == 0 else None, self._mesh, what="work of the first rank")


def join_background_save(mesh: Mesh) -> None:
    """Wait until no save runs in the background. For whoever communicates over the mesh's host groups.

    Its outcome is still reported by :meth:`Saver.wait`. All ranks started the save at the same place of their programs,
    so all of them wait here for the same one.
    """
    thread = _in_background.get(mesh)
    if thread is not None:
        thread.join()


# --- checkpoints that several calls write, such as ColossalAI's save_model and save_optimizer ---
#
# A call whose document has the same id as the existing checkpoint adds to it: the parts that the call doesn't write are
# carried over into the new checkpoint, which then replaces the old one atomically, as in any other save.


@dataclass(frozen=True)
class CarriedOver:
    """What a new checkpoint takes over from the one that it replaces.

    Attributes:
        records: sizes and checksums of the files, by name.
        document: entries of ``state.json``.
    """

    records: dict[str, FileRecord] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)

    def added_to(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return a new checkpoint's document with the carried-over entries added, where its own are None."""
        return {**document, **{key: value for key, value in self.document.items() if document.get(key) is None}}


def carry_over(old: Path, folder: Path, contents: Contents) -> CarriedOver:
    """Link files of the old checkpoint that this save doesn't write into the new folder, if both have the same id.

    Args:
        old: the checkpoint that will be replaced; it may not exist.
        folder: the new checkpoint's folder.
        contents: what this save writes.

    Raises:
        OSError: from the file system.
    """
    try:
        manifest = Manifest.read(old)
        document = read_state(old, manifest)
    except CheckpointError:
        # There is no old checkpoint, or a damaged one, whose id can't be trusted.
        return CarriedOver()
    if document.get("id") != contents.document.get("id"):
        return CarriedOver()
    # A part is the optimizer's folder or, with the empty name, the weights and the files beside them.
    rewritten = {family.folder.partition("/")[0] for family in contents.families}
    records = {}
    for name, record in manifest.files.items():
        part = OPTIMIZER if name.startswith(f"{OPTIMIZER}/") else ""
        if part in rewritten or name in (STATE, TENSORS):
            continue
        records[name] = record
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            # A hard link is enough, because files of a checkpoint are never modified.
            os.link(old / name, folder / name)
        except OSError:
            shutil.copyfile(old / name, folder / name)
    return CarriedOver(records, {key: document[key] for key in _CARRIED_KEYS if document.get(key) is not None})
