"""Put adapters into a sharded model: what is accepted, and what the model then notes of itself."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import LoraConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, _maybe_include_all_linear_layers
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from cuboid.distributed.mesh import Mesh, WeightSeed
from cuboid.errors import MeshError, UnsupportedModelError
from cuboid.integrations.peft.adapter_files import AdapterFiles, save_adapters
from cuboid.integrations.peft.lora_layer import SeededLora, ShardedLora, is_loading, seeded_by
from cuboid.models.kinds.sharding import Sharding
from cuboid.models.sharded.customizations import guard_hooks
from cuboid.models.sharded.sharded_model import ShardedBase, ShardedModel
from cuboid.models.stages.stage_model import StageModel
from cuboid.tensor3d.layers.linear import ShardedLinear
from cuboid.tensor3d.low_rank import LowRankSplit
from cuboid.tensor3d.prefetch import collect_prefetched
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, knowing_of_shards, take_whole
from cuboid.weights.save import save_sharded
from cuboid.weights.state_dict_map import sharding_specs

#: Fields of a ``LoraConfig`` that have any value here. Others must have their default.
_FREE = frozenset(
    {
        *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "lora_bias", "bias"),
        *("fan_in_fan_out", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("rank_pattern", "alpha_pattern", "init_lora_weights", "runtime_config", "modules_to_save"),
    }
)
#: Values of ``init_lora_weights`` that don't compute with the layer's weight, of which a rank has a part.
_INITIAL = (True, False, "gaussian", "orthogonal")


def inject(tuner: BaseTuner, model: ShardedModel, adapter_name: str, action: Callable[[], Any]) -> Any:
    """Put an adapter into a sharded model as ``BaseTuner.inject_adapter`` does.

    Raises:
        UnsupportedModelError: before the model is changed, if an option or a layer of the adapter has no rule.
    """
    config = tuner.peft_config[adapter_name]
    check_adapter(config)
    with _giving_head(model):
        _check_targets(tuner, model, config)
        config._register_custom_module({ShardedLinear: ShardedLora, nn.Linear: SeededLora, Conv1D: SeededLora})
        if not is_loading.get():
            # Each rank makes the whole factors, so all must draw the same.
            state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
            model.cuboid.mesh.compare_seed(WeightSeed(state, torch.initial_seed()))
            if config.use_dora:
                _connect_for_norms(model.cuboid.mesh)
        # Each stage makes its own layers' factors only, so that ranks would draw different numbers for a layer.
        seed_of = _seeds_by_name(model) if isinstance(model, StageModel) else None
        with structure_changes(model), seeded_by(seed_of):
            result = action()
        if config.bias != "none":
            _load_whole_biases(model)
        return result


def _load_whole_biases(model: Any) -> None:
    """Let the model's own biases be loaded from PEFT's files too, which have the trained ones."""
    for module in model.modules():
        if isinstance(module, ShardedModule) and "bias" in module.sharded_params:
            module.register_load_state_dict_pre_hook(take_whole)


def _connect_for_norms(mesh: Mesh) -> None:
    """Connect the ranks, since a new DoRA's magnitudes are norms over several ranks' parts of weights."""
    try:
        mesh.connect()
    except MeshError as error:
        raise MeshError(f"LoraConfig(use_dora=True) begins with the norms of the weights: {error}") from error


def _seeds_by_name(model: Any) -> Callable[[nn.Module], int]:
    """The seeds of layers' new adapters, by the layer's name."""
    names = {id(module): name.removesuffix(".base_layer") for name, module in model.named_modules()}
    seed = int(torch.randint(2**32, (), device="cpu"))
    return lambda base: seed + zlib.crc32(names[id(base)].encode())


@contextmanager
def loading() -> Iterator[None]:
    """In the ``with`` block, PEFT reads an adapter from files: the factors take their shards of it."""
    token = is_loading.set(True)
    try:
        # PEFT compares the names in the files with those of a state dict.
        with knowing_of_shards():
            yield
    finally:
        is_loading.reset(token)


@contextmanager
def _giving_head(model: Any) -> Iterator[None]:
    """In the ``with`` block, the model's head is the module itself, whose name PEFT looks up."""
    # Otherwise scripts are given the whole head, or a stand-in on stages that have none.
    try:
        head = model.cuboid.base.get_output_embeddings(model)
    except AttributeError:
        # The module that contains it is a placeholder on this stage.
        head = None
    model.get_output_embeddings = lambda: head
    try:
        yield
    finally:
        del model.get_output_embeddings


def check_adapter(config: Any) -> None:
    """Check an adapter's options.

    Raises:
        UnsupportedModelError: names one that has no rule.
    """
    kind = type(config).__name__
    if type(config) is not LoraConfig:
        raise UnsupportedModelError(
            f"{kind}: of PEFT's adapters, LoRA (LoraConfig) is cut over a mesh; others have no rules"
        )
    default = LoraConfig()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _FREE and value != getattr(default, field.name) and value not in ([], {}, False):
            raise UnsupportedModelError(
                f"{kind}({field.name}={value!r}) has no rule on a mesh; leave it out, or train this adapter in plain "
                "transformers"
            )
    if config.use_dora and config.lora_dropout:
        raise UnsupportedModelError(
            f"{kind}(use_dora=True, lora_dropout={config.lora_dropout}) has no rule on a mesh: the layers' own "
            "products would be computed again, of inputs with dropout; set lora_dropout=0"
        )
    if config.init_lora_weights not in _INITIAL:
        raise UnsupportedModelError(
            f"{kind}(init_lora_weights={config.init_lora_weights!r}) computes with the layers' weights, of which a "
            f"rank has parts; take one of {', '.join(map(repr, _INITIAL))}"
        )


def _check_targets(tuner: BaseTuner, model: Any, config: LoraConfig) -> None:
    """Check the modules that an adapter is for.

    Raises:
        UnsupportedModelError: names one that has no rule.
    """
    check_trained_whole(model, config.modules_to_save)
    # PEFT does the same to the same config again, with the same result.
    prepared = tuner._prepare_adapter_config(config, tuner.get_model_config(model))
    prepared = _maybe_include_all_linear_layers(prepared, model)
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if not name or not tuner._check_target_module_exists(prepared, name):
            continue
        base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        # A stage of one rank splits no layer, so that its layers have PEFT's own adapters.
        is_whole = model.cuboid.mesh.shape.size == 1 and isinstance(base, nn.Linear | Conv1D) and base is not head
        if not is_whole and (not isinstance(base, ShardedLinear) or LowRankSplit.of(base) is None):
            raise UnsupportedModelError(
                f"{name} ({type(base).__name__}) is one of the adapter's target_modules, but on a mesh only the linear "
                "layers of attention and of dense MLPs have adapters; name those in target_modules, or this one in "
                "exclude_modules"
            )


def check_trained_whole(model: Any, names: Sequence[str] | None) -> None:
    """Check the modules that an adapter trains whole: ``modules_to_save``, ends of names.

    Raises:
        UnsupportedModelError: names one that has no rule.
    """
    for name in _names_ending(model, names or ()):
        what = f"modules_to_save={names}: {name}"
        if isinstance(model, StageModel):
            outline = model.staging.plan.outline
            if not outline.runs_own_head or name not in outline.head:
                raise UnsupportedModelError(
                    f"{what} has no rule in a pipeline; of a model's modules, the heads of classifiers are trained "
                    "whole, on the last stage"
                )
            continue
        module = model.get_submodule(name)
        if name.startswith(f"{model.base_model_prefix}.") or module in (
            model.base_model,
            model.get_output_embeddings(),
        ):
            raise UnsupportedModelError(
                f"{what} ({type(module).__name__}) has no rule on a mesh; of a model's modules, those around the base "
                "model with few outputs, such as a classifier's head, are trained whole"
            )


def _names_ending(model: Any, ends: Sequence[str]) -> list[str]:
    """Names of the model's modules with one of these ends, as PEFT looks for them, but not those that it has made."""
    if isinstance(model, StageModel):
        # All stages must come to the same result, and a stage has other stages' modules as placeholders, or not at all.
        owners = {name.rpartition(".")[0] for name in model.cuboid.whole_model.parameters}
        names = sorted({".".join(owner.split(".")[:end]) for owner in owners for end in range(1, owner.count(".") + 2)})
    else:
        names = [name for name, module in model.named_modules() if not isinstance(module, ModulesToSaveWrapper)]
    return [
        name
        for name in names
        if any(name.endswith(key) for key in ends)
        and ".modules_to_save." not in name
        and ".original_module" not in name
    ]


@contextmanager
def structure_changes(model: Any) -> Iterator[None]:
    """Around a method of PEFT that replaces modules of a sharded model: it is checked before, and noted after.

    Raises:
        UnsupportedModelError: before, if a script has changed the model since it was sharded.
    """
    sharding: Sharding = model.cuboid
    state = sharding.state
    state.made.check(model)
    before = {name for name, _ in model.named_parameters()}
    yield
    if state.made.is_cut:
        guard_hooks(model, runs_whole=not isinstance(model, StageModel))
    collect_prefetched(model)
    if state.compiled is not None:
        state.compiled.refresh()
    state.made = state.made.anew(model)
    specs = sharding_specs(model)
    counts = {name: math.prod(specs[name].shape if name in specs else p.shape) for name, p in model.named_parameters()}
    others = {name: count for name, count in sharding.whole_model.parameters.items() if name not in before}
    whole_model = dataclasses.replace(sharding.whole_model, parameters={**others, **counts})
    sharding = dataclasses.replace(sharding, whole_model=whole_model)
    for part in (model, model.base_model):
        if isinstance(part, ShardedModel | ShardedBase):
            part.cuboid = sharding
    has_adapters = any(isinstance(module, BaseTunerLayer) for module in model.modules())
    state.adapters, state.save = (AdapterFiles(), save_adapters) if has_adapters else (None, save_sharded)
