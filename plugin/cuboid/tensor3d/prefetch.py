"""Prefetch: unshards a layer's parameters while the layer that runs before it computes, in forward and in backward.

Weights are unsharded one by one, so that the first product can start as soon as the first weight is complete. Norm
weights and biases, which would each need a collective of a few hundred bytes, share one for each set of axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from cuboid.distributed.axis_collectives import positions_are_whole
from cuboid.distributed.no_compile import uncompiled
from cuboid.distributed.topology import Axis
from cuboid.tensor3d.layers.linear import autocast_dtype
from cuboid.tensor3d.running_forward import check_called_inside, forward_runs
from cuboid.tensor3d.sharding.bucketing import start_unshards
from cuboid.tensor3d.sharding.deferred_reduce import deferred_shards
from cuboid.tensor3d.sharding.fp8_blocks import BlockForm
from cuboid.tensor3d.sharding.layer_blocks import Enter, LayerBlocks, Leave
from cuboid.tensor3d.sharding.param_group import KeptGroup, ParamGroup, ParamGroupUnshard
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, ShardedParam, is_recomputing


@dataclass(frozen=True)
class _Place:
    """A sharded parameter of a layer: its module, its name there, and its life cycle."""

    module: ShardedModule
    name: str
    param: ShardedParam

    @property
    def shard(self) -> torch.Tensor:
        # Not `get_parameter`: `torch.func.functional_call` puts tensors in the places of parameters.
        shard: torch.Tensor = getattr(self.module, self.name)
        return shard

    def cast(self, dtype: torch.dtype) -> torch.Tensor:
        """The shard, cast to the dtype in which it is gathered."""
        shard: torch.Tensor = getattr(self.module, self.name)
        if self.param.four_bits is not None:
            return shard
        if self.param.optimizer_steps is not None:
            self.param.set_parameter(shard)
        return shard.to(dtype)


class LayerPrefetcher:
    """Hooks of a layer that unshard its parameters, and prefetch those of its neighbours.

    Before a layer's forward, the next layer's all-gathers are started; before its backward, the previous layer's.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        #: The weights' blocks, while the layer is compiled and so takes them as plain tensors.
        self._blocks: LayerBlocks | None = None
        self._has_hooks = False
        self.collect()
        self._has_begun = False
        self._started: list[ParamGroupUnshard | KeptGroup] = []
        self._next: LayerPrefetcher | None = None
        self._previous: LayerPrefetcher | None = None
        #: The dtypes that the last forward used the weights in. Backward can't ask autocast, which is off there.
        self._dtypes: list[torch.dtype] = []

    def collect(self) -> None:
        """Find the layer's sharded parameters; again after adapters came into it or went."""
        self._weights: list[_Place] = []
        small: list[_Place] = []
        sharded = (m for m in self._layer.modules() if isinstance(m, ShardedModule) and m.is_prefetched)
        for module in sharded:
            for name, param in module.sharded_params.items():
                if param.ranks > 1:
                    # Norm weights and biases: autograd saves their blocks, so backward needn't gather them again.
                    is_small = len(param.spec.shape) == 1 or name in module.gathered_once
                    (small if is_small else self._weights).append(_Place(module, name, param))
        # One collective can gather those over the same axes, if they have one dtype.
        by_axes: dict[tuple[Axis, ...], list[_Place]] = {}
        for place in small:
            by_axes.setdefault(place.param.spec.fsdp_axes, []).append(place)
        self._groups = [ParamGroup(members) for members in by_axes.values()]
        self._mesh = next((place.param.mesh for place in (*small, *self._weights)), None)
        if self._blocks is not None:
            self._blocks = LayerBlocks(self._weights)
        if (self._groups or self._weights) and not self._has_hooks:
            self._has_hooks = True
            self._layer.register_forward_pre_hook(self._before)
            self._layer.register_forward_hook(self._after)

    def use_blocks(self, *, whole_layers: bool) -> None:
        """Give the layer its weights as plain tensors, as ``whole_layers``, or let each product unshard its own."""
        self.reset()
        self._blocks = None
        # Blocks that are computed whole unshard their parameters themselves, but not in a graph.
        self.collect()
        self._blocks = LayerBlocks(self._weights) if whole_layers else None

    def is_of(self, layer: nn.Module) -> bool:
        """Whether it is this layer's."""
        return self._layer is layer

    def reset(self) -> None:
        """Discard prefetched parameters of a layer that didn't run, or whose recomputation stopped early."""
        self._clear()
        self._has_begun, self._started = False, []
        for place in self._weights:
            place.param.discard()
        if self._blocks is not None:
            self._blocks.wait()

    def _clear(self) -> None:
        for place in self._weights:
            place.module.prefetched_shards.pop(place.name, None)
        if self._blocks is not None:
            self._blocks.clear()
        for group in self._groups:
            group.clear()

    def _begin(self) -> None:
        """Start to unshard all parameters for a forward, unless the previous layer's forward has."""
        if self._has_begun:
            return
        self._has_begun = True
        self._clear()
        self._started = [started for group in self._groups for started in group.start()]
        if not self._weights or positions_are_whole():
            # Few tokens are sent to the shards of the weights instead, or each product unshards its own.
            return
        shards = [place.cast(autocast_dtype(place.shard)) for place in self._weights]
        trained = []
        for number, (place, shard) in enumerate(zip(self._weights, shards, strict=True)):
            store = place.module.weight_gradients
            # A shard whose gradient is left to a store (W) is detached: an autograd node for it would get no gradient.
            is_deferred = store is not None and place.name == "weight" and store.defers(shard)
            if torch.is_grad_enabled() and shard.requires_grad and not is_deferred:
                trained.append(number)
        if trained:
            # Before the previous layer's forward has run, so that autograd runs this node after that layer's backward.
            shards_in_use, deferred = deferred_shards([shards[number] for number in trained])
            for number, shard in zip(trained, shards_in_use, strict=True):
                self._weights[number].module.prefetched_shards[self._weights[number].name] = shard, deferred
        if self._blocks is None:
            params = [place.param for place in self._weights]
            start_unshards(params, shards, BlockForm.WIDE if is_recomputing() else BlockForm.ROWS)
        else:
            # Transformers' mark of a layer whose forward is checkpointed, inside of a graph as well.
            is_recomputed = bool(getattr(self._layer, "gradient_checkpointing", False))
            self._blocks.start(shards, is_recomputed=is_recomputed)

    @uncompiled
    def _before(self, layer: nn.Module, _: Any) -> None:
        if self._mesh is not None and not forward_runs():
            check_called_inside(layer, self._mesh)
        self._begin()
        for started in self._started:
            started.finish()
        if self._blocks is not None and self._weights:
            self._blocks.put()
        self._has_begun, self._started = False, []
        # A recomputation runs in backward, where the next layer is already done.
        if self._next is not None and not is_recomputing():
            self._next._begin()

    @uncompiled
    def _after(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._clear()
        hidden = output[0] if isinstance(output, tuple) else output
        if self._blocks is not None:
            if not (self._keeps_blocks and hidden.requires_grad):
                self._blocks.free()
            return
        if self._weights and hidden.requires_grad and not is_recomputing():
            self._dtypes = [autocast_dtype(place.shard) for place in self._weights]
            # Another layer's weights may differ in number and dtype (an encoder's before a decoder's).
            previous_dtypes = [] if self._previous is None else self._previous._dtypes
            hidden.register_hook(partial(self._before_backward, self._dtypes, previous_dtypes))

    @property
    def _keeps_blocks(self) -> bool:
        """Whether "weight_gather" is "step"."""
        return any(place.param.optimizer_steps is not None for place in self._weights)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Begin a compiled layer's graph, whose input is ``x``."""
        if self._blocks is None or not self._weights or not x.requires_grad or not torch.is_grad_enabled():
            return x
        entered: torch.Tensor = Enter.apply(self._blocks, x)
        return entered

    def leave(self, output: Any) -> Any:
        """End a compiled layer's graph: before its backward, the blocks are unsharded again."""
        if self._blocks is None or not self._weights or not torch.is_grad_enabled():
            return output
        is_tuple = isinstance(output, tuple)
        outputs = list(output) if is_tuple else [output]
        numbers = [n for n, x in enumerate(outputs) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not numbers:
            return output
        self._dtypes = [autocast_dtype(place.shard) for place in self._weights]
        previous_dtypes = [] if self._previous is None else self._previous._dtypes
        begin = partial(self._unshard_before_backward, self._blocks, self._dtypes, previous_dtypes)
        for number, left in zip(numbers, Leave.apply(begin, *(outputs[n] for n in numbers)), strict=True):
            outputs[number] = left
        return tuple(outputs) if is_tuple else outputs[0]

    def _unshard_before_backward(
        self, blocks: LayerBlocks, dtypes: Sequence[torch.dtype], previous_dtypes: Sequence[torch.dtype]
    ) -> None:
        # Those of the forward: since then, the layers may have been found not to be graphs.
        blocks.start_backward(self._cast(dtypes))
        blocks.wait()
        if self._previous is not None and previous_dtypes:
            self._previous._begin_backward(previous_dtypes)

    def _cast(self, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        return [place.cast(dtype) for place, dtype in zip(self._weights, dtypes, strict=True)]

    def _before_backward(
        self, dtypes: Sequence[torch.dtype], previous_dtypes: Sequence[torch.dtype], _: torch.Tensor
    ) -> None:
        self._begin_backward(dtypes)
        if self._previous is not None and previous_dtypes:
            self._previous._begin_backward(previous_dtypes)

    def _begin_backward(self, dtypes: Sequence[torch.dtype]) -> None:
        """Start to unshard the weights for a backward, which needs the last one first."""
        shards = self._cast(dtypes)
        if self._blocks is None:
            start_unshards([place.param for place in reversed(self._weights)], shards[::-1], BlockForm.COLUMNS)
        else:
            self._blocks.start_backward(shards)


class ModelPrefetcher:
    """The prefetchers of all layers of a model, and a forward pre-hook of the module that runs the layers.

    ``runs`` has lists of layers, such as an encoder's and a decoder's, each in the order in which they run.
    """

    def __init__(self, runs: Sequence[Sequence[nn.Module]]) -> None:
        self._layers: list[LayerPrefetcher] = []
        for layers in runs:
            prefetchers = [LayerPrefetcher(layer) for layer in layers]
            for previous, layer in pairwise(prefetchers):
                layer._previous, previous._next = previous, layer
            self._layers += prefetchers

    def of(self, layer: nn.Module) -> LayerPrefetcher | None:
        """The prefetcher of a layer."""
        return next((prefetcher for prefetcher in self._layers if prefetcher.is_of(layer)), None)

    def collect(self) -> None:
        """See :meth:`LayerPrefetcher.collect`."""
        for layer in self._layers:
            layer.reset()
            layer.collect()

    @uncompiled
    def __call__(self, *_: Any) -> None:
        """Reset all layers before a forward, since the one before may have failed half-way."""
        for layer in self._layers:
            layer.reset()


def collect_prefetched(model: nn.Module) -> None:
    """Let a model's prefetchers find its sharded parameters again, after modules came into its layers or went."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, ModelPrefetcher):
                hook.collect()
