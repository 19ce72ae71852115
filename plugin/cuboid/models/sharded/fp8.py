"""Linear layers in fp8, by the config's ``tensor_parallel.fp8``: which ones, and whether a model can have them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cuboid.config.schema import CuboidConfig, Fp8Config
from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.roles import layer_names
from cuboid.models.kinds.causal import Causal
from cuboid.models.kinds.registry import kind_of_class
from cuboid.models.sharded.parallel_plan import ParallelPlan
from cuboid.tensor3d.fp8 import rowwise

_KEY = "tensor_parallel.fp8"
#: Roles of linear layers of a transformer layer.
_KINDS = ("up", "down", "latent", "from latent")
#: The compute capability of the first GPUs that have products with a scale for each row.
_CAPABILITY = (9, 0)


def check_fp8(
    model: PreTrainedModel, cls: type[PreTrainedModel], config: CuboidConfig, parallel_plan: ParallelPlan | None
) -> None:
    """Make sure that a model's linear layers can multiply in fp8 as a config says.

    Args:
        model: the whole model, on any device, meta included.
        cls: the architecture's class.
        config: Cuboid's config.
        parallel_plan: how the whole model is sharded; None for stages of one rank each.

    Raises:
        UnsupportedModelError: they can't.
    """
    fp8 = config.tensor_parallel.fp8
    assert fp8 is not None, "asked only where the config has it"
    obstacle = _obstacle(model, cls, config, fp8, parallel_plan) or _obstacle_of_device()
    if obstacle is not None:
        raise UnsupportedModelError(f"{_KEY} can't be used with {cls.__name__} here: {obstacle}; or leave fp8 out")


def _obstacle(
    model: PreTrainedModel,
    cls: type[PreTrainedModel],
    config: CuboidConfig,
    fp8: Fp8Config,
    parallel_plan: ParallelPlan | None,
) -> str | None:
    kind = kind_of_class(cls)
    if not issubclass(kind, Causal):
        return f"fp8 was compared with bf16 for {Causal.words}, not for {kind.words}; take a causal language model"
    if model.dtype != torch.bfloat16 and not config.framework.bf16:
        return f"its weights are in {model.dtype}; load them in torch.bfloat16"
    layers = [model.get_submodule(name) for name in layer_names(model)]
    if any(_has_experts(module) for layer in layers for module in layer.modules()):
        return "the products of a mixture's experts have no form in fp8; take a dense model"
    if parallel_plan is None:
        is_used = any(_takes(module, fp8) for layer in layers for module in layer.modules())
    else:
        is_used = any(fp8_products(model, parallel_plan, fp8))
    if not is_used:
        return (
            f"no rank's block of a linear layer's weight has at least {fp8.min_dimension} rows and columns that the "
            f"kernels take, multiples of {rowwise.MULTIPLE}; lower {_KEY}.min_dimension"
        )
    return None


def _obstacle_of_device() -> str | None:
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < _CAPABILITY:
            version, needed = (".".join(map(str, generation)) for generation in (capability, _CAPABILITY))
            return (
                f"{torch.cuda.get_device_name()} has compute capability {version}, and products with a scale for each "
                f"row need {needed} (H100 and later)"
            )
        return None
    row = torch.ones(rowwise.MULTIPLE, rowwise.MULTIPLE, dtype=torch.bfloat16, device="cpu")
    try:
        rowwise.multiply(row, row)
    except RuntimeError:
        return f"torch {torch.__version__} has no product with a scale for each row on a CPU; take torch 2.13"
    return None


def _has_experts(module: nn.Module) -> bool:
    if isinstance(getattr(module, "experts", None), nn.ModuleList):
        return True
    # Those that have all experts of a layer in one tensor; the weights of convolutions have three dims too.
    is_3d = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    return is_3d and not isinstance(module, nn.Conv1d)


def fp8_products(model: PreTrainedModel, parallel_plan: ParallelPlan, fp8: Fp8Config) -> set[str]:
    """The names of the linear layers that multiply in fp8 on a mesh."""
    layers, mesh = tuple(f"{name}." for name in layer_names(model)), parallel_plan.mesh
    names = set()
    for name, role in parallel_plan.roles.items():
        if role.kind in _KINDS and name.startswith(layers):
            block_shape = parallel_plan.specs[name]["weight"].block_shape(mesh)
            # Of key and value heads a rank may multiply some of its block, and of others as many parts as `hidden` has.
            heads = parallel_plan.heads.dim if role.heads == "key_value" else rowwise.MULTIPLE
            if is_large(block_shape, fp8, parts=mesh.hidden) and heads % rowwise.MULTIPLE == 0:
                names.add(name)
    return names


def is_large(block_shape: tuple[int, ...], fp8: Fp8Config, parts: int = 1) -> bool:
    """Whether a block of a weight is large enough to gain by fp8, and its parts are of sizes that the kernels take."""
    is_divisible = all(size % (rowwise.MULTIPLE * parts) == 0 for size in block_shape)
    return is_divisible and min(block_shape) >= fp8.min_dimension


def _takes(module: nn.Module, fp8: Fp8Config) -> bool:
    return isinstance(module, nn.Linear | Conv1D) and type(module) in _FORMS and is_large(module.weight.shape, fp8)


def use_fp8(layers: Iterable[nn.Module], fp8: Fp8Config) -> None:
    """Make the plain linear layers of a stage without a mesh multiply in fp8, in place."""
    for layer in layers:
        for module in layer.modules():
            if _takes(module, fp8):
                module.__class__ = _FORMS[type(module)]


class Fp8Linear(nn.Linear):
    """A linear layer in fp8."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[…, I]`` to ``[…, O]``."""
        return rowwise.linear(x, self.weight, self.bias)


class Fp8Conv1D(Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer in fp8; the weight is stored ``[I, O]``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[…, I]`` to ``[…, O]``."""
        return rowwise.linear(x, self.weight.t(), self.bias)


_FORMS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Fp8Linear, Conv1D: Fp8Conv1D}
