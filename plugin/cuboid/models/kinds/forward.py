"""What the forwards of kinds share: a rank's part of a micro-batch, its checks, and whole results from all parts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils import ModelOutput

from cuboid.distributed.axis_collectives import all_reduce, cut_positions, whole_positions
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.no_compile import uncompiled
from cuboid.errors import UnsupportedModelError
from cuboid.models.attention.forward_context import Packing, forward_context, knowing
from cuboid.models.attention.interface import check_reached
from cuboid.models.autograd_graph import IS_COPY
from cuboid.models.batch.batch_check import BatchCheck
from cuboid.models.batch.local_batch import LABELS, LocalBatch, given_tensors
from cuboid.models.batch.rank_cache import RankCache, cache_obstacle, rank_cache
from cuboid.models.cross_entropy.loss_function import own_loss_of
from cuboid.models.kinds.sharding import Sharding
from cuboid.tensor3d.layers.dropout import compared_by
from cuboid.tensor3d.layers.linear import ShardedLinear
from cuboid.tensor3d.layers.vocab_cross_entropy import gather_hidden, gather_logits, gather_rows
from cuboid.tensor3d.layers.whole_block import ImageSplit
from cuboid.tensor3d.sharding.kept_blocks import kept_blocks

#: Entries of a base model's output that the head around it takes.
FOR_HEAD = ("last_hidden_state", "pooler_output")


class LooksUpLoss:
    """Mixed into a sharded model's class: its ``loss_function`` is the plain model's, except to a running forward."""

    _loss_function: Any

    @property
    def loss_function(self) -> Any:
        """As ``PreTrainedModel.loss_function``, which takes whole logits, except to the running forward's own code."""
        running = forward_context().loss
        return super().loss_function if running is None else running  # type: ignore[misc]

    @loss_function.setter
    def loss_function(self, function: Any) -> None:
        self._loss_function = function


def replaced_loss(model: Any, arguments: dict[str, Any]) -> Callable[..., Any] | None:
    """The loss function that was put in place of the task's, if a forward's arguments have labels for it; else None."""
    labels, shifted = map(arguments.get, LABELS)
    if labels is None and shifted is None:
        return None
    if inspect.getattr_static(type(model), "loss_function") is not LooksUpLoss.__dict__["loss_function"]:
        raise UnsupportedModelError(
            f"loss_function was set on the class of a sharded {type(model).__name__}; set it on the model, "
            "model.loss_function = …"
        )
    return own_loss_of(model, model.cuboid.kind.ordinary_loss)


@contextmanager
def gathering_logits(sharding: Sharding, batch: LocalBatch) -> Iterator[None]:
    """In the ``with`` block, the head returns whole logits, from which the model's own code then computes the loss."""
    assert sharding.head is not None
    hook = sharding.head.register_forward_hook(functools.partial(_gather_logits, sharding.mesh, batch))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def own_mask(base: Any, batch: LocalBatch) -> Iterator[None]:
    """In the ``with`` block, a base model that is called with the whole mask gets the rank's own rows of it."""
    mask = batch.tensors.get("attention_mask")

    def give(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return None if mask is None else (args, {**kwargs, "attention_mask": mask})

    hook = base.register_forward_pre_hook(give, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@uncompiled
def _gather_logits(mesh: Mesh, batch: LocalBatch, head: Any, _: Any, logits: torch.Tensor) -> torch.Tensor:
    """A forward hook of the head that gathers logits, for code that computes the loss from whole ones."""
    # It may have an adapter around it.
    size = next(module for module in head.modules() if isinstance(module, ShardedLinear)).out_features
    gathered = gather_logits(logits, mesh, rows=batch.rows, length=batch.length, vocabulary=size)
    return gathered.contiguous()


def whole_for_head(sharding: Sharding, output: ModelOutput, batch: LocalBatch) -> None:
    """Gather those entries of a base model's output that the following head needs whole, in place."""
    for name in FOR_HEAD:
        x = output.get(name)
        if x is None:
            continue
        if name == "pooler_output" or isinstance(sharding.late, ImageSplit):
            output[name] = gather_rows(x, sharding.mesh, rows=batch.rows)
        elif sharding.verdict.head != "labels":
            output[name] = gather_hidden(x, sharding.mesh, rows=batch.rows, length=batch.length)


def pop_tuple(model: Any, arguments: dict[str, Any]) -> bool:
    """Remove ``return_dict`` from a forward's arguments; return whether the output is to be a tuple."""
    wanted = arguments.pop("return_dict", None)
    return (getattr(model.config, "return_dict", True) if wanted is None else wanted) is False


def begin_cache(model: Any, arguments: dict[str, Any]) -> None:
    """Give a forward, in its arguments, a cache of the rank's keys where a script asks for one.

    Raises:
        UnsupportedModelError: the model has none in such a forward, or the script's cache isn't one of a rank.
    """
    given_cache = arguments.get("past_key_values")
    if isinstance(given_cache, RankCache):
        return
    what = "use_cache=True" if given_cache is None else "past_key_values"
    obstacle = cache_obstacle(model)
    if obstacle is None and torch.is_grad_enabled():
        obstacle = "it has no gradients; call the model under torch.no_grad()"
    if obstacle is not None:
        raise UnsupportedModelError(
            f"{what} has no rule in this forward of a sharded {type(model).__name__}: {obstacle}. Or leave the cache "
            "out, by use_cache=False, and give each forward all tokens"
        )
    arguments["past_key_values"] = rank_cache(model, given_cache)


def asked_of_layers(model: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What a forward is to return of its layers, by its arguments or the config.

    Raises:
        UnsupportedModelError: attention weights.
    """
    states, attentions = arguments.get("output_hidden_states"), arguments.get("output_attentions")
    if states is None:
        states = getattr(model.config, "output_hidden_states", None)
    if attentions is None:
        attentions = getattr(model.config, "output_attentions", None)
    if attentions and model.cuboid.mesh.shape.size > 1:
        raise UnsupportedModelError(
            "output_attentions has no rule on a mesh, where a rank has the weights of its own heads; leave it out, "
            "in the config too, and look at attention in plain transformers"
        )
    return states, attentions


def whole_extras(model: Any, output: ModelOutput, batch: LocalBatch, *, known: Sequence[str]) -> None:
    """Gather the hidden states of all layers in a forward's output, in place.

    Raises:
        UnsupportedModelError: there is another entry, or hidden states aren't split as the residual stream is.
    """
    mesh: Mesh = model.cuboid.mesh
    if not model.cuboid.state.made.is_cut:
        return
    for name, x in output.items():
        if x is None or name in known:
            continue
        if name != "hidden_states" or not _are_split(x, model, batch):
            raise UnsupportedModelError(f"{type(model).__name__} returns {name}, for which there is no rule on a mesh")
        output[name] = states = tuple(
            None if hidden is None else gather_hidden(hidden, mesh, rows=batch.rows, length=batch.length)
            for hidden in x
        )
        for hidden in states:
            node: Any = None if hidden is None else hidden.grad_fn
            if node is not None:
                node.metadata[IS_COPY] = True


def _are_split(states: Any, model: Any, batch: LocalBatch) -> bool:
    """Whether these are a rank's parts ``[B'/b, S'/s, H/h]`` of hidden states, of which some may be None."""
    sharding: Sharding = model.cuboid
    width = getattr(model.config.get_text_config(), "hidden_size", None)
    if not isinstance(states, tuple | list) or sharding.late is not None or width is None:
        return False
    rows, length = batch.tensors["input_ids"].shape
    wanted = (rows, cut_positions(length, sharding.mesh.size("sequence")), width // sharding.mesh.size("hidden"))
    return all(hidden is None or tuple(hidden.shape) == wanted for hidden in states)


@contextmanager
def sharded_batch(model: Any, arguments: dict[str, Any], *, own_loss: Any = None) -> Iterator[LocalBatch]:
    """Yield this rank's part of a micro-batch for a forward, and check the micro-batch and the model. Collective.

    ``own_loss`` is the result of :func:`replaced_loss`; None where nothing computes a loss in parts.
    """
    sharding: Sharding = model.cuboid
    kind, around = sharding.kind, forward_context().head
    check_reached()
    sharding.mesh.connect()
    cache = arguments.get("past_key_values")
    in_generate = cache if isinstance(cache, RankCache) and kept_blocks() is not None else None
    if in_generate is None or not in_generate.is_checked:
        sharding.state.made.check(model)
    if in_generate is not None:
        in_generate.is_checked = True
    if model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None) is not None:
        raise UnsupportedModelError(
            "neftune_noise_alpha: its noise depends on the sizes of the whole embeddings; a rank has a part of them"
        )
    asked, verdict = asked_of_layers(model, arguments), sharding.verdict
    if verdict.refused:
        verdict.check_batch(given_tensors(arguments), type(model).__name__)
    batch = kind.local_batch(arguments, model.config, sharding.mesh, verdict)
    sharding.whole_model.limits.warn_of_length(arguments, sharding.mesh)
    # With a loss function of its own, a rank would gather logits that the others don't.
    modes = (model.training, torch.is_grad_enabled(), own_loss is not None, *asked)
    if batch.cache is not None:
        modes = (*modes, batch.cache.seen)
    assert sharding.draws is not None
    libraries = sharding.draws.libraries
    with_targets = arguments if around is None else {**arguments, **around.targets}
    check = BatchCheck(with_targets, sharding.whole_model.limits, sharding.mesh, modes, libraries)
    check.read_if_there()
    if around is not None:
        around.batch, around.check = batch, check
    lengths = kind.lengths_of(batch, makes_masks=sharding.makes_masks)
    limits = sharding.whole_model.limits
    counts = limits.counts or verdict.inputs == "only ids"
    if limits.masks is not None or counts:
        for sequence in (lengths,) if lengths.source is None else (lengths, lengths.source):
            limits.check_filled(sequence.real, sequence.padded, counts=counts)
    if sharding.draws.has_modules:
        positions = (lengths.padded, 0 if lengths.source is None else lengths.source.padded)
        sharding.draws.begin(
            -(-batch.rows // sharding.mesh.size("batch")),
            [count // sharding.mesh.size("sequence") for count in positions if count],
        )
    own_positions, packed = batch.tensors.get("position_ids"), None
    # Positions that the user didn't give count up in one sequence. With a mask or cache, transformers ignores packing.
    may_be_packed = arguments.get("position_ids") is not None and arguments.get("attention_mask") is None
    if own_positions is not None and may_be_packed and batch.cache is None:
        packed = find_packed_sequence_indices(own_positions)
    packing = Packing(own_positions, packed)
    with knowing(lengths=lengths, packing=packing, check=check, media=batch.media), compared_by(check):
        yield batch
    check.read()


@contextmanager
def keeping_last(model: Any, batch: LocalBatch, keep: int, *, rows_alike: bool) -> Iterator[None]:
    """In the ``with`` block, the head computes the logits of the last ``keep`` positions, with whole positions."""
    along, stack = model.cuboid.mesh.along("sequence"), ExitStack()

    def take_last(_: Any, __: Any, output: Any) -> Any:
        hidden = output.last_hidden_state
        # Which of the rank's own positions are among the last ones, and where there.
        first = along.index * hidden.shape[1] - (batch.length - keep)
        start, stop = max(first, 0), min(first + hidden.shape[1], keep)
        last = hidden.new_zeros((hidden.shape[0], keep, hidden.shape[2]))
        if start < stop:
            last[:, start:stop] = hidden[:, start - first : stop - first]
        stack.enter_context(whole_positions(rows_alike=rows_alike))
        output.last_hidden_state = all_reduce(last, along)
        return output

    hook = model.base_model.register_forward_hook(take_last)
    try:
        with stack:
            yield
    finally:
        hook.remove()


def wants_logits(model: Any) -> bool:
    """Whether a forward with labels returns logits too: by the config, or in evaluation only."""
    wanted = model.cuboid.config.gather_logits
    return not model.training if wanted == "auto" else wanted


def whole_logits(model: Any, logits: torch.Tensor, batch: LocalBatch, *, has_loss: bool) -> torch.Tensor | None:
    """The logits ``[B, S, V]`` on every rank, from parts ``[B/b, S/h, V/s]``; None where only the loss is wanted."""
    if has_loss and not wants_logits(model):
        return None
    vocabulary = model.config.get_text_config().vocab_size
    return gather_logits(logits, model.cuboid.mesh, rows=batch.rows, length=batch.length, vocabulary=vocabulary)
