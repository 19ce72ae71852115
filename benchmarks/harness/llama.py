"""The small Llamas that cases train or load."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from cuboid.config.schema import CuboidConfig, parse_config
from cuboid.distributed.topology import MeshShape
from cuboid.models.sharded.parallel_plan import MeshRules
from cuboid.planner.comm_formula import layer_bytes
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.model_formulas import block_sizes

#: The mesh with the fewest bytes, by which "mesh": "auto" went when the records were made.
AUTO = "auto"
_SEED = 0


def fewest_bytes(
    model: PreTrainedModel, ranks: int, rows: int, length: int, weight_gather: Literal["layer", "step"] = "layer"
) -> MeshShape:
    """The mesh whose layers send the fewest bytes, by the closed count.

    Args:
        model: whole, on any device.
        ranks: of the mesh.
        rows: of a micro-batch.
        length: tokens of a sequence.
        weight_gather: the config's.
    """
    described = describe_modules(model)

    def sent(mesh: MeshShape) -> int:
        return sum(layer_bytes(block_sizes(described, mesh), mesh, rows, length, weight_gather=weight_gather).values())

    return min((mesh for mesh in MeshRules(model).fitting(ranks) if rows % mesh.batch == 0), key=sent)


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
        with torch.device("meta"):
            shape = self.shape(mesh, ranks, LlamaForCausalLM(self.config()), more.get("weight_gather", "layer"))
        axes = {"batch": shape.batch, "sequence": shape.sequence, "hidden": shape.hidden}
        return {"mode": "3d_tensor", "mesh": axes, **more}

    def sharding(self, mesh: str, ranks: int, **more: Any) -> CuboidConfig:
        section = self.section(mesh, ranks, **more)
        return parse_config({"tensor_parallel": section, "train_micro_batch_size_per_gpu": self.batch})

    def shape(
        self, mesh: str, ranks: int, model: LlamaForCausalLM, weight_gather: Literal["layer", "step"] = "layer"
    ) -> MeshShape:
        """The mesh that is meant."""
        if mesh != AUTO:
            return MeshShape.parse(mesh)
        return fewest_bytes(model, ranks, self.batch, self.length, weight_gather)

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
