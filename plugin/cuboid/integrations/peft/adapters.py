"""Put adapters into a sharded model: what is accepted, and what the model then notes of itself."""

from __future__ import annotations

import copy
import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.ia3 import IA3Config, IA3Model
from peft.tuners.lora import LoraConfig
from peft.tuners.mixed import MixedModel
from peft.tuners.p_tuning import PromptEncoderConfig
from peft.tuners.prompt_tuning import PromptTuningConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, _maybe_include_all_linear_layers
from peft.utils import TrainableTokensWrapper
from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.other import _get_input_embeddings_name
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from cuboid.distributed.mesh import Mesh, WeightSeed
from cuboid.errors import ConfigError, MeshError, UnsupportedModelError
from cuboid.integrations.peft.adapter_files import AdapterFiles, save_adapters
from cuboid.integrations.peft.counting import asked_targets
from cuboid.integrations.peft.layers.adapted_layer import AdaptedLayer
from cuboid.integrations.peft.layers.embedding_layer import EmbeddingLora, on_mesh
from cuboid.integrations.peft.layers.experts_layer import ParamWrapper, lora_of_router
from cuboid.integrations.peft.layers.lora_layer import SeededLoraLinear, ShardedLoraLinear
from cuboid.integrations.peft.layers.scaled_layer import ShardedIA3Linear
from cuboid.integrations.peft.layers.whole_layer import WholeLoraLinear
from cuboid.integrations.peft.module_names import (
    absent_modules,
    head_of,
    module_here,
    names_of_all_stages,
    tied_modules,
)
from cuboid.integrations.peft.modules_to_save import check_trained_whole, leave_copies, saved_here
from cuboid.integrations.peft.seeding import is_loading, seeded_by
from cuboid.models.kinds.sharding import Sharding
from cuboid.models.sharded.customizations import guard_hooks
from cuboid.models.sharded.sharded_model import ShardedBase, ShardedModel
from cuboid.models.stages.stage_model import StageModel
from cuboid.planner.description.planned_lora import PlannedLora
from cuboid.tensor3d.compiled.forms import CompiledWhole
from cuboid.tensor3d.compiled.hooks import fused_of
from cuboid.tensor3d.experts.router import ShardedRouter
from cuboid.tensor3d.experts.sharded_experts import ShardedExperts
from cuboid.tensor3d.layers.input_gather import GatherSequence
from cuboid.tensor3d.layers.linear import ShardedLinear
from cuboid.tensor3d.layers.vocab_embedding import ShardedEmbedding
from cuboid.tensor3d.layers.whole_block import WHOLE_OF, KeptWhole
from cuboid.tensor3d.low_rank import LowRankSplit
from cuboid.tensor3d.low_rank_inputs import StackedFactors
from cuboid.tensor3d.prefetch import collect_prefetched
from cuboid.tensor3d.scaling import input_spec, output_spec
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
        *("trainable_token_indices", "target_parameters", "feedforward_modules", "init_ia3_weights"),
    }
)
#: Values of ``init_lora_weights`` that don't compute with the layer's weight, of which a rank has a part.
_INITIAL = (True, False, "gaussian", "orthogonal")


def inject(tuner: BaseTuner, model: ShardedModel, adapter_name: str, action: Callable[[], Any]) -> Any:
    """Put an adapter into a sharded model as ``BaseTuner.inject_adapter`` does.

    Raises:
        UnsupportedModelError: before the model is changed, if an option or a layer of the adapter has no rule.
        ConfigError: likewise, if it trains a head that the config spreads over the stages, or takes more memory than
            the adapter for which the mesh was chosen.
    """
    config = tuner.peft_config[adapter_name]
    if isinstance(tuner, MixedModel):
        raise UnsupportedModelError(
            "PeftMixedModel (mixed=True) has no rule for a sharded model, and PEFT can't save it; put adapters of one "
            "kind in, by get_peft_model(model, config) without mixed and add_adapter"
        )
    check_adapter(config)
    if isinstance(config.target_modules, str):
        asked_targets(tuner)[adapter_name] = config.target_modules
    with _giving_head(model):
        prepared = _prepared(tuner, model, config)
    _check_spread_head(tuner, model, prepared)
    of_experts = getattr(prepared, "target_parameters", None)
    if model.cuboid.state.compiled is not None and (of_experts or isinstance(config, IA3Config)):
        what = f"target_parameters={of_experts}" if of_experts else "IA3Config"
        raise UnsupportedModelError(f"{what} has no rule in compiled layers; don't compile them")
    expected = model.cuboid.state.expected
    if expected is not None and isinstance(config, LoraConfig) and not config.inference_mode:
        expected.check_adapter(model.config, PlannedLora.of(config))
    with _giving_head(model), _skipping(tuner, absent_modules(model)):
        is_here, tokens = _check_targets(tuner, model, prepared), _checked_tokens(model, config)
        if isinstance(config, LoraConfig):
            register_layers(config)
        if not is_loading.get():
            # Each rank makes the whole factors, so all must draw the same.
            model.cuboid.mesh.compare_seed(WeightSeed.of_state())
            if isinstance(config, LoraConfig) and config.use_dora:
                _connect_for_norms(model.cuboid.mesh)
        # Each stage makes its own layers' factors only, so that ranks would draw different numbers for a layer.
        seed_of = _seeds_by_name(model) if isinstance(model, StageModel) else None
        with (
            structure_changes(model, lambda: True),
            seeded_by(seed_of),
            on_mesh(model.cuboid.mesh),
            _targeting(config, is_here, tokens, saved_here(model, config.modules_to_save)),
            _scaling_shards(tuner),
        ):
            result = action()
    for name in absent_modules(model) if config.modules_to_save else ():
        tuner.model.get_submodule(name).register_load_state_dict_pre_hook(leave_copies)
    _load_whole_tensors(model, biases=getattr(config, "bias", "none") != "none")
    _note_ties(model)
    return result


def register_layers(config: LoraConfig) -> None:
    """Let PEFT put our layers around sharded ones, and around plain ones of a stage."""
    config._register_custom_module(
        {
            ShardedExperts: ParamWrapper,
            ShardedRouter: lora_of_router,  # type: ignore[dict-item]  # only called
            ShardedLinear: ShardedLoraLinear,
            KeptWhole: WholeLoraLinear,
            **{nn.Linear: SeededLoraLinear, Conv1D: SeededLoraLinear, nn.Embedding: EmbeddingLora},
        }
    )


@contextmanager
def _scaling_shards(tuner: Any) -> Iterator[None]:
    """In the ``with`` block, the layers of IA³ around sharded ones are those for shards; it takes no classes itself."""
    if not isinstance(tuner, IA3Model):
        yield
        return
    create: Callable[..., nn.Module] = tuner._create_new_module

    def create_new_module(config: IA3Config, adapter_name: str, target: nn.Module, **options: Any) -> nn.Module:
        if not isinstance(target, ShardedLinear):
            return create(config, adapter_name, target, **options)
        return ShardedIA3Linear(target, adapter_name, config, is_feedforward=options["is_feedforward"])

    tuner._create_new_module = create_new_module  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del tuner._create_new_module


@contextmanager
def _targeting(config: Any, is_here: bool, tokens: Any, saved: Any) -> Iterator[None]:
    """In the ``with`` block, PEFT doesn't miss layers of the adapter that other stages have.

    Args:
        config: the adapter's.
        is_here: whether this stage has any of its ``target_modules``.
        tokens: its ``trainable_token_indices`` on this stage.
        saved: its ``modules_to_save`` there.
    """
    targets, all_tokens = config.target_modules, getattr(config, "trainable_token_indices", None)
    all_saved, config.modules_to_save = config.modules_to_save, saved
    if all_tokens is not None:
        config.trainable_token_indices = tokens
    if not is_here:
        config.target_modules = DUMMY_TARGET_MODULES
    try:
        yield
    finally:
        config.modules_to_save = all_saved
        if all_tokens is not None:
            config.trainable_token_indices = all_tokens
        if not is_here:
            config.target_modules = targets


def _load_whole_tensors(model: Any, *, biases: bool) -> None:
    """Let the model's own parameters that PEFT's files may have be loaded from them, whole, into the shards.

    Those are trained biases, and the weights of embeddings and heads that have adapters.
    """
    adapted = {id(layer.get_base_layer()) for layer in model.modules() if isinstance(layer, BaseTunerLayer)}
    for module in model.modules():
        if isinstance(module, ShardedModule) and (
            (biases and "bias" in module.sharded_params) or (id(module) in adapted and _is_end(module))
        ):
            module.register_load_state_dict_pre_hook(take_whole)


def _is_end(module: ShardedModule) -> bool:
    """Whether a layer's rows are a vocabulary."""
    return "weight" in module.sharded_params and module.spec("weight").ragged


def _note_ties(model: Any) -> None:
    """Tell the adapters of embeddings and heads whose weight is tied what that is tied to; they can't be merged."""
    for name, other in tied_modules(model).items():
        layer = module_here(model, name)
        if isinstance(layer, AdaptedLayer):
            layer.tied_to = other


def _stack_factors(model: Any) -> None:
    """Let the hooks that fuse projections multiply the adapters' first factors with the projections' input, too."""
    layers = {id(layer.get_base_layer()): layer for layer in model.modules() if isinstance(layer, ShardedLoraLinear)}
    for module in model.modules():
        for fused in (fused for hook in module._forward_pre_hooks.values() for fused in fused_of(hook)):
            adapted = [layers[id(projection)] for projection in fused.projections if id(projection) in layers]
            is_cut = isinstance(fused.input_gather, GatherSequence)
            fused.factors = StackedFactors(adapted, fused.projections[0].mesh) if adapted and is_cut else None


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
    head = head_of(model)
    model.get_output_embeddings = lambda: head
    try:
        yield
    finally:
        del model.get_output_embeddings


@contextmanager
def _skipping(tuner: Any, names: frozenset[str]) -> Iterator[None]:
    """In the ``with`` block, PEFT takes none of these modules for one of an adapter's targets."""
    is_target = tuner._check_target_module_exists
    tuner._check_target_module_exists = lambda config, key: key not in names and is_target(config, key)
    try:
        yield
    finally:
        del tuner._check_target_module_exists


def check_adapter(config: Any) -> None:
    """Check an adapter's options.

    Those of a prompt have rules; see :mod:`cuboid.integrations.peft.prompts`.

    Raises:
        UnsupportedModelError: names one that has no rule.
    """
    kind = type(config).__name__
    if type(config) in (PromptTuningConfig, PromptEncoderConfig):
        return
    if type(config) not in (LoraConfig, IA3Config):
        instead = "take PromptTuningConfig" if config.is_prompt_learning else "take LoRA"
        raise UnsupportedModelError(
            f"{kind}: of PEFT's adapters, LoRA (LoraConfig), IA³ (IA3Config), prompt tuning (PromptTuningConfig) and "
            f"P-tuning (PromptEncoderConfig) are cut over a mesh; others have no rules: {instead}, or train this "
            "adapter in plain transformers"
        )
    default = type(config)()
    for field in dataclasses.fields(config):
        value, usual = getattr(config, field.name), getattr(default, field.name)
        # To PEFT an empty dict is a set option where None is the default.
        if field.name not in _FREE and value != usual and value not in ([], False, *([] if usual is None else [{}])):
            raise UnsupportedModelError(
                f"{kind}({field.name}={value!r}) has no rule on a mesh; leave it out, or train this adapter in plain "
                "transformers"
            )
    if type(config) is IA3Config:
        return
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


def _prepared(tuner: Any, model: Any, config: Any) -> Any:
    """A copy of an adapter's config, with the targets that PEFT will find for it."""
    prepared = copy.deepcopy(config)
    # What were linear layers of experts and routers in older transformers, and so in "all-linear", are parameters now.
    convert_peft_config_for_transformers(prepared, model, get_model_conversion_mapping(model))
    prepared = tuner._prepare_adapter_config(prepared, tuner.get_model_config(model))
    return _maybe_include_all_linear_layers(prepared, model)


def _check_targets(tuner: BaseTuner, model: Any, config: Any) -> bool:
    """Check the modules that an adapter is for, with a config by :func:`_prepared`.

    Returns:
        False if a stage has none of them, but others have.

    Raises:
        UnsupportedModelError: names one that has no rule.
    """
    check_trained_whole(model, config.modules_to_save)

    def is_target(name: str) -> bool:
        return bool(name) and bool(tuner._check_target_module_exists(config, name))

    head, here = model.get_output_embeddings(), 0
    for name, module in model.named_modules():
        if not is_target(name):
            continue
        here += 1
        base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        # A stage of one rank splits no layer.
        is_whole = model.cuboid.mesh.shape.size == 1 and isinstance(base, nn.Linear | Conv1D | nn.Embedding)
        is_cut = isinstance(base, ShardedEmbedding) or (
            isinstance(base, ShardedLinear) and LowRankSplit.of(base) is not None
        )
        is_lora, is_compiled = isinstance(config, LoraConfig), model.cuboid.state.compiled is not None
        is_in_block = is_lora and not (config.use_dora and is_compiled) and _is_in_whole_block(model, name, base)
        # Routers that are no linear layers have another code around their product.
        is_gate = is_lora and isinstance(base, ShardedRouter) and isinstance(base, nn.Linear) and base.bias is None
        is_gate = is_gate and not (config.use_dora or config.lora_bias or is_compiled)
        if not is_whole and not is_cut and not is_in_block and not is_gate:
            raise UnsupportedModelError(
                f"{name} ({type(base).__name__}) is one of the adapter's target_modules, but on a mesh only the linear "
                "layers of attention and of dense MLPs, embeddings of tokens and their head have adapters, and of LoRA "
                "also linear layers in blocks that each rank computes whole (DoRA if layers aren't compiled) and "
                "routers and gates that are linear layers (without DoRA, lora_bias and compiled layers); name those in "
                "target_modules, or this one in exclude_modules"
            )
        if isinstance(config, IA3Config):
            _check_scaled(tuner, config, name, base)
        elif config.use_dora and (isinstance(base, nn.Embedding) or module is head):
            raise UnsupportedModelError(
                f"LoraConfig(use_dora=True) has no rule for {name}, whose rows are the vocabulary; leave it out of "
                "target_modules, or set use_dora=False"
            )
    here += _check_parameters(model, getattr(config, "target_parameters", None) or ())
    if here or not isinstance(model, StageModel):
        return True
    # A name that no stage has is left to PEFT's own error.
    return not any(type(tuner)._check_target_module_exists(config, name) for name in names_of_all_stages(model))


def _check_spread_head(tuner: BaseTuner, model: Any, config: Any) -> None:
    """Check that an adapter that is trained leaves a head alone whose rows are computed on all stages.

    Raises:
        ConfigError: on each stage, with a config by :func:`_prepared`; it names the option and the head.
    """
    if not isinstance(model, StageModel) or config.inference_mode:
        return
    plan = model.staging.plan
    assert plan.config.pipeline is not None
    if not plan.config.pipeline.spreads_head:
        return
    (head,) = plan.outline.head
    tokens, weight = getattr(config, "trainable_token_indices", None), f"{head}.weight"
    options = {
        "target_modules": type(tuner)._check_target_module_exists(config, head),
        "modules_to_save": any(map(head.endswith, config.modules_to_save or ())),
        "trainable_token_indices": isinstance(tokens, dict) and any(map(head.endswith, tokens)),
        "target_parameters": any(map(weight.endswith, getattr(config, "target_parameters", None) or ())),
    }
    option = next((option for option, names_head in options.items() if names_head), None)
    if option is not None:
        raise ConfigError(
            f'pipeline.head is "spread", and {option} of the adapter names {head}: every stage computes rows of a '
            f'plain nn.Linear, without an adapter; write "head": "last", or leave {head} out of {option}'
        )


def _is_in_whole_block(model: Any, name: str, base: nn.Module) -> bool:
    """Whether a module is a linear layer inside a block that each rank computes whole, whose code calls it."""
    if not isinstance(base, KeptWhole) or not isinstance(base, nn.Linear):
        return False
    parts = name.split(".")
    around = (model.get_submodule(".".join(parts[:end])) for end in range(1, len(parts)))
    return any(isinstance(module, CompiledWhole) or hasattr(type(module), WHOLE_OF) for module in around)


def _check_parameters(model: Any, targets: Sequence[str]) -> int:
    """Check the parameters that an adapter is for, and count them.

    Raises:
        UnsupportedModelError: names one that has no rule.
    """
    count = 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain_name = name.replace(".base_layer.", ".")
        if not any(plain_name == target or plain_name.endswith(f".{target}") for target in targets):
            continue
        count += 1
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        is_weight = isinstance(module, ShardedRouter) and parameter.dim() == 2
        is_weight = is_weight or (isinstance(module, ShardedExperts) and leaf in (module.form.up, module.form.down))
        if not is_weight and not (model.cuboid.mesh.shape.size == 1 and parameter.dim() > 1):
            raise UnsupportedModelError(
                f"target_parameters={list(targets)}: {plain_name} of {type(module).__name__} has no rule on a mesh; of "
                "a model's parameters, the weights of routers and of experts that have all of them in one tensor are "
                "adapted; name linear layers in target_modules"
            )
    return count


def _check_scaled(tuner: Any, config: IA3Config, name: str, base: nn.Module) -> None:
    """Check a layer whose input or output IA³ multiplies with a vector.

    Raises:
        UnsupportedModelError: it has no rule.
    """
    is_input = tuner._check_target_module_feedforward(config, name)
    if isinstance(base, nn.Embedding) or (
        isinstance(base, ShardedLinear) and (input_spec if is_input else output_spec)(base) is None
    ):
        what = "is one of feedforward_modules, whose inputs are multiplied" if is_input else "is an end of the model"
        raise UnsupportedModelError(
            f"IA3Config: {name} ({type(base).__name__}) {what}, which has no rule on a mesh, where IA³ multiplies "
            "outputs of the linear layers of attention and dense MLPs, and inputs of those that project back to the "
            "hidden states (down_proj, for one); name those only"
        )


def _checked_tokens(model: Any, config: Any) -> Any:
    """Check the layers of which an adapter trains some tokens' rows.

    Returns:
        ``trainable_token_indices`` for this stage.

    Raises:
        UnsupportedModelError: names a layer that has no rule.
    """
    tokens = getattr(config, "trainable_token_indices", None)
    if tokens is None:
        return None
    what, absent = f"trainable_token_indices={tokens}", absent_modules(model)
    stage = model.staging.plan if isinstance(model, StageModel) else None
    if stage is not None and stage.outline.tied:
        raise UnsupportedModelError(
            f"{what} has no rule in a pipeline where embedding and head are tied (config.tie_word_embeddings), whose "
            "rows are on two stages; train it on a mesh without a pipeline section"
        )
    if not isinstance(tokens, dict):
        if stage is not None and not any(cut.is_first for cut in stage.cuts):
            return None
        tokens = {str(_get_input_embeddings_name(model, "embed_tokens")): tokens}
    here = {}
    for ending, indices in tokens.items():
        for name, module in model.named_modules():
            if not name.endswith(ending) or name in absent:
                continue
            here[ending] = indices
            base = module.token_adapter.get_base_layer() if isinstance(module, TrainableTokensWrapper) else module
            is_head = isinstance(base, ShardedLinear) and base.spec("weight").ragged and base.bias is None
            is_whole = model.cuboid.mesh.shape.size == 1 and isinstance(base, nn.Embedding | nn.Linear)
            if not (is_whole or is_head or isinstance(base, ShardedEmbedding)):
                raise UnsupportedModelError(
                    f"{what}: {name} ({type(base).__name__}) has no rule on a mesh; of a model's modules, embeddings "
                    "of tokens and heads over the vocabulary without a bias have some rows trained"
                )
            _check_tokens(indices, name, base)
    # A name that no stage has is left to PEFT's own error.
    is_elsewhere = stage is not None and any(
        name.endswith(end) for name in names_of_all_stages(model) for end in tokens
    )
    if is_elsewhere or not isinstance(config.trainable_token_indices, dict):
        return here or None
    return tokens


def _check_tokens(indices: Sequence[int], name: str, base: Any) -> None:
    """Check that tokens are rows of a layer, each once.

    Raises:
        UnsupportedModelError: names those that aren't.
    """
    size = (base.spec("weight") if isinstance(base, ShardedModule) else base.weight).shape[0]
    absent = [token for token in indices if not 0 <= token < size]
    repeated = sorted({token for token in indices if list(indices).count(token) > 1})
    if absent or repeated:
        what = f"{absent} are none of these" if absent else f"{repeated} are given more than once"
        raise UnsupportedModelError(
            f"trainable_token_indices: the tokens of {name} are 0 to {size - 1}, and {what}; give each token once, and "
            "resize the embeddings for new ones before the model is sharded"
        )


@contextmanager
def structure_changes(model: Any, has_adapters: Callable[[], bool] | None = None) -> Iterator[None]:
    """Around a method of PEFT that replaces modules of a sharded model: it is checked before, and noted after.

    Args:
        model: sharded.
        has_adapters: whether the model has adapters afterwards, perhaps on other stages; by default, as before.

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
    _stack_factors(model)
    if state.compiled is not None:
        state.compiled.refresh()
    state.made = state.made.anew(model)
    specs = sharding_specs(model)
    counts = {name: math.prod(specs[name].shape if name in specs else p.shape) for name, p in model.named_parameters()}
    others = {name: count for name, count in sharding.whole_model.parameters.items() if name not in before}
    whole_model = dataclasses.replace(sharding.whole_model, parameters={**others, **counts})
    head = None if sharding.head is None else head_of(model)
    sharding = dataclasses.replace(sharding, whole_model=whole_model, head=head)
    for part in (model, model.base_model):
        if isinstance(part, ShardedModel | ShardedBase):
            part.cuboid = sharding
    if has_adapters is not None:
        state.adapters, state.save = (AdapterFiles(), save_adapters) if has_adapters() else (None, save_sharded)
