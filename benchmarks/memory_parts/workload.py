"""A small Llama and a batch for it; the same on every mesh."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from llama import llama_config
from transformers import LlamaForCausalLM

from cuboid.config.schema import CuboidConfig, parse_config
from cuboid.distributed.topology import MeshShape
from cuboid.planner.mesh_search import choose_mesh

_SEED = 0
AUTO = "auto"


@dataclass(frozen=True)
class MemoryWorkload:
    """Sizes of the model and the global batch."""

    batch: int = 8
    length: int = 512
    hidden: int = 512
    intermediate: int = 1408
    heads: int = 16
    key_value_heads: int = 8
    layers: int = 4
    vocabulary: int = 1024

    def model(self) -> LlamaForCausalLM:
        """Every time with the same float32 weights."""
        torch.manual_seed(_SEED)
        config = llama_config(
            self, layers=self.layers, vocabulary=self.vocabulary, key_value_heads=self.key_value_heads
        )
        return LlamaForCausalLM(config).train()

    def tokens(self) -> torch.Tensor:
        """``[B, S]``."""
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randint(0, self.vocabulary, (self.batch, self.length), generator=generator)

    def config(self, mesh: str, ranks: int) -> CuboidConfig:
        """As a user would write it, with a mesh or ``"auto"``."""
        chosen: Any = {"mesh": AUTO, "size": ranks}
        if mesh != AUTO:
            shape = MeshShape.parse(mesh)
            chosen = {"mesh": {"batch": shape.batch, "sequence": shape.sequence, "hidden": shape.hidden}}
        section = {"mode": "3d_tensor", **chosen}
        return parse_config({"tensor_parallel": section, "train_micro_batch_size_per_gpu": self.batch})

    def shape(self, mesh: str, ranks: int, model: LlamaForCausalLM) -> MeshShape:
        """The mesh that a config means."""
        return choose_mesh(model, self.config(mesh, ranks))

    def numbers(self) -> dict[str, Any]:
        """For the record."""
        return {**asdict(self), "dtype": "float32"}


#: In a few seconds, to see whether everything works. The counts are as exact as any.
QUICK = MemoryWorkload(length=64, hidden=64, intermediate=192, layers=2, vocabulary=128, key_value_heads=16)
