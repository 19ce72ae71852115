"""Optimizers whose rule needs whole tensors, such as Muon and Adafactor: one rank of the mesh steps each tensor.

A mesh cuts each tensor over its ranks. One of them is the tensor's *owner*, chosen so that all have about as much to
compute. One step:

1. Before the optimizer's ``step``, each rank sends the owners its shards of gradients and weights, in one all-to-all.
2. The owners put whole tensors together, in Hugging Face's shape, and the optimizer's own ``step`` runs on these.
3. The owners send each rank its shards of the new weights, in another all-to-all.

The optimizer's state is that of whole tensors, and stays with the owner: over all ranks, it is there once. The weights
travel with the gradients because scripts may change them between steps.

Where a framework steps master weights, laid end to end in a flat tensor, a rank's shards are pieces of that. ZeRO cuts
it between replicas, regardless of where shards begin; then the ranks of all replicas are one set, each tensor has one
owner among them, and a rank sends and receives the pieces that it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cuboid.checkpoint.optimizer_state import OptimizerAdapter, OptimizerTensor
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


@dataclass(frozen=True)
class FlatShards:
    """Where ranks have their shards, if an optimizer steps flat tensors instead of parameters.

    Attributes:
        parameters: this rank's, by name.
        ranges: of each of ``ranks``, by name, the elements of the flattened shard that are in its flat tensors.
        ranks: world ranks of the mesh, or those of all replicas if these have other elements each.
        group: connects them; None for one rank.
    """

    parameters: Mapping[str, nn.Parameter]
    ranges: Sequence[Mapping[str, range]]
    ranks: Sequence[int]
    group: dist.ProcessGroup | None


@dataclass
class _Tensor:
    """A tensor that one rank steps.

    Attributes:
        name: the parameter's name in checkpoints.
        shape: of the whole tensor.
        spec: how the mesh shards it; None if it doesn't.
        source: what this rank's optimizer would step: the parameter, or a flat tensor.
        offset: where this rank's elements begin in the flattened ``source``.
        ranges: of each rank, the elements of the flattened shard that it has.
        owner: index of the rank that steps it.
        key: what the owner's optimizer steps, and keeps a state for. Empty between steps, unless it is ``source``.
    """

    name: str
    shape: tuple[int, ...]
    spec: ShardingSpec | None
    source: torch.Tensor
    offset: int
    ranges: Sequence[range]
    owner: int
    key: nn.Parameter | None = None

    def elements(self, rank: int) -> torch.Tensor:
        """The weights that ``rank``, which must be this one, has of its shard, ``[elements]``, without a copy."""
        return self.source.detach().view(-1).narrow(0, self.offset, len(self.ranges[rank]))

    def gradient(self, rank: int) -> torch.Tensor | None:
        """The gradient of :meth:`elements`."""
        if self.source.grad is None:
            return None
        return self.source.grad.detach().reshape(-1).narrow(0, self.offset, len(self.ranges[rank]))


class WholeTensors:
    """Lets the steps of an optimizer see whole tensors, by hooks before and after its ``step``.

    Args:
        adapter: of the optimizer; says which parameters its groups have, and where.
        rule: which groups need whole tensors. The others keep their shards.
        specs: how the mesh shards each parameter, by name.
        mesh: of this rank, connected.
        flat: where shards are, if the optimizer steps flat tensors.

    Attributes:
        keys: for each parameter that is stepped whole, what its state belongs to in the optimizer: on its owner, and
            None on other ranks.
    """

    def __init__(
        self,
        adapter: OptimizerAdapter,
        rule: WholeRule,
        specs: Mapping[str, ShardingSpec],
        mesh: Mesh,
        flat: FlatShards | None = None,
    ) -> None:
        self._optimizer, self._mesh, self._flat = adapter.optimizer, mesh, flat
        self._ranks = mesh.mesh_ranks if flat is None else flat.ranks
        self._rank = self._ranks.index(mesh.rank)
        self._group = mesh.along(*AXES).process_group if flat is None else flat.group
        #: For each place in the mesh, the indices of the ranks there: one of each replica.
        self._places = [
            [self._ranks.index(rank) for rank in ranks if rank in self._ranks] for ranks in mesh.stage_ranks
        ]
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
            applies = rule.applies(group)
            groups.append([x for entry in stepped for x in self._tensors_of(entry, specs)] if applies else None)
        every = [x for tensors in groups for x in tensors or ()]
        cut = [x for x in every if self._flat is not None or (x.spec is not None and len(self._ranks) > 1)]
        owners = assign([rule.cost(x.shape) for x in cut], range(len(self._ranks)))
        for tensor, owner in zip(cut, owners, strict=True):
            tensor.owner = owner
        is_cut = set(map(id, cut))
        for tensor in every:
            if id(tensor) not in is_cut:
                # All of it is here already.
                assert isinstance(tensor.source, nn.Parameter)
                tensor.key = tensor.source
            elif tensor.owner == self._rank:
                tensor.key = nn.Parameter(tensor.source.detach().new_empty(0))
                marked = tensor.source if self._flat is None else self._flat.parameters[tensor.name]
                # DeepSpeed's Muon marks parameters, by attributes, and its ZeRO hangs buffers on them.
                marks = {key: value for key, value in vars(marked).items() if isinstance(value, bool | int | str)}
                vars(tensor.key).update(marks)
        return groups

    def _tensors_of(self, entry: OptimizerTensor, specs: Mapping[str, ShardingSpec]) -> Iterator[_Tensor]:
        """The tensors of which a tensor that the optimizer steps has elements, here or on another rank."""
        offsets = {slot.name: slot.offset for slot in entry.slots}
        for name in entry.names:
            spec = specs.get(name)
            shard = entry.tensor if self._flat is None else self._flat.parameters[name]
            ranges = [range(shard.numel())] * len(self._ranks)
            if self._flat is not None:
                ranges = [by_name[name] for by_name in self._flat.ranges]
            shape = tuple(shard.shape) if spec is None else spec.shape
            yield _Tensor(name, shape, spec, entry.tensor, offsets.get(name, 0), ranges, self._rank)

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
                for tensor in (x for x in cut if x.owner == owner and self._sends(x, self._rank)):
                    gradient = tensor.gradient(self._rank)
                    weights = tensor.elements(self._rank)
                    present = weights.new_full((1,), float(gradient is not None))
                    pieces = present, torch.zeros_like(weights) if gradient is None else gradient.to(dtype), weights
                    outgoing += pieces
                    counts[owner] += sum(x.numel() for x in pieces)
            owned = [x for x in cut if x.owner == self._rank]
            expected = [
                sum(1 + 2 * len(x.ranges[rank]) for x in owned if self._sends(x, rank))
                for rank in range(len(self._ranks))
            ]
            received = self._exchange(cut[0].source, outgoing, counts, expected)
            self._put_together(owned, received)

    def _sends(self, tensor: _Tensor, rank: int) -> bool:
        """Whether a rank has elements that the owner needs; what the mesh doesn't shard is in every place of it."""
        return bool(tensor.ranges[rank]) and (tensor.spec is not None or rank in self._places[0])

    def _put_together(self, owned: Sequence[_Tensor], received: Sequence[torch.Tensor]) -> None:
        """Make whole tensors of what each rank has sent."""
        flags = []
        starts = [0] * len(self._ranks)
        for tensor in owned:
            assert tensor.key is not None
            gradient, weights = (tensor.source.detach().new_empty(tensor.shape) for _ in range(2))
            present = []
            for place in self._places:
                pieces = self._pieces_of(tensor, place, received, starts)
                if pieces:
                    of_flags, *shards = (
                        torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*pieces, strict=True)
                    )
                    present.append(of_flags)
                    self._put(gradient, tensor, place, shards[0])
                    self._put(weights, tensor, place, shards[1])
            flags.append(torch.cat(present).sum())
            # Not the gradient first: it must have the parameter's shape.
            tensor.key.data, tensor.key.grad = weights, gradient
        # The rule of an optimizer decides on the host what to do without a gradient, so the host has to know.
        for tensor, present_anywhere in zip(owned, torch.stack(flags).tolist() if flags else (), strict=True):
            if not present_anywhere:
                assert tensor.key is not None
                tensor.key.grad = None

    def _pieces_of(
        self, tensor: _Tensor, place: Sequence[int], received: Sequence[torch.Tensor], starts: list[int]
    ) -> list[tuple[torch.Tensor, ...]]:
        """What the ranks of a place have sent of a tensor, in the order of its elements; ``starts`` moves on.

        Returns:
            Of each rank, whether it has a gradient, and its elements of the gradient and of the weights.
        """
        pieces = []
        for _, rank in sorted((tensor.ranges[rank].start, rank) for rank in place if self._sends(tensor, rank)):
            count = len(tensor.ranges[rank])
            pieces.append(received[rank].narrow(0, starts[rank], 1 + 2 * count).split([1, count, count]))
            starts[rank] += 1 + 2 * count
        return pieces

    def _put(self, full: torch.Tensor, tensor: _Tensor, place: Sequence[int], shard: torch.Tensor) -> None:
        """Write the shard of a place of the mesh into a whole tensor."""
        if tensor.spec is None:
            full.copy_(shard.view(tensor.shape))
            return
        at = self._mesh.topology.coordinate(self._ranks[place[0]])
        shard = shard.view(tensor.spec.shard_shape(self._mesh.shape))
        put_shard(full, shard, tensor.spec, self._mesh.shape, at)

    def _scatter(self, tensors: Sequence[_Tensor]) -> None:
        """Give all ranks their elements of the new weights."""
        for cut in self._cut(tensors).values():
            owned = [x for x in cut if x.owner == self._rank]
            ranks = range(len(self._ranks))
            outgoing = [self._elements_for(x, rank) for rank in ranks for x in owned if x.ranges[rank]]
            counts = [sum(len(x.ranges[rank]) for x in owned) for rank in ranks]
            expected = [sum(len(x.ranges[self._rank]) for x in cut if x.owner == owner) for owner in ranks]
            received = self._exchange(cut[0].source, outgoing, counts, expected)
            for tensor in owned:
                assert tensor.key is not None
                tensor.key.grad = None
                tensor.key.data = tensor.key.detach().new_empty(0)
            for owner, row in enumerate(received):
                of_owner = [x for x in cut if x.owner == owner]
                for tensor, values in zip(
                    of_owner, row.split([len(x.ranges[self._rank]) for x in of_owner]), strict=True
                ):
                    tensor.elements(self._rank).copy_(values)

    def _elements_for(self, tensor: _Tensor, rank: int) -> torch.Tensor:
        """A rank's elements of an owned tensor, padding included, flattened."""
        assert tensor.key is not None
        shard = tensor.key.detach()
        if tensor.spec is not None:
            at = self._mesh.topology.coordinate(self._ranks[rank])
            shard = take_shard(shard, tensor.spec, self._mesh, at)
        elements = tensor.ranges[rank]
        return shard.reshape(-1)[elements.start : elements.stop]

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
        if len(self._ranks) == 1:
            return [sent]
        received = sent.new_empty(sum(expected))
        assert self._group is not None, "a mesh that isn't connected"
        dist.all_to_all_single(received, sent, list(expected), list(counts), group=self._group)
        along = axes_label(self._mesh.split_axes(AXES))
        for rank, count in enumerate(counts):
            if count and rank != self._rank:
                label = along if self._ranks[rank] in self._mesh.mesh_ranks else "data"
                self._mesh.comm_counter.record_send(label, count * sent.itemsize)
        return received.split(list(expected))
