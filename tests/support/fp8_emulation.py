"""An emulation of the recipe of products in fp8, in float64, which counts them and perhaps takes their place."""

import contextlib
import math
from unittest import mock

import torch
from torch import nn

from cuboid.tensor3d.fp8 import rowwise

#: The config's section, for models whose layers are small.
FP8 = {"recipe": "rowwise_with_gw_hp", "min_dimension": 16}


def _rounded_by(x, largest):
    """In fp8 and the scales: the least power of two by which elements that share ``largest`` fit."""
    powers = [2.0 ** math.ceil(math.log2(most / 448)) if most else 1.0 for most in largest.double().flatten().tolist()]
    scales = torch.tensor(powers, dtype=torch.float32, device=x.device).view(largest.shape)
    return (x.double() / scales).float().to(torch.float8_e4m3fn), scales


def rounded(x):
    """Each row on the grid of e4m3, scaled by the least power of two by which it fits, in float64."""
    values, scales = _rounded_by(x, x.abs().amax(1, keepdim=True))
    return values.double() * scales.double()


class Emulation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (rounded(x.flatten(0, -2)) @ rounded(weight).T).bfloat16().unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, dy):
        x, weight = (saved.detach() for saved in ctx.saved_tensors)
        dy = dy.flatten(0, -2)
        dx = (rounded(dy) @ rounded(weight.T).T).bfloat16().view(x.shape)
        return dx, (dy.double().T @ x.flatten(0, -2).double()).bfloat16()


class EmulatedLinear(nn.Linear):
    def forward(self, x):
        y = Emulation.apply(x, self.weight)
        return y if self.bias is None else y + self.bias


@contextlib.contextmanager
def counted_products(emulated):
    """The shapes of products in fp8, which are perhaps emulated, inside."""
    multiply, shapes = rowwise.multiply_quantized, []

    def count(x, x_scale, weight, weight_scale, *, fast=False):
        shapes.append((x.shape[-1], weight.shape[0]))
        if not emulated:
            return multiply(x, x_scale, weight, weight_scale, fast=fast)
        return (x.double() * x_scale.double() @ (weight.double() * weight_scale.double()).T).bfloat16()

    changes = {"multiply_quantized": count}
    if emulated:
        changes["quantize"] = lambda x: _rounded_by(x, x.abs().amax(1, keepdim=True))
        changes["quantize_by"] = _rounded_by
        changes["scales"] = lambda largest: _rounded_by(largest, largest)[1]
    with mock.patch.multiple(rowwise, **changes):
        yield shapes


def distance(actual, expected):
    actual, expected = (torch.cat([x.detach().double().flatten() for x in tensors]) for tensors in (actual, expected))
    return float((actual - expected).norm() / expected.norm())
