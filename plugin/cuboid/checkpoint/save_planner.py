"""Who writes which tensor, and who gives the writer which part of it. Pure functions, alike on all ranks of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cuboid.errors import CheckpointError

#: For each rank: by the position of a tensor, the run [start, stop) of its shard that the rank holds.
Holdings = Mapping[int, Mapping[int, tuple[int, int]]]


@dataclass(frozen=True)
class Part:
    """A run of a shard that one rank gives.

    Attributes:
        source: the rank.
        cell: which shard, by the place of its holders in the mesh.
        start: of the run in the flattened shard.
        stop: its end.
    """

    source: int
    cell: int
    start: int
    stop: int


def assign(sizes_bytes: Sequence[int], writers: Sequence[int]) -> list[int]:
    """A writer for each item, so that all write about as much: the largest first, each to whom has the least.

    Returns:
        For each item its writer.
    """
    load = dict.fromkeys(writers, 0)
    chosen = [writers[0]] * len(sizes_bytes)
    for item in sorted(range(len(sizes_bytes)), key=lambda item: (-sizes_bytes[item], item)):
        # Of equal loads the first writer's, so that the choice is the same everywhere.
        writer = min(load, key=lambda rank: load[rank])
        chosen[item] = writer
        load[writer] += sizes_bytes[item]
    return chosen


def find_parts(
    name: str, item: int, numel: int, cells: Sequence[Sequence[int]], holdings: Holdings, writer: int
) -> list[Part]:
    """Parts that make up every shard of a tensor once.

    A shard that somebody has whole comes from one rank: the writer, else one of its replica, else the first.

    Args:
        name: of the tensor, for messages.
        item: its position in ``holdings``.
        numel: elements of a shard.
        cells: for each place in the mesh, the ranks there, by replica.
        holdings: of all ranks in ``cells``.
        writer: who is going to put the parts together.

    Raises:
        CheckpointError: nobody holds some of the elements.
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
        parts += _chain(name, cell, numel, runs)
    return parts


def _chain(name: str, cell: int, numel: int, runs: Mapping[int, tuple[int, int]]) -> list[Part]:
    """Runs of several ranks one behind the other."""
    parts, end = [], 0
    for rank, (start, stop) in [*sorted(runs.items(), key=lambda item: item[1]), (-1, (numel, numel))]:
        if start > end:
            raise CheckpointError(f"no rank holds elements {end} to {start} of shard {cell} of {name}")
        if stop > end:
            parts.append(Part(rank, cell, end, stop))
            end = stop
    return parts
