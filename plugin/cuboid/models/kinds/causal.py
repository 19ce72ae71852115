"""Causal language models, which predict each position's next token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cuboid.errors import UnsupportedModelError
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.batch.local_batch import IGNORE_INDEX
from cuboid.models.kinds.language_models import LanguageModel
from cuboid.models.kinds.probe_rows import RowsOf


class Causal(LanguageModel):
    """A causal language model."""

    name = "causal"
    words = "causal language modelling"
    endings: ClassVar[tuple[str, ...]] = ("ForCausalLM", "LMHeadModel")
    auto_class = AutoModelForCausalLM
    targets = ("labels", "shift_labels")
    ordinary_loss = "ForCausalLMLoss"
    is_causal = True
    in_pipeline = True

    @classmethod
    def takes_input_of(cls, model: Any) -> bool:  # noqa: ARG003
        """See :meth:`ModelKind.takes_input_of`: the language models of composite models, too."""
        return True

    def items(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """See :meth:`ModelKind.items`: labels that aren't shifted yet have one that nothing predicts."""
        if "shift_labels" in batch:
            return super().items(batch)
        return (batch["labels"][:, 1:] != IGNORE_INDEX).sum()

    def options_of(self, model: Any) -> dict[str, Any]:  # noqa: ARG002
        """See :meth:`ModelKind.options_of`."""
        return {"use_cache": False}

    def _head_choices(self, has_own_loss: bool) -> list[dict[str, Any]]:
        return [{"gathers_logits": has_own_loss}]

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:  # noqa: ARG002
        """See :meth:`ModelKind.micro_batch`."""
        return rows_of(case, 0)


def check_causal(config: PretrainedConfig, command: str) -> None:
    """Check that a config is of a causal language model, for a command that runs nothing else.

    Raises:
        UnsupportedModelError: it isn't.
    """
    # Asked for one at a time: to go through the mapping imports each model's module, for half a second.
    is_causal = any(kind in MODEL_FOR_CAUSAL_LM_MAPPING for kind in (type(config), type(config.get_text_config())))
    if not is_causal and not getattr(config, "auto_map", None):
        raise UnsupportedModelError(
            f"{command} runs causal language models, and {config.model_type!r} has none; train other models in a "
            "script of your own, with cuboid.from_pretrained"
        )
