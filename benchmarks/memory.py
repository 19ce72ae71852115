"""Activations that 8 ranks keep and have at a time, on several meshes, beside the formula and one process ÷ 8.

python benchmarks/memory.py [--repeats N] [--quick] [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from harness import freshness, llama
from harness.case import Case
from harness.llama import Llama
from harness.rounds import check_equal
from harness.tables import MIB, Column, Row, Table, known
from layer_meshes import distinct
from network.networks import Loopback
from network.ranks import forked_ranks
from three_d.sides import Meter
from transformers import PreTrainedModel

import cuboid
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.model_formulas import model_kept_bytes
from cuboid.seq1f1b.runtime.memory import LiveActivations

RANKS = 8
#: How far losses and gradient norms may be apart, relatively.
AGREEMENT = 1e-5
_MESHES = ["1x8x1", "1x4x2", "2x2x2", "8x1x1", "auto"]
WORKLOAD = Llama(intermediate=1408, heads=16, key_value_heads=8, vocabulary=1024)
QUICK = Llama(length=64, hidden=64, intermediate=192, heads=16, layers=2, vocabulary=128)


class MemoryRank:
    def __init__(self, workload: Llama) -> None:
        self._workload, self._ids = workload, workload.tokens()

    def examine(self, mesh: str | None, repeats: int) -> Row:
        """A model on a mesh, or as transformers has it; with the largest peak of so many steps. Collective."""
        model, formula_bytes = self._workload.model(), {}
        if mesh is not None:
            model = cuboid.shard(model, self._workload.sharding(mesh, dist.get_world_size()))
            model_mesh = cuboid.mesh_of(model)
            sizes = model_mesh.shape, model_mesh.coordinate, self._workload.batch, self._workload.length
            formula_bytes = model_kept_bytes(describe_modules(self._workload.model()), *sizes, element_bytes=4)
        loss = self._step(model)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        squares = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()
        # Each element has one owner.
        dist.all_reduce(squares)
        existing = [*model.parameters(), *model.buffers()]
        with LiveActivations(existing) as live:
            again = model(input_ids=self._ids, labels=self._ids).loss
            kept_bytes = live.live_bytes
            again.backward()
        peak_bytes = 0
        for _ in range(repeats):
            with Meter([*existing, *gradients, self._ids]) as meter:
                self._step(model)
            peak_bytes = max(peak_bytes, meter.peak_bytes)
        return {
            "loss": loss,
            "gradient_norm": squares.sqrt().item(),
            # That autograd kept between forward and backward; parameters not counted.
            "kept_bytes": kept_bytes,
            # The most that lived at a time, of what was made there; gradients of parameters are there before, and only
            # those that are still to be added to them count.
            "peak_bytes": peak_bytes,
            # By the closed count, by what keeps it; nothing for plain transformers.
            "formula_bytes": formula_bytes,
        }

    def _step(self, model: PreTrainedModel) -> float:
        loss = model(input_ids=self._ids, labels=self._ids).loss
        loss.backward()
        return loss.item()


class Memory(Case):
    """Nothing here depends on time, or on who else computes on the machine."""

    name = "memory"
    sources = freshness.MESHES + freshness.LOSS
    repeats = 3

    def measure(self, args: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        workload = QUICK if args.quick else WORKLOAD
        meshes = distinct(_MESHES, RANKS, workload, workload.model())
        result.update(workload=workload.numbers(), ranks=RANKS)
        alone = {"plain transformers": None, "1×1×1": "1x1x1"}
        together = {f"{shape} (auto)" if mesh == "auto" else str(shape): mesh for mesh, shape in meshes.items()}
        for count, names in ((1, alone), (RANKS, together)):
            with forked_ranks(Loopback(count), lambda _: MemoryRank(workload)) as ranks:
                for name, mesh in names.items():
                    by_rank = ranks.call("examine", mesh, args.repeats)
                    result["rows"].append(fullest(name, by_rank, result["rows"][0] if result["rows"] else None))
                    write()

    def setting(self, result: Row) -> list[str]:
        sizes = result["workload"]
        return [f"Model: {llama.described(sizes)}; {llama.batch(sizes)}."]

    def remarks(self, result: Row) -> list[str]:  # noqa: ARG002 -- nothing depends on time
        return []

    def tables(self, result: Row) -> list[Table]:
        plain, alone = result["rows"][:2]

        def share(row: Row, key: str, base: Row) -> str:
            """1 is an even part of what one process has; below it is better than that."""
            return f"{row[key] * row['ranks'] / base[key]:.2f}"

        columns = [
            Column("", lambda row: row["name"].replace("(auto)", "(`auto`)"), "l"),
            Column("kept, MiB", lambda row: f"{row['kept_bytes'] / MIB:.2f}"),
            Column("by the formula", lambda row: known(row["formula_total_bytes"], ".2f", unit=MIB)),
            Column("× ranks ÷ plain", lambda row: f"**{share(row, 'kept_bytes', plain)}**"),
            Column("÷ 1×1×1", lambda row: share(row, "kept_bytes", alone)),
            Column("peak, MiB", lambda row: f"{row['peak_bytes'] / MIB:.2f}"),
            Column("× ranks ÷ plain", lambda row: f"**{share(row, 'peak_bytes', plain)}**"),
            Column("÷ 1×1×1", lambda row: share(row, "peak_bytes", alone)),
        ]
        return [Table(columns, result["rows"])]


def fullest(name: str, by_rank: Sequence[Row], plain: Row | None) -> Row:
    """A row: what the fullest rank has. Who has another loss or gradient norm than plain transformers is refused."""
    for rank in by_rank if plain else ():
        check_equal(name, rank, plain["name"], {key: plain[key] for key in ("loss", "gradient_norm")}, AGREEMENT)
    formula = max((rank["formula_bytes"] for rank in by_rank), key=lambda parts: sum(parts.values()))
    return {
        **by_rank[0],
        "name": name,
        "ranks": len(by_rank),
        "kept_bytes": max(rank["kept_bytes"] for rank in by_rank),
        "formula_bytes": formula,
        "formula_total_bytes": sum(formula.values()) or None,
        "peak_bytes": max(rank["peak_bytes"] for rank in by_rank),
    }


CASE = Memory()

if __name__ == "__main__":
    sys.exit(CASE.main())
