"""FSDP's first version, sharded over one rank and replicated over two.

Reference: the mean of both ranks' gradients. torchrun --nproc-per-node 2 fsdp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def measure() -> float:
    """Error of this rank's gradient."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_id": torch.device("cpu")}
    sharded = FullyShardedDataParallel(model, device_mesh=mesh, use_orig_params=True, **options)
    sharded(torch.full((1, 4), 1.0 + 2 * dist.get_rank())).sum().backward()
    gradient = next(sharded.parameters()).grad
    assert gradient is not None
    return ((gradient - 2.0).abs().max() / 2.0).item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"torch {torch.__version__}, rank {dist.get_rank()}: error of the gradient {measure():.1e}", flush=True)
    dist.destroy_process_group()
