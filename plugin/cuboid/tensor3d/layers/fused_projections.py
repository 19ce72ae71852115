"""The projections of one input fused: one all-gather of the sequence, and one reduce-scatter for all of their outputs.

Attention and MLP blocks take the residual stream ``[B/b, S/s, H/h]`` and call their projections one by one. A hook
computes all of them together before the block's own code runs, and each projection returns its result when it is
called. Only the input's shard is saved for backward, never the gathered tensor, which Colossal-AI's 3-D layers save and
which takes s times the memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from cuboid.distributed.axis_collectives import positions_are_whole
from cuboid.distributed.no_compile import uncompiled
from cuboid.errors import UnsupportedModelError
from cuboid.tensor3d.layers.input_gather import GatherSequence, InputGather, NoGather
from cuboid.tensor3d.layers.late_gather import GatherPositions, LateGather
from cuboid.tensor3d.layers.linear import (
    ShardedLinear,
    attach_results,
    autocast_dtype,
    checked_dtype,
    leave_weight_gradients,
    take_results,
)
from cuboid.tensor3d.layers.linear_op import LinearOp, Operand
from cuboid.tensor3d.layers.norm import LateNorm
from cuboid.tensor3d.running_forward import check_called_inside, forward_runs


class InputProducts(Protocol):
    """The products of a forward: those of the projections, and perhaps one with adapters' first factors.

    Attributes:
        linear_op, operands: what is to be multiplied with the projections' input.
    """

    @property
    def linear_op(self) -> LinearOp:
        """See above."""
        ...

    @property
    def operands(self) -> Sequence[Operand]:
        """See above."""
        ...

    def attach(
        self, full: torch.Tensor, shard: torch.Tensor, results: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Attach the factors' results to the gathered input; returns those of the projections."""
        ...


class InputFactors(Protocol):
    """First factors of low-rank updates of the projections; see :mod:`cuboid.tensor3d.low_rank_inputs`."""

    def products(
        self, linear_op: LinearOp, operands: Sequence[Operand], x: torch.Tensor, dtype: torch.dtype
    ) -> InputProducts | None:
        """For a forward of ``x``, which is multiplied in ``dtype``; None if no factors multiply it."""
        ...


class FusedProjections:
    """A forward pre-hook of the module that calls the projections.

    Args:
        projections: all "up" projections of a block, or the head.
        down_projections: the block's "down" projections, whose backward runs before that of ``projections``.
        gather: how the input is gathered; by default along the sequence.

    Attributes:
        factors: those of adapters' updates of the projections, which multiply the input too; None if there are none.
    """

    factors: InputFactors | None = None

    def __init__(
        self,
        projections: Sequence[ShardedLinear],
        down_projections: Sequence[ShardedLinear] = (),
        *,
        gather: InputGather | None = None,
    ) -> None:
        self.projections = list(projections)
        self._down_projections = list(down_projections)
        gather = GatherSequence(projections[0].mesh) if gather is None else gather
        self._linear_op = LinearOp(gather, [layer.product for layer in projections])
        self._is_flat = False

    @property
    def input_gather(self) -> InputGather:
        """How the input is gathered."""
        return self._linear_op.input_gather

    @property
    def is_fp8(self) -> bool:
        """Whether all of the products multiply in fp8."""
        return self._linear_op.is_fp8

    def leave(self, x: torch.Tensor, dy: Sequence[torch.Tensor]) -> None:
        """Add the input's shard and the outputs' gradients to the store of weight gradients, after a graph's backward.

        Args:
            x: see :meth:`__call__`.
            dy: for each of the projections.
        """
        leave_weight_gradients(self._linear_op, self.projections, x, dy)

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the block's input ``[B/b, S/s, H/h]`` by the gathered one, ``[B/b, S, H/h]``.

        The projections' results are attached to the gathered tensor. Flattened tokens ``[B/b · S/s, H/h]``, as shared
        experts may get them, are treated as one sequence.
        """
        if not forward_runs():
            check_called_inside(module, self.projections[0].mesh)
        if not args and "hidden_states" not in kwargs:
            raise UnsupportedModelError(f"{type(module).__name__} was called without hidden_states; no rule for that")
        shard: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        self._is_flat = shard.dim() == 2
        if self._is_flat:
            shard = shard.unsqueeze(0)
        # A norm's output that isn't known yet is multiplied before it is.
        norm = shard.pending if type(shard) is LateNorm else None
        linear_op, operands = self._linear_op, []
        restored = linear_op.restored_dtype
        if norm is not None:
            dtype = norm.dtype
        else:
            dtype = autocast_dtype(shard) if restored is None else checked_dtype(shard, restored)
        for layer, product in zip(self.projections, linear_op.products, strict=True):
            operands.append(layer.operand(dtype))
            if layer.product is not product:
                # `tensor3d.unshard` has replaced the product while its weight stays unsharded.
                linear_op = LinearOp(linear_op.input_gather, [projection.product for projection in self.projections])
        self._linear_op = linear_op
        is_cut = not positions_are_whole()
        returns_input = is_cut and linear_op.input_gather.reduces and not linear_op.gathers_fp8
        products = None
        if self.factors is not None:
            products = self.factors.products(linear_op, operands, shard, dtype)
        factors: Sequence[Operand] = operands
        if products is not None:
            linear_op, factors = products.linear_op, products.operands
        if norm is None:
            gathered, results = linear_op(shard.to(dtype), factors, returns_input=returns_input)
        else:
            gathered, results = None, linear_op.without_graph(norm, factors)
        # Lets the backward of each "down" projection start to gather the input for this one's.
        node = results[0].grad_fn
        for down_projection in self._down_projections:
            down_projection.next_backward = None if node is None else weakref.ref(node)
        # On one rank of `sequence`, the input has all positions already.
        full = shard
        if is_cut and linear_op.gathers_fp8 and isinstance(linear_op.input_gather, GatherSequence):
            full = LateGather.of(shard, linear_op.input_gather.along)
        elif gathered is not None:
            full = gathered if restored is None else gathered.to(shard.dtype)
            # What low-rank updates of the projections take: they gather their own few features.
            full.cuboid_shard = shard  # type: ignore[attr-defined]
        if products is not None:
            results = products.attach(full, shard.to(dtype), results)
        if restored is not None:
            results = [result.to(shard.dtype) for result in results]
        attach_results(full, self.projections, results)
        return ((full, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": full})

    @uncompiled
    def restore(self, _: nn.Module, __: Any, output: Any) -> Any:
        """A forward hook of the same module: returns flattened tokens if the input was flattened."""
        return output.squeeze(0) if self._is_flat else output


class LatentProjections:
    """A forward pre-hook of attention that projects keys, values and perhaps queries from latents (DeepSeek's MLA).

    A latent has few features, so it is computed for the rank's own positions and gathered instead of the block's input:
    ``[B/b, S/s, H/h]`` to ``[B/b, S/s, R]``, summed over `hidden`, to ``[B/b, S, R]``. Each rank's gradient of a
    gathered latent is a partial sum over `sequence` × `hidden`, whose ranks have different heads.

    Args:
        latents: the projections to latents.
        fused: the hook of queries that are projected from the block's input; None if they have latents too.
    """

    def __init__(self, latents: Sequence[ShardedLinear], fused: FusedProjections | None) -> None:
        self.latents, self.fused = list(latents), fused
        self.along = latents[0].mesh.along("sequence")
        self.to_latents = FusedProjections(latents, gather=NoGather())

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the block's input ``[B/b, S/s, H/h]`` by one that the latents ``[B/b, S, R]`` are attached to."""
        if not args and "hidden_states" not in kwargs:
            raise UnsupportedModelError(f"{type(module).__name__} was called without hidden_states; no rule for that")
        shard: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        ((latent_input,), _) = self.to_latents(module, (shard,), {})
        # Removed from the input, because the results' graphs refer to it in turn: a cycle that isn't collected.
        results = {key: GatherPositions.apply(x, self.along) for key, x in take_results(latent_input).items()}
        if self.fused is not None:
            args, kwargs = self.fused(module, args, kwargs)
            full = args[0] if args else kwargs["hidden_states"]
        else:
            # The block's code uses only its shape. Should it compute with the values, NaN reveals that.
            positions = shard.shape[1] * (1 if positions_are_whole() else self.along.size)
            full = shard.new_full((), torch.nan).expand(shard.shape[0], positions, shard.shape[2])
            full.cuboid_shard = shard  # type: ignore[attr-defined]
        full.cuboid_results = {**getattr(full, "cuboid_results", {}), **results}
        return ((full, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": full})


class CrossProjections:
    """A forward pre-hook of attention whose keys and values may come from another sequence than its queries.

    That sequence, in a decoder's layer the encoder's output ``[B/b, S/s, H/h]``, is gathered as well as the block's own
    input ``[B/b, T/s, H/h]``. Without it, a call projects queries, keys and values from one input.

    Args:
        queries: "up" projections of the block's own input.
        keys_and_values: "up" projections of the other sequence.
        down_projections: as in :class:`FusedProjections`.
        source: the name of the forward's argument for the other sequence.
    """

    def __init__(
        self,
        queries: Sequence[ShardedLinear],
        keys_and_values: Sequence[ShardedLinear],
        down_projections: Sequence[ShardedLinear],
        source: str,
    ) -> None:
        self.source = source
        self.of_one = FusedProjections([*queries, *keys_and_values], down_projections)
        # Queries are multiplied last, so their backward follows that of the down projections, which prefetches for it.
        self._keys_and_values = FusedProjections(keys_and_values)
        self._queries = FusedProjections(queries, down_projections)

    @property
    def input_gather(self) -> InputGather:
        """How each of the inputs is gathered."""
        return self.of_one.input_gather

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace both inputs by the gathered ones, ``[B/b, S, H/h]`` and ``[B/b, T, H/h]``."""
        source = kwargs.get(self.source)
        if source is None:
            return self.of_one(module, args, kwargs)
        (full_source,), _ = self._keys_and_values(module, (source,), {})
        return self._queries(module, args, {**kwargs, self.source: full_source})
