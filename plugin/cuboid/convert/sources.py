"""Detect what kind of checkpoint a folder is, and open its tensors."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from cuboid.checkpoint.format.bounded_files import reject_outward_links
from cuboid.checkpoint.format.folder import CONVERTING, INCOMPLETE, resolve
from cuboid.checkpoint.format.manifest import MANIFEST, Manifest, check_contents, check_sizes
from cuboid.checkpoint.format.state_file import reject_lost_manifest
from cuboid.convert.deepspeed.checkpoint import open_deepspeed, tag_folder
from cuboid.convert.formats.block_tensors import BlockTensors
from cuboid.convert.formats.hugging_face import open_weights, weights_in
from cuboid.convert.per_rank.source import ProgressBar, open_rank_files
from cuboid.convert.target import CONFIG
from cuboid.errors import CheckpointError
from cuboid.weights.model_folder import check_exists, check_model_folder, is_weights, model_files, read_config
from cuboid.weights.rank_folder import SHARDS


class CheckpointKind(Enum):
    """Kinds of checkpoints; the values appear in messages."""

    CUBOID = "checkpoint of cuboid"
    HUGGING_FACE = "Hugging Face checkpoint"
    RANKS = "per-rank files"
    DEEPSPEED = "DeepSpeed checkpoint"


_KNOWN = (
    "a Hugging Face checkpoint (model.safetensors or its index, or pytorch_model.bin), a checkpoint of cuboid or a "
    f"folder of them (manifest.json, latest), per-rank files ({SHARDS}), a DeepSpeed checkpoint or a folder of them "
    "(mp_rank_00_model_states.pt, layer_00-model_states.pt, zero/, latest)"
)
#: Where a checkpoint of cuboid has the fp32 master weights of a model in another dtype.
_MASTERS = Path("optimizer") / "master"


@dataclass(frozen=True)
class DetectedCheckpoint:
    """A detected checkpoint, with its own folder even if a folder of checkpoints was given."""

    kind: CheckpointKind
    folder: Path


def find_checkpoint(path: Path) -> DetectedCheckpoint:
    """Detect the kind of a checkpoint; in a folder of checkpoints, that of the latest one.

    Raises:
        CheckpointError: it is of no known kind; the message lists the known ones.
    """
    if not path.is_dir():
        check_exists(path)
        raise CheckpointError(f"{path}: is not a folder")
    # Most specific first: checkpoints of cuboid and per-rank files have a config.json and safetensors too.
    if (path / SHARDS).is_file():
        return DetectedCheckpoint(CheckpointKind.RANKS, path)
    if (path / MANIFEST).is_file():
        return DetectedCheckpoint(CheckpointKind.CUBOID, path)
    reject_lost_manifest(path)
    if path.name.endswith((INCOMPLETE, CONVERTING)):
        raise CheckpointError(f"{path}: is what is left of a checkpoint that was never finished")
    if weights_in(path) is not None:
        return DetectedCheckpoint(CheckpointKind.HUGGING_FACE, path)
    if any(path.glob(f"*/{MANIFEST}")):
        return DetectedCheckpoint(CheckpointKind.CUBOID, resolve(path))
    tag = tag_folder(path)
    if tag is None:
        raise CheckpointError(f"{path}: is not a known kind of checkpoint: {_KNOWN}")
    return DetectedCheckpoint(CheckpointKind.DEEPSPEED, tag)


@dataclass(frozen=True)
class Source:
    """An opened checkpoint.

    Attributes:
        checkpoint: its kind and folder.
        tensors: the model's tensors, by their names in Hugging Face checkpoints.
        auxiliary_files: folder of the config, tokenizer and other files beside the weights; or a ``config.json``.
        checked: a sentence on which files were compared with checksums and which couldn't be.
    """

    checkpoint: DetectedCheckpoint
    tensors: BlockTensors
    auxiliary_files: Path
    checked: str


def open_source(
    path: Path,
    stack: ExitStack,
    *,
    model: Path | None = None,
    dtype: torch.dtype | None = None,
    master: bool = False,
    trusted: bool = False,
    checking: ProgressBar,
) -> Source:
    """Open a checkpoint of any kind, after comparing all files that will be read with their checksums.

    Args:
        path: the checkpoint, or a folder of checkpoints, of which the latest is taken.
        stack: closes the files on exit.
        model: folder or ``config.json`` of the model, if the checkpoint has none.
        dtype: the dtype to which the tensors will be cast, if any.
        master: whether to take the fp32 master weights from a checkpoint of cuboid.
        trusted: whether pickles may be loaded.
        checking: opens a progress bar for the comparison of checksums.

    Raises:
        CheckpointError: there is none, or it is damaged, or the options don't apply to it.
    """
    checkpoint = find_checkpoint(path)
    reject_outward_links(checkpoint.folder, within=path)
    auxiliary_files = _auxiliary_files(checkpoint, path, model)
    if master and checkpoint.kind is not CheckpointKind.CUBOID:
        raise CheckpointError(f"{path}: is a {checkpoint.kind.value}; --master goes with a checkpoint of cuboid alone")
    checked = [_check_auxiliary_files(auxiliary_files, checkpoint)]
    if checkpoint.kind is CheckpointKind.DEEPSPEED:
        tensors = open_deepspeed(checkpoint.folder, auxiliary_files, stack, dtype=dtype, trusted=trusted)
        checked.insert(0, "DeepSpeed records no checksums; those of torch.save in its files were compared")
    elif checkpoint.kind is CheckpointKind.RANKS:
        tensors = open_rank_files(checkpoint.folder, stack, checking)
        checked.insert(0, f"all files were compared with their checksums in {SHARDS}")
    elif checkpoint.kind is CheckpointKind.CUBOID:
        checked.insert(0, _check_manifest(checkpoint.folder, master, checking))
        tensors = open_weights(checkpoint.folder, stack, trusted=trusted)
    else:
        tensors = open_weights(checkpoint.folder, stack, trusted=trusted)
        checked.insert(
            0,
            "a Hugging Face checkpoint records no checksums: names, shapes and sizes fit one another, but values that "
            "were damaged or exchanged can't be detected",
        )
    tensors = _with_masters(checkpoint.folder, tensors, stack) if master else tensors
    return Source(checkpoint, tensors, auxiliary_files, "; ".join(filter(None, checked)))


def _check_manifest(folder: Path, master: bool, checking: ProgressBar) -> str:
    """Compare the files that will be read with their checksums; returns a sentence on it."""
    manifest = Manifest.read(folder)
    check_sizes(folder, manifest)
    names = model_files(manifest)
    names += [name for name in manifest.files if master and name.startswith(f"{_MASTERS.as_posix()}/")]
    with checking(sum(manifest.files[name].bytes for name in names)) as advance:
        for name in names:
            check_contents(folder, manifest, [name])
            advance(manifest.files[name].bytes)
    return f"{len(names)} files were compared with their checksums in {MANIFEST}, all that is read of it"


def _check_auxiliary_files(auxiliary_files: Path, checkpoint: DetectedCheckpoint) -> str:
    """Check that the files beside the weights can be read; returns a sentence on what couldn't be compared."""
    if auxiliary_files.is_file():
        read_config(auxiliary_files)
        return f"{auxiliary_files} has no checksum"
    check_model_folder(auxiliary_files, weights=False)
    if auxiliary_files == checkpoint.folder:
        return ""
    recorded = (auxiliary_files / MANIFEST).is_file()
    if recorded:
        manifest = Manifest.read(auxiliary_files)
        check_contents(auxiliary_files, manifest, [name for name in model_files(manifest) if not is_weights(name)])
    how = f"compared with {MANIFEST} there" if recorded else "without checksums"
    return f"the files beside the weights are those of {auxiliary_files}, {how}"


def _auxiliary_files(checkpoint: DetectedCheckpoint, path: Path, model: Path | None) -> Path:
    places = [model] if model is not None else [checkpoint.folder, path, checkpoint.folder.parent]
    for place in places:
        if (place / CONFIG).is_file() or (place.is_file() and place.suffix == ".json"):
            return place
    if model is not None:
        raise CheckpointError(f"{model}: has no {CONFIG}; --model takes a Hugging Face folder, or a config.json")
    raise CheckpointError(f"{checkpoint.folder}: has no {CONFIG}; give --model, a Hugging Face folder or a config.json")


def _with_masters(folder: Path, tensors: BlockTensors, stack: ExitStack) -> BlockTensors:
    """Replace the weights by the optimizer's fp32 master weights, from which they were rounded."""
    if weights_in(folder / _MASTERS) is None:
        raise CheckpointError(f"{folder}: has no {_MASTERS.as_posix()}: the model's own weights are all there are")
    masters = open_weights(folder / _MASTERS, stack, trusted=False)
    for name, spec in masters.specs.items():
        if name not in tensors.specs or tensors.specs[name].shape != spec.shape:
            raise CheckpointError(
                f"{folder / _MASTERS}: has {name}, which the weights are stored without, for this architecture stores "
                "them in another form; load the checkpoint with from_pretrained and save the model in float32"
            )

    def blocks(name: str) -> Any:
        return (masters if name in masters.specs else tensors).blocks(name)

    return BlockTensors({**tensors.specs, **masters.specs}, blocks)
