"""Models with a head of few outputs: classifiers of sequences and of tokens, and those that mark answers.

All ranks of a mesh have a micro-batch's labels whole: a head's loss is the model's own code, run by each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
)

from cuboid.distributed.no_compile import uncompiled
from cuboid.models.attention.forward_context import RunningHead, forward_context, knowing
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.batch.local_batch import IGNORE_INDEX, TENSORS
from cuboid.models.kinds.model_kind import TARGETS, ModelKind
from cuboid.models.kinds.probe_rows import RowsOf
from cuboid.tensor3d.layers.dropout import compared_by


class LabelHead(ModelKind):
    """A model whose head has a few outputs for each row or token."""

    in_pipeline = True
    runs_own_head = True
    has_new_head = True

    def forward(self, model: Any, base_forward: Any, arguments: dict[str, Any]) -> Any:
        """See :meth:`ModelKind.forward`. The code around the base model runs on whole micro-batches on all ranks."""
        self.check(arguments)
        model.cuboid.state.made.check(model)
        head = RunningHead({name: arguments[name] for name in TARGETS if arguments.get(name) is not None})
        with knowing(head=head), compared_by(head):
            return base_forward(**arguments)

    def items(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """See :meth:`ModelKind.items`."""
        labels = batch.get("labels")
        if labels is None or labels.is_floating_point() or self.classes is None:
            return super().items(batch)
        return (labels != IGNORE_INDEX).sum()


class RowClassifier(LabelHead):
    """A model whose labels are of whole rows: classes, several classes that don't exclude one another, or numbers."""

    ordinary_loss = "ForSequenceClassificationLoss"

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        """See :meth:`ModelKind.of`."""
        outputs = int(config.num_labels)
        # Without a problem type, several outputs and labels that are integers are classes.
        is_single = getattr(config, "problem_type", None) in (None, "single_label_classification")
        return cls(outputs, outputs if outputs > 1 and is_single else None)

    def _shapes(self, input_shape: torch.Size, *, is_integer: bool) -> list[tuple[int, ...]]:
        if self.outputs == 1 or (is_integer and self.classes is not None):
            return shapes_of_rows(input_shape)
        return [(input_shape[0], self.outputs)]

    def random_labels(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Random labels of rows."""
        if self.classes is not None:
            return torch.randint(0, self.classes, (rows,), generator=generator)
        shape = (rows,) if self.outputs == 1 else (rows, self.outputs)
        return torch.rand(shape, generator=generator, dtype=torch.float64)


class SequenceClassifier(RowClassifier):
    """A classifier of sequences of tokens."""

    name = "sequence"
    words = "sequence classification"
    endings = ("ForSequenceClassification",)
    auto_class = AutoModelForSequenceClassification
    reads_last_token = True

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:  # noqa: ARG002
        """See :meth:`ModelKind.micro_batch`."""
        batch = rows_of(case, 0)
        return {**batch, "labels": self.random_labels(len(batch["labels"]), generator)}


class TokenClassifier(LabelHead):
    """A classifier of each token."""

    name = "tokens"
    words = "token classification"
    endings = ("ForTokenClassification",)
    auto_class = AutoModelForTokenClassification
    ordinary_loss = "ForTokenClassification"
    labels_each_token = True

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        """See :meth:`ModelKind.of`."""
        return cls(int(config.num_labels), int(config.num_labels))

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:  # noqa: ARG002
        """See :meth:`ModelKind.micro_batch`."""
        batch = rows_of(case, 0)
        labels = batch["labels"]
        return {**batch, "labels": torch.where(labels == IGNORE_INDEX, labels, labels % self.outputs)}


class QuestionAnswering(LabelHead):
    """A model that marks where in a sequence an answer starts and ends."""

    name = "answers"
    words = "question answering"
    endings = ("ForQuestionAnswering",)
    auto_class = AutoModelForQuestionAnswering
    ordinary_loss = "ForQuestionAnsweringLoss"
    targets = ("start_positions", "end_positions")
    tensors = (*TENSORS, "start_positions", "end_positions")

    def _shapes(self, input_shape: torch.Size, *, is_integer: bool) -> list[tuple[int, ...]]:  # noqa: ARG002
        return shapes_of_rows(input_shape)

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:  # noqa: ARG002
        """See :meth:`ModelKind.micro_batch`."""
        batch = rows_of(case, 0)
        rows, length = batch.pop("labels").shape
        answers = {name: torch.randint(0, length, (rows,), generator=generator) for name in self.targets}
        return {**batch, **answers}


@uncompiled
def without_padding(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
    """A forward hook of a head with whole logits that removes padding rows and positions."""
    head = forward_context().head
    assert head is not None
    assert head.batch is not None
    return logits[: head.batch.rows, : head.batch.length].contiguous()


def shapes_of_rows(input_shape: torch.Size) -> list[tuple[int, ...]]:
    """The shapes of a number for each row of an input."""
    # An input of images is checked later, so it may have any number of dims here.
    rows = tuple(input_shape[:1])
    return [rows, (*rows, 1)]
