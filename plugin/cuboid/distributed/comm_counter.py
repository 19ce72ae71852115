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
        self._collectives: list[tuple[str, int, Counter[tuple[Operation, int]]]] = []
        self._sent: Counter[str] = Counter()
        self._sends: Counter[str] = Counter()

    def collectives(self, label: str, ranks: int) -> Counter[tuple[Operation, int]]:
        """A new counter for the collectives of ``ranks`` ranks over the axes of an :func:`axes_label`.

        It counts by operation and size of the unsplit tensor (see :func:`sent_bytes`). Only :meth:`snapshot` computes
        bytes.
        """
        counted: Counter[tuple[Operation, int]] = Counter()
        self._collectives.append((label, ranks, counted))
        return counted

    def record_send(self, label: str, nbytes: int) -> None:
        """Count a message of ``nbytes`` bytes to one other rank."""
        self._sent[label] += nbytes
        self._sends[label] += 1

    def snapshot(self) -> dict[str, int]:
        """Bytes by axes label."""
        sent = Counter(self._sent)
        for label, ranks, counted in self._collectives:
            for (operation, whole_bytes), times in counted.items():
                sent[label] += times * round(sent_bytes(operation, whole_bytes, ranks))
        return dict(sorted(sent.items()))

    def calls(self) -> dict[str, int]:
        """Number of collectives and sends by axes label."""
        calls = Counter(self._sends)
        for label, _, counted in self._collectives:
            if counted:
                calls[label] += counted.total()
        return dict(sorted(calls.items()))

    def reset(self) -> None:
        """Start counting from zero."""
        self._sent.clear()
        self._sends.clear()
        for _, _, counted in self._collectives:
            counted.clear()
