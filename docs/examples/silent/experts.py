"""Experts of Qwen3 MoE on two ranks, in the implementation `batched_mm`.

Reference: plain transformers in one process. torchrun --nproc-per-node 2 experts.py
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

SIZES = {"vocab_size": 97, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False}
#: Older releases have one switch for it.
EXPERT_PARALLEL: dict[str, Any] = {"ep_size": 2, "ep_implementation": "all_reduce"}
if "ep_size" not in DistributedConfig.__dataclass_fields__:
    EXPERT_PARALLEL = {"enable_expert_parallel": True}


def measure(folder: str) -> dict[str, float]:
    """Error of the loss, and of the routers' gradients."""
    torch.manual_seed(0)
    plain = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, initializer_range=0.3))
    row = torch.randint(97, (2, 16))
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    expected = plain(row, labels=row).loss
    expected.backward()
    expert_parallel = DistributedConfig(tp_size=2, **EXPERT_PARALLEL)
    options = {"experts_implementation": "batched_mm", "distributed_config": expert_parallel}
    sharded = Qwen3MoeForCausalLM.from_pretrained(folder, **options)
    loss = sharded(row, labels=row).loss
    loss.backward()
    errors = []
    for ours, theirs in zip(plain.model.layers, sharded.model.layers, strict=True):
        gradient = theirs.mlp.gate.weight.grad
        gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        reference = ours.mlp.gate.weight.grad
        errors.append(((gradient - reference).abs().max() / reference.abs().max()).item())
    return {"loss": abs(loss.item() / expected.item() - 1), "router": max(errors)}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    errors = measure(str(folders[0]))
    if dist.get_rank() == 0:
        name = f"transformers {transformers.__version__}"
        print(f"{name}: error of the loss {errors['loss']:.1e}, of the routers' gradients {errors['router']:.1e}")
    dist.destroy_process_group()
