"""Decoder layers of an unmodified Llama, one after another, whose computing takes a good part of a second."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from cuboid.distributed.topology import MeshShape
from cuboid.models.certification.float64 import precision
from network.layer_workload import LayerWorkload, Reference, rotary_tables

_SEED = 0


@dataclass(frozen=True)
class StackWorkload(LayerWorkload):
    """As :class:`~network.layer_workload.LayerWorkload`, for a few ranks with a core each, and any number of layers.

    With several layers, one layer's weights can be brought together while the one before it computes. It is so large
    because a processor that carries messages besides computing is slowed down by that: the more a rank computes for
    each byte, the less.
    """

    batch: int = 8
    length: int = 512
    hidden: int = 2048
    intermediate: int = 5504
    heads: int = 16
    layers: int = 1

    def model(self) -> LlamaForCausalLM:
        """A model of so many layers, every time with the same float32 weights."""
        config = super().model().config
        config.num_hidden_layers = self.layers
        torch.manual_seed(_SEED)
        return LlamaForCausalLM(config)

    def formula_bytes(self, mesh: MeshShape, model: LlamaForCausalLM) -> int:
        """What a rank sends in forward and backward, by the closed count."""
        return self.layers * super().formula_bytes(mesh, model)


def run_layers(model: LlamaForCausalLM, given: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """All of the model's layers, on ``[B, S, H]`` or a rank's part of it."""
    for layer in model.model.layers:
        given = layer(given, position_embeddings=tables)
    return given


def compute_reference(workload: StackWorkload, model: LlamaForCausalLM) -> Reference:
    """The plain Hugging Face layers in float64."""
    whole = copy.deepcopy(model).double()
    given, gradient = workload.inputs()
    given.requires_grad_()
    with precision(keep_float64=True):
        output = run_layers(whole, given, rotary_tables(whole, workload.length))
        output.backward(gradient)
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert given.grad is not None
    return Reference(given.detach(), gradient, output.detach(), given.grad, gradients)
