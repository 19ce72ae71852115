"""Dropout in graphs of a mesh's layers: the masks that the layers drop outside of graphs.

Outside, each draw takes a number from the generator that all ranks share, and seeds a rank's own draw with it and the
rank's position (:mod:`cuboid.tensor3d.layers.dropout`). A graph can't set generators, and may run a draw again in
backward. So the numbers are taken before the layer runs, and given to the graph as a tensor of seeds; a draw is an
operator whose result follows from its arguments.

A block that is computed whole takes one number, of which the seeds of its draws are made. Outside of graphs its code
draws the same, but its modules' draws follow each other on one generator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES
from cuboid.errors import UnsupportedModelError
from cuboid.tensor3d.layers.dropout import SEEDS, MeshDropout, ShardedDropout, seed_inside, seeded

#: Activation checkpointing of a layer, in a graph.
_CHECKPOINT: Any = torch.ops.higher_order.tag_activation_checkpoint
#: As many seeds are given to a graph: more than any layer draws.
_MOST_DRAWS = 64


class GraphSeeds:
    """The seeds of what a layer's graph draws.

    Attributes:
        seeds: ``[64]`` on the host: the next numbers of the generator that all ranks share.
        position: of this rank among those that draw differently.
        block: 0, or while a block that is computed whole is traced, its number in the layer: as outside of graphs, the
            block takes one seed, of which those of its draws are made, and ranks with the same rows draw the same.
        count: the number of seeds that the graph has used that has run last, which a graph sets.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._positions = mesh.index(*AXES), mesh.index("batch")
        self.seeds = torch.empty(0, dtype=torch.int64)
        self.block = 0
        self.count = 0

    @property
    def position(self) -> int:
        return self._positions[self.block > 0]

    @contextmanager
    def of_layer(self) -> Iterator[None]:
        """Around a layer's graph: afterwards the generator has drawn as many numbers as the graph has used."""
        before = torch.get_rng_state()
        # A tensor for each call of a layer, whose backward may need it again.
        self.seeds = torch.randint(SEEDS, (_MOST_DRAWS,), device="cpu", generator=torch.default_generator)
        torch.set_rng_state(before)
        self.count = 0
        yield
        if self.count:
            torch.randint(SEEDS, (self.count,), device="cpu", generator=torch.default_generator)


class DrawsInGraph(TorchFunctionMode):
    """While a layer is traced, its dropouts become operators that take seeds."""

    def __init__(self, seeds: GraphSeeds) -> None:
        super().__init__()
        self._seeds = seeds

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout:
            return self._dropout(*args, **kwargs)
        if func is nn.functional.scaled_dot_product_attention and kwargs.get("dropout_p"):
            return self._attention(*args, **kwargs)
        if func is _CHECKPOINT:
            # It is given to this mode as one function, which runs without the mode.
            run, *inputs = args
            return func(functools.partial(_draw_in_graph, self._seeds, run), *inputs, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self,
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,  # noqa: ARG002
    ) -> torch.Tensor:
        if not training or p == 0:
            return input
        y: torch.Tensor = _DROPOUT(input, float(p), self._seeds.seeds, *self._place())[0]
        return y

    def _place(self) -> tuple[int, int, int]:
        # The first number, 0 here, is set when the graph is complete (`number_draws`).
        return 0, self._seeds.block, self._seeds.position

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None and attn_mask.requires_grad:
            raise UnsupportedModelError("attention that drops, with a mask that is trained, has no form in a graph")
        options = float(dropout_p), is_causal, scale, enable_gqa
        out: torch.Tensor = _ATTENTION(query, key, value, attn_mask, *options, self._seeds.seeds, *self._place())
        return out


def _draw_in_graph(seeds: GraphSeeds, run: Callable[..., Any], *inputs: Any) -> Any:
    with DrawsInGraph(seeds):
        return run(*inputs)


def number_draws(graph: torch.fx.GraphModule) -> int:
    """Give the draws of a layer's graph their numbers, in the order in which the layer draws.

    Returns:
        how many seeds they use: one each, and one for each block that is computed whole and draws.
    """
    count = 0
    #: By block: its seed, and the draws that are made of it so far.
    blocks: dict[int, tuple[int, int]] = {}

    def number(part: torch.fx.GraphModule) -> None:
        nonlocal count
        is_drawing = False
        for node in part.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target in _NUMBER_AT:
                at, is_drawing = _NUMBER_AT[node.target], True
                block = node.args[at + 1]
                seed, inside = blocks.get(block, (count, 0))
                if block == 0:
                    count += 1
                else:
                    count += inside == 0
                    inside += 1
                    blocks[block] = seed, inside
                node.update_arg(at, seed)
                node.update_arg(at + 1, inside)
            for argument in node.all_input_nodes:
                inner = getattr(part, str(argument.target), None) if argument.op == "get_attr" else None
                if isinstance(inner, torch.fx.GraphModule):
                    number(inner)
        if is_drawing:
            part.recompile()

    number(graph)
    if count > _MOST_DRAWS:
        raise UnsupportedModelError(f"a layer draws random numbers {count} times; graphs have {_MOST_DRAWS} seeds")
    return count


def drops(module: nn.Module) -> bool:
    """Whether a module may drop elements in training."""
    if isinstance(module, nn.Dropout):
        return module.p > 0
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())


def draws_in_common(module: nn.Module) -> bool:
    """Whether a module drops the same elements on several ranks, for which graphs have no rule."""
    if not isinstance(module, MeshDropout) or module.p == 0:
        return False
    mesh = module.mesh
    return not isinstance(module, ShardedDropout) or mesh.size(*module.axes) < mesh.size(*AXES)


def _seed(seeds: torch.Tensor, number: int, inside: int, position: int) -> int:
    return seed_inside(int(seeds[number]), inside) + position


@torch.library.custom_op("cuboid::dropout", mutates_args=())
def _dropout(
    x: torch.Tensor, p: float, seeds: torch.Tensor, number: int, inside: int, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    with seeded(x.device, _seed(seeds, number, inside, position)):
        return torch.native_dropout(x, p, True)


@_dropout.register_fake
def _dropout_shapes(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _save_mask(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    p = inputs[1]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])
    ctx.scale = 0.0 if p == 1 else 1 / (1 - p)


def _dropout_backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    (mask,) = ctx.saved_tensors
    return gradient * mask * ctx.scale, *[None] * 5


_dropout.register_autograd(_dropout_backward, setup_context=_save_mask)
_Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _attend(
    heads: _Heads, mask: torch.Tensor | None, options: tuple[float, bool, float | None, bool], seed: int
) -> tuple[_Heads, torch.Tensor]:
    """Attention that drops, and its inputs, with a graph of it. Whether it has one decides which kernel torch takes."""
    with _recording(), seeded(heads[0].device, seed):
        query, key, value = (x.detach().requires_grad_() for x in heads)
        p, is_causal, scale, enable_gqa = options
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, mask, dropout_p=p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return (query, key, value), out


@contextmanager
def _recording() -> Iterator[None]:
    """Inside of an operator, let autograd record."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        yield


@torch.library.custom_op("cuboid::attend_dropping", mutates_args=())
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    seeds: torch.Tensor,
    number: int,
    inside: int,
    position: int,
) -> torch.Tensor:
    seed = _seed(seeds, number, inside, position)
    _, out = _attend((query, key, value), mask, (p, is_causal, scale, enable_gqa), seed)
    return out.detach().clone(memory_format=torch.contiguous_format)


@_attention.register_fake
def _attention_shape(query: torch.Tensor, _: torch.Tensor, value: torch.Tensor, *__: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@torch.library.custom_op("cuboid::attend_dropping_backward", mutates_args=())
def _attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    seeds: torch.Tensor,
    number: int,
    inside: int,
    position: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seed = _seed(seeds, number, inside, position)
    heads, out = _attend((query, key, value), mask, (p, is_causal, scale, enable_gqa), seed)
    with _recording():
        dq, dk, dv = torch.autograd.grad(out, heads, gradient)
    return _copy(dq), _copy(dk), _copy(dv)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@_attention_backward.register_fake
def _attention_gradient_shapes(
    _: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any
) -> _Heads:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    query, key, value, mask, *options, seeds, number, inside, position = inputs
    ctx.save_for_backward(query, key, value, mask, seeds)
    ctx.options, ctx.place = options, (number, inside, position)


def _attention_gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *inputs, seeds = ctx.saved_tensors
    operator: Any = torch.ops.cuboid.attend_dropping_backward.default
    return (*operator(gradient.contiguous(), *inputs, *ctx.options, seeds, *ctx.place), *[None] * 9)


_attention.register_autograd(_attention_gradients, setup_context=_save_attention)
_DROPOUT: Any = torch.ops.cuboid.dropout.default
_ATTENTION: Any = torch.ops.cuboid.attend_dropping.default
#: By operator, which argument is the draw's number.
_NUMBER_AT = {_DROPOUT: 3, _ATTENTION: 9}
