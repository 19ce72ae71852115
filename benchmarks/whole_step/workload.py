"""A small Llama, a global batch for it, and what one process computes of both in float64."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from llama import llama_config
from transformers import LlamaForCausalLM

from cuboid.config.schema import CuboidConfig, parse_config
from cuboid.distributed.topology import MeshShape
from cuboid.models.certification.float64 import precision
from cuboid.planner.comm_formula import layer_bytes
from cuboid.planner.mesh_search import block_sizes, choose_mesh

AUTO = "auto"
#: All contestants' processes; the global batch has a row for each, so that every layout can share it out.
RANKS = 8
#: What a user would write; a step's time doesn't depend on it.
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
#: Below the first gradient's norm, so that clipping has something to do.
CLIP = 0.1
_SEED = 0
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class StepWorkload:
    """The model's sizes and the global batch, which are the same for all contestants.

    Args:
        batch: rows of the global batch, a multiple of :data:`RANKS`.
        length: tokens of a row.
        hidden, intermediate, heads, layers, vocabulary: of the model; it has as many key/value heads as heads.
        dtype: ``"float32"``, or ``"bfloat16"``: mixed precision, as each framework has it.
    """

    batch: int = RANKS
    length: int = 512
    hidden: int = 512
    intermediate: int = 1376
    heads: int = 8
    layers: int = 4
    vocabulary: int = 4096
    dtype: str = "float32"

    @property
    def low_precision(self) -> bool:
        """Whether frameworks are to compute in bfloat16."""
        return self.dtype == "bfloat16"

    @property
    def element_bytes(self) -> int:
        """Of an activation or a weight while it is sent."""
        return _BYTES[self.dtype]

    def model(self) -> LlamaForCausalLM:
        """The model, every time with the same float32 weights."""
        torch.manual_seed(_SEED)
        config = llama_config(self, layers=self.layers, vocabulary=self.vocabulary, use_cache=False)
        return LlamaForCausalLM(config)

    def rows(self) -> torch.Tensor:
        """Token ids of the global batch, ``[batch, length]``; they are the labels, too."""
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randint(self.vocabulary, (self.batch, self.length), generator=generator)

    def section(self, mesh: str, *, reshard: bool = True) -> dict[str, Any]:
        """``tensor_parallel`` of a config.

        Args:
            mesh: or ``"auto"``.
            reshard: whether weights are let go of between forward and backward.
        """
        common = {"mode": "3d_tensor", "weight_gather": "layer" if reshard else "step"}
        if mesh == AUTO:
            return {**common, "mesh": AUTO, "size": RANKS}
        shape = MeshShape.parse(mesh)
        return {**common, "mesh": {"batch": shape.batch, "sequence": shape.sequence, "hidden": shape.hidden}}

    def config(self, mesh: str, *, reshard: bool = True) -> CuboidConfig:
        """What that section means for the whole batch."""
        section = self.section(mesh, reshard=reshard)
        return parse_config({"tensor_parallel": section, "train_micro_batch_size_per_gpu": self.batch})

    def shape(self, mesh: str, model: LlamaForCausalLM, *, reshard: bool = True) -> MeshShape:
        """The mesh that is meant."""
        return choose_mesh(model, self.config(mesh, reshard=reshard))

    def layers_bytes(self, mesh: MeshShape, model: LlamaForCausalLM, *, reshard: bool = True) -> int:
        """What a rank sends for all layers in forward and backward, by the closed count; embedding, head, loss and
        gradient norm, which the count doesn't have, and what replicas of the mesh exchange, come on top."""
        sizes, rows = block_sizes(model, mesh), self.batch * mesh.size // RANKS
        gathers: Literal["layer", "step"] = "layer" if reshard else "step"
        one = layer_bytes(sizes, mesh, rows, self.length, element_bytes=self.element_bytes, weight_gather=gathers)
        return self.layers * sum(one.values())

    def numbers(self) -> dict[str, Any]:
        """For the record."""
        return {**asdict(self), "model": "LlamaForCausalLM", "clip": CLIP, "adamw": ADAMW}


#: In a few seconds, to see whether everything works. The times say nothing.
QUICK = StepWorkload(length=32, hidden=64, intermediate=176, layers=2, vocabulary=256)


@dataclass(frozen=True)
class Reference:
    """What plain Hugging Face computes in one process in float64.

    Args:
        losses: of the batch, before and after a step.
        gradient_norm: of that step, before clipping.
    """

    losses: tuple[float, float]
    gradient_norm: float


def compute_reference(workload: StepWorkload, model: LlamaForCausalLM) -> Reference:
    """A whole training step of the whole model in this process."""
    whole, rows = copy.deepcopy(model).double(), workload.rows()
    optimizer = torch.optim.AdamW(whole.parameters(), **ADAMW)
    with precision(keep_float64=True):
        first = whole(input_ids=rows, labels=rows).loss
        first.backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
        optimizer.step()
        with torch.no_grad():
            second = whole(input_ids=rows, labels=rows).loss
    return Reference((first.item(), second.item()), norm.item())
