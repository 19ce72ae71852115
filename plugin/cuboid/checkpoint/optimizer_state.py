"""An optimizer's state in words that fit any layout: by parameter name, and element by element."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cuboid.checkpoint.shards import Run
from cuboid.errors import CheckpointError

#: The quantity that holds the weights in float32 where the model has them in another dtype.
MASTER = "master"


@dataclass
class OptimizerState:
    """What an optimizer keeps, or one rank's part of it.

    Attributes:
        kind: name of the optimizer's class.
        quantities: what there is for each element, such as ``exp_avg``: by parameter the run that is here, an empty one
            where others have it all.
        numbers: what there is for a parameter as a whole, such as ``step``; by each parameter that has a state, though
            it may have no such number.
        groups: hyperparameters, each with the names of its parameters under ``parameters``.
    """

    kind: str
    quantities: dict[str, dict[str, Run]] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Slot:
    """Where an optimizer has elements of a parameter's shard.

    Attributes:
        name: of the parameter.
        start: of the elements in the flattened shard.
        offset: of the elements in the tensor that the optimizer works on, flattened.
        numel: how many they are.
    """

    name: str
    start: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Holding:
    """A tensor that an optimizer works on: a parameter itself, a copy of one, or copies of many end to end.

    Attributes:
        tensor: as it is in the optimizer's ``param_groups``.
        slots: what it has of which parameters.
        names: of all parameters that its numbers speak for, also where another replica has their elements.
    """

    tensor: torch.Tensor
    slots: tuple[Slot, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, parameter: torch.Tensor, name: str) -> Holding:
        """A parameter, or a copy of it alone."""
        return cls(parameter, (Slot(name, 0, 0, parameter.numel()),), (name,))


class OptimizerAdapter:
    """Reads and restores the state of an optimizer of torch's kind, however a framework has wrapped it.

    Args:
        optimizer: whose ``param_groups`` and ``state`` count.
        groups: for each of its ``param_groups``, what it works on.
        has_master: whether these are copies in another precision than the model's.
        refresh: takes the model's weights over into the copies.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Sequence[Holding]],
        *,
        has_master: bool = False,
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        assert len(groups) == len(optimizer.param_groups), "one list for each parameter group"
        self._optimizer = optimizer
        self._groups = groups
        self._has_master = has_master
        self.weights_changed = refresh

    @classmethod
    def direct(cls, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerAdapter:
        """Of an optimizer that works on the model's own parameters, whose ``names`` are given by their ids.

        What has no name isn't in the checkpoint.
        """
        groups = [
            [Holding.of(p, names[id(p)]) for p in group["params"] if id(p) in names] for group in optimizer.param_groups
        ]
        return cls(optimizer, groups)

    @property
    def kind(self) -> str:
        """Name of the optimizer's class."""
        return type(self._optimizer).__name__

    def state(self) -> OptimizerState:
        """The state as it is; the runs are views of live memory.

        Raises:
            CheckpointError: the optimizer keeps something that isn't for each element, nor a number.
        """
        state = OptimizerState(self.kind)
        for group, holdings in zip(self._optimizer.param_groups, self._groups, strict=True):
            names: list[str] = []
            for holding in holdings:
                names += holding.names
                values, numbers = divide(self._optimizer.state.get(holding.tensor, {}), holding)
                if values or numbers:
                    state.numbers.update(dict.fromkeys(holding.names, numbers))
                if self._has_master:
                    values[MASTER] = holding.tensor
                for key, value in values.items():
                    runs = state.quantities.setdefault(key, {})
                    runs.update(dict.fromkeys(holding.names, Run(0, value.detach().view(-1)[:0])))
                    runs.update({slot.name: _run(value, slot) for slot in holding.slots})
            settings = {key: value for key, value in group.items() if key != "params"}
            state.groups.append({**settings, "parameters": names})
        return state

    def allocate(self, quantities: Collection[str]) -> None:
        """Make room for quantities that a fresh optimizer doesn't have yet, so that :meth:`state` gives their runs."""
        for holding in self._holdings():
            own = self._optimizer.state[holding.tensor]
            for key in quantities:
                if key != MASTER and key not in own:
                    own[key] = torch.zeros_like(holding.tensor, requires_grad=False)

    def restore(self, numbers: Mapping[str, dict[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over what isn't for each element.

        Args:
            numbers: by parameter; one without any is left without a state.
            groups: hyperparameters with the names of their ``parameters``.

        Raises:
            CheckpointError: parameters that share a number here had different ones.
        """
        for holding in self._holdings():
            own = [numbers[name] for name in holding.names if name in numbers]
            if any(other != own[0] for other in own):
                raise CheckpointError(
                    f"the optimizer keeps one state for {holding.names[0]} and {len(holding.names) - 1} more, which "
                    f"had different ones ({own[0]} and others) when the checkpoint was written; load "
                    "without the optimizer's state"
                )
            if own:
                self._optimizer.state[holding.tensor].update(cloned(own[0]))
            else:
                # There had been no step, or none that changed it; optimizers take an empty state for a fresh one.
                self._optimizer.state.pop(holding.tensor, None)
        for group, holdings in zip(self._optimizer.param_groups, self._groups, strict=True):
            restore_group(group, [name for holding in holdings for name in holding.names], groups)

    def _holdings(self) -> Iterable[Holding]:
        for holdings in self._groups:
            yield from holdings


def _run(value: torch.Tensor, slot: Slot) -> Run:
    return Run(slot.start, value.detach().view(-1).narrow(0, slot.offset, slot.numel))


def divide(state: Mapping[str, Any], holding: Holding) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What a state has for each element of a holding, and what for all of it.

    Raises:
        CheckpointError: something is neither, and wouldn't fit another layout.
    """
    values: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == holding.tensor.shape:
            values[key] = value
        elif value is None or isinstance(value, bool | int | float):
            numbers[key] = value
        elif isinstance(value, torch.Tensor) and value.dim() == 0:
            numbers[key] = value.clone()
        else:
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise CheckpointError(
                f"the optimizer keeps {what} as {key!r} of {holding.names[0]}, which has no meaning on another layout; "
                "checkpoints hold one value for each element, such as Adam's moments, or numbers"
            )
    return values, numbers


def restore_group(group: dict[str, Any], names: Sequence[str], saved: Sequence[Mapping[str, Any]]) -> None:
    """Give a parameter group the hyperparameters that its parameters had.

    Raises:
        CheckpointError: they had different ones, or some had none.
    """
    sources = [index for index, other in enumerate(saved) if not set(names).isdisjoint(other["parameters"])]
    if not names or not sources:
        return
    if len(sources) > 1:
        first, second = (next(n for n in names if n in saved[index]["parameters"]) for index in sources[:2])
        raise CheckpointError(
            f"{first} and {second} are in one parameter group here, but were in two with other settings when the "
            "checkpoint was written; group the parameters as they were, or load without the optimizer's state"
        )
    group.update({key: cloned(value) for key, value in saved[sources[0]].items() if key != "parameters"})


def merged(states: Sequence[OptimizerState]) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Numbers and groups of all stages as one; groups with the same hyperparameters and place become one."""
    numbers: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for state in states:
        numbers = {**state.numbers, **numbers}
        for group in state.groups:
            settings = _settings(group)
            same = [other for other in groups if _settings(other) == settings]
            if same:
                same[0]["parameters"] = list(dict.fromkeys([*same[0]["parameters"], *group["parameters"]]))
            else:
                groups.append({**settings, "parameters": list(group["parameters"])})
    return numbers, groups


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "parameters"}


def cloned(value: Any) -> Any:
    """A copy of a number, a tensor or a dict of them that shares no memory."""
    if isinstance(value, dict):
        return {key: cloned(part) for key, part in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value
