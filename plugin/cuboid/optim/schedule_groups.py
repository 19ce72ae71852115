"""The lists that a learning-rate schedule keeps with one entry for each parameter group."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from cuboid.errors import CheckpointError, OptimizerError
from cuboid.optim.setting_values import described

#: Attributes with an entry for each parameter group, of torch's, transformers' and DeepSpeed's schedules.
_BY_GROUP = frozenset(
    [
        *("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"),
        *("min_lr", "delta_lrs", "min_moms", "max_moms", "org_lrs"),
    ]
)
#: Packages whose other lists are known not to be by group, such as the milestones of ``SequentialLR``.
_KNOWN = ("torch", "transformers", "deepspeed", "colossalai")
#: Attribute of ``SequentialLR`` and ``ChainedScheduler`` with the schedules inside, and its key in their state.
_INNER = "_schedulers"
#: Attribute of ColossalAI's schedules with a warm-up or a delay: the one that follows; and the key of its state.
_AFTER, _STATE_AFTER = "after_scheduler", "after_scheduler_dict"


def schedules_of(optimizer: torch.optim.Optimizer, framework_schedule: Any) -> list[Any]:
    """An optimizer's schedules, those inside of others too, in an order that is the same on all ranks.

    Without a schedule that the framework steps, those that the script steps by itself are looked for.
    """
    outer = [framework_schedule] if framework_schedule is not None else sorted(_made_of(optimizer), key=_sort_key)
    return [part for schedule in outer for part in _with_inner(schedule)]


def check_found(optimizer: torch.optim.Optimizer, schedules: Sequence[Any]) -> None:
    """Check that the schedules of an optimizer that is about to get further groups are known.

    Raises:
        OptimizerError: one was made of it, but isn't among them.
    """
    # torch's schedules wrap ``step`` on the optimizer's instance.
    if not schedules and hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched"):
        raise OptimizerError(f"a schedule was made of the optimizer, but it can't be found; {_REMEDY}")


def lists_by_group(schedules: Sequence[Any], count: int) -> dict[str, list[Any]]:
    """The lists by group of some schedules, each with ``count`` entries, by number of the schedule and attribute."""
    return {
        f"{number}.{name}": list(value)
        for number, schedule in enumerate(schedules)
        for name, value in vars(schedule).items()
        if name in _BY_GROUP and isinstance(value, list | tuple) and len(value) == count
    }


def check_other_lists(schedules: Sequence[Any], count: int) -> None:
    """Check that schedules of unknown classes have no other list that may be by group.

    Raises:
        OptimizerError: one has a list with ``count`` entries.
    """
    for schedule in schedules:
        for name, value in vars(schedule).items():
            is_list = isinstance(value, list | tuple) and len(value) == count
            if is_list and name not in _BY_GROUP and type(schedule).__module__.partition(".")[0] not in _KNOWN:
                raise OptimizerError(
                    f"{type(schedule).__qualname__}.{name} has {count} entries, perhaps one for each parameter group "
                    f"of this stage, but other stages have further groups; {_REMEDY}"
                )


def set_lists(schedules: Sequence[Any], lists: Mapping[str, list[Any]]) -> None:
    """Replace lists by group, as :func:`lists_by_group` names them."""
    for place, value in lists.items():
        number, _, name = place.partition(".")
        setattr(schedules[int(number)], name, value)


def no_entry_for(schedules: Sequence[Any], place: str, parameter: str) -> OptimizerError:
    """The error about a list by group whose entry for another stage's group can't be made here."""
    number, _, name = place.partition(".")
    return OptimizerError(
        f"{type(schedules[int(number)]).__qualname__}.{name} has an entry of its own for the parameter group of "
        f"{parameter}, which this stage doesn't have, and whose schedule it can't make; {_REMEDY}"
    )


#: What to do if groups that only other stages have can't be added to a schedule.
_REMEDY = (
    "list all parameter groups in the optimizer on every stage, also those without parameters there, or give a "
    "function that makes the schedule, lr_scheduler=lambda optimizer: …"
)


def regrouped(
    state: Mapping[str, Any],
    saved: Sequence[Sequence[str]],
    groups: Sequence[Sequence[str]],
    present: Mapping[str, Any],
) -> dict[str, Any]:
    """A schedule's saved state with its lists by group in the order of other groups, found by their parameters' names.

    ``saved`` has the names of each group's parameters when it was saved, ``groups`` those of each group now;
    ``present`` is the schedule's state now.

    Raises:
        CheckpointError: a group has no counterpart, or several with other values.
    """
    if [set(names) for names in saved] == [set(names) for names in groups]:
        return dict(state)
    result = dict(state)
    for key, value in state.items():
        if key == _INNER and isinstance(value, list):
            inner = zip(value, present[_INNER], strict=True)
            result[key] = [regrouped(one, saved, groups, now) for one, now in inner]
        elif key == _STATE_AFTER and isinstance(value, Mapping):
            result[key] = regrouped(value, saved, groups, present[_STATE_AFTER])
        elif key in _BY_GROUP and isinstance(value, list | tuple) and len(value) == len(saved):
            result[key] = [_entry(key, value, saved, names, present[key][place]) for place, names in enumerate(groups)]
    return result


def _entry(key: str, values: Sequence[Any], saved: Sequence[Sequence[str]], names: Sequence[str], present: Any) -> Any:
    if not names:
        # A group without parameters trains nothing.
        return present
    name_set = set(names)
    sources = [place for place, others in enumerate(saved) if not name_set.isdisjoint(others)]
    if not sources:
        raise CheckpointError(f"the schedule has nothing for the parameter group of {names[0]}, which is new")
    other = next((place for place in sources if values[place] != values[sources[0]]), None)
    if other is not None:
        first, second = (next(name for name in names if name in saved[place]) for place in (sources[0], other))
        raise CheckpointError(
            f"{first} and {second} are in one parameter group here, but had schedules of their own ({key} was "
            f"{values[sources[0]]} and {values[other]})"
        )
    return values[sources[0]]


def check_ungrouped(state: Mapping[str, Any], groups: int) -> None:
    """Check that a schedule's state whose groups weren't saved by name, by an earlier version, fits by their number.

    Earlier versions saved the first stage's lists, which had only the groups of that stage.

    Raises:
        CheckpointError: it doesn't.
    """
    lists = {key: value for key, value in state.items() if key in _BY_GROUP and isinstance(value, list | tuple)}
    for key, value in lists.items():
        if len(value) != groups:
            raise CheckpointError(
                f"the schedule's {key} has {len(value)} entries, for the first stage's parameter groups only, but the "
                f"optimizer has {groups}; it is of an earlier version, which didn't save them by name"
            )
    after = state.get(_STATE_AFTER)
    for inner in (*(state.get(_INNER) or ()), *([after] if isinstance(after, Mapping) else [])):
        check_ungrouped(inner, groups)


def _with_inner(schedule: Any) -> Iterator[Any]:
    yield schedule
    after = getattr(schedule, _AFTER, None)
    for inner in (*getattr(schedule, _INNER, ()), *([] if after is None else [after])):
        yield from _with_inner(inner)


def _made_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The outermost schedules that refer to an optimizer, which itself knows of none."""
    # Without those that are only waiting to be collected.
    gc.collect()
    schedules = [
        one
        for one in gc.get_objects()
        if hasattr(type(one), "step")
        and (hasattr(type(one), "get_last_lr") or hasattr(type(one), "get_lr"))
        and getattr(one, "__dict__", {}).get("optimizer") is optimizer
    ]
    inside = {id(part) for schedule in schedules for part in list(_with_inner(schedule))[1:]}
    return [schedule for schedule in schedules if id(schedule) not in inside]


def _sort_key(schedule: Any) -> tuple[str, str]:
    lists = {name: value for name, value in vars(schedule).items() if name in _BY_GROUP}
    return described(schedule), described(lists)
