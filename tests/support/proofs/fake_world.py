"""One rank of a world of any size, in this process alone: what it would make and call, without any other rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from cuboid.distributed import process_groups


@dataclass
class FakeWorld:
    """What a rank has asked of torch.distributed.

    Attributes:
        asked: the sets of ranks of every ``new_group``, of which this rank may not be a member.
        partitions: those of every ``split_group``.
        splits: how this rank took part in splits of the world's communicator: ``"own"`` for a group of its own,
            ``"none"`` for one of others.
        options: of NCCL, of every partition or group.
    """

    asked: list[list[int]] = field(default_factory=list)
    partitions: list[list[list[int]]] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    options: list[Any] = field(default_factory=list)

    @property
    def own(self) -> list[list[int]]:
        """The groups that this rank is in now, but for the world's, as their ranks."""
        groups = [dist.get_process_group_ranks(group) for group in distributed_c10d._world.pg_map]
        return groups[1:]


class _Options:
    """The attributes of ``ProcessGroupNCCL.Options`` that are used."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)
        self._timeout = None


@contextmanager
def fake_world(rank: int, size: int, *, nccl: bool = False, nodes: list[str] | None = None) -> Iterator[FakeWorld]:
    """Inside, this process is a rank whose collectives return at once, with anything in their outputs.

    Args:
        rank: of this process.
        size: of the world.
        nccl: whether the backend is called NCCL, and the world bound to a device, whose communicator can be split.
        nodes: for each rank the name of its node; by default all have this one's.
    """
    world = FakeWorld()
    new_group, enumerate_groups = dist.new_group, dist.new_subgroups_by_enumeration

    def record_group(ranks: Any = None, **options: Any) -> Any:
        world.asked.append(ranks)
        # A group over gloo can't be made with ranks that don't exist.
        return new_group(ranks, **{**options, "backend": "fake", "pg_options": None})

    def record_enumeration(sets: Any, **options: Any) -> Any:
        world.options.append(options.get("pg_options"))
        return enumerate_groups(sets, **{**options, "backend": "fake", "pg_options": None})

    def split(split_ranks: Any, timeout: Any = None, pg_options: Any = None) -> Any:
        world.partitions.append(split_ranks)
        world.options.append(pg_options)
        of_rank = [ranks for ranks in split_ranks if rank in ranks]
        group = dist.group.WORLD
        assert group is not None
        bound, group.bound_device_id = group.bound_device_id, None
        try:
            return new_group(of_rank[0], backend="fake") if of_rank else None
        finally:
            group.bound_device_id = bound

    def gather(outs: Any, item: Any, group: Any = None) -> None:
        outs[:] = [item] * len(outs) if nodes is None else [(node, *item[1:]) for node in nodes]

    class Source:
        """The world's communicator, as `new_group` sees it where it is bound to a device."""

        supports_splitting = True

        def perform_nocolor_split(self, _: torch.device) -> None:
            world.splits.append("none")

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", record_group)
        patch.setattr(distributed_c10d, "new_group", record_group)
        patch.setattr(dist, "new_subgroups_by_enumeration", record_enumeration)
        patch.setattr(dist, "all_gather_object", gather)
        if nccl:
            assert dist.group.WORLD is not None
            dist.group.WORLD.bound_device_id = torch.device("cuda:0")
            patch.setattr(distributed_c10d, "_get_split_source", lambda _: Source())
            patch.setattr(dist, "split_group", split)
            patch.setattr(dist, "get_backend", lambda _=None: "nccl")
            patch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options), raising=False)
            patch.setattr(process_groups, "_is_split_at_once", lambda: True)
        try:
            yield world
        finally:
            dist.destroy_process_group()
