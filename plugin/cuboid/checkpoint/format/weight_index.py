"""Hugging Face's names for weight files, and the index that maps tensors to files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from cuboid.checkpoint.format.bounded_files import is_plain_name, read_json
from cuboid.errors import CheckpointError

#: The file that has all tensors, if there is only one.
SINGLE = "model.safetensors"
INDEX_SUFFIX = ".index.json"
INDEX = SINGLE + INDEX_SUFFIX


def read_index(path: Path) -> dict[str, str]:
    """Read an index; returns the file name of each tensor.

    Raises:
        CheckpointError: the index is malformed, or names something that isn't a file beside it.
    """
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: is not an index of weights: it has no weight_map, or names no file in it")
    strange = next((file for file in weight_map.values() if not is_plain_name(file)), None)
    if strange is not None:
        raise CheckpointError(f"{path}: names {str(strange)[:200]}, which isn't a file beside it")
    return weight_map


def write_index(folder: Path, weight_map: Mapping[str, str], *, parameters: int, size_bytes: int) -> None:
    """Write a folder's index: the file of each tensor, and the total number of elements and bytes."""
    metadata = {"total_parameters": parameters, "total_size": size_bytes}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
