"""RMSNorms of stages without a mesh: one kernel where torch has one, and nothing kept but the input and a statistic.

transformers writes the formula as elementwise operations. Each of them reads and writes all features, and three keep
what they were given, in float32. On a mesh, norms have the same kernel in classes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from cuboid.distributed.mesh import Mesh
from cuboid.models.architectures.norm_formula import EPS_NAMES, NormFormula, formula_once
from cuboid.tensor3d.layers.norm import rms_norm


def rms_norms(model: nn.Module) -> dict[str, NormFormula]:
    """The formulas of a model's RMSNorms that have a weight and no bias, by name; running them shows what they are."""
    known: dict[Any, NormFormula | None] = {}
    norms = {}
    for name, module in model.named_modules():
        if "forward" not in vars(module) and [parameter for parameter, _ in module.named_parameters()] == ["weight"]:
            formula = formula_once(module, known)
            if formula is not None and formula.kind == "rms":
                norms[name] = formula
    return norms


def fuse_norms(model: nn.Module, norms: Mapping[str, NormFormula], mesh: Mesh) -> None:
    """Give norms a class whose forward is one operation, in place."""
    for name, formula in norms.items():
        module = model.get_submodule(name)
        eps_name = next((name for name in EPS_NAMES if getattr(module, name, None) == formula.eps), None)
        vars(module)["cuboid_norm"] = (formula, eps_name, mesh.along("hidden"))
        cls: Any = type(module)
        module.__class__ = _fused(cls)


@cache
def _fused(cls: Any) -> type[nn.Module]:
    # `wraps` keeps the signature.
    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) != 1 or kwargs:
            # With a gate, which norms of Mamba 2 multiply their input by: the formula is that without one.
            gated: torch.Tensor = cls.forward(self, *args, **kwargs)
            return gated
        (x,) = args
        formula, eps_name, along = self.cuboid_norm
        # A script may have set another one since.
        eps = formula.eps if eps_name is None else getattr(self, eps_name)
        return rms_norm(x, self.weight, eps, formula.offset, along)

    members = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), members)
