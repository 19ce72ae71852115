"""The Llamas of all benchmarks."""

from __future__ import annotations

from typing import Any, Protocol

from transformers import LlamaConfig


class Sizes(Protocol):
    """What workloads say of their model; ``length`` is the most tokens of a sequence."""

    @property
    def hidden(self) -> int: ...

    @property
    def intermediate(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def length(self) -> int: ...


def llama_config(
    sizes: Sizes, *, layers: int, vocabulary: int, key_value_heads: int | None = None, **more: Any
) -> LlamaConfig:
    """Hugging Face's config; as many heads for keys and values as for queries, unless something else is said."""
    return LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_attention_heads=sizes.heads,
        num_key_value_heads=key_value_heads or sizes.heads,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        max_position_embeddings=sizes.length,
        attn_implementation="sdpa",
        **more,
    )
