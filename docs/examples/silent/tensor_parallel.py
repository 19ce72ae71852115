"""DeepSpeed's AutoTP on Qwen3, whose norms of heads are replicated, while each rank has some of the heads.

Reference: plain transformers in one process. torchrun --nproc-per-node 2 tensor_parallel.py
"""

import copy

import deepspeed
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

#: An op for speed alone, which is compiled for minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "tensor_parallel": {"autotp_size": 2},
    "zero_optimization": {"stage": 0},
}


def measure() -> dict[str, float]:
    """Error of the loss and of the gradients of norms."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **heads, initializer_range=0.3, tie_word_embeddings=False))
    plain = copy.deepcopy(model)
    row = torch.randint(96, (2, 16))
    expected = plain(row, labels=row, use_cache=False).loss
    expected.backward()
    engine = deepspeed.initialize(model=model, config=CONFIG)[0]
    loss = engine(row, labels=row, use_cache=False).loss
    engine.backward(loss)
    errors = {"loss": abs(loss.item() / expected.item() - 1)}
    gradients = {name: parameter.grad for name, parameter in engine.module.named_parameters()}
    for name, parameter in plain.named_parameters():
        if name.endswith("norm.weight"):
            key = name.split(".")[-2]
            difference = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
            errors[key] = max(errors.get(key, 0.0), difference.item())
    return errors


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    errors = measure()
    if dist.get_rank() == 0:
        print(f"deepspeed {deepspeed.__version__}:", ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    dist.destroy_process_group()
