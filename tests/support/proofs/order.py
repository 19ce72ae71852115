"""The order in which ranks issue their communication: recorded on each, compared over all, and searched for cycles.

NCCL needs the same order of operations on all ranks of a communicator. Between the communicators of one device it needs
that the ranks' orders, put together, have no cycle: otherwise an operation that waits for all that was issued before it
(the device is synchronised) waits for one that its peer issues only behind this one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

#: Those of c10d's operators that only some ranks of a group take part in, and the other end of each.
_OTHER_END = {"send": "recv_", "recv_": "send"}


@dataclass(frozen=True)
class Issued:
    """An operation, when the host issued it.

    Attributes:
        group: name of the process group, alike on all ranks.
        ranks: of the world, in the group.
        operation: name of c10d's operator.
        tensors: shapes and dtypes.
        peer: rank of the world at the other end of a message; None for a collective.
    """

    group: str
    ranks: tuple[int, ...]
    operation: str
    tensors: tuple[tuple[tuple[int, ...], str], ...]
    peer: int | None = None


class OrderRecorder(TorchDispatchMode):
    """Inside, every collective and message of this thread is noted in :attr:`issued`, and done."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[Issued] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.issued.append(_issued(func, args))
        return func(*args, **(kwargs or {}))


def _issued(func: Any, args: Any) -> Issued:
    operation = func._schema.name.split("::")[1]
    values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    group = dist.ProcessGroup.unbox(values["process_group"])
    ranks = tuple(dist.get_process_group_ranks(group))
    tensors = [x for value in args for x in (value if isinstance(value, list | tuple) else [value])]
    described = tuple((tuple(x.shape), str(x.dtype)) for x in tensors if isinstance(x, torch.Tensor))
    place = values.get("dst", values.get("src")) if operation in _OTHER_END else None
    return Issued(group.group_name, ranks, operation, described, None if place is None else ranks[place])


def check_orders(by_rank: list[list[Issued]]) -> Counter[str]:
    """Compare what the ranks of a world have issued.

    Returns:
        How often each operation was issued, messages counted at both ends.

    Raises:
        AssertionError: ranks of a group differ, or all orders together have a cycle; with the operations.
    """
    places = _places(by_rank)
    _check_groups(by_rank, places)
    edges: dict[tuple[Any, ...], set[tuple[Any, ...]]] = defaultdict(set)
    for operations in places:
        for before, after in pairwise(operations):
            edges[after].add(before)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        shown = " → ".join(f"{node[0]} {'between' if len(node) > 2 else 'number'} {node[1:]}" for node in error.args[1])
        raise AssertionError(f"operations wait for one another in a circle: {shown}") from None
    return Counter(issued.operation for operations in by_rank for issued in operations)


def _places(by_rank: list[list[Issued]]) -> list[list[tuple[Any, ...]]]:
    """For each rank, which operation of which group each of its own is: the same for all that take part in it."""
    places: list[list[tuple[Any, ...]]] = []
    for rank, operations in enumerate(by_rank):
        numbers: Counter[tuple[Any, ...]] = Counter()
        places.append([])
        for issued in operations:
            if issued.peer is None:
                key: tuple[Any, ...] = (issued.group,)
            else:
                ends = (rank, issued.peer) if issued.operation == "send" else (issued.peer, rank)
                key = (issued.group, *ends)
            places[-1].append((*key, numbers[key]))
            numbers[key] += 1
    return places


def _check_groups(by_rank: list[list[Issued]], places: list[list[tuple[Any, ...]]]) -> None:
    by_place: dict[tuple[Any, ...], dict[int, Issued]] = defaultdict(dict)
    for rank, (operations, where) in enumerate(zip(by_rank, places, strict=True)):
        for issued, place in zip(operations, where, strict=True):
            by_place[place][rank] = issued
    for place, taking_part in by_place.items():
        first = next(iter(taking_part.values()))
        members = place[1:3] if first.peer is not None else first.ranks
        assert set(taking_part) == set(members), f"{first} on rank {sorted(taking_part)}, but not on all of {members}"
        for rank, issued in taking_part.items():
            same = issued.operation if first.peer is None else _OTHER_END.get(issued.operation)
            alike = {issued.operation, same} >= {first.operation} and issued.tensors == first.tensors
            assert alike, f"number {place[-1]} of its group is {first} elsewhere, but {issued} on rank {rank}"
