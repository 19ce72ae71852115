"""Open a checkpoint on all ranks, and restore an optimizer's state from it, whichever layout it was written with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cuboid.checkpoint.contents import OPTIMIZER
from cuboid.checkpoint.format.folder import is_intact, others_beside, resolve
from cuboid.checkpoint.format.links import reject_outward_links
from cuboid.checkpoint.format.manifest import Manifest, check_contents, check_sizes
from cuboid.checkpoint.format.run_state import check_document
from cuboid.checkpoint.format.state_file import read_state
from cuboid.checkpoint.optimizer_state import MASTER, OptimizerAdapter
from cuboid.checkpoint.reader import TensorFolder
from cuboid.checkpoint.save_planner import assign
from cuboid.checkpoint.shards import Run
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CheckpointError, DamagedCheckpointError
from cuboid.failures.rank_agreement import gather_objects, run_on_all_ranks
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec


@dataclass(frozen=True)
class Opened:
    """A verified checkpoint: the sizes of all files were checked, and on request their checksums.

    Attributes:
        path: its folder.
        step: optimizer steps at the time it was written.
        document: contents of its ``state.json``.
    """

    path: Path
    step: int
    document: dict[str, Any]


@dataclass(frozen=True)
class Placed:
    """A parameter's full shape, and how the mesh shards it (None if it doesn't)."""

    shape: tuple[int, ...]
    layout: ShardingSpec | None


def open_checkpoint(root: Path, tag: str | None, mesh: Mesh, *, verify: bool) -> Opened:
    """Find a checkpoint and verify that it is complete. Collective over the world.

    Args:
        root: folder of checkpoints, or one checkpoint.
        tag: which one; None for the latest.
        mesh: this rank's mesh.
        verify: whether to compare checksums too; the files are divided among the ranks.

    Raises:
        CheckpointError: on every rank, naming what is missing or wrong.
    """
    mesh.connect_host()

    def find() -> Path | None:
        # Only rank 0 looks: if a save completes meanwhile, two ranks could find different checkpoints.
        return resolve(root, tag) if mesh.rank == 0 else None

    path = gather_objects(run_on_all_ranks(find, mesh), mesh)[0]
    assert path is not None

    def check() -> Manifest:
        manifest = Manifest.read(path)
        if mesh.rank == 0:
            reject_outward_links(path)
            check_sizes(path, manifest)
        if verify:
            check_contents(path, manifest, _own_share(manifest, mesh))
        return manifest

    def read() -> dict[str, Any]:
        document = read_state(path, manifest)
        check_document(document, path)
        return document

    try:
        manifest = run_on_all_ranks(check, mesh)
        document = run_on_all_ranks(read, mesh)
    except CheckpointError as error:
        intact = _newest_intact(path, mesh)
        damaged = DamagedCheckpointError(suggest_intact(str(error), intact), intact)
        damaged.rank = error.rank
        raise damaged from error
    return Opened(path, manifest.step, document)


def suggest_intact(message: str, intact: Path | None) -> str:
    """A message about a damaged checkpoint, extended by the intact one to load instead."""
    if intact is None:
        return f"{message}; no other checkpoint beside it is intact"
    return f"{message}; the newest intact one beside it is {intact.name}, of step {Manifest.read(intact).step}"


def _newest_intact(damaged: Path, mesh: Mesh) -> Path | None:
    """The newest checkpoint beside a damaged one whose files all match their checksums. Collective over the world."""
    siblings = gather_objects(others_beside(damaged) if mesh.rank == 0 else [], mesh)[0]
    for path in siblings:
        own_files_match = is_intact(path, lambda manifest: _own_share(manifest, mesh))
        if all(gather_objects(own_files_match, mesh)):
            return path
    return None


def load_optimizer(
    opened: Opened,
    adapter: OptimizerAdapter,
    placed: Mapping[str, Placed],
    mesh: Mesh,
    groups: Sequence[Sequence[str]],
) -> None:
    """Restore an optimizer's state; per-element quantities are read only where this rank owns the elements.

    Args:
        opened: the checkpoint.
        adapter: the optimizer's adapter.
        placed: shape and layout of the model's parameters, by name.
        mesh: this rank's mesh.
        groups: names of the parameters, on all stages, of each parameter group.

    Raises:
        CheckpointError: the checkpoint has no optimizer state, one of another class, or one that lacks a tensor.
    """
    saved = opened.document.get("optimizer")
    if saved is None:
        raise CheckpointError(
            f"{opened.path}: has no optimizer state, only weights; load it without the optimizer's state"
        )
    if saved["class"] != adapter.kind:
        raise CheckpointError(
            f"{opened.path}: holds the state of {saved['class']}, but the optimizer is {adapter.kind}; configure the "
            "same one, or load without the optimizer's state"
        )
    adapter.allocate(saved["quantities"])
    for quantity, runs in adapter.state().quantities.items():
        if quantity in saved["quantities"]:
            _fill(runs, opened.path / OPTIMIZER / quantity, placed, mesh, needed=saved["numbers"])
        elif quantity == MASTER:
            # The run that wrote it trained in the masters' precision, so its weights are the masters.
            _fill(runs, opened.path, placed, mesh, needed=())
    adapter.restore(saved["numbers"], saved["groups"], groups)


def load_masters(
    opened: Opened, parameters: Mapping[str, torch.Tensor], placed: Mapping[str, Placed], mesh: Mesh
) -> None:
    """Load the checkpoint's master weights, if it has any, into parameters that have the masters' precision.

    The checkpoint's regular weights are only rounded copies of the masters.

    Args:
        opened: the checkpoint.
        parameters: this rank's shards, by name.
        placed: the same parameters' shapes and layouts.
        mesh: this rank's mesh.
    """
    folder = opened.path / OPTIMIZER / MASTER
    if folder.is_dir():
        runs = {name: Run.whole(parameter) for name, parameter in parameters.items()}
        _fill(runs, folder, placed, mesh, needed=())


def _fill(
    runs: Mapping[str, Run], path: Path, placed: Mapping[str, Placed], mesh: Mesh, *, needed: Collection[str]
) -> None:
    """Fill runs from the tensors in a folder; a missing tensor is an error only if ``needed`` names it."""
    with TensorFolder(path) as folder:
        known = set(folder.names)
        for name, run in runs.items():
            if name in known:
                where = placed[name]
                run.values.copy_(folder.read_run(name, where.shape, where.layout, mesh, run.start, run.stop))
            elif name in needed:
                raise CheckpointError(f"{path}: lacks {name}")


def _own_share(manifest: Manifest, mesh: Mesh) -> list[str]:
    """The files whose checksums this rank compares; their total size is about the same on every rank."""
    names = list(manifest.files)
    readers = assign([manifest.files[name].bytes for name in names], range(mesh.topology.world_size))
    return [name for name, reader in zip(names, readers, strict=True) if reader == mesh.rank]
