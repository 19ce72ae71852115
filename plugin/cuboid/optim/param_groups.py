"""Give an optimizer the same parameter groups, in the same order, on all pipeline stages.

A script makes its groups of the parameters that its own stage has, and usually leaves out those without any, such as
the head's on the first stage. But frameworks communicate once per group, and schedules and checkpoints go by the
groups' order. So groups that only other stages have are added to the optimizer, without parameters, and to the lists
of its schedules. Groups of several stages are one if they have the same settings.

A script may also set a group by its index, which should be that in one process. The stages' lists tell it where each
stage has all groups, or lists them in the order of the model's parameters, or in the reverse.
"""

from __future__ import annotations

import copy
import hashlib
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist

from cuboid.distributed.mesh import Mesh
from cuboid.errors import OptimizerError
from cuboid.failures.rank_agreement import gather_objects
from cuboid.optim.schedule_groups import (
    check_found,
    check_other_lists,
    lists_by_group,
    no_entry_for,
    schedules_of,
    set_lists,
)
from cuboid.optim.setting_values import described, is_plain

#: For each parameter group, the names of its parameters on all stages.
GroupNames = tuple[tuple[str, ...], ...]
#: What a script can do about groups that nothing tells apart.
_TELL = (
    'give each group a key of its own, such as "name": "body", or list all groups on every rank, also those without '
    "parameters there"
)
#: Identifies a group on all stages: its settings as text, and its number among those with the same settings.
_GroupKey = tuple[str, int]


@dataclass(frozen=True)
class AlignedGroups:
    """Parameter groups that all stages have in the same order.

    Attributes:
        names: of each group's parameters.
        unsure: places of groups that may be others on some stages: they had the same settings, and no kinds of
            parameters for themselves.
    """

    names: GroupNames = ()
    unsure: tuple[tuple[int, ...], ...] = ()

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Check that a script has changed such groups alike.

        Raises:
            OptimizerError: it hasn't; names their first parameters.
        """
        for places in self.unsure:
            settings = [
                {key: described(value) for key, value in groups[place].items() if key not in ("params", "param_names")}
                for place in places
            ]
            other = next((place for place, listed in zip(places, settings, strict=True) if listed != settings[0]), None)
            if other is not None:
                one, two = (self.names[place][0] if self.names[place] else "none" for place in (places[0], other))
                raise OptimizerError(
                    f"parameter groups {places[0]} and {other}, which begin with {one} and {two}, had the same "
                    "settings, and each stage has parameters of the same kinds in both, so that nothing tells which is "
                    f"which in one process: they can't be set by their index; {_TELL}"
                )


@dataclass
class _Setting:
    """A value as text, and the value itself if other ranks can use it."""

    text: str
    value: Any = None
    is_plain: bool = False

    @classmethod
    def of(cls, value: Any) -> _Setting:
        if not is_plain(value):
            return cls(described(value))
        sent = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        return cls(described(value), sent, is_plain=True)


@dataclass
class _Group:
    """A parameter group as a rank lists it: its parameters' names and its other entries."""

    names: tuple[str, ...]
    options: dict[str, _Setting]
    #: The place of its first parameter among the stage's; None if it has none.
    place: int | None
    #: The entries for it in lists of schedules.
    schedule: dict[str, _Setting] = field(default_factory=dict)

    @cached_property
    def settings(self) -> str:
        """Options and schedule as text."""
        return "; ".join(f"{key}={one.text}" for key, one in sorted({**self.options, **self.schedule}.items()))

    @property
    def first(self) -> str:
        """The first parameter's name, for messages."""
        return self.names[0] if self.names else "no parameter"


@dataclass
class _StageGroups:
    """A stage's parameter groups, in the order in which one of its ranks lists them."""

    groups: list[_Group]
    #: Names of the parameters that another stage has too.
    shared: tuple[str, ...]
    #: Classes of the optimizer's schedules.
    schedules: tuple[str, ...]
    rank: int

    @cached_property
    def by_key(self) -> dict[_GroupKey, _Group]:
        """The groups by what identifies them, in the rank's order."""
        seen: Counter[str] = Counter()
        by_key = {}
        for group in self.groups:
            by_key[group.settings, seen[group.settings]] = group
            seen[group.settings] += 1
        return by_key

    @property
    def is_complete(self) -> bool:
        """Whether it seems to have all groups of the script, as some have no parameter here."""
        return any(not group.names for group in self.groups)

    @property
    def direction(self) -> int:
        """1 if groups are listed as their parameters are in the model, -1 in the reverse, 0 if that can't be told."""
        places = [group.place for group in self.groups if group.place is not None]
        return 0 if len(places) < 2 else 1 if places[0] < places[-1] else -1

    @property
    def digest(self) -> str:
        """A hash of all groups with their settings and names."""
        return hashlib.sha256(repr([(group.names, group.settings) for group in self.groups]).encode()).hexdigest()


def align_groups(
    groups: list[dict[str, Any]],
    names: Mapping[int, str],
    mesh: Mesh,
    *,
    shared: Collection[str] = (),
    optimizer: torch.optim.Optimizer | None = None,
    schedule: Any = None,
) -> AlignedGroups:
    """Add the groups of other stages to a list of parameter groups, in place. Collective over the world.

    Args:
        groups: of this rank's optimizer; a group may be without parameters.
        names: of this rank's parameters, by ``id``; one that the first and last stage share has the same on both.
        mesh: of this rank, connected.
        shared: names of the parameters that this stage shares with another one.
        optimizer: of the groups, if there is one yet.
        schedule: of the optimizer, if the framework is given one. Without one, those that refer to the optimizer are
            looked for. Their lists by group are extended too.

    Returns:
        The groups as they are on all stages.

    Raises:
        OptimizerError: which groups of several stages are the same can't be told; or a shared parameter is in
            different ones.
    """
    is_staged = mesh.topology.pipe > 1
    schedules = schedules_of(optimizer, schedule) if is_staged and optimizer is not None else []
    own_stage = _stage(groups, names, schedules, mesh.rank, tuple(shared))
    _check_same_within_stages(own_stage, mesh)
    stages = [own_stage] * mesh.topology.pipe
    if is_staged:
        dist.all_gather_object(stages, own_stage, group=mesh.pipe_group)
    _check_same_schedules(stages)
    order = _common_order(stages)
    _warn_of_order(stages, order, mesh)
    if order != list(own_stage.by_key):
        if optimizer is not None:
            check_found(optimizer, schedules)
        check_other_lists(schedules, len(groups))
        _extend_schedules(schedules, own_stage, stages, order)
        _extend(groups, own_stage, stages, order)
    group_names = tuple(tuple(dict.fromkeys(_names(stages, key))) for key in order)
    _check_shared(stages, group_names)
    return AlignedGroups(group_names, tuple(_unsure(stages, order)))


def _stage(
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
    schedules: Sequence[Any],
    rank: int,
    shared: tuple[str, ...],
) -> _StageGroups:
    lists = lists_by_group(schedules, len(groups))
    listed, places = [], {name: place for place, name in enumerate(names.values())}
    for place, group in enumerate(groups):
        options = {key: _Setting.of(value) for key, value in group.items() if key not in ("params", "param_names")}
        entries = {name: _Setting.of(entries[place]) for name, entries in lists.items()}
        here = tuple(names[id(p)] for p in group["params"] if id(p) in names)
        listed.append(_Group(here, options, places[here[0]] if here else None, entries))
    return _StageGroups(listed, shared, tuple(type(schedule).__qualname__ for schedule in schedules), rank)


def _check_same_within_stages(own_stage: _StageGroups, mesh: Mesh) -> None:
    """Raise an error unless all ranks of each stage list the same groups. Collective over the world.

    Otherwise gradients of flattened parameters would be summed with those of others.
    """
    digests = gather_objects((mesh.coordinate.pipe, own_stage.digest), mesh, what="comparison of the parameter groups")
    first: dict[int, int] = {}
    for rank, (stage, digest) in enumerate(digests):
        other = first.setdefault(stage, rank)
        if digests[other][1] != digest:
            raise OptimizerError(
                f"ranks {other} and {rank} have the same parameters, but list them in other groups, in another order "
                "or with other settings; make the groups in the same way on all ranks (a set of names, for example, "
                "has another order in each process)"
            )


def _check_same_schedules(stages: Sequence[_StageGroups]) -> None:
    for stage in stages:
        if stage.schedules != stages[0].schedules:
            raise OptimizerError(
                f"the optimizer has other schedules on rank {stage.rank} ({', '.join(stage.schedules) or 'none'}) than "
                f"on rank {stages[0].rank} ({', '.join(stages[0].schedules) or 'none'}); make the same on all ranks"
            )


def _common_order(stages: Sequence[_StageGroups]) -> list[_GroupKey]:
    """The groups of all stages in an order that agrees with each stage's; where none says, earlier stages' come first,
    or later ones' if all list theirs from the model's end to its beginning.

    Raises an error if there is no such order, or if groups can't be told apart.
    """
    # A merge of the stages' lists, as in Kahn's topological sort.
    _check_told_apart(stages)
    remaining = [list(stage.by_key) for stage in (reversed(stages) if _direction(stages) < 0 else stages)]
    # A group comes next if all stages that have it have it first among those that aren't placed yet.
    holders = Counter(key for keys in remaining for key in keys)
    order: list[_GroupKey] = []
    while any(remaining):
        heads = Counter(keys[0] for keys in remaining if keys)
        key = next((key for key in heads if heads[key] == holders[key]), None)
        if key is None:
            one, other = (next(_names(stages, key), "no parameter") for key in list(heads)[:2])
            raise OptimizerError(
                "the stages list the same parameter groups in different orders, among them those that begin with "
                f"{one} and {other}; list them in the same order on all ranks"
            )
        order.append(key)
        remaining = [keys[1:] if keys and keys[0] == key else keys for keys in remaining]
    return order


def _check_told_apart(stages: Sequence[_StageGroups]) -> None:
    """Check that each stage has either all or none of the groups that have the same settings."""
    counts = [Counter(group.settings for group in stage.groups) for stage in stages]
    for text in dict.fromkeys(text for count in counts for text in count):
        most = max(range(len(stages)), key=lambda number: counts[number][text])
        few = next((number for number, count in enumerate(counts) if 0 < count[text] < counts[most][text]), None)
        if few is None:
            continue
        one, other = (stages[most].by_key[text, number].first for number in (0, 1))
        raise OptimizerError(
            f"the parameter groups that begin with {one} and {other} have the same settings, and rank "
            f"{stages[few].rank} has fewer such groups (the one that begins with {stages[few].by_key[text, 0].first}), "
            f"so that nothing tells which of them it has; {_TELL}"
        )


def _direction(stages: Sequence[_StageGroups]) -> int:
    """As :attr:`_StageGroups.direction`, of all stages together."""
    directions = {stage.direction for stage in stages} - {0}
    return directions.pop() if len(directions) == 1 else 0


def _warn_of_order(stages: Sequence[_StageGroups], order: Sequence[_GroupKey], mesh: Mesh) -> None:
    """Warn, on the first rank, of two groups whose order in one process can't be told."""
    by_stage = [set(stage.by_key) for stage in stages]
    pair = next((pair for pair in pairwise(order) if not any(keys.issuperset(pair) for keys in by_stage)), None)
    if pair is None or _direction(stages) or mesh.rank:
        return
    one, other = (next(_names(stages, key), "no parameter") for key in pair)
    warnings.warn(
        f"no stage has both of the parameter groups that begin with {one} and {other}, and the order of the others "
        "doesn't tell which is listed first in one process; here the former is, in optimizer.param_groups and in the "
        "rates of schedules. Where groups are set by their index, list all of them on every rank, also those without "
        "parameters there",
        stacklevel=1,
    )


def _unsure(stages: Sequence[_StageGroups], order: Sequence[_GroupKey]) -> list[tuple[int, ...]]:
    """Which groups may be others on some stages, by their places: they have the same settings, and none has its kinds
    of parameters for itself.
    """
    if len(stages) == 1 or any(stage.is_complete for stage in stages):
        return []
    by_settings = defaultdict(list)
    for place, (settings, _) in enumerate(order):
        by_settings[settings].append(place)
    kinds = [{re.sub(r"\d+", "", name) for name in _names(stages, key)} for key in order]
    return [
        tuple(places)
        for (settings, places) in by_settings.items()
        if any(kinds[one] & kinds[other] for one, other in combinations(places, 2))
        and sum((settings, 0) in stage.by_key for stage in stages) > 1
    ]


def _elsewhere(stages: Sequence[_StageGroups], key: _GroupKey) -> _Group:
    return next(stage.by_key[key] for stage in stages if key in stage.by_key)


def _names(stages: Sequence[_StageGroups], key: _GroupKey) -> Iterator[str]:
    for stage in stages:
        if key in stage.by_key:
            yield from stage.by_key[key].names


def _extend(
    groups: list[dict[str, Any]], own_stage: _StageGroups, stages: Sequence[_StageGroups], order: Sequence[_GroupKey]
) -> None:
    """Put groups without parameters where only other stages have one."""
    own_groups = dict(zip(own_stage.by_key, groups, strict=True))
    values = [value for group in groups for key, value in group.items() if key != "params"]
    groups.clear()
    for key in order:
        if key in own_groups:
            groups.append(own_groups[key])
            continue
        options = _elsewhere(stages, key).options
        # A function that this rank doesn't have is left out of the group, which steps no parameter here.
        groups.append({"params": [], **{name: _made_here(setting, values) for name, setting in options.items()}})


def _extend_schedules(
    schedules: Sequence[Any], own_stage: _StageGroups, stages: Sequence[_StageGroups], order: Sequence[_GroupKey]
) -> None:
    """Add entries for the groups of other stages to the lists by group of this rank's schedules.

    Raises an error about an entry that is a function which this rank doesn't have.
    """
    extended: dict[str, list[Any]] = {}
    for name, entries in lists_by_group(schedules, len(own_stage.groups)).items():
        own_entries = dict(zip(own_stage.by_key, entries, strict=True))
        extended[name] = []
        for key in order:
            if key in own_entries:
                extended[name].append(own_entries[key])
                continue
            group = _elsewhere(stages, key)
            setting = group.schedule.get(name)
            entry = None if setting is None else _made_here(setting, entries)
            if setting is None or (entry is None and not setting.is_plain):
                raise no_entry_for(schedules, name, group.first)
            extended[name].append(entry)
    set_lists(schedules, extended)


def _made_here(setting: _Setting, values: Sequence[Any]) -> Any:
    """A value that another rank has sent, or this rank's own that computes the same; None if there is none."""
    if setting.is_plain:
        return copy.deepcopy(setting.value)
    return next((value for value in values if described(value) == setting.text), None)


def _check_shared(stages: Sequence[_StageGroups], groups: GroupNames) -> None:
    """Raise an error unless both copies of a shared parameter are in the same group or in none: they would diverge."""
    for name in dict.fromkeys(name for stage in stages for name in stage.shared):
        holders = [stage for stage in stages if name in stage.shared]
        lacking = [stage for stage in holders if not any(name in group.names for group in stage.groups)]
        if lacking and len(lacking) < len(holders):
            raise OptimizerError(
                f"{name} is on the first and on the last stage, which share it, but rank {lacking[0].rank} leaves it "
                "out of the optimizer; give it on both"
            )
        if sum(name in names for names in groups) > 1:
            raise OptimizerError(
                f"{name} is on the first and on the last stage, which share it, but in parameter groups with other "
                "settings, with which its copies would become different; put it into the same group on both, by its "
                "name in model.named_parameters(), which is the same there"
            )
