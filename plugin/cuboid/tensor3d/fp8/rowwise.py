"""Products in fp8 with a scale for each row, as torchao's recipe ``rowwise_with_gw_hp`` has them.

With Q the rounding of each row to e4m3 by a scale of its own, and x, W and dy in bf16,

    y = Q(x) Q(W)ᵀ      dx = Q(dy) Q(Wᵀ)ᵀ      dW = dyᵀ x

so W is rounded by rows for y and by columns for dx, and the gradients of weights, which suffer most, stay in bf16.
Scales are powers of two, found and applied without rounding: the same bits on each device, compiled or not.

All of it is plain torch, so that a compiler fuses the rounding into what computes x and dy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from cuboid.errors import UnsupportedModelError

DTYPE = torch.float8_e4m3fn
#: Sizes of a block must be multiples of it, which the devices' kernels ask for.
MULTIPLE = 16
#: The bits of float32: those of the fraction, and 0.25 less one unit in them, which carries a fraction above 0.75.
_FRACTION, _ABOVE = 23, 0x1FFFFF
#: e4m3 ends at 448, 1.75 times two to the power of this.
_TOP = 8
#: The exponents' bias in float32.
_BIAS = 127


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row of ``x``, ``[rows, K]`` of any strides, to fp8.

    Returns:
        ``[rows, K]`` in fp8, contiguous, and the scales ``[rows, 1]`` by which it is multiplied to be ``x`` again. A
        row with an infinite or undefined element is undefined.
    """
    return quantize_by(x, x.detach().abs().amax(-1, keepdim=True))


def quantize_by(x: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`quantize`, for tensors whose elements' largest magnitudes are known.

    Args:
        x: of any shape.
        largest: of a shape that can be expanded to that of ``x``; the elements that share one share a scale.

    Returns:
        ``x`` in fp8, contiguous, and the scales in the shape of ``largest``.
    """
    exponent = _exponents(largest)
    inverse = ((2 * _BIAS + _TOP - exponent) << _FRACTION).view(torch.float32)
    return (x.float() * inverse).to(DTYPE, memory_format=torch.contiguous_format), _scales(exponent)


def scales(largest: torch.Tensor) -> torch.Tensor:
    """The scales of elements of which these are the largest magnitudes."""
    return _scales(_exponents(largest))


def _exponents(largest: torch.Tensor) -> torch.Tensor:
    """The exponent of the largest element; one more if it is above 1.75 times two to that power."""
    return ((largest.float().view(torch.int32) + _ABOVE) >> _FRACTION).clamp(min=_TOP + 1)


def _scales(exponent: torch.Tensor) -> torch.Tensor:
    return ((exponent - _TOP) << _FRACTION).view(torch.float32)


def multiply(x: torch.Tensor, weight: torch.Tensor, *, fast: bool = False) -> torch.Tensor:
    """x Wᵀ with both operands rounded to fp8, in bf16.

    Args:
        x: ``[rows, K]``.
        weight: ``[columns, K]``.
        fast: whether tensor cores may keep sums in fewer bits than float32, as torchao lets them in forward.
    """
    return multiply_quantized(*quantize(x), *quantize(weight), fast=fast)


def multiply_quantized(
    x_fp8: torch.Tensor,
    x_scale: torch.Tensor,
    weight_fp8: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    fast: bool = False,
) -> torch.Tensor:
    """What :func:`multiply` computes, of two results of :func:`quantize`."""
    # The kernels take the second operand with its columns in memory one after another.
    return torch._scaled_mm(
        x_fp8, weight_fp8.t(), x_scale, weight_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What ``nn.functional.linear`` computes, in fp8.

    Args:
        x: ``[..., I]`` in bf16.
        weight: ``[O, I]`` in bf16, perhaps a transposed view.
        bias: ``[O]`` or None.

    Raises:
        UnsupportedModelError: other dtypes.
    """
    check_dtypes(x, weight)
    y: torch.Tensor = _Linear.apply(x, weight)
    return y if bias is None else y + bias


def check_dtypes(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Check that a product's operands are in bf16.

    Raises:
        UnsupportedModelError: they aren't.
    """
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise UnsupportedModelError(
            f"tensor_parallel.fp8 is for weights and activations in bfloat16, and a linear layer has {weight.dtype} "
            f"and is given {x.dtype}; train in bf16 without autocast, or leave fp8 out"
        )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return multiply(x.flatten(0, -2), weight, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        dx = multiply(rows, weight.t()).unflatten(0, dy.shape[:-1]) if needs_x else None
        return dx, rows.t().mm(x.flatten(0, -2)) if needs_weight else None
