"""Plan a save: which rank writes each tensor, and which ranks send it which parts.

Pure functions of what all ranks of a stage know, so that every rank computes the same plan without communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cuboid.errors import CheckpointError

#: ``holdings[rank][tensor index]`` is the run [start, stop) of the tensor's flattened shard that the rank has.
Holdings = Mapping[int, Mapping[int, tuple[int, int]]]


@dataclass(frozen=True)
class Part:
    """A run of a shard that one rank sends.

    Attributes:
        source: the rank that sends it.
        cell: index of the shard: the position in the mesh of the ranks that have it, one in each replica.
        start: index of the first element in the flattened shard.
        stop: index after the last element.
    """

    source: int
    cell: int
    start: int
    stop: int


def assign(sizes_bytes: Sequence[int], writers: Sequence[int]) -> list[int]:
    """Balance items over writers: in descending size, each goes to the writer with the least bytes so far.

    Returns:
        The writer of each item.
    """
    load = dict.fromkeys(writers, 0)
    chosen = [writers[0]] * len(sizes_bytes)
    for item in sorted(range(len(sizes_bytes)), key=lambda item: (-sizes_bytes[item], item)):
        # ``min`` takes the first of equal loads, so that all ranks choose the same.
        writer = min(load, key=lambda rank: load[rank])
        chosen[item] = writer
        load[writer] += sizes_bytes[item]
    return chosen


def find_parts(
    name: str, item: int, numel: int, cells: Sequence[Sequence[int]], holdings: Holdings, writer: int
) -> list[Part]:
    """The parts that cover every shard of a tensor exactly once.

    A shard that some rank has in full comes from one rank: the writer if possible, else the rank of the writer's
    replica, else the first one.

    Args:
        name: the tensor's name, for messages.
        item: its index in ``holdings``.
        numel: elements of a shard.
        cells: for each shard, the ranks that have it, by replica.
        holdings: what each rank in ``cells`` has.
        writer: the rank that assembles the tensor.

    Raises:
        CheckpointError: there are elements that no rank has.
    """
    replica = next((ranks.index(writer) for ranks in cells if writer in ranks), 0)
    parts: list[Part] = []
    for cell, ranks in enumerate(cells):
        runs = {rank: holdings[rank][item] for rank in ranks if item in holdings[rank]}
        whole = [rank for rank in ranks if runs.get(rank) == (0, numel)]
        if whole:
            near = [rank for rank in (writer, ranks[replica]) if rank in whole]
            parts.append(Part((near or whole)[0], cell, 0, numel))
            continue
        # ZeRO-1: each replica has a range. The empty run after the last one makes the check for gaps cover the end.
        end = 0
        for rank, (start, stop) in [*sorted(runs.items(), key=lambda run: run[1]), (-1, (numel, numel))]:
            if start > end:
                raise CheckpointError(f"no rank holds elements {end} to {start} of shard {cell} of {name}")
            if stop > end:
                parts.append(Part(rank, cell, end, stop))
                end = stop
    return parts
