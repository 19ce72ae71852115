"""Small models of architectures that the planner's tests describe, and a large one by its numbers alone."""

import functools
import json
from collections.abc import Mapping

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cuboid.planner.description.modules import describe_modules

ARCHITECTURES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2", "granite", "gpt2"),
    *("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"),
)
COMMON = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 130,
    "intermediate_size": 96, "head_dim": 4, "pad_token_id": 0, "n_embd": 48, "n_layer": 3, "n_head": 12,
    "n_positions": 64, "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 40, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def small(name, **more):
    """The config of a small model."""
    known = set(vars(AutoConfig.for_model(name))) | set(type(AutoConfig.for_model(name)).attribute_map)
    return AutoConfig.for_model(name, **{key: value for key, value in {**COMMON, **more}.items() if key in known})


def on_meta(config):
    """A model without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def description_of(config):
    """The planner's description of a config's model, without certificates; a mapping is one as in a config.json."""
    made = AutoConfig.for_model(**config) if isinstance(config, Mapping) else config
    return _description_of(type(made), made.to_json_string(use_diff=False))


@functools.cache
def _description_of(config_class, text):
    """Made once for each config, and so is what the planner keeps for a description."""
    return describe_modules(on_meta(config_class.from_dict(json.loads(text))))
