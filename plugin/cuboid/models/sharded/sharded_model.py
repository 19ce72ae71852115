"""A sharded model: the user's own class, whose forward takes whole micro-batches and returns whole results."""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from cuboid.config.schema import TensorParallelConfig
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.no_compile import uncompiled
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.failures.rank_agreement import StepGuard
from cuboid.models.architectures.media import AUDIO, IMAGES, Medium
from cuboid.models.architectures.refusals import compiling_refused, transforms_refused
from cuboid.models.architectures.roles import layer_names, tower_names
from cuboid.models.attention.forward_context import forward_context, is_in_forward
from cuboid.models.attention.segments import AttentionRecord, hang_record, uses_interface
from cuboid.models.autograd_graph import IS_COPY, IS_OUTPUT
from cuboid.models.kinds.forward import LooksUpLoss
from cuboid.models.kinds.hidden_states import forward_of_base
from cuboid.models.kinds.media.features import AddsFeatures, ComputesAudio, ComputesImages
from cuboid.models.kinds.media.with_text import WithText
from cuboid.models.kinds.model_kind import counts_positions
from cuboid.models.kinds.registry import kind_of
from cuboid.models.kinds.sharding import Sharding, WholeModel
from cuboid.models.sharded.compilation import compile_layers
from cuboid.models.sharded.customizations import AsSharded, guard_hooks, is_of_framework
from cuboid.models.sharded.model_interface import WholeInterface
from cuboid.models.sharded.parallel_plan import ParallelPlan
from cuboid.models.sharded.parallelize import ShardOf, attention_modules, parallelize_modules, whole_blocks
from cuboid.models.sharded.quantization import QuantizedLayers
from cuboid.optim.taken_gradients import readable
from cuboid.tensor3d.layers.whole_block import ImageSplit
from cuboid.tensor3d.running_forward import begin_forward, end_forward

#: See :func:`sharded_models`. By a number that counts up, so that their order is the same on all ranks.
_sharded_models: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class PlainInstances:
    """Mixed into a sharded class: calling the class makes a plain model, as scripts do by ``type(model)(config)``."""

    _cuboid_plain: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Copying calls this without arguments, and fills the instance itself.
        return cls._cuboid_plain(*args, **kwargs) if args or kwargs else super().__new__(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        _, args, *others = reduced
        return _Copies(), args, *others


class _Copies:
    """Makes an empty instance for a copy, of which ``copy`` doesn't ask for more; a pickle would have to name it."""

    def __call__(self, cls: Any) -> Any:
        return cls.__new__(cls)

    def __reduce_ex__(self, _: Any) -> Any:
        raise CuboidError(
            "a sharded model can't be pickled (torch.save(model), pickle, a process that is given it): its process "
            "groups and this rank's shards are of no use elsewhere. cuboid.save_pretrained(model, folder), which all "
            "ranks call, writes a whole model, and an engine's save_checkpoint a checkpoint"
        )


class ShardedModel(WholeInterface, LooksUpLoss, PlainInstances):
    """Mixed into the model's own class by :func:`shard_modules`."""

    cuboid: Sharding

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        model = super().__new__(cls, *args, **kwargs)
        if isinstance(model, ShardedModel):
            # A copy.
            keep_track_of(model)
        return model

    def save_pretrained(self, directory: Any, **kwargs: Any) -> None:
        """Save the whole model as ``PreTrainedModel.save_pretrained`` does. Collective; each rank writes its share."""
        save = self.cuboid.state.save
        assert save is not None, "a model that neither a loader nor cuboid.shard made"
        save(self, directory, **kwargs)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Clear the gradients, also those that an optimizer keeps outside of ``.grad``."""
        optimizer = None if self.cuboid.state.optimizer is None else self.cuboid.state.optimizer()
        if optimizer is not None and not optimizer.is_of(self):
            # A copy's gradients are its own.
            optimizer = None
        if optimizer is not None:
            optimizer.leave_gradients()
        super().zero_grad(set_to_none)  # type: ignore[misc]
        if optimizer is not None:
            optimizer.zero_grad()

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Of casts and moves, which look at ``.grad``.
        with readable(self.parameters()):
            return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def counted_parameters(self: Any) -> list[nn.Parameter]:
        """This rank's parameters for sums over the ranks of one model copy: each element is counted on one rank."""
        return list(self.parameters())


class ShardedBase(PlainInstances):
    """Mixed into the class of a sharded model's base model by :func:`shard_modules`."""

    cuboid: Sharding


class ShardedTextModel(AddsFeatures, PlainInstances):
    """Mixed into the class of a text model that adds features of images to hidden states between its layers."""

    cuboid: Sharding


class TakesImages(ComputesImages, PlainInstances):
    """Mixed into the class of a base model that computes features of images."""


class TakesAudio(ComputesAudio, PlainInstances):
    """Mixed into the class of a base model that computes features of audio."""


_TAKES = {IMAGES: TakesImages, AUDIO: TakesAudio}


def shard_modules(
    model: PreTrainedModel,
    parallel_plan: ParallelPlan,
    mesh: Mesh,
    config: TensorParallelConfig,
    shard_of: ShardOf,
    quantized: QuantizedLayers | None = None,
) -> PreTrainedModel:
    """Shard a model over a mesh, in place.

    Args:
        model: the whole model, perhaps with parameters that are already shards.
        parallel_plan: how its modules are sharded over ``mesh``.
        mesh: this rank's mesh.
        config: the tensor parallel settings.
        shard_of: see :data:`~cuboid.models.sharded.parallelize.ShardOf`.
        quantized: the layers whose weights are stored in 4 bits.
    """
    shapes = {name: spec.shape for name, spec in parallel_plan.by_parameter.items()}
    kind = kind_of(type(model), model.config)
    whole_model = WholeModel.of(model, kind, learned_positions(model), shapes)
    verdict = parallel_plan.verdict
    limits = replace(
        whole_model.limits,
        types=getattr(model.config, "type_vocab_size", None) if verdict.token_types else None,
        counts=whole_model.limits.positions is not None and counts_positions(model),
        first_position=first_position(model) if verdict.inputs == "only ids" else 0,
        shifts_labels=kind.is_causal,
    )
    whole_model = replace(whole_model, limits=limits)
    late, draws = parallelize_modules(model, parallel_plan, mesh, config, shard_of, quantized=quantized)
    attention = {name: model.get_submodule(name) for name in attention_modules(parallel_plan)}
    # An encoder's and a decoder's configs may be copies of the model's.
    configs = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    named = frozenset(config._attn_implementation for config in configs)
    images = late if isinstance(late, ImageSplit) else None
    for module in attention.values():
        hang_record(module, AttentionRecord(mesh, images=images, implementations=named))
    blocks = whole_blocks(parallel_plan)
    for name in blocks:
        # A block that is computed whole has all heads, and sets its own random number generator.
        for module in model.get_submodule(name).modules():
            hang_record(module, AttentionRecord(implementations=named))
    base = type(model)
    callers = (*attention.values(), *map(model.get_submodule, blocks))
    model.cuboid = Sharding(
        mesh,
        config,
        base,
        kind,
        whole_model,
        verdict,
        late=late,
        draws=draws,
        head=model.get_output_embeddings(),
        makes_masks=any(uses_interface(module) for module in callers),
        splits_routers=any(role.kind == "router" for role in parallel_plan.roles.values()),
    )
    inner: Any = model.base_model
    if inner is not model:
        inner.cuboid = model.cuboid
        plain: Any = type(inner)
        inner.__class__ = _sharded_base_class(_taking(plain, kind.media) if isinstance(kind, WithText) else plain)
    if isinstance(kind, WithText):
        for module in model.modules():
            if AddsFeatures.belongs_to(module):
                vars(module)["cuboid"] = model.cuboid
                cls: Any = type(module)
                module.__class__ = _with_mixin(cls, ShardedTextModel)
    is_cut = mesh.shape.size > 1
    early = next(iter((*attention, *blocks)), None)
    if early is not None:
        around = next((name for name in layer_names(model) if early.startswith(f"{name}.")), early)
        model.get_submodule(around).register_forward_hook(_read_check)
    if config.compile:
        compile_layers(model)
    taking: Any = _taking(base, kind.media) if inner is model and isinstance(kind, WithText) else base
    model.__class__ = _sharded_class(taking)
    keep_track_of(model)
    if is_cut:
        guard_hooks(model, runs_whole=True)
    model.cuboid.state.made = AsSharded(model, is_cut=is_cut)
    return model


def _taking(base: Any, media: tuple[Medium, ...]) -> Any:
    """A subclass of a base model's class that computes features of a rank's images or clips."""
    for medium in media:
        base = _with_mixin(base, _TAKES[medium])
    return base


def first_position(model: PreTrainedModel) -> int:
    """The first index of learned positions. RoBERTa's tables, for example, begin after the padding token's row."""
    padded = [table.padding_idx for table in position_tables(model) if table.padding_idx is not None]
    return max(padded, default=-1) + 1


def position_tables(model: PreTrainedModel) -> list[nn.Embedding]:
    """The embeddings of learned positions."""
    try:
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    except ValueError:  # Composite configs may have several text configs.
        return []
    of_towers = {part for name in tower_names(model) for part in model.get_submodule(name).modules()}
    # An encoder's and a decoder's tables of tokens are modules of their own, tied to the model's.
    tied = {name.rpartition(".")[0] for pair in model.all_tied_weights_keys.items() for name in pair}
    others = (module for name, module in model.named_modules() if module not in of_towers and name not in tied)
    tables = [m for m in others if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings()]
    # Some tables have a few rows more than there are positions.
    return [table for table in tables if limit is not None and limit <= table.num_embeddings <= limit + 8]


def learned_positions(model: PreTrainedModel) -> int | None:
    """The number of learned positions; None if positions aren't learned."""
    limit: int | None = model.config.get_text_config().max_position_embeddings if position_tables(model) else None
    return limit


@uncompiled
def _read_check(*_: Any) -> None:
    """A forward hook of the first layer, at which the host waits for the result of the batch check.

    Waiting here is late enough that the device has queued work and doesn't idle. It is early enough to report that
    ranks' sequences differ in length: mismatched collectives hang the device, but the host gets here.
    """
    check = forward_context().check
    if check is not None:
        check.read()


def keep_track_of(model: Any) -> None:
    """Let :func:`sharded_models` return a model while it lives."""
    _sharded_models[next(_numbers)] = model


def sharded_models() -> list[Any]:
    """All sharded models and stages of this process, also those of other threads, in the order in which they began."""
    return [model for model in list(_sharded_models.values()) if "cuboid" in vars(model)]


def mesh_of(model: nn.Module) -> Mesh:
    """The mesh of a sharded model, or of an engine that wraps one.

    Raises:
        CuboidError: the model isn't sharded.
    """
    return sharding_of(model).mesh


def sharding_of(model: nn.Module) -> Sharding:
    """The :class:`Sharding` of a sharded model, or of an engine that wraps one."""
    inner = unwrap(model)
    if not isinstance(inner, ShardedModel):
        raise CuboidError(
            f"{type(inner).__name__} isn't sharded; use cuboid.from_pretrained, cuboid.shard or deepspeed.initialize"
        )
    return inner.cuboid


def unwrap(model: nn.Module) -> nn.Module:
    """The sharded model inside engines and wrappers that keep it as ``module``, in models of PEFT, and in a module of a
    script that has just one. Anything else is returned as far as it was unwrapped.
    """
    while not isinstance(model, ShardedModel):
        if callable(getattr(model, "get_base_model", None)):
            model = model.get_base_model()  # type: ignore[operator]
        elif isinstance(getattr(model, "module", None), nn.Module):
            model = model.module  # type: ignore[assignment]
        else:
            inside = list(itertools.islice(_sharded_in(model), 2))
            return inside[0] if len(inside) == 1 else model
    return model


def _sharded_in(module: nn.Module) -> Iterator[nn.Module]:
    """The sharded models among a module's descendants, without a look into them."""
    for child in module.children():
        if isinstance(child, ShardedModel):
            yield child
        else:
            yield from _sharded_in(child)


def plain_class(cls: type[Any]) -> type[Any]:
    """The class that a sharded class was made from; any other class itself."""
    while issubclass(cls, PlainInstances):
        cls = cls._cuboid_plain
    return cls


def derived_class(mixin: type[Any] | None, base: type[Any], forward: Callable[..., Any]) -> type[Any]:
    """A subclass of ``mixin`` and ``base``, in this order, with the base's name, so that configs and checkpoints
    contain the original name.
    """
    members = {"forward": forward, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (mixin or PlainInstances, base), {**members, "_cuboid_plain": base})


@functools.cache
def _with_mixin(base: type[nn.Module], mixin: type[PlainInstances]) -> type[nn.Module]:
    """A subclass with the same forward."""
    return derived_class(mixin, base, base.forward)


@functools.cache
def _sharded_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    bind = _binder(base.forward)

    # Trainers read this signature to learn which columns and loss arguments the model takes.
    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _reject_compiling(self)
        if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            raise transforms_refused(self)
        token = begin_forward(True)
        try:
            with StepGuard(self.cuboid.mesh, "forward"):
                run, arguments = functools.partial(base.forward, self), bind(self, args, kwargs)
                return _handed_out(self.cuboid.kind.forward(self, run, arguments), self.cuboid.state.made)
        finally:
            end_forward(token)

    return derived_class(ShardedModel, base, forward)


@functools.cache
def _sharded_base_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose forward takes whole micro-batches, unless the model around it calls it."""
    bind = _binder(base.forward)

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _reject_compiling(self)
        if is_in_forward():
            return base.forward(self, *args, **kwargs)
        if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            raise transforms_refused(self)
        # The forward of a classifier around it has a guard, too; the outer one leaves alone what this one has reported.
        token = begin_forward(True)
        try:
            with StepGuard(self.cuboid.mesh, "forward"):
                run, arguments = functools.partial(base.forward, self), bind(self, args, kwargs)
                self.cuboid.kind.check_base_call(self)
                return _handed_out(forward_of_base(self, run, arguments), self.cuboid.state.made)
        finally:
            end_forward(token)

    return derived_class(ShardedBase, base, forward)


def _handed_out(output: Any, made: AsSharded) -> Any:
    """The same output of a forward, whose backward raises an error if it is to be differentiated itself. Where a script
    goes on from it is marked."""
    if made.is_cut and torch.is_grad_enabled():
        # The hidden states of all layers are a tuple inside the output.
        for x in tree_leaves(tuple(output) if isinstance(output, tuple) else tuple(output.values())):
            if isinstance(x, torch.Tensor) and x.grad_fn is not None:
                x.register_hook(_check_differentiated_once)
                node: Any = x.grad_fn
                node.metadata[IS_OUTPUT] = True
                if IS_COPY in node.metadata:
                    register = functools.partial(_register_on_copy, weakref.ref(x))
                    vars(x).update(retain_grad=_refuse_copy, register_hook=register)
    return output


def _register_on_copy(reference: weakref.ref[torch.Tensor], hook: Any) -> Any:
    if not is_of_framework(hook):
        raise copy_refused()
    x = reference()
    assert x is not None
    return torch.Tensor.register_hook(x, hook)


def _refuse_copy() -> None:
    raise copy_refused()


def copy_refused() -> UnsupportedModelError:
    """The error where a script asks for the gradient of a hidden state that a sharded model has returned."""
    return UnsupportedModelError(
        "the gradient of an output's hidden_states: a sharded model returns gathered copies of them and goes on from "
        "each rank's part, so that what later layers add to the gradient would be missing. A forward hook of the "
        "layer, marked with cuboid.local_hook, can call register_hook of the part; or look at it in plain transformers"
    )


def _check_differentiated_once(_: torch.Tensor) -> None:
    # A backward that runs with gradients enabled is one with create_graph. Before any of its collectives.
    if torch.is_grad_enabled():
        raise UnsupportedModelError(
            "create_graph=True: the gradients of a sharded model can't be differentiated again, since its backward has "
            "collectives and fused kernels without a second derivative; gradient penalties and Hessians need a plain "
            "model on one rank"
        )


def _binder(forward: Callable[..., Any]) -> Callable[[Any, tuple, dict[str, Any]], dict[str, Any]]:
    """A function that returns the arguments of a call of ``forward`` by name."""
    signature = inspect.signature(forward)
    extra = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)

    def bind(model: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        arguments = dict(signature.bind(model, *args, **kwargs).arguments)
        del arguments["self"]
        arguments.update(arguments.pop(extra, {}) if extra else {})
        return arguments

    return bind


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _reject_compiling(model: Any) -> None:
    # torch.compile runs `assume_constant_result` functions eagerly, so the user sees this error instead of its own.
    raise compiling_refused(model)
