"""One rank of Colossal-AI's 1-D tensor parallelism, in an environment of its own; run by ``colossalai_3d.py``.

Written for colossalai 0.5.0 with torch 2.5.1 and transformers 4.51.3. Of this repository only modules that need no
Cuboid are imported.
"""

from __future__ import annotations

import datetime
import os
import sys
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from colossalai.accelerator import CpuAccelerator, set_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.shardformer.layer import GPT2FusedLinearConv1D_Col, GPT2FusedLinearConv1D_Row
from harness.watch import pin
from network.serving import Host, serve
from torch import nn

from three_d.sides import Block, Place, Side, chunk, everything

_TIMEOUT = datetime.timedelta(seconds=600)


class _CpuAccelerator(CpuAccelerator):
    """With the random state that 1-D layers need even without dropout; colossalai 0.5.0's own raises."""

    def get_rng_state(self, *_: object) -> torch.Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)


class _First(nn.Module):
    """A block of transformers 4.51.3 returns a tuple."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.block(x)
        return output[0] if isinstance(output, tuple) else output


def build(block: Block) -> Side:
    """The block as a part of a boosted model. In 1-D every rank has the whole input and output."""
    plugin = HybridParallelPlugin(tp_size=dist.get_world_size(), pp_size=1, precision="fp32")
    boosted, *_ = Booster(plugin=plugin).boost(block.model())
    part = boosted.unwrap().get_submodule(block.path)
    parameters = {name: (parameter, _place(name, block)) for name, parameter in part.named_parameters()}
    for name, (parameter, place) in parameters.items():
        assert tuple(parameter.shape) == tuple(map(len, place)), f"{name} is cut in another way"
    everywhere = (everything(block.batch), everything(block.length), everything(block.hidden))
    linear = (GPT2FusedLinearConv1D_Col, GPT2FusedLinearConv1D_Row)
    return Side(block, _First(part), everywhere, parameters, linear, set())


def _place(name: str, block: Block) -> Place:
    """By columns: c_attn (queries, keys and values each) and c_fc; by rows: c_proj; the rest is on every rank."""
    own = dist.get_rank(), dist.get_world_size()
    hidden, is_weight = block.hidden, name.endswith("weight")
    if "c_attn" in name:
        columns = torch.cat([part * hidden + chunk(hidden, *own) for part in range(3)])
        return (everything(hidden), columns) if is_weight else (columns,)
    if "c_fc" in name:
        columns = chunk(4 * hidden, *own)
        return (everything(hidden), columns) if is_weight else (columns,)
    if "c_proj" in name and is_weight:
        rows = 4 * hidden if name.startswith("mlp") or block.part == "mlp" else hidden
        return chunk(rows, *own), everything(hidden)
    return (everything(hidden),)


def start() -> Host:
    """Meet the others; what this rank keeps."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pin(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=size, timeout=_TIMEOUT)
    set_accelerator(_CpuAccelerator())
    return Host(lambda entry: build(entry[0]))


if __name__ == "__main__":
    serve(start, Connection(int(sys.argv[1])))
