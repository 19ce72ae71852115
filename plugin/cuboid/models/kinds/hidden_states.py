"""Models without a head, from whose hidden states users compute a loss of their own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModel

from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.kinds.model_kind import ModelKind
from cuboid.models.kinds.probe_rows import RowsOf


class HiddenStates(ModelKind):
    """A model that returns hidden states of tokens."""

    name = "hidden"
    words = "hidden states, without a head"
    endings = ("Model",)
    auto_class = AutoModel
    targets = ()

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:  # noqa: ARG002
        """See :meth:`ModelKind.micro_batch`."""
        return {name: x for name, x in rows_of(case, 0).items() if name != "labels"}

    def probe_loss(self, output: Any, batch: MicroBatch) -> torch.Tensor:
        """See :meth:`ModelKind.probe_loss`: a function of all outputs that leaves out padding."""
        hidden = output.last_hidden_state
        if "attention_mask" in batch:
            hidden = hidden * batch["attention_mask"].unsqueeze(-1)
        pooled = getattr(output, "pooler_output", None)
        parts = [hidden] if pooled is None else [hidden, pooled]
        return torch.stack([(part * _weights(part)).mean() for part in parts]).sum()


def _weights(x: torch.Tensor) -> torch.Tensor:
    """Weights in the shape of ``x`` that differ from one element to the next."""
    return torch.arange(x.numel(), dtype=x.dtype, device=x.device).cos().view_as(x)
