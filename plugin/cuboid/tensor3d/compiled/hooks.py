"""Hooks of blocks in a graph, in place of those that fuse projections: they gather the blocks' inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cuboid.distributed.axis_collectives import SEQUENCE_DIM
from cuboid.distributed.mesh import AxisGroup
from cuboid.tensor3d.compiled.collectives import gather
from cuboid.tensor3d.compiled.fp8_products import round_and_gather
from cuboid.tensor3d.layers.fused_projections import CrossProjections, FusedProjections, LatentProjections
from cuboid.tensor3d.layers.input_gather import GatherFeatures, GatherSequence, InputGather
from cuboid.tensor3d.layers.linear import ShardedLinear, autocast_dtype


def gathered(x: torch.Tensor, input_gather: InputGather) -> torch.Tensor:
    """What a product multiplies, from the rank's own part of it."""
    if isinstance(input_gather, GatherFeatures):
        return gather(x, -1, input_gather.along)
    return gather(x, SEQUENCE_DIM, input_gather.along) if isinstance(input_gather, GatherSequence) else x


def _gathered_for(shard: torch.Tensor, hook: FusedProjections) -> torch.Tensor:
    x = gathered(shard, hook.input_gather)
    # For weight gradients that are computed later. On one rank both are the same tensor.
    if x is not shard:
        x.cuboid_shard = shard  # type: ignore[attr-defined]
    if hook.is_fp8:
        # What forward multiplies. Unless the block's own code reads the gathered input, only backward gathers that.
        x.cuboid_rounded = round_and_gather(shard, hook.input_gather)  # type: ignore[attr-defined]
    return x


class CompiledProjections:
    """A forward pre-hook in a graph, in place of :class:`FusedProjections`: it gathers the block's input."""

    def __init__(self, hook: FusedProjections) -> None:
        self.eager: Any = hook
        self._is_flat = False

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the block's input ``[B/b, S/s, H/h]`` by the gathered one, ``[B/b, S, H/h]``."""
        shard = args[0] if args else kwargs["hidden_states"]
        # Flattened tokens, as shared experts may get them, are one sequence.
        self._is_flat = shard.dim() == 2
        if self._is_flat:
            shard = shard.unsqueeze(0)
        shard = shard.to(autocast_dtype(shard))
        return _with_input(_gathered_for(shard, self.eager), args, kwargs)

    def restore(self, _: nn.Module, __: Any, output: Any) -> Any:
        """A forward hook of the same module: see :meth:`FusedProjections.restore`."""
        return output.squeeze(0) if self._is_flat else output


class CompiledLatentProjections:
    """In place of :class:`LatentProjections`: the block's input, of which latents take the rank's own positions."""

    def __init__(self, hook: LatentProjections) -> None:
        self.eager: Any = hook
        self._fused = hook.fused
        self._along = hook.along

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the block's input ``[B/b, S/s, H/h]`` by one with all positions."""
        shard = args[0] if args else kwargs["hidden_states"]
        shard = shard.to(autocast_dtype(shard))
        if self._fused is not None:
            return _with_input(_gathered_for(shard, self._fused), args, kwargs)
        return _with_input(_padded(shard, self._along), args, kwargs)


def _padded(shard: torch.Tensor, along: AxisGroup) -> torch.Tensor:
    """The rank's own positions among all of them. Should a block compute with the others, NaN reveals that."""
    if along.size == 1:
        return shard
    length = shard.shape[SEQUENCE_DIM]
    before, after = along.index * length, (along.size - 1 - along.index) * length
    return nn.functional.pad(shard, (0, 0, before, after), value=torch.nan)


class CompiledCrossProjections:
    """In place of :class:`CrossProjections`: it gathers the block's input, and the other sequence if there is one."""

    def __init__(self, hook: CrossProjections) -> None:
        self.eager: Any = hook
        self._gather, self._source = hook.input_gather, hook.source

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the inputs by gathered ones."""
        source = kwargs.get(self._source)
        if source is not None:
            kwargs = {**kwargs, self._source: gathered(source.to(autocast_dtype(source)), self._gather)}
        shard = args[0] if args else kwargs["hidden_states"]
        return _with_input(gathered(shard.to(autocast_dtype(shard)), self._gather), args, kwargs)


def _with_input(x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


_FORMS: dict[type, Callable[[Any], Any]] = {
    FusedProjections: CompiledProjections,
    LatentProjections: CompiledLatentProjections,
    CrossProjections: CompiledCrossProjections,
}
_COMPILED: tuple[Any, ...] = (CompiledProjections, CompiledLatentProjections, CompiledCrossProjections)


def has_form(hook: Any) -> bool:
    """Whether a hook, perhaps a method of such an object, runs in graphs, or has a form that does."""
    return isinstance(_owner(hook), (*_FORMS, *_COMPILED))


def _owner(hook: Any) -> Any:
    return getattr(hook, "__self__", hook)


def fused_of(hook: Any) -> list[FusedProjections]:
    """The projections with one input each that a hook, or its form in a graph, has fused."""
    eager = hook.eager if isinstance(hook, _COMPILED) else hook
    if isinstance(eager, FusedProjections):
        return [eager]
    if isinstance(eager, LatentProjections):
        return [eager.to_latents] if eager.fused is None else [eager.to_latents, eager.fused]
    return [eager.of_one] if isinstance(eager, CrossProjections) else []


def swap_hooks(module: nn.Module, *, in_graph: bool) -> None:
    """Replace a module's hooks by their forms in a graph, or back."""
    others: dict[int, Any] = {}
    kinds: Any = tuple(_FORMS) if in_graph else _COMPILED
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            owner: Any = _owner(hook)
            if not isinstance(owner, kinds):
                continue
            if id(owner) not in others:
                others[id(owner)] = _FORMS[type(owner)](owner) if in_graph else owner.eager
            other = others[id(owner)]
            hooks[key] = other if owner is hook else getattr(other, hook.__name__)


def latents_of(module: nn.Module) -> list[ShardedLinear]:
    """The projections to latents of a module's hooks."""
    hooks = module._forward_pre_hooks.values()
    return [linear for hook in hooks if isinstance(hook, LatentProjections) for linear in hook.latents]
