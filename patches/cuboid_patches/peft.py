"""Patches of PEFT, if it is installed."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

from torch import nn
from transformers.utils import is_peft_available

from cuboid.errors import UnsupportedModelError
from cuboid.models.kinds.sharding import TokensBefore
from cuboid.models.sharded.sharded_model import ShardedModel, unwrap
from cuboid.models.stages.stage_model import StageModel
from cuboid.tensor3d.sharding.sharded_param import ShardedModule
from cuboid_patches.base import Patch


def _inject_adapter(original: Any) -> Any:
    @functools.wraps(original)
    def inject_adapter(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if not isinstance(model, ShardedModel):
            config = self.peft_config[adapter_name]
            if getattr(config, "is_for_counts", False):
                from cuboid.integrations.peft.adapters import register_layers

                register_layers(config)
            original(self, model, adapter_name, *args, **kwargs)
            return
        # PEFT takes seconds to import, which ranks that don't use it save.
        from cuboid.integrations.peft.adapters import inject

        inject(self, model, adapter_name, lambda: original(self, model, adapter_name, *args, **kwargs))

    return inject_adapter


def _unload(original: Any) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.model, ShardedModel):
            return original(self, *args, **kwargs)
        from cuboid.integrations.peft.adapters import structure_changes
        from cuboid.integrations.peft.modules_to_save import check_unloaded

        check_unloaded(self, self.model)
        with structure_changes(self.model, lambda: False):
            return original(self, *args, **kwargs)

    return method


def _delete_adapter(original: Any) -> Any:
    @functools.wraps(original)
    def delete_adapter(model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(model, ShardedModel):
            return original(model, adapter_name, *args, **kwargs)
        from cuboid.integrations.peft.adapters import structure_changes

        configs: dict[str, Any] = vars(model)["peft_config"]
        # After the last adapter is deleted, there are none; PEFT forgets its config before, transformers afterwards.
        with structure_changes(model, lambda: bool(configs.keys() - {adapter_name})):
            return original(model, adapter_name, *args, **kwargs)

    return delete_adapter


def _add_weighted_adapter(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def add_weighted_adapter(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        if not isinstance(self.model, ShardedModel) or arguments["adapter_name"] in self.peft_config:
            original(self, *args, **kwargs)
            return
        from cuboid.integrations.peft.weighted_adapters import add_weighted

        del arguments["self"]
        add_weighted(self, original, arguments)

    return add_weighted_adapter


def _enable_peft_forward_hooks(original: Any) -> Any:
    @functools.wraps(original)
    def enable_peft_forward_hooks(self: Any, *args: Any, **kwargs: Any) -> Any:
        adapter_names = kwargs.get("adapter_names")
        if not isinstance(unwrap(self), ShardedModel) or adapter_names is None or not self.has_active_enabled_adapter:
            return original(self, *args, **kwargs)
        from cuboid.integrations.peft.row_adapters import by_rows

        return by_rows(self, adapter_names, kwargs.get("num_beams"))

    return enable_peft_forward_hooks


def _set_trainable(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def set_trainable(model: Any, *args: Any, **kwargs: Any) -> None:
        inner: Any = unwrap(model)
        if not isinstance(inner, ShardedModel):
            original(model, *args, **kwargs)
            return
        from cuboid.integrations.peft.adapters import structure_changes
        from cuboid.integrations.peft.modules_to_save import check_trained_whole

        check_trained_whole(inner, signature.bind(model, *args, **kwargs).arguments["module_names"])
        with structure_changes(inner):
            original(model, *args, **kwargs)

    return set_trainable


def _init_token_rows(original: Any) -> Any:
    @functools.wraps(original)
    def init_modules(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self.original_module, ShardedModule):
            original(self, adapter_name, *args, **kwargs)
            return
        from cuboid.integrations.peft.layers.token_layer import ShardedTokens

        self.token_adapter = ShardedTokens(self.original_module, adapter_name, *args, **kwargs)

    return init_modules


def _init(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(model, ShardedModel):
            from cuboid.integrations.peft.adapters import check_adapter

            check_adapter(peft_config)
        elif isinstance(unwrap(model), ShardedModel):
            raise UnsupportedModelError(
                f"{type(self).__name__} is put around a {type(model).__name__} around a sharded model, whose own "
                "methods have rules: call its add_adapter(name, config), or give get_peft_model the model itself"
            )
        original(self, model, peft_config, *args, **kwargs)

    return init


def _setup_prompt_encoder(original: Any) -> Any:
    @functools.wraps(original)
    def setup_prompt_encoder(self: Any, adapter_name: str) -> None:
        if not isinstance(self.base_model, ShardedModel):
            original(self, adapter_name)
            return
        from cuboid.integrations.peft.prompts import set_up_prompt

        set_up_prompt(self, adapter_name)

    return setup_prompt_encoder


def _virtual_tokens(peft_model: Any) -> TokensBefore | None:
    base_model = peft_model.base_model
    return base_model.cuboid.state.virtual_tokens if isinstance(base_model, ShardedModel) else None


def _forward(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        virtual_tokens = _virtual_tokens(self)
        if virtual_tokens is None:
            return original(self, *args, **kwargs)
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        del arguments["self"]
        arguments |= arguments.pop("kwargs", {})
        return self.base_model(**virtual_tokens.before(arguments))

    return forward


def _prepare_inputs_for_generation(original: Any) -> Any:
    @functools.wraps(original)
    def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        virtual_tokens = _virtual_tokens(self)
        if virtual_tokens is None:
            return original(self, *args, **kwargs)
        arguments = self.base_model_prepare_inputs_for_generation(*args, **kwargs)
        return virtual_tokens.in_generation(arguments)

    return prepare_inputs_for_generation


def _from_pretrained(original: Any) -> Any:
    @functools.wraps(original.__func__)
    def from_pretrained(cls: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(unwrap(model), ShardedModel):
            return original.__func__(cls, model, *args, **kwargs)
        from cuboid.integrations.peft.adapters import loading

        _check_sizes(kwargs)
        with loading():
            return original.__func__(cls, model, *args, **kwargs)

    return classmethod(from_pretrained)


def _check_sizes(options: dict[str, Any]) -> None:
    if options.get("ignore_mismatched_sizes"):
        raise UnsupportedModelError(
            "ignore_mismatched_sizes=True compares whole tensors of the file with a sharded model's parts, and would "
            "leave all of them out; leave it out"
        )


def _load_adapter(original: Any) -> Any:
    @functools.wraps(original)
    def load_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(unwrap(self), ShardedModel):
            return original(self, *args, **kwargs)
        from cuboid.integrations.peft.adapters import loading

        _check_sizes(kwargs)
        with loading():
            return original(self, *args, **kwargs)

    return load_adapter


def _save_pretrained(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(unwrap(self), ShardedModel):
            original(self, *args, **kwargs)
            return
        from cuboid.integrations.peft.adapter_files import save_adapters

        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        others = arguments.pop("kwargs", {})
        save_adapters(arguments.pop("self"), arguments.pop("save_directory"), **arguments, **others)

    return save_pretrained


def _refused(name: str, why: str) -> Any:
    """What replaces a function of PEFT that computes with whole weights or factors of its first argument, a model."""

    def replace(original: Any) -> Any:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            models = [x for x in (*args, *kwargs.values()) if isinstance(x, nn.Module)]
            if any(isinstance(unwrap(model), ShardedModel) for model in models):
                raise UnsupportedModelError(f"{name} {why}")
            return original(*args, **kwargs)

        return function

    return replace


def _layer_status(original: Any) -> Any:
    @functools.wraps(original)
    def get_layer_status(model: Any) -> list[Any]:
        try:
            layers: list[Any] = original(model)
        except ValueError:
            if isinstance(unwrap(model), StageModel):
                return []
            raise
        return layers

    return get_layer_status


def _model_status(original: Any) -> Any:
    @functools.wraps(original)
    def get_model_status(model: Any) -> Any:
        status = original(model)
        if status.num_adapter_layers == 0:
            # PEFT takes a state that no layer has for one that layers differ in, and ``disable_adapter`` warns of it.
            is_enabled = not getattr(model, "_adapters_disabled", False)
            status = dataclasses.replace(status, enabled=is_enabled, quantization_backend=None)
        return status

    return get_model_status


def _count_parameters(original: Any) -> Any:
    @functools.wraps(original)
    def get_nb_trainable_parameters(self: Any) -> tuple[int, int]:
        if not isinstance(unwrap(self), ShardedModel):
            counted: tuple[int, int] = original(self)
            return counted
        from cuboid.integrations.peft.counting import trained_and_all

        return trained_and_all(self, original)

    return get_nb_trainable_parameters


_IN_PLAIN = "save the adapter, and call it on a plain model with that"
_ELEMENTWISE = (
    "of which a rank of a sharded model has a part; take an optimizer that treats each element by itself, such as "
    "torch's AdamW or PEFT's LoRA+ (create_loraplus_optimizer)"
)
#: Functions of PEFT that take shards for whole tensors, what they would do, and what works; with the first version that
#: has them. Where another module may have got hold of one before, it is one that this calls.
_OF_WHOLE_TENSORS = (
    (
        *("hotswap_adapter", "peft.utils.hotswap:hotswap_adapter", None),
        "puts whole factors in the place of a sharded model's parts; load the other adapter beside it with "
        "load_adapter(folder, name), call set_adapter(name), and delete_adapter for the former",
    ),
    (
        *("reduce_intruder_dimension", "peft.tuners.lora.intruders:reduce_intruder_dimension", None),
        f"decomposes whole weights, of which a rank of a sharded model has parts; {_IN_PLAIN}",
    ),
    (
        *("find_kappa_target_modules", "peft.helpers:KappaTuneSelector.__init__", None),
        "takes the singular values of whole weights, of which a rank of a sharded model has parts; call it on a plain "
        "model, and give LoraConfig the names",
    ),
    (
        *("create_lorafa_optimizer", "peft.optimizers.lorafa:create_lorafa_optimizer", None),
        f"steps B with the whole A, {_ELEMENTWISE}",
    ),
    (
        *("create_riemannian_optimizer", "peft.optimizers.riemannian:_collect_lora_pairs", "0.21.0"),
        f"steps each factor with the whole other one, {_ELEMENTWISE}",
    ),
)
_PATCHES = [
    Patch(
        target="peft.tuners.tuners_utils:BaseTuner.inject_adapter",
        package="peft",
        reason="cut the factors of LoRA as the layers are, and say which adapters have no rules",
        parameters=("model", "adapter_name"),
        replace=_inject_adapter,
    ),
    Patch(
        target="peft.tuners.tuners_utils:BaseTuner._unload_and_optionally_merge",
        package="peft",
        reason="know that adapters have left the modules of a sharded model",
        parameters=(),
        replace=_unload,
    ),
    Patch(
        target="peft.tuners.tuners_utils:delete_adapter",
        package="peft",
        reason="know which modules of a sharded model adapters have left",
        parameters=("model", "adapter_name"),
        replace=_delete_adapter,
    ),
    Patch(
        target="peft.tuners.lora.model:LoraModel.add_weighted_adapter",
        package="peft",
        reason="combine whole factors, not this rank's shards of them",
        parameters=("adapters", "weights", "adapter_name", "combination_type"),
        replace=_add_weighted_adapter,
    ),
    Patch(
        target="peft.peft_model:PeftModel._enable_peft_forward_hooks",
        package="peft",
        reason="give the rows of a micro-batch different adapters",
        parameters=(),
        replace=_enable_peft_forward_hooks,
    ),
    Patch(
        target="peft.peft_model:_set_trainable",
        package="peft",
        reason="know which modules of a sharded model an adapter trains whole",
        parameters=("model", "module_names"),
        replace=_set_trainable,
    ),
    Patch(
        target="peft.utils.other:TrainableTokensWrapper.init_modules",
        package="peft",
        reason="train some rows of an embedding or a head that is cut over a mesh",
        parameters=("adapter_name", "token_indices", "tied_adapter"),
        replace=_init_token_rows,
    ),
    Patch(
        target="peft.peft_model:PeftModel.__init__",
        package="peft",
        reason="say which adapters have no rules before they are put around layers that are split",
        parameters=("model", "peft_config"),
        replace=_init,
    ),
    Patch(
        target="peft.peft_model:PeftModel._setup_prompt_encoder",
        package="peft",
        reason="cut the vectors of virtual tokens, and put them into the model's embedding",
        parameters=("adapter_name",),
        replace=_setup_prompt_encoder,
    ),
    Patch(
        target="peft.peft_model:PeftModelForCausalLM.forward",
        package="peft",
        reason="give a sharded model ids of virtual tokens, where it takes no embeddings",
        parameters=("input_ids", "labels"),
        replace=_forward,
    ),
    Patch(
        target="peft.peft_model:PeftModelForCausalLM.prepare_inputs_for_generation",
        package="peft",
        reason="give a sharded model ids of virtual tokens, where it takes no embeddings",
        parameters=("task_ids",),
        replace=_prepare_inputs_for_generation,
    ),
    Patch(
        target="peft.peft_model:PeftModel.from_pretrained",
        package="peft",
        reason="read a whole adapter into the shards of its factors",
        parameters=("model", "model_id"),
        replace=_from_pretrained,
    ),
    Patch(
        target="peft.peft_model:PeftModel.load_adapter",
        package="peft",
        reason="load whole adapters into the shards of their factors",
        parameters=("model_id", "adapter_name"),
        replace=_load_adapter,
    ),
    *(
        Patch(
            target=target,
            package="peft",
            reason="say what works in place of a function that takes shards for whole tensors",
            parameters=(),
            replace=_refused(name, why),
            since=since,
        )
        for name, target, since, why in _OF_WHOLE_TENSORS
    ),
    Patch(
        target="peft.peft_model:PeftModel.save_pretrained",
        package="peft",
        reason="write whole adapters, not this rank's shards of them",
        parameters=("save_directory", "is_main_process"),
        replace=_save_pretrained,
    ),
    Patch(
        target="peft.peft_model:PeftModel.get_nb_trainable_parameters",
        package="peft",
        reason="count the whole model's parameters, not this rank's shards",
        parameters=(),
        replace=_count_parameters,
    ),
    Patch(
        target="peft.peft_model:get_layer_status",
        package="peft",
        reason="allow stages of a pipeline on which an adapter has no layers",
        parameters=("model",),
        replace=_layer_status,
    ),
    Patch(
        target="peft.peft_model:get_model_status",
        package="peft",
        reason="say whether adapters are enabled on a stage that has none of their layers",
        parameters=("model",),
        replace=_model_status,
    ),
]
PATCHES = _PATCHES if is_peft_available() else []
