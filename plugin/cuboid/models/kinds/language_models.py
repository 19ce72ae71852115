"""What all kinds of language models share: logits of the vocabulary, and labels that are ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from transformers import PretrainedConfig

from cuboid.errors import CuboidError
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.local_batch import IGNORE_INDEX, check_tensors
from cuboid.models.kinds.model_kind import ModelKind
from cuboid.tensor3d.layers.vocab_cross_entropy import shifted


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

    def items(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """See :meth:`ModelKind.items`."""
        labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"]
        return (labels != IGNORE_INDEX).sum()


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
