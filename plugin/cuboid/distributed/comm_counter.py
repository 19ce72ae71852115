"""A counter of the bytes that this rank sends, by mesh axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from cuboid.distributed.topology import AXES, Axis

Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]


def axes_label(axes: Sequence[Axis]) -> str:
    """Name of a set of axes in reports: ``"batch"``, ``"batch+sequence"``, … in the order of a mesh."""
    return "+".join(axis for axis in AXES if axis in axes)


def sent_bytes(operation: Operation, whole_bytes: int, ranks: int) -> float:
    """Bytes that each of ``ranks`` sends in a bandwidth-optimal (ring) collective.

    ``whole_bytes`` is the size of the unsplit tensor: the output of an all-gather, the input of a
    reduce-scatter, either one of an all-reduce. (Chan et al. 2007; the same counts as in NCCL's documentation
    of bus bandwidth.)
    """
    share = whole_bytes * (ranks - 1) / ranks
    return 2 * share if operation == "all_reduce" else share


class CommCounter:
    """Bytes sent by this rank since the last :meth:`reset`, for each set of axes."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()

    def record(self, operation: Operation, label: str, whole_bytes: int, ranks: int) -> None:
        """Count one collective of ``ranks`` ranks over the axes of that :func:`axes_label`; see :func:`sent_bytes`."""
        self._bytes[label] += round(sent_bytes(operation, whole_bytes, ranks))
        self._calls[label] += 1

    def record_send(self, label: str, sent: int) -> None:
        """Count ``sent`` bytes to one other rank."""
        self._bytes[label] += sent
        self._calls[label] += 1

    def snapshot(self) -> dict[str, int]:
        """Bytes by axes label."""
        return dict(sorted(self._bytes.items()))

    def calls(self) -> dict[str, int]:
        """Number of collectives by axes label."""
        return dict(sorted(self._calls.items()))

    def reset(self) -> None:
        """Start counting from zero."""
        self._bytes.clear()
        self._calls.clear()
