"""Compiled layers: each kind of layer is one graph, which all layers of the kind share.

Around a layer's compiled code, its hooks run as ever: the prefetcher's, which unshard its weights, and a script's.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch._functorch.config
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch.utils.checkpoint import CheckpointPolicy

from cuboid.errors import CuboidError
from cuboid.tensor3d.compiled.blocks import in_place
from cuboid.tensor3d.compiled.draws import DrawsInGraph, GraphSeeds, draws_in_common, drops, number_draws
from cuboid.tensor3d.compiled.forms import TAKE_BLOCKS, CompiledLatent, CompiledWhole, form_of
from cuboid.tensor3d.compiled.fp8_products import MESSAGE_DTYPE
from cuboid.tensor3d.compiled.hooks import has_form, latents_of, swap_hooks
from cuboid.tensor3d.compiled.split_backward import ProductsInGraph
from cuboid.tensor3d.compiled.traffic import CountedGraph
from cuboid.tensor3d.experts.router import ShardedRouter
from cuboid.tensor3d.layers.random_draws import RANDOM_FUNCTIONS, draws_at_all, without_draws
from cuboid.tensor3d.layers.whole_block import KeptWhole
from cuboid.tensor3d.prefetch import LayerPrefetcher, ModelPrefetcher
from cuboid.tensor3d.running_forward import check_called_inside, forward_runs
from cuboid.tensor3d.sharding.sharded_param import ShardedModule

#: Graphs of all kinds of layers together: with and without gradients, masks and dynamic lengths.
_MOST_GRAPHS = 64
#: How Dynamo's message names an exception of the code that it traces, and what that says.
_RAISED = re.compile(r"""raised exception \w+\((["'])(.+)\1\)$""", re.MULTILINE)
#: Operations whose results are larger than what they are made of. The second one reads a segment's KV cache, the third
#: has a token's features once for each of its experts.
_AGAIN = ("all_gather_into_tensor", "segment_prefix", "expert_rows")
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
        #: Modules whose class was replaced, with the former one.
        self._swapped: list[tuple[nn.Module, type[nn.Module]]] = []
        self._mesh = next((module.mesh for module in _modules(layers) if isinstance(module, ShardedModule)), None)
        self._is_cut = self._mesh is not None and self._mesh.shape.size > 1
        #: While the layers' graphs drop elements: their seeds.
        self._seeds: GraphSeeds | None = None
        self.graphs = 0
        self._find_modules()
        self.reason = self._obstacle() or self._hooked()
        if self.reason is None:
            self._install()
        else:
            refuse(self.reason)

    def _find_modules(self) -> None:
        self._inner = [module for module in _modules(self._layers) if module not in self._layers]
        #: By layer: modules whose own code reads their parameters.
        self._takers = [
            [module for module in layer.modules() if isinstance(module, TAKE_BLOCKS)] for layer in self._layers
        ]
        #: By layer: modules that compute something for a graph before it runs.
        self._preparing: list[list[Any]] = [
            [module for module in layer.modules() if getattr(module, "prepares_graph", False)] for layer in self._layers
        ]
        products = ProductsInGraph(self._layers)
        self._products = None if products.is_empty else products
        self._seeds = None
        if self._is_cut and self._mesh is not None and any(map(drops, _modules(self._layers))):
            self._seeds = GraphSeeds(self._mesh)

    def _use_forms(self) -> None:
        for module in _modules(self._layers):
            for latent in latents_of(module):
                self._swap(latent, CompiledLatent)
        for module in _modules(self._layers):
            form = form_of(type(module))
            if form is not None:
                self._swap(module, form)
            swap_hooks(module, in_graph=True)
            if isinstance(module, KeptWhole):
                module.is_prefetched = True
        for layer in self._layers:
            for number, block in enumerate((m for m in layer.modules() if isinstance(m, CompiledWhole)), 1):
                block.cuboid_seeds, block.cuboid_block = self._seeds, number

    def _swap(self, module: nn.Module, form: type[nn.Module]) -> None:
        if type(module) is not form:
            self._swapped.append((module, type(module)))
            module.__class__ = form

    def _install(self) -> None:
        self._use_forms()
        self._compiled = self._new_code()
        for number, layer in enumerate(self._layers):
            layer.forward = functools.partial(self._forward, number)
        if self._segments is not None:
            self._segments.use(in_graphs=True)
        for prefetcher in self._prefetchers:
            if prefetcher is not None:
                prefetcher.use_blocks(whole_layers=True)

    def _new_code(self) -> Callable[..., Any]:
        # torch counts graphs by code object; with one of its own, a model's are apart from those of others.
        run = types.FunctionType(_run.__code__.replace(), _run.__globals__)
        takes_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
        limit: Any = {"recompile_limit": _MOST_GRAPHS} if takes_limit else {}
        compiled = torch.compile(run, fullgraph=True, backend=self._backend, **limit)
        # Before torch 2.13 the limit is one for all code, and read where a graph would be made.
        patch: Any = torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS)
        return compiled if takes_limit else patch(compiled)

    def _uninstall(self) -> None:
        for module, cls in self._swapped:
            module.__class__ = cls
            for name in ("cuboid_seeds", "cuboid_block"):
                vars(module).pop(name, None)
        self._swapped.clear()
        if self._segments is not None:
            self._segments.use(in_graphs=False)
        for layer, prefetcher in zip(self._layers, self._prefetchers, strict=True):
            del layer.forward
            for module in layer.modules():
                swap_hooks(module, in_graph=False)
                if isinstance(module, KeptWhole):
                    module.is_prefetched = False
            if prefetcher is not None:
                prefetcher.use_blocks(whole_layers=False)

    def _forward(self, number: int, *args: Any, **kwargs: Any) -> Any:
        layer, prefetcher = self._layers[number], self._prefetchers[number]
        if torch.compiler.is_compiling():
            _refuse_compiling(layer)
        if self._mesh is not None and not forward_runs():
            check_called_inside(layer, self._mesh)
        if number == 0:
            self.check_hooks()
        if self.reason is not None:
            return type(layer).forward(layer, *args, **kwargs)
        if self._segments is not None:
            self._segments.begin(number)
        if self._products is not None:
            self._products.begin(number)
        if prefetcher is not None:
            if args:
                args = (prefetcher.enter(args[0]), *args[1:])
            elif "hidden_states" in kwargs:
                kwargs["hidden_states"] = prefetcher.enter(kwargs["hidden_states"])
        for module in self._preparing[number]:
            module.begin_graph()
        takers, seeds = self._takers[number], self._seeds if layer.training else None
        try:
            if takers or seeds is not None or torch._C._len_torch_function_stack():
                with without_draws(), in_place(takers), nullcontext() if seeds is None else seeds.of_layer():
                    output = self._compiled(layer, seeds, *args, **kwargs)
            else:
                output = self._compiled(layer, None, *args, **kwargs)
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
            for module in self._preparing[number]:
                module.end_graph()
            return output if prefetcher is None else prefetcher.leave(output)
        # Nothing of the layer has run.
        return type(layer).forward(layer, *args, **kwargs)

    def refresh(self) -> None:
        """Compile anew, after modules came into the layers or went, unless one of them is an obstacle."""
        if self.reason is not None:
            return
        self._find_modules()
        reason = self._obstacle() or self._hooked()
        if reason is not None:
            self.give_up(reason)
            return
        self._use_forms()
        self._compiled = self._new_code()
        for prefetcher in self._prefetchers:
            if prefetcher is not None:
                prefetcher.use_blocks(whole_layers=True)

    def check_hooks(self) -> None:
        """Look for hooks of modules inside of the layers: graphs have no guards for them, and would leave them out."""
        reason = self._hooked()
        if reason is not None:
            self.give_up(reason)

    def _obstacle(self) -> str | None:
        """Why the layers can't be compiled; None if nothing is known that speaks against it."""
        for layer, prefetcher in zip(self._layers, self._prefetchers, strict=True):
            for module in layer.modules():
                reason = _obstacle(module, has_blocks=prefetcher is not None)
                if reason is not None:
                    return reason
                for hook in module._forward_pre_hooks.values():
                    # Those of the layers themselves run outside of the graph.
                    is_ours = type(hook).__module__.startswith("cuboid.") and module is not layer
                    if is_ours and not has_form(hook):
                        return f"{type(hook).__name__} of {type(module).__name__} has no form in a graph"
        return None

    def _hooked(self) -> str | None:
        for module in self._inner:
            if (
                module._backward_hooks
                or module._backward_pre_hooks
                or (module._forward_pre_hooks and not all(map(has_form, module._forward_pre_hooks.values())))
                or (module._forward_hooks and not all(map(has_form, module._forward_hooks.values())))
            ):
                return f"a {type(module).__name__} has a hook{_whose(module)}, which a graph would leave out"
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
        draws = number_draws(graph)
        # A cached pair of graphs would come without being looked at; Inductor's own cache of kernels stays.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            inductor: Any = lookup_backend("inductor")
            run = inductor(graph, inputs, inner_compile=self._compile)
        return run if draws == 0 else functools.partial(self._run_drawing, draws, run)

    def _run_drawing(self, draws: int, run: Callable[..., Any], *inputs: Any) -> Any:
        if self._seeds is not None:
            self._seeds.count = draws
        return run(*inputs)

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compile a forward's or a backward's graph, whose collectives are counted."""
        drop_unused_gathers(graph)
        completed = None if self._products is None else self._products.completed(graph)
        mesh = self._mesh if self._is_cut else None
        counted = None if mesh is None else CountedGraph(graph, mesh.counters_by_group())
        run = compile_graph(graph, inputs, **options)
        if counted is not None:
            counted.run = run
            run = counted
        return run if completed is None else completed(run)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refuse_compiling(layer: nn.Module) -> None:
    # torch.compile calls such functions while it traces, so that a script sees this error.
    raise CuboidError(
        f"a script compiles {type(layer).__name__}, or what it is in, which tensor_parallel.compile compiles already: "
        "leave out either that key or layer.compile(), torch.compile and accelerate's regional compilation"
    )


def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Compile a graph of aten's operations by Inductor."""
    # Four seconds to import; nothing but compiling needs it.
    return importlib.import_module("torch._inductor.compile_fx").compile_fx_inner(graph, inputs, **options)


def _run(layer: nn.Module, seeds: GraphSeeds | None, *args: Any, **kwargs: Any) -> Any:
    """A layer's own forward, with transformers' activation checkpointing around it, if that is on."""
    if seeds is None:
        return type(layer).forward(layer, *args, **kwargs)
    with DrawsInGraph(seeds):
        return type(layer).forward(layer, *args, **kwargs)


def _obstacle(module: nn.Module, *, has_blocks: bool) -> str | None:
    name = type(module).__name__
    if form_of(type(module)) is None:
        return f"{name} has no form in a graph"
    if any(vars(module).get(key) for key in ("cuboid_late", "cuboid_images", "cuboid_everywhere", "cuboid_tower")):
        return f"{name} is computed whole, of activations that have no form in a graph"
    if isinstance(module, ShardedRouter) and module.is_random:
        return f"{name} draws random numbers, for which graphs have no seeds of a mesh"
    if draws_in_common(module):
        return f"{name} drops the same elements on several ranks, for which graphs have no seeds"
    if isinstance(module, ShardedModule) and any(p.four_bits for p in module.sharded_params.values()):
        return f"{name} has a weight of 4 bits, which has no form in a graph"
    is_sharded = isinstance(module, ShardedModule) and any(p.ranks > 1 for p in module.sharded_params.values())
    return f"{name} is in a layer whose weights aren't unsharded ahead" if is_sharded and not has_blocks else None


def _first_lines(error: Exception) -> str:
    """What Dynamo says it doesn't trace, and why, without its hints; of an exception in a layer's code, its text."""
    raised = _RAISED.search(str(error))
    if raised is not None:
        return raised.group(2)
    lines = [line.strip() for line in str(error).splitlines()]
    end = next((number for number, line in enumerate(lines) if line.startswith("Hint:")), len(lines))
    return " ".join(line for line in lines[:end] if line) or type(error).__name__


def _whose(module: nn.Module) -> str:
    """Says where a module's hooks come from, if not from a script."""
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    sources = {str(getattr(hook, "__module__", None)) for hooks in kinds for hook in hooks.values()}
    if any(source == "transformers.utils.output_capturing" for source in sources):
        return " of transformers, as all modules do whose outputs it can return (output_hidden_states and such)"
    return ""


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
    and values of all earlier segments, which are in the KV cache. Backward has no use for what is gathered in fp8.
    """
    for part in graph.modules():
        gathered: set[torch.fx.Node] = set()
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            name = getattr(node.target, "__name__", "")
            if _is_in_fp8(node):
                continue
            if name.startswith(_AGAIN) or (name in _REARRANGE and not gathered.isdisjoint(node.all_input_nodes)):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                gathered.add(node)


def _is_in_fp8(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dtype == MESSAGE_DTYPE


def drop_unused_gathers(graph: torch.fx.GraphModule) -> None:
    """Remove all-gathers whose results a forward's or a backward's graph doesn't use.

    The partition into both leaves them in forward, because waiting counts as an effect.
    """
    for node in reversed(graph.graph.nodes):
        if getattr(node.target, "namespace", None) == "_c10d_functional" and not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
