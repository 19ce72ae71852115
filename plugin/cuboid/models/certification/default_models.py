"""A class and a config of full size for the name of a model type or class: what transformers' own defaults make."""

from __future__ import annotations

import difflib
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
)

from cuboid.errors import UnsupportedModelError
from cuboid.models.kinds.probe_rows import special_tokens
from cuboid.models.kinds.registry import auto_class_of, check_class

_ROPE = {"rope_theta": 10000.0}
#: Of Qwen2-VL and its relatives: positions in time, height and width turn so many pairs of features each.
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
_HALF_MROPE = {"rope_type": "default", **_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
#: Where transformers' own defaults make no model.
_REPAIRS: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "ministral": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "dots1": {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "xmod": {"default_language": "en_XX"},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256},
        **{"indexer_budget": 2048, "indexer_compress_ratio": 4},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", **_ROPE}}},
    "qwen2_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_5_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_5_omni_thinker": {"text_config": {"rope_parameters": MROPE}},
    "paddleocr_vl": {"text_config": {"rope_parameters": MROPE}},
    **{
        name: {"text_config": {"rope_parameters": _HALF_MROPE}}
        for name in ("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "glmga")
    },
    "voxtral": {"audio_token_id": 24},
    **{
        name: {"projector_config": {"model_type": "blip_2_qformer", "encoder_hidden_size": 1024}}
        for name in ("granite_speech", "granite_speech_plus")
    },
    "llama4": {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096}},
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "kv_n_heads": 8, "rope_theta": 500000.0}},
}
#: What a type is for, if it has several heads: an encoder-decoder both of its sequences, an encoder masked words.
_HEADS = (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)


def default_model(name: str) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """The class and config of a model type, such as ``gpt_oss``, or of a class, such as ``BertForTokenClassification``.

    Raises:
        UnsupportedModelError: transformers has no such name, no config by default, or there are no rules for its task.
    """
    reason = unknown_name(name)
    if reason is not None:
        raise UnsupportedModelError(reason)
    if name in CONFIG_MAPPING_NAMES:
        config = default_config(name)
        return _class_of(name, config)
    cls: type[PreTrainedModel] = getattr(transformers, name)
    check_class(cls)
    config = default_config(cls.config_class.model_type)
    return _loadable(cls, config)


def _loadable(cls: type[PreTrainedModel], config: PretrainedConfig) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """A class and the config that it takes, by which training loads it."""
    part, auto_class = own_part(config, cls), auto_class_of([cls.__name__])
    if cls not in _classes(auto_class._model_mapping, part):
        raise UnsupportedModelError(
            f"{auto_class.__name__} makes no {cls.__name__} of its config, so nothing loads one"
        )
    return cls, part


def unknown_name(name: str) -> str | None:
    """Why a name is that of no model type and no class of transformers; None if it is one."""
    cls: Any = getattr(transformers, name, None)
    is_class = isinstance(cls, type) and issubclass(cls, PreTrainedModel)
    is_model = is_class and getattr(cls, "config_class", None) is not None
    if name in CONFIG_MAPPING_NAMES or is_model:
        return None
    near = difflib.get_close_matches(name, CONFIG_MAPPING_NAMES, 3)
    hint = (
        "did you mean " + " or ".join(map(repr, near)) + "?"
        if near
        else "one is 'llama' or 'BertForTokenClassification'"
    )
    return f"{name!r} is no model type and no model's class in transformers {transformers.__version__}; {hint}"


def default_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """A model type's config with its own defaults, repaired where these make no model.

    Raises:
        UnsupportedModelError: it has no defaults.
    """
    try:
        config = AutoConfig.for_model(model_type, **{**_REPAIRS.get(model_type, {}), **changes})
        # Tokens of images have places in the vocabularies of checkpoints, and not always in those of the defaults.
        last = max((token for tokens in special_tokens(config).values() for token in tokens), default=0)
        text = config.get_text_config()
        if last >= getattr(text, "vocab_size", last + 1):
            text.vocab_size = last + 1
        return config
    except Exception as error:
        raise UnsupportedModelError(
            f"transformers' own defaults make no model: {type(error).__name__}: {error}"
        ) from error


def _class_of(name: str, config: PretrainedConfig) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """The class for what a model type is for, and the config that it takes."""
    refusal: UnsupportedModelError | None = None
    for mapping in _HEADS:
        # Of several, the first: others have a second head, for what is distilled.
        for cls in _classes(mapping, config)[:1]:
            try:
                check_class(cls)
            except UnsupportedModelError as error:
                refusal = refusal or error
                continue
            return _loadable(cls, config)
    raise refusal or UnsupportedModelError(
        f"transformers has no model of {name!r} for which there are rules: it is a part of others, or has another task"
    )


def _classes(mapping: Any, config: PretrainedConfig) -> tuple[type[PreTrainedModel], ...]:
    if type(config) not in mapping:
        return ()
    try:
        classes = mapping[type(config)]
    except ValueError:  # some of the tables' names are of no class
        return ()
    return classes if isinstance(classes, tuple) else (classes,)


def own_part(config: PretrainedConfig, cls: type[PreTrainedModel]) -> PretrainedConfig:
    """The config that a class is made from: of what also sees images, the text's."""
    text = getattr(config, "text_config", None) if "text_config" in config.sub_configs else None
    return text if isinstance(text, cls.config_class) else config
