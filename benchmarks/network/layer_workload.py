"""One decoder layer of an unmodified Llama, a batch for it, and what both give in float64."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from llama import llama_config
from transformers import LlamaForCausalLM

from cuboid.config.schema import CuboidConfig, parse_config
from cuboid.distributed.topology import MeshShape
from cuboid.models.certification.float64 import precision
from cuboid.planner.comm_formula import layer_bytes
from cuboid.planner.mesh_search import block_sizes, choose_mesh

_SEED = 0
_VOCABULARY = 256  # of an embedding and a head that never run
AUTO = "auto"


@dataclass(frozen=True)
class LayerWorkload:
    """The layer's sizes and the global batch, which is the same on every mesh.

    Sixty-four heads and features that divide by 64 let 1×64×1 take part, Megatron's 1-D; the heads are small because
    64 ranks share a few cores.
    """

    batch: int = 16
    length: int = 256
    hidden: int = 256
    intermediate: int = 704
    heads: int = 64

    def model(self) -> LlamaForCausalLM:
        """A model of one layer, every time with the same float32 weights."""
        torch.manual_seed(_SEED)
        config = llama_config(self, layers=1, vocabulary=_VOCABULARY)
        return LlamaForCausalLM(config)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's input and its output's gradient, ``[B, S, H]`` both, in float64."""
        generator = torch.Generator().manual_seed(_SEED)
        shape = (self.batch, self.length, self.hidden)
        given, gradient = torch.randn((2, *shape), generator=generator, dtype=torch.float64)
        return given, gradient

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

    def formula_bytes(self, mesh: MeshShape, model: LlamaForCausalLM) -> int:
        """What a rank sends in forward and backward, by the closed count."""
        sizes = block_sizes(model, mesh)
        return sum(layer_bytes(sizes, mesh, self.batch, self.length, element_bytes=4).values())

    def numbers(self) -> dict[str, Any]:
        """For the record."""
        return {**asdict(self), "dtype": "float32", "layer": "LlamaDecoderLayer"}


#: In a few seconds, to see whether everything works. The times say nothing.
QUICK = LayerWorkload(batch=8, length=64, hidden=128, intermediate=192)


@dataclass(frozen=True)
class Reference:
    """What one process computes in float64, whole.

    Args:
        given, gradient: the layer's input and its output's gradient, ``[B, S, H]``.
        output, given_gradient: what comes of them.
        gradients: of the layer's parameters, by their names in the model.
    """

    given: torch.Tensor
    gradient: torch.Tensor
    output: torch.Tensor
    given_gradient: torch.Tensor
    gradients: dict[str, torch.Tensor]


def compute_reference(workload: LayerWorkload, model: LlamaForCausalLM) -> Reference:
    """The plain Hugging Face layer in float64."""
    whole = copy.deepcopy(model).double()
    given, gradient = workload.inputs()
    given.requires_grad_()
    with precision(keep_float64=True):
        output = run_layer(whole, given, rotary_tables(whole, workload.length))
        output.backward(gradient)
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert given.grad is not None
    return Reference(given.detach(), gradient, output.detach(), given.grad, gradients)


def rotary_tables(model: LlamaForCausalLM, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary embedding, ``[1, S, head_dim]`` each."""
    weight = model.model.layers[0].input_layernorm.weight
    return model.model.rotary_emb(weight, torch.arange(length)[None])


def run_layer(model: LlamaForCausalLM, given: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The model's only layer, on ``[B, S, H]`` or a rank's part of it."""
    return model.model.layers[0](given, position_embeddings=tables)
