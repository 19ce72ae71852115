"""The small Llamas that cases train or load."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cuboid.config.schema import CuboidConfig, parse_config
from cuboid.distributed.topology import MeshShape
from cuboid.planner.automatic import choose_mesh

AUTO = "auto"
_SEED = 0


@dataclass(frozen=True)
class Llama:
    """A model, and the global batch for it of B rows of S tokens, which are the same for all contestants."""

    batch: int = 8
    length: int = 512
    hidden: int = 512
    intermediate: int = 1376
    heads: int = 8
    layers: int = 4
    vocabulary: int = 4096
    key_value_heads: int | None = None  # as many as heads if None
    dtype: str = "float32"  # what it computes in; ``"bfloat16"`` is mixed precision, as each framework has it

    def config(self, **more: Any) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads or self.heads,
            num_hidden_layers=self.layers,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.length,
            attn_implementation="sdpa",
            **more,
        )

    def model(self) -> LlamaForCausalLM:
        """The whole model, every time with the same float32 weights."""
        torch.manual_seed(_SEED)
        return LlamaForCausalLM(self.config(use_cache=False)).train()

    def tokens(self) -> torch.Tensor:
        """Ids of the batch ``[B, S]``, which are their own labels; the same every time."""
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randint(self.vocabulary, (self.batch, self.length), generator=generator)

    def section(self, mesh: str, ranks: int, **more: Any) -> dict[str, Any]:
        """``tensor_parallel`` of a config, for a mesh as the command line has it or ``"auto"``."""
        if mesh == AUTO:
            return {"mode": "3d_tensor", "mesh": AUTO, "size": ranks, **more}
        shape = MeshShape.parse(mesh)
        axes = {"batch": shape.batch, "sequence": shape.sequence, "hidden": shape.hidden}
        return {"mode": "3d_tensor", "mesh": axes, **more}

    def sharding(self, mesh: str, ranks: int, **more: Any) -> CuboidConfig:
        section = self.section(mesh, ranks, **more)
        return parse_config({"tensor_parallel": section, "train_micro_batch_size_per_gpu": self.batch})

    def shape(self, mesh: str, ranks: int, model: LlamaForCausalLM, **more: Any) -> MeshShape:
        """The mesh that is meant."""
        return choose_mesh(model, self.sharding(mesh, ranks, **more))

    def numbers(self) -> dict[str, Any]:
        return asdict(self)


def described(sizes: dict[str, Any]) -> str:
    """A record's workload in words, without its batch."""
    heads = f"{sizes['heads']} heads"
    if sizes.get("key_value_heads"):
        heads = f"{sizes['heads']} query and {sizes['key_value_heads']} key/value heads"
    layers = f"{sizes['layers']} layer{'s' if sizes['layers'] > 1 else ''}"
    widths = f"hidden {sizes['hidden']}, MLP {sizes['intermediate']}, {heads}"
    return f"a Llama of {layers}, {widths}" + (f", vocabulary {sizes['vocabulary']}" if "vocabulary" in sizes else "")


def batch(sizes: dict[str, Any]) -> str:
    return f"{sizes['batch']} rows of {sizes['length']} tokens, {sizes['dtype']}"
