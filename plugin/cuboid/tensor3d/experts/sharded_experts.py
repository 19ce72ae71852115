"""Experts of a mixture with weights of three dims, on a mesh; :mod:`.grouped_linear` has their shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cuboid.distributed.axis_collectives import all_reduce
from cuboid.distributed.no_compile import uncompiled
from cuboid.tensor3d.experts.dispatch import Dispatch
from cuboid.tensor3d.experts.expert_update import UpdatedModule
from cuboid.tensor3d.experts.grouped_linear import Features, GroupedProduct, Side, Tokens, gather_routing
from cuboid.tensor3d.layers.linear import autocast_dtype
from cuboid.tensor3d.running_forward import check_called_inside, forward_runs


@dataclass(frozen=True)
class ExpertForm:
    """Names and storage order of the parameters of a layer's experts.

    Args:
        up: name of the projection into the experts; of gate and up together if there is a gate.
        down: name of the projection out of them.
        up_bias, down_bias: names of their biases, ``[E, out]``; None without biases.
        in_first: whether weights are stored ``[E, in, out]`` instead of ``[E, out, in]``.
        gated: whether "up" has two features for each that "down" takes.
        parts: number of projections that are concatenated in the features of "up"; 1 if gate and up alternate.
        activation: name of the module's own function of the features of "up"; within a part, it combines neighbouring
            features at most.
        given_all: k, if the module gets every token for every expert, scaled by the expert's weight for the token,
            which is 0 for all but k experts; else None. See :class:`ShardedScaledExperts`.
    """

    up: str
    down: str
    up_bias: str | None
    down_bias: str | None
    in_first: bool
    gated: bool
    parts: int
    activation: str
    given_all: int | None = None

    @property
    def biases(self) -> tuple[str, ...]:
        """Names of the biases, if there are any."""
        return tuple(name for name in (self.up_bias, self.down_bias) if name is not None)

    @property
    def out_dim(self) -> int:
        """The dim of a weight's out features."""
        return 2 if self.in_first else 1


class ShardedExperts(UpdatedModule):
    """Mixin for a model's class of experts, which keeps its own activation and attributes."""

    form: ExpertForm

    def configure(self, form: ExpertForm) -> None:
        """Set the form, after :meth:`init_sharding`."""
        self.form = form
        self.gathered_once = frozenset(form.biases)
        self.updates = {}

    @uncompiled
    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        """Apply the experts to this rank's tokens.

        Args:
            hidden_states: ``[T/s, H/h]``, T/s tokens of this rank's rows of the batch and part of the sequence.
            top_k_index: ``[T/s, k]``, the experts of each token; the same on all ranks along `hidden`.
            top_k_weights: ``[T/s, k]``, their weights, likewise. Each rank's gradient is a partial sum over `hidden`.

        Returns:
            ``[T/s, H/h]``.
        """
        if not forward_runs():
            check_called_inside(self, self.mesh)
        if self.mesh.shape.size == 1:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        form, hidden = self.form, self.mesh.along("hidden")
        dtype = autocast_dtype(hidden_states)
        indices, weights = gather_routing(top_k_index, top_k_weights, self.mesh.along("sequence"))
        dispatch = Dispatch.of(indices, self.spec(form.up).shape[0])
        tokens = Tokens(self.mesh.along("sequence"))
        rows = self._multiply(form.up, hidden_states.to(dtype), dispatch, tokens, Features(hidden, form.parts))
        if form.up_bias is not None:
            rows = rows + self.unsharded(form.up_bias).to(dtype)[dispatch.experts]
        # Scale before "down", where a rank has the fewest features: "down" is linear, so a token's sum is the same.
        weight = weights.flatten().index_select(0, dispatch.choices).unsqueeze(-1)
        rows = (getattr(self, form.activation)(rows) * weight).to(dtype)
        out = self._multiply(form.down, rows, dispatch, Features(hidden), tokens)
        if form.down_bias is not None:
            bias = self.unsharded(form.down_bias)
            shares = top_k_weights.new_zeros((len(top_k_weights), len(bias))).scatter(1, top_k_index, top_k_weights)
            out = out + (shares.to(bias.dtype) @ bias).to(dtype)
        return out.to(hidden_states.dtype)

    def _multiply(self, name: str, x: torch.Tensor, dispatch: Dispatch, source: Side, target: Side) -> torch.Tensor:
        param, parameter = self.sharded_params[name], getattr(self, name)
        # Repeats ShardedLinear.operand, which is called too often to share a helper.
        shard, deferred = self.prefetched_shards.pop(name, (parameter, None))
        if param.optimizer_steps is not None:
            param.set_parameter(parameter)
        if shard.dtype != x.dtype and torch.is_autocast_enabled(shard.device.type):
            shard, deferred = parameter.to(x.dtype), None
        if name in self.updates:
            assert not self.is_prefetched, "a gather in another dtype may be in flight"
            # The sum is cast, not the weight: an update may be smaller than the weight's rounding.
            product = GroupedProduct(param, self.form.in_first, source, target, None, self.updates[name])
            return product(x, parameter, dispatch)
        return GroupedProduct(param, self.form.in_first, source, target, deferred)(x, shard, dispatch)


class ShardedScaledExperts(ShardedExperts):
    """Mixin for experts that get all tokens, each scaled by its weight for the expert, as Llama 4's do.

    Only a token's k experts compute: the others' outputs would be zeros.
    """

    act_fn: Callable[[torch.Tensor], torch.Tensor]

    @uncompiled
    def forward(self, hidden_states: torch.Tensor) -> Any:  # type: ignore[override]
        """Apply the experts to this rank's tokens.

        Args:
            hidden_states: ``[E · T/s, H/h]``, all tokens for the first expert, then for the second, and so on; zeros
                for experts that a token isn't routed to.

        Returns:
            ``[E · T/s, H/h]`` in the same order.
        """
        if not forward_runs():
            check_called_inside(self, self.mesh)
        if self.mesh.shape.size == 1:
            return super(ShardedExperts, self).forward(hidden_states)
        assert self.form.given_all is not None
        count, width = self.spec(self.form.up).shape[0], hidden_states.shape[-1]
        by_expert = hidden_states.view(count, -1, width)
        # [E, T/s]. This rank's part of a token's features may happen to be zeros, so combine those of all ranks.
        is_routed = (by_expert.detach() != 0).any(-1).to(torch.uint8)
        is_routed = all_reduce(is_routed, self.mesh.along("hidden"), dist.ReduceOp.MAX)
        # Stable: all ranks along `hidden` must choose the same, also among experts that get zeros.
        indices = (is_routed > 0).t().sort(dim=-1, descending=True, stable=True).indices[:, : self.form.given_all]
        tokens = torch.arange(len(indices), device=indices.device).repeat_interleave(self.form.given_all)
        index = indices.flatten()
        out = super().forward(by_expert[index, tokens], index[:, None], hidden_states.new_ones((len(index), 1)))
        return torch.zeros_like(by_expert).index_put((index, tokens), out).view(-1, width)

    def gate(self, features: torch.Tensor) -> torch.Tensor:
        """The experts' activation of the features of gate and up: ``[R, 2F]`` to ``[R, F]``."""
        gate, up = features.chunk(2, dim=-1)
        return up * self.act_fn(gate)
