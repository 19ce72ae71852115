"""Read weights into the 4 bits in which a rank keeps them, one after the other.

Weights of 16 bits are rounded as soon as each is read, so that a rank holds one of them at a time. Of a checkpoint that
bitsandbytes has stored in 4 bits, a rank reads the bytes of its shards; all that describes them is checked before.

Both are steps of transformers' own loader, as those of its own quantisers are: it finds the parameter of each tensor.
"""

from __future__ import annotations

import copy
import importlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.base import HfQuantizer

from cuboid.checkpoint.format.bounded_files import parse_json
from cuboid.checkpoint.format.tensor_file import TensorFile, TensorSpec, bytes_of
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CheckpointError, UnsupportedModelError
from cuboid.models.model_plan import RankPart
from cuboid.models.sharded.quantization import DTYPES, NESTED_BLOCK
from cuboid.tensor3d.sharding.four_bits import BLOCK, joined, scales_spec
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, pad_shard, shard_boxes, take_shard

#: What bitsandbytes stores beside a weight: scales and the values that bits stand for; "nested", those of the scales.
_BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
#: The tensor with the JSON that describes a weight; its name ends with the name of the 16 values.
_STATE = re.compile(r"(.+)\.quant_state\.bitsandbytes__(nf4|fp4)")
_MOST_STATE_BYTES = 4096
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
#: Keys of the JSON; the second with nested scales.
_KEYS = frozenset({"quant_type", "blocksize", "dtype", "shape"})
_NESTED_KEYS = frozenset({"nested_blocksize", "nested_dtype", "nested_offset"})


class FourBitReader(HfQuantizer):
    """What transformers' loader asks which parameters are quantised while it reads them, and by which operation.

    It reads them one after the other then, and without threads that read ahead of the rounding.
    """

    def __init__(self, model: Any, part: RankPart) -> None:
        super().__init__(BitsAndBytesConfig(load_in_4bit=True), pre_quantized=False)
        assert part.parallel is not None, "checked by the caller"
        assert part.plan.quantized is not None, "checked by the caller"
        self._model, self._mesh, self._layers = model, part.plan.mesh, part.plan.quantized
        layers = part.parallel.specs
        self.specs = {f"{name}.weight": layers[name]["weight"] for name in self._layers.names if name in layers}

    def param_needs_quantization(self, _: Any, param_name: str, **__: Any) -> bool:
        """Whether a parameter is kept in 4 bits."""
        return param_name in self.specs

    def get_quantize_ops(self) -> ConversionOps:
        """The operation for one of them."""
        return _IntoFourBits(self)

    def is_serializable(self) -> bool:
        """Whether transformers can save the model."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained."""
        return True

    def take(self, name: str, value: Any) -> bool:
        """Give the model a parameter's shard in 4 bits; False if what was read is of another shape."""
        shard = self._packed(name, value)
        if shard is None:
            return False
        parameter = nn.Parameter(shard, requires_grad=False)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        layer, _, key = name.rpartition(".")
        self._model.get_submodule(layer).register_parameter(key, parameter)
        return True

    def _packed(self, name: str, value: Any) -> torch.Tensor | None:
        spec, mesh, layer = self.specs[name], self._mesh, name.rpartition(".")[0]
        if isinstance(value, StoredWeight):
            form = self._layers.form(layer, value.dtype, spec, mesh)
            return value.shard(spec, mesh) if value.is_read else torch.zeros(form.nbytes, dtype=torch.uint8)
        marked = self._model.get_parameter(name)
        expected = marked.to_local().shape if isinstance(marked, DTensor) else spec.shape
        if tuple(value.shape) != tuple(expected):
            return None
        is_slice = isinstance(marked, DTensor)
        shard = pad_shard(value, spec, mesh.shape) if is_slice else take_shard(value, spec, mesh)
        return self._layers.form(layer, shard.dtype, spec, mesh).pack(shard)


class _IntoFourBits(ConversionOps):
    def __init__(self, reader: FourBitReader) -> None:
        self._reader = reader

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *_: Any, missing_keys: Any = None, **__: Any) -> dict[str, Any]:
        """Give the model those of the loaded parameters that it keeps in 4 bits, and return the others."""
        others = {}
        for name, values in input_dict.items():
            if name not in self._reader.specs:
                others[name] = values
            elif self._reader.take(name, values[0] if isinstance(values, list) else values):
                missing_keys.discard(name)
        return others


class StoredWeight:
    """A weight ``[O, I]`` that bitsandbytes has stored in 4 bits, in the place of its tensor.

    Attributes:
        dtype: in which its elements are restored.
        is_read: whether :meth:`shard` may be called; not where a replica sends what it has read.
    """

    def __init__(self, name: str, files: Mapping[str, TensorFile], values: str, *, is_read: bool) -> None:
        self.name, self.is_read, self._files, self._values = name, is_read, files, values
        state = self._state()
        self.dtype: torch.dtype = _DTYPES[state["dtype"]]
        self.shape: tuple[int, ...] = tuple(state["shape"])
        self._offset: float | None = state.get("nested_offset")
        self._check_tensors()

    def __getitem__(self, _: Any) -> StoredWeight:
        """Itself: transformers reads all of a tensor that isn't marked as a slice."""
        return self

    def to(self, *_: Any, **__: Any) -> StoredWeight:
        """Itself: there is no other dtype."""
        return self

    def shard(self, spec: ShardingSpec, mesh: Mesh) -> torch.Tensor:
        """Read the bytes of this rank's shard."""
        of_scales = scales_spec(spec, mesh.shape)
        assert of_scales is not None, "checked before a weight is read"
        rows, scales = of_scales.shape
        of_bytes = ShardingSpec((rows, scales * BLOCK // 2), spec.tp_axes, spec.parts)
        elements = torch.zeros(of_bytes.shard_shape(mesh.shape), dtype=torch.uint8)
        for here, (there, columns) in shard_boxes(of_bytes, mesh.shape, mesh.coordinate):
            elements[here] = self._elements(there, of_bytes.shape[1])[:, columns]
        return joined(elements, take_shard(self._scales().view(of_scales.shape), of_scales, mesh))

    def _elements(self, rows: slice, row_bytes: int) -> torch.Tensor:
        file = self._files[self.name]
        # They may be stored as numbers of several bytes.
        itemsize = file.specs[self.name].dtype.itemsize
        stored = file.read(self.name, [slice(*(row * row_bytes // itemsize for row in (rows.start, rows.stop)))])
        return stored.flatten().view(torch.uint8).view(-1, row_bytes)

    def _scales(self) -> torch.Tensor:
        """All scales: of a weight's bytes, they are one in 32 where they are nested."""
        scales = self._read("absmax")
        if self._offset is None:
            return scales
        bitsandbytes: Any = importlib.import_module("bitsandbytes.functional")
        nested = bitsandbytes.QuantState(
            self._read("nested_absmax"),
            code=self._read("nested_quant_map"),
            blocksize=NESTED_BLOCK,
            dtype=torch.float32,
        )
        restored: torch.Tensor = bitsandbytes.dequantize_blockwise(scales, nested)
        return restored + torch.tensor(self._offset)

    def _read(self, beside: str) -> torch.Tensor:
        name = f"{self.name}.{beside}"
        return self._files[name].read(name)

    def _state(self) -> dict[str, Any]:
        """The JSON that describes the weight."""
        name = f"{self.name}.quant_state.bitsandbytes__{self._values}"
        file = self._files[name]
        spec = file.specs[name]
        if spec.dtype != torch.uint8 or len(spec.shape) != 1 or spec.nbytes > _MOST_STATE_BYTES:
            raise self._damage(f"{name} is no text of at most {_MOST_STATE_BYTES:,} bytes")
        state = parse_json(bytes(bytes_of(file.read(name))), file.path)
        is_nested = isinstance(state, dict) and not _NESTED_KEYS.isdisjoint(state)
        if not isinstance(state, dict) or state.keys() != (_KEYS | _NESTED_KEYS if is_nested else _KEYS):
            raise self._damage(f"{name} doesn't have the keys {', '.join(sorted(_KEYS))}")
        for key in ("blocksize", "nested_blocksize") if is_nested else ("blocksize",):
            expected = NESTED_BLOCK if key.startswith("nested") else BLOCK
            if type(state[key]) is not int or state[key] != expected:
                raise UnsupportedModelError(
                    f"{file.path}: {self.name} has blocks of {state[key]!r} elements ({key}), for which there is no "
                    f"rule on a mesh or in a pipeline; take a checkpoint with blocks of {expected}, which is "
                    "transformers' own choice"
                )
        shape, offset = state["shape"], state.get("nested_offset", 0.0)
        if state["quant_type"] != self._values or str(state["dtype"]) not in _DTYPES:
            raise self._damage(f"{name} says {state['quant_type']!r} and {state['dtype']!r}")
        is_number = type(offset) in (int, float) and math.isfinite(offset)
        if state.get("nested_dtype", "float32") != "float32" or not is_number:
            raise self._damage(f"{name} says {state['nested_dtype']!r} and an offset of {str(offset)[:40]!r}")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(x) is int and x > 0 for x in shape):
            raise self._damage(f"{name} says that the shape is {str(shape)[:40]}")
        return state

    def _check_tensors(self) -> None:
        """Check the dtypes and shapes of all tensors of the weight, and which values its bits stand for."""
        elements, is_nested = math.prod(self.shape), self._offset is not None
        scales = math.ceil(elements / BLOCK)
        expected = {
            "absmax": TensorSpec(torch.uint8 if is_nested else torch.float32, (scales,)),
            "quant_map": TensorSpec(torch.float32, (16,)),
        }
        if is_nested:
            expected["nested_absmax"] = TensorSpec(torch.float32, (math.ceil(scales / NESTED_BLOCK),))
            expected["nested_quant_map"] = TensorSpec(torch.float32, (256,))
        present = {key for key in _BESIDE if f"{self.name}.{key}" in self._files}
        if present != expected.keys():
            raise self._damage(f"beside it are {', '.join(sorted(present))}, not {', '.join(sorted(expected))}")
        for key, spec in expected.items():
            in_file = self._files[f"{self.name}.{key}"].specs[f"{self.name}.{key}"]
            if in_file != spec:
                raise self._damage(f"its {key} is {list(in_file.shape)} of {in_file.dtype}, not {list(spec.shape)}")
        in_file = self._files[self.name].specs[self.name]
        is_storage = in_file.dtype in (torch.uint8, *DTYPES) and in_file.shape[1:] == (1,)
        if not is_storage or 2 * in_file.nbytes != elements:
            sizes = f"{list(in_file.shape)} of {in_file.dtype}"
            raise self._damage(f"its {sizes} aren't 4 bits each of {elements:,} elements")
        bitsandbytes: Any = importlib.import_module("bitsandbytes.functional")
        known = bitsandbytes.get_4bit_type(self._values, device="cpu")
        if not torch.allclose(self._read("quant_map"), known, rtol=0, atol=1e-4):
            raise self._damage(f"its quant_map doesn't have the values of {self._values}")

    def _damage(self, why: str) -> CheckpointError:
        places = [file.path for name, file in self._files.items() if name.startswith(self.name)]
        return CheckpointError(f"{places[0]}: {self.name} is stored in 4 bits and damaged: {why}")


class StoredWeights:
    """A checkpoint's files, with weights in 4 bits among their tensors."""

    def __init__(self, files: Sequence[TensorFile]) -> None:
        self._files = {name: file for file in files for name in file.specs}
        matches = (_STATE.fullmatch(name) for name in self._files)
        self._values = {match[1]: match[2] for match in matches if match is not None}
        lost = next((name for name in self._values if name not in self._files), None)
        if lost is not None:
            raise CheckpointError(f"{files[0].path.parent}: has the scales of {lost}, and not the weight")

    @classmethod
    @contextmanager
    def open(cls, files: Sequence[str] | None) -> Iterator[StoredWeights]:
        """Open the files in a ``with`` block.

        Raises:
            UnsupportedModelError: they aren't safetensors.
        """
        if not files or not all(file.endswith(".safetensors") for file in files):
            what = Path(files[0]).name if files else "no files"
            raise UnsupportedModelError(
                f"quantization_config: weights in 4 bits are read of safetensors files, not of {what}; plain "
                "transformers' from_pretrained and save_pretrained make such files"
            )
        with ExitStack() as stack:
            yield cls([stack.enter_context(TensorFile(file)) for file in files])

    def tensors(
        self,
        unread: Mapping[str, Any] | None,
        model: Any,
        load_config: Any,
        specs: Mapping[str, ShardingSpec],
        values_of_bits: str,
    ) -> dict[str, Any]:
        """What transformers' loader takes for the files' tensors.

        Args:
            unread: stand-ins for tensors that aren't to be read; None to read them.
            model: that is loaded.
            load_config: of transformers' loader.
            specs: of the parameters that are kept in 4 bits.
            values_of_bits: the 16 values, as the model's config names them.

        Raises:
            UnsupportedModelError, CheckpointError: names a tensor that is, or isn't, in 4 bits, against what the
                model's config says; or one that is damaged.
        """
        states = {f"{weight}.quant_state.bitsandbytes__{values}" for weight, values in self._values.items()}
        beside = {f"{weight}.{key}" for weight in self._values for key in _BESIDE} | states
        names = [name for name in self._files if name not in beside]
        values: dict[str, Any] = {
            name: _Piece(self._files[name], name) if unread is None else unread[name] for name in names
        }
        for name, (target, is_converted) in _targets(names, model, load_config).items():
            path = self._files[name].path
            if name not in self._values:
                if target in specs:
                    raise CheckpointError(
                        f"{path}: {name} isn't stored in 4 bits, as config.json's quantization_config says that it is; "
                        "layers in 16 bits are named in its llm_int8_skip_modules"
                    )
            elif target is None:
                continue
            elif target in specs and not is_converted:
                values[name] = self._weight(name, values_of_bits, is_read=unread is None)
                if values[name].shape != specs[target].shape:
                    shapes = f"{list(values[name].shape)}, and the model's {target} {list(specs[target].shape)}"
                    raise CheckpointError(f"{path}: {name} is {shapes}")
            else:
                raise UnsupportedModelError(
                    f"{path}: {name} is stored in 4 bits, and transformers makes {target} of it, which isn't a linear "
                    "layer's weight that quantization_config quantises: there is no rule for it on a mesh or in a "
                    "pipeline. Take a checkpoint of 16 bits, with quantization_config in from_pretrained"
                )
        return values

    def _weight(self, name: str, values: str, *, is_read: bool) -> StoredWeight:
        if self._values[name] != values:
            raise CheckpointError(
                f"{self._files[name].path}: {name} is stored as {self._values[name]}, and config.json's "
                f"quantization_config has bnb_4bit_quant_type {values!r}"
            )
        return StoredWeight(name, self._files, values, is_read=is_read)


def _targets(names: Sequence[str], model: Any, load_config: Any) -> dict[str, tuple[str | None, bool]]:
    """The parameter of each tensor, None if the model has none, and whether transformers converts it."""
    # Some of them remember what they have been given.
    mapping = copy.deepcopy(load_config.weight_mapping or [])
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    known, targets = model.state_dict(), dict[str, tuple[str | None, bool]]()
    for name in sorted(names):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        targets[name] = target if target in known else None, pattern is not None
    return targets


class _Piece:
    """What transformers takes for a slice of a file (``safe_open(…).get_slice``)."""

    def __init__(self, file: TensorFile, name: str) -> None:
        self._file, self._name = file, name

    def get_shape(self) -> list[int]:
        """Sizes of the whole tensor."""
        return list(self._file.specs[self._name].shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        if index is Ellipsis:
            return self._file.read(self._name)
        return self._file.read(self._name, index if isinstance(index, tuple) else (index,))
