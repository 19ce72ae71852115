"""What all kinds of language models share: logits of the vocabulary, and labels that are ids."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import Any, Self

import torch
from transformers import PretrainedConfig

from cuboid.distributed.axis_collectives import whole_positions
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.transformers_names import keep_logits
from cuboid.models.attention.forward_context import knowing
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.local_batch import IGNORE_INDEX, LABELS, check_tensors
from cuboid.models.batch.rank_cache import RankCache
from cuboid.models.cross_entropy.incomplete_output import without
from cuboid.models.cross_entropy.loss_forward import forward_with_bounded_loss
from cuboid.models.kinds.forward import (
    begin_cache,
    gathering_logits,
    keeping_last,
    own_mask,
    pop_tuple,
    replaced_loss,
    sharded_batch,
    wants_logits,
    whole_extras,
    whole_logits,
)
from cuboid.models.kinds.model_kind import ModelKind
from cuboid.models.kinds.sharding import Sharding
from cuboid.models.routers.router_logits import whole_router_logits
from cuboid.tensor3d.layers.vocab_cross_entropy import predicted, sharded_cross_entropy, shifted


class LanguageModel(ModelKind):
    """A model whose head has an output for each entry of the vocabulary."""

    is_language_model = True
    labels_each_token = True

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        """See :meth:`ModelKind.of`."""
        return cls(0, config.get_text_config().vocab_size)

    def check_micro_batch(self, tensors: dict[str, torch.Tensor]) -> None:
        """See :meth:`ModelKind.check_micro_batch`: the targets have the shape of the ids."""
        check_tensors(tensors)

    def for_stages(self, batch: MicroBatch, *, shifts: bool) -> MicroBatch:
        """See :meth:`ModelKind.for_stages`."""
        return with_shifted_labels(batch, shifts=shifts)

    def forward(self, model: Any, base_forward: Any, arguments: dict[str, Any]) -> Any:
        """See :meth:`ModelKind.forward`."""
        sharding: Sharding = model.cuboid
        as_tuple = pop_tuple(model, arguments)
        keep = arguments.pop("logits_to_keep", 0)
        if keep is not None and arguments.get("labels") is not None and not (isinstance(keep, int) and keep == 0):
            raise UnsupportedModelError("logits_to_keep has no rule beside labels: the loss needs all logits")
        uses_cache = arguments.get("use_cache")
        if uses_cache or arguments.get("past_key_values") is not None:
            begin_cache(model, arguments)
        if uses_cache is None:
            uses_cache = self.is_causal and getattr(model.config, "use_cache", False)
        own_loss = replaced_loss(model, arguments)
        gathers = sharding.verdict.gathers_logits or own_loss is not None
        cache = arguments.get("past_key_values")
        takes_whole = keeps_few = has_one_row = False
        if isinstance(cache, RankCache):
            takes_whole = cache.takes_whole(arguments, sharding)
            has_one_row = cache.has_one_row(arguments)
            keeps_few = not takes_whole and not gathers and cache.keeps_few(keep, arguments, sharding.mesh)
        with whole_positions(rows_alike=has_one_row) if takes_whole else nullcontext():
            with ExitStack() as stack:
                batch = stack.enter_context(sharded_batch(model, arguments, own_loss=own_loss))
                # Logits aren't wanted, and the ordinary loss can be computed in chunks without them.
                has_head = "labels" in batch.tensors and model.base_model is not model
                bounded = has_head and not gathers and not wants_logits(model)
                local = self.local_arguments(model, batch)
                if gathers:
                    # The loss is computed from gathered logits, so it needs whole labels too.
                    stack.enter_context(gathering_logits(sharding, batch))
                    local.update({name: arguments[name] for name in LABELS if name in local})
                elif not bounded:
                    stack.enter_context(knowing(loss=functools.partial(sharded_loss, mesh=sharding.mesh)))
                wants_routers = arguments.get("output_router_logits")
                if wants_routers is None:
                    wants_routers = getattr(model.config, "output_router_logits", False)
                reads_mask = gathers and self.loss_reads_mask and model.base_model is not model
                if wants_routers and sharding.mesh.shape.size > 1:
                    reads_mask = True
                    stack.enter_context(
                        whole_router_logits(model.base_model, batch, sharding.mesh, are_split=sharding.splits_routers)
                    )
                if reads_mask:
                    # The model's own loss takes the whole mask; a hook gives the base model the rank's rows.
                    stack.enter_context(own_mask(model.base_model, batch))
                    local.update({name: arguments[name] for name in ("attention_mask",) if name in local})
                if keeps_few:
                    stack.enter_context(keeping_last(model, batch, keep, rows_alike=has_one_row))
                run = functools.partial(base_forward, **local, return_dict=True)
                if bounded:
                    output = forward_with_bounded_loss(
                        model,
                        run,
                        running=knowing,
                        unbound=sharding.base.forward,
                        mesh=sharding.mesh,
                        chunk_bytes=sharding.state.chunk_bytes,
                    )
                else:
                    output = run()
            if not bounded and not gathers:
                with whole_positions(rows_alike=has_one_row) if keeps_few else nullcontext():
                    output.logits = whole_logits(model, output.logits, batch, has_loss=output.loss is not None)
            if keep is not None and output.logits is not None:
                output.logits = keep_logits(output.logits, keep)
            # Routers' are whole already.
            routers = ("router_logits", "aux_loss") if wants_routers else ()
            whole_extras(model, output, batch, known=("loss", "logits", "past_key_values", *routers))
            missing: tuple[str, ...] = ("logits",) if output.logits is None else ()
            if uses_cache and batch.cache is None:
                missing += ("past_key_values",)
            if missing:
                output = without(output, missing)
        return output.to_tuple() if as_tuple else output

    def items(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """See :meth:`ModelKind.items`."""
        labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"]
        return (labels != IGNORE_INDEX).sum()


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


def loss_in_place(
    sharding: Sharding, logits: torch.Tensor, labels: torch.Tensor, arguments: dict[str, Any]
) -> torch.Tensor:
    """The loss for labels that aren't shifted."""
    items = arguments.get("num_items_in_batch") if sharding.verdict.counts_items else None
    vocabulary = sharding.whole_model.limits.labels
    assert vocabulary is not None
    return sharded_cross_entropy(logits, labels, vocabulary=vocabulary, mesh=sharding.mesh, items=items)


def with_shifted_labels(batch: MicroBatch, *, shifts: bool = True) -> MicroBatch:
    """The same micro-batch with ``shift_labels`` in place of ``labels``.

    They are shifted before the sequence is cut, or each segment would lose the label of its last token.

    Args:
        batch: as the user gave it.
        shifts: whether the model's own loss compares each position with the next one's label. If not (masked language
            models, some decoders of encoder-decoders), the labels are only renamed.

    Raises:
        CuboidError: there are neither ``labels`` nor ``shift_labels``.
    """
    rest = {name: tensor for name, tensor in batch.items() if name != "labels"}
    if "shift_labels" in rest:
        return rest
    if "labels" not in batch:
        raise CuboidError("a pipeline's micro-batch needs labels; add labels: input_ids, with -100 for padding")
    return {**rest, "shift_labels": shifted(batch["labels"], IGNORE_INDEX) if shifts else batch["labels"]}
