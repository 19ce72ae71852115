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

from cuboid.checkpoint.format.folder import INCOMPLETE, abandon, begin, commit, point_latest, prune, sweep
from cuboid.checkpoint.format.manifest import FileRecord, Manifest, record_of
from cuboid.checkpoint.format.state_file import STATE, TENSORS, read_state, write_state
from cuboid.checkpoint.optimizer_state import merge_stages
from cuboid.checkpoint.save_plan import OPTIMIZER, SavePlan
from cuboid.checkpoint.snapshot import snapshot
from cuboid.checkpoint.writer import WriteResult, write_indices, write_items
from cuboid.config.schema import CheckpointConfig
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CheckpointError, CuboidError, PeerLostError
from cuboid.failures.rank_agreement import agreement_lane, gather_objects, raise_on_all_ranks, run_on_all_ranks

logger = logging.getLogger(__name__)
#: By mesh, its last save in the background, which has the mesh's host groups to itself until it ends.
_in_background: WeakKeyDictionary[Mesh, threading.Thread] = WeakKeyDictionary()
#: Keys of ``state.json`` that only one of several partial saves (model, optimizer, scheduler) has a value for.
_KEPT_KEYS = ("optimizer", "scheduler", "scheduler_class", "scheduler_groups")


class Saver:
    """Writes the checkpoints of one model, as the config's ``checkpoint`` section says."""

    def __init__(self, mesh: Mesh, settings: CheckpointConfig) -> None:
        self._mesh = mesh
        self._settings = settings
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        #: What was saved outside of a run's own folder of checkpoints, where other runs may save too, by the ``id`` of
        #: the state that it is of, or a part of; the last one last.
        self._saved_elsewhere: dict[Path, Any] = {}

    def save(self, root: Path, tag: str, plan: SavePlan, *, latest: bool = True) -> bool:
        """Write ``root/tag``. Collective over the world.

        An existing checkpoint of that name is replaced. If its document has the same ``id``, what ``plan`` lacks is
        kept from it.

        An asynchronous save returns once the plan's tensors are copied to host memory; :meth:`wait`, which the next
        save calls first, reports its outcome.

        Args:
            root: folder of checkpoints, the same on all ranks.
            tag: name of the checkpoint.
            plan: this rank's part.
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
            return self._report(self._attempt(lambda: self._write(root, tag, plan, latest), root, tag))
        copied = plan

        def copy() -> None:
            nonlocal copied
            copied = snapshot(plan)

        failure = self._attempt(copy, root, tag)
        if failure is not None:
            return self._report(failure)

        def work() -> None:
            # A separate lane, so that this thread's rank agreements aren't matched with those of training.
            with agreement_lane("checkpoint"):
                self._failure = self._attempt(lambda: self._write(root, tag, copied, latest), root, tag)
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
            # A rank that is lost says nothing of the disk.
            how = "wasn't" if isinstance(error, PeerLostError) else "can't be"
            failure = CheckpointError(f"{root / tag} {how} written: {error}")
            failure.__cause__ = error
            if isinstance(error, CuboidError):
                # All ranks have agreed on this error already; keep the rank that raised it.
                failure.rank, failure.shared = error.rank, error.shared
                return failure
            return failure.arising_on(self._mesh.rank)
        return None

    def _write(self, root: Path, tag: str, plan: SavePlan, latest: bool) -> None:
        folder, kept_metadata = self._begin(root, tag, plan, is_own_folder=latest)
        max_file_bytes = self._settings.max_file_bytes
        # Rank 0 shows the progress of its own stage; the other stages write at the same time.
        bar_format = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
        # With ``disable=None``, tqdm shows the bar on terminals only.
        hidden = None if self._mesh.rank == 0 else True
        try:
            with tqdm(
                total=1.0, desc=f"checkpoint {tag}", disable=hidden, bar_format=bar_format, leave=False
            ) as progress:
                results = write_items(
                    plan.items, folder, self._mesh, max_file_bytes=max_file_bytes, advance=progress.update
                )
            raise_on_all_ranks(self._fault(folder, results[self._mesh.rank]), self._mesh)
            document = kept_metadata.added_to(self._document(plan))
            self._on_first(lambda: self._finish(root, tag, folder, plan, document, results, kept_metadata, latest))
        except BaseException:
            if self._mesh.rank == 0:
                abandon(root, tag)
            raise

    def _begin(self, root: Path, tag: str, plan: SavePlan, *, is_own_folder: bool) -> tuple[Path, KeptMetadata]:
        # Ranks that write into different folders would each publish a part of a checkpoint.
        targets = gather_objects((str(root), tag), self._mesh)
        if len(set(targets)) > 1:
            other = next(rank for rank, target in enumerate(targets) if target != targets[0])
            raise CheckpointError(
                f"rank 0 saves {targets[0]}, but rank {other} saves {targets[other]}; give all the same"
            )

        kept_metadata = KeptMetadata()

        def prepare() -> None:
            nonlocal kept_metadata
            if is_own_folder:
                sweep(root)
            kept_metadata = keep_unwritten(root / tag, begin(root, tag), plan)

        self._on_first(prepare)
        folder = root / f"{tag}{INCOMPLETE}"
        missing = None
        if not folder.is_dir():
            missing = CheckpointError(
                f"{folder}: was made by rank 0, but rank {self._mesh.rank} doesn't see it; checkpoints need a folder "
                "that all ranks share"
            )
        raise_on_all_ranks(missing, self._mesh)
        return folder, kept_metadata

    def _fault(self, folder: Path, result: WriteResult) -> CheckpointError | None:
        """Check the files that this rank wrote; returns what is wrong with them, if anything."""
        if result.failure is not None:
            return CheckpointError(result.failure)
        if not self._settings.verify:
            return None
        try:
            differing = [
                name for name, record in result.records.items() if record_of(folder / name, from_disk=True) != record
            ]
        except OSError as error:
            return CheckpointError(f"{error.filename}: can't be read back: {error.strerror}")
        if differing:
            return CheckpointError(f"{folder / differing[0]}: reads back differently than it was written")
        return None

    def _document(self, plan: SavePlan) -> dict[str, Any]:
        """Contents of ``state.json``: this rank's document, and the states gathered from all ranks. Collective."""
        at = self._mesh.coordinate
        optimizer = plan.optimizer
        optimizer_state = None
        if optimizer is not None and self._mesh.rank == self._mesh.stage_ranks[0][0]:
            # One rank per stage is enough. Quantities are reduced to their names, as their tensors are in the files.
            optimizer_state = replace(optimizer, quantities={name: {} for name in optimizer.quantities})
        place = {"pipe": at.pipe, "data": at.data, "mesh": self._mesh.mesh_ranks.index(self._mesh.rank)}
        gathered = gather_objects((optimizer_state, {**place, "state": dict(plan.random)}), self._mesh)
        document = {**plan.document, "random": [random for _, random in gathered]}
        if optimizer is not None:
            states = [state for state, _ in gathered if state is not None]
            numbers, groups = merge_stages(states)
            # The union over all stages, because a stage whose parameters are all frozen has no quantities.
            names = sorted({name for state in states for name in state.quantities})
            document["optimizer"] = {
                "class": optimizer.kind,
                "package": optimizer.package,
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
        plan: SavePlan,
        document: Mapping[str, Any],
        results: Sequence[WriteResult],
        kept_metadata: KeptMetadata,
        latest: bool,
    ) -> None:
        """Write everything but the tensors, and publish the checkpoint; rank 0 only."""
        write_indices(folder, results)
        plan.auxiliary_files(folder)
        write_state(folder, document)
        records: dict[str, FileRecord] = dict(kept_metadata.records)
        for result in results:
            records.update(result.records)
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in records:
                records[name] = record_of(path)
        commit(root, tag, Manifest(step=plan.step, files=dict(sorted(records.items()))))
        keep_last = self._settings.keep_last
        if latest:
            point_latest(root, tag)
            if keep_last is not None:
                prune(root, keep_last, tag)
            return
        self._saved_elsewhere.pop(root / tag, None)
        self._saved_elsewhere[root / tag] = plan.document.get("id", tag)
        if keep_last is not None:
            prune(root, 1, tag, self._superseded(root, keep_last))

    def _superseded(self, root: Path, keep_last: int) -> set[str]:
        """Tags in ``root`` that aren't of the last ``keep_last`` states; several may be parts of one state."""
        beside = {path.name: state for path, state in self._saved_elsewhere.items() if path.parent == root}
        kept = list(dict.fromkeys(reversed(beside.values())))[:keep_last]
        return {tag for tag, state in beside.items() if state not in kept}

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
# A call whose document has the same id as the existing checkpoint adds to it: what the call doesn't write is kept in
# the new checkpoint, which then replaces the old one atomically, as in any other save.


@dataclass(frozen=True)
class KeptMetadata:
    """What a new checkpoint keeps of the one that it replaces: files by name, and entries of ``state.json``."""

    records: dict[str, FileRecord] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)

    def added_to(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return a new checkpoint's document with the kept entries added, where its own are None."""
        return {**document, **{key: value for key, value in self.document.items() if document.get(key) is None}}


def keep_unwritten(old: Path, folder: Path, plan: SavePlan) -> KeptMetadata:
    """Link files of the old checkpoint that this save doesn't write into the new folder, if both have the same id.

    The old checkpoint, which will be replaced, may not exist.
    """
    try:
        manifest = Manifest.read(old)
        document = read_state(old, manifest)
    except CheckpointError:
        # There is no old checkpoint, or a damaged one, whose id can't be trusted.
        return KeptMetadata()
    if document.get("id") != plan.document.get("id"):
        return KeptMetadata()
    # Either the optimizer's folder or, with the empty name, the weights and the files beside them.
    rewritten = {item.folder.partition("/")[0] for item in plan.items}
    records = {}
    for name, record in manifest.files.items():
        belongs_to = OPTIMIZER if name.startswith(f"{OPTIMIZER}/") else ""
        if belongs_to in rewritten or name in (STATE, TENSORS):
            continue
        records[name] = record
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            # A hard link is enough, because files of a checkpoint are never modified.
            os.link(old / name, folder / name)
        except OSError:
            shutil.copyfile(old / name, folder / name)
    return KeptMetadata(records, {key: document[key] for key in _KEPT_KEYS if document.get(key) is not None})
