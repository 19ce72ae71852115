"""One transformer layer on 1-D, 2-D, 3-D and the automatic mesh, over links of a set rate: the 3-D paper's comparison.

python benchmarks/layer_meshes.py [--network loopback|shaped] [--ranks 8|64] [--meshes 1x8x1 2x2x2 auto …] …
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from harness import freshness, links, llama, tables
from harness.case import Case
from harness.llama import AUTO, Llama
from harness.rounds import Record
from harness.tables import MB, Column, Row, Table, known, ranged
from network.networks import open_network
from network.ranks import forked_ranks
from network.rate import Link, measure
from network.serving import Contestant
from transformers import LlamaForCausalLM

import cuboid
from cuboid.distributed.axis_collectives import own_slice
from cuboid.distributed.topology import AXES, MeshShape
from cuboid.errors import CuboidError
from cuboid.models.certification.float64 import precision
from cuboid.models.certification.trials import relative_error
from cuboid.planner.comm_formula import layer_bytes
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.model_formulas import block_sizes
from cuboid.tensor3d.sharding.sharding_spec import take_shard
from cuboid.weights.state_dict_map import sharding_specs

_SEED = 0
#: How far a float32 layer may be from float64, relatively; it is at 1e-5 and below.
AGREEMENT = 1e-4


@dataclass(frozen=True)
class LayerWorkload(Llama):
    """Layers one after another; embedding and head never run."""

    layers: int = 1
    vocabulary: int = 256

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first layer's input and the last one's output gradient, ``[B, S, H]`` both, in float64."""
        generator = torch.Generator().manual_seed(_SEED)
        shape = (self.batch, self.length, self.hidden)
        hidden, gradient = torch.randn((2, *shape), generator=generator, dtype=torch.float64)
        return hidden, gradient

    def formula_bytes(self, mesh: MeshShape, model: LlamaForCausalLM) -> int:
        """What a rank sends in forward and backward, by the closed count."""
        one = layer_bytes(block_sizes(describe_modules(model), mesh), mesh, self.batch, self.length, element_bytes=4)
        return self.layers * sum(one.values())


class Reference(NamedTuple):
    """What one process computes in float64, whole: ``[B, S, H]``, and gradients by parameters' names."""

    inputs: torch.Tensor
    gradient: torch.Tensor
    output: torch.Tensor
    input_gradient: torch.Tensor
    gradients: dict[str, torch.Tensor]  # of the layers' parameters, by their names in the model


def compute_reference(workload: LayerWorkload, model: LlamaForCausalLM) -> Reference:
    """The plain Hugging Face layers in float64."""
    exact = copy.deepcopy(model).double()
    inputs, gradient = workload.inputs()
    inputs.requires_grad_()
    with precision(keep_float64=True):
        output = run_layers(exact, inputs, rotary_tables(exact, workload.length))
        output.backward(gradient)
    gradients = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    return Reference(inputs.detach(), gradient, output.detach(), inputs.grad, gradients)


def rotary_tables(model: LlamaForCausalLM, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary embedding, ``[1, S, head_dim]`` each."""
    weight = model.model.layers[0].input_layernorm.weight
    return model.model.rotary_emb(weight, torch.arange(length)[None])


def run_layers(
    model: LlamaForCausalLM, hidden: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """All of the model's layers, on ``[B, S, H]`` or a rank's part of it."""
    for layer in model.model.layers:
        hidden = layer(hidden, position_embeddings=tables)
    return hidden


class ShardedLayers(Contestant):
    """Forward and backward of the layers on a mesh, as the command line has it. Making one is collective."""

    def __init__(self, workload: LayerWorkload, model: LlamaForCausalLM, reference: Reference, mesh: str) -> None:
        ranks = torch.distributed.get_world_size()
        self.model = cuboid.shard(copy.deepcopy(model), workload.sharding(mesh, ranks))
        self.mesh = cuboid.mesh_of(self.model)
        self.mesh.connect()
        self._tables = rotary_tables(self.model, workload.length)
        self._reference = reference
        self._inputs = self._part(reference.inputs).float().requires_grad_()
        self._gradient = self._part(reference.gradient).float()
        self._output: torch.Tensor | None = None

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's ``[B/b, S/s, H/h]`` of a ``[B, S, H]``."""
        for dim, axis in enumerate(AXES):
            x = own_slice(x, dim, self.mesh.along(axis))
        return x.contiguous()

    def first(self) -> tuple[str, float]:
        """The mesh that it is, and how far it is from float64 on this rank."""
        self.step()
        return str(self.mesh.shape), self.error()

    def begin(self) -> None:
        self._output = self._inputs.grad = None
        self.model.zero_grad(set_to_none=True)
        self.mesh.comm_counter.reset()

    def step(self) -> None:
        output = run_layers(self.model, self._inputs, self._tables)
        output.backward(self._gradient)
        self._output = output.detach()

    def figures(self) -> dict[str, Any]:
        """What was sent, by Cuboid's own counter."""
        return {"sent_bytes": sum(self.mesh.comm_counter.snapshot().values())}

    def error(self) -> float:
        """The largest difference of any tensor of the last step from float64, as a part of its largest element."""
        pairs = [
            (self._output, self._part(self._reference.output)),
            (self._inputs.grad, self._part(self._reference.input_gradient)),
        ]
        specs, parameters = sharding_specs(self.model), dict(self.model.named_parameters())
        for name, gradient in self._reference.gradients.items():
            pairs.append((parameters[name].grad, take_shard(gradient, specs[name], self.mesh)))
        return max(relative_error(right, ours) for ours, right in pairs)


def check_error(answers: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The mesh, and the error of the rank that is farthest from float64, which is refused where it is too large."""
    shape, error = answers[0][0], max(error for _, error in answers)
    if not error <= AGREEMENT:
        raise CuboidError(f"mesh {shape} is {error:.1e} away from float64: it doesn't do the same")
    return shape, error


def distinct(meshes: Sequence[str], ranks: int, workload: Llama, model: LlamaForCausalLM) -> dict[str, MeshShape]:
    """The meshes by how they were asked for: each only once, as ``"auto"`` where that is one of them."""
    asked_as: dict[MeshShape, str] = {}
    for mesh in meshes:
        shape = workload.shape(mesh, ranks, model)
        if shape.size != ranks:
            raise CuboidError(f"mesh {shape} has {shape.size} ranks, but there are {ranks}")
        if mesh == AUTO or shape not in asked_as:
            asked_as[shape] = mesh
    return {mesh: shape for shape, mesh in asked_as.items()}


def mesh_name(row: dict[str, Any], mark: str = "`") -> str:
    return f"{row['shape']} ({mark}auto{mark})" if row["mesh"] == AUTO else row["shape"]


# --- the case ---

_MESHES = {8: ["1x8x1", "1x4x2", "2x2x2", "auto"], 64: ["1x64x1", "1x8x8", "4x4x4", "auto"]}
#: At which the links take three times as long as two cores do, even on the mesh that sends least.
_RATES_MBIT = {8: 40.0, 64: 4.0}
#: Sixty-four heads and features that divide by 64 let 1×64×1 take part, Megatron's 1-D; the heads are small because 64
#: ranks share a few cores.
WORKLOAD = LayerWorkload(batch=16, length=256, hidden=256, intermediate=704, heads=64)
QUICK = LayerWorkload(batch=8, length=64, hidden=128, intermediate=192, heads=64)


class LayerMeshes(Case):
    """Each mesh's output and gradients are compared with float64 before anything is timed."""

    name = "layer_meshes"
    sources = freshness.MESHES
    networks = ("loopback", "shaped")
    rate_mbit = _RATES_MBIT[8]

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--ranks", type=int, choices=sorted(_MESHES), default=8)
        parser.add_argument("--meshes", nargs="+", metavar="BxSxH", help="meshes, or auto; ratios are to the first two")

    def check(self, args: argparse.Namespace, error: Callable[[str], Any]) -> None:  # noqa: ARG002
        args.meshes = args.meshes or _MESHES[args.ranks]
        if args.rate_mbit == self.rate_mbit:
            args.rate_mbit = _RATES_MBIT[args.ranks]

    def measure(self, args: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        workload = QUICK if args.quick else WORKLOAD
        model = workload.model()
        meshes = distinct(args.meshes, args.ranks, workload, model)
        result.update(workload=workload.numbers(), ranks=args.ranks)
        build = partial(ShardedLayers, workload, model, compute_reference(workload, model))
        with (
            open_network(args.network, args.ranks) as network,
            forked_ranks(network, lambda _: Link(network, build)) as ranks,
        ):
            records = [Record(mesh, *check_error(ranks.call("prepare", mesh))) for mesh in meshes]
            for record in records:
                record.facts["formula_bytes"] = workload.formula_bytes(meshes[record.entry], model)

            def write_rows() -> None:
                result["rows"] = [_row(record, records, args.rate_mbit) for record in records]
                write()

            measure(ranks, records, args, result, write_rows)

    def setting(self, result: Row) -> list[str]:
        model = f"Model: {llama.described(result['workload'])}, layers alone; {llama.batch(result['workload'])}."
        return [model, f"Links: {links.links(result)}."]

    def remarks(self, result: Row) -> list[str]:
        rows = result["rows"]
        return [
            *self.busy(result),
            *links.processor_counts(rows, "shape"),
            *links.interface_doubts(rows),
            *links.shared_cores(result),
        ]

    def tables(self, result: Row) -> list[Table]:
        rows = result["rows"]
        columns = [Column("mesh", mesh_name, "l"), Column("step, s", lambda row: ranged(row["step_s"], 1))]
        for shape in [row["shape"] for row in rows[:2]]:
            columns += [
                Column(f"× {shape}", lambda row, shape=shape: ranged(row["ratios"].get(shape), none="1")),
                Column("by bytes", lambda row, shape=shape: known(row["ratios_theory"].get(shape), ".2f", none="1")),
            ]
        sent = Column("MB sent", lambda row: f"{row['counted_bytes'] / MB:.2f}")
        return [Table([*columns, sent, *links.LIMITS, Column("error", tables.error)], rows)]

    def record_name(self, result: Row) -> str:
        return f"{self.name}_{result['ranks']}"


def _row(record: Record, records: list[Record], rate_mbit: float | None) -> Row:
    others = {other.name: other for other in records if other is not record}
    numbers, sent = record.numbers(others.items()), record.facts["formula_bytes"]
    return {
        "mesh": record.entry,
        "shape": record.name,
        "error": record.error,
        **record.facts,
        **links.interface_numbers(record.samples[-1].figures),
        **links.link_numbers(sent, rate_mbit, numbers["floor_s"]),
        **numbers,
        "ratios_theory": {name: other.facts["formula_bytes"] / sent for name, other in others.items()},
    }


CASE = LayerMeshes()

if __name__ == "__main__":
    sys.exit(CASE.main())
