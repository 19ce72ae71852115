"""Which formula an RMSNorm class of Hugging Face computes, found out by running it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from cuboid.errors import UnsupportedModelError

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
#: What is added to the weight: nothing (Llama and most others) or one (Gemma).
_OFFSETS = (0.0, 1.0)


def rms_norm_settings(module: nn.Module) -> tuple[float, float]:
    """(eps, offset) of an RMSNorm: ``y = (offset + weight) · x / sqrt(mean(x²) + eps)``.

    The classes differ in name and in formula, so the module's own forward is asked, on a few numbers, instead of
    trusting the name.

    Raises:
        UnsupportedModelError: it has no eps, or computes something else.
    """
    eps = next((getattr(module, name) for name in _EPS_NAMES if isinstance(getattr(module, name, None), float)), None)
    name = type(module).__name__
    if eps is None:
        raise UnsupportedModelError(f"{name} has none of the attributes {', '.join(_EPS_NAMES)}: no rule for it")
    probe: Any = copy.deepcopy(module).to_empty(device="cpu").float()
    size = int(probe.weight.shape[0])
    # Fixed numbers, so that the user's random generator isn't touched.
    exact: Any = {"dtype": torch.float32, "device": "cpu"}
    weight = torch.linspace(0.5, 1.5, size, **exact)
    x = torch.linspace(-1.0, 2.0, size, **exact).unsqueeze(0)
    with torch.no_grad():
        probe.weight.copy_(weight)
        expected = probe(x)
    for offset in _OFFSETS:
        own = (offset + weight) * x * torch.rsqrt(x.pow(2).mean() + eps)
        if torch.allclose(expected, own, atol=1e-5):
            return eps, offset
    raise UnsupportedModelError(
        f"{name} doesn't compute (offset + weight) · x / rms(x) for offset 0 or 1: no rule for it"
    )
