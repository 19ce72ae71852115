"""Small models in float64 whose numbers are far from zero, of attention's layouts and of mixtures of experts."""

from contextlib import nullcontext

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cuboid.models.certification.float64 import KeepFloat64

COMMON = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": None}
LATENT = {
    **{"kv_lora_rank": 10, "q_lora_rank": 14, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8},
    **{"num_attention_heads": 8, "num_key_value_heads": 8},
}
EXPERTS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
#: Recomputed in the precision of the forward.
CHECKPOINTING = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), KeepFloat64())}
_OF_MIXTURES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": None,
}
MIXTURES = {
    "mixtral": {"num_local_experts": 4, "intermediate_size": 24},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    # Biases, weights the other way round, gate and up alternating, and an activation that is cut off.
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "head_dim": 8},
    # Every expert is given all tokens, multiplied with what it weighs.
    "llama4_text": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "intermediate_size_mlp": 40},
        **{"head_dim": 8, "attention_chunk_size": 6},
    },
    "deepseek_v3": {
        **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
        **{"moe_intermediate_size": 24, "intermediate_size": 48, "kv_lora_rank": 8, "q_lora_rank": 8},
        **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    },
}


def with_attention(architecture, **options):
    """A model in float64 whose numbers are far from zero."""
    config = AutoConfig.for_model(architecture, **{**COMMON, **options})
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_((0.3 if is_norm else 0.2) * noise + (1 if is_norm else 0))
    return model


def mixture(architecture, **options):
    """A model in float64 whose numbers are far from zero."""
    heads = {} if architecture == "deepseek_v3" else {"num_key_value_heads": 2}
    config = AutoConfig.for_model(architecture, **{**_OF_MIXTURES, **heads, **MIXTURES[architecture], **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, experts_implementation="eager").train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.15 * noise + (1 if parameter.dim() == 1 else 0))
    return model
