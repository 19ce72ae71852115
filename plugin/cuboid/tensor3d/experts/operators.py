"""The products of experts as operators of torch, for compiled graphs: what :mod:`.grouped_linear` computes.

How many rows an expert has isn't known to a graph, which sees only tensors whose sizes don't depend on it. Operators
return tensors of their own and keep none that they were given: Inductor uses the memory of both again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cuboid.errors import CuboidError
from cuboid.tensor3d.experts import dispatch


@dataclass(frozen=True)
class _Ends:
    """The :class:`~cuboid.tensor3d.experts.dispatch.ExpertRows` of ``count`` rows."""

    ends: torch.Tensor
    count: int

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        ends = self.ends.tolist()
        if ends[-1] != self.count:
            raise CuboidError(f"a router chose an expert that doesn't exist; there are {len(ends)}")
        return list(zip([0, *ends[:-1]], ends, strict=True))


@torch.library.custom_op("cuboid::multiply_rows", mutates_args=())
def multiply_rows(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each row times its expert's weight: ``[R, K]`` and ``[E, K, N]`` to ``[R, N]``."""
    return dispatch.multiply_rows(x, weight, _Ends(ends, x.shape[0]))


@multiply_rows.register_fake
def _rows_shape(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]))


@torch.library.custom_op("cuboid::multiply_transposed", mutates_args=())
def multiply_transposed(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """aᵀ b over each expert's rows: ``[R, M]`` and ``[R, N]`` to ``[E, M, N]``."""
    return dispatch.multiply_transposed(a, b, _Ends(ends, a.shape[0]))


@multiply_transposed.register_fake
def _transposed_shape(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return a.new_empty((ends.shape[0], a.shape[1], b.shape[1]))


def _save_product(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _product_gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    gradient = gradient.contiguous()
    dx = multiply_rows(gradient, weight.transpose(1, 2), ends) if needs_x else None
    return dx, multiply_transposed(x, gradient, ends) if needs_weight else None, None


multiply_rows.register_autograd(_product_gradients, setup_context=_save_product)


@torch.library.custom_op("cuboid::expert_rows", mutates_args=())
def expert_rows(x: torch.Tensor, choices: torch.Tensor, places: torch.Tensor, per_token: int) -> torch.Tensor:
    """Tokens ``[T, F]`` to their rows ``[R, F]``; see :class:`~cuboid.tensor3d.experts.dispatch.Dispatch`."""
    del places
    return x.index_select(0, choices // per_token)


@expert_rows.register_fake
def _expert_rows_shape(x: torch.Tensor, choices: torch.Tensor, _: torch.Tensor, __: int) -> torch.Tensor:
    return x.new_empty((choices.shape[0], x.shape[1]))


@torch.library.custom_op("cuboid::token_sums", mutates_args=())
def token_sums(rows: torch.Tensor, choices: torch.Tensor, places: torch.Tensor, per_token: int) -> torch.Tensor:
    """Sum each token's rows, ``[R, F]`` to ``[T, F]``: the transpose of :func:`expert_rows`."""
    del choices
    return dispatch.sum_by_token(rows, places, per_token)


@token_sums.register_fake
def _token_sums_shape(rows: torch.Tensor, _: torch.Tensor, places: torch.Tensor, per_token: int) -> torch.Tensor:
    return rows.new_empty((places.shape[0] // per_token, rows.shape[1]))


def _save_order(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    _, choices, places, ctx.per_token = inputs
    ctx.save_for_backward(choices, places)


def _tokens_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return token_sums(gradient, *ctx.saved_tensors, ctx.per_token), None, None, None


def _rows_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return expert_rows(gradient, *ctx.saved_tensors, ctx.per_token), None, None, None


expert_rows.register_autograd(_tokens_gradient, setup_context=_save_order)
token_sums.register_autograd(_rows_gradient, setup_context=_save_order)
