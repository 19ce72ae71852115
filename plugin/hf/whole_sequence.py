"""What a base model made of a whole sequence, and a segment's part of it; see :mod:`cuboid.hf.whole_recorder`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class WholeSequence:
    """What the base model of one stage made of one micro-batch.

    Args:
        length: S, positions of the sequence as the user gave it, without padding for segments or the mesh.
        layers: by name, the arguments of each layer.
        outputs: by name, what modules without parameters returned, call by call.
        lookups: by name, what tables of positions were looked up by, call by call.
    """

    length: int
    layers: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    lookups: dict[str, list[torch.Tensor]] = field(default_factory=dict)


@dataclass
class Replay:
    """One segment's forward, which is given its part of what was computed for the whole.

    Args:
        whole: of the micro-batch.
        start, stop: the segment; the last one may reach beyond S into padding, which is given the last position's.
    """

    whole: WholeSequence
    start: int
    stop: int
    _calls: dict[str, int] = field(default_factory=dict)

    def next_call(self, name: str) -> int:
        """How often a module was called before in this forward."""
        count = self._calls.get(name, 0)
        self._calls[name] = count + 1
        return count

    def cut(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The segment's part of a tensor along a dim of S positions."""
        last = self.whole.length - 1
        if self.stop - 1 <= last:
            return x.narrow(dim, self.start, self.stop - self.start)
        return x.index_select(dim, torch.arange(self.start, self.stop, device=x.device).clamp(max=last))
