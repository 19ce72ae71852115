"""Find out which formula a Hugging Face norm class computes, by running it."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

#: Attributes that hold a norm's eps.
EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
#: Candidates for norms whose code has a literal eps instead of an attribute.
_EPS_VALUES = (1e-5, 1e-6, 1e-8, 1e-12)
#: What is added to the weight: nothing (Llama and most others) or one (Gemma).
_OFFSETS = (0.0, 1.0)
#: Features of the probe if neither parameters nor attributes of the module give their number.
_SIZE = 24


@dataclass(frozen=True)
class NormFormula:
    """A norm over the last dim.

    ``"rms"``: ``(offset + weight) · x / sqrt(mean(x²) + eps)``. ``"layer"``:
    ``weight · (x - mean(x)) / sqrt(var(x) + eps) + bias``. Without a weight that factor is 1, without a bias 0.
    """

    kind: Literal["rms", "layer"]
    eps: float
    offset: float = 0.0

    def __call__(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """``[..., H]`` to ``[..., H]``."""
        if self.kind == "rms":
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        else:
            y = nn.functional.layer_norm(x, x.shape[-1:], eps=self.eps)
        if weight is not None:
            y = (self.offset + weight) * y
        return y if bias is None else y + bias


def norm_formula(module: nn.Module) -> NormFormula | None:
    """The formula of a module that normalizes its last dim; None if it computes something else, or can't be run.

    The classes differ in name and in formula, so the module's own forward is run on a few numbers instead of trusting
    the name. Some of the numbers are small enough for eps to matter.
    """
    parameters = dict(module.named_parameters())
    if parameters.keys() - {"weight", "bias"} or any(parameter.dim() != 1 for parameter in parameters.values()):
        return None
    # Fixed numbers, so that the user's random generator isn't touched.
    exact: Any = {"dtype": torch.float32, "device": "cpu"}
    shape = getattr(module, "normalized_shape", None) or getattr(module, "hidden_size", None) or _SIZE
    size = int(shape[-1] if isinstance(shape, tuple | list | torch.Size) else shape)
    size = next((len(parameter) for parameter in parameters.values()), size)
    x = torch.stack([torch.linspace(-1.0, 2.0, size, **exact), torch.linspace(-1e-3, 2e-3, size, **exact)]).unsqueeze(0)
    weight = torch.linspace(0.5, 1.5, size, **exact) if "weight" in parameters else None
    bias = torch.linspace(-0.3, 0.4, size, **exact) if "bias" in parameters else None
    try:
        probe: Any = copy.deepcopy(module)
        probe._forward_hooks.clear()
        probe._forward_pre_hooks.clear()
        probe = probe.to_empty(device="cpu").float()
        with torch.no_grad(), torch.device("cpu"):
            for name, parameter in probe.named_parameters():
                parameter.copy_(weight if name == "weight" else bias)
            expected = probe(x)
    except Exception:
        return None
    if not isinstance(expected, torch.Tensor) or expected.shape != x.shape:
        return None
    module_eps = [getattr(module, name) for name in EPS_NAMES if isinstance(getattr(module, name, None), float)]
    kinds: tuple[Literal["rms", "layer"], ...] = ("rms", "layer")
    offsets = _OFFSETS if weight is not None else (0.0,)
    for eps, kind, offset in itertools.product((*module_eps, *_EPS_VALUES), kinds, offsets):
        formula = NormFormula(kind, eps, offset)
        # Certification runs a model's float32 code in float64.
        if torch.allclose(expected.double(), formula(x, weight, bias).double(), atol=1e-5, rtol=1e-4):
            return formula
    return None


def formula_once(module: nn.Module, known: dict[Any, NormFormula | None]) -> NormFormula | None:
    """See :func:`norm_formula`; None also for what can't be a norm by its name.

    A model's norms are usually the same in every layer: of equal modules, the first is probed, and its formula
    ``known`` from then on.
    """
    sizes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    numbers = tuple((name, x) for name, x in vars(module).items() if isinstance(x, float | int | tuple))
    key = (type(module), sizes, numbers)
    if key not in known:
        known[key] = norm_formula(module) if may_normalize(module) else None
    return known[key]


def may_normalize(module: nn.Module) -> bool:
    """Whether a module is a norm by its class's name; running it decides."""
    is_leaf = not any(True for _ in module.children())
    return is_leaf and (isinstance(module, nn.LayerNorm | nn.RMSNorm) or "norm" in type(module).__name__.lower())
