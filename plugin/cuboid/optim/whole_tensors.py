"""Optimizers whose rule needs whole tensors, such as Muon and Adafactor: one rank of the mesh steps each tensor.

A mesh cuts each tensor over its ranks. One of them is the tensor's *owner*, chosen so that all have about as much to
compute. One step:

1. Before the optimizer's ``step``, each rank sends the owners its shards of gradients and weights, in one all-to-all.
2. The owners put whole tensors together, in Hugging Face's shape, and the optimizer's own ``step`` runs on these.
3. The owners send each rank its shards of the new weights, in another all-to-all.

The optimizer's state is that of whole tensors, and stays with the owner: over all ranks, it is there once. The weights
travel with the gradients because scripts may change them between steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cuboid.checkpoint.optimizer_state import OptimizerAdapter, Slot
from cuboid.checkpoint.save_planner import assign
from cuboid.distributed.comm_counter import axes_label
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES
from cuboid.errors import OptimizerError
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, put_shard, take_shard


def newton_schulz_cost(shape: Sequence[int]) -> int:
    """Relative cost of the iteration of Muon: products of a matrix with its smaller square."""
    return math.prod(shape) * min(shape)


@dataclass(frozen=True)
class WholeRule:
    """Which parameter groups of an optimizer need whole tensors, and the relative cost of a step on one of a shape."""

    applies: Callable[[Mapping[str, Any]], bool] = lambda _: True
    cost: Callable[[Sequence[int]], int] = math.prod


@dataclass
class _Tensor:
    """A tensor that one rank steps.

    Attributes:
        name: the parameter's name in checkpoints.
        shape: of the whole tensor.
        spec: how the mesh shards it; None if it doesn't.
        source: what this rank's optimizer would step: the parameter.
        slot: the part of ``source`` that is this rank's shard.
        owner: index in the mesh of the rank that steps it.
        key: what the owner's optimizer steps, and keeps a state for. Empty between steps, unless it is ``source``.
    """

    name: str
    shape: tuple[int, ...]
    spec: ShardingSpec | None
    source: torch.Tensor
    slot: Slot
    owner: int
    key: nn.Parameter | None = None

    @property
    def flat_shard(self) -> torch.Tensor:
        """This rank's shard, ``[elements]``, without a copy."""
        return self.source.detach().view(-1).narrow(0, self.slot.offset, self.slot.numel)

    def flat_gradient(self) -> torch.Tensor | None:
        """The gradient of :attr:`flat_shard`."""
        if self.source.grad is None:
            return None
        return self.source.grad.detach().reshape(-1).narrow(0, self.slot.offset, self.slot.numel)


class WholeTensors:
    """Lets the steps of an optimizer see whole tensors, by hooks before and after its ``step``.

    Args:
        adapter: of the optimizer; says which parameters its groups have, and where.
        rule: which groups need whole tensors. The others keep their shards.
        specs: how the mesh shards each parameter, by name.
        mesh: of this rank, connected.

    Attributes:
        keys: for each parameter that is stepped whole, what its state belongs to in the optimizer: on its owner, and
            None on other ranks.
    """

    def __init__(
        self, adapter: OptimizerAdapter, rule: WholeRule, specs: Mapping[str, ShardingSpec], mesh: Mesh
    ) -> None:
        self._optimizer, self._mesh = adapter.optimizer, mesh
        self._ranks = mesh.mesh_ranks
        self._rank = self._ranks.index(mesh.rank)
        self._along = mesh.along(*AXES)
        self._groups = self._tensors(adapter, rule, specs)
        self.keys: dict[str, torch.Tensor | None] = {x.name: x.key for group in self._groups for x in group or ()}
        #: Of the running step: for each group the parameters that its list had, and the tensors that are stepped.
        self._replaced: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
        self._stepped: list[_Tensor] = []
        self._depth = 0
        self._optimizer.register_step_pre_hook(self._before)
        self._optimizer.register_step_post_hook(self._after)
        #: By ``id``, because ZeRO shows an optimizer one group at a time.
        self._by_group = {
            id(group): tensors
            for group, tensors in zip(self._optimizer.param_groups, self._groups, strict=True)
            if tensors is not None
        }

    def _tensors(
        self, adapter: OptimizerAdapter, rule: WholeRule, specs: Mapping[str, ShardingSpec]
    ) -> list[list[_Tensor] | None]:
        """The tensors of each group; None for a group whose tensors stay shards."""
        groups: list[list[_Tensor] | None] = []
        for group, stepped in zip(self._optimizer.param_groups, adapter.groups, strict=True):
            if not rule.applies(group):
                groups.append(None)
                continue
            tensors = []
            for entry in stepped:
                for slot in entry.slots:
                    spec = specs.get(slot.name)
                    shape = tuple(entry.tensor.shape) if spec is None else spec.shape
                    tensors.append(_Tensor(slot.name, shape, spec, entry.tensor, slot, self._rank))
            groups.append(tensors)
        cut = [x for tensors in groups for x in tensors or () if x.spec is not None and len(self._ranks) > 1]
        owners = assign([rule.cost(x.shape) for x in cut], range(len(self._ranks)))
        for tensor, owner in zip(cut, owners, strict=True):
            tensor.owner = owner
        is_cut = set(map(id, cut))
        for tensor in (x for tensors in groups for x in tensors or ()):
            if id(tensor) not in is_cut:
                # All of it is here already.
                assert isinstance(tensor.source, nn.Parameter)
                tensor.key = tensor.source
            elif tensor.owner == self._rank:
                tensor.key = nn.Parameter(tensor.source.detach().new_empty(0))
                # DeepSpeed's Muon marks parameters, by attributes.
                vars(tensor.key).update(vars(tensor.source))
        return groups

    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:
            # A subclass whose ``step`` calls that of its base.
            return
        if any(value is not None for value in (*arguments[1:], options.get("closure"))):
            raise OptimizerError(
                f"{type(optimizer).__name__}.step was given a closure, whose gradients would come too late to be "
                "gathered; run backward first, and call step without arguments"
            )
        groups = [group for group in optimizer.param_groups if id(group) in self._by_group]
        # A frozen parameter has no gradient on any rank.
        trained = [[x for x in self._by_group[id(group)] if x.source.requires_grad] for group in groups]
        self._replaced = [(group, group["params"]) for group in groups]
        self._stepped = [x for tensors in trained for x in tensors]
        self._gather(self._stepped)
        for group, tensors in zip(groups, trained, strict=True):
            # Also without the stand-ins that a framework wants in groups that this stage has no parameter of.
            group["params"] = [x.key for x in tensors if x.key is not None]

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._scatter(self._stepped)
        for group, parameters in self._replaced:
            group["params"] = parameters
        self._replaced, self._stepped = [], []

    def _gather(self, tensors: Sequence[_Tensor]) -> None:
        """Give the owners' keys the whole weights and gradients."""
        for dtype, cut in self._cut(tensors).items():
            # To each owner, for each of its tensors: whether there is a gradient, the gradient, the weights.
            outgoing: list[torch.Tensor] = []
            counts = [0] * len(self._ranks)
            for owner in range(len(self._ranks)):
                for tensor in (x for x in cut if x.owner == owner):
                    gradient = tensor.flat_gradient()
                    weights = tensor.flat_shard
                    present = weights.new_full((1,), float(gradient is not None))
                    pieces = present, torch.zeros_like(weights) if gradient is None else gradient.to(dtype), weights
                    outgoing += pieces
                    counts[owner] += sum(x.numel() for x in pieces)
            owned = [x for x in cut if x.owner == self._rank]
            expected = [sum(1 + 2 * x.slot.numel for x in owned)] * len(self._ranks)
            received = self._exchange(cut[0].source, outgoing, counts, expected)
            self._put_together(owned, received)

    def _put_together(self, owned: Sequence[_Tensor], received: Sequence[torch.Tensor]) -> None:
        """Make whole tensors of what each rank has sent."""
        flags = []
        start = 0
        for tensor in owned:
            assert tensor.key is not None
            assert tensor.spec is not None
            numel, shape = tensor.slot.numel, tensor.spec.shard_shape(self._mesh.shape)
            gradient, weights = (tensor.source.detach().new_empty(tensor.shape) for _ in range(2))
            for rank, row in zip(self._ranks, received, strict=True):
                at = self._mesh.topology.coordinate(rank)
                for place, full in ((start + 1, gradient), (start + 1 + numel, weights)):
                    put_shard(full, row.narrow(0, place, numel).view(shape), tensor.spec, self._mesh.shape, at)
            flags.append(torch.stack([row[start] for row in received]).sum())
            # Not the gradient first: it must have the parameter's shape.
            tensor.key.data, tensor.key.grad = weights, gradient
            start += 1 + 2 * numel
        # The rule of an optimizer decides on the host what to do without a gradient, so the host has to know.
        for tensor, present in zip(owned, torch.stack(flags).tolist() if flags else (), strict=True):
            if not present:
                assert tensor.key is not None
                tensor.key.grad = None

    def _scatter(self, tensors: Sequence[_Tensor]) -> None:
        """Give all ranks the shards of the new weights."""
        for cut in self._cut(tensors).values():
            owned = [x for x in cut if x.owner == self._rank]
            outgoing = [self._shard_of(x, rank) for rank in self._ranks for x in owned]
            count = sum(x.slot.numel for x in owned)
            counts = [sum(x.slot.numel for x in cut if x.owner == owner) for owner in range(len(self._ranks))]
            received = self._exchange(cut[0].source, outgoing, [count] * len(self._ranks), counts)
            for tensor in owned:
                assert tensor.key is not None
                tensor.key.grad = None
                tensor.key.data = tensor.key.detach().new_empty(0)
            for owner, row in enumerate(received):
                shards = [x for x in cut if x.owner == owner]
                for tensor, values in zip(shards, row.split([x.slot.numel for x in shards]), strict=True):
                    tensor.flat_shard.copy_(values)

    def _shard_of(self, tensor: _Tensor, rank: int) -> torch.Tensor:
        """A rank's shard of an owned tensor, padding included, flattened."""
        assert tensor.key is not None
        assert tensor.spec is not None
        at = self._mesh.topology.coordinate(rank)
        return take_shard(tensor.key.detach(), tensor.spec, self._mesh, at).view(-1)

    def _cut(self, tensors: Sequence[_Tensor]) -> dict[torch.dtype, list[_Tensor]]:
        """The tensors that have to be put together, by dtype, in the same order on all ranks."""
        by_dtype: dict[torch.dtype, list[_Tensor]] = {}
        for tensor in tensors:
            if tensor.key is not tensor.source:
                by_dtype.setdefault(tensor.source.dtype, []).append(tensor)
        return by_dtype

    def _exchange(
        self, like: torch.Tensor, outgoing: Sequence[torch.Tensor], counts: Sequence[int], expected: Sequence[int]
    ) -> Sequence[torch.Tensor]:
        """Send ``counts[r]`` of the elements laid end to end to each rank r; returns the ``expected[r]`` of rank r."""
        sent = torch.cat([like.detach().new_empty(0), *outgoing])
        received = sent.new_empty(sum(expected))
        group = self._along.process_group
        assert group is not None, "a mesh that isn't connected"
        dist.all_to_all_single(received, sent, list(expected), list(counts), group=group)
        label = axes_label(self._along.axes)
        for rank, count in enumerate(counts):
            if count and rank != self._rank:
                self._mesh.comm_counter.record_send(label, count * sent.itemsize)
        return received.split(list(expected))
