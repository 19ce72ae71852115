"""Count the bytes that are alive while a layer runs, beside what it keeps, by running its own code.

As for :mod:`.kept`, a few layers run forward and backward without values, as a stage runs them, while the storages that
operators allocate are counted until they are freed. Between any two sizes of units a layer allocates in the same order.
So each *moment*, the time after one allocation, is fitted by coefficients for itself, and the peak of a unit of any
size is that of the moment which is the largest there.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, combinations
from typing import Any

import numpy as np
import torch
from torch import nn

from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.transformers_names import checkpoint_activations
from cuboid.models.attention.forward_context import Unit
from cuboid.models.attention.kept_attention import keeping_attention
from cuboid.models.stages.model_costs import decoder_layers
from cuboid.planner.description.fake_mode import LiveFakeMode
from cuboid.planner.description.kept import (
    ALWAYS,
    COLUMNS,
    EXACT,
    LONG_WINDOW,
    OF_ROWS,
    SHORT_WINDOW,
    CountedAs,
    KeptBytes,
    LayerSample,
    PoolByPlace,
    SampleKey,
    WithoutValues,
    inferred_parts,
    unit_sizes,
    without_values,
)
from cuboid.planner.description.model import Layer, ModelDescription
from cuboid.seq1f1b.attention.kv_cache import KVCache
from cuboid.tensor3d.layers.linear_op import EARLY_BYTES
from cuboid.tensor3d.sharding.sharded_param import is_recomputing
from cuboid.tensor3d.sharding.weight_gradients import WeightGradientStore

#: As of :mod:`.kept`, micro-batches that are run until they determine all coefficients: rows, and lengths in blocks.
#: Of segments, only those between the first and the last one are counted: with a cache before them, and gradients of
#: keys and values that later ones have added.
_SEGMENTS = ((2, (4, 8, 2, 6, 2)), (3, (2, 4, 12, 2, 2)), (4, (2, 6, 2, 8, 2)))
#: Errors of fits, relative to the largest count, that are accepted where none is exact (kernels pad to blocks).
_TOLERANCES = (0.001, 0.01)
_WHOLE = ((2, (4,)), (3, (8,)), (2, (12,)), (4, (2,)), (4, (4,)), (3, (12,)))


@dataclass(frozen=True)
class Moment:
    """A moment of a layer's forward or backward.

    Args:
        live: bytes that are alive beside what is kept, without gathered weights.
        gathered: bytes of weights that are gathered.
    """

    live: KeptBytes
    gathered: float = 0.0


@dataclass(frozen=True)
class LayerPeak:
    """The moments of one kind of layer of which each is the fullest for units of some sizes."""

    moments: tuple[Moment, ...] = ()

    def of(self, rows: float, length: float, keys: float, *, with_gathered: bool) -> float:
        """Bytes at the fullest moment of a unit; for its sizes see :meth:`KeptBytes.of`."""
        return max(
            (moment.live.of(rows, length, keys) + with_gathered * moment.gathered for moment in self.moments),
            default=0.0,
        )


@dataclass(frozen=True)
class ModelPeak:
    """The peaks of a model's layers; see :class:`~cuboid.planner.description.kept.ModelCount`."""

    layers: tuple[LayerPeak, ...] = ()
    windowed: tuple[LayerPeak, ...] = ()
    #: Of what runs after the last layer, before the head; beside the gradient of the head's input, too.
    end: LayerPeak = LayerPeak()
    obstacle: str = ""


@dataclass(frozen=True)
class PeakOf:
    """What kind of rank and of unit is counted.

    Args:
        rank: the rank.
        checkpointing: what the layer recomputes, as the config has it.
        is_long: whether units are too long for a product's backward to gather the input of the next one early.
    """

    rank: CountedAs
    checkpointing: str = "none"
    is_long: bool = False


@lru_cache(maxsize=4096)
def count_peak(model: ModelDescription, of: PeakOf) -> ModelPeak:
    """Count what is alive while a model's layers run.

    Raises:
        Exception: a bug in Cuboid's own code, of any type.
    """
    counted = without_values(model, lambda key: _on_mesh(key, model.kinds, of))
    return ModelPeak(obstacle=counted) if isinstance(counted, str) else counted


def is_long(hidden: int, kinds: Sequence[Layer], rank: CountedAs, tokens: float) -> bool:
    """Whether no product of a unit of so many tokens of a rank gathers an input that is short enough to be early."""
    return rank.mesh is not None and tokens * _fewest_gathered(hidden, kinds, rank) > EARLY_BYTES


def _fewest_gathered(hidden: int, kinds: Sequence[Layer], rank: CountedAs) -> float:
    """Bytes of a token in the shortest of the inputs that products gather."""
    assert rank.mesh is not None
    features = [hidden / rank.mesh.hidden] if rank.mesh.sequence > 1 else []
    if rank.mesh.hidden > 1:
        downs = (projection.inputs for kind in kinds for projection in kind.projections if projection.kind == "down")
        features += [inputs / rank.mesh.sequence for inputs in downs]
    return 2 * min(features, default=0.0)


def _on_mesh(key: SampleKey, kinds: tuple[Layer, ...], of: PeakOf) -> ModelPeak:
    parts = [(share, _count(key, kinds, replace(of, rank=rank))) for share, rank in inferred_parts(kinds, of.rank)]
    summed = _summed(parts)
    if summed is None:
        # A layer's code has loops over the ranks of an axis: no smaller mesh has the same moments.
        assert of.rank.mesh is not None
        small = replace(of.rank.mesh, batch=min(of.rank.mesh.batch, 2))
        summed = _count(key, kinds, replace(of, rank=replace(of.rank, mesh=small)))
    plain, windowed = summed
    *layers, end = map(_fullest, plain)
    return ModelPeak(tuple(layers), tuple(map(_fullest, windowed[:-1])), end)


#: For each kind of layer, and for the end, ``[moments, coefficients]``: those of COLUMNS, and the gathered bytes.
_Moments = tuple[np.ndarray, ...]


def _summed(parts: list[tuple[float, tuple[_Moments, _Moments]]]) -> tuple[_Moments, _Moments] | None:
    """Sums of shares, moment by moment; None if parts have different moments."""
    _, (plain, windowed) = parts[0]
    sums = []
    for number, moments in enumerate((plain, windowed)):
        of_kinds = []
        for kind in range(len(moments)):
            tables = [counted[number][kind] for _, counted in parts]
            if len({table.shape for table in tables}) > 1:
                return None
            shares = np.array([share for share, _ in parts])
            of_kinds.append(np.tensordot(shares, np.stack(tables), 1))
        sums.append(tuple(of_kinds))
    return sums[0], sums[1]


def _fullest(table: np.ndarray) -> LayerPeak:
    """The moments that no other one exceeds in all coefficients."""
    table = np.unique(table.round(6), axis=0)
    # Of [moment, another one]: whether the other one has as much in each coefficient. Rows are unique.
    covered: np.ndarray = np.all(table[None] >= table[:, None], axis=-1) & ~np.eye(len(table), dtype=bool)
    return LayerPeak(
        tuple(
            Moment(KeptBytes(**dict(zip(COLUMNS, row[:-1].tolist(), strict=True))), row[-1].item())
            for row in table[~covered.any(1)]
        )
    )


@lru_cache(maxsize=1024)
def _count(key: SampleKey, kinds: tuple[Layer, ...], of: PeakOf) -> tuple[_Moments, _Moments]:
    sample = _WorkingSample(key, kinds, LONG_WINDOW, of)
    if of.rank.alone and sample.is_fused:
        return _count(key, kinds, replace(of, rank=replace(of.rank, alone=False)))
    plain = _fitted(sample)
    if not any(kind.attention.window is not None for kind in kinds):
        return plain, plain
    return plain, _fitted(_WorkingSample(key, kinds, SHORT_WINDOW * sample.block, of))


@dataclass(frozen=True)
class _UnitMoments:
    """What one unit has alive: for each kind of layer, and for the end, beside what is kept, and gathered weights."""

    rows: int
    length: int
    start: int
    moments: list[list[tuple[int, int]]]


class _WorkingSample(LayerSample):
    """The first few layers of a model, which run forward and backward."""

    def __init__(self, key: SampleKey, kinds: tuple[Layer, ...], window: int, of: PeakOf) -> None:
        self._live = LiveFakeMode()
        super().__init__(key, kinds, window, of.rank, self._live)
        #: The layer that runs, or None between them, and whether it runs backward.
        self._at: tuple[int, bool] | None = None
        self._moments: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        #: Of each layer, the bytes that were kept after its forward, without the layer's output.
        self._kept_after: list[int] = []
        self._gathered_for_others = 0
        self._live.exclude((*self._model.parameters(), *self._model.buffers()))
        for parameter in filter(operator.attrgetter("requires_grad"), self._model.parameters()):
            # There are gradients already, to which a new one is added.
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        if of.checkpointing != "none":
            contexts = keeping_attention(_recomputing) if of.checkpointing == "attention" else _recomputing
            checkpoint_activations(self._model, {"use_reentrant": False, "context_fn": contexts})
        layers = list(decoder_layers(self._model).values())
        self._kept_after = [0] * len(layers)
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(functools.partial(self._before, index), with_kwargs=True)
            layer.register_forward_hook(functools.partial(self._after, index))
        if of.is_long:
            shortest = min(rows * min(lengths) for rows, lengths in (_SEGMENTS if of.rank.segmented else _WHOLE))
            tokens = EARLY_BYTES / _fewest_gathered(self._model.config.get_text_config().hidden_size, kinds, of.rank)
            self.block *= 2 ** math.ceil(math.log2(max(1.0, 2 * tokens / (shortest * self.block))))

    def make_store(self) -> WeightGradientStore:
        """See :class:`LayerSample`; here the second half runs, too."""
        return WeightGradientStore()

    def _before(self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_recomputing():
            return
        self._at = index, False
        hidden = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
        if index == 0 and hidden is not None and hidden.requires_grad:
            hidden.register_hook(functools.partial(self._begin_backward, None))

    def _after(self, index: int, _: nn.Module, __: Any, output: Any) -> None:
        if is_recomputing():
            return
        hidden = output[0] if isinstance(output, tuple) else output
        self._kept_after[index] = self._now[0] - hidden.untyped_storage().nbytes()
        self._at = None
        hidden.register_hook(functools.partial(self._begin_backward, index))

    def _begin_backward(self, index: int | None, gradient: torch.Tensor) -> None:
        self._at = None if index is None else (index, True)
        if index is not None and self.rank.splits:
            # What waits for weight gradients of the layers behind is kept, too.
            self._kept_after[index] = self._now[0] - gradient.untyped_storage().nbytes()
        self._note()

    def _note(self) -> None:
        if self._at is not None:
            self._moments.setdefault(self._at, []).append(self._now)

    @property
    def _now(self) -> tuple[int, int]:
        """Living bytes without the KV cache and gathered weights, and these, without those that other units keep."""
        gathered = self._live.gathered_bytes - self._gathered_for_others
        return self._live.live_bytes - self._pool.used_bytes, gathered

    def unit_moments(self, rows: int, lengths: Sequence[int]) -> list[_UnitMoments]:
        """Run a micro-batch unit by unit, all forwards and then, in reverse, all backwards."""
        stops = list(accumulate(lengths))
        total = stops[-1] + (lengths[-1] if self.rank.segmented else 0)
        self._pool = PoolByPlace(self._saved)
        cache = KVCache(total, self._pool)
        units = [Unit(cache, stop - length, stop, total) for stop, length in zip(stops, lengths, strict=True)]
        self._live.on_allocation = self._note
        roots, kept_after, forwards, of_others = [], [], [], []
        for unit in units:
            # Weights of norms, which autograd saves.
            of_others.append(self._live.gathered_bytes)
            self._gathered_for_others, self._moments = of_others[-1], {}
            with self._mode, self._running(unit), self._deferring():
                hidden = self._forward(rows, unit)
                gradient_bytes = hidden.untyped_storage().nbytes()
                roots.append(_HiddenGradient.apply(hidden))
                del hidden
            self._at = None
            kept_after.append([*self._kept_after[: len(self.kinds)], self._now[0] + gradient_bytes])
            forwards.append(self._moments)
        counted = []
        # The first segment's backward, the last to run, isn't counted.
        for unit in reversed(units[1:] if self.rank.segmented else units):
            self._kept_after, self._moments = kept_after.pop(), forwards.pop()
            self._gathered_for_others = of_others.pop()
            in_forward, self._moments = self._beside_kept(self._moments), {}
            filling = self.waiting.filling(unit.start) if self.rank.splits else nullcontext()
            self._at = len(self.kinds), True
            try:
                with self._mode, self._slot.running(unit), filling:
                    roots.pop().backward()
            except RuntimeError as error:
                # Of the autograd engine, whose errors don't say whose code they are in.
                raise UnsupportedModelError(f"its backward doesn't run without values: {error}") from error
            moments = [first + then for first, then in zip(in_forward, self._beside_kept(self._moments), strict=True)]
            if self.rank.splits:
                of_weights = self._of_weights(unit)
                moments = [of_kind + of_weights for of_kind in moments]
            counted.append(_UnitMoments(rows, unit.stop - unit.start, unit.start, moments))
        self._live.on_allocation = _nothing
        return counted[1:] if self.rank.segmented else counted

    def _of_weights(self, unit: Unit) -> list[tuple[int, int]]:
        """Run the second half of a unit's backward."""
        (kept, _), self._moments, self._at = self._now, {}, (0, True)
        with self._mode, self._slot.running(unit):
            self.waiting.run([unit.start])
        self._at = None
        return [(live - kept, gathered) for live, gathered in self._moments.get((0, True), [])]

    def _beside_kept(self, moments: dict[tuple[int, bool], list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
        """By kind of layer, moments of all its layers beside what was kept after their forwards; then the end's."""
        of_kinds: list[list[tuple[int, int]]] = [[] for _ in range(len(self.places) + 1)]
        for (index, _), of_layer in moments.items():
            kept = self._kept_after[index]
            kind = self.kinds[index] if index < len(self.kinds) else -1
            of_kinds[kind] += [(live - kept, gathered) for live, gathered in of_layer]
        return of_kinds

    def runs(self) -> Iterator[list[_UnitMoments]]:
        """Run micro-batches until the caller has enough of them."""
        for rows, lengths in _SEGMENTS if self.rank.segmented else _WHOLE:
            yield self.unit_moments(1 if self.rank.alone else rows, [blocks * self.block for blocks in lengths])


class _HiddenGradient(torch.autograd.Function):
    """A scalar behind a hidden state, whose gradient is made in backward and belongs to nobody else."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.new_empty(ctx.shape, dtype=ctx.dtype)


def _recomputing() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a checkpointed forward and of its recomputation, which runs outside of the forward's modes."""
    return nullcontext(), WithoutValues()


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _nothing() -> None:
    pass


def _fitted(sample: _WorkingSample) -> _Moments:
    """Coefficients of the moments of each kind of layer."""
    columns = [name for name in COLUMNS if name != "key" or sample.rank.segmented]
    columns = [name for name in columns if name not in OF_ROWS or not sample.rank.alone]
    units: list[_UnitMoments] = []
    for more in sample.runs():
        units += more
        fits = [_fit(sample, kind, units, columns) for kind in range(len(sample.places) + 1)]
        if all(fit is not None for fit in fits):
            break
    moments = []
    # What is left unexplained must not pass for something that grows with the square of the length.
    few = [name for name in columns if name in (*ALWAYS, "key") or (name == "score" and not sample.is_fused)]
    for kind, fit in enumerate(fits):
        close = (_fit(sample, kind, units, few, tolerance) for tolerance in _TOLERANCES)
        moments.append(next((table for table in (fit, *close) if table is not None), None))
    return tuple(_bound(kind, units) if table is None else table for kind, table in enumerate(moments))


def _fit(
    sample: _WorkingSample,
    kind: int,
    units: list[_UnitMoments],
    columns: Sequence[str],
    tolerance: float = EXACT,
) -> np.ndarray | None:
    """Fit every moment by as few coefficients as reproduce all of them, plus what no count exceeds them by.

    Returns:
        None if there are none within ``tolerance`` of the largest count.
    """
    counts = [np.array(unit.moments[kind], dtype=float) for unit in units]
    if len({count.shape for count in counts}) > 1:
        return None
    live = np.stack([count[:, 0] for count in counts])
    gathered = np.stack([count[:, 1] for count in counts])
    if not live.size or (gathered != gathered[0]).any():
        return None
    others = [name for name in columns if name not in ALWAYS]
    for count in range(min(len(others), len(units) - len(ALWAYS) - 1) + 1):
        for some in combinations(others, count):
            names = [name for name in columns if name in ALWAYS or name in some]
            table = _sizes(sample, kind, units)[:, [COLUMNS.index(name) for name in names]]
            scale = table.max(axis=0)
            solved = np.linalg.lstsq(table / scale, live, rcond=1e-9)[0]
            missing = live - table / scale @ solved
            if np.abs(missing).max() <= tolerance * max(1.0, np.abs(live).max()):
                moments = np.zeros((live.shape[1], len(COLUMNS) + 1))
                for name, row in zip(names, solved / scale[:, None], strict=True):
                    moments[:, COLUMNS.index(name)] = row
                moments[:, COLUMNS.index("fixed")] += missing.max(axis=0).clip(min=0)
                moments[:, -1] = gathered[0]
                return moments
    return None


def _bound(kind: int, units: list[_UnitMoments]) -> np.ndarray:
    """One moment that no unit exceeds, if the code's allocations depend on sizes (scans, chunks of scores).

    The peak of a longer unit grows by at most as many bytes a token as the longest counted one has.
    """
    most = np.array([max((sum(moment) for moment in unit.moments[kind]), default=0) for unit in units], dtype=float)
    tokens = np.array([unit.rows * unit.length for unit in units], dtype=float)
    of_token = max(0.0, most[tokens.argmax()] / tokens.max())
    moments = np.zeros((1, len(COLUMNS) + 1))
    moments[0, COLUMNS.index("token")] = of_token
    moments[0, COLUMNS.index("fixed")] = max(0.0, (most - of_token * tokens).max())
    return moments


def _sizes(sample: _WorkingSample, kind: int, units: list[_UnitMoments]) -> np.ndarray:
    """What each coefficient of COLUMNS is multiplied by, for each unit."""
    has_window = kind < len(sample.windows) and sample.windows[kind]
    most = sample.window if has_window and sample.rank.segmented else LONG_WINDOW
    sizes = (unit_sizes(unit.rows, unit.length, unit.length + min(unit.start, most - 1)) for unit in units)
    return np.array([[getattr(size, name) for name in COLUMNS] for size in sizes], dtype=float)
