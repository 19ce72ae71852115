"""An optimizer's state in a form that any layout can load: by parameter name, and per element."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from cuboid.checkpoint.format.tensor_file import TensorSpec
from cuboid.checkpoint.metadata import ShardRange
from cuboid.errors import CheckpointError

#: Name of the quantity that holds float32 master weights, if the model has its weights in another dtype.
MASTER = "master"


@dataclass
class OptimizerState:
    """An optimizer's state, or one rank's part of it.

    Attributes:
        kind: name of the optimizer's class.
        package: name of the package that the class is of.
        quantities: per-element state such as ``exp_avg``: for each parameter the range of its shard that this rank has,
            empty where other ranks have all of it.
        numbers: per-parameter state such as ``step``. Every parameter that has a state has an entry, even an empty one.
        groups: hyperparameters, each with the names of its parameters under ``parameters``.
        whole_specs: dtype and shape of those quantities that one rank has whole, which needn't be of their parameter's
            shape. Their ranges are of the whole tensor.
    """

    kind: str
    package: str = ""
    quantities: dict[str, dict[str, ShardRange]] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    whole_specs: dict[str, dict[str, TensorSpec]] = field(default_factory=dict)


@dataclass(frozen=True)
class Slot:
    """Maps a range of a parameter's shard to the tensor that an optimizer steps.

    Attributes:
        name: the parameter's name.
        start: first element, in the flattened shard.
        offset: first element, in the optimizer's flattened tensor.
        numel: number of elements.
    """

    name: str
    start: int
    offset: int
    numel: int


@dataclass(frozen=True)
class OptimizerTensor:
    """A tensor that an optimizer steps: a parameter itself, a copy of one, or a flat concatenation of many.

    Attributes:
        tensor: the entry of the optimizer's ``param_groups``.
        slots: the parameter elements that it contains.
        names: all parameters that its per-parameter numbers apply to, including those whose elements another replica
            has.
    """

    tensor: torch.Tensor
    slots: tuple[Slot, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, parameter: torch.Tensor, name: str) -> OptimizerTensor:
        """A single parameter, or a copy of one."""
        return cls(parameter, (Slot(name, 0, 0, parameter.numel()),), (name,))


@dataclass(frozen=True)
class WholeStates:
    """Parameters of which one rank keeps the state, that of the whole tensor.

    Attributes:
        keys: by name, what the state belongs to in the optimizer on that rank; None on the others.
        gather: the objects of all ranks of one's own; collective.
    """

    keys: Mapping[str, torch.Tensor | None]
    gather: Callable[[Any], Sequence[Any]]


class OptimizerAdapter:
    """Reads and restores the state of a ``torch.optim.Optimizer``, also of one that a framework has wrapped.

    Args:
        optimizer: the innermost optimizer, which has ``param_groups`` and ``state``.
        groups: for each of its ``param_groups``, the tensors that it steps.
        has_master: whether these are copies in another precision than the model's (master weights).
        refresh: copies the model's weights into the master weights.

    Attributes:
        whole: the parameters that are stepped as whole tensors, each by one rank; None without such.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Sequence[OptimizerTensor]],
        *,
        has_master: bool = False,
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        assert len(groups) == len(optimizer.param_groups), "one list for each parameter group"
        self.optimizer = optimizer
        self.groups = groups
        self._has_master = has_master
        self.weights_changed = refresh
        self.whole: WholeStates | None = None

    @classmethod
    def direct(cls, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerAdapter:
        """An adapter for an optimizer that steps the model's own parameters.

        Args:
            optimizer: the optimizer.
            names: parameter names by ``id``. A parameter without a name is left out of checkpoints.
        """
        groups = [
            [OptimizerTensor.of(p, names[id(p)]) for p in group["params"] if id(p) in names]
            for group in optimizer.param_groups
        ]
        return cls(optimizer, groups)

    @property
    def kind(self) -> str:
        """Name of the optimizer's class."""
        return type(self.optimizer).__name__

    @property
    def package(self) -> str:
        """Name of the package that the class is of."""
        return type(self.optimizer).__module__.partition(".")[0]

    def state(self) -> OptimizerState:
        """The current state; the ranges are views of the optimizer's own tensors. Collective if some are whole.

        Raises:
            CheckpointError: the optimizer has state that is neither per element nor a number.
        """
        state = OptimizerState(self.kind, self.package)
        for group, stepped in zip(self.optimizer.param_groups, self.groups, strict=True):
            names: list[str] = []
            for entry in stepped:
                names += entry.names
                values, numbers = ({}, {}) if self._is_whole(entry) else self._split(entry)
                if values or numbers:
                    state.numbers.update(dict.fromkeys(entry.names, numbers))
                if self._has_master:
                    values[MASTER] = entry.tensor
                for key, value in values.items():
                    flat = value.detach().view(-1)
                    ranges = state.quantities.setdefault(key, {})
                    # The exchange of shards needs the same names on all ranks, so parameters without elements here
                    # get an empty range.
                    ranges.update(dict.fromkeys(entry.names, ShardRange(0, flat[:0])))
                    for slot in entry.slots:
                        ranges[slot.name] = ShardRange(slot.start, flat.narrow(0, slot.offset, slot.numel))
            settings = {key: value for key, value in group.items() if key != "params"}
            state.groups.append({**settings, "parameters": names})
        if self.whole is not None:
            self._add_whole(state, self.whole)
        return state

    def _kept(self) -> dict[str, torch.Tensor]:
        """By name, what this rank keeps the states of whole tensors for."""
        return {} if self.whole is None else {name: key for name, key in self.whole.keys.items() if key is not None}

    def _is_whole(self, entry: OptimizerTensor) -> bool:
        # A flat tensor of a group that has nothing to train on this stage is of no parameter.
        return self.whole is not None and any(name in self.whole.keys for name in entry.names)

    def _split(self, entry: OptimizerTensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return split_state(self.optimizer.state.get(entry.tensor, {}), entry)

    def _add_whole(self, state: OptimizerState, states: WholeStates) -> None:
        """Add the states of whole tensors: their values on the ranks that have them, what there is on all."""
        kept = {name: split_whole_state(self.optimizer.state.get(key, {}), name) for name, key in self._kept().items()}
        described = {
            name: (numbers, {key: TensorSpec(value.dtype, tuple(value.shape)) for key, value in values.items()})
            for name, (values, numbers) in kept.items()
        }
        for name, (numbers, specs) in (entry for part in states.gather(described) for entry in part.items()):
            # Those of other stages aren't in this one's files.
            if name not in states.keys:
                continue
            if numbers or specs:
                state.numbers[name] = numbers
            for quantity, spec in specs.items():
                state.whole_specs.setdefault(quantity, {})[name] = spec
                local = kept[name][0][quantity].detach().reshape(-1) if name in kept else torch.empty(0)
                state.quantities.setdefault(quantity, {})[name] = ShardRange(0, local)

    def allocate(self, quantities: Collection[str], held: Mapping[str, Collection[str]] | None = None) -> None:
        """Allocate per-element state to load into; a fresh optimizer would allocate it only in its first step.

        State of whole tensors is emptied: :meth:`take_whole` makes it.

        Args:
            quantities: their names.
            held: the names of the parameters that have each, if some of the optimizer's have others than the rest.
        """
        for parameter in self._kept().values():
            self.optimizer.state.pop(parameter, None)
        for entry in chain.from_iterable(self.groups):
            if self._is_whole(entry):
                continue
            state = self.optimizer.state[entry.tensor]
            for key in quantities:
                is_held = held is None or any(name in held[key] for name in entry.names)
                if key != MASTER and key not in state and is_held:
                    state[key] = torch.zeros_like(entry.tensor, requires_grad=False)

    def take_whole(self, quantity: str, values: Callable[[str], torch.Tensor | None]) -> None:
        """Take a quantity of the whole tensors that this rank steps, from a function of their names."""
        for name, key in self._kept().items():
            value = values(name)
            if value is not None:
                self.optimizer.state[key][quantity] = value.to(key.device)

    def check(
        self,
        numbers: Mapping[str, dict[str, Any]],
        saved: Sequence[Mapping[str, Any]],
        groups: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Check that :meth:`restore` can take a state, of which nothing is restored yet.

        Raises:
            CheckpointError: as :meth:`restore`.
        """
        groups = self._names_of(groups)
        _check_split(self.optimizer.param_groups, groups, saved)
        for stepped, names in zip(self.groups, groups, strict=True):
            _source_of(names, saved)
            for entry in stepped:
                if not self._is_whole(entry):
                    _common_numbers(entry, numbers)

    def restore(
        self,
        numbers: Mapping[str, dict[str, Any]],
        saved: Sequence[Mapping[str, Any]],
        groups: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Restore the state that isn't per element.

        Args:
            numbers: per-parameter state, by name; a parameter without an entry is left without a state.
            saved: hyperparameters with the names of their ``parameters``.
            groups: for each of the optimizer's groups, the names of its parameters on all stages; by default, of those
                that this rank has.

        Raises:
            CheckpointError: parameters that share one number, or a group, here had different ones in the checkpoint.
        """
        self.check(numbers, saved, groups)
        for group, stepped, names in zip(self.optimizer.param_groups, self.groups, self._names_of(groups), strict=True):
            source = _source_of(names, saved)
            if source is not None:
                group.update({key: _clone(value) for key, value in source.items() if key != "parameters"})
            # torch's fused and capturable optimizers read `step` in a kernel, others on the host.
            on_device = group.get("fused") or group.get("capturable")
            for entry in stepped:
                if self._is_whole(entry):
                    self._restore_whole(entry.names, numbers, on_device)
                    continue
                state = _common_numbers(entry, numbers)
                if state is not None:
                    self.optimizer.state[entry.tensor].update(_clone(state, entry.tensor.device if on_device else None))
                else:
                    # Not stepped before the save. Undo ``allocate``: optimizers take an empty state for "first step".
                    self.optimizer.state.pop(entry.tensor, None)

    def _names_of(self, groups: Sequence[Sequence[str]] | None) -> Sequence[Sequence[str]]:
        if groups is not None:
            return groups
        return [[name for entry in stepped for name in entry.names] for stepped in self.groups]

    def _restore_whole(self, names: Sequence[str], numbers: Mapping[str, dict[str, Any]], on_device: Any) -> None:
        assert self.whole is not None
        for name in names:
            key = self.whole.keys[name]
            if key is None:
                continue
            if name in numbers:
                self.optimizer.state[key].update(_clone(numbers[name], key.device if on_device else None))
            else:
                self.optimizer.state.pop(key, None)


def split_whole_state(state: Mapping[str, Any], name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """As :func:`split_state`, for a whole tensor, of which any layout can load tensors of any shape.

    Raises:
        CheckpointError: a value is neither a tensor nor a number.
    """
    values = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim()}
    stepped = OptimizerTensor(torch.empty(0), (), (name,))
    return values, split_state({key: value for key, value in state.items() if key not in values}, stepped)[1]


def split_state(state: Mapping[str, Any], stepped: OptimizerTensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split a tensor's optimizer state into per-element tensors and per-parameter numbers.

    Raises:
        CheckpointError: a value is neither, and so couldn't be loaded on another layout.
    """
    values: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == stepped.tensor.shape:
            values[key] = value
        elif value is None or isinstance(value, bool | int | float):
            numbers[key] = value
        elif isinstance(value, torch.Tensor) and value.dim() == 0:
            # Cloned, because optimizers increment such numbers (``step``) in place.
            numbers[key] = value.clone()
        else:
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise CheckpointError(
                f"the optimizer keeps {what} as {key!r} of {stepped.names[0]}, which has no meaning on another layout; "
                "checkpoints hold one value for each element, such as Adam's moments, or numbers"
            )
    return values, numbers


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "parameters")}


def _check_split(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Raise an error if parameters of one saved group are in several with other settings: those would be lost.

    ``names`` has the names of each group's parameters.
    """
    for source in saved:
        numbers = [index for index, of_group in enumerate(names) if not set(of_group).isdisjoint(source["parameters"])]
        kept = [{key: value for key, value in _settings(groups[i]).items() if key in source} for i in numbers]
        for number, settings in zip(numbers[1:], kept[1:], strict=True):
            key = next((key for key, value in settings.items() if value != kept[0].get(key)), None)
            if key is None:
                continue
            first, second = (next(n for n in names[i] if n in source["parameters"]) for i in (numbers[0], number))
            raise CheckpointError(
                f"{first} and {second} are in parameter groups with {key} {kept[0].get(key)} and {settings[key]} here, "
                f"but were in one, with {source[key]}, when the checkpoint was written; group the parameters as they "
                "were, or load without the optimizer's state"
            )


def _source_of(names: Sequence[str], saved: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The saved group that had a group's parameters, or one with the same settings; None if none had.

    Raises:
        CheckpointError: several had, with other settings.
    """
    sources = [index for index, other in enumerate(saved) if not set(names).isdisjoint(other["parameters"])]
    if not names or not sources:
        return None
    other = next((index for index in sources if _settings(saved[index]) != _settings(saved[sources[0]])), None)
    if other is not None:
        first, second = (next(n for n in names if n in saved[index]["parameters"]) for index in (sources[0], other))
        raise CheckpointError(
            f"{first} and {second} are in one parameter group here, but were in two with other settings when the "
            "checkpoint was written; group the parameters as they were, or load without the optimizer's state"
        )
    return saved[sources[0]]


def _common_numbers(entry: OptimizerTensor, numbers: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The numbers that all parameters of a tensor had, each for itself; None if none had any.

    Raises:
        CheckpointError: they had different ones.
    """
    states = [numbers[name] for name in entry.names if name in numbers]
    if any(other != states[0] for other in states):
        raise CheckpointError(
            f"the optimizer keeps one state for {entry.names[0]} and {len(entry.names) - 1} more, which had different "
            f"ones ({states[0]} and others) when the checkpoint was written; load without the optimizer's state"
        )
    return states[0] if states else None


def merge_stages(states: Sequence[OptimizerState]) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Merge the numbers and groups of all pipeline stages, which have the same groups in the same order.

    Raises:
        CheckpointError: a script gave some stages groups that others lack, or the parameters of a group other settings.
    """
    counts = [len(state.groups) for state in states]
    if len(set(counts)) > 1:
        raise CheckpointError(
            f"the optimizers of the stages have {' and '.join(map(str, counts))} parameter groups: a script added one "
            'on some stages only; add it on all ranks, with "params": [] where a stage has none of its parameters'
        )
    numbers: dict[str, dict[str, Any]] = {}
    for state in states:
        # Tied weights have the same numbers on all of their stages; the first stage's are kept.
        numbers = {**state.numbers, **numbers}
    of_stages = zip(*(state.groups for state in states), strict=True)
    return numbers, [_merge_group(number, groups) for number, groups in enumerate(of_stages)]


def _merge_group(number: int, of_stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"parameters": []}
    # A stage without parameters of the group may lack a setting that only other stages can make, or keep what a script
    # changed where it found the parameters.
    for group in sorted(of_stages, key=lambda group: not group["parameters"]):
        for key, value in _settings(group).items():
            known = merged.setdefault(key, value)
            if group["parameters"] and not _is_equal(known, value):
                raise CheckpointError(
                    f"parameter group {number}, that of {merged['parameters'][0]}, has {key} {known} on one stage and "
                    f"{value} on another, for {group['parameters'][0]}: a script changed it on some stages only; "
                    "change it on all ranks"
                )
        merged["parameters"] = list(dict.fromkeys([*merged["parameters"], *group["parameters"]]))
    return merged


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _clone(value: Any, device: torch.device | None = None) -> Any:
    """A copy of a number, a tensor or a dict of them that shares no memory; tensors on ``device`` if given."""
    if isinstance(value, dict):
        return {key: _clone(part, device) for key, part in value.items()}
    return value.to(device or value.device, copy=True) if isinstance(value, torch.Tensor) else value
