"""DeepSpeed's ZeRO 2 with a layer that is used twice, each time under reentrant activation checkpointing.

DeepSpeed 0.18.8 and 0.19.8 end in an error. Reference: one process with all rows. torchrun --nproc-per-node 2 zero2.py
"""

import copy

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

#: An op for speed alone, which is compiled for minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
}


class Twice(nn.Module):
    """A layer, and the same layer again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The mean square of both outputs' sum."""
        rows = rows.requires_grad_()
        first = checkpoint(self.layer, rows, use_reentrant=True)
        second = checkpoint(self.layer, rows.flip(0), use_reentrant=True)
        return (first + 2 * second).square().mean()


def measure() -> float:
    """Error of the gradient's norm."""
    torch.manual_seed(0)
    model = Twice().bfloat16()
    plain = copy.deepcopy(model).float()
    rows = torch.randn(2, 2, 16).bfloat16()
    sum(plain(part.float()) / 2 for part in rows).backward()
    engine = deepspeed.initialize(model=model, config=CONFIG)[0]
    engine.backward(engine(rows[dist.get_rank()]))
    engine.step()
    return abs(float(engine.get_global_grad_norm()) / plain.layer.weight.grad.norm().item() - 1)


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    error = measure()
    if dist.get_rank() == 0:
        print(f"deepspeed {deepspeed.__version__}: error of the gradient's norm {error:.1e}")
    dist.destroy_process_group()
