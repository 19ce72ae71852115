"""What accelerate does to a model for context parallelism: each attention layer's mask is dropped for a causal one.

Reference: the same model before. One process: python context_parallel.py
"""

import accelerate
import torch
from accelerate.big_modeling import _attach_context_parallel_hooks
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ROW = torch.arange(24)[None] * 7 % 97


def error_of(model: PreTrainedModel, positions: torch.Tensor | None = None) -> float | str:
    """Largest error of logits after the hooks, or what accelerate says instead."""
    model.double().train()
    options = {"position_ids": positions, "use_cache": False}
    reference = model(ROW, **options).logits.detach()
    try:
        _attach_context_parallel_hooks(model)
    except ValueError as error:
        return f"refused ({str(error).split('.')[0]})"
    return ((model(ROW, **options).logits - reference).abs().max() / reference.abs().max()).item()


def measure() -> dict[str, float | str]:
    """For a sliding window, and for two documents in a row."""
    torch.manual_seed(0)
    options = {**SIZES, "initializer_range": 0.3}
    window = MistralForCausalLM(MistralConfig(**options, num_key_value_heads=4, sliding_window=8))
    packed = LlamaForCausalLM(LlamaConfig(**options))
    positions = torch.cat([torch.arange(11), torch.arange(13)])[None]
    return {"sliding window of 8 of 24": error_of(window), "two documents in a row": error_of(packed, positions)}


if __name__ == "__main__":
    for name, error in measure().items():
        print(f"accelerate {accelerate.__version__}, {name}: {error if isinstance(error, str) else f'{error:.1e}'}")
