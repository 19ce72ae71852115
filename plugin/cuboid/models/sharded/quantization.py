"""Frozen linear layers in 4 bits (QLoRA), by the ``quantization_config`` of ``from_pretrained``: which layers they are,
by transformers' own rule, and whether a model can have them.

Their weights have the values that bitsandbytes gives whole ones; :mod:`cuboid.tensor3d.sharding.four_bits` stores them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from cuboid.config.schema import CuboidConfig
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.errors import ConfigError, MeshError, UnsupportedModelError
from cuboid.models.architectures.refusals import check_unquantized
from cuboid.models.architectures.roles import Role
from cuboid.models.sharded.parallel_plan import MeshRules, ParallelPlan
from cuboid.requirements import check_version
from cuboid.tensor3d.sharding.four_bits import BLOCK, FourBits, is_packed, scales_spec
from cuboid.tensor3d.sharding.full_params import full_tensor
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, take_shard

_KEY = "quantization_config"
#: Roles of linear layers that may be quantised.
_KINDS = ("up", "down", "latent", "from latent", "whole", "inside")
#: Scales that share one scale of their own, with double quantisation.
NESTED_BLOCK = 256
#: In which weights can be restored.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_KEEP = "or keep it in 16 bits: name it in llm_int8_skip_modules"
_LEAVE = f"leave {_KEY} out, {_KEEP}"


@dataclass(frozen=True)
class Quantization:
    """How a model's linear layers are quantised.

    Attributes:
        values: the 16 values of an element: ``"nf4"`` or ``"fp4"``.
        dtype: what weights are multiplied in.
        nested: whether the scales are rounded too (``bnb_4bit_use_double_quant``).
        skipped: patterns of the names of layers that stay as they are; None for transformers' own choice.
        stored: whether the checkpoint's weights are so already.
    """

    values: str
    dtype: torch.dtype
    nested: bool
    skipped: tuple[str, ...] | None
    stored: bool = False

    def layers_of(self, model: PreTrainedModel, parallel_plan: ParallelPlan) -> QuantizedLayers:
        """The layers to quantise.

        Args:
            model: the whole model, on any device, meta included.
            parallel_plan: how it is sharded.

        Raises:
            UnsupportedModelError: one of them has no rule.
            MeshError: the mesh cuts a row of one between elements that share a scale.
        """
        names = quantized_layers(model, parallel_plan.roles, self.skipped)
        for name in names:
            misfit = _misfit(name, parallel_plan.specs[name]["weight"], parallel_plan.mesh)
            if misfit is not None:
                raise MeshError(f"{_KEY}: {misfit}, {_KEEP}")
        return QuantizedLayers(frozenset(names), self)

    def connect(self, mesh: Mesh) -> None:
        """Connect the ranks if that is needed to quantise; every rank of the world calls it.

        Raises:
            MeshError: ``torch.distributed`` isn't initialised.
        """
        if self.nested and not self.stored:
            try:
                mesh.connect()
            except MeshError as error:
                raise MeshError(
                    f"{_KEY}.bnb_4bit_use_double_quant rounds the scales of whole weights, which ranks gather while "
                    f"they load: {error}. Call deepspeed.init_distributed() before from_pretrained (a "
                    "TrainingArguments does), or leave it out"
                ) from error


def quantized_layers(
    model: PreTrainedModel, roles: Mapping[str, Role], skipped: Sequence[str] | None = None
) -> list[str]:
    """The layers that transformers would quantise, by its own rule.

    Args:
        model: the whole model, on any device, meta included.
        roles: of its modules.
        skipped: patterns of the names of layers that stay as they are; None for transformers' own choice.

    Raises:
        UnsupportedModelError: one of them has no rule, whatever the mesh.
    """
    patterns = None if skipped is None else list(skipped)
    kept = HfQuantizer.get_modules_to_not_convert(model, patterns, model._keep_in_fp32_modules)
    names = []
    for name, module in model.named_modules():
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, kept):
            _check_kind(name, module, roles.get(name))
            names.append(name)
    ties: dict[str, str] = model.all_tied_weights_keys
    tied = next((name for name in names if f"{name}.weight" in {*ties, *ties.values()}), None)
    if tied is not None:
        raise UnsupportedModelError(
            f"{_KEY}: {tied} shares its weight with another module, for which 4 bits have no rule; {_LEAVE}"
        )
    if not names:
        raise UnsupportedModelError(
            f"{_KEY}: {type(model).__name__} has no linear layer that transformers would quantise; leave it out"
        )
    return names


def _check_kind(name: str, module: nn.Module, role: Role | None) -> None:
    if isinstance(module, Conv1D):
        raise UnsupportedModelError(
            f"{_KEY}: {name} stores its weight transposed (Conv1D), for which 4 bits have no rule on a mesh; leave "
            f"{_KEY} out"
        )
    if role is None or role.kind not in _KINDS:
        kinds = {"head": "the head", "router": "a router", "labels": "a head of a few outputs"}
        where = kinds.get("" if role is None else role.kind, "a module that isn't cut as a linear layer")
        raise UnsupportedModelError(f"{_KEY}: {name} is {where}, for which 4 bits have no rule; {_LEAVE}")


def _misfit(name: str, spec: ShardingSpec, mesh: MeshShape) -> str | None:
    """Why a mesh can't cut a weight in 4 bits, and which could, in words; None if it can."""
    if scales_spec(spec, mesh) is not None:
        return None
    height, width = spec.shard_shape(mesh)
    if width < spec.shape[1]:
        return (
            f"a rank's rows of {name} would have {width} of {spec.shape[1]} elements, and {BLOCK} neighbours share a "
            "scale: take a mesh that cuts rows into fewer parts (hidden those of query, key, value, gate and up, "
            "sequence those of output and down)"
        )
    return (
        f"a rank would have {height} of the {spec.shape[0]} rows of {name}, each of {width} elements, and {BLOCK} "
        "neighbours share a scale, beyond the ends of rows: take a mesh that gives ranks multiples of "
        f"{BLOCK // math.gcd(width, BLOCK)} rows"
    )


class FourBitRules:
    """Which meshes can cut a model's linear layers in 4 bits. Knows their shapes, and doesn't keep the model.

    Args:
        model: on any device, meta included.
        rules: of its weights in 16 bits.

    Raises:
        UnsupportedModelError: no mesh can.
    """

    def __init__(self, model: PreTrainedModel, rules: MeshRules) -> None:
        self._weights = rules.weights(quantized_layers(model, rules.roles))

    def misfit(self, mesh: MeshShape) -> str | None:
        """What a mesh that fits the model can't cut in 4 bits, in words; None if there is no such layer."""
        misfits = (_misfit(weight.module.name, weight.spec(mesh), mesh) for weight in self._weights)
        return next((misfit for misfit in misfits if misfit is not None), None)


@dataclass(frozen=True)
class QuantizedLayers:
    """A model's quantised layers.

    Attributes:
        names: of the layers, in the whole model.
        quantization: how their weights are quantised.
        forms: by layer, how its weight's shard on this rank is stored, of those that are rounded already.
    """

    names: frozenset[str]
    quantization: Quantization
    forms: dict[str, FourBits] = field(default_factory=dict)

    def form(self, name: str, dtype: torch.dtype, spec: ShardingSpec, mesh: Mesh) -> FourBits:
        """How the shards of a layer's weight, of a dtype, are stored."""
        self.forms[name] = FourBits(
            self.quantization.values, dtype, self.quantization.dtype, spec.shard_shape(mesh.shape)
        )
        return self.forms[name]

    def finish(self, name: str, shard: nn.Parameter, spec: ShardingSpec, mesh: Mesh) -> tuple[nn.Parameter, FourBits]:
        """Round a weight's shard, unless that was done when it was read; collective if scales are ``nested``."""
        with torch.no_grad():
            packed = shard.detach()
            if not is_packed(packed):
                if self.quantization.stored:
                    raise UnsupportedModelError(
                        f"{_KEY}: transformers makes the weight of {name} of several of the checkpoint's tensors or of "
                        "parts of them, for which there is no rule where these are stored in 4 bits; take a checkpoint "
                        f"of 16 bits, with {_KEY} in from_pretrained"
                    )
                packed = self.form(name, packed.dtype, spec, mesh).pack(packed)
            form = self.forms[name]
            if self.quantization.nested and not self.quantization.stored:
                scales = form.scales(packed)
                scales.copy_(_nested(scales, spec, mesh))
        return nn.Parameter(packed, requires_grad=False), form


def _nested(scales: torch.Tensor, spec: ShardingSpec, mesh: Mesh) -> torch.Tensor:
    """A shard's scales, rounded as those of the whole weight are; collective."""
    bitsandbytes: Any = importlib.import_module("bitsandbytes.functional")
    of_scales = scales_spec(spec, mesh.shape)
    assert of_scales is not None, "checked before a weight is read"
    mesh.connect()
    shard = scales.view(of_scales.shard_shape(mesh.shape)).contiguous()
    flat = full_tensor(shard, of_scales, mesh).flatten()
    mean = flat.mean()
    rounded, state = bitsandbytes.quantize_blockwise(flat - mean, blocksize=NESTED_BLOCK)
    restored = bitsandbytes.dequantize_blockwise(rounded, state) + mean
    return take_shard(restored.view(of_scales.shape), of_scales, mesh).flatten()


def check_settings(config: CuboidConfig) -> None:
    """Check that a config's settings go with quantised layers.

    Raises:
        ConfigError: names the key that doesn't.
    """
    for key, is_set in (("compile", config.tensor_parallel.compile), ("fp8", config.tensor_parallel.fp8 is not None)):
        if is_set:
            raise ConfigError(
                f"tensor_parallel.{key} has no rule for weights of 4 bits ({_KEY} of from_pretrained); leave one of "
                "the two out"
            )


def check_dtype(dtype: torch.dtype) -> None:
    """Check that weights of a dtype can be rounded.

    Raises:
        UnsupportedModelError: they can't.
    """
    if dtype not in DTYPES:
        raise UnsupportedModelError(
            f"{_KEY}: bitsandbytes doesn't round weights of {dtype}; take dtype=torch.bfloat16, torch.float16 or "
            "torch.float32 in from_pretrained"
        )


def quantization_of(value: Any) -> Quantization:
    """What a ``quantization_config`` of ``from_pretrained`` asks for.

    Raises:
        UnsupportedModelError: there is no rule for it.
        ImportError: bitsandbytes is missing or too old.
    """
    if isinstance(value, dict):
        value = _from_dict(value)
    if not isinstance(value, BitsAndBytesConfig):
        method = getattr(value, "quant_method", type(value).__name__)
        raise UnsupportedModelError(
            f"{_KEY} has quant_method {getattr(method, 'value', method)!r}, for which there is no rule on a mesh or in "
            "a pipeline; take BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)"
        )
    for name, why in (
        ("load_in_8bit", "it rounds whole inputs, of which a rank has a part; take load_in_4bit"),
        ("llm_int8_enable_fp32_cpu_offload", "layers aren't moved to the host; leave it out"),
    ):
        if getattr(value, name, False):
            raise UnsupportedModelError(f"{_KEY}.{name} has no rule on a mesh or in a pipeline: {why}")
    if not value.load_in_4bit:
        raise UnsupportedModelError(f"{_KEY} says neither load_in_4bit nor load_in_8bit; leave it out")
    if value.bnb_4bit_compute_dtype not in DTYPES:
        raise UnsupportedModelError(
            f"{_KEY}.bnb_4bit_compute_dtype is {value.bnb_4bit_compute_dtype}, in which bitsandbytes restores no "
            "weights; take torch.bfloat16, torch.float16 or torch.float32"
        )
    check_version("bitsandbytes")
    # Its operators are found by torch once it is imported.
    importlib.import_module("bitsandbytes")
    skipped = value.llm_int8_skip_modules
    return Quantization(
        value.bnb_4bit_quant_type,
        value.bnb_4bit_compute_dtype,
        value.bnb_4bit_use_double_quant,
        None if skipped is None else tuple(skipped),
    )


def stored_quantization(section: Any, where: str) -> Quantization:
    """How the weights of a checkpoint are stored in 4 bits.

    Args:
        section: the ``quantization_config`` of its config: a mapping, or an object of transformers.
        where: what has it, for the error.

    Raises:
        UnsupportedModelError: they are quantised otherwise.
        ImportError: bitsandbytes is missing or too old.
    """
    values = dict(section) if isinstance(section, Mapping) else section.to_dict()
    is_ours = values.get("quant_method", "bitsandbytes") == "bitsandbytes"
    if not is_ours or not (values.get("load_in_4bit") or values.get("_load_in_4bit")):
        check_unquantized({_KEY: section}, where)
    return replace(quantization_of(values), stored=True)


def _from_dict(value: dict[str, Any]) -> Any:
    if value.get("quant_method", "bitsandbytes") != "bitsandbytes":
        raise UnsupportedModelError(
            f"{_KEY} has quant_method {value['quant_method']!r}, for which there is no rule on a mesh or in a pipeline"
        )
    return BitsAndBytesConfig.from_dict(value)
