"""What a running forward knows and can't pass as arguments: one context, for the functions that models look up.

Attention functions get the calling module, which has an :class:`~cuboid.models.attention.segments.AttentionRecord`;
mask functions, and transformers' search for packed rows, get no module. They read :func:`forward_context`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cuboid.errors import UnsupportedModelError
from cuboid.models.attention.whole_sequence import CallCounter, Masks, Replay, WholeSequence
from cuboid.models.batch.batch_check import BatchCheck
from cuboid.models.batch.local_batch import LocalBatch
from cuboid.models.batch.rank_cache import RankCache
from cuboid.models.batch.row_media import RankMedia
from cuboid.seq1f1b.attention.kv_cache import KVCache
from cuboid.tensor3d.running_forward import begin_forward, end_forward


@dataclass(frozen=True, eq=False)
class Unit:
    """One segment of one micro-batch on one stage, as attention sees it.

    Args:
        store: the micro-batch's KV cache on this stage.
        start, stop: the segment's positions in the whole sequence.
        length: S, positions of the whole sequence including padding.
        attention_mask: ``[B, S]``, true where a position may be seen; None if the causal pattern is enough.
        packed: ``[B, S]`` or ``[1, S]``, the index of each position's packed sequence; None if rows aren't packed.
        replay: what the base model's code computed from the whole sequence, of which this unit takes its part; None if
            that code gets the whole sequence itself.
        visible: number of positions, counted from the first, that ``attention_mask`` lets every row see.
    """

    store: KVCache
    start: int
    stop: int
    length: int
    attention_mask: torch.Tensor | None = None
    packed: torch.Tensor | None = None
    replay: Replay | None = None
    visible: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the sequence isn't cut at all, so that nothing needs to be stored."""
        return self.start == 0 and self.stop == self.length


class UnitSlot(CallCounter):
    """Holds the running unit, for the attention modules of one stage, and counts their calls of attention functions.

    They can't use the :class:`ForwardContext`: autograd may recompute a checkpointed forward in a thread of its own.

    Attributes:
        current: the running unit.
        recording: the record of a whole sequence, while it is being recorded.
        obstacle: why the stage's layers can't run in segments; None if they can. Set by
            :func:`~cuboid.models.attention.segments.use_segment_attention`.
        masks: what the stage's model gets from its mask functions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current: Unit | None = None
        self.recording: WholeSequence | None = None
        self.obstacle: str | None = None
        self.masks = Masks.PLAIN

    @contextmanager
    def running(self, unit: Unit) -> Iterator[None]:
        """Within this context, this unit's forward or backward runs.

        Raises:
            UnsupportedModelError: the unit is part of a sequence, but this stage's layers need whole sequences.
        """
        if self.obstacle is not None and not unit.is_whole:
            raise UnsupportedModelError(f'{self.obstacle}; write "segments": 1')
        before, self.current = self.current, unit
        self._calls.clear()
        token, begun = _context.set(replace(_context.get(), slot=self)), begin_forward(True)
        try:
            yield
        finally:
            self.current = before
            end_forward(begun)
            _context.reset(token)


@dataclass(frozen=True)
class Lengths:
    """Lengths of the whole sequence, over all ranks: as given, and as padded for the mesh.

    Args:
        real: positions as given.
        padded: positions after padding.
        source: lengths of the encoder's sequence, if this is the sequence of a decoder that attends to an encoder.
        makes_masks: whether masks are made for these lengths. If not, the model's attention doesn't go through Hugging
            Face's interface, and mask functions do what they do in plain transformers.
        cache: what tokens before these left, in generation: attention then gets the real new tokens alone.
    """

    real: int
    padded: int
    source: Lengths | None = None
    makes_masks: bool = True
    cache: RankCache | None = None


#: Used in place of lengths in models of images, whose masks are made from whole activations.
WHOLE_IMAGES = Lengths(0, 0)


@dataclass(frozen=True)
class Packing:
    """The positions that a forward gets, and the packed sequences in them.

    Args:
        positions: ``[B, S]`` or ``[1, S]``; None if the model counts positions by itself, so that none restart.
        packed: ``[B, S]`` or ``[1, S]``, the index of each position's packed sequence; None if rows aren't packed.
    """

    positions: torch.Tensor | None
    packed: torch.Tensor | None


@dataclass(frozen=True)
class Recording:
    """A recording of a whole sequence, in which nothing has values.

    Args:
        mode: the mode that all fake tensors of a recording must belong to.
        masks: what the model gets from its mask functions.
    """

    mode: FakeTensorMode
    masks: Masks


@dataclass
class RunningHead:
    """A head that every rank computes whole, and what the base model's forward tells it, which ends before it runs.

    Args:
        targets: of the micro-batch; there may be none.
        batch: the rank's part of the micro-batch; None until the base model has run.
        check: of the micro-batch, which has compared the ranks' generators; None until then.
    """

    targets: dict[str, Any]
    batch: LocalBatch | None = None
    check: BatchCheck | None = None

    def number_if_differing(self) -> int | None:
        """See :class:`cuboid.tensor3d.layers.dropout.Generators`."""
        return None if self.check is None else self.check.number_if_differing()

    def require_equal(self) -> None:
        """See :class:`cuboid.tensor3d.layers.dropout.Generators`."""
        if self.check is not None:
            self.check.require_equal()


@dataclass(frozen=True)
class ForwardContext:
    """What is known of the forward that this thread runs; all None outside of a sharded model's.

    Args:
        slot: of the stage whose unit is running.
        lengths: of the whole sequence. Mask functions get an embedding with only this rank's part of it, and no other
            argument with the whole length.
        packing: of the micro-batch, so that nobody reads positions back from the device.
        recording: the forward only records a whole sequence, so that masks need no values.
        check: of the micro-batch's numbers.
        loss: what a forward that computes its loss in parts finds as its model's ``loss_function``.
        head: around the base model that is running, or has run.
        media: of the rank's rows, in a model that takes images or audio beside ids.
    """

    slot: UnitSlot | None = None
    lengths: Lengths | None = None
    packing: Packing | None = None
    recording: Recording | None = None
    check: BatchCheck | None = None
    loss: Callable[..., torch.Tensor] | None = None
    head: RunningHead | None = None
    media: tuple[RankMedia, ...] = ()

    @property
    def unit(self) -> Unit | None:
        """The unit that is running."""
        return None if self.slot is None else self.slot.current


_OUTSIDE = ForwardContext()
_context: ContextVar[ForwardContext] = ContextVar("cuboid_forward", default=_OUTSIDE)


#: Returns what is known of the forward that this thread runs.
forward_context: Callable[[], ForwardContext] = _context.get


def is_in_forward() -> bool:
    """Whether this thread is in a sharded model's forward, which knows the whole sequence's lengths."""
    return _context.get().lengths is not None


@contextmanager
def knowing(**facts: Any) -> Iterator[None]:
    """Within this context, :func:`forward_context` has these values of its fields."""
    token = _context.set(replace(_context.get(), **facts))
    try:
        yield
    finally:
        _context.reset(token)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_outside() -> bool:
    """Whether this thread runs no sharded model's forward; constant while a plain model is compiled.

    Reading a ContextVar would break that model's graph.
    """
    return _context.get() is _OUTSIDE


@contextmanager
def recording(masks: Masks = Masks.OWN) -> Iterator[None]:
    """Within this context, this thread only records a whole sequence."""
    with knowing(recording=Recording(FakeTensorMode(allow_non_fake_inputs=True), masks)):
        yield


def without_values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a fake tensor: only its shape, dtype and device are known."""
    running = _context.get().recording
    assert running is not None, "only while a whole sequence is looked at"
    with running.mode:
        return torch.empty(shape, dtype=dtype, device=device)


def fake_mask(rows: int, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a fake mask ``[B, 1, S, S]``, for whole sequences that are only recorded."""
    return without_values((rows, 1, length, length), dtype, device)
