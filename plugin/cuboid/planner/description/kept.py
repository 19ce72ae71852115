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
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate, combinations
from traceback import walk_tb
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch._subclasses import FakeTensor, fake_tensor
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from cuboid.config.schema import CuboidConfig
from cuboid.distributed.lone_rank import lone_rank
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape, Topology
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.attention_heads import plan_key_value_heads
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.architectures.norm_formula import NormFormula
from cuboid.models.attention.forward_context import Lengths, Packing, Unit, UnitSlot, knowing
from cuboid.models.attention.segment_cache import give_cache
from cuboid.models.attention.segments import find_record, hang_record, record_of, use_segment_attention, uses_interface
from cuboid.models.kinds.registry import kind_of
from cuboid.models.sharded.parallel_plan import ParallelPlan, make_parallel_plan
from cuboid.models.sharded.parallelize import attention_modules, parallelize_modules, whole_blocks
from cuboid.models.stages.deferred_linear import defer_weight_gradients
from cuboid.models.stages.fused_norms import fuse_norms, rms_norms
from cuboid.models.stages.model_costs import decoder_layers
from cuboid.planner.description.fake_mode import LightFakeMode
from cuboid.planner.description.meta_model import model_of
from cuboid.planner.description.model import Layer, ModelDescription
from cuboid.planner.description.trunk import Trunk
from cuboid.seq1f1b.attention.kv_cache import KVCache
from cuboid.seq1f1b.runtime.memory import MeteredPool, storage_id
from cuboid.tensor3d.layers.whole_block import LateSplit
from cuboid.tensor3d.sharding.sharding_spec import take_shard
from cuboid.tensor3d.sharding.weight_gradients import DeferredProduct, WeightGradientStore

T = TypeVar("T")

#: Micro-batches that are run one after the other until they determine all coefficients: rows, and lengths of their
#: segments in multiples of :data:`_BLOCK`. None has a single block: a scan of one block doesn't save the states between
#: blocks. None has a single row, of which products of attention's scores keep views where they keep copies of several.
SEGMENTS = ((2, (4, 8)), (3, (4, 2)), (4, (8, 2, 4)), (2, (8, 4, 12)))
WHOLE = ((2, (4,)), (3, (8,)), (2, (12,)), (4, (2,)), (4, (4,)), (3, (12,)), (5, (8,)), (5, (4,)))
_FEW_UNITS = 4
#: Coefficients of bytes of which a row has a number that isn't that of its tokens.
OF_ROWS = frozenset(("position", "mask", "row"))
#: Tokens; scans and convolutions have blocks that divide it, or those that configs name.
_BLOCK = 64
_SCAN_BLOCKS = ("chunk_size", "mamba_chunk_size")
#: Packages whose kernels transformers runs on GPUs for layers without attention, where they are installed.
_KERNELS = ("mamba_ssm", "fla", "causal_conv1d")
#: Blocks of a window that all counted units end beyond. Of segments those behind the first ones also begin beyond it,
#: so that what grows with the keys that a unit sees is told from what grows with its rows.
SHORT_WINDOW = 1
#: A window that no counted unit exceeds.
LONG_WINDOW = 1 << 20
_WINDOWS = ("sliding_window", "attention_chunk_size")
#: Raised by operations whose result, or its shape, depends on values.
_NEED_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)
#: Most ranks of an axis that are counted, if it has enough divisors.
_MOST = 4
#: Coefficients of :class:`KeptBytes`, and those that are always looked for: gathered weights have one size.
COLUMNS = ("token", "key", "score", "position", "mask", "row", "fixed")
ALWAYS = ("token", "fixed")
#: Packages whose errors are attributed to the code that called them.
_LIBRARIES = {"torch", "numpy", *sys.stdlib_module_names}
#: Methods by which torch calls its modes.
_OF_MODES = ("__torch_function__", "__torch_dispatch__")
#: Largest error of a fit, relative to the largest count: with some coefficients, and with all of them.
EXACT, _TOLERANCE = 1e-9, 0.002
#: Share of the largest count that rounding may make of nothing.
_ROUNDING = 1e-11


@dataclass(frozen=True)
class KeptBytes:
    """Coefficients of bytes that grow with a unit's sizes.

    Args:
        token: bytes for each token of each row.
        key: for each key that a row's tokens see.
        score: for each pair of a token and a key, of each row.
        position: for each token of a row, independent of the number of rows.
        mask: for each pair of a token and a key, independent of the number of rows.
        row: for each row, independent of its length.
        fixed: independent of all sizes.
    """

    token: float = 0.0
    key: float = 0.0
    score: float = 0.0
    position: float = 0.0
    mask: float = 0.0
    row: float = 0.0
    fixed: float = 0.0

    def of(self, rows: float, length: float, keys: float) -> float:
        """Bytes of a unit of ``rows`` rows with ``length`` tokens each, which see ``keys`` keys."""
        return (
            rows * (length * self.token + keys * self.key + length * keys * self.score + self.row)
            + length * (self.position + keys * self.mask)
            + self.fixed
        )


@dataclass(frozen=True)
class LayerCount:
    """What one kind of layer keeps on a rank.

    Args:
        kept: from forward to backward, without the KV cache.
        shared: in addition, once for all layers of this kind in a unit: masks and positions.
        waiting: from the first half of a split backward to the second; nothing if backwards aren't split.
        cache: bytes of the KV cache for each position of a row.
    """

    kept: KeptBytes
    shared: KeptBytes
    waiting: KeptBytes
    cache: float = 0.0


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


@dataclass(frozen=True)
class CountedAs:
    """What kind of rank is counted.

    Args:
        mesh: of the rank; None for stages without a mesh, which have Hugging Face's own modules.
        segmented: whether units are segments of sequences, which share a KV cache.
        alone: whether a unit has one row. Where attention isn't one kernel, products have views of one row's keys and
            values, but copies of several rows'.
        splits: whether to count also what waits between the halves of a split backward.
    """

    mesh: MeshShape | None
    segmented: bool = False
    alone: bool = False
    splits: bool = False


@lru_cache(maxsize=4096)
def count_kept(model: ModelDescription, rank: CountedAs) -> ModelCount:
    """Count what a model's layers keep on a rank.

    Raises:
        Exception: a bug in Cuboid's own code, of any type.
    """
    counted = without_values(model, lambda key: _on_mesh(key, model.kinds, rank))
    return ModelCount(obstacle=counted) if isinstance(counted, str) else counted


def without_values(model: ModelDescription, count: Callable[[SampleKey], T]) -> T | str:
    """What ``count`` returns of a model's first layers, or why their code can't run without values.

    Raises:
        Exception: a bug in Cuboid's own code, of any type.
    """
    kernels = [name for name in _KERNELS if find_spec(name) is not None]
    if kernels and any(kind.attention.query == 0 for kind in model.kinds):
        return f"layers without attention run kernels of {kernels[0]}, which keep other things"
    log = logging.getLogger(FakeTensor.__module__)  # which also logs the exceptions that it raises
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        # While a model is being loaded, the default device is meta, whose tensors can't be mixed with these.
        with torch.device("cpu"), torch.enable_grad():
            # Equal configs share one cached count, even if they are different objects.
            return count(SampleKey(model.config, model.kind_of_layers, model.verdict, model.trunk))
    except Exception as error:
        if not _is_obstacle(error):
            raise
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    finally:
        log.setLevel(level)


def _on_mesh(key: SampleKey, kinds: tuple[Layer, ...], rank: CountedAs) -> ModelCount:
    """Count on the mesh itself if it is small, and else infer the bytes from smaller ones.

    Along an axis every tensor is either divided or not, so for one size of the other axis bytes are A + B / ranks, and
    two sizes give A and B. That isn't so where several ranks have the same heads of keys and values, or where each rank
    has a single head, whose copies are views.
    """
    parts = [(share, _count(key, kinds, small)) for share, small in inferred_parts(kinds, rank)]
    if len(parts) == 1:
        return parts[0][1]
    return ModelCount(
        _inferred([(share, count.layers) for share, count in parts]),
        _inferred([(share, count.windowed) for share, count in parts]),
        _summed([(share, count.end) for share, count in parts]),
    )


def inferred_parts(kinds: tuple[Layer, ...], rank: CountedAs) -> list[tuple[float, CountedAs]]:
    """The ranks to count in place of ``rank``, and the share of each: bytes are sums of these shares of their bytes."""
    mesh = rank.mesh
    if mesh is None or mesh.size == 1:
        return [(1.0, rank)]
    # Rows are divided over `batch`, and are a rank's here. What depends on it is whether weights are gathered, which
    # autograd saves where a product isn't Cuboid's (routers); of its size, only their padding does.
    inner = mesh.of("sequence", "hidden")
    batch = min(mesh.batch, 2)
    heads = [kind.attention.key_value_heads for kind in kinds if kind.splits_heads]
    if any(count <= inner or count % inner for count in heads):
        return [(1.0, replace(rank, mesh=MeshShape(batch, mesh.sequence, mesh.hidden)))]
    return [
        (of_sequence * of_hidden, replace(rank, mesh=MeshShape(batch, sequence, hidden)))
        for sequence, of_sequence in _inferred_from(mesh.sequence)
        for hidden, of_hidden in _inferred_from(mesh.hidden)
    ]


def _inferred_from(ranks: int) -> list[tuple[int, float]]:
    """Sizes of an axis to count, and the share of each: bytes A + B / ranks are sums of these shares of their bytes."""
    # Whatever divides by the axis divides by its divisors.
    smaller = [size for size in range(2, _MOST + 1) if ranks % size == 0][-2:]
    if ranks <= _MOST or len(smaller) < 2:
        return [(ranks, 1.0)]
    one, two = smaller
    share = (1 / ranks - 1 / two) / (1 / one - 1 / two)
    return [(one, share), (two, 1 - share)]


def _inferred(parts: list[tuple[float, tuple[LayerCount, ...]]]) -> tuple[LayerCount, ...]:
    """Sums of shares, by kind of layer."""
    return tuple(
        LayerCount(
            _summed([(share, counts[kind].kept) for share, counts in parts]),
            _summed([(share, counts[kind].shared) for share, counts in parts]),
            _summed([(share, counts[kind].waiting) for share, counts in parts]),
            sum(share * counts[kind].cache for share, counts in parts),
        )
        for kind in range(len(parts[0][1]))
    )


def _summed(parts: list[tuple[float, KeptBytes]]) -> KeptBytes:
    names = [field.name for field in fields(KeptBytes)]
    return KeptBytes(*(sum(share * getattr(size, name) for share, size in parts) for name in names))


def _is_obstacle(error: Exception) -> bool:
    """Whether an error is the model's: it has no rule, runs an operation that needs values, or fails in foreign code.

    Other errors are bugs of Cuboid, which must not pass for an obstacle.
    """
    if isinstance(error, (CuboidError, *_NEED_VALUES)):
        return True
    # Frames of modes only pass on what the model calls.
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name not in _OF_MODES]
    packages = [str(frame.f_globals.get("__name__")).split(".")[0] for frame in frames]
    # The innermost frame outside of the libraries is to blame.
    return [package for package in packages if package not in _LIBRARIES][-1] != "cuboid"


class SampleKey:
    """The config of a model's first layers, their kinds, the verdict on meshes and the adapters, compared by value.

    Models of more layers, but of the same kinds, are equal.
    """

    def __init__(
        self, config: PretrainedConfig, kinds: tuple[int, ...], verdict: MeshVerdict, trunk: Trunk | None = None
    ) -> None:
        self.kinds, self.verdict, self.trunk = _enough(kinds), verdict, trunk
        self.config = _first_layers(config, len(kinds), len(self.kinds))
        said = {**self.config.to_dict(), "attention": config._attn_implementation, "verdict": repr(verdict)}
        said["trunk"] = str(trunk)
        self._said = json.dumps(said, sort_keys=True, default=str), self.kinds

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SampleKey) and self._said == other._said

    def __hash__(self) -> int:
        return hash(self._said)


@lru_cache(maxsize=1024)
def _count(key: SampleKey, kinds: tuple[Layer, ...], rank: CountedAs) -> ModelCount:
    sample = LayerSample(key, kinds, LONG_WINDOW, rank)
    if rank.alone and sample.is_fused:
        return _count(key, kinds, replace(rank, alone=False))
    plain, end = _fitted(sample)
    if not any(kind.attention.window is not None for kind in kinds):
        return ModelCount(plain, plain, end)
    return ModelCount(plain, _fitted(LayerSample(key, kinds, SHORT_WINDOW * sample.block, rank))[0], end)


@dataclass(frozen=True)
class _UnitCount:
    """What one unit keeps.

    Args:
        rows, length, start: of the unit; ``start`` is its first position.
        kept: saved bytes, by :meth:`_Saved.bytes_by_place`.
        cache: bytes of the KV cache for each position of a row, by layer.
        waiting: bytes that wait for weight gradients, by layer.
    """

    rows: int
    length: int
    start: int
    kept: dict[int, int]
    cache: dict[int, float]
    waiting: dict[int, int]


class LayerSample:
    """The first few layers of a model, without values; each kind is there twice if the model has it twice.

    Args:
        key: config and kinds of these layers.
        kinds: the model's kinds of layers.
        window: window of the layers that have one.
        rank: see :func:`count_kept`.
        mode: that its tensors are made in; None for one that does nothing else.
    """

    def __init__(
        self, key: SampleKey, kinds: tuple[Layer, ...], window: int, rank: CountedAs, mode: LightFakeMode | None = None
    ) -> None:
        self.kinds, self.window, self.rank = key.kinds, window, rank
        self.windows = [kind.attention.window is not None for kind in kinds]
        #: Of each kind, its first and its last layer.
        self.places = [
            (self.kinds.index(kind), len(self.kinds) - 1 - self.kinds[::-1].index(kind)) for kind in range(len(kinds))
        ]
        self._shape = MeshShape() if rank.mesh is None else rank.mesh
        config = _countable(key.config, window)
        self._mode = mode or LightFakeMode(allow_non_fake_inputs=True)
        self._slot, self.waiting = UnitSlot(), self.make_store()
        self._inputs = key.verdict.inputs
        # Made outside of the fake mode: to find their kind, norms are run with real values.
        plan = None if rank.mesh is None else _plan_of(config, self._shape, key.verdict)
        mesh = None if plan is None else lone_rank(self._shape, _fullest_rank(plan))
        norms = _norms_of(config) if plan is None else {}
        self._late: LateSplit | None = None
        with self._mode:
            self._model: Any = model_of(config, dtype=torch.bfloat16).train()
            fuse_norms(self._model, norms, Mesh(MeshShape()))
            if mesh is not None and plan is not None:
                settings, shard_of = CuboidConfig().tensor_parallel, functools.partial(take_shard, mesh=mesh)
                late, self._draws = parallelize_modules(self._model, plan, mesh, settings, shard_of)
                self._late = late if isinstance(late, LateSplit) else None
        self._arguments = inspect.signature(type(self._model.base_model).forward).parameters
        self._is_causal = kind_of(type(self._model), config).is_causal
        layers = decoder_layers(self._model)
        if rank.splits:
            defer_weight_gradients(layers.values(), self.waiting)
        if key.trunk is not None:
            self._adapt(key.trunk)
        self._saved = _Saved(self._model, list(layers.values()))
        attends_itself = not any(map(uses_interface, layers.values()))
        self.attends_itself = rank.segmented and attends_itself
        #: Whether attention is one kernel, for which the number of rows doesn't matter.
        self.is_fused = not attends_itself and self._model.config._attn_implementation != "eager"
        text = self._model.config.get_text_config()
        scans = [size for name in _SCAN_BLOCKS if isinstance(size := getattr(text, name, None), int)]
        #: Tokens that all axes and scans divide.
        self.block = math.lcm(_BLOCK, self._shape.sequence, self._shape.hidden, *(size for size in scans if size > 0))
        use_segment_attention(self._model.config, layers, self._slot, mesh, gives_cache=self.attends_itself)
        for name in () if plan is None else whole_blocks(plan):
            for module in self._model.get_submodule(name).modules():
                if find_record(module) is not None:
                    hang_record(module, replace(record_of(module), mesh=None))
        for layer in layers.values() if self.attends_itself else ():
            give_cache(layer, self._slot)

    def _adapt(self, trunk: Trunk) -> None:
        """Freeze the model, and put adapters into its layers."""
        with self._mode:
            trunk.adapters.put_into(self._model)
        # So that the first layer keeps what the others do, whose input has a gradient.
        self._model.get_input_embeddings().register_forward_hook(lambda _, __, output: output.requires_grad_())

    def make_store(self) -> WeightGradientStore:
        """The store of weight gradients that a split backward leaves for later."""
        return _Waiting()

    def micro_batches(self) -> Iterator[list[_UnitCount]]:
        """Run micro-batches until the caller has enough of them; what the units of each keep."""
        for rows, lengths in SEGMENTS if self.rank.segmented else WHOLE:
            yield self.run(1 if self.rank.alone else rows, [blocks * self.block for blocks in lengths])

    def run(self, rows: int, lengths: Sequence[int]) -> list[_UnitCount]:
        """Run a micro-batch unit by unit, forward and, if backwards are split, backward.

        Returns:
            What its units keep.
        """
        stops = list(accumulate(lengths))
        # No segment is the last one, so that all cache their keys and values.
        total = stops[-1] + (lengths[-1] if self.rank.segmented else 0)
        pool = PoolByPlace(self._saved)
        cache = KVCache(total, pool)
        units = [Unit(cache, stop - length, stop, total) for stop, length in zip(stops, lengths, strict=True)]
        hidden, places, counts = [], [], []
        for unit in units:
            self._saved.clear()
            with self._mode, self._running(unit), self._deferring(), self._saved.hooks():
                hidden.append(self._forward(rows, unit))
            places.append(self._saved.places())
            in_cache = {place: size / (rows * total) for place, size in pool.bytes_by_place.items()}
            size = rows, unit.stop - unit.start, unit.start
            counts.append(_UnitCount(*size, self._saved.bytes_by_place(pool), in_cache, {}))
        if self.rank.splits:
            waiting = [self._waiting_of(*one) for one in reversed(list(zip(units, hidden, places, strict=True)))]
            counts = [replace(one, waiting=size) for one, size in zip(counts, reversed(waiting), strict=True)]
        return counts

    def _deferring(self) -> AbstractContextManager[None]:
        return self.waiting.open() if self.rank.splits else nullcontext()

    def _waiting_of(
        self, unit: Unit, hidden: torch.Tensor, places: dict[int, tuple[int, torch.UntypedStorage]]
    ) -> dict[int, int]:
        """Run the first half of a unit's backward; bytes that wait for the second, by layer."""
        assert isinstance(self.waiting, _Waiting)
        self.waiting.products.clear()
        with self._mode, self._slot.running(unit), self.waiting.filling(unit.start):
            hidden.backward(torch.empty_like(hidden))
        return self._saved.bytes_of(self.waiting.products, places)

    @contextmanager
    def _running(self, unit: Unit) -> Iterator[None]:
        lengths = None if self._is_causal else Lengths(unit.length, unit.length)
        packing = Packing(None, None)
        with self._slot.running(unit), knowing(packing=packing, lengths=lengths), WithoutValues():
            yield

    def _forward(self, rows: int, unit: Unit) -> torch.Tensor:
        length = unit.stop - unit.start
        ids = torch.zeros((rows, length), dtype=torch.int64, device="cpu")
        # Layers that compute attention themselves need a mask of all positions up to the segment's end.
        options: dict[str, Any] = {"attention_mask": ids.new_ones((rows, unit.stop))} if self.attends_itself else {}
        if "use_cache" in self._arguments:
            options["use_cache"] = False
        if self._shape.size > 1:
            if "position_ids" in self._arguments and self._inputs != "only ids":
                options["position_ids"] = torch.arange(unit.start, unit.stop, device="cpu")[None]
            if self._draws.has_modules:
                self._draws.begin(rows, [length // self._shape.sequence])
        if self._shape.size > 1 and self._inputs == "embeddings":
            # As a stage does it: the embedding takes all ids of the segment, and returns the rank's part.
            options["inputs_embeds"] = self._model.get_input_embeddings()(ids)
        else:
            options["input_ids"] = ids
        hidden: torch.Tensor = self._model.base_model(**options)[0]
        return hidden if self._late is None else self._late.own_part(hidden)


def _first_layers(config: PretrainedConfig, layers: int, kept: int) -> PretrainedConfig:
    """The config of the first ``kept`` of ``layers`` layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        # Lists with one entry for each layer, such as layer_types.
        if isinstance(value, list) and len(value) == layers:
            setattr(text, name, value[:kept])
    text.num_hidden_layers = kept
    return config


def _countable(config: PretrainedConfig, window: int) -> PretrainedConfig:
    """The config with another window, and without tables that depend on values."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name in _WINDOWS:
        if getattr(text, name, None):
            setattr(text, name, window)
    rope = getattr(text, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
        # These types read the positions' values; the default's tables have the same size.
        text.rope_parameters = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 1e4)}
    return config


def _plan_of(config: PretrainedConfig, mesh: MeshShape, verdict: MeshVerdict) -> ParallelPlan:
    with torch.device("meta"):
        return make_parallel_plan(model_of(config), mesh, verdict)


def _norms_of(config: PretrainedConfig) -> dict[str, NormFormula]:
    with torch.device("meta"):
        return rms_norms(model_of(config))


def _fullest_rank(plan: ParallelPlan) -> int:
    """The rank with the most heads of keys and values: some have more than others if there are few of them."""
    if not attention_modules(plan):
        return 0
    topology = Topology(plan.mesh, plan.mesh.size)

    def kept_heads(rank: int) -> int:
        return len(plan_key_value_heads(plan.heads, plan.mesh, topology.coordinate(rank)).keep)

    return max(range(plan.mesh.size), key=kept_heads)


def _enough(kinds: tuple[int, ...]) -> tuple[int, ...]:
    """The kinds of the first layers, up to the second layer of each kind (the first, if it is the only one)."""
    seconds = [[index for index, of_layer in enumerate(kinds) if of_layer == kind][:2][-1] for kind in set(kinds)]
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

    They are kept alive, so that no other storage gets the same id. A storage rather than a tensor that shares it: such
    a tensor would be one more operation for each that is saved.

    Args:
        model: its parameters and buffers don't count.
        layers: the model's layers, in order.
    """

    def __init__(self, model: nn.Module, layers: list[nn.Module]) -> None:
        self._excluded = {storage_id(x) for x in (*model.parameters(), *model.buffers())}
        self._place_of = {id(x): index for index, layer in enumerate(layers) for x in layer.parameters()}
        #: Index of the layer that runs: -1 before the first one, their number after the last.
        self.place = -1
        self._found: dict[int, tuple[int, torch.UntypedStorage]] = {}
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(functools.partial(self._enter, index), prepend=True)
        layers[-1].register_forward_hook(functools.partial(self._enter, len(layers)))

    def clear(self) -> None:
        """Forget what was saved, before another unit runs."""
        self.place, self._found = -1, {}

    def hooks(self) -> AbstractContextManager[None]:
        """A context in which saved tensors are recorded."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    def _enter(self, index: int, *_: Any) -> None:
        self.place = index

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        if storage_id(x) not in self._excluded:
            self._found.setdefault(storage_id(x), (self.place, x.untyped_storage()))
        return x

    def bytes_by_place(self, pool: MeteredPool) -> dict[int, int]:
        """Bytes by index of the layer: -1 before the first one, their number after the last. Without the KV cache."""
        sizes: Counter[int] = Counter()
        for key, (place, storage) in self._found.items():
            if not pool.holds(key):
                sizes[place] += storage.nbytes()
        return sizes

    def places(self) -> dict[int, tuple[int, torch.UntypedStorage]]:
        """By a storage's id: the layer that saved it first, and the storage, which is kept alive."""
        return dict(self._found)

    def bytes_of(self, products: list[Any], places: dict[int, tuple[int, torch.UntypedStorage]]) -> dict[int, int]:
        """Bytes of products' inputs and output gradients, by layer; each storage counts once, for the first product."""
        sizes: Counter[int] = Counter()
        seen: set[int] = set()
        for product in products:
            # A saved activation belongs to the layer that saved it. A copy (of an input that wasn't flat) isn't there;
            # it belongs to its weight's layer.
            saved = places.get(storage_id(product.x))
            keys = product.key if isinstance(product.key, tuple) else (product.key,)
            place = self._place_of[keys[0]] if saved is None else saved[0]
            for x in (product.x, *(product.dy if isinstance(product.dy, list | tuple) else (product.dy,))):
                if storage_id(x) not in seen:
                    seen.add(storage_id(x))
                    sizes[place] += x.untyped_storage().nbytes()
        return sizes


class PoolByPlace(MeteredPool):
    """A pool of buffers of a KV cache, which knows which layer took them."""

    def __init__(self, saved: _Saved) -> None:
        super().__init__()
        self._saved = saved
        self.bytes_by_place: Counter[int] = Counter()

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See :class:`MeteredPool`."""
        buffer = super().take(shape, dtype, device)
        self.bytes_by_place[self._saved.place] += buffer.untyped_storage().nbytes()
        return buffer


class WithoutValues(TorchFunctionMode):
    """Replaces attention by one that saves what fused GPU kernels save, and what the host would read of generators."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.randint:
            return 0  # The seed of a block's random numbers.
        if func is torch.Tensor.numpy:
            return np.empty(0)  # A generator's state.
        if func is nn.functional.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            names = ("query", "key", "value")
            heads = [args[i] if i < len(args) else kwargs[n] for i, n in enumerate(names)]
            # No fused kernel broadcasts heads (Falcon has one of keys and values); torch multiplies step by step then.
            if heads[0].shape[1] == heads[1].shape[1] or kwargs.get("enable_gqa"):
                return _Attend.apply(*heads, mask)
        return func(*args, **kwargs)


@torch.library.custom_op("planned_flash_attn::fwd", mutates_args=())
def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What fused kernels compute; an operator, so that checkpointing that keeps attention knows it for one."""
    raise NotImplementedError("attention of tensors without values was given some")


@_flash.register_fake
def _flash_shapes(query: torch.Tensor, _: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, length = query.shape[:3]
    # Fused kernels return a result with the query's memory layout.
    out = query.new_empty((rows, length, heads, value.shape[-1])).transpose(1, 2)
    if query.shape[-1] == value.shape[-1]:
        out = torch.empty_like(query)
    return out, query.new_empty((rows, heads, length), dtype=torch.float32)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
        out, log_sums = torch.ops.planned_flash_attn.fwd.default(query, key, value)
        ctx.save_for_backward(query, key, value, mask, out, log_sums)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return (*(torch.empty_like(x) for x in ctx.saved_tensors[:3]), None)


def _fitted(sample: LayerSample) -> tuple[tuple[LayerCount, ...], KeptBytes]:
    """Coefficients of each kind of layer, and of what is saved after the last layer.

    Raises:
        UnsupportedModelError: there are none that reproduce what was counted.
    """
    # Whole sequences have as many keys as tokens, and of one row everything is a row's.
    columns = [name for name in COLUMNS if name != "key" or sample.rank.segmented]
    columns = [name for name in columns if name not in OF_ROWS or not sample.rank.alone]
    counts: list[_UnitCount] = []
    for more in sample.micro_batches():
        counts += more
        # A first segment may keep something else, having none before it.
        later = [count for count in counts if count.start or not sample.rank.segmented]
        both = list(zip(_to_fit(sample, counts), _to_fit(sample, later), strict=True))
        fits = [_fit(*every, columns) or _fit(*others, columns) for every, others in both]
        if all(fit is not None for fit in fits):
            break
    fits = [fit or _fit_by(*others, columns, _TOLERANCE) for fit, (_, others) in zip(fits, both, strict=True)]
    fitted = [fit for fit in fits if fit is not None]
    if len(fitted) < len(fits):
        failed = next(sizes for fit, (_, (_, sizes)) in zip(fits, both, strict=True) if fit is None)
        raise UnsupportedModelError(f"bytes of units don't grow with their sizes: {failed}")
    *of_layers, end = fitted
    layers = [
        LayerCount(kept, shared, waiting, counts[0].cache.get(last, 0.0))
        for (_, last), kept, shared, waiting in zip(
            sample.places, of_layers[::3], of_layers[1::3], of_layers[2::3], strict=True
        )
    ]
    return tuple(layers), end


_Points = list[tuple[int, int, int]]


def _to_fit(sample: LayerSample, counts: list[_UnitCount]) -> Iterator[tuple[_Points, list[int]]]:
    """Sizes of the units, and their bytes: for each kind of layer kept, shared and waiting; last those at the end."""
    for (first, last), has_window in zip(sample.places, sample.windows, strict=True):
        most = sample.window if has_window and sample.rank.segmented else LONG_WINDOW
        points = [(count.rows, count.length, count.length + min(count.start, most - 1)) for count in counts]
        # Storages that layers share count for the layer that saves them first: the last layer of a kind has only its
        # own, the first one also the shared ones. What waits is found in backward's order, so there the first layer has
        # only its own.
        yield points, [count.kept.get(last, 0) for count in counts]
        yield points, [count.kept.get(first, 0) - count.kept.get(last, 0) for count in counts]
        yield points, [count.waiting.get(first, 0) for count in counts]
    points = [(count.rows, count.length, count.length + count.start) for count in counts]
    yield points, [count.kept.get(len(sample.kinds), 0) for count in counts]


def _fit(points: _Points, sizes: list[int], columns: Sequence[str]) -> KeptBytes | None:
    """Fit as few coefficients as reproduce every count exactly; None if more units have to be counted.

    Args:
        points: of each unit, rows, tokens of a row, and keys that these see.
        sizes: bytes that were counted for each unit.
        columns: names of the coefficients that may not be 0.
    """
    if not any(sizes):
        return KeptBytes()
    others = [name for name in columns if name not in ALWAYS]
    for count in range(min(len(others), _most_others(len(set(points)))) + 1):
        for some in combinations(others, count):
            fit = _fit_by(points, sizes, [name for name in columns if name in ALWAYS or name in some], EXACT)
            # Bytes don't fall with sizes: such coefficients stand for others.
            if fit is not None and min(getattr(fit, name) for name in columns) >= 0:
                return fit
    return None


def _most_others(units: int) -> int:
    """How many coefficients besides those of :data:`ALWAYS` a number of units tells from others, and checks."""
    return units - len(ALWAYS) - (1 if units <= _FEW_UNITS else 2)


def _fit_by(points: _Points, sizes: list[int], columns: Sequence[str], tolerance: float) -> KeptBytes | None:
    """Fit coefficients by least squares; None if they don't reproduce every count."""
    table = np.array([[getattr(unit_sizes(*point), name) for name in columns] for point in points])
    scale = table.max(axis=0)
    solved = np.linalg.lstsq(table / scale, np.array(sizes, dtype=float), rcond=1e-9)[0]
    largest = max(map(abs, sizes))
    if np.abs(table / scale @ solved - sizes).max() > tolerance * largest:
        return None
    solved[np.abs(solved) < _ROUNDING * largest] = 0
    return KeptBytes(**dict(zip(columns, (solved / scale).round(6).tolist(), strict=True)))


def unit_sizes(rows: int, length: int, keys: int) -> KeptBytes:
    """What each coefficient is multiplied by for a unit."""
    return KeptBytes(rows * length, rows * keys, rows * length * keys, length, length * keys, rows, 1)
