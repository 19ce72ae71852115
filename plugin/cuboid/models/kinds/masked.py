"""Masked language models, which predict hidden tokens from all others."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForMaskedLM

from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.batch.local_batch import IGNORE_INDEX
from cuboid.models.kinds.forward import pop_tuple, replaced_loss, sharded_batch, whole_extras, whole_logits
from cuboid.models.kinds.language_models import LanguageModel, loss_in_place
from cuboid.models.kinds.probe_rows import RowsOf
from cuboid.models.kinds.sharding import Sharding


class Masked(LanguageModel):
    """A masked language model."""

    name = "masked"
    words = "masked language modelling, where positions see later ones"
    endings = ("ForMaskedLM",)
    auto_class = AutoModelForMaskedLM
    ordinary_loss = "ForMaskedLMLoss"
    in_pipeline = True

    def forward(self, model: Any, base_forward: Any, arguments: dict[str, Any]) -> Any:
        """See :meth:`ModelKind.forward`. The labels aren't shifted."""
        sharding: Sharding = model.cuboid
        if sharding.verdict.gathers_logits:
            return super().forward(model, base_forward, arguments)
        as_tuple = pop_tuple(model, arguments)
        self.check(arguments)
        if sharding.verdict.counts_items and replaced_loss(model, arguments) is not None:
            return super().forward(model, base_forward, {**arguments, "return_dict": not as_tuple})
        with sharded_batch(model, arguments) as batch:
            labels = batch.tensors.pop("labels", None)
            output = base_forward(**self.local_arguments(model, batch), return_dict=True)
            if labels is not None:
                output = type(output)(**{**output, "loss": loss_in_place(sharding, output.logits, labels, arguments)})
        output.logits = whole_logits(model, output.logits, batch, has_loss=labels is not None)
        whole_extras(model, output, batch, known=("loss", "logits"))
        return output.to_tuple() if as_tuple else output

    def _head_choices(self, has_own_loss: bool) -> list[dict[str, Any]]:
        return [{"counts_items": not has_own_loss}, {"gathers_logits": True}]

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:  # noqa: ARG002
        """See :meth:`ModelKind.micro_batch`: half of the labels are kept."""
        batch = rows_of(case, 0)
        is_seen = torch.rand(batch["labels"].shape, generator=generator) < 0.5
        return {**batch, "labels": batch["labels"].masked_fill(is_seen, IGNORE_INDEX)}
