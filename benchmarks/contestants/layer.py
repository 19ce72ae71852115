"""Decoder layers of an unmodified Llama on a mesh, a batch for them, and what both give in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from harness.llama import AUTO, Llama
from harness.rounds import Record
from network.serving import Contestant
from transformers import LlamaForCausalLM

import cuboid
from cuboid.distributed.axis_collectives import own_slice
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import AXES, Axis, MeshShape
from cuboid.errors import CuboidError
from cuboid.models.certification.float64 import precision
from cuboid.planner.comm_formula import layer_bytes
from cuboid.planner.mesh_search import block_sizes
from cuboid.tensor3d.sharding.sharding_spec import take_shard
from cuboid.verify.compare import relative_error
from cuboid.weights.state_dict_map import sharded_layouts

_SEED = 0
#: How far a float32 layer may be from float64, relatively; it is at 1e-5 and below.
AGREEMENT = 1e-4
#: What headers and acknowledgements of full packets may add to the bytes that are counted, and those of each message.
_HEADERS, _MESSAGE_BYTES = 0.02, 1200


@dataclass(frozen=True)
class LayerWorkload(Llama):
    """Layers one after another; embedding and head never run."""

    layers: int = 1
    vocabulary: int = 256

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first layer's input and the last one's output gradient, ``[B, S, H]`` both, in float64."""
        generator = torch.Generator().manual_seed(_SEED)
        shape = (self.batch, self.length, self.hidden)
        given, gradient = torch.randn((2, *shape), generator=generator, dtype=torch.float64)
        return given, gradient

    def formula_bytes(self, mesh: MeshShape, model: LlamaForCausalLM) -> int:
        """What a rank sends in forward and backward, by the closed count."""
        one = layer_bytes(block_sizes(model, mesh), mesh, self.batch, self.length, element_bytes=4)
        return self.layers * sum(one.values())

    def numbers(self) -> dict[str, Any]:
        """For the record."""
        return {**super().numbers(), "layer": "LlamaDecoderLayer"}


def layer_fact(sizes: dict[str, Any]) -> str:
    """A workload of a record in words."""
    return (
        f"{sizes['layer']}, hidden {sizes['hidden']}, MLP {sizes['intermediate']}, {sizes['heads']} heads; "
        f"{sizes['batch']} rows of {sizes['length']} tokens, {sizes['dtype']}."
    )


@dataclass(frozen=True)
class Reference:
    """What one process computes in float64, whole.

    Args:
        given, gradient: the input and the output's gradient, ``[B, S, H]``.
        output, given_gradient: what comes of them.
        gradients: of the layers' parameters, by their names in the model.
    """

    given: torch.Tensor
    gradient: torch.Tensor
    output: torch.Tensor
    given_gradient: torch.Tensor
    gradients: dict[str, torch.Tensor]


def compute_reference(workload: LayerWorkload, model: LlamaForCausalLM) -> Reference:
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


def rotary_tables(model: LlamaForCausalLM, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary embedding, ``[1, S, head_dim]`` each."""
    weight = model.model.layers[0].input_layernorm.weight
    return model.model.rotary_emb(weight, torch.arange(length)[None])


def run_layers(model: LlamaForCausalLM, given: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """All of the model's layers, on ``[B, S, H]`` or a rank's part of it."""
    for layer in model.model.layers:
        given = layer(given, position_embeddings=tables)
    return given


class ShardedLayers(Contestant):
    """Forward and backward of the layers on one mesh. Making one is collective.

    Args:
        workload: the layers.
        model: whole; stays as it is.
        reference: what they compute.
        mesh: as the command line has it.
    """

    def __init__(self, workload: LayerWorkload, model: LlamaForCausalLM, reference: Reference, mesh: str) -> None:
        ranks = torch.distributed.get_world_size()
        self.model = cuboid.shard(copy.deepcopy(model), workload.sharding(mesh, ranks))
        self.mesh: Mesh = cuboid.mesh_of(self.model)
        self.mesh.connect()
        self._tables = rotary_tables(self.model, workload.length)
        self._reference = reference
        self._given = self._part(reference.given).float().requires_grad_()
        self._gradient = self._part(reference.gradient).float()
        self.output: torch.Tensor | None = None

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's ``[B/b, S/s, H/h]`` of a ``[B, S, H]``."""
        for dim, axis in enumerate(AXES):
            whole = own_slice(whole, dim, self.mesh.along(axis))
        return whole.contiguous()

    def first(self) -> tuple[str, float]:
        """The mesh that it is, and how far it is from float64 on this rank."""
        self.step()
        return str(self.mesh.shape), self.error()

    def begin(self) -> None:
        self.output = self._given.grad = None
        self.model.zero_grad(set_to_none=True)
        self.mesh.comm_counter.reset()

    def step(self) -> None:
        output = run_layers(self.model, self._given, self._tables)
        output.backward(self._gradient)
        self.output = output.detach()

    def figures(self) -> dict[str, Any]:
        """What was sent, by Cuboid's own counter."""
        return {"sent_bytes": sum(self.mesh.comm_counter.snapshot().values()), "calls": self.mesh.comm_counter.calls()}

    def error(self) -> float:
        """How far the last step is from float64: the largest difference of any tensor, as a part of its largest
        element."""
        assert self.output is not None
        assert self._given.grad is not None
        pairs = [
            (self.output, self._part(self._reference.output)),
            (self._given.grad, self._part(self._reference.given_gradient)),
        ]
        layouts = sharded_layouts(self.model)
        own = dict(self.model.named_parameters())
        for name, whole in self._reference.gradients.items():
            gradient = own[name].grad
            assert gradient is not None, f"{name} has no gradient"
            pairs.append((gradient, take_shard(whole, layouts[name], self.mesh)))
        return max(relative_error(right, ours) for ours, right in pairs)


def check_error(answers: list[tuple[str, float]]) -> tuple[str, float]:
    """The mesh, and the error of the rank that is farthest from float64.

    Raises:
        CuboidError: it is too far.
    """
    shape, error = answers[0][0], max(error for _, error in answers)
    if not error <= AGREEMENT:
        raise CuboidError(f"mesh {shape} is {error:.1e} away from float64: it doesn't do the same")
    return shape, error


def distinct(meshes: list[str], ranks: int, workload: Llama, model: LlamaForCausalLM) -> dict[str, MeshShape]:
    """The meshes that are to be measured, as they were asked for: each only once, as ``"auto"`` where the automatic
    choice is one of them.

    Raises:
        CuboidError: a mesh isn't one, or isn't of so many ranks, or can't cut the model.
    """
    asked_as: dict[MeshShape, str] = {}
    for mesh in meshes:
        shape = workload.shape(mesh, ranks, model)
        if shape.size != ranks:
            raise CuboidError(f"mesh {shape} has {shape.size} ranks, but there are {ranks}")
        if mesh == AUTO or shape not in asked_as:
            asked_as[shape] = mesh
    return {mesh: shape for shape, mesh in asked_as.items()}


def axes_of(label: str) -> list[Axis]:
    """The axes that a label of Cuboid's counter names, as ``"batch+sequence"`` does."""
    return [axis for axis in AXES if axis in label.split("+")]


def interface_numbers(record: Record) -> dict[str, Any]:
    """What the interfaces sent in the last step beside what Cuboid counted, and by how much that may be more, as a
    part of it. Less than is counted is never right."""
    last, shape = record.samples[-1].figures, MeshShape.parse(record.name)
    counted, carried = last["counted_bytes"], last["interface_bytes"]
    # A collective sends one message for each of the others, whichever way it goes.
    messages = sum(calls * (shape.of(*axes_of(label)) - 1) for label, calls in record.facts["calls"].items())
    return {
        "calls": record.facts["calls"],
        "counted_bytes": counted,
        "interface_bytes": carried,
        "interface_excess": None if carried is None else carried / counted - 1,
        "excess_allowed": _HEADERS + messages * _MESSAGE_BYTES / counted,
    }


def interface_doubts(rows: list[dict[str, Any]]) -> list[str]:
    """Where the two don't agree, in sentences."""
    return [
        f"{row['shape']}: the interfaces sent {row['interface_excess']:+.1%} against what Cuboid counted, but headers "
        f"explain no more than {row['excess_allowed']:.1%}: don't trust the bytes."
        for row in rows
        if row["interface_excess"] is not None and not 0 <= row["interface_excess"] <= row["excess_allowed"]
    ]


def mesh_name(row: dict[str, Any]) -> str:
    """A row's mesh, for tables."""
    return f"{row['shape']} (`auto`)" if row["mesh"] == AUTO else row["shape"]
