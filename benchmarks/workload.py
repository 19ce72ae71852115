"""The work that all contestants do: one model, cut into stages at the same places, and one stream of batches."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from llama import llama_config
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from cuboid.models.batch.batch import IGNORE_INDEX

#: Bytes for tokens: with so small a head, all stages have the same work, as the theory assumes.
VOCABULARY = 256
_SEED = 20240605


@dataclass(frozen=True)
class Workload:
    """Sizes of a Llama, of its batches (one row for each micro-batch) and of the pipeline; all is in float32."""

    length: int = 2048
    hidden: int = 320
    intermediate: int = 864
    heads: int = 4
    key_value_heads: int = 2
    layers: int = 4
    stages: int = 2

    @property
    def balance(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return (self.layers // self.stages,) * self.stages

    def config(self) -> LlamaConfig:
        """Of the model."""
        return llama_config(self, layers=self.layers, vocabulary=VOCABULARY, key_value_heads=self.key_value_heads)

    def model(self) -> LlamaForCausalLM:
        """The whole model, every time with the same weights."""
        torch.manual_seed(_SEED)
        return LlamaForCausalLM(self.config())

    def batch(self, micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids ``[M, S]`` and labels ``[M, S]``, shifted, the same every time."""
        generator = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(VOCABULARY, (micro_batches, self.length), generator=generator)
        labels = nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX)
        return ids, labels

    def numbers(self) -> dict[str, Any]:
        """For the record."""
        return {**asdict(self), "vocabulary": VOCABULARY, "dtype": "float32"}


#: In a few seconds, to see whether everything works. The times say nothing.
QUICK = Workload(length=256, hidden=64, intermediate=128)


class PlainStage(nn.Module):
    """A stage as users of other pipelines write one: Hugging Face's own layers, and whole logits at the end.

    Takes ids ``[B, S]`` on the first stage and hidden states ``[B, S, H]`` on the last.
    """

    def __init__(self, model: LlamaForCausalLM, stage: int, stages: int) -> None:
        super().__init__()
        each = len(model.model.layers) // stages
        self.layers = model.model.layers[stage * each : (stage + 1) * each]
        self.rotary = model.model.rotary_emb
        self.embedding = model.model.embed_tokens if stage == 0 else None
        self.head = nn.Sequential(model.model.norm, model.lm_head) if stage == stages - 1 else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[B, S, H]`` from the first stage, logits ``[B, S, V]`` from the last."""
        hidden = given if self.embedding is None else self.embedding(given)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        cosine_and_sine = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=positions, position_embeddings=cosine_and_sine)
        return hidden if self.head is None else self.head(hidden)


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of a micro-batch; all have equally many labels."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX)
