"""Two documents in one row, marked by position ids that start again, as in `DataCollatorWithFlattening`.

Reference: each document alone. One process: python packing.py
"""

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LENGTHS = (11, 13)


def measure(attention: str) -> dict[str, float]:
    """Largest error of the second document's logits and of the gradient, by what else the forward is given."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_attention_heads=4, attn_implementation=attention, initializer_range=0.3)
    model = LlamaForCausalLM(config).double().train()
    documents = [torch.randint(97, (1, length)) for length in LENGTHS]
    row = torch.cat(documents, 1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    alone = model(documents[1]).logits.detach()
    errors = {}
    for name, options in {
        "position_ids": {},
        "position_ids, attention_mask of ones": {"attention_mask": torch.ones_like(row), "use_cache": False},
        "position_ids, use_cache=False": {"use_cache": False},
    }.items():
        packed = model(row, position_ids=positions, **options).logits[:, LENGTHS[0] :]
        errors[name] = ((packed - alone).abs().max() / alone.abs().max()).item()
    return errors


if __name__ == "__main__":
    for attention in ("sdpa", "eager"):
        for name, error in measure(attention).items():
            print(f"transformers {transformers.__version__}, {attention}, {name}: {error:.1e}")
