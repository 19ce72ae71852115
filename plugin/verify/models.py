"""Small random checkpoints of the supported architectures, for comparisons that need no download."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from cuboid.errors import CuboidError, MeshError

Architecture = Literal["llama", "qwen2", "qwen3", "mistral", "gpt2"]
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
#: Far from zero, so that scores, gates and norms leave the neighbourhood where every function is linear.
_WEIGHT_STD, _VECTOR_STD = 0.1, 0.2


@dataclass(frozen=True)
class SmallModel:
    """Sizes and options of a small random model.

    Args:
        architecture: one of :data:`ARCHITECTURES`.
        heads: query heads.
        kv_heads: key and value heads; GPT-2 always has as many as query heads.
        head_dim: even, as rotary embeddings need. The hidden size is ``heads * head_dim``.
        layers: decoder layers.
        vocabulary: number of tokens; the default divides by next to nothing.
        tied: whether the output embedding is the input embedding; ``None`` takes the architecture's own default.
        bias: whether attention and MLP have biases, where the architecture leaves that open.
        sliding_window: attention window of Mistral, in tokens.
        positions: longest sequence.
        seed: of the weights.
    """

    architecture: Architecture
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 8
    layers: int = 2
    vocabulary: int = 131
    tied: bool | None = None
    bias: bool = False
    sliding_window: int | None = None
    positions: int = 256
    seed: int = 0

    @classmethod
    def fitting(cls, architecture: Architecture, ranks: int, **options: Any) -> SmallModel:
        """A model that any mesh of so many ranks can divide.

        ``options`` are fields. They win over what such a mesh would need; ``None`` for a number of heads leaves it.
        """
        heads = options.pop("heads", None) or math.ceil(8 / ranks) * ranks
        kv_heads = options.pop("kv_heads", None) or next(heads // share for share in (4, 2, 1) if heads % share == 0)
        return cls(architecture, heads=heads, kv_heads=kv_heads, **options)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    def config(self) -> PretrainedConfig:
        """The Hugging Face config.

        Raises:
            CuboidError: an unknown architecture, or sizes that contradict each other.
        """
        if self.architecture not in ARCHITECTURES:
            raise CuboidError(f"arch is {self.architecture!r}; known: {', '.join(ARCHITECTURES)}")
        if self.heads % self.kv_heads:
            raise MeshError(f"kv_heads is {self.kv_heads}, which doesn't divide heads = {self.heads}")
        if self.architecture == "gpt2":
            return transformers.GPT2Config(
                n_embd=self.hidden,
                n_layer=self.layers,
                n_head=self.heads,
                n_positions=self.positions,
                **self._common(tied_by_default=True),
            )
        sizes = {
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.positions,
            **self._common(tied_by_default=self.architecture == "qwen3"),
        }
        if self.architecture == "llama":
            return transformers.LlamaConfig(attention_bias=self.bias, mlp_bias=self.bias, **sizes)
        if self.architecture == "qwen2":
            return transformers.Qwen2Config(**sizes)
        if self.architecture == "qwen3":
            return transformers.Qwen3Config(attention_bias=self.bias, head_dim=self.head_dim, **sizes)
        return transformers.MistralConfig(sliding_window=self.sliding_window, **sizes)

    def _common(self, *, tied_by_default: bool) -> dict[str, Any]:
        return {
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": tied_by_default if self.tied is None else self.tied,
            "initializer_range": _WEIGHT_STD,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }

    def write(self, directory: str | Path) -> None:
        """Write a float32 checkpoint, with plain transformers."""
        generator = torch.Generator().manual_seed(self.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start at one and biases at zero, where mistakes don't show
                parameter.data += _VECTOR_STD * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(directory)
