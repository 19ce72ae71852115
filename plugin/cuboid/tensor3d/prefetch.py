"""Prefetch of a layer's parameters while the layer in front of it computes, in forward and in backward.

Weights are unsharded one by one, so that the first product can start when the first weight is there. Norm weights and
biases, which would each take a collective of a few hundred bytes, share one for each set of axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from cuboid.distributed.no_compile import uncompiled
from cuboid.tensor3d.layers.linear import autocast_dtype
from cuboid.tensor3d.sharding.bucketing import start_unshards
from cuboid.tensor3d.sharding.deferred_reduce import deferred_shards
from cuboid.tensor3d.sharding.param_group import ParamGroup, ParamGroupUnshard
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, ShardedParam, is_recomputing


@dataclass(frozen=True)
class _Place:
    """Where a parameter is."""

    module: ShardedModule
    name: str
    param: ShardedParam

    @property
    def shard(self) -> nn.Parameter:
        return self.module.get_parameter(self.name)

    def cast(self, dtype: torch.dtype) -> torch.Tensor:
        """The shard as it is to be gathered."""
        shard = self.module.get_parameter(self.name)
        if self.param.keeps is not None:
            self.param.is_made_of(shard)
        return shard.to(dtype)


class LayerPrefetcher:
    """Hooks of a layer that unshard its parameters, and prefetch those of its neighbours.

    Args:
        layer: as the model calls it.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._weights: list[_Place] = []
        small: list[_Place] = []
        sharded = (module for module in layer.modules() if isinstance(module, ShardedModule) and module.is_prefetched)
        for module in sharded:
            for name, param in module.sharded_params.items():
                if param.ranks > 1:
                    is_small = len(param.layout.shape) == 1 or name in module.gathered_once
                    (small if is_small else self._weights).append(_Place(module, name, param))
        self._groups = [ParamGroup(members) for members in _alike(small)]
        self._has_begun = False
        self._started: list[ParamGroupUnshard] = []
        self._next: LayerPrefetcher | None = None
        self._previous: LayerPrefetcher | None = None
        #: In which the weights were used by the forward that ran last: autocast is off in backward.
        self._dtypes: list[torch.dtype] = []
        if self._groups or self._weights:
            layer.register_forward_pre_hook(self._before)
            layer.register_forward_hook(self._after)

    def follow(self, previous: LayerPrefetcher) -> None:
        """Say which layer runs before this one."""
        self._previous, previous._next = previous, self

    def reset(self) -> None:
        """Discard what was prefetched for a layer that never ran, or whose recomputation ended early."""
        self._clear()
        self._has_begun, self._started = False, []
        for place in self._weights:
            place.param.discard()

    def _clear(self) -> None:
        for place in self._weights:
            place.module.prefetched_shards.pop(place.name, None)
        for group in self._groups:
            group.clear()

    def _begin(self) -> None:
        """Start to unshard everything for a forward, unless that was done."""
        if self._has_begun:
            return
        self._has_begun = True
        self._clear()
        self._started = [group.start() for group in self._groups]
        if not self._weights:
            return
        shards = [place.cast(autocast_dtype(place.shard)) for place in self._weights]
        trained = []
        for number, (place, shard) in enumerate(zip(self._weights, shards, strict=True)):
            store = place.module.weight_gradients
            # A shard whose gradient is deferred to a store is detached: a node for it would run without a gradient.
            is_deferred = store is not None and place.name == "weight" and store.defers(shard)
            if torch.is_grad_enabled() and shard.requires_grad and not is_deferred:
                trained.append(number)
        if trained:
            shards_in_use, deferred = deferred_shards([shards[number] for number in trained])
            for number, shard in zip(trained, shards_in_use, strict=True):
                self._weights[number].module.prefetched_shards[self._weights[number].name] = shard, deferred
        start_unshards([place.param for place in self._weights], shards)

    @uncompiled
    def _before(self, *_: Any) -> None:
        self._begin()
        for started in self._started:
            started.finish()
        self._has_begun, self._started = False, []
        if self._next is not None and not is_recomputing():
            self._next._begin()

    @uncompiled
    def _after(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._clear()
        hidden = output[0] if isinstance(output, tuple) else output
        if self._weights and hidden.requires_grad and not is_recomputing():
            self._dtypes = [autocast_dtype(place.shard) for place in self._weights]
            # A decoder's layers have other weights than the encoder's before them.
            before = [] if self._previous is None else self._previous._dtypes
            hidden.register_hook(partial(self._before_backward, self._dtypes, before))

    def _before_backward(self, dtypes: Sequence[torch.dtype], before: Sequence[torch.dtype], _: torch.Tensor) -> None:
        self._begin_backward(dtypes)
        if self._previous is not None and before:
            self._previous._begin_backward(before)

    def _begin_backward(self, dtypes: Sequence[torch.dtype]) -> None:
        """Start to unshard the weights, the last first."""
        shards = [place.cast(dtype) for place, dtype in zip(self._weights, dtypes, strict=True)]
        start_unshards([place.param for place in reversed(self._weights)], shards[::-1])


class ModelPrefetcher:
    """All layers of a model; a forward pre-hook of what runs them.

    Args:
        runs: layers that run one after another, in their order. A forward runs one of these lists.
    """

    def __init__(self, runs: Sequence[Sequence[nn.Module]]) -> None:
        self._layers: list[LayerPrefetcher] = []
        for layers in runs:
            own = [LayerPrefetcher(layer) for layer in layers]
            for previous, layer in pairwise(own):
                layer.follow(previous)
            self._layers += own

    @uncompiled
    def __call__(self, *_: Any) -> None:
        """Begin anew, whatever became of the forward before."""
        for layer in self._layers:
            layer.reset()


def _alike(places: Sequence[_Place]) -> Iterator[list[_Place]]:
    """Those that one collective can gather: of the same dtype, over the same axes."""
    found: dict[Any, list[_Place]] = {}
    for place in places:
        key = place.module.layout(place.name).fsdp_axes, place.shard.dtype
        found.setdefault(key, []).append(place)
    yield from found.values()
