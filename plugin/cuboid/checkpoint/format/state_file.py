"""JSON documents that may hold tensors: ``state.json``, with a safetensors file in a folder beside it."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cuboid.checkpoint.format.bounded_files import is_too_deep, read_json
from cuboid.checkpoint.format.manifest import MANIFEST, Manifest, check_contents
from cuboid.checkpoint.format.tensor_file import TensorFile, TensorFileWriter, bytes_of
from cuboid.checkpoint.format.tensor_header import TensorSpec, check_sizes
from cuboid.errors import CheckpointError

STATE = "state.json"
#: Not beside the model's files, which some take all safetensors of a folder for.
TENSORS = "state/tensors.safetensors"
#: Marks a value that JSON doesn't have: ``{"$tuple": […]}``. A dict with such a key of its own becomes a ``$dict``.
_MARK = "$"
#: Kinds of numpy dtypes that are nothing but their bytes: numbers, times and texts of fixed length.
_NUMPY_KINDS = "biufcmMSU"
#: How numpy writes them. Of other kinds the bytes would be pointers, or hold fields of such.
_NUMPY_DTYPE = re.compile(
    r"[<>|](b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[SU]\d{1,9}|[mM]8(\[\d{0,9}[A-Za-zμ]{1,2}\])?)"
)
#: What every reader of the file format knows. Tensors of other dtypes, such as complex ones, are held as bytes.
_PLAIN = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
#: The dtypes that are: of whole bytes, and without a scale that would have to be kept beside.
_RAW = frozenset(
    dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype)
    and dtype not in _PLAIN
    and re.fullmatch(r"(complex|float|uint)(8|16|32|64|128)(_e\w+)?", name)
)
_REMEDY = "give numbers, texts, tensors, numpy arrays, and lists, tuples and dicts of them"


def write_state(folder: Path, document: Mapping[str, Any]) -> None:
    """Write a document.

    Args:
        folder: an existing folder.
        document: None, bools, ints, floats, texts, paths, tensors, dtypes, numpy arrays and scalars, and lists, tuples
            and dicts of them, these with texts or ints for keys. A subclass of these (of an enumeration, say) comes
            back as what it is based on.

    Raises:
        CheckpointError: before anything is written, for any other value; names its key.
        OSError: from the file system.
    """
    encoder = _Encoder()
    try:
        encoded = encoder.encode(dict(document), "")
        if is_too_deep(encoded):
            raise RecursionError
        text = json.dumps(encoded, indent=1)
    except RecursionError:
        raise CheckpointError("the state is nested too deeply, perhaps in itself, to be written as JSON") from None
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the state can't be written as JSON: {error}") from error
    tensors = encoder.tensors
    if tensors:
        specs = {name: TensorSpec(x.dtype, tuple(x.shape)) for name, x in tensors.items()}
        (folder / TENSORS).parent.mkdir(exist_ok=True)
        with TensorFileWriter(folder / TENSORS, specs) as file:
            for name in file.specs:
                file.write(name, tensors[name])
    with open(folder / STATE, "w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


def refuse_lost_manifest(folder: Path) -> None:
    """Don't take what is left of a checkpoint for a plain model, of which nothing could be compared.

    Raises:
        CheckpointError: a folder has the state of a training, but no manifest.
    """
    training = (folder / TENSORS).is_file() or (folder / "optimizer").is_dir()
    if training and (folder / STATE).is_file() and not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder}: has the state of a training, but no {MANIFEST}: a file was lost, or it was never complete. To "
            f"take it for a model alone, whose values can't be compared with checksums, remove {STATE}"
        )


def read_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Read a document back, every value of the type that it had; tensors on the CPU, paths as texts.

    Args:
        folder: of the checkpoint.
        manifest: of the checkpoint. Nothing is decoded before it was found to be what was written.

    Raises:
        CheckpointError: there is none, or it was damaged, or it can't be understood.
    """
    path = folder / STATE
    own = [name for name in (STATE, TENSORS) if name in manifest.files]
    if STATE not in own:
        raise CheckpointError(f"{path}: can't be read: the checkpoint has none by its list of files")
    check_contents(folder, manifest, own)
    encoded = read_json(path, numbers_only=False)
    if TENSORS not in own:
        return _decoded(encoded, _no_tensor, path)
    with TensorFile(folder / TENSORS) as file:
        return _decoded(encoded, _Once(file.read), path)


class _Once:
    """Gives each tensor once, as it was set aside: a document that names one again and again would fill the memory."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        self._read = read
        self._given: set[str] = set()

    def __call__(self, name: str) -> torch.Tensor:
        if name in self._given:
            raise ValueError(f"it has the tensor {name} twice")
        self._given.add(name)
        return self._read(name)


class _Encoder:
    """Turns values into what JSON has, and sets their tensors aside.

    Attributes:
        tensors: for the file beside the document, by names that resemble their keys.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, key: str) -> Any:
        """The value of a key in the document."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, key)
        if isinstance(value, np.ndarray | np.generic):
            return self._numpy(value, key)
        if isinstance(value, torch.dtype):
            return {f"{_MARK}dtype": str(value).removeprefix("torch.")}
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, list | tuple):
            items = [self.encode(item, f"{key}.{index}") for index, item in enumerate(value)]
            return items if isinstance(value, list) else {f"{_MARK}tuple": items}
        if isinstance(value, Mapping):
            return self._mapping(value, key)
        # By the base class, since members of enumerations say something else of themselves.
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return str.__str__(value)
        raise CheckpointError(f"{_told(key)} is a {_kind(value)}, which a checkpoint can't hold; {_REMEDY}")

    def _tensor(self, value: torch.Tensor, key: str) -> Any:
        if is_traceable_wrapper_subclass(value) or value.layout != torch.strided or value.is_meta or value.is_quantized:
            kind = f"{_kind(value)} of layout {value.layout} on {value.device}"
            raise CheckpointError(f"{_told(key)} is a {kind}; only dense tensors with data of their own can be held")
        value = value.detach().resolve_conj().resolve_neg()
        if value.dtype in _PLAIN:
            return {f"{_MARK}tensor": self._set_aside(value, key)}
        if value.dtype not in _RAW:
            raise CheckpointError(f"{_told(key)} is a {_kind(value)} of {value.dtype}, which a checkpoint can't hold")
        raw = torch.frombuffer(bytearray(bytes_of(value)), dtype=torch.uint8) if value.numel() else torch.empty(0)
        name, dtype = self._set_aside(raw, key), str(value.dtype).removeprefix("torch.")
        return {f"{_MARK}raw": {"bytes": name, "dtype": dtype, "shape": list(value.shape)}}

    def _numpy(self, value: Any, key: str) -> Any:
        # A masked array, for one, has more than its bytes.
        whole = isinstance(value, np.generic) or type(value) in (np.ndarray, np.memmap)
        if not whole or value.dtype.kind not in _NUMPY_KINDS or not _NUMPY_DTYPE.fullmatch(value.dtype.str):
            raise CheckpointError(f"{_told(key)} is a {_kind(value)} of {value.dtype}, which a checkpoint can't hold")
        raw = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.nbytes else torch.empty(0)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        name = self._set_aside(raw, key)
        return {f"{_MARK}{kind}": {"bytes": name, "dtype": value.dtype.str, "shape": list(value.shape)}}

    def _mapping(self, value: Mapping[Any, Any], key: str) -> Any:
        wrong = next((name for name in value if type(name) not in (str, int)), None)
        if wrong is not None:
            raise CheckpointError(f"{_told(key)} has {wrong!r} for a key; only texts and ints can be")
        items = {name: self.encode(item, f"{key}.{name}") for name, item in value.items()}
        if all(isinstance(name, str) and not name.startswith(_MARK) for name in items):
            return items
        return {f"{_MARK}dict": [[name, item] for name, item in items.items()]}

    def _set_aside(self, tensor: torch.Tensor, key: str) -> str:
        # Different keys may read the same, and the format has a name of its own and knows no lone surrogates.
        name = key.removeprefix(".").encode("ascii", "backslashreplace").decode()
        while name in self.tensors or name == "__metadata__":
            name += f"#{len(self.tensors)}"
        self.tensors[name] = tensor
        return name


def _told(key: str) -> str:
    return key.removeprefix(".") or "the state"


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _no_tensor(name: str) -> torch.Tensor:
    raise CheckpointError(f"{TENSORS}, which should hold {name}, is missing")


def _decoded(encoded: Any, tensor: Callable[[str], torch.Tensor], path: Path) -> dict[str, Any]:
    try:
        document = _decode(encoded, tensor)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: can't be understood: {error!r}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: holds a {type(document).__name__} instead of keys and values")
    return document


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
    if kind == "tuple" and isinstance(inner, list):
        return tuple(_decode(item, tensor) for item in inner)
    if kind == "dict" and isinstance(inner, list):
        return _dict([(name, _decode(item, tensor)) for name, item in inner])
    if kind == "dtype":
        return _dtype(inner)
    if kind == "tensor" and isinstance(inner, str):
        return tensor(inner)
    if kind not in ("raw", "array", "scalar"):
        raise ValueError(f"{mark} is no mark that this version knows")
    raw, shape = _bytes(tensor(inner["bytes"])), check_sizes(inner["shape"])
    return _from_bytes(raw, inner["dtype"], shape) if kind == "raw" else _numpy(raw, inner["dtype"], shape, kind)


def _dict(items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(items)
    if len(found) < len(items) or not all(type(name) in (str, int) for name in found):
        raise ValueError("a dict has a key twice, or one that is neither a text nor an int")
    return found


def _dtype(name: object) -> torch.dtype:
    dtype = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


def _bytes(raw: torch.Tensor) -> torch.Tensor:
    """What was set aside byte by byte; of nothing, it has another dtype."""
    if raw.dim() != 1 or (raw.numel() and raw.dtype != torch.uint8):
        raise ValueError(f"bytes are held as {raw.dtype} of shape {list(raw.shape)}")
    return raw


def _numpy(raw: torch.Tensor, name: object, shape: tuple[int, ...], kind: str) -> Any:
    if not isinstance(name, str) or not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"{name!r} is no kind of numbers, times or texts")
    dtype = np.dtype(name)
    # With nothing but its bytes, whatever the name was taken for; and with all of them.
    count = math.prod(shape)
    whole = dtype.itemsize * count == raw.numel() and (dtype.itemsize or count <= 1)
    if dtype.kind not in _NUMPY_KINDS or dtype.hasobject or not whole:
        raise ValueError(f"{raw.numel()} bytes aren't {list(shape)} of {name}")
    if kind == "scalar" and shape:
        raise ValueError(f"a scalar is of shape {list(shape)}")
    array = np.ndarray(shape, dtype, raw.numpy().tobytes()).copy()
    return array if kind == "array" else array[()]


def _from_bytes(raw: torch.Tensor, name: object, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = _dtype(name)
    if dtype not in _RAW or dtype.itemsize * math.prod(shape) != raw.numel():
        raise ValueError(f"{raw.numel()} bytes aren't {list(shape)} of {dtype}")
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
