"""Let a ``torch.optim`` optimizer step on gradients that are summed over data-parallel replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from cuboid.checkpoint.optimizer_state import OptimizerAdapter
from cuboid.distributed.mesh import Mesh
from cuboid.optim.flat_params import FlatParameters
from cuboid.optim.grad_buffer import GradientBuffer


class ReplicaOptimizer(Protocol):
    """An optimizer over replicas. :meth:`reduce`, :meth:`reopen`, :meth:`clear` and :meth:`step` are collective.

    Attributes:
        buffers: why gradients are kept in buffers of what trained at the beginning; empty if they aren't.
        is_flat: whether it steps flat tensors, with gradients of their own.
    """

    buffers: str
    is_flat: bool

    def has_gradients(self) -> bool:
        """Whether any gradient that isn't reduced yet differs from zero; waits for the device."""

    @property
    def flat_parameters(self) -> Sequence[nn.Parameter]:
        """Those that are stepped, or have gradients, as parts of flat tensors; none if each is by itself."""

    def elsewhere(self, *, reduced: bool) -> Iterator[nn.Parameter]:
        """The parameters whose ``.grad`` isn't what is stepped on, before or after :meth:`reduce`."""

    def reduce(self) -> None:
        """Sum the gradients over the replicas."""

    def reopen(self) -> None:
        """After :meth:`reduce`, allow further gradients to be accumulated and reduced once more."""

    def clear(self) -> None:
        """Zero the gradients."""

    def step(self) -> None:
        """Step, and update the parameters of all replicas."""

    def gradients(self, counted: set[int]) -> list[torch.Tensor]:
        """The reduced gradients that this rank's optimizer steps on, of parameters whose ``id`` is in ``counted``."""

    def adapter(self, names: Mapping[int, str]) -> OptimizerAdapter:
        """The optimizer's state for checkpoints."""


def replica_optimizer(
    optimizer: torch.optim.Optimizer, mesh: Mesh, dtype: torch.dtype | None, *, split: bool
) -> ReplicaOptimizer:
    """Prepare an optimizer and its parameters, in place.

    Args:
        optimizer: without a state.
        mesh: of this rank, connected.
        dtype: to cast the parameters to; None to keep theirs. In a lower precision than float32, the optimizer steps on
            master weights, and gradients are accumulated, in float32.
        split: whether to shard the optimizer's state over the replicas (ZeRO-1).
    """
    replicas = mesh.topology.data
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_low_precision = any((dtype or parameter.dtype).itemsize < torch.float32.itemsize for parameter in trained)
    if is_low_precision or (split and replicas > 1):
        return _FlatOptimizer(optimizer, mesh, dtype, split=split)
    return _DirectOptimizer(optimizer, mesh)


def is_fresh(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer hasn't been stepped: it has no state, or (Adagrad) only the one from its constructor."""
    made_with_state = type(optimizer) is torch.optim.Adagrad
    return not optimizer.state or (made_with_state and not any(state["step"] for state in optimizer.state.values()))


def fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Recreate the state that Adagrad's constructor makes, for the optimizer's present parameters."""
    if type(optimizer) is not torch.optim.Adagrad:
        return
    optimizer.state.clear()
    groups = [{**group, "params": group["params"]} for group in optimizer.param_groups if group["params"]]
    if groups:
        # torch fills the sums with the constructor's argument, whatever a group says.
        initial = optimizer.defaults["initial_accumulator_value"]
        optimizer.state.update(torch.optim.Adagrad(groups, initial_accumulator_value=initial).state)


def replicas_of(mesh: Mesh) -> dist.ProcessGroup | None:
    """The replicas' group, if there are several."""
    return mesh.data_parallel_group if mesh.topology.data > 1 else None


class _DirectOptimizer:
    """Steps on the model's own parameters."""

    is_flat = False

    def __init__(self, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
        self._optimizer = optimizer
        self._replicas, self._group = mesh.topology.data, replicas_of(mesh)
        # Without replicas nothing is communicated, so gradients needn't be in one buffer.
        self._buffered = [] if self._group is None else [p for p in self._parameters() if p.requires_grad]
        self._buffers = [GradientBuffer(parameters, dtype) for dtype, parameters in _by_dtype(self._buffered).items()]
        self.buffers = "" if self._group is None else f"they are reduced over {self._replicas} replicas at once"

    def has_gradients(self) -> bool:
        return any(bool(buffer.collect().any()) for buffer in self._buffers)

    @property
    def flat_parameters(self) -> Sequence[nn.Parameter]:
        return self._buffered

    def elsewhere(self, *, reduced: bool) -> Iterator[nn.Parameter]:  # noqa: ARG002
        return iter(())

    def reduce(self) -> None:
        for buffer in self._buffers:
            dist.all_reduce(buffer.collect(), group=self._group)

    def reopen(self) -> None:
        for buffer in self._buffers:
            # Every replica has the sum now, and the next all-reduce adds it once for each.
            buffer.flat.div_(self._replicas)

    def clear(self) -> None:
        for buffer in self._buffers:
            buffer.clear()
        if not self._buffers:
            # Not the instance's, which a wrapper may have replaced by its own.
            type(self._optimizer).zero_grad(self._optimizer, set_to_none=True)

    def step(self) -> None:
        self._optimizer.step()

    def gradients(self, counted: set[int]) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters() if p.grad is not None and id(p) in counted]

    def adapter(self, names: Mapping[int, str]) -> OptimizerAdapter:
        return OptimizerAdapter.direct(self._optimizer, names)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


class _FlatOptimizer:
    """Steps on flat master weights: of all parameters or, with ZeRO-1, of this replica's share."""

    is_flat = True

    def __init__(self, optimizer: torch.optim.Optimizer, mesh: Mesh, dtype: torch.dtype | None, *, split: bool) -> None:
        self._optimizer = optimizer
        self._replicas, self._group = mesh.topology.data, replicas_of(mesh)
        share = (mesh.coordinate.data, mesh.topology.data) if split else (0, 1)
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._flats: list[list[FlatParameters]] = []
        for group in optimizer.param_groups:
            flats = []
            for param_dtype, parameters in _by_dtype([p for p in group["params"] if p.requires_grad]).items():
                working = dtype or param_dtype
                master = working if working.itemsize >= torch.float32.itemsize else torch.float32
                flats.append(FlatParameters(parameters, master, working, share))
            group["params"] = [flat.master for flat in flats]
            self._flats.append(flats)
        fill_state(optimizer)
        self.flat_parameters = trained
        copies = any(flat.has_copies for flat in self._all())
        self.buffers = "masters are in float32" if copies else "ZeRO 1 divides them between replicas"

    def has_gradients(self) -> bool:
        return any(flat.has_gradients() for flat in self._all())

    def elsewhere(self, *, reduced: bool) -> Iterator[nn.Parameter]:
        for flat in self._all():
            yield from flat.elsewhere(reduced=reduced)

    def reduce(self) -> None:
        for flat in self._all():
            flat.reduce(self._group)

    def reopen(self) -> None:
        for flat in self._all():
            flat.reopen(self._replicas)

    def clear(self) -> None:
        for flat in self._all():
            flat.clear()

    def step(self) -> None:
        for flat in self._all():
            flat.take_changes()
        self._optimizer.step()
        for flat in self._all():
            flat.publish(self._group)

    def gradients(self, counted: set[int]) -> list[torch.Tensor]:
        return [gradient for flat in self._all() for gradient in flat.gradients(counted)]

    def adapter(self, names: Mapping[int, str]) -> OptimizerAdapter:
        stepped = [[flat.optimizer_tensor(names) for flat in flats] for flats in self._flats]
        copies = any(flat.has_copies for flat in self._all())
        return OptimizerAdapter(self._optimizer, stepped, has_master=copies, refresh=self._refresh)

    def _refresh(self) -> None:
        with torch.no_grad():
            for flat in self._all():
                if flat.has_copies:
                    flat.weights_changed()

    def _all(self) -> Iterator[FlatParameters]:
        for flats in self._flats:
            yield from flats


def _by_dtype(parameters: list[nn.Parameter]) -> dict[torch.dtype, list[nn.Parameter]]:
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return groups
