"""Open a checkpoint on all ranks, and restore an optimizer's state from it, whichever layout it was written with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from cuboid.checkpoint.format.bounded_files import reject_outward_links
from cuboid.checkpoint.format.folder import is_intact, others_beside, resolve
from cuboid.checkpoint.format.manifest import Manifest, check_contents, check_sizes
from cuboid.checkpoint.format.state_document import check_document
from cuboid.checkpoint.format.state_file import read_state
from cuboid.checkpoint.metadata import CheckpointMetadata, ShardRange, TensorMetadata
from cuboid.checkpoint.optimizer_state import MASTER, OptimizerAdapter
from cuboid.checkpoint.reader import LoadPlan, TensorFolder
from cuboid.checkpoint.save_plan import OPTIMIZER
from cuboid.checkpoint.save_planner import assign
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CheckpointError, DamagedCheckpointError
from cuboid.failures.rank_agreement import gather_objects, run_on_all_ranks


def open_checkpoint(root: Path, tag: str | None, mesh: Mesh, *, verify: bool) -> CheckpointMetadata:
    """Find a checkpoint and verify that it is complete. Collective over the world.

    Args:
        root: folder of checkpoints, or one checkpoint.
        tag: which one; None for the latest.
        mesh: where the ranks agree on it.
        verify: whether to compare checksums too; the files are divided among the ranks.

    Raises:
        CheckpointError: on every rank, naming what is missing or wrong.
    """
    mesh.connect_host()

    def find() -> Path | None:
        # Only rank 0 looks: if a save completes meanwhile, two ranks could find different checkpoints.
        return resolve(root, tag) if mesh.rank == 0 else None

    path = gather_objects(run_on_all_ranks(find, mesh, what="search for a checkpoint"), mesh)[0]
    assert path is not None

    def check() -> Manifest:
        manifest = Manifest.read(path)
        if mesh.rank == 0:
            reject_outward_links(path)
            check_sizes(path, manifest)
        if verify:
            check_contents(path, manifest, _names_to_check(manifest, mesh))
        return manifest

    def read() -> dict[str, Any]:
        document = read_state(path, manifest)
        check_document(document, path)
        return document

    try:
        manifest = run_on_all_ranks(check, mesh, what=f"check of {path.name}")
        document = run_on_all_ranks(read, mesh, what=f"load of {path.name}")
    except CheckpointError as error:
        intact = _newest_intact(path, mesh)
        damaged = DamagedCheckpointError(suggest_intact(str(error), intact), intact)
        damaged.rank = error.rank
        raise damaged from error
    return CheckpointMetadata(path, manifest.step, document)


def suggest_intact(message: str, intact: Path | None) -> str:
    """A message about a damaged checkpoint, extended by the intact one to load instead."""
    if intact is None:
        return f"{message}; no other checkpoint beside it is intact"
    return f"{message}; the newest intact one beside it is {intact.name}, of step {Manifest.read(intact).step}"


def _newest_intact(damaged: Path, mesh: Mesh) -> Path | None:
    """The newest checkpoint beside a damaged one whose files all match their checksums. Collective over the world."""
    siblings = gather_objects(others_beside(damaged) if mesh.rank == 0 else [], mesh)[0]
    for path in siblings:
        matches = is_intact(path, lambda manifest: _names_to_check(manifest, mesh))
        if all(gather_objects(matches, mesh)):
            return path
    return None


def check_optimizer_state(
    checkpoint: CheckpointMetadata, adapter: OptimizerAdapter, groups: Sequence[Sequence[str]]
) -> Mapping[str, Any]:
    """What a checkpoint's document says of its optimizer, once it is known that this one can take it.

    ``groups`` has the names of each parameter group's parameters on all stages.

    Raises:
        CheckpointError: there is no optimizer state, or that of another class, or of other groups.
    """
    saved = checkpoint.document.get("optimizer")
    if saved is None:
        raise CheckpointError(
            f"{checkpoint.path}: has no optimizer state, only weights; load it without the optimizer's state"
        )
    if saved["class"] != adapter.kind:
        raise CheckpointError(
            f"{checkpoint.path}: holds the state of {saved['class']}, but the optimizer is {adapter.kind}; configure "
            "the same one, or load without the optimizer's state"
        )
    # Two packages have an Adafactor, with other states.
    package = saved.get("package") or adapter.package
    if adapter.whole is not None and package != adapter.package:
        raise CheckpointError(
            f"{checkpoint.path}: holds the state of the {saved['class']} of {package}, but the optimizer is that of "
            f"{adapter.package}; take the same one, or load without the optimizer's state"
        )
    adapter.check(saved["numbers"], saved["groups"], groups)
    return saved  # type: ignore[no-any-return]


def load_optimizer(
    checkpoint: CheckpointMetadata,
    adapter: OptimizerAdapter,
    parameters: Mapping[str, TensorMetadata],
    mesh: Mesh,
    groups: Sequence[Sequence[str]],
) -> None:
    """Restore an optimizer's state; per-element quantities are read only where this rank owns the elements.

    ``parameters`` has all parameters of the model by name; ``groups`` has the names of each parameter group's
    parameters on all stages.

    Raises:
        CheckpointError: the checkpoint has no optimizer state, one of another class, or one that lacks a tensor.
    """
    saved = check_optimizer_state(checkpoint, adapter, groups)
    required: Collection[str] = saved["numbers"]
    if adapter.whole is None:
        adapter.allocate(saved["quantities"])
    else:
        _load_whole(checkpoint, adapter, saved)
        # Which quantities a parameter has depends on its shape and group.
        required = ()
    for quantity, ranges in adapter.state().quantities.items():
        if adapter.whole is not None and quantity != MASTER:
            ranges = {name: target for name, target in ranges.items() if name not in adapter.whole.keys}
        if quantity in saved["quantities"]:
            folder = checkpoint.path / OPTIMIZER / quantity
            LoadPlan(folder, ranges, parameters, required).read(mesh)
        elif quantity == MASTER:
            # The run that wrote it trained in the masters' precision, so its weights are the masters.
            LoadPlan(checkpoint.path, ranges, parameters, required=()).read(mesh)
    adapter.restore(saved["numbers"], saved["groups"], groups)


def _load_whole(checkpoint: CheckpointMetadata, adapter: OptimizerAdapter, saved: Mapping[str, Any]) -> None:
    """Load the states of the whole tensors that this rank steps, and allocate those of others."""
    with ExitStack() as stack:
        folders = {
            quantity: stack.enter_context(TensorFolder(checkpoint.path / OPTIMIZER / quantity))
            for quantity in saved["quantities"]
        }
        held = {quantity: set(folder.names) for quantity, folder in folders.items()}
        adapter.allocate(saved["quantities"], held)
        for quantity, folder in folders.items():
            if quantity != MASTER:
                adapter.take_whole(quantity, lambda name: folder.read(name) if name in held[quantity] else None)  # noqa: B023


def load_masters(
    checkpoint: CheckpointMetadata,
    shards: Mapping[str, torch.Tensor],
    parameters: Mapping[str, TensorMetadata],
    mesh: Mesh,
) -> None:
    """Load the checkpoint's master weights, if it has any, into shards that have the masters' precision, by name.

    The checkpoint's regular weights are only rounded copies of the masters.
    """
    folder = checkpoint.path / OPTIMIZER / MASTER
    if folder.is_dir():
        ranges = {name: ShardRange.of_shard(shard) for name, shard in shards.items()}
        LoadPlan(folder, ranges, parameters, required=()).read(mesh)


def _names_to_check(manifest: Manifest, mesh: Mesh) -> list[str]:
    """The files whose checksums this rank compares; their total size is about the same on every rank."""
    names = list(manifest.files)
    readers = assign([manifest.files[name].bytes for name in names], range(mesh.topology.world_size))
    return [name for name, reader in zip(names, readers, strict=True) if reader == mesh.rank]
