"""A GPT-2 block of Colossal-AI's legacy 3-D layers.

It is put together as the ViT and BERT models of their 3-D examples are: LayerNorm3D and Linear3D, a fused
query-key-value projection whose features are ordered by head, and local attention on the heads that a rank has.
"""

from __future__ import annotations

import contextlib

import torch
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.nn.layer.parallel_3d import LayerNorm3D, Linear3D
from torch import nn

from three_d.cases import Case
from three_d.peer import exchanging, place_in
from three_d.places import Place, chunk, everything, take
from three_d.sides import Side

_EPS = 1e-5  # GPT-2's; LayerNorm3D's own is 1e-12


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


def build_peer(case: Case, key: str, *, exchange: bool = False) -> Side:
    """The case's part with its weights, cut as Colossal-AI cuts. :func:`three_d.peer.launch` must have run.

    Args:
        case: what is computed.
        key: what the contestant goes by.
        exchange: whether its reduce-scatters are exchanges; see :func:`three_d.peer.exchanging`.
    """
    module: nn.Module = _Layer(case.hidden, case.heads) if case.part == "layer" else _Mlp(case.hidden)
    whole = dict(case.model().get_submodule(case.path).named_parameters())
    parameters: dict[str, tuple[nn.Parameter, Place]] = {}
    gathered: set[tuple[int, ...]] = set()
    for path, layer in module.named_modules():
        if isinstance(layer, LayerNorm3D | Linear3D):
            for name, place in _places(layer, path, case).items():
                parameters[f"{path}.{name}"] = layer.get_parameter(name), place
        if isinstance(layer, Linear3D):
            gathered.add((layer.in_features // layer.depth, layer.out_features // layer.depth))
    with torch.no_grad():
        for path, (parameter, place) in parameters.items():
            parameter.copy_(take(whole[path], place))
    around = exchanging if exchange else contextlib.nullcontext
    return Side(key, module, _activation(case), parameters, linear=(Linear3D,), gathered=gathered, around=around)


def _activation(case: Case) -> Place:
    """Rows over the weight group, then the input group; features over the output group."""
    rows = chunk(
        chunk(case.batch, *place_in(ParallelMode.PARALLEL_3D_WEIGHT)), *place_in(ParallelMode.PARALLEL_3D_INPUT)
    )
    features = chunk(case.hidden, *place_in(ParallelMode.PARALLEL_3D_OUTPUT))
    return rows, everything(case.length), features


def _places(layer: LayerNorm3D | Linear3D, path: str, case: Case) -> dict[str, Place]:
    """Where its parameters belong in GPT-2's, whose linear weights are ``[in, out]`` too."""
    if isinstance(layer, LayerNorm3D):
        features = chunk(case.hidden, *place_in(layer.output_parallel_mode))
        return {"weight": (features,), "bias": (features,)}
    rows = chunk(layer.in_features, *place_in(layer.output_parallel_mode))
    order = everything(layer.out_features)
    if path.endswith("c_attn"):
        # GPT-2 has all queries, then all keys, then all values.
        order = order.view(3, case.heads, -1).transpose(0, 1).flatten()
    columns = chunk(order, *place_in(layer.input_parallel_mode))
    return {"weight": (chunk(rows, *place_in(layer.weight_parallel_mode)), columns), "bias": (columns,)}
