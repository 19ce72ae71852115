"""Write a folder that isn't there until it is whole, with what goes along with weights."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from tqdm import tqdm

from cuboid.checkpoint.format.bounded_files import check_output, read_object
from cuboid.checkpoint.format.folder import INCOMPLETE, sync
from cuboid.checkpoint.format.state_file import STATE
from cuboid.checkpoint.format.tensor_file import TensorFileWriter
from cuboid.checkpoint.format.weight_index import write_index
from cuboid.convert.formats.block_tensors import Tensors
from cuboid.errors import CheckpointError

CONFIG = "config.json"
_PATTERN = "model{suffix}.safetensors"
#: What lies beside weights and goes along: configs, tokenizers, templates, a model's own code, its card.
_AUXILIARY = (".json", ".txt", ".model", ".jinja", ".py", ".md", ".tiktoken", ".vocab")
#: Of those the ones that tell of weights, or of a training run, which the new folder doesn't hold.
_NOT_AUXILIARY = ("trainer_state.json", "zero_to_fp32.py", "zero_to_torch.py", STATE)
#: What is converted, and lists of it.
_CONVERTED = re.compile(
    r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|rank-\d+-of-\d+\.safetensors"
    r"|.*_states\.pt|manifest\.json|shards\.json|latest|latest_universal"
)
#: Headers and JSON files; the tensors themselves are counted.
_SPARE_BYTES = 64 << 20


def check_free(target: Path) -> None:
    """Make sure that nothing is where a new folder is to be, or an empty folder.

    Raises:
        CheckpointError: something is.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target}: exists already; give a folder that doesn't, or an empty one")


def check_output_of(target: Path) -> None:
    """Make sure that a new folder can be made, before anything is read for it; nothing is left of the attempt.

    Raises:
        CheckpointError: it can't.
    """
    above = next(path for path in (target.parent, *target.absolute().parents) if path.exists())
    check_output(above)


@contextmanager
def new_folder(target: Path, expected_bytes: int) -> Iterator[Path]:
    """A folder to fill, which takes the target's name at the end, and is removed if anything goes wrong.

    Args:
        target: must not exist, or be an empty folder.
        expected_bytes: that will go there.

    Raises:
        CheckpointError: the target holds something, or the disk can't hold so much.
    """
    check_free(target)
    incomplete = target.with_name(f"{target.name}{INCOMPLETE}")
    # Of a run that was killed; nobody else gives such names.
    shutil.rmtree(incomplete, ignore_errors=True)
    try:
        incomplete.mkdir(parents=True)
        free = shutil.disk_usage(incomplete).free
        if free < expected_bytes + _SPARE_BYTES:
            needed, there = size_text(expected_bytes), size_text(free)
            raise CheckpointError(f"{target}: needs {needed}, but only {there} are free there")
        yield incomplete
        _sync(incomplete)
        incomplete.rename(target)
    except BaseException as error:
        shutil.rmtree(incomplete, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{target}: can't be written: {error.strerror or error}") from error
        raise


def _sync(folder: Path) -> None:
    """Bring all of a folder to the disk, so that not even a power cut leaves its name without what is in it."""
    for path in (folder, *folder.rglob("*")):
        sync(path)


def size_text(size_bytes: int) -> str:
    """A size for people, by powers of ten."""
    return str(tqdm.format_sizeof(size_bytes, suffix="B"))


@contextmanager
def progress(total_bytes: int, what: str, *, hidden: bool) -> Iterator[Callable[[int], Any]]:
    """A bar on a terminal; gives the function that moves it on by so many bytes."""
    with tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True, disable=True if hidden else None) as bar:
        yield bar.update


def write_weights(folder: Path, tensors: Tensors, max_shard_bytes: int, advance: Callable[[int], Any]) -> list[str]:
    """Write tensors into files by the names that Hugging Face gives, with an index where there are several.

    Args:
        folder: an existing one.
        tensors: what to write, one block in memory at a time.
        max_shard_bytes: of a file's tensors, unless one alone is larger.
        advance: is told of every block's bytes as they were written.

    Returns:
        The files' names.
    """
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
    """Copy what goes along with weights.

    Args:
        source: folder of a checkpoint, or a ``config.json`` alone.
        folder: where it goes.
        dtype: what ``config.json`` is to say of the weights; None for what it says already.

    Returns:
        Names of the source's files and folders that neither go along nor hold weights that are converted.

    Raises:
        CheckpointError: ``config.json`` can't be understood.
    """
    if source.is_file():
        write_json(folder / CONFIG, _with_dtype(read_object(source, numbers_only=False), dtype))
        return []
    left = []
    for path in sorted(source.iterdir()):
        if path.name == CONFIG:
            write_json(folder / CONFIG, _with_dtype(read_object(path, numbers_only=False), dtype))
        elif _CONVERTED.fullmatch(path.name):
            continue
        elif path.is_dir():
            left += _copy_code(path, folder)
        elif _goes_along(path):
            shutil.copyfile(path, folder / path.name)
        else:
            left.append(path.name)
    return left


def _goes_along(path: Path) -> bool:
    named = path.suffix in _AUXILIARY or path.name.upper().startswith(("LICENSE", "NOTICE"))
    return named and path.name not in _NOT_AUXILIARY


def _copy_code(source: Path, folder: Path) -> list[str]:
    """Copy the templates and the code in a folder; its name, where it has neither."""
    found = [path for path in sorted(source.rglob("*")) if path.is_file() and path.suffix in (".jinja", ".py")]
    for path in found:
        copied = folder / path.relative_to(source.parent)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copied)
    return [] if found else [f"{source.name}/"]


def _with_dtype(config: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """A model's config, and those of its parts, that say another dtype; the key was ``torch_dtype`` once."""
    if dtype is None:
        return config
    changed = {key: _with_dtype(value, dtype) if _is_part(key, value) else value for key, value in config.items()}
    present = [key for key in ("dtype", "torch_dtype") if key in config]
    if present or "model_type" in config:
        changed.update(dict.fromkeys(present or ["dtype"], str(dtype).removeprefix("torch.")))
    return changed


def _is_part(key: str, value: object) -> bool:
    return key.endswith("_config") and key != "quantization_config" and isinstance(value, dict)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
