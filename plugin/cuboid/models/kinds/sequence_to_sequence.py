"""Encoder-decoders, which predict a target sequence from a source sequence."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM, PretrainedConfig, PreTrainedModel

from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.architectures.transformers_names import decoder_ids
from cuboid.models.attention.forward_context import Lengths, knowing
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.batch.local_batch import IGNORE_INDEX, TENSORS, LocalBatch, check_tensors, take_local_batch
from cuboid.models.cross_entropy.incomplete_output import without
from cuboid.models.kinds.forward import (
    gathering_logits,
    pop_tuple,
    replaced_loss,
    sharded_batch,
    whole_extras,
    whole_logits,
)
from cuboid.models.kinds.language_models import LanguageModel, loss_in_place
from cuboid.models.kinds.probe_rows import RowsOf
from cuboid.models.kinds.sharding import Sharding
from cuboid.tensor3d.layers.linear import ShardedLinear
from cuboid.tensor3d.layers.vocab_cross_entropy import gather_hidden
from cuboid.tensor3d.layers.whole_block import LateSplit

#: The decoder's tensors, each ``[B, T]``; ``input_ids`` and ``attention_mask`` ``[B, S]`` are the encoder's.
TARGET_TENSORS = ("decoder_input_ids", "decoder_attention_mask", "labels")
#: Sources with more tokens have shorter targets.
_LEAST_LENGTH = 12


class SequenceToSequence(LanguageModel):
    """An encoder-decoder."""

    name = "seq2seq"
    words = "sequence-to-sequence language modelling by an encoder-decoder"
    auto_class = AutoModelForSeq2SeqLM
    tensors: ClassVar[tuple[str, ...]] = (*TENSORS, "decoder_input_ids", "decoder_attention_mask")
    ordinary_loss = "ForMaskedLMLoss"
    takes_positions = False
    # Encoders and decoders may use ids for more than the lookup, and count positions by themselves.
    inputs_on_mesh: ClassVar[tuple[MeshVerdict, ...]] = (
        MeshVerdict(inputs="only ids"),
        MeshVerdict(inputs="only ids", splits_late=True),
    )

    @classmethod
    def includes(cls, model: Any) -> bool:
        """Whether a class is an encoder-decoder language model; names of such classes have no common ending."""
        if (
            not issubclass(model, PreTrainedModel)
            or model.main_input_name != cls.main_input
            or not model.can_generate()
        ):
            return False
        return {cls.main_input, "decoder_input_ids", "labels"} <= inspect.signature(model.forward).parameters.keys()

    def _check_target(self, name: str, x: torch.Tensor, arguments: Mapping[str, Any], main: str) -> None:
        """Labels are for the decoder's positions; there may be any number of these."""
        source, ids = arguments[main], arguments.get("decoder_input_ids")
        if x.dim() != 2 or x.shape[0] != source.shape[0] or (ids is not None and x.shape != ids.shape):
            beside = "" if ids is None else f" and decoder_input_ids is {list(ids.shape)}"
            raise CuboidError(
                f"{name} is {list(x.shape)}, but {main} is {list(source.shape)}{beside}; an encoder-decoder needs "
                f"{[source.shape[0], 'target length'] if ids is None else list(ids.shape)}"
            )

    def local_batch(
        self,
        arguments: dict[str, Any],
        config: PretrainedConfig,
        mesh: Mesh,
        verdict: MeshVerdict,  # noqa: ARG002
    ) -> LocalBatch:
        """See :meth:`ModelKind.local_batch`.

        Returns:
            The decoder's batch, with the encoder's as its ``source``, which has the options; they may differ in length.
            Neither has positions, which such a model counts by itself.
        """
        for name in ("position_ids", "shift_labels"):
            if arguments.get(name) is not None:
                raise UnsupportedModelError(
                    f"{name} has no rule for an encoder-decoder, which counts positions by itself"
                )
        # Below, the decoder's tensors have the encoder's names, which an error mustn't show.
        check_tensors(
            {name: arguments[name] for name in TARGET_TENSORS if arguments.get(name) is not None}, "decoder_input_ids"
        )
        inputs = {name: x for name, x in arguments.items() if name not in TARGET_TENSORS}
        names = {"input_ids": "decoder_input_ids", "attention_mask": "decoder_attention_mask", "labels": "labels"}
        target = {key: arguments[name] for key, name in names.items() if arguments.get(name) is not None}
        source = take_local_batch(inputs, config, mesh, inputs="only ids")
        batch = take_local_batch(target, config, mesh, inputs="only ids")
        if source.rows != batch.rows:
            raise CuboidError(f"input_ids has {source.rows} rows, but decoder_input_ids has {batch.rows}")
        return replace(batch, source=source)

    def forward(self, model: Any, base_forward: Any, arguments: dict[str, Any]) -> Any:
        """See :meth:`ModelKind.forward`. The encoder runs first, then the model's own forward with its output."""
        sharding: Sharding = model.cuboid
        as_tuple = pop_tuple(model, arguments)
        self.check(arguments)
        arguments = _with_decoder_ids(model, arguments)
        own_loss = replaced_loss(model, arguments) if sharding.verdict.counts_items else None
        with sharded_batch(model, arguments, own_loss=own_loss) as batch:
            source = batch.source
            assert source is not None
            encoded = self.encode(model, source)
            labels = batch.tensors.pop("labels", None)
            seen = {name: x for name, x in source.tensors.items() if name == "attention_mask"}
            decoder_inputs = {f"decoder_{name}": x for name, x in batch.tensors.items()}
            gathers = own_loss is not None
            if gathers:
                decoder_inputs["labels"] = arguments["labels"]
            with gathering_logits(sharding, batch) if gathers else _vocabulary_parts(model):
                output = base_forward(
                    encoder_outputs=encoded,
                    **seen,
                    **decoder_inputs,
                    **source.options,
                    use_cache=False,
                    return_dict=True,
                )
            if labels is not None and not gathers:
                output = type(output)(**{**output, "loss": loss_in_place(sharding, output.logits, labels, arguments)})
        whole_extras(model, output, batch, known=("loss", "logits", "encoder_last_hidden_state"))
        if not gathers:
            output.logits = whole_logits(model, output.logits, batch, has_loss=labels is not None)
        hidden = output.encoder_last_hidden_state
        if hidden is not None and output.logits is not None:
            hidden = gather_hidden(hidden, sharding.mesh, rows=source.rows, length=source.length)
        output.encoder_last_hidden_state = None if output.logits is None else hidden
        missing: tuple[str, ...] = ("logits",) if output.logits is None else ()
        # With use_cache=True, the arguments are refused.
        if arguments.get("use_cache") is None and getattr(model.config, "use_cache", False):
            missing += ("past_key_values",)
        if missing:
            output = without(output, missing)
        return output.to_tuple() if as_tuple else output

    def encode(self, model: Any, source: LocalBatch) -> Any:
        """An encoder's output, of which the last hidden state is this rank's part."""
        sharding: Sharding = model.cuboid
        with knowing(lengths=Lengths(source.length, source.padded, makes_masks=sharding.makes_masks)):
            encoded = model.get_encoder()(**source.tensors, return_dict=True)
        if isinstance(sharding.late, LateSplit):
            encoded.last_hidden_state = sharding.late.split_source(encoded.last_hidden_state)
        return encoded

    def lengths_of(self, batch: LocalBatch, *, makes_masks: bool) -> Lengths:
        """See :meth:`ModelKind.lengths_of`."""
        assert batch.source is not None
        source = Lengths(batch.source.length, batch.source.padded)
        return Lengths(batch.length, batch.padded, source, makes_masks)

    def check_base_call(self, model: Any) -> None:
        """See :meth:`ModelKind.check_base_call`."""
        raise UnsupportedModelError(
            f"{type(model).__name__} was called by itself, for which there is no rule on a mesh; call the "
            f"{model.cuboid.base.__name__} around it, with labels or decoder_input_ids"
        )

    def inputs_of(self, model: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See :meth:`ModelKind.inputs_of`."""
        inputs = super().inputs_of(model, batch)
        if "decoder_input_ids" not in inputs:
            ids = decoder_ids(model, batch["labels"])
            inputs["decoder_input_ids"] = batch["labels"].clamp(min=0) if ids is None else ids
        return inputs

    def _head_choices(self, has_own_loss: bool) -> list[dict[str, Any]]:
        return [{"counts_items": not has_own_loss}]

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:  # noqa: ARG002
        """See :meth:`ModelKind.micro_batch`. Without padding, the model makes decoder ids from labels itself."""
        source, target = rows_of(case, 0), rows_of(target_case(case), 1)
        batch = {name: x for name, x in source.items() if name != "position_ids"} | {"labels": target["labels"]}
        if "attention_mask" in target:
            batch["decoder_attention_mask"] = target["attention_mask"]
            labels = target["labels"]
            has_label = (labels != IGNORE_INDEX).any(1, keepdim=True)
            # Of a row without labels mBART makes no ids: it looks for the last one.
            ids = decoder_ids(model, labels.where(has_label, target["input_ids"]))
            batch["decoder_input_ids"] = target["input_ids"] if ids is None else ids
        return batch


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
    size, along = model.cuboid.whole_model.limits.tokens, model.cuboid.mesh.along("sequence")
    # It may have an adapter around it.
    head = next(module for module in model.cuboid.head.modules() if isinstance(module, ShardedLinear))
    rows = head.sharded_params["weight"].block_shape[0]
    buffers = {name: x for name, x in model._buffers.items() if x is not None and x.shape[-1:] == (size,)}
    for name, x in buffers.items():
        padded = nn.functional.pad(x, (0, rows * along.size - size))
        model._buffers[name] = padded.narrow(-1, rows * along.index, rows)
    try:
        yield
    finally:
        model._buffers.update(buffers)


def target_case(case: Case) -> Case:
    """The case of a source's target: shorter, or longer than a short source, and padded on the same side."""
    longest = case.length > _LEAST_LENGTH
    length = case.length * 2 // 3 if longest else case.length + _LEAST_LENGTH // 2
    return replace(case, length=length, packed=())
