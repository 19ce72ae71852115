"""JSON documents that may hold tensors: ``state.json``, with a safetensors file beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cuboid.checkpoint.tensor_file import TensorFile, TensorFileWriter, TensorSpec
from cuboid.errors import CheckpointError

STATE, TENSORS = "state.json", "state.safetensors"
#: Marks a value that JSON doesn't have: ``{"$tuple": […]}``.
_MARK = "$"


def write_state(folder: Path, document: Mapping[str, Any]) -> None:
    """Write a document.

    Args:
        folder: an existing folder.
        document: None, bools, ints, floats, texts, paths, tensors, dtypes, numpy arrays and numbers, and lists, tuples
            and dicts of them, these with texts or ints for keys.

    Raises:
        CheckpointError: before anything is written, for any other value; names its key.
        OSError: from the file system.
    """
    tensors: dict[str, torch.Tensor] = {}
    encoded = _encode(dict(document), "", tensors)
    if tensors:
        specs = {name: TensorSpec(x.dtype, tuple(x.shape)) for name, x in tensors.items()}
        with TensorFileWriter(folder / TENSORS, specs) as file:
            for name in file.specs:
                file.write(name, tensors[name])
    with open(folder / STATE, "w", encoding="utf-8") as text:
        json.dump(encoded, text, indent=1, ensure_ascii=False)
        text.flush()
        os.fsync(text.fileno())


def read_state(folder: Path) -> dict[str, Any]:
    """Read a document back, every value of the type that it had; paths come back as texts.

    Raises:
        CheckpointError: there is none, or it can't be understood.
    """
    path = folder / STATE
    try:
        encoded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: isn't JSON: {error}") from error
    if not (folder / TENSORS).is_file():
        return _decoded(encoded, _no_tensor, path)
    with TensorFile(folder / TENSORS) as file:
        return _decoded(encoded, file.read, path)


def _no_tensor(name: str) -> torch.Tensor:
    raise CheckpointError(f"{TENSORS}, which should hold {name}, is missing")


def _decoded(encoded: Any, tensor: Callable[[str], torch.Tensor], path: Path) -> dict[str, Any]:
    try:
        document = _decode(encoded, tensor)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: can't be understood: {error!r}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: holds a {type(document).__name__} instead of keys and values")
    return document


def _encode(value: Any, key: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        tensors[key] = value.detach()
        return {f"{_MARK}tensor": key}
    if isinstance(value, np.ndarray | np.generic):
        return _encode_numpy(value, key, tensors)
    if isinstance(value, torch.dtype):
        return {f"{_MARK}dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [_encode(item, f"{key}.{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {f"{_MARK}tuple": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, key, tensors)
    if isinstance(value, bool | int | float | str):
        # Subclasses, such as members of an enumeration, come back as what they are based on.
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    if isinstance(value, list | tuple):
        return _encode(tuple(value) if isinstance(value, tuple) else list(value), key, tensors)
    raise CheckpointError(
        f"{key.lstrip('.')} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint can't hold "
        "without pickling; give numbers, texts, tensors, numpy arrays, and lists, tuples and dicts of them"
    )


def _encode_mapping(value: Mapping[Any, Any], key: str, tensors: dict[str, torch.Tensor]) -> Any:
    wrong = next((name for name in value if type(name) not in (str, int)), None)
    if wrong is not None:
        raise CheckpointError(f"{key.lstrip('.')} has {wrong!r} for a key; only texts and ints can be")
    plain = all(isinstance(name, str) and not name.startswith(_MARK) for name in value)
    if plain:
        return {name: _encode(item, f"{key}.{name}", tensors) for name, item in value.items()}
    pairs = [[name, _encode(item, f"{key}.{name}", tensors)] for name, item in value.items()]
    return {f"{_MARK}dict": pairs}


def _encode_numpy(value: Any, key: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value.dtype.kind not in "biufc" or value.dtype.itemsize > 16 or value.dtype.name in ("float128", "complex256"):
        raise CheckpointError(f"{key.lstrip('.')} is a numpy array of {value.dtype}, which a checkpoint can't hold")
    raw = np.ascontiguousarray(value)
    tensors[key] = torch.frombuffer(bytearray(raw.tobytes()), dtype=torch.uint8) if raw.nbytes else torch.empty(0)
    kind = "array" if isinstance(value, np.ndarray) else "scalar"
    return {f"{_MARK}{kind}": {"bytes": key, "dtype": value.dtype.str, "shape": list(np.shape(value))}}


def _decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "") if len(value) == 1 else ""
    if not mark.startswith(_MARK):
        return {name: _decode(item, tensor) for name, item in value.items()}
    inner = value[mark]
    kind = mark.removeprefix(_MARK)
    if kind == "tensor":
        return tensor(inner)
    if kind == "tuple":
        return tuple(_decode(item, tensor) for item in inner)
    if kind == "dict":
        return {name: _decode(item, tensor) for name, item in inner}
    if kind == "dtype":
        return getattr(torch, inner)
    raw = tensor(inner["bytes"]).numpy().tobytes()
    array = np.frombuffer(raw, dtype=np.dtype(inner["dtype"])).reshape(inner["shape"]).copy()
    return array if kind == "array" else array[()]
