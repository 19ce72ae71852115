"""``cuboid inspect``: what a checkpoint contains, as a serializable report, and whether it matches its checksums."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from cuboid.checkpoint.format.bounded_files import leads_outward, reject_outward_links
from cuboid.checkpoint.format.manifest import FileRecord, Manifest, check_contents, check_sizes, not_understood
from cuboid.checkpoint.format.state_document import check_document
from cuboid.checkpoint.format.state_file import STATE, read_state
from cuboid.checkpoint.format.tensor_file import read_specs
from cuboid.checkpoint.format.weight_index import SINGLE
from cuboid.convert.formats.hugging_face import open_weights, weights_in
from cuboid.convert.per_rank.source import rank_file_faults
from cuboid.convert.sources import CheckpointKind, DetectedCheckpoint
from cuboid.convert.target import progress
from cuboid.errors import CheckpointError
from cuboid.weights.model_folder import CONFIG, check_model_folder
from cuboid.weights.rank_folder import RankFolder


class FileEntry(BaseModel):
    """A file by its path in the checkpoint, with its checksum if one is recorded."""

    name: str
    bytes: int
    sha256: str | None = None


class TensorEntry(BaseModel):
    """A tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    file: str


class Inspection(BaseModel):
    """The report on a checkpoint.

    Attributes:
        kind, path: the checkpoint's kind and folder.
        id, created, step: only of a checkpoint of cuboid.
        layout: mesh and stages that wrote it or, for per-rank files, for which they were made.
        versions: versions of the packages that wrote it.
        optimizer: its class and the names of its per-element quantities.
        lineage: the checkpoints that its run came from, oldest first.
        files: all files.
        tensors: those in safetensors files; pickles aren't opened.
        faults: a message for everything that is missing, truncated or altered.
    """

    kind: str
    path: str
    id: str | None = None
    created: str | None = None
    step: int | None = None
    layout: dict[str, Any] | None = None
    versions: dict[str, str] | None = None
    optimizer: dict[str, Any] | None = None
    lineage: list[dict[str, Any]] = []
    files: list[FileEntry] = []
    tensors: list[TensorEntry] = []
    faults: list[str] = []


def inspect_checkpoint(checkpoint: DetectedCheckpoint, *, verify: bool) -> Inspection:
    """Inspect a checkpoint; what is wrong with it is reported, not raised.

    With ``verify``, all files that have a recorded checksum are compared with it, under a progress bar on stderr.
    """
    inspection = Inspection(kind=checkpoint.kind.value, path=str(checkpoint.folder))
    files = sorted(path for path in checkpoint.folder.rglob("*") if path.is_file())
    inspection.files = [
        FileEntry(name=path.relative_to(checkpoint.folder).as_posix(), bytes=path.stat().st_size) for path in files
    ]
    for entry in inspection.files:
        if entry.name.endswith(".safetensors") and not leads_outward(checkpoint.folder / entry.name):
            _add_tensors(inspection, checkpoint.folder, entry.name)
    if checkpoint.kind is CheckpointKind.CUBOID:
        _check_manifest(inspection, checkpoint.folder, verify)
        _check_index(inspection, checkpoint.folder)
    elif checkpoint.kind is CheckpointKind.RANKS:
        _check_ranks(inspection, checkpoint.folder, verify)
    elif checkpoint.kind is CheckpointKind.HUGGING_FACE:
        _check_index(inspection, checkpoint.folder)
    if checkpoint.kind is not CheckpointKind.DEEPSPEED and os.path.lexists(checkpoint.folder / CONFIG):
        inspection.faults += _faults(lambda: check_model_folder(checkpoint.folder, weights=False))
    else:
        inspection.faults += _faults(lambda: reject_outward_links(checkpoint.folder))
    return inspection


def _add_tensors(inspection: Inspection, folder: Path, name: str) -> None:
    try:
        specs = read_specs(folder / name)
    except CheckpointError as error:
        inspection.faults.append(str(error))
        return
    for key, spec in specs.items():
        dtype = str(spec.dtype).removeprefix("torch.")
        inspection.tensors.append(TensorEntry(name=key, shape=spec.shape, dtype=dtype, bytes=spec.nbytes, file=name))


class _StateSummary(BaseModel):
    """The keys of ``state.json`` that are reported."""

    model_config = ConfigDict(extra="ignore")

    id: str | None = None
    created: str | None = None
    layout: dict[str, Any] | None = None
    versions: dict[str, str] | None = None
    optimizer: dict[str, Any] | None = None
    lineage: list[dict[str, Any]] = []


def _add_state(inspection: Inspection, folder: Path, manifest: Manifest) -> None:
    """Add the summary of ``state.json``, if the file is intact."""
    try:
        document = read_state(folder, manifest)
        check_document(document, folder)
        summary = _StateSummary.model_validate(document)
    except ValidationError as error:
        inspection.faults.append(str(not_understood(folder / STATE, error)))
        return
    except CheckpointError as error:
        inspection.faults.append(str(error))
        return
    for key in _StateSummary.model_fields:
        setattr(inspection, key, getattr(summary, key))
    if inspection.optimizer is not None:
        inspection.optimizer = {key: inspection.optimizer.get(key) for key in ("class", "quantities")}


def _check_manifest(inspection: Inspection, folder: Path, verify: bool) -> None:
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        inspection.faults.append(str(error))
        return
    inspection.step = manifest.step
    _add_state(inspection, folder, manifest)
    _add_records(inspection, manifest.files)
    inspection.faults += _faults(lambda: check_sizes(folder, manifest))
    if not verify:
        return
    with progress(sum(record.bytes for record in manifest.files.values()), "verifying", hidden=False) as advance:
        for name, record in manifest.files.items():
            # A missing file, or one of another size, has been reported already.
            if (folder / name).is_file() and (folder / name).stat().st_size == record.bytes:
                inspection.faults += _faults(functools.partial(check_contents, folder, manifest, [name]))
            advance(record.bytes)


def _faults(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except CheckpointError as error:
        yield str(error)


def _check_ranks(inspection: Inspection, folder: Path, verify: bool) -> None:
    try:
        document = RankFolder.read(folder)
    except CheckpointError as error:
        inspection.faults.append(str(error))
        return
    inspection.layout = {
        "mesh": document.mesh.model_dump(),
        "stages": document.topology.pipe,
        "layers": list(document.layers),
        **({"placement": list(document.placement)} if document.placement else {}),
    }
    _add_records(inspection, {**document.files, **document.beside})
    with progress(document.nbytes, "verifying", hidden=not verify) as advance:
        inspection.faults += rank_file_faults(folder, document, advance if verify else None)


def _check_index(inspection: Inspection, folder: Path) -> None:
    # Opening the weights compares the index with the tensors that the files have.
    weights = weights_in(folder)
    if weights is not None and weights.startswith(SINGLE):
        with ExitStack() as stack:
            inspection.faults += _faults(lambda: open_weights(folder, stack, trusted=False))


def _add_records(inspection: Inspection, records: Mapping[str, FileRecord]) -> None:
    for entry in inspection.files:
        if entry.name in records:
            entry.sha256 = records[entry.name].sha256
