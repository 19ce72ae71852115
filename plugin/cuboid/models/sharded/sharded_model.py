"""A sharded model: the user's own class, whose forward takes whole micro-batches and returns whole results."""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils import ModelOutput

from cuboid.config.schema import TensorParallelConfig
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.no_compile import uncompiled
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.failures.rank_agreement import StepGuard
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.architectures.refusals import compiling_refused
from cuboid.models.architectures.roles import takes_pixels, token_embeddings
from cuboid.models.architectures.transformers_names import decoder_ids, keep_logits
from cuboid.models.attention.forward_context import WHOLE_IMAGES, Lengths, Packing, is_in_forward, knowing
from cuboid.models.attention.interface import check_reached, use_sharded_attention
from cuboid.models.attention.segments import uses_interface
from cuboid.models.batch.batch_check import BatchCheck, Limits
from cuboid.models.batch.length_cases import longest_sequence
from cuboid.models.batch.local_batch import LABELS, LocalBatch, given_tensors
from cuboid.models.cross_entropy.lm_head import is_in_head
from cuboid.models.cross_entropy.loss_forward import forward_with_bounded_loss
from cuboid.models.cross_entropy.loss_function import own_loss_of
from cuboid.models.kinds.model_kind import TARGETS, ModelKind
from cuboid.models.kinds.registry import kind_of
from cuboid.models.sharded.customizations import AsSharded, guard_hooks
from cuboid.models.sharded.model_interface import WholeInterface
from cuboid.models.sharded.parallel_plan import ParallelPlan
from cuboid.models.sharded.parallelize import ShardOf, attention_modules, parallelize_modules, whole_blocks
from cuboid.models.sharded.random_modules import ModelDraws
from cuboid.models.sharded.router_logits import whole_router_logits
from cuboid.tensor3d.layers.dropout import compared_by
from cuboid.tensor3d.layers.labels_head import LabelsHead
from cuboid.tensor3d.layers.vocab_cross_entropy import (
    gather_hidden,
    gather_logits,
    gather_rows,
    predicted,
    sharded_cross_entropy,
)
from cuboid.tensor3d.layers.whole_block import ImageSplit, LateSplit
from cuboid.tensor3d.sharding.sharded_param import is_recomputing

#: Entries of a base model's output that the head around it takes.
_FOR_HEAD = ("last_hidden_state", "pooler_output")


@dataclass(frozen=True)
class WholeModel:
    """Facts about the whole model that a sharded one, or a stage, keeps.

    Args:
        parameters: number of elements of each parameter by name; tied ones are counted once.
        embeddings: the names of embeddings' weights.
        limits: which values a micro-batch may contain.
    """

    parameters: dict[str, int]
    embeddings: frozenset[str]
    limits: Limits

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        kind: ModelKind,
        positions: int | None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> WholeModel:
        """Collect the facts from a model.

        Args:
            model: before its modules are sharded.
            kind: of the model.
            positions: number of learned positions, or None.
            shapes: whole shapes by parameter name, if parameters are already shards.
        """
        shapes = shapes or {}
        counts = {name: math.prod(shapes.get(name, own.shape)) for name, own in model.named_parameters()}
        tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
        vocabulary = 0 if takes_pixels(model) else model.config.get_text_config().vocab_size
        tokens = getattr(model.get_input_embeddings(), "num_embeddings", vocabulary)
        limits = Limits(kind, tokens, kind.classes, positions, longest=longest_sequence(model.config))
        return cls(counts, frozenset(f"{name}.weight" for name in tables), limits)


class FormerParameters:
    """Weak references to the parameters that a model had before it was sharded.

    They identify the parameters of an optimizer that was created before.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._names: dict[int, tuple[weakref.ref[nn.Parameter], list[str]]] = {}
        for name, parameter in () if model is None else model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), (weakref.ref(parameter), []))[1].append(name)

    def names_of(self, parameter: nn.Parameter) -> Sequence[str]:
        """The names that a parameter had, several if it was tied; empty if it wasn't the model's."""
        reference, names = self._names.get(id(parameter), (None, []))
        # Once an object is freed, another one may have its id.
        return names if reference is not None and reference() is parameter else []


class GradientOwner(Protocol):
    """An optimizer that keeps a model's gradients outside of ``.grad``."""

    def is_of(self, model: nn.Module) -> bool:
        """Whether the gradients are this model's."""

    def zero_grad(self) -> None:
        """Clear the gradients."""


class Adapters(Protocol):
    """The files of the adapters in a sharded model, which has frozen weights beside them."""

    def state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole tensors of the adapters by their names in the library's files, on the first rank; collective."""

    def write(self, model: nn.Module, state: dict[str, torch.Tensor], folder: Path) -> None:
        """Write the result of :meth:`state` into a folder."""

    def load(self, model: nn.Module, folder: Path) -> None:
        """Load the adapters from such a folder into the model."""


@dataclass
class Sharding:
    """Everything that a sharded model keeps about its sharding."""

    mesh: Mesh
    config: TensorParallelConfig
    base: type[PreTrainedModel]
    attention: dict[str, nn.Module]
    whole: WholeModel
    kind: ModelKind
    #: The model after sharding, to detect what a script changes on it later.
    made: AsSharded = field(init=False)
    #: Runs a whole forward; by the model's kind.
    forward: Callable[[Any, Any, dict[str, Any]], Any] = field(init=False)
    #: Largest size, in bytes of float32, of a chunk of logits in the chunked loss; None for the device's default.
    chunk_bytes: int | None = None
    former: FormerParameters = field(default_factory=FormerParameters)
    #: Writes the model as a Hugging Face checkpoint. The loader sets it, because the saver imports this module.
    save: Callable[..., None] | None = None
    #: The files of the model's adapters; None if it has none.
    adapters: Adapters | None = None
    #: The optimizer that keeps this very model's gradients outside of ``.grad``, if one does. Weak, so that a copy of
    #: the model doesn't copy the optimizer.
    optimizer: weakref.ref[GradientOwner] | None = None
    #: Result of the architecture's probe on a mesh.
    verdict: MeshVerdict = field(default_factory=MeshVerdict)
    #: Whether routers see only the rank's own tokens, as those outside of blocks that are computed whole do.
    splits_routers: bool = False
    #: Whether the model gets masks of the whole sequence; see :class:`Lengths`.
    makes_masks: bool = True
    #: The language model's head.
    head: nn.Module | None = None
    #: Splits activations at the first layer, if the embedding doesn't.
    late: LateSplit | ImageSplit | None = None
    #: What the model's own code draws in training; None if it isn't split.
    draws: ModelDraws | None = None
    #: The check of the current forward's micro-batch.
    check: BatchCheck | None = None
    #: The last one, which has compared the ranks' generators, for a head that runs behind the base model's forward.
    compared: BatchCheck | None = None
    #: The current forward's micro-batch, for a head whose logits every rank has whole.
    batch: LocalBatch | None = None
    #: During a forward whose loss every rank computes whole: the targets, which may be none. Else None.
    targets: dict[str, Any] | None = None
    #: During a forward whose loss is computed in parts: what its code finds as the ``loss_function``. Else None.
    loss: Callable[..., torch.Tensor] | None = None


class PlainInstances:
    """Mixed into a sharded class: calling the class makes a plain model, as scripts do by ``type(model)(config)``."""

    _cuboid_plain: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Copying and unpickling call this without arguments, and fill the instance themselves.
        return cls._cuboid_plain(*args, **kwargs) if args or kwargs else super().__new__(cls)


class ShardedModel(WholeInterface, PlainInstances):
    """Mixed into the model's own class by :func:`shard_modules`."""

    cuboid: Sharding
    _loss_function: Any

    @property
    def loss_function(self) -> Any:
        """As ``PreTrainedModel.loss_function``, which takes whole logits, except to the running forward's own code."""
        running = self.cuboid.loss
        return super().loss_function if running is None else running  # type: ignore[misc]

    @loss_function.setter
    def loss_function(self, function: Any) -> None:
        self._loss_function = function

    def save_pretrained(self, directory: Any, **kwargs: Any) -> None:
        """Save the whole model as ``PreTrainedModel.save_pretrained`` does. Collective; each rank writes its share."""
        save = self.cuboid.save
        assert save is not None, "a model that neither a loader nor cuboid.shard made"
        save(self, directory, **kwargs)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Clear the gradients, also those that an optimizer keeps outside of ``.grad``."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        optimizer = None if self.cuboid.optimizer is None else self.cuboid.optimizer()
        # A copy's gradients are its own.
        if optimizer is not None and optimizer.is_of(self):
            optimizer.zero_grad()

    def counted_parameters(self: Any) -> list[nn.Parameter]:
        """This rank's parameters for sums over the ranks of one model copy: each element is counted on one rank."""
        return list(self.parameters())


class ShardedBase(PlainInstances):
    """Mixed into the class of a sharded model's base model by :func:`shard_modules`."""

    cuboid: Sharding


def shard_modules(
    model: PreTrainedModel, parallel_plan: ParallelPlan, mesh: Mesh, config: TensorParallelConfig, shard_of: ShardOf
) -> PreTrainedModel:
    """Shard a model over a mesh, in place.

    Args:
        model: the whole model, perhaps with parameters that are already shards.
        parallel_plan: how its modules are sharded over ``mesh``.
        mesh: this rank's mesh.
        config: the tensor parallel settings.
        shard_of: see :data:`~cuboid.models.sharded.parallelize.ShardOf`.
    """
    shapes = {name: layout.shape for name, layout in parallel_plan.by_parameter.items()}
    kind = kind_of(type(model), model.config)
    whole = WholeModel.of(model, kind, learned_positions(model), shapes)
    whole = replace(whole, limits=_limits_on_mesh(whole.limits, model, kind, parallel_plan.verdict))
    late, draws = parallelize_modules(model, parallel_plan, mesh, config, shard_of)
    attention = {name: model.get_submodule(name) for name in attention_modules(parallel_plan)}
    # An encoder's and a decoder's configs may be copies of the model's.
    named = [part.config._attn_implementation for part in model.modules() if isinstance(part, PreTrainedModel)]
    images = late if isinstance(late, ImageSplit) else None
    use_sharded_attention(frozenset(named), attention.values(), mesh, images)
    for name in whole_blocks(parallel_plan):
        # A block that is computed whole has all heads, and sets its own random number generator.
        use_sharded_attention(frozenset(named), model.get_submodule(name).modules(), None)
    base = type(model)
    model.cuboid = Sharding(mesh, config, base, attention, whole, kind, verdict=parallel_plan.verdict, late=late)
    model.cuboid.draws = draws
    model.cuboid.head = model.get_output_embeddings()
    model.cuboid.forward = _forward_of(model.cuboid)
    callers = (*attention.values(), *map(model.get_submodule, whole_blocks(parallel_plan)))
    model.cuboid.makes_masks = any(uses_interface(module) for module in callers)
    model.cuboid.splits_routers = any(role.kind == "router" for role in parallel_plan.roles.values())
    inner: Any = model.base_model
    if inner is not model:
        inner.cuboid = model.cuboid
        inner.__class__ = _sharded_base_class(type(inner))  # type: ignore[arg-type]
    is_cut = mesh.shape.size > 1
    if is_cut:
        _guard_ends(model)
    hook_heads(model)
    early = next(iter((*attention, *whole_blocks(parallel_plan))), None)
    if early is not None:
        model.get_submodule(early).register_forward_hook(_VerdictReader(model.cuboid))
    model.__class__ = _sharded_class(base)  # type: ignore[arg-type]
    if is_cut:
        guard_hooks(model, runs_whole=True)
    model.cuboid.made = AsSharded(model, is_cut=is_cut)
    return model


def hook_heads(model: PreTrainedModel) -> None:
    """Make heads with few outputs, whose logits all ranks have whole, drop padding rows and positions."""
    sharding: Any = model.cuboid
    for module in model.modules():
        if isinstance(module, LabelsHead):
            module.register_forward_hook(functools.partial(_without_padding, sharding))


def _limits_on_mesh(limits: Limits, model: PreTrainedModel, kind: ModelKind, verdict: MeshVerdict) -> Limits:
    """The limits with what the probe found out about the model's inputs."""
    first = first_position(model) if verdict.inputs == "only ids" else 0
    types = getattr(model.config, "type_vocab_size", None) if verdict.token_types else None
    return replace(limits, types=types, first_position=first, shifts_labels=kind.is_causal)


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
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings()]
    # Some tables have a few rows more than there are positions.
    return [table for table in tables if limit is not None and limit <= table.num_embeddings <= limit + 8]


def learned_positions(model: PreTrainedModel) -> int | None:
    """The number of learned positions; None if positions aren't learned."""
    limit: int | None = model.config.get_text_config().max_position_embeddings if position_tables(model) else None
    return limit


@dataclass
class _VerdictReader:
    """A forward hook of the first attention, at which the host waits for the result of the batch check.

    Waiting here is late enough that the device has queued work and doesn't idle. It is early enough to report that
    ranks' sequences differ in length: mismatched collectives hang the device, but the host gets here.
    """

    sharding: Sharding

    @uncompiled
    def __call__(self, *_: Any) -> None:
        if self.sharding.check is not None:
            self.sharding.check.read()


def _guard_ends(model: PreTrainedModel) -> None:
    """Make the embedding and the head raise an error when called directly: they take or return a rank's part."""
    ends: dict[nn.Module | None, str] = dict.fromkeys(token_embeddings(model), "embedding")
    ends[model.get_output_embeddings()] = "head"
    for module, what in ends.items():
        if module is not None:
            module.register_forward_pre_hook(functools.partial(_check_in_forward, what=what), prepend=True)


@uncompiled
def _check_in_forward(_: Any, __: Any, what: str) -> None:
    if not (is_in_forward() or is_in_head() or is_recomputing()):
        raise UnsupportedModelError(
            f"the sharded model's {what} was called by itself, but takes and returns a rank's part of a micro-batch; "
            "call the model, its base model (model.base_model) or what model.get_output_embeddings() returns"
        )


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
    """The sharded model inside engines and wrappers that keep it as ``module``, and in models of PEFT."""
    while not isinstance(model, ShardedModel):
        if callable(getattr(model, "get_base_model", None)):
            model = model.get_base_model()  # type: ignore[operator]
        elif isinstance(getattr(model, "module", None), nn.Module):
            model = model.module  # type: ignore[assignment]
        else:
            break
    return model


def plain_class(cls: type[Any]) -> type[Any]:
    """The class that a sharded class was made from; any other class itself."""
    return cls._cuboid_plain if issubclass(cls, PlainInstances) else cls


def derived_class(mixin: type[Any] | None, base: type[Any], forward: Callable[..., Any]) -> type[Any]:
    """A subclass with its base's name, so that configs and checkpoints contain the original name.

    Args:
        mixin: comes before the base among the bases.
        base: the plain class.
        forward: of the subclass.
    """
    members = {"forward": forward, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (mixin or PlainInstances, base), {**members, "_cuboid_plain": base})


@functools.cache
def _sharded_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    bind = _binder(base.forward)

    # Trainers read this signature to learn which columns and loss arguments the model takes.
    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _reject_compiling(self)
        with StepGuard(self.cuboid.mesh, "forward"):
            run, arguments = functools.partial(base.forward, self), bind(self, args, kwargs)
            return _differentiable_once(self.cuboid.forward(self, run, arguments), self.cuboid.made)

    return derived_class(ShardedModel, base, forward)


@functools.cache
def _sharded_base_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose forward takes whole micro-batches, unless the model around it calls it."""
    bind = _binder(base.forward)

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_in_forward():
            return base.forward(self, *args, **kwargs)
        # The forward of a classifier around it has a guard, too; the outer one leaves alone what this one has reported.
        with StepGuard(self.cuboid.mesh, "forward"):
            run, arguments = functools.partial(base.forward, self), bind(self, args, kwargs)
            return _differentiable_once(_base_forward(self, run, arguments), self.cuboid.made)

    return derived_class(ShardedBase, base, forward)


def _differentiable_once(output: Any, made: AsSharded) -> Any:
    """The same output of a forward, whose backward raises an error if it is to be differentiated itself."""
    if made.is_cut and torch.is_grad_enabled():
        # The hidden states of all layers are a tuple inside the output.
        for x in tree_leaves(tuple(output) if isinstance(output, tuple) else tuple(output.values())):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(_check_differentiated_once)
    return output


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


def _forward_of(sharding: Sharding) -> Callable[[Any, Any, dict[str, Any]], Any]:
    """The function that runs a model's forward, by the model's kind."""
    task = sharding.kind.name
    if task == "causal":
        return _forward
    if task == "seq2seq":
        return _sequence_to_sequence_forward
    if task == "masked":
        return _forward if sharding.verdict.gathers_logits else _masked_forward
    return _base_forward if task == "hidden" else _task_forward


def _task_forward(model: Any, base_forward: Any, arguments: dict[str, Any]) -> Any:
    """Forward of a classifier or the like: the code around its base model runs on whole micro-batches on all ranks."""
    sharding: Sharding = model.cuboid
    given = {name: arguments[name] for name in TARGETS if arguments.get(name) is not None}
    sharding.kind.check(arguments)
    sharding.made.check(model)
    sharding.targets = given
    try:
        with compared_by(_OfHead(sharding)):
            return base_forward(**arguments)
    finally:
        sharding.targets = sharding.batch = sharding.compared = None


@dataclass
class _OfHead:
    """What the base model's forward has found out about the ranks' generators, once it has run."""

    sharding: Sharding

    def number_if_differing(self) -> int | None:
        """See :class:`cuboid.tensor3d.layers.dropout.Generators`."""
        return None if self.sharding.compared is None else self.sharding.compared.number_if_differing()

    def require_equal(self) -> None:
        """See :class:`cuboid.tensor3d.layers.dropout.Generators`."""
        if self.sharding.compared is not None:
            self.sharding.compared.require_equal()


def _masked_forward(model: Any, base_forward: Any, arguments: dict[str, Any]) -> Any:
    """Forward of a masked language model, whose labels aren't shifted."""
    sharding: Sharding = model.cuboid
    as_tuple = _pop_tuple(model, arguments)
    sharding.kind.check(arguments)
    if sharding.verdict.counts_items and _own_loss(model, arguments) is not None:
        return _forward(model, base_forward, {**arguments, "return_dict": not as_tuple})
    with _taken(model, arguments) as batch:
        labels = batch.tensors.pop("labels", None)
        output = base_forward(**_local_arguments(model, batch), return_dict=True)
        if labels is not None:
            output = type(output)(**{**output, "loss": _loss_in_place(sharding, output.logits, labels, arguments)})
    output.logits = _whole_logits(model, output.logits, batch, has_loss=labels is not None)
    _whole_extras(model, output, batch, known=("loss", "logits"))
    return output.to_tuple() if as_tuple else output


def _loss_in_place(
    sharding: Sharding, logits: torch.Tensor, labels: torch.Tensor, arguments: dict[str, Any]
) -> torch.Tensor:
    """The loss for labels that aren't shifted."""
    items = arguments.get("num_items_in_batch") if sharding.verdict.counts_items else None
    vocabulary = sharding.whole.limits.labels
    assert vocabulary is not None
    return sharded_cross_entropy(logits, labels, vocabulary=vocabulary, mesh=sharding.mesh, items=items)


def _sequence_to_sequence_forward(model: Any, base_forward: Any, arguments: dict[str, Any]) -> Any:
    """Forward of an encoder-decoder: the encoder runs first, then the model's own forward with the encoder's output."""
    sharding: Sharding = model.cuboid
    as_tuple = _pop_tuple(model, arguments)
    sharding.kind.check(arguments)
    arguments = _with_decoder_ids(model, arguments)
    own_loss = _own_loss(model, arguments) if sharding.verdict.counts_items else None
    with _taken(model, arguments, own_loss=own_loss) as batch:
        source = batch.source
        assert source is not None
        with knowing(lengths=Lengths(source.length, source.padded, makes_masks=sharding.makes_masks)):
            encoded = model.get_encoder()(**source.tensors, return_dict=True)
        if isinstance(sharding.late, LateSplit):
            encoded.last_hidden_state = sharding.late.split_source(encoded.last_hidden_state)
        labels = batch.tensors.pop("labels", None)
        seen = {name: x for name, x in source.tensors.items() if name == "attention_mask"}
        own = {f"decoder_{name}": x for name, x in batch.tensors.items()}
        gathers = own_loss is not None
        if gathers:
            own["labels"] = arguments["labels"]
        with _gathering_logits(sharding, batch) if gathers else _vocabulary_parts(model):
            output = base_forward(
                encoder_outputs=encoded, **seen, **own, **source.options, use_cache=False, return_dict=True
            )
        if labels is not None and not gathers:
            output = type(output)(**{**output, "loss": _loss_in_place(sharding, output.logits, labels, arguments)})
    _whole_extras(model, output, batch, known=("loss", "logits", "encoder_last_hidden_state"))
    if not gathers:
        output.logits = _whole_logits(model, output.logits, batch, has_loss=labels is not None)
    hidden = output.encoder_last_hidden_state
    if hidden is not None and output.logits is not None:
        hidden = gather_hidden(hidden, sharding.mesh, rows=source.rows, length=source.length)
    output.encoder_last_hidden_state = None if output.logits is None else hidden
    return output.to_tuple() if as_tuple else output


def _with_decoder_ids(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Add ``decoder_input_ids`` to a forward's arguments if missing; the model's own code derives them from labels.

    Raises:
        CuboidError: there are neither ids nor labels, or the model's code for deriving them isn't found.
    """
    if arguments.get("decoder_input_ids") is not None:
        return arguments
    labels = arguments.get("labels")
    ids = None if labels is None else decoder_ids(model, labels)
    if ids is None:
        also = "labels or " if labels is None else ""
        raise CuboidError(f"{type(model).__name__} on a mesh needs {also}decoder_input_ids [batch, target length]")
    return {**arguments, "decoder_input_ids": ids}


@contextmanager
def _vocabulary_parts(model: Any) -> Iterator[None]:
    """In the ``with`` block, buffers with one element per logit (BART's logit bias) are cut to the rank's part."""
    size, along = model.cuboid.whole.limits.tokens, model.cuboid.mesh.along("sequence")
    rows = model.cuboid.head.sharded_params["weight"].block_shape[0]
    whole = {name: x for name, x in model._buffers.items() if x is not None and x.shape[-1:] == (size,)}
    for name, x in whole.items():
        padded = nn.functional.pad(x, (0, rows * along.size - size))
        model._buffers[name] = padded.narrow(-1, rows * along.index, rows)
    try:
        yield
    finally:
        model._buffers.update(whole)


def _forward(model: Any, base_forward: Any, arguments: dict[str, Any]) -> Any:
    sharding: Sharding = model.cuboid
    as_tuple = _pop_tuple(model, arguments)
    keep = arguments.pop("logits_to_keep", 0)
    if keep is not None and arguments.get("labels") is not None and not (isinstance(keep, int) and keep == 0):
        raise UnsupportedModelError("logits_to_keep has no rule beside labels: the loss needs all logits")
    own_loss = _own_loss(model, arguments)
    gathers = sharding.verdict.gathers_logits or own_loss is not None
    set_loss = functools.partial(setattr, sharding, "loss")
    with ExitStack() as stack:
        batch = stack.enter_context(_taken(model, arguments, own_loss=own_loss))
        # Logits aren't wanted, and the ordinary loss can be computed in chunks without them.
        has_head = "labels" in batch.tensors and model.base_model is not model
        bounded = has_head and not gathers and not _wants_logits(model)
        local = _local_arguments(model, batch)
        if gathers:
            # The loss is computed from gathered logits, so it needs whole labels too.
            stack.enter_context(_gathering_logits(sharding, batch))
            local.update({name: arguments[name] for name in LABELS if name in local})
        elif not bounded:
            set_loss(functools.partial(sharded_loss, mesh=sharding.mesh))
            stack.callback(set_loss, None)
        wants_routers = arguments.get("output_router_logits")
        if wants_routers is None:
            wants_routers = getattr(model.config, "output_router_logits", False)
        if wants_routers and sharding.mesh.shape.size > 1:
            stack.enter_context(
                whole_router_logits(model.base_model, batch, sharding.mesh, are_split=sharding.splits_routers)
            )
            # The model's own router loss takes the whole mask; a hook gives the base model the rank's own rows of it.
            local.update({name: arguments[name] for name in ("attention_mask",) if name in local})
        run = functools.partial(base_forward, **local, return_dict=True)
        if bounded:
            output = forward_with_bounded_loss(
                model,
                run,
                set_loss=set_loss,
                unbound=sharding.base.forward,
                mesh=sharding.mesh,
                chunk_bytes=sharding.chunk_bytes,
            )
        else:
            output = run()
    if not bounded and not gathers:
        output.logits = _whole_logits(model, output.logits, batch, has_loss=output.loss is not None)
    if keep is not None and output.logits is not None:
        output.logits = keep_logits(output.logits, keep)
    # Routers' are whole already.
    routers = ("router_logits", "aux_loss") if wants_routers else ()
    _whole_extras(model, output, batch, known=("loss", "logits", *routers))
    return output.to_tuple() if as_tuple else output


def _own_loss(model: Any, arguments: dict[str, Any]) -> Callable[..., Any] | None:
    """The loss function that was put in place of the task's, if a forward's arguments have labels for it; else None."""
    labels, shifted = map(arguments.get, LABELS)
    if labels is None and shifted is None:
        return None
    if inspect.getattr_static(type(model), "loss_function") is not ShardedModel.__dict__["loss_function"]:
        raise UnsupportedModelError(
            f"loss_function was set on the class of a sharded {type(model).__name__}; set it on the model, "
            "model.loss_function = …"
        )
    return own_loss_of(model, model.cuboid.kind.ordinary_loss)


@contextmanager
def _gathering_logits(sharding: Sharding, batch: LocalBatch) -> Iterator[None]:
    """In the ``with`` block, the head returns whole logits, from which the model's own code then computes the loss."""
    assert sharding.head is not None
    sharding.batch = batch
    hook = sharding.head.register_forward_hook(functools.partial(_gather_logits, sharding))
    try:
        yield
    finally:
        hook.remove()
        sharding.batch = None


@uncompiled
def _gather_logits(sharding: Sharding, head: Any, _: Any, logits: torch.Tensor) -> torch.Tensor:
    """A forward hook of the head that gathers logits, for code that computes the loss from whole ones."""
    batch = sharding.batch
    assert batch is not None
    size = head.out_features
    whole = gather_logits(logits, sharding.mesh, rows=batch.rows, length=batch.length, vocabulary=size)
    return whole.contiguous()


@uncompiled
def _without_padding(sharding: Sharding, _: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
    """A forward hook of a head with whole logits that removes padding rows and positions."""
    batch = sharding.batch
    assert batch is not None
    return logits[: batch.rows, : batch.length].contiguous()


def _base_forward(model: Any, base_forward: Any, arguments: dict[str, Any]) -> Any:
    """Forward of a base model that isn't called by a language model: ``[B, S, H]`` hidden states, whole on every rank.

    They stay split if a sharded head follows.
    """
    sharding: Sharding = model.cuboid
    as_tuple = _pop_tuple(model, arguments)
    if sharding.kind.name == "seq2seq":
        raise UnsupportedModelError(
            f"{type(model).__name__} was called by itself, for which there is no rule on a mesh; call the "
            f"{sharding.base.__name__} around it, with labels or decoder_input_ids"
        )
    if sharding.kind.name == "hidden":
        sharding.kind.check(arguments)
    with _taken(model, arguments) as batch:
        output = base_forward(**_local_arguments(model, batch), return_dict=True)
    if isinstance(sharding.late, LateSplit):
        # The base model's hook does the same, but runs only after this function.
        output = sharding.late.end(model, None, output)
    if sharding.targets is not None:
        # The head around this base model runs next.
        sharding.batch = batch
    whole_for_head(sharding, output, batch)
    _whole_extras(model, output, batch, known=_FOR_HEAD)
    return output.to_tuple() if as_tuple else output


def whole_for_head(sharding: Sharding, output: ModelOutput, batch: LocalBatch) -> None:
    """Gather those entries of a base model's output that the following head needs whole, in place."""
    for name in _FOR_HEAD:
        x = output.get(name)
        if x is None:
            continue
        if name == "pooler_output" or isinstance(sharding.late, ImageSplit):
            output[name] = gather_rows(x, sharding.mesh, rows=batch.rows)
        elif sharding.verdict.head != "labels":
            output[name] = gather_hidden(x, sharding.mesh, rows=batch.rows, length=batch.length)


def _pop_tuple(model: Any, arguments: dict[str, Any]) -> bool:
    """Remove ``return_dict`` from a forward's arguments; return whether the output is to be a tuple."""
    wanted = arguments.pop("return_dict", None)
    return (getattr(model.config, "return_dict", True) if wanted is None else wanted) is False


def _asked_of_layers(model: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What a forward is to return of its layers, by its arguments or the config.

    Raises:
        UnsupportedModelError: attention weights.
    """
    states, attentions = arguments.get("output_hidden_states"), arguments.get("output_attentions")
    if states is None:
        states = getattr(model.config, "output_hidden_states", None)
    if attentions is None:
        attentions = getattr(model.config, "output_attentions", None)
    if attentions and model.cuboid.made.is_cut:
        raise UnsupportedModelError(
            "output_attentions has no rule on a mesh, where a rank has the weights of its own heads; leave it out, "
            "in the config too, and look at attention in plain transformers"
        )
    return states, attentions


def _whole_extras(model: Any, output: ModelOutput, batch: LocalBatch, *, known: Sequence[str]) -> None:
    """Gather the hidden states of all layers in a forward's output, in place.

    Args:
        model: a sharded model, or its base model.
        output: of its forward.
        batch: the rank's part of the micro-batch.
        known: names of entries that are whole.

    Raises:
        UnsupportedModelError: there is another entry, or hidden states aren't split as the residual stream is.
    """
    mesh: Mesh = model.cuboid.mesh
    if not model.cuboid.made.is_cut:
        return
    for name, x in output.items():
        if x is None or name in known:
            continue
        if name != "hidden_states" or not _are_split(x, model, batch):
            raise UnsupportedModelError(f"{type(model).__name__} returns {name}, for which there is no rule on a mesh")
        output[name] = tuple(
            None if own is None else gather_hidden(own, mesh, rows=batch.rows, length=batch.length) for own in x
        )


def _are_split(states: Any, model: Any, batch: LocalBatch) -> bool:
    """Whether these are a rank's parts ``[B'/b, S'/s, H/h]`` of hidden states, of which some may be None."""
    sharding: Sharding = model.cuboid
    width = getattr(model.config.get_text_config(), "hidden_size", None)
    if not isinstance(states, tuple | list) or sharding.late is not None or width is None:
        return False
    rows, length = batch.tensors["input_ids"].shape
    wanted = (rows, length // sharding.mesh.size("sequence"), width // sharding.mesh.size("hidden"))
    return all(own is None or tuple(own.shape) == wanted for own in states)


@contextmanager
def _taken(model: Any, arguments: dict[str, Any], *, own_loss: Any = None) -> Iterator[LocalBatch]:
    """Yield this rank's part of a micro-batch for a forward, and check the micro-batch and the model. Collective.

    ``own_loss`` is the result of :func:`_own_loss`; None where nothing computes a loss in parts.
    """
    sharding: Sharding = model.cuboid
    check_reached()
    sharding.mesh.connect()
    sharding.made.check(model)
    if model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None) is not None:
        raise UnsupportedModelError(
            "neftune_noise_alpha: its noise depends on the sizes of the whole embeddings; a rank has a part of them"
        )
    asked, verdict = _asked_of_layers(model, arguments), sharding.verdict
    verdict.check_batch(given_tensors(arguments), type(model).__name__)
    batch = sharding.kind.local_batch(arguments, model.config, sharding.mesh, verdict)
    sharding.whole.limits.warn_of_length(arguments, sharding.mesh)
    # With a loss function of its own, a rank would gather logits that the others don't.
    modes = (model.training, torch.is_grad_enabled(), own_loss is not None, *asked)
    assert sharding.draws is not None
    libraries = sharding.draws.libraries
    check = BatchCheck(
        {**arguments, **(sharding.targets or {})}, sharding.whole.limits, sharding.mesh, modes, libraries
    )
    check.read_if_there()
    sharding.check = check
    sharding.compared = check if sharding.targets is not None else None
    try:
        lengths = WHOLE_IMAGES
        if verdict.inputs != "pixels":
            lengths = Lengths(batch.length, batch.padded, makes_masks=sharding.makes_masks)
        if batch.source is not None:
            lengths = replace(lengths, source=Lengths(batch.source.length, batch.source.padded))
        if sharding.draws.has_modules:
            positions = (lengths.padded, 0 if lengths.source is None else lengths.source.padded)
            sharding.draws.begin(
                -(-batch.rows // sharding.mesh.size("batch")),
                [count // sharding.mesh.size("sequence") for count in positions if count],
            )
        own_positions, packed = batch.tensors.get("position_ids"), None
        # Positions that the user didn't give count up in one sequence. With a mask, transformers ignores packing.
        may_be_packed = arguments.get("position_ids") is not None and arguments.get("attention_mask") is None
        if own_positions is not None and may_be_packed:
            packed = find_packed_sequence_indices(own_positions)
        with knowing(lengths=lengths, packing=Packing(own_positions, packed)), compared_by(check):
            yield batch
        check.read()
    finally:
        sharding.check = sharding.batch = None


def _local_arguments(model: Any, batch: LocalBatch) -> dict[str, Any]:
    # A sharded embedding takes the whole sequence's ids and returns the rank's part. Given ids, the model's own code
    # would derive all later shapes from theirs, so look them up here and give it embeddings instead.
    tensors = dict(batch.tensors)
    if model.cuboid.verdict.inputs == "pixels":
        return {**batch.options, **tensors}
    if model.cuboid.verdict.inputs != "embeddings":
        return {**batch.options, **tensors, "use_cache": False}
    embeddings = model.get_input_embeddings()(tensors.pop("input_ids"))
    return {**batch.options, **tensors, "inputs_embeds": embeddings, "use_cache": False}


def _wants_logits(model: Any) -> bool:
    wanted = model.cuboid.config.gather_logits
    return not model.training if wanted == "auto" else wanted


def _whole_logits(model: Any, logits: torch.Tensor, batch: LocalBatch, *, has_loss: bool) -> torch.Tensor | None:
    if has_loss and not _wants_logits(model):
        return None
    vocabulary = model.config.vocab_size
    return gather_logits(logits, model.cuboid.mesh, rows=batch.rows, length=batch.length, vocabulary=vocabulary)


def sharded_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    *,
    mesh: Mesh,
    **_: Any,
) -> torch.Tensor:
    """Replaces Hugging Face's ``ForCausalLMLoss``, for sharded logits ``[B/b, S/h, V/s]`` and labels ``[B/b, S]``."""
    return sharded_cross_entropy(
        logits,
        predicted(labels, shift_labels, ignore_index),
        vocabulary=vocab_size,
        mesh=mesh,
        items=num_items_in_batch,
        ignore_index=ignore_index,
    )
