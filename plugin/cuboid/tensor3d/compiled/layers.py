"""Compiled layers: each kind of layer is one graph, which all layers of the kind share.

Around a layer's compiled code, its hooks run as ever: the prefetcher's, which unshard its weights, and a script's.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch._functorch.config
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch.utils.checkpoint import CheckpointPolicy

from cuboid.errors import CuboidError
from cuboid.tensor3d.compiled.forms import CompiledProjections, form_of
from cuboid.tensor3d.compiled.traffic import CountedGraph
from cuboid.tensor3d.layers.fused_projections import FusedProjections
from cuboid.tensor3d.layers.random_draws import RANDOM_FUNCTIONS, draws_at_all, without_draws
from cuboid.tensor3d.prefetch import LayerPrefetcher, ModelPrefetcher
from cuboid.tensor3d.sharding.sharded_param import ShardedModule

#: Graphs of all kinds of layers together: with and without gradients, masks and dynamic lengths.
_MOST_GRAPHS = 64
#: Hooks of modules inside of a layer that have a form in a graph.
_OURS = (FusedProjections, CompiledProjections)
#: Operations whose results are larger than what they are made of. The second one reads a segment's KV cache.
_AGAIN = ("all_gather_into_tensor", "segment_prefix")
#: What follows an all-gather until its result is one tensor, the ranks' parts in order.
_REARRANGE = frozenset({"wait_tensor", "unflatten", "movedim", "flatten", "getitem"})


class Segments(Protocol):
    """What layers that run segments of sequences are told about the segment that is running."""

    def use(self, *, in_graphs: bool) -> None:
        """Tell the layers' graphs, or let the layers find out by themselves."""

    def begin(self, number: int) -> None:
        """Before the layer with this number runs."""

    def complete(self, graph: torch.fx.GraphModule) -> None:
        """Complete a layer's graph."""


class CompiledLayers:
    """Compiles the layers of a model, or leaves all of them as they are.

    Args:
        layers: in the order in which they run.
        prefetcher: of the layers; None if nothing is unsharded.
        refuse: called with the reason, once, if the layers can't be compiled; nothing is changed then.
        segments: of a pipeline's stage; None if layers run whole sequences.

    Attributes:
        graphs: number of graphs that were compiled.
        reason: why the layers aren't compiled; None while they are.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        prefetcher: ModelPrefetcher | None,
        refuse: Callable[[str], None],
        segments: Segments | None = None,
    ) -> None:
        self._layers = list(layers)
        self._prefetchers: list[LayerPrefetcher | None] = [
            None if prefetcher is None else prefetcher.of(layer) for layer in layers
        ]
        self._refuse = refuse
        self._segments = segments
        self._inner = [module for module in _modules(layers) if module not in self._layers]
        #: Modules whose class was replaced, with the former one.
        self._swapped: list[tuple[nn.Module, type[nn.Module]]] = []
        self._mesh = next((module.mesh for module in _modules(layers) if isinstance(module, ShardedModule)), None)
        self._is_cut = self._mesh is not None and self._mesh.shape.size > 1
        self.graphs = 0
        self.reason = _obstacle(self._layers) or self._hooked()
        if self.reason is None:
            self._install()
        else:
            refuse(self.reason)

    def _install(self) -> None:
        for layer in self._layers:
            for module in layer.modules():
                form = form_of(type(module))
                if form is not None and form is not type(module):
                    self._swapped.append((module, type(module)))
                    module.__class__ = form
                for key, hook in module._forward_pre_hooks.items():
                    if isinstance(hook, FusedProjections):
                        module._forward_pre_hooks[key] = CompiledProjections(hook)
        # torch counts graphs by code object; with one of its own, a model's are apart from those of others.
        run = types.FunctionType(_run.__code__.replace(), _run.__globals__)
        takes_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
        limit: Any = {"recompile_limit": _MOST_GRAPHS} if takes_limit else {}
        compiled = torch.compile(run, fullgraph=True, backend=self._backend, **limit)
        # Before torch 2.13 the limit is one for all code, and read where a graph would be made.
        patch: Any = torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS)
        self._compiled = compiled if takes_limit else patch(compiled)
        for number, layer in enumerate(self._layers):
            layer.forward = functools.partial(self._forward, number)
        if self._segments is not None:
            self._segments.use(in_graphs=True)
        for prefetcher in self._prefetchers:
            if prefetcher is not None:
                prefetcher.use_blocks(whole_layers=True)

    def _uninstall(self) -> None:
        for module, cls in self._swapped:
            module.__class__ = cls
        self._swapped.clear()
        if self._segments is not None:
            self._segments.use(in_graphs=False)
        for layer, prefetcher in zip(self._layers, self._prefetchers, strict=True):
            del layer.forward
            if prefetcher is not None:
                prefetcher.use_blocks(whole_layers=False)
            for module in layer.modules():
                for key, hook in module._forward_pre_hooks.items():
                    if isinstance(hook, CompiledProjections):
                        module._forward_pre_hooks[key] = hook.fused

    def _forward(self, number: int, *args: Any, **kwargs: Any) -> Any:
        layer, prefetcher = self._layers[number], self._prefetchers[number]
        if number == 0:
            self.check_hooks()
        if self.reason is not None:
            return type(layer).forward(layer, *args, **kwargs)
        if self._segments is not None:
            self._segments.begin(number)
        if prefetcher is not None:
            if args:
                args = (prefetcher.enter(args[0]), *args[1:])
            elif "hidden_states" in kwargs:
                kwargs["hidden_states"] = prefetcher.enter(kwargs["hidden_states"])
        try:
            if torch._C._len_torch_function_stack():
                with without_draws():
                    output = self._compiled(layer, *args, **kwargs)
            else:
                output = self._compiled(layer, *args, **kwargs)
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, _DrawsError):
                raise CuboidError(
                    f"torch.compile failed for {type(layer).__name__}, on this rank at least; leave "
                    f"tensor_parallel.compile out. It said: {error}"
                ) from error
            self.give_up(f"{type(layer).__name__} {error.inner_exception}")
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            # All ranks come here, since they trace the same code.
            self.give_up(f"{type(layer).__name__} isn't one graph: {_first_lines(error)}")
        else:
            return output if prefetcher is None else prefetcher.leave(output)
        # Nothing of the layer has run.
        return type(layer).forward(layer, *args, **kwargs)

    def check(self) -> None:
        """Look for obstacles again, after modules came into the layers."""
        reason = None if self.reason is not None else _obstacle(self._layers)
        if reason is not None:
            self.give_up(reason)

    def check_hooks(self) -> None:
        """Look for hooks of modules inside of the layers: graphs have no guards for them, and would leave them out."""
        reason = self._hooked()
        if reason is not None:
            self.give_up(reason)

    def _hooked(self) -> str | None:
        for module in self._inner:
            hooks = module._forward_pre_hooks
            if (
                module._forward_hooks
                or module._backward_hooks
                or module._backward_pre_hooks
                or (hooks and not all(isinstance(hook, _OURS) for hook in hooks.values()))
            ):
                return f"a {type(module).__name__} has a hook, which a graph would leave out"
        return None

    def give_up(self, reason: str) -> None:
        """Let the layers run uncompiled from now on."""
        if self.reason is not None:
            return
        self.reason = reason
        self._uninstall()
        self._refuse(reason)

    def _backend(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if self._is_cut:
            check_draws_nothing(graph)
        self.graphs += 1
        recompute_gathers(graph)
        if self._segments is not None:
            self._segments.complete(graph)
        # A cached pair of graphs would come without being looked at; Inductor's own cache of kernels stays.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            inductor: Any = lookup_backend("inductor")
            return inductor(graph, inputs, inner_compile=self._compile)

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compile a forward's or a backward's graph, whose collectives are counted."""
        run = compile_graph(graph, inputs, **options)
        if self._mesh is None or not self._is_cut:
            return run
        return CountedGraph(graph, run, self._mesh.counters_by_group())


def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Compile a graph of aten's operations by Inductor."""
    # Four seconds to import; nothing but compiling needs it.
    return importlib.import_module("torch._inductor.compile_fx").compile_fx_inner(graph, inputs, **options)


def _run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A layer's own forward, with transformers' activation checkpointing around it, if that is on."""
    return type(layer).forward(layer, *args, **kwargs)


def _obstacle(layers: Sequence[nn.Module]) -> str | None:
    """Why layers can't be compiled; None if nothing is known that speaks against it."""
    for module in _modules(layers):
        if form_of(type(module)) is None:
            return f"{type(module).__name__} has no form in a graph"
        for hook in module._forward_pre_hooks.values():
            # Those of the layers themselves run outside of the graph.
            is_ours = type(hook).__module__.startswith("cuboid.") and module not in layers
            if is_ours and not isinstance(hook, _OURS):
                return f"{type(hook).__name__} of {type(module).__name__} has no form in a graph"
    return None


def _first_lines(error: Exception) -> str:
    """What Dynamo says it doesn't trace, and why, without its hints."""
    lines = [line.strip() for line in str(error).splitlines()]
    end = next((number for number, line in enumerate(lines) if line.startswith("Hint:")), len(lines))
    return " ".join(line for line in lines[:end] if line) or type(error).__name__


def _modules(layers: Sequence[nn.Module]) -> Iterator[nn.Module]:
    for layer in layers:
        yield from layer.modules()


class _DrawsError(Exception):
    """A graph draws random numbers, which would be the same on ranks that have different parts of an activation."""


def check_draws_nothing(graph: torch.fx.GraphModule) -> None:
    """Check that a graph draws no random numbers; a dropout that drops nothing is none."""
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            if name in RANDOM_FUNCTIONS and draws_at_all(name, node.args, node.kwargs):
                raise _DrawsError(
                    f"draws random numbers in training ({name}), for which graphs have no seeds of a mesh; set dropout "
                    "to 0 in the model's config"
                )


def recompute_gathers(graph: torch.fx.GraphModule) -> None:
    """Mark a graph's all-gathers, and what rearranges their results, to be run again in backward.

    Otherwise gathered inputs would be saved, which take as many times the memory as there are ranks. So would the keys
    and values of all earlier segments, which are in the KV cache.
    """
    for part in graph.modules():
        gathered: set[torch.fx.Node] = set()
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            name = getattr(node.target, "__name__", "")
            if name.startswith(_AGAIN) or (name in _REARRANGE and not gathered.isdisjoint(node.all_input_nodes)):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                gathered.add(node)
