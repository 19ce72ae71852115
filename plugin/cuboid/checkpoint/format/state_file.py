"""``state.json``: a JSON document whose values may be tensors, which are in a safetensors file beside it."""

from __future__ import annotations

import contextlib
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
from cuboid.checkpoint.format.tensor_file import TensorFile, TensorFileWriter, TensorSpec, bytes_of, check_sizes
from cuboid.errors import CheckpointError

STATE = "state.json"
#: In a subfolder, because some loaders read every safetensors file of the model's folder as weights.
TENSORS = "state/tensors.safetensors"
#: Prefix of the key that marks a type JSON doesn't have: ``{"$tuple": […]}``. A dict that has such a key itself is
#: written as a ``$dict``, a list of pairs.
_MARK = "$"
#: Kinds of numpy dtypes that are plain bytes: numbers, times and texts of fixed length.
_NUMPY_KINDS = "biufcmMSU"
#: Names of the accepted dtypes. Others could contain pointers to Python objects, possibly in a field of a record.
_NUMPY_DTYPE = re.compile(
    r"[<>|](b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[SU]\d{1,9}|[mM]8(\[\d{0,9}[A-Za-zμ]{1,2}\])?)"
)
#: Dtypes that every reader of safetensors supports. Tensors of other dtypes, such as complex, are stored as bytes.
_PLAIN = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
#: Those other dtypes: with a whole number of bytes and, unlike quantized ones, without a separate scale.
_RAW = frozenset(
    dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype)
    and dtype not in _PLAIN
    and re.fullmatch(r"(complex|float|uint)(8|16|32|64|128)(_e\w+)?", name)
)
_REMEDY = "give numbers, texts, tensors, numpy arrays, and lists, tuples and dicts of them"


def write_state(folder: Path, document: Mapping[str, Any]) -> None:
    """Write ``state.json``, and its tensors if it has any.

    Args:
        folder: an existing folder.
        document: None, bools, ints, floats, texts, paths, tensors, dtypes, numpy arrays and scalars, and lists, tuples
            and dicts of them; keys are texts or ints. An instance of a subclass, such as a member of an ``IntEnum``,
            is read back as its base type.

    Raises:
        CheckpointError: a value of any other type, named by its key; nothing is written then.
        OSError: from the file system.
    """
    # Encoded completely before the first file is created, so that an unsupported value leaves nothing behind.
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


def reject_lost_manifest(folder: Path) -> None:
    """Reject a checkpoint that lost its manifest, which would otherwise be loaded, unverified, as a plain model.

    Raises:
        CheckpointError: a folder has training state, but no manifest.
    """
    training = (folder / TENSORS).is_file() or (folder / "optimizer").is_dir()
    if training and (folder / STATE).is_file() and not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder}: has the state of a training, but no {MANIFEST}: a file was lost, or it was never complete. To "
            f"take it for a model alone, whose values can't be compared with checksums, remove {STATE}"
        )


def read_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Read ``state.json``; every value has the type that it was written with, except that paths become texts.

    Args:
        folder: the checkpoint's folder.
        manifest: the checkpoint's manifest; the files are compared with their checksums before anything is decoded.

    Returns:
        The document, with tensors on the CPU.

    Raises:
        CheckpointError: there is none, or it is damaged or malformed.
    """
    path = folder / STATE
    listed = [name for name in (STATE, TENSORS) if name in manifest.files]
    if STATE not in listed:
        raise CheckpointError(f"{path}: can't be read: the checkpoint has none by its list of files")
    check_contents(folder, manifest, listed)
    encoded = read_json(path, numbers_only=False)
    with TensorFile(folder / TENSORS) if TENSORS in listed else contextlib.nullcontext() as file:
        already_read: set[str] = set()

        def read_tensor(name: str) -> torch.Tensor:
            if file is None:
                raise CheckpointError(f"{TENSORS}, which should hold {name}, is missing")
            # The encoder refers to each tensor once; a forged document could fill the memory with repetitions of one.
            if name in already_read:
                raise ValueError(f"it has the tensor {name} twice")
            already_read.add(name)
            return file.read(name)

        try:
            document = _decode(encoded, read_tensor)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path}: can't be understood: {error!r}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: holds a {type(document).__name__} instead of keys and values")
    return document


class _Encoder:
    """Encodes values as JSON, and collects their tensors."""

    def __init__(self) -> None:
        #: What to store in the file beside the document, by names that resemble the tensors' keys.
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, key: str) -> Any:
        """Encode a value; ``key`` is its dotted path, for messages and for the names of tensors."""
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
        # Subclasses, converted by the base class's own method, since e.g. a ``StrEnum`` overrides ``__str__``.
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return str.__str__(value)
        raise CheckpointError(f"{_shown(key)} is a {_kind(value)}, which a checkpoint can't hold; {_REMEDY}")

    def _tensor(self, value: torch.Tensor, key: str) -> Any:
        if is_traceable_wrapper_subclass(value) or value.layout != torch.strided or value.is_meta or value.is_quantized:
            kind = f"{_kind(value)} of layout {value.layout} on {value.device}"
            raise CheckpointError(f"{_shown(key)} is a {kind}; only dense tensors with data of their own can be held")
        value = value.detach().resolve_conj().resolve_neg()
        if value.dtype in _PLAIN:
            return {f"{_MARK}tensor": self._set_aside(value, key)}
        if value.dtype not in _RAW:
            raise CheckpointError(f"{_shown(key)} is a {_kind(value)} of {value.dtype}, which a checkpoint can't hold")
        raw = torch.frombuffer(bytearray(bytes_of(value)), dtype=torch.uint8) if value.numel() else torch.empty(0)
        name, dtype = self._set_aside(raw, key), str(value.dtype).removeprefix("torch.")
        return {f"{_MARK}raw": {"bytes": name, "dtype": dtype, "shape": list(value.shape)}}

    def _numpy(self, value: Any, key: str) -> Any:
        # Subclasses such as masked arrays have more state than their bytes.
        is_plain = isinstance(value, np.generic) or type(value) in (np.ndarray, np.memmap)
        if not is_plain or value.dtype.kind not in _NUMPY_KINDS or not _NUMPY_DTYPE.fullmatch(value.dtype.str):
            raise CheckpointError(f"{_shown(key)} is a {_kind(value)} of {value.dtype}, which a checkpoint can't hold")
        raw = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.nbytes else torch.empty(0)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        name = self._set_aside(raw, key)
        return {f"{_MARK}{kind}": {"bytes": name, "dtype": value.dtype.str, "shape": list(value.shape)}}

    def _mapping(self, value: Mapping[Any, Any], key: str) -> Any:
        wrong = next((name for name in value if type(name) not in (str, int)), None)
        if wrong is not None:
            raise CheckpointError(f"{_shown(key)} has {wrong!r} for a key; only texts and ints can be")
        items = {name: self.encode(item, f"{key}.{name}") for name, item in value.items()}
        if all(isinstance(name, str) and not name.startswith(_MARK) for name in items):
            return items
        return {f"{_MARK}dict": [[name, item] for name, item in items.items()]}

    def _set_aside(self, tensor: torch.Tensor, key: str) -> str:
        # Dotted paths of different keys may coincide ({"a.b": …} and {"a": {"b": …}}), ``__metadata__`` is reserved by
        # the format, and it can't encode lone surrogates.
        name = key.removeprefix(".").encode("ascii", "backslashreplace").decode()
        while name in self.tensors or name == "__metadata__":
            name += f"#{len(self.tensors)}"
        self.tensors[name] = tensor
        return name


def _shown(key: str) -> str:
    return key.removeprefix(".") or "the state"


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


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
        items = [(name, _decode(item, tensor)) for name, item in inner]
        mapping = dict(items)
        if len(mapping) < len(items) or not all(type(name) in (str, int) for name in mapping):
            raise ValueError("a dict has a key twice, or one that is neither a text nor an int")
        return mapping
    if kind == "dtype":
        return _dtype(inner)
    if kind == "tensor" and isinstance(inner, str):
        return tensor(inner)
    if kind not in ("raw", "array", "scalar"):
        raise ValueError(f"{mark} is no mark that this version knows")
    raw, shape = tensor(inner["bytes"]), check_sizes(inner["shape"])
    # An empty value was written as an empty tensor of torch's default dtype.
    if raw.dim() != 1 or (raw.numel() and raw.dtype != torch.uint8):
        raise ValueError(f"bytes are held as {raw.dtype} of shape {list(raw.shape)}")
    return _from_bytes(raw, inner["dtype"], shape) if kind == "raw" else _numpy(raw, inner["dtype"], shape, kind)


def _dtype(name: object) -> torch.dtype:
    dtype = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


def _numpy(raw: torch.Tensor, name: object, shape: tuple[int, ...], kind: str) -> Any:
    if not isinstance(name, str) or not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"{name!r} is no kind of numbers, times or texts")
    dtype = np.dtype(name)
    # Checked on the parsed dtype too, in case numpy reads the name in another way than the pattern does. A dtype of
    # size zero (an empty text) would allow any number of elements.
    count = math.prod(shape)
    fits = dtype.itemsize * count == raw.numel() and (dtype.itemsize or count <= 1)
    if dtype.kind not in _NUMPY_KINDS or dtype.hasobject or not fits:
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
