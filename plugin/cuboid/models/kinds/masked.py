"""Masked language models, which predict hidden tokens from all others."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForMaskedLM

from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.batch.local_batch import IGNORE_INDEX
from cuboid.models.kinds.language_models import LanguageModel
from cuboid.models.kinds.probe_rows import RowsOf


class Masked(LanguageModel):
    """A masked language model."""

    name = "masked"
    words = "masked language modelling, where positions see later ones"
    endings = ("ForMaskedLM",)
    auto_class = AutoModelForMaskedLM
    ordinary_loss = "ForMaskedLMLoss"
    in_pipeline = True

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:  # noqa: ARG002
        """See :meth:`ModelKind.micro_batch`: half of the labels are kept."""
        batch = rows_of(case, 0)
        is_seen = torch.rand(batch["labels"].shape, generator=generator) < 0.5
        return {**batch, "labels": batch["labels"].masked_fill(is_seen, IGNORE_INDEX)}
