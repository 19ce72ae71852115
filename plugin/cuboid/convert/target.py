"""Write a Hugging Face folder (weights and auxiliary files) that appears only once it is complete."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from tqdm import tqdm

from cuboid.checkpoint.format.bounded_files import check_output, read_object
from cuboid.checkpoint.format.folder import CONVERTING, sync
from cuboid.checkpoint.format.state_file import STATE
from cuboid.checkpoint.format.tensor_file import TensorFileWriter
from cuboid.checkpoint.format.weight_index import write_index
from cuboid.convert.formats.block_tensors import BlockTensors
from cuboid.errors import CheckpointError

CONFIG = "config.json"
_PATTERN = "model{suffix}.safetensors"
#: Suffixes of files that are copied: configs, tokenizers, templates, a model's own code, its card.
_AUXILIARY = (".json", ".txt", ".model", ".jinja", ".py", ".md", ".tiktoken", ".vocab")
#: Files with these suffixes that are about the training run or the old weights, so not copied.
_NOT_AUXILIARY = ("trainer_state.json", "zero_to_fp32.py", "zero_to_torch.py", STATE)
#: Files that are converted, and their indices and manifests.
_CONVERTED = re.compile(
    r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|rank-\d+-of-\d+\.safetensors"
    r"|.*_states\.pt|manifest\.json|shards\.json|latest|latest_universal"
)
#: Allowance for headers and JSON files when free space is checked; the tensors are counted exactly.
_SPARE_BYTES = 64 << 20


def check_free(target: Path) -> None:
    """Check that the target doesn't exist, or is an empty folder.

    Raises:
        CheckpointError: it is a file, a link, or a folder that isn't empty.
    """
    # A folder can't be renamed to a link, not even to one that leads nowhere.
    is_empty = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    if os.path.lexists(target) and not is_empty:
        raise CheckpointError(f"{target}: exists already; give a folder that doesn't, or an empty one")


def check_output_of(target: Path) -> None:
    """Check that a new folder could be created, before anything is read for it; nothing is created.

    Raises:
        CheckpointError: it can't be created.
    """
    above = next(path for path in (target.parent, *target.absolute().parents) if path.exists())
    check_output(above, named=target)


@contextmanager
def new_folder(target: Path, expected_bytes: int) -> Iterator[Path]:
    """A temporary folder to fill; it is renamed to the target at the end, or removed if there is an exception.

    Args:
        target: must not exist, or be an empty folder.
        expected_bytes: size of what will be written.

    Raises:
        CheckpointError: the target has files, or the disk has too little free space.
    """
    check_free(target)
    incomplete = target.with_name(f"{target.name}{CONVERTING}")
    # Left by a conversion that was killed.
    shutil.rmtree(incomplete, ignore_errors=True)
    try:
        incomplete.mkdir(parents=True)
        free = shutil.disk_usage(incomplete).free
        if free < expected_bytes + _SPARE_BYTES:
            size, room = size_text(expected_bytes), size_text(free)
            raise CheckpointError(f"{target}: needs {size}, but only {room} are free there")
        yield incomplete
        # Everything is synced before the rename, so that the target is never partial, not even after a power cut.
        for path in (incomplete, *incomplete.rglob("*")):
            sync(path)
        incomplete.rename(target)
    except BaseException as error:
        shutil.rmtree(incomplete, ignore_errors=True)
        # A closed pipe is that of what is printed meanwhile.
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            # The source is read meanwhile.
            if isinstance(error.filename, str) and not Path(error.filename).is_relative_to(incomplete):
                raise CheckpointError(f"{error.filename}: can't be read: {error.strerror}") from error
            raise CheckpointError(f"{target}: can't be written: {error.strerror or error}") from error
        raise


def size_text(size_bytes: int) -> str:
    """A size in decimal units, such as ``1.23GB``."""
    return str(tqdm.format_sizeof(size_bytes, suffix="B"))


@contextmanager
def progress(total_bytes: int, what: str, *, hidden: bool) -> Iterator[Callable[[int], Any]]:
    """A progress bar, shown on terminals only; yields the function that advances it by a number of bytes."""
    # Without stderr (2>&-) tqdm has nowhere to look for a terminal.
    is_hidden = True if hidden or sys.stderr is None else None
    with tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True, disable=is_hidden) as bar:
        yield bar.update


def write_weights(
    folder: Path, tensors: BlockTensors, max_shard_bytes: int, advance: Callable[[int], Any]
) -> list[str]:
    """Write tensors into files named as Hugging Face does, with an index if there are several.

    Args:
        folder: an existing folder.
        tensors: the tensors; only one block of them is in memory at a time.
        max_shard_bytes: maximum size of a file's tensors, unless a single one is larger.
        advance: called with the size of each block after it was written.

    Returns:
        The files' names.
    """
    # huggingface_hub's own function, so that tensors are in the same files as with ``save_pretrained``.
    split = split_state_dict_into_shards_factory(
        dict(tensors.specs),
        get_storage_size=lambda spec: spec.nbytes,
        filename_pattern=_PATTERN,
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        with TensorFileWriter(folder / file, {name: tensors.specs[name] for name in names}) as writer:
            for name in writer.specs:
                for block in tensors.blocks(name):
                    writer.write_rows(name, block)
                    advance(block.nbytes)
    if split.is_sharded:
        parameters = sum(math.prod(spec.shape) for spec in tensors.specs.values())
        write_index(folder, split.tensor_to_filename, parameters=parameters, size_bytes=tensors.nbytes)
    return list(split.filename_to_tensors)


def copy_auxiliary_files(source: Path, folder: Path, dtype: torch.dtype | None) -> list[str]:
    """Copy the files beside the weights.

    Args:
        source: folder of a checkpoint, or a ``config.json`` alone.
        folder: the new checkpoint's folder.
        dtype: the dtype to write into ``config.json``; None to keep the one in it.

    Returns:
        Names of the source's files and folders that were skipped: neither copied nor weights to convert.

    Raises:
        CheckpointError: ``config.json`` is malformed.
    """
    if source.is_file():
        write_json(folder / CONFIG, _with_dtype(read_object(source, numbers_only=False), dtype))
        return []
    skipped = []
    for path in sorted(source.iterdir()):
        if path.name == CONFIG:
            write_json(folder / CONFIG, _with_dtype(read_object(path, numbers_only=False), dtype))
        elif _CONVERTED.fullmatch(path.name):
            continue
        elif path.is_dir():
            skipped += _copy_code(path, folder)
        elif path.name not in _NOT_AUXILIARY and (
            path.suffix in _AUXILIARY or path.name.upper().startswith(("LICENSE", "NOTICE"))
        ):
            shutil.copyfile(path, folder / path.name)
        else:
            skipped.append(path.name)
    return skipped


def _copy_code(source: Path, folder: Path) -> list[str]:
    """Copy the templates and the code in a subfolder; returns its name if it has neither and was skipped."""
    code_files = [path for path in sorted(source.rglob("*")) if path.is_file() and path.suffix in (".jinja", ".py")]
    for path in code_files:
        copied = folder / path.relative_to(source.parent)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copied)
    return [] if code_files else [f"{source.name}/"]


def _with_dtype(config: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Set the dtype in a model's config and those of its parts, such as ``text_config``."""
    if dtype is None:
        return config
    changed = dict(config)
    for key, value in config.items():
        if key.endswith("_config") and key != "quantization_config" and isinstance(value, dict):
            changed[key] = _with_dtype(value, dtype)
    # Older versions of transformers call the key ``torch_dtype``.
    present = [key for key in ("dtype", "torch_dtype") if key in config]
    if present or "model_type" in config:
        changed.update(dict.fromkeys(present or ["dtype"], str(dtype).removeprefix("torch.")))
    return changed


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
