"""Layouts of 8 ranks (meshes × stages × replicas), measured beside the planner's order of them and DeepSpeed AutoTP.

python benchmarks/layouts.py [--network loopback|shaped] [--rate-mbit R] [--dtype …] [--contestants KEY …] …
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import numpy as np
from harness import freshness
from harness.llama import Llama
from harness.tables import Column, Row, Table, known
from training_step import RANKS, Entry, TrainingStep
from transformers import LlamaForCausalLM

from cuboid.planner.description.cluster import Cluster
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.description.seen import seen_cluster
from cuboid.planner.estimate import estimate

LAYOUTS = [
    *("8x1x1", "4x2x1", "2x2x2", "1x8x1", "4x1x1", "2x2x1", "1x4x1", "2x1x1", "1x2x1", "1x1x2", "1x1x1"),
    *("2x1x1-p2k2", "1x2x1-p2k2", "1x1x1-p2k2", "1x2x1-p4k4"),
]
#: Of which each way of running is one.
QUICK_LAYOUTS = ["cuboid-1x2x1", "cuboid-1x1x1-p2k2", "autotp-2-head"]


class Layouts(TrainingStep):
    """The planner sees the machine as "auto" does, and on links their rate. It counts in 16 bits, and so the default is
    mixed precision."""

    name = "layouts"
    sources = (*TrainingStep.sources, *freshness.SEQ1F1B, "plugin/cuboid/planner/**/*.py")
    workload = Llama(length=256, hidden=256, intermediate=688, vocabulary=2048)
    contestants = [*(f"cuboid-{layout}" for layout in LAYOUTS), "autotp-2", "autotp-2-head"]
    repeats, limit_s, rate_mbit, dtype = 5, 60.0, 50.0, "bfloat16"

    def facts_of(self, entry: Entry, workload: Llama, model: LlamaForCausalLM, args: argparse.Namespace) -> Row:
        facts = super().facts_of(entry, workload, model, args)
        if entry.family != "cuboid":
            return {**facts, "predicted_s": None}
        cost = estimate(describe_modules(model), entry.layout(workload, model), cluster(args.rate_mbit),
                        workload.length)  # fmt: skip
        return {**facts, "predicted_s": cost.time.total_s, "terms": dataclasses.asdict(cost.time)}

    def remarks(self, result: Row) -> list[str]:
        return [*judged(result["rows"]), *super().remarks(result)]

    def tables(self, result: Row) -> list[Table]:
        (table,) = super().tables(result)
        columns = [column for column in table.columns if not column.title.startswith("`auto`")]
        predicted = [Column("predicted, s", lambda row: known(row["predicted_s"], ".2f"))]
        predicted += [
            Column(title, lambda row, name=name: known((row.get("terms") or {}).get(name), ".2f"))
            for name, title in (("exposed_s", "exposed"), ("bubble_s", "bubble"), ("reduce_s", "reduction"))
        ]
        in_order = sorted(result["rows"], key=lambda row: row["step_s"]["median"])
        return [Table([*columns[:2], *predicted, *columns[2:]], in_order)]


def cluster(rate_mbit: float | None) -> Cluster:
    """What the ranks run on: this machine alone, or as a node for each rank behind links of a rate."""
    seen = seen_cluster(RANKS)
    if rate_mbit is None:
        return seen
    return Cluster(dataclasses.replace(seen.gpu, network_bytes_per_s=rate_mbit * 1e6 / 8), RANKS, 1)


def judged(rows: Sequence[Row]) -> list[str]:
    """How good the planner's choice and its order are, in sentences."""
    ours = [row for row in rows if row["predicted_s"] is not None]
    if len(ours) < 2:
        return []
    chosen, fastest = (min(ours, key=key) for key in (lambda row: row["predicted_s"], _measured_s))
    behind = _measured_s(chosen) / _measured_s(fastest) - 1
    said = [f"The planner's first choice of {len(ours)} layouts is {chosen['name']}: {behind:.1%} behind the fastest, "
            f"{fastest['name']}. The rank correlation of its order with the measured one is "
            f"{rank_correlation([row['predicted_s'] for row in ours], list(map(_measured_s, ours))):.2f}."]  # fmt: skip
    peers = [row for row in rows if row["family"] == "autotp"]
    if peers:
        best = min(peers, key=_measured_s)
        said.append(f"It is {_measured_s(best) / _measured_s(chosen):.2f} times as fast as {best['name']}.")
    return said


def _measured_s(row: Row) -> float:
    return float(row["step_s"]["median"])


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, of values that are all different."""
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.corrcoef(ranks)[0, 1])


CASE = Layouts()

if __name__ == "__main__":
    sys.exit(CASE.main())
