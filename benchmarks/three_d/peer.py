"""Colossal-AI's legacy 3-D layers on a CPU: what they need, and a GPT-2 block of them.

Written for colossalai 0.5.0, whose legacy package was made for one GPU for each process. The block is put together as
the ViT and BERT models of their 3-D examples are: LayerNorm3D and Linear3D, a fused query-key-value projection whose
features are ordered by head, and local attention on the heads that a rank has.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from three_d.sides import Block, Place, Side, chunk, everything, take

with warnings.catch_warnings():
    # It decorates its functions with torch.cuda.amp's deprecated names, which warn at import.
    warnings.simplefilter("ignore")
    from colossalai.context import Config
    from colossalai.legacy.communication import collective
    from colossalai.legacy.context import ParallelMode, add_seed
    from colossalai.legacy.context.random import _helper
    from colossalai.legacy.core import global_context
    from colossalai.legacy.nn.layer.parallel_3d import LayerNorm3D, Linear3D

_SEED = 1024
_EPS = 1e-5  # GPT-2's; LayerNorm3D's own is 1e-12


def launch(depth: int) -> None:
    """As ``colossalai.legacy.launch`` with 3-D tensor parallelism over depth³ ranks, in the world that exists.

    That function in 0.5.0 makes the world itself, at ``tcp://[host]:port``, which Python from 3.11.4 on takes for IPv6
    only; and it adds seeds only where there is CUDA, though the layers can't be built without. So its steps are taken
    one by one here, but for the first. All ranks must call, once in a process.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    global_context.verbose = False
    global_context.load_config(Config({"parallel": {"tensor": {"mode": "3d", "size": depth**3}}}))
    global_context._register_dist(rank, size, dist.GroupMember.WORLD, None, list(range(size)), ParallelMode.GLOBAL)
    global_context.add_global_rank(ParallelMode.GLOBAL, rank)
    global_context.init_parallel_groups()
    # Its manager of random states always goes by CUDA's; this process has the CPU's alone.
    torch.cuda.get_rng_state, torch.cuda.set_rng_state = torch.get_rng_state, torch.set_rng_state
    torch.cuda.manual_seed = torch.manual_seed
    # The seeds and the mode that `ParallelContext.set_seed` sets with CUDA.
    add_seed(ParallelMode.DATA, _SEED)
    add_seed(ParallelMode.TENSOR, _SEED + global_context.get_local_rank(ParallelMode.TENSOR))
    _helper.set_mode(ParallelMode.DATA)


def place_in(mode: ParallelMode) -> tuple[int, int]:
    """This rank's index in its group of a mode, and the group's size."""
    return global_context.get_local_rank(mode), global_context.get_world_size(mode)


class _Exchange:
    """A reduce-scatter under way, as an exchange whose parts are added at the end."""

    def __init__(self, out: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._out, self._pieces = out, torch.empty_like(full)
        self._work = dist.all_to_all_single(self._pieces.view(-1), full.view(-1), group=group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        torch.sum(self._pieces.view(-1, *self._out.shape), 0, out=self._out)


def _reduce_scatter(
    out: torch.Tensor, full: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> _Exchange | None:
    assert op is None or op == dist.ReduceOp.SUM, "the layers add"
    exchange = _Exchange(out, full, group)
    if async_op:
        return exchange
    exchange.wait()
    return None


@contextlib.contextmanager
def exchanging() -> Iterator[None]:
    """Inside, its reduce-scatters are exchanges and sums, as ours are over gloo, whose own sends twice the bytes. So
    this shows how much of a difference in time is due to gloo, and to nothing in the layers."""
    before = collective._reduce_scatter_func
    collective._reduce_scatter_func = _reduce_scatter
    try:
        yield
    finally:
        collective._reduce_scatter_func = before


class _Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.c_fc = Linear3D(hidden, 4 * hidden)
        self.c_proj = Linear3D(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(nn.functional.gelu(self.c_fc(x)))


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self._head_dim = hidden // heads
        self.c_attn = Linear3D(hidden, 3 * hidden)
        self.c_proj = Linear3D(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.c_attn(x).unflatten(-1, (-1, 3 * self._head_dim)).transpose(1, 2)
        query, key, value = fused.chunk(3, dim=-1)
        # Their examples multiply, mask and softmax by hand, which would keep S² scores for backward.
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm3D(hidden, eps=_EPS)
        self.attn = _Attention(hidden, heads)
        self.ln_2 = LayerNorm3D(hidden, eps=_EPS)
        self.mlp = _Mlp(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def build_peer(block: Block, *, exchange: bool = False) -> Side:
    """The block with its weights, cut as Colossal-AI cuts, perhaps :func:`exchanging`. :func:`launch` must have run."""
    module: nn.Module = _Layer(block.hidden, block.heads) if block.part == "layer" else _Mlp(block.hidden)
    full_parameters = dict(block.model().get_submodule(block.path).named_parameters())
    parameters = {}
    for path, layer in module.named_modules():
        if isinstance(layer, LayerNorm3D | Linear3D):
            for name, place in _places(layer, path, block).items():
                parameters[f"{path}.{name}"] = layer.get_parameter(name), place
    with torch.no_grad():
        for path, (parameter, place) in parameters.items():
            parameter.copy_(take(full_parameters[path], place))
    around = exchanging if exchange else contextlib.nullcontext
    return Side(block, module, _activation(block), parameters, around)


def _activation(block: Block) -> Place:
    """Rows over the weight group, then the input group; features over the output group."""
    rows = chunk(
        chunk(block.batch, *place_in(ParallelMode.PARALLEL_3D_WEIGHT)), *place_in(ParallelMode.PARALLEL_3D_INPUT)
    )
    features = chunk(block.hidden, *place_in(ParallelMode.PARALLEL_3D_OUTPUT))
    return rows, everything(block.length), features


def _places(layer: LayerNorm3D | Linear3D, path: str, block: Block) -> dict[str, Place]:
    """Where its parameters belong in GPT-2's, whose linear weights are ``[in, out]`` too."""
    if isinstance(layer, LayerNorm3D):
        features = chunk(block.hidden, *place_in(layer.output_parallel_mode))
        return {"weight": (features,), "bias": (features,)}
    rows = chunk(layer.in_features, *place_in(layer.output_parallel_mode))
    order = everything(layer.out_features)
    if path.endswith("c_attn"):
        # GPT-2 has all queries, then all keys, then all values.
        order = order.view(3, block.heads, -1).transpose(0, 1).flatten()
    columns = chunk(order, *place_in(layer.input_parallel_mode))
    return {"weight": (chunk(rows, *place_in(layer.weight_parallel_mode)), columns), "bias": (columns,)}
