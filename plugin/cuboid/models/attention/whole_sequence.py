"""What a base model computed from a whole sequence, and a segment's part of it; see ``stages/whole_recorder.py``."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec


class Masks(Enum):
    """What a model gets from its mask functions."""

    #: What plain transformers makes: its layers compute attention by themselves, without Hugging Face's interface.
    PLAIN = "plain"
    #: Masks of the running segment, or of the whole sequence on a mesh.
    OWN = "own"
    #: The same, also where kernels could do without, for layers that compute attention by themselves.
    EXPLICIT = "explicit"


@dataclass(frozen=True)
class _Recording:
    """A thread's recording of a whole sequence.

    Args:
        mode: the mode that all fake tensors of a recording must belong to.
        masks: what the model gets from its mask functions.
    """

    mode: FakeTensorMode
    masks: Masks


#: Set in a thread that records a whole sequence; a ContextVar because mask functions get no module.
_recording: ContextVar[_Recording | None] = ContextVar("cuboid_recording", default=None)


@dataclass
class WholeSequence:
    """What the base model of one stage computed from one micro-batch.

    Args:
        length: S, positions of the sequence as the user gave it, without padding for segments or the mesh.
        layers: by name, the arguments of each layer, flattened to leaves and their tree spec (torch's pytree).
        outputs: by name, what modules without parameters returned, call by call.
        lookups: by name, the indices with which position tables were looked up, call by call.
    """

    length: int
    layers: dict[str, tuple[list[Any], TreeSpec]] = field(default_factory=dict)
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    lookups: dict[str, list[torch.Tensor]] = field(default_factory=dict)


@dataclass(eq=False)
class CallCounter:
    """Counts the calls of each module in one forward."""

    _calls: dict[Hashable, int] = field(default_factory=dict, init=False)

    def next_call(self, module: Hashable) -> int:
        """Count a call of a module; return how many came before in this forward."""
        count = self._calls.get(module, 0)
        self._calls[module] = count + 1
        return count


@dataclass
class Replay(CallCounter):
    """One segment's forward, which gets its part of what was computed for the whole sequence.

    Args:
        whole: the record of the micro-batch.
        start, stop: the segment's positions. The last segment may reach beyond S into padding, which gets the values of
            the last position.
    """

    whole: WholeSequence
    start: int
    stop: int

    def cut(self, x: torch.Tensor, dim: int, start: int | None = None) -> torch.Tensor:
        """Return the segment's part of a tensor along a dim of S positions; with ``start``, from there to its end."""
        start = self.start if start is None else start
        last = self.whole.length - 1
        if self.stop - 1 <= last:
            return x.narrow(dim, start, self.stop - start)
        return x.index_select(dim, torch.arange(start, self.stop, device=x.device).clamp(max=last))


def is_recording() -> bool:
    """Whether this thread's forward only records a whole sequence, so that masks need no values."""
    return _recording.get() is not None


def recorded_masks() -> Masks | None:
    """What the model that this thread records gets from its mask functions; None if none is recorded."""
    running = _recording.get()
    return None if running is None else running.masks


@contextmanager
def recording(masks: Masks = Masks.OWN) -> Iterator[None]:
    """Within this context, this thread only records a whole sequence."""
    token = _recording.set(_Recording(FakeTensorMode(allow_non_fake_inputs=True), masks))
    try:
        yield
    finally:
        _recording.reset(token)


def without_values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a fake tensor: only its shape, dtype and device are known."""
    running = _recording.get()
    assert running is not None, "only while a whole sequence is looked at"
    with running.mode:
        return torch.empty(shape, dtype=dtype, device=device)


def fake_mask(rows: int, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a fake mask ``[B, 1, S, S]``, for whole sequences that are only recorded."""
    return without_values((rows, 1, length, length), dtype, device)
