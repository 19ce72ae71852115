"""Process groups: making them from a partition of the ranks, as cheaply as the backend allows, and aborting them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

#: What a group is for: the layers' collectives, messages between two stages, or anything that isn't urgent.
Purpose = Literal["axis", "channel", "other"]
#: Thread blocks that NCCL may use for a message between stages. One that is posted early spins until its peer arrives;
#: a few blocks are enough for the bandwidth of a link, and leave the other multiprocessors to matrix products.
_CHANNEL_CTAS = 4


def make_groups(
    partition: Sequence[Sequence[int]], *, purpose: Purpose = "other", timeout: timedelta | None = None
) -> dist.ProcessGroup | None:
    """Make a process group of each set of ranks; collective over the world.

    Args:
        partition: disjoint sets of ranks of the world, each ascending; alike on all ranks. A rank may be in none.
        purpose: what the groups are for.
        timeout: timeout of their collectives; None for the backend's default.

    Returns:
        The group of this rank's set; None if it is in none, or alone.
    """
    # The partition is the same on all ranks, so that all of them leave out the same sets.
    several = [list(ranks) for ranks in partition if len(ranks) > 1]
    if not several:
        return None
    options = _options(purpose, timeout)
    if _is_split_at_once():
        # One split of the world's communicator for the whole partition. With `new_group`, each rank would take part in
        # a split for every set, also for those that it isn't in.
        return dist.split_group(split_ranks=several, timeout=timeout, pg_options=options)
    return dist.new_subgroups_by_enumeration(several, timeout=timeout, pg_options=options)[0]


def make_host_groups(partition: Sequence[Sequence[int]], timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """Process groups over gloo, whatever the backend of the world is; otherwise as :func:`make_groups`."""
    several = [list(ranks) for ranks in partition if len(ranks) > 1]
    if not several:
        return None
    with _no_bound_device():
        return dist.new_subgroups_by_enumeration(several, backend="gloo", timeout=timeout)[0]


def make_lone_group() -> dist.ProcessGroup:
    """A process group of this rank alone, for a framework that asks for one. Other ranks needn't call it."""
    rank = dist.get_rank()
    with _no_bound_device():
        group = dist.new_group([rank], use_local_synchronization=True)
    assert group is not None, f"rank {rank} is in it"
    return group


def waits_for_lost_ranks() -> bool:
    """Whether collectives wait until their timeout for a rank that is gone, as NCCL's do; gloo's fail at once."""
    return _uses_nccl()


def abort_groups() -> None:
    """Abort all communicators of this process: collectives in flight raise, and nothing can be sent any more.

    Any thread may call it. Groups over gloo aren't changed.
    """
    world = dist.group.WORLD
    if world is None:
        return
    backend: Any = world._get_backend(world._device_types[0])
    # Aborted one by one, communicators may wait for each other; NCCL aborts those of a group call together.
    begin, end = getattr(backend, "_group_start", None), getattr(backend, "_group_end", None)
    if begin is not None:
        begin()
    for group in list(distributed_c10d._world.pg_map):
        group.abort()
    if end is not None:
        end()


def _uses_nccl() -> bool:
    """Whether the default process group has NCCL for some device, perhaps beside another backend for others."""
    return "nccl" in str(dist.get_backend())


def _is_split_at_once() -> bool:
    """Whether one split of the default process group can make all groups of a partition: NCCL bound to a device.

    Without the device, NCCL's communicator of the world may not exist yet; gloo has nothing to split.
    """
    world = dist.group.WORLD
    if world is None or world.bound_device_id is None or dist.get_backend() != "nccl":
        return False
    return bool(world._get_backend(world.bound_device_id).supports_splitting)


def _options(purpose: Purpose, timeout: timedelta | None) -> Any:
    """NCCL's options for a group; None for other backends, which have none to set."""
    if not _uses_nccl():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=purpose == "axis")
    if timeout is not None:
        options._timeout = timeout
    if purpose == "channel":
        options.config.max_ctas = _CHANNEL_CTAS
    return options


@contextmanager
def _no_bound_device() -> Iterator[None]:
    """Inside, no new group is split off the world's communicator.

    If the default process group is bound to a device, `new_group` makes ranks that aren't members take part in a split
    of its communicator. The members of a gloo group don't take part, so that the ranks would wait forever. And it would
    split for a group that only its members make.
    """
    world = dist.group.WORLD
    assert world is not None, "there is a process group"
    bound: torch.device | None = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound
