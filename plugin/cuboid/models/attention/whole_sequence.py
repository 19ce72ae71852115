"""What a base model computed from a whole sequence, and a segment's part of it; see ``stages/whole_recorder.py``."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import TreeSpec


class Masks(Enum):
    """What a model gets from its mask functions."""

    #: What plain transformers makes: its layers compute attention by themselves, without Hugging Face's interface.
    PLAIN = "plain"
    #: Masks of the running segment, or of the whole sequence on a mesh.
    OWN = "own"
    #: The same, also where kernels could do without, for layers that compute attention by themselves.
    EXPLICIT = "explicit"


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
        whole_sequence: the record of the micro-batch.
        start, stop: the segment's positions. The last segment may reach beyond S into padding, which gets the values of
            the last position.
    """

    whole_sequence: WholeSequence
    start: int
    stop: int

    def cut(self, x: torch.Tensor, dim: int, start: int | None = None) -> torch.Tensor:
        """Return the segment's part of a tensor along a dim of S positions; with ``start``, from there to its end."""
        start = self.start if start is None else start
        last = self.whole_sequence.length - 1
        if self.stop - 1 <= last:
            return x.narrow(dim, start, self.stop - start)
        return x.index_select(dim, torch.arange(start, self.stop, device=x.device).clamp(max=last))
