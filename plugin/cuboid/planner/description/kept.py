"""Count what a model's layers save for backward by running their own code, rather than by formulas.

A few of the layers run forward and backward under torch's ``FakeTensorMode``, which computes shapes but no values, as a
stage runs them, while hooks record what autograd saves. That takes a second and no memory at any size, and nothing in
it is specific to an architecture. Counts for units of a few sizes are fitted by coefficients for all sizes.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode, fake_tensor
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from cuboid.config.schema import CuboidConfig
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.errors import UnsupportedModelError
from cuboid.models.attention.forward_context import Packing, Unit, UnitSlot, knowing
from cuboid.models.attention.segment_cache import give_cache
from cuboid.models.attention.segments import use_segment_attention, uses_interface
from cuboid.models.sharded.parallel_plan import ParallelPlan, make_parallel_plan
from cuboid.models.sharded.parallelize import parallelize_modules
from cuboid.models.stages.deferred_linear import defer_weight_gradients
from cuboid.models.stages.model_costs import decoder_layers
from cuboid.planner.description.meta_model import model_of
from cuboid.planner.description.model import ModelDescription
from cuboid.seq1f1b.attention.kv_cache import KVCache
from cuboid.seq1f1b.runtime.memory import MeteredPool, storage_id
from cuboid.tensor3d.sharding.sharding_spec import take_shard
from cuboid.tensor3d.sharding.weight_gradients import DeferredProduct, WeightGradientStore

#: Units that are run: rows, tokens, and the first position of a segment. Lengths are multiples of the blocks of scans
#: and convolutions. There is one unit more than independent coefficients, as a check of the fit.
_SEGMENTS = ((2, 256, 512), (2, 256, 64), (4, 512, 64), (2, 512, 128), (2, 256, 768), (2, 768, 256), (3, 256, 256))
_WHOLE = ((1, 256, 0), (2, 256, 0), (1, 512, 0), (2, 768, 0), (3, 512, 0), (1, 768, 0))
#: A window that all of these units exceed, and one that none does.
_SHORT, _LONG = 128, 1 << 20
_WINDOWS = ("sliding_window", "attention_chunk_size")
#: Raised by operations whose result, or its shape, depends on values.
_NEED_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)
#: Packages whose errors are attributed to the code that called them.
_LIBRARIES = {"torch", "numpy", *sys.stdlib_module_names}
#: Largest error of the fit, relative to the largest count.
_TOLERANCE = 0.002


@dataclass(frozen=True)
class KeptBytes:
    """Coefficients of bytes that grow with a unit's sizes.

    Args:
        token: bytes for each token of each row.
        key: for each key that a row's tokens see.
        score: for each pair of a token and a key, of each row.
        position: for each token of a row, independent of the number of rows.
        mask: for each pair of a token and a key, independent of the number of rows.
        fixed: independent of all sizes.
    """

    token: float = 0.0
    key: float = 0.0
    score: float = 0.0
    position: float = 0.0
    mask: float = 0.0
    fixed: float = 0.0

    def of(self, rows: float, length: float, keys: float) -> float:
        """Bytes of a unit of ``rows`` rows with ``length`` tokens each, which see ``keys`` keys."""
        return (
            rows * (length * self.token + keys * self.key + length * keys * self.score)
            + length * (self.position + keys * self.mask)
            + self.fixed
        )


@dataclass(frozen=True)
class LayerCount:
    """What one kind of layer keeps if it isn't sharded.

    Args:
        kept: from forward to backward, without the KV cache.
        shared: in addition, once for all layers of this kind in a unit: masks and positions.
        waiting: from the first half of a split backward to the second; counted in Hugging Face's own modules.
    """

    kept: KeptBytes
    shared: KeptBytes
    waiting: KeptBytes


@dataclass(frozen=True)
class ModelCount:
    """What a model's layers keep.

    Args:
        layers: by kind of layer, for units that end within its window.
        windowed: the same for units that end beyond it.
        end: what is saved after the last layer, before the head.
        obstacle: why nothing could be counted; "" if it could.
    """

    layers: tuple[LayerCount, ...] = ()
    windowed: tuple[LayerCount, ...] = ()
    end: KeptBytes = KeptBytes()
    obstacle: str = ""


@lru_cache(maxsize=256)
def count_kept(model: ModelDescription, *, sharded: bool, segmented: bool, alone: bool = False) -> ModelCount:
    """Count what a model's layers keep.

    Args:
        model: what is described.
        sharded: whether to count in the sharded modules of a mesh, or in Hugging Face's own.
        segmented: whether units are segments of sequences, which share a KV cache.
        alone: whether a unit has one row. Some models' code makes views of one row's cached keys and values, but copies
            of several rows'.

    Raises:
        Exception: a bug in Cuboid's own code, of any type.
    """
    if not all(each.attention.query for each in model.kinds):
        return ModelCount(obstacle="layers without attention have other kernels on GPUs, which keep other things")
    windows = tuple(each.attention.window is not None for each in model.kinds)
    log = logging.getLogger(FakeTensor.__module__)  # which also logs the exceptions that it raises
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        # While a model is being loaded, the default device is meta, whose tensors can't be mixed with these.
        with torch.device("cpu"), torch.enable_grad():
            # Equal configs share one cached count, even if they are different objects.
            return _count(_Key(model.config, model.kind_of_layers), windows, sharded, segmented, alone and segmented)
    except Exception as error:
        if not _is_obstacle(error):
            raise
        return ModelCount(obstacle=" ".join(f"{type(error).__name__}: {error}".split())[:300])
    finally:
        log.setLevel(level)


def _is_obstacle(error: Exception) -> bool:
    """Whether an error is the model's: it has no rule, runs an operation that needs values, or fails in foreign code.

    Other errors are bugs of Cuboid, which must not pass for an obstacle.
    """
    if isinstance(error, (UnsupportedModelError, *_NEED_VALUES)):
        return True
    # Frames of a TorchFunctionMode only pass on what the model calls.
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name != "__torch_function__"]
    packages = [str(each.f_globals.get("__name__")).split(".")[0] for each in frames]
    # The innermost frame outside of the libraries is to blame.
    return [each for each in packages if each not in _LIBRARIES][-1] != "cuboid"


class _Key:
    """A config and the kinds of its layers, compared by value."""

    def __init__(self, config: PretrainedConfig, kinds: tuple[int, ...]) -> None:
        self.config, self.kinds = config, kinds
        said = {**config.to_dict(), "attention": config._attn_implementation}
        self._said = json.dumps(said, sort_keys=True, default=str), kinds

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._said == other._said

    def __hash__(self) -> int:
        return hash(self._said)


@lru_cache(maxsize=64)
def _count(key: _Key, windows: tuple[bool, ...], sharded: bool, segmented: bool, alone: bool) -> ModelCount:
    sample = _Sample(key, _LONG, sharded=sharded, segmented=segmented)
    if alone and not sample.attends_itself:
        # The number of rows only matters to layers that attend by themselves.
        return _count(key, windows, sharded, segmented, False)
    plain, end = _fitted(sample, windows, alone)
    if not any(windows):
        return ModelCount(plain, plain, end)
    reached = _Sample(key, _SHORT, sharded=sharded, segmented=segmented)
    return ModelCount(plain, _fitted(reached, windows, alone)[0], end)


@dataclass(frozen=True)
class _UnitCount:
    """Bytes of one unit: saved, by :meth:`_Saved.bytes_by_place`, and waiting for weight gradients, by layer."""

    kept: dict[int, int]
    waiting: dict[int, int]


class _Sample:
    """The first few layers of a model, without values; each kind is there twice if the model has it twice.

    Args:
        key: config and kinds of the whole model.
        window: window of the layers that have one.
        sharded, segmented: see :func:`count_kept`.
    """

    def __init__(self, key: _Key, window: int, *, sharded: bool, segmented: bool) -> None:
        self.kinds, self.window, self.segmented = _enough(key.kinds), window, segmented
        config = _cut_config(key.config, len(key.kinds), len(self.kinds), window)
        # Made outside of the fake mode: to find their kind, norms are run with real values.
        plan = _plan_of_one(config) if sharded else None
        self._mode, self._slot, self.waiting = FakeTensorMode(allow_non_fake_inputs=True), UnitSlot(), _Waiting()
        with self._mode:
            self._model: Any = model_of(config, dtype=torch.bfloat16).train()
            if plan is not None:
                settings, mesh = CuboidConfig().tensor_parallel, _lone_mesh()
                parallelize_modules(self._model, plan, mesh, settings, functools.partial(take_shard, mesh=mesh))
        self._arguments = inspect.signature(type(self._model.base_model).forward).parameters
        layers = decoder_layers(self._model)
        self._saved = _Saved(self._model, list(layers.values()))
        self.attends_itself = segmented and not any(map(uses_interface, layers.values()))
        use_segment_attention(self._model.config, layers, self._slot, gives_cache=self.attends_itself)
        for layer in layers.values() if self.attends_itself else ():
            give_cache(layer, self._slot)
        defer_weight_gradients(layers.values(), self.waiting)

    def run(self, rows: int, length: int, start: int) -> _UnitCount:
        """Run one unit forward and backward. A segment isn't the last one, so that it caches its keys and values."""
        stop, pool = start + length, MeteredPool()
        total = stop + (length if self.segmented else 0)
        cache = KVCache(total, pool)
        self._saved.clear()
        self.waiting.products.clear()
        with self._mode:
            if start:
                with self._running(Unit(cache, 0, start, total)), torch.no_grad():
                    self._forward(rows, 0, start)
            unit = Unit(cache, start, stop, total)
            with self._running(unit), self.waiting.open(), self._saved.hooks():
                hidden = self._forward(rows, start, stop)
            kept = self._saved.bytes_by_place(pool)
            with self._slot.running(unit), self.waiting.filling(0):
                hidden.backward(torch.empty_like(hidden))
        return _UnitCount(kept, self._saved.bytes_of(self.waiting.products))

    @contextmanager
    def _running(self, unit: Unit) -> Iterator[None]:
        with self._slot.running(unit), knowing(packing=Packing(None, None)), _FusedAttention():
            yield

    def _forward(self, rows: int, start: int, stop: int) -> torch.Tensor:
        ids = torch.zeros((rows, stop - start), dtype=torch.int64, device="cpu")
        # Layers that compute attention themselves need a mask of all positions up to the segment's end.
        options: dict[str, Any] = {"attention_mask": ids.new_ones((rows, stop))} if self.attends_itself else {}
        if "use_cache" in self._arguments:
            options["use_cache"] = False
        hidden: torch.Tensor = self._model.base_model(ids, **options)[0]
        return hidden


def _cut_config(config: PretrainedConfig, layers: int, kept: int, window: int) -> PretrainedConfig:
    """The config of the first ``kept`` of ``layers`` layers, with another window."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        # Lists with one entry for each layer, such as layer_types.
        if isinstance(value, list) and len(value) == layers:
            setattr(text, name, value[:kept])
    text.num_hidden_layers = kept
    for name in _WINDOWS:
        if getattr(text, name, None):
            setattr(text, name, window)
    rope = getattr(text, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
        # These types read the positions' values; the default's tables have the same size.
        text.rope_parameters = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 1e4)}
    return config


def _plan_of_one(config: PretrainedConfig) -> ParallelPlan:
    with torch.device("meta"):
        return make_parallel_plan(model_of(config), MeshShape())


def _lone_mesh() -> Mesh:
    return Mesh(MeshShape(), rank=0, world_size=1)


def _enough(kinds: tuple[int, ...]) -> tuple[int, ...]:
    """The kinds of the first layers, up to the second layer of each kind (the first, if it is the only one)."""
    seconds = [[index for index, each in enumerate(kinds) if each == kind][:2][-1] for kind in set(kinds)]
    return kinds[: max(seconds) + 1]


class _Waiting(WeightGradientStore):
    """Records the products whose weight gradients are deferred."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Any] = []

    def add(self, product: DeferredProduct) -> None:
        """Called by a layer's backward."""
        self.products.append(product)


class _Saved:
    """Storages that autograd saves; each counts once, for the layer that saves it first.

    They are kept alive, so that no other storage gets the same id.

    Args:
        model: its parameters and buffers don't count.
        layers: the model's layers, in order.
    """

    def __init__(self, model: nn.Module, layers: list[nn.Module]) -> None:
        self._excluded = {storage_id(x) for x in (*model.parameters(), *model.buffers())}
        self._place_of = {id(x): index for index, layer in enumerate(layers) for x in layer.parameters()}
        self._place = -1
        self._found: dict[int, tuple[int, torch.Tensor]] = {}
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(functools.partial(self._enter, index), prepend=True)
        layers[-1].register_forward_hook(functools.partial(self._enter, len(layers)))

    def clear(self) -> None:
        """Forget what was saved, before another unit runs."""
        self._place, self._found = -1, {}

    def hooks(self) -> AbstractContextManager[None]:
        """A context in which saved tensors are recorded."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    def _enter(self, index: int, *_: Any) -> None:
        self._place = index

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        if storage_id(x) not in self._excluded:
            self._found.setdefault(storage_id(x), (self._place, x.detach()))
        return x

    def bytes_by_place(self, pool: MeteredPool) -> dict[int, int]:
        """Bytes by index of the layer: -1 before the first one, their number after the last. Without the KV cache."""
        found: Counter[int] = Counter()
        for key, (place, x) in self._found.items():
            if not pool.holds(key):
                found[place] += x.untyped_storage().nbytes()
        return found

    def bytes_of(self, products: list[Any]) -> dict[int, int]:
        """Bytes of products' inputs and output gradients, by layer; each storage counts once, for the first product."""
        found: Counter[int] = Counter()
        seen: set[int] = set()
        for product in products:
            # A saved activation belongs to the layer that saved it. A copy (of an input that wasn't flat) isn't found;
            # it belongs to its weight's layer.
            saved = self._found.get(storage_id(product.x))
            place = self._place_of[product.key] if saved is None else saved[0]
            for x in (product.x, product.dy):
                if storage_id(x) not in seen:
                    seen.add(storage_id(x))
                    found[place] += x.untyped_storage().nbytes()
        return found


class _FusedAttention(TorchFunctionMode):
    """Replaces attention by one that saves what fused GPU kernels save, independent of this device's kernels."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            names = ("query", "key", "value")
            heads = [args[i] if i < len(args) else kwargs[n] for i, n in enumerate(names)]
            # No fused kernel broadcasts heads (Falcon has one of keys and values); torch multiplies step by step then.
            if heads[0].shape[1] == heads[1].shape[1] or kwargs.get("enable_gqa"):
                return _Attend.apply(*heads, mask)
        return func(*args, **kwargs)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
        rows, heads, length, _ = query.shape
        # Fused kernels return a result with the query's memory layout.
        out = query.new_empty((rows, length, heads, value.shape[-1])).transpose(1, 2)
        if query.shape[-1] == value.shape[-1]:
            out = torch.empty_like(query)
        log_sums = query.new_empty((rows, heads, length), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return (*(torch.empty_like(x) for x in ctx.saved_tensors[:3]), None)


def _fitted(sample: _Sample, windows: tuple[bool, ...], alone: bool) -> tuple[tuple[LayerCount, ...], KeptBytes]:
    """Coefficients of each kind of layer, and of what is saved after the last layer."""
    points = [
        (1 if alone else rows, length, start) for rows, length, start in (_SEGMENTS if sample.segmented else _WHOLE)
    ]
    counts = [sample.run(*point) for point in points]
    layers = []
    for kind, has_window in enumerate(windows):
        own = [index for index, each in enumerate(sample.kinds) if each == kind]
        first, last = own[0], own[-1]
        most = sample.window if has_window and sample.segmented else _LONG
        keys = [length + min(start, most - 1) for _, length, start in points]
        # Storages that layers share count for the layer that saves them first: the last layer of a kind has only its
        # own, the first one also the shared ones. What waits is found in backward's order, so there the first layer has
        # only its own.
        kept = _fit(points, keys, [count.kept.get(last, 0) for count in counts])
        shared = _fit(points, keys, [count.kept.get(first, 0) - count.kept.get(last, 0) for count in counts])
        layers.append(LayerCount(kept, shared, _fit(points, keys, [count.waiting.get(first, 0) for count in counts])))
    keys = [length + start for _, length, start in points]
    return tuple(layers), _fit(points, keys, [count.kept.get(len(sample.kinds), 0) for count in counts])


def _fit(points: list[tuple[int, int, int]], keys: list[int], found: list[int]) -> KeptBytes:
    """Fit coefficients by least squares, and check that they reproduce every count.

    Args:
        points: rows, length and start of each unit.
        keys: keys that a row of each unit sees.
        found: bytes that were counted for each unit.

    Raises:
        UnsupportedModelError: they don't.
    """
    # Of whole sequences, columns for keys equal those for tokens: lstsq takes the smallest of the solutions.
    table = np.array([
        [rows * length, rows * seen, rows * length * seen, length, length * seen, 1.0]
        for (rows, length, _), seen in zip(points, keys, strict=True)
    ])  # fmt: skip
    scale = table.max(axis=0)
    solved = np.linalg.lstsq(table / scale, np.array(found, dtype=float), rcond=1e-9)[0]
    error = np.abs(table / scale @ solved - found).max()
    if error > _TOLERANCE * max(map(abs, found), default=0):
        raise UnsupportedModelError(f"bytes of units don't grow with their sizes: {found}")
    return KeptBytes(*(solved / scale).round(6).tolist())
