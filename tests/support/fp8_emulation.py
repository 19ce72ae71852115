"""An emulation of the recipe of products in fp8, in float64, which counts them and perhaps takes their place."""

import contextlib
import math
from unittest import mock

import torch

from cuboid.tensor3d.fp8 import rowwise

#: The config's section, for models whose layers are small.
FP8 = {"recipe": "rowwise_with_gw_hp", "min_dimension": 16}


def rounded(x):
    """Each row on the grid of e4m3, scaled by the least power of two by which it fits, in float64."""
    x = x.double()
    largest = x.abs().amax(1).tolist()
    powers = [2.0 ** math.ceil(math.log2(most / 448)) if most else 1.0 for most in largest]
    scales = torch.tensor(powers, dtype=torch.float64, device=x.device)[:, None]
    return (x / scales).float().to(torch.float8_e4m3fn).double() * scales


@contextlib.contextmanager
def counted_products(emulated):
    """The shapes of products in fp8, which are perhaps emulated, inside."""
    quantize, multiply, shapes = rowwise.quantize, rowwise.multiply_quantized, []

    def round_rows(x):
        return (rounded(x), None) if emulated else quantize(x)

    def count(x, x_scale, weight, weight_scale, *, fast=False):
        shapes.append((x.shape[-1], weight.shape[0]))
        return (x @ weight.T).bfloat16() if emulated else multiply(x, x_scale, weight, weight_scale, fast=fast)

    with mock.patch.multiple(rowwise, quantize=round_rows, multiply_quantized=count):
        yield shapes


def distance(actual, expected):
    actual, expected = (torch.cat([x.detach().double().flatten() for x in tensors]) for tensors in (actual, expected))
    return float((actual - expected).norm() / expected.norm())
