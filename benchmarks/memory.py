"""Activations that 8 ranks keep and have at a time, on several meshes, beside the formula and one process ÷ 8.

python benchmarks/memory.py [--meshes 1x8x1 2x2x2 auto …] [--repeats N] [--quick] [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from contestants.layer import distinct
from harness import freshness, pictures
from harness.case import Case
from harness.llama import Llama
from harness.tables import MIB, Column, Row, Table, known
from network.networks import Loopback
from network.ranks import forked_ranks
from three_d.instruments import Meter
from transformers import PreTrainedModel

import cuboid
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError
from cuboid.planner.model_memory import model_kept_bytes
from cuboid.seq1f1b.runtime.memory import LiveActivations

RANKS = 8
#: How far losses and gradient norms may be apart, relatively; and the formula from what is measured.
AGREEMENT, _EXACT = 1e-5, 0.02
_MESHES = ["1x8x1", "1x4x2", "2x2x2", "8x1x1", "auto"]
WORKLOAD = Llama(intermediate=1408, heads=16, key_value_heads=8, vocabulary=1024)
#: In a few seconds, to see whether everything works. The counts are as exact as any.
QUICK = Llama(length=64, hidden=64, intermediate=192, heads=16, layers=2, vocabulary=128)
#: What the formula tells apart, in the picture; what is left is "ends".
_KINDS = {
    "layers' linear_inputs": ("inputs of linear layers", pictures.BLUE),
    "layers' attention": ("attention", pictures.CYAN),
    "layers' norms": ("norms", pictures.GREEN),
    "layers' nonlinearity": ("inside the MLP", pictures.YELLOW),
    "ends": ("embedding, head, loss", pictures.PURPLE),
}


@dataclass(frozen=True)
class Kept:
    """What one rank found.

    Args:
        loss, gradient_norm: of the whole model.
        parameter_bytes: of the rank's own parameters, of which its gradients have as many.
        kept_bytes: that autograd kept between forward and backward; parameters not counted.
        peak_bytes: the most that lived at a time in forward and backward, of what was made there; gradients of
            parameters are there before, and only those that are still to be added to them count.
        formula_bytes: what it keeps by the closed count, by what keeps it; None for plain transformers.
    """

    loss: float
    gradient_norm: float
    parameter_bytes: int
    kept_bytes: int
    peak_bytes: int
    formula_bytes: dict[str, int] | None


@dataclass(frozen=True)
class Found:
    """What all ranks of one mesh found; ``mesh`` is None for plain transformers."""

    name: str
    mesh: str | None
    ranks: list[Kept]


class MemoryRank:
    """What a rank keeps: the model, of which it takes one mesh after the other."""

    def __init__(self, workload: Llama) -> None:
        self._workload, self._ids = workload, workload.tokens()

    def examine(self, mesh: str | None, repeats: int) -> Kept:
        """A model on a mesh of all ranks, or as transformers has it. Collective.

        Args:
            mesh: as the command line has it; None for plain transformers.
            repeats: steps of which the largest peak is taken.
        """
        model, formula_bytes = self._workload.model(), None
        if mesh is not None:
            model = cuboid.shard(model, self._workload.sharding(mesh, dist.get_world_size()))
            own = cuboid.mesh_of(model)
            sizes = own.shape, own.coordinate, self._workload.batch, self._workload.length
            formula_bytes = model_kept_bytes(self._workload.model(), *sizes, element_bytes=4)
        loss = self._step(model)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        squares = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()
        # Each element has one owner.
        dist.all_reduce(squares)
        with LiveActivations((*model.parameters(), *model.buffers())) as live:
            again = model(input_ids=self._ids, labels=self._ids).loss
            kept_bytes = live.live_bytes
            again.backward()
        peak_bytes = 0
        for _ in range(repeats):
            with Meter([*model.parameters(), *model.buffers(), *gradients, self._ids]) as meter:
                self._step(model)
            peak_bytes = max(peak_bytes, meter.peak_bytes)
        parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
        return Kept(loss, squares.sqrt().item(), parameter_bytes, kept_bytes, peak_bytes, formula_bytes)

    def _step(self, model: PreTrainedModel) -> float:
        loss = model(input_ids=self._ids, labels=self._ids).loss
        loss.backward()
        return loss.item()


class Memory(Case):
    """Nothing here depends on time, or on who else computes on the machine."""

    name = "memory"
    part, picture = "activations", "What the fullest rank keeps on each mesh"
    sources = freshness.MESHES + freshness.LOSS
    repeats = 3
    selects = False

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--meshes", nargs="+", default=_MESHES, metavar="BxSxH", help="meshes of 8 ranks, or auto")

    def measure(self, given: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        workload = QUICK if given.quick else WORKLOAD
        meshes = distinct(given.meshes, RANKS, workload, workload.model())
        result.update(workload=workload.numbers(), ranks=RANKS)
        with forked_ranks(Loopback(1), lambda _: MemoryRank(workload)) as one:
            found = [
                Found("plain transformers", None, one.call("examine", None, given.repeats)),
                Found("1×1×1", "1x1x1", one.call("examine", "1x1x1", given.repeats)),
            ]
        with forked_ranks(Loopback(RANKS), lambda _: MemoryRank(workload)) as ranks:
            for asked_as, shape in meshes.items():
                name = f"{shape} (auto)" if asked_as == "auto" else str(shape)
                found.append(Found(name, _text(shape), ranks.call("examine", asked_as, given.repeats)))
                check_agreement(found)
                result["rows"] = rows(found)
                write()

    def facts(self, result: Row) -> list[str]:
        sizes = result["workload"]
        return [
            self.machine(result),
            f"Model: a Llama of {sizes['layers']} layers, hidden {sizes['hidden']}, MLP {sizes['intermediate']}, "
            f"{sizes['heads']} query and {sizes['key_value_heads'] or sizes['heads']} key/value heads, vocabulary "
            f"{sizes['vocabulary']}; {sizes['batch']} rows of {sizes['length']} tokens, {sizes['dtype']}.",
            f"Command: `{result['command']}`.",
        ]

    def remarks(self, result: Row) -> list[str]:
        return [
            f"{row['name']} keeps {row['kept_bytes'] / row['formula_total_bytes'] - 1:+.1%} against the formula."
            for row in result["rows"]
            if row["formula_total_bytes"] is not None
            and abs(row["kept_bytes"] / row["formula_total_bytes"] - 1) > _EXACT
        ]

    def tables(self, result: Row) -> list[Table]:
        columns = [
            Column("", lambda row: row["name"].replace("(auto)", "(`auto`)"), "l"),
            Column("kept, MiB", lambda row: f"{row['kept_bytes'] / MIB:.2f}"),
            Column("by the formula", lambda row: known(row["formula_total_bytes"], ".2f", unit=MIB)),
            Column("× ranks ÷ plain", lambda row: f"**{row['kept_share_of_plain']:.2f}**"),
            Column("÷ 1×1×1", lambda row: f"{row['kept_share_of_alone']:.2f}"),
            Column("peak, MiB", lambda row: f"{row['peak_bytes'] / MIB:.2f}"),
            Column("× ranks ÷ plain", lambda row: f"**{row['peak_share_of_plain']:.2f}**"),
            Column("÷ 1×1×1", lambda row: f"{row['peak_share_of_alone']:.2f}"),
        ]
        return [Table(columns, result["rows"])]

    def draw(self, result: Row, folder: Path) -> list[Path]:
        """For each mesh the parts of what is kept, by the formula, and marks of what was measured."""
        table, path = [row for row in result["rows"] if row["ranks"] > 1], folder / "memory.png"
        figure, ((axes,),) = pictures.panels(9, 1.6 + 0.55 * len(table))
        for place, row in enumerate(table):
            parts = dict.fromkeys(_KINDS, 0)
            for name, size in row["formula_bytes"].items():
                parts[name if name in _KINDS else "ends"] += size
            left = 0.0
            for key, (label, colour) in _KINDS.items():
                size = parts[key] / MIB
                axes.barh(place, size, left=left, color=colour, height=0.65, label=label if place == 0 else None)
                left += size
        for key, label, mark in (("kept_bytes", "kept, measured", "|"), ("peak_bytes", "peak, measured", "x")):
            sizes = [row[key] / MIB for row in table]
            axes.plot(sizes, range(len(table)), mark, color="#000000", markersize=12, label=label)
        even = result["rows"][0]["kept_bytes"] / result["ranks"] / MIB
        axes.axvline(even, color=pictures.RED, linewidth=1, label="plain transformers ÷ ranks, kept")
        pictures.finish(axes, [row["name"] for row in table], "MiB of activations on the fullest rank")
        figure.legend(loc="outside lower center", ncol=3, frameon=False)
        pictures.save(figure, path)
        return [path]


def check_agreement(found: list[Found]) -> None:
    """Make sure that all computed the same.

    Raises:
        CuboidError: a loss or gradient norm isn't that of the first, plain transformers.
    """
    first = found[0].ranks[0]
    for each in found[1:]:
        for rank in each.ranks:
            for what in ("loss", "gradient_norm"):
                own, other = getattr(rank, what), getattr(first, what)
                if not abs(own - other) <= AGREEMENT * abs(other):
                    raise CuboidError(f"{each.name} has {what} {own}, but plain transformers has {other}")


def rows(found: list[Found]) -> list[Row]:
    """A row for each mesh, of the rank that has most; the first is of plain transformers, the second of Cuboid on one
    rank. In shares, 1 is an even part of what one process has; below it is better than that."""
    plain, alone = (each.ranks[0] for each in found[:2])
    table = []
    for each in found:
        count = len(each.ranks)
        kept, peak = (max(getattr(rank, key) for rank in each.ranks) for key in ("kept_bytes", "peak_bytes"))
        formulas = [rank.formula_bytes for rank in each.ranks if rank.formula_bytes is not None]
        formula = max(formulas, key=lambda parts: sum(parts.values()), default=None)
        table.append(
            {
                "name": each.name,
                "mesh": each.mesh,
                "ranks": count,
                "loss": each.ranks[0].loss,
                "gradient_norm": each.ranks[0].gradient_norm,
                "parameter_bytes": max(rank.parameter_bytes for rank in each.ranks),
                "kept_bytes": kept,
                "kept_by_rank_bytes": [rank.kept_bytes for rank in each.ranks],
                "formula_bytes": formula,
                "formula_total_bytes": None if formula is None else sum(formula.values()),
                "peak_bytes": peak,
                "kept_share_of_plain": kept * count / plain.kept_bytes,
                "kept_share_of_alone": kept * count / alone.kept_bytes,
                "peak_share_of_plain": peak * count / plain.peak_bytes,
                "peak_share_of_alone": peak * count / alone.peak_bytes,
            }
        )
    return table


def _text(shape: MeshShape) -> str:
    return f"{shape.batch}x{shape.sequence}x{shape.hidden}"


CASE = Memory()

if __name__ == "__main__":
    sys.exit(CASE.main())
