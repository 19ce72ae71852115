"""The collective of torch's in which a thread waits, seen from another thread."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from traceback import walk_stack

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from cuboid.distributed.process_groups import waits_for_lost_ranks
from cuboid.failures.exit_messages import is_of_cuboid, place_in_script

#: Functions that return on no rank before all ranks of the group have called them.
_SYMMETRIC = frozenset(
    {
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_single",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "monitored_barrier",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    }
)
#: Functions that return on other ranks once the rank ``src`` has called them, and there once all have; over NCCL it may
#: return before.
_FROM_ONE = frozenset({"broadcast", "broadcast_object_list"})
#: Functions that return on the rank ``dst`` once all have called them.
_AT_ONE = frozenset({"gather", "gather_object"})


@dataclass(frozen=True)
class WaitingCall:
    """A call in which a thread is: equal for the same call, and unequal for the next one of the same line.

    Attributes:
        name: of the function, with the place in the script.
        ranks: the ranks of the world for which it waits, perhaps this one too.
        group: the name of its process group.
        is_of_cuboid: whether Cuboid has made it, and not the script.
        frame, instruction, number: of the call, by which it is told from others.
    """

    name: str
    ranks: tuple[int, ...]
    group: str
    is_of_cuboid: bool
    frame: int
    instruction: int
    number: int


def waiting_call(thread: int) -> WaitingCall | None:
    """The collective that a thread is in, by its identifier; None if it is in none that waits for known ranks."""
    known = _SYMMETRIC if waits_for_lost_ranks() else _SYMMETRIC | _FROM_ONE | _AT_ONE
    innermost = sys._current_frames().get(thread)
    stack = [] if innermost is None else list(walk_stack(innermost))
    calls = [
        place
        for place, (frame, _) in enumerate(stack)
        if frame.f_code.co_filename == distributed_c10d.__file__ and frame.f_code.co_name in known
    ]
    if not calls:
        return None
    # Others may be what it is made of.
    call = stack[calls[-1]][0]
    name, group = call.f_code.co_name, call.f_locals.get("group") or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        return None
    try:
        ranks, this_rank, group_name = dist.get_process_group_ranks(group), dist.get_rank(), group.group_name
    except (KeyError, ValueError, RuntimeError):
        # Groups are being destroyed, or their backend gives them no name.
        return None
    source, target = call.f_locals.get("src"), call.f_locals.get("dst")
    if name in _FROM_ONE and source != this_rank:
        ranks = [rank for rank in ranks if rank == source]
    if name in _AT_ONE and target != this_rank:
        return None
    return WaitingCall(
        f"torch.distributed.{name}{place_in_script(stack[calls[-1] :])}",
        tuple(ranks),
        group_name,
        is_of_cuboid(stack[calls[-1] :]),
        id(call),
        call.f_lasti,
        _number(group),
    )


@dataclass(frozen=True)
class BegunCollectives:
    """How many collectives this process has begun on each of its groups, by name.

    gloo counts messages between two ranks too, of which ranks make different numbers. torch's flight recorder doesn't
    have them, and numbers the last 2,000 collectives of all groups.

    Attributes:
        at_most: of each group; 0 where a backend doesn't count.
        at_least: of those whose collectives are known by their numbers.
    """

    at_most: dict[str, int]
    at_least: dict[str, int]


def begun_collectives() -> BegunCollectives:
    """Those of this process so far."""
    recorded = _recorded_numbers()
    at_most: dict[str, int] = {}
    at_least: dict[str, int] = {}
    for group, name in list(distributed_c10d._world.pg_names.items()):
        counted = _number(group)
        at_most[name] = at_least[name] = counted
        if _counts_messages(group):
            # The recorder may have an earlier group of the same name.
            at_most[name] = min(counted, recorded.get(name, counted))
            at_least[name] = min(counted, recorded.get(name, 0))
    return BegunCollectives(at_most, at_least)


def _recorded_numbers() -> dict[str, int]:
    """By the name of a group, the number of the last of its collectives that the flight recorder still has."""
    # Private, and perhaps not in all versions of torch.
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return {}
    entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", ())
    return {entry["process_group"][0]: entry["collective_seq_id"] for entry in entries if not entry["is_p2p"]}


def _counts_messages(group: dist.ProcessGroup) -> bool:
    """Whether a group's own count, that of NCCL if it has several backends, has messages between two ranks too."""
    return {group._get_backend(device).name() for device in group._device_types} == {"gloo"}


def _number(group: dist.ProcessGroup) -> int:
    """How many collectives a group has begun, where its backend counts them; with gloo, and messages."""
    try:
        number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    except RuntimeError:
        return 0
    return number
