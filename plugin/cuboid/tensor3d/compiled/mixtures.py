"""What routers and experts run in a graph in place of their own forwards: the same equations as outside of it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from cuboid.errors import UnsupportedModelError
from cuboid.tensor3d.compiled.blocks import block_of
from cuboid.tensor3d.compiled.collectives import gather, max_over, scatter, scatter_parts, sum_in_order
from cuboid.tensor3d.experts.dispatch import order_of
from cuboid.tensor3d.experts.expert_update import LowRankUpdate
from cuboid.tensor3d.experts.operators import expert_rows, multiply_rows, token_sums
from cuboid.tensor3d.experts.router import ShardedRouter, SumOverHidden
from cuboid.tensor3d.experts.sharded_experts import ShardedExperts, ShardedScaledExperts
from cuboid.tensor3d.layers.linear import autocast_dtype
from cuboid.tensor3d.layers.norm import statistics_dtype


class CompiledRouter(ShardedRouter):
    """:class:`ShardedRouter` in a graph. Its blocks are in the place of its parameters then."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, on ``[T/s, H/h]``."""
        hidden = self.mesh.along("hidden")
        with _SumInGraph(hidden) if hidden.size > 1 else nullcontext():
            return super(ShardedRouter, self).forward(*args, **kwargs)


class _SumInGraph(SumOverHidden):
    """:class:`SumOverHidden` in a graph."""

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype = autocast_dtype(input)
        wide = statistics_dtype(dtype)
        # Partial sums are rounded only when they are complete.
        with torch.autocast(input.device.type, enabled=False):
            products = nn.functional.linear(input.to(dtype).to(wide), weight.to(dtype).to(wide))
            result = sum_in_order(products, self._along).to(dtype)
        return result if bias is None else result + bias.to(dtype)


class CompiledExperts(ShardedExperts):
    """:class:`ShardedExperts` in a graph."""

    def updated(self, name: str, update: LowRankUpdate) -> Any:  # noqa: ARG002
        """Not supported in a graph.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(f"target_parameters: {name} has no rule in compiled layers; don't compile them")

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        """``[T/s, H/h]`` to the same shape; see :meth:`ShardedExperts.forward`."""
        form, hidden, sequence = self.form, self.mesh.along("hidden"), self.mesh.along("sequence")
        dtype, count = autocast_dtype(hidden_states), self.spec(form.up).shape[0]
        indices = gather(top_k_index.int(), 0, sequence)
        weights = gather(top_k_weights, 0, sequence)
        per_token = indices.shape[1]
        choices, places, experts, ends = order_of(indices, count)
        rows = expert_rows(gather(hidden_states.to(dtype), 0, sequence), choices, places, per_token)
        rows = multiply_rows(rows, self._in_out(form.up, dtype), ends)
        rows = scatter_parts(rows, form.parts, hidden)
        if form.up_bias is not None:
            rows = rows + block_of(self, form.up_bias).to(dtype)[experts]
        weight = weights.flatten().index_select(0, choices).unsqueeze(-1)
        rows = (getattr(self, form.activation)(rows) * weight).to(dtype)
        rows = multiply_rows(gather(rows, -1, hidden), self._in_out(form.down, dtype), ends)
        out = scatter(token_sums(rows, choices, places, per_token), 0, sequence)
        if form.down_bias is not None:
            bias = block_of(self, form.down_bias)
            shares = top_k_weights.new_zeros((top_k_weights.shape[0], count)).scatter(1, top_k_index, top_k_weights)
            out = out + (shares.to(bias.dtype) @ bias).to(dtype)
        return out.to(hidden_states.dtype)

    def _in_out(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        block = block_of(self, name).to(dtype)
        return block if self.form.in_first else block.transpose(1, 2)


class CompiledScaledExperts(CompiledExperts, ShardedScaledExperts):
    """:class:`ShardedScaledExperts` in a graph."""

    def forward(self, hidden_states: torch.Tensor) -> Any:  # type: ignore[override]
        """``[E · T/s, H/h]`` to the same shape; see :meth:`ShardedScaledExperts.forward`."""
        assert self.form.given_all is not None
        count, width = self.spec(self.form.up).shape[0], hidden_states.shape[-1]
        by_expert = hidden_states.view(count, -1, width)
        is_routed = (by_expert.detach() != 0).any(-1).to(torch.uint8)
        is_routed = max_over(is_routed, self.mesh.along("hidden"))
        indices = (is_routed > 0).t().sort(dim=-1, descending=True, stable=True).indices[:, : self.form.given_all]
        tokens = torch.arange(indices.shape[0], device=indices.device).repeat_interleave(self.form.given_all)
        index = indices.flatten()
        ones = hidden_states.new_ones((index.shape[0], 1))
        out = CompiledExperts.forward(self, by_expert[index, tokens], index[:, None], ones)
        return torch.zeros_like(by_expert).index_put((index, tokens), out).view(-1, width)
