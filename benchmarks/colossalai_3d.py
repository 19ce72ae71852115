"""Time, bytes, memory and error of Colossal-AI's legacy 3-D layers and of Cuboid, for the same block on 8 ranks.

python benchmarks/colossalai_3d.py …
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import freshness
from harness.case import Case
from harness.llama import fewest_bytes
from harness.rounds import Record, run_rounds
from harness.tables import MIB, Column, Row, Table, grouped, ranged
from harness.watch import Watch, pin
from network.networks import Loopback
from network.ranks import Ranks, forked_ranks
from network.rate import Link, timed_step
from three_d.sides import BLOCKS, QUICK, Block, Collective, Place, Side

import cuboid
from cuboid.distributed.comm_counter import sent_bytes
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError
from cuboid.tensor3d.sharding.sharded_param import ShardedModule
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec

# --- ours ---


def chosen_mesh(block: Block, ranks: int) -> MeshShape:
    """The mesh with the fewest bytes."""
    return fewest_bytes(block.model(), ranks, block.batch, block.length)


def build_ours(block: Block, shape: MeshShape | None = None) -> Side:
    """The block with its weights, on a mesh or the one that is chosen for it. All ranks must call."""
    shape = chosen_mesh(block, dist.get_world_size()) if shape is None else shape
    axes = {"batch": shape.batch, "sequence": shape.sequence, "hidden": shape.hidden}
    model = cuboid.shard(block.model(), {"tensor_parallel": {"mode": "3d_tensor", "mesh": axes}})
    mesh = cuboid.mesh_of(model)
    mesh.connect()
    part = model.get_submodule(block.path)
    parameters = {}
    for path, layer in part.named_modules():
        for name in layer.sharded_params if isinstance(layer, ShardedModule) else ():
            parameters[f"{path}.{name}"] = layer.get_parameter(name), _place(layer.spec(name), mesh)
    # The residual stream is cut as a parameter of its shape would be.
    stream = ShardingSpec((block.batch, block.length, block.hidden), (("batch",), ("sequence",), ("hidden",)))
    return Side(block, part, _place(stream, mesh), parameters)


def _place(spec: ShardingSpec, mesh: Mesh) -> Place:
    by_dim = spec.shard_intervals(mesh.shape, mesh.coordinate)
    return tuple(torch.cat([torch.arange(low, high) for low, high in intervals]) for intervals in by_dim)


# --- the case ---

#: b, s and h of the mesh, and Colossal-AI's depth.
DEPTH = 2
RANKS = DEPTH**3
NAMES = {
    "colossalai_3d": "Colossal-AI 3-D",
    "colossalai_3d_exchange": "Colossal-AI 3-D, reduce-scatter as ours",
    "cuboid": "Cuboid 2×2×2",
    "cuboid_auto": "Cuboid, mesh chosen by bytes",
}
#: Whom the others are compared with.
YARDSTICK = "colossalai_3d"
#: A larger error than this is a mistake and no rounding.
TOLERANCE = 1e-5


class Colossalai3d(Case):
    """Outputs and all gradients are compared with one process in float64 before anything is timed."""

    name = "colossalai_3d"
    sources = freshness.MESHES
    packages = (*Case.packages, "colossalai")
    limit_s = 900.0

    def check(self, args: argparse.Namespace, error: Callable[[str], Any]) -> None:  # noqa: ARG002
        if importlib.util.find_spec("colossalai") is None:
            error("colossalai isn't installed; `make colossalai` does that")

    def measure(self, args: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        blocks = QUICK if args.quick else BLOCKS
        result.update(mesh=[DEPTH] * 3, workload=[block.numbers() for block in blocks])
        for block in blocks:
            # Here, for all ranks that are forked.
            block.truth()
        with forked_ranks(Loopback(RANKS), _keep) as ranks:
            for block in blocks:
                records = [_prepared(block, key, ranks) for key in NAMES]
                watch = Watch(args.limit)
                run_rounds(records, args.repeats, watch, partial(timed_step, ranks, watch, figures=lambda *_: {}))
                result["rows"] += [_row(record, records) for record in records]
                ranks.call("discard")
                write()

    def setting(self, result: Row) -> list[str]:  # noqa: ARG002 -- tables name the blocks
        return ["Slowest or largest rank; in brackets how many times as fast as Colossal-AI's 3-D in the same rounds."]

    def tables(self, result: Row) -> list[Table]:
        figures = {
            "forward + backward, s": _time,
            "sent by a rank, MiB": lambda row: _mib(row["sent_bytes"]),
            "kept for backward, MiB": lambda row: _mib(row["saved_bytes"]),
            "peak of live tensors, MiB": lambda row: _mib(row["peak_bytes"]),
            "largest error against float64": lambda row: f"{max(row['errors'].values()):.1e}",
        }
        tables = []
        lines = [{"name": name, "of": of} for name, of in figures.items()]
        for (title,), rows in grouped(result["rows"], "title").items():
            columns = [Column(title, lambda line: line["name"], "l")]
            columns += [Column(row["name"], lambda line, row=row: line["of"](row)) for row in rows]
            tables.append(Table(columns, lines))
        return tables


def _keep(rank: int) -> Link:
    """What a rank keeps: Colossal-AI's world of layers, and whatever is built."""
    pin(rank)
    logging.getLogger("colossalai").setLevel(logging.ERROR)
    # Here, so that the process which only collects the numbers needn't import Colossal-AI, which takes seconds and may
    # not be there.
    from three_d.peer import build_peer, launch

    launch(DEPTH)
    builders = {
        "colossalai_3d": build_peer,
        "colossalai_3d_exchange": partial(build_peer, exchange=True),
        "cuboid": partial(build_ours, shape=MeshShape(DEPTH, DEPTH, DEPTH)),
        "cuboid_auto": build_ours,
    }
    return Link(Loopback(dist.get_world_size()), lambda entry: builders[entry[1]](entry[0]))


def _prepared(block: Block, key: str, ranks: Ranks) -> Record:
    """Build a contestant, and check that it computes what one process does in float64."""
    answers: list[Row] = ranks.call("prepare", (block, key))
    errors = answers[0]["errors"]
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= TOLERANCE:
        message = f"{errors[worst]:.1e} away from float64, where {TOLERANCE} is the most that rounding explains"
        raise CuboidError(f"{block.part}: {worst} of {NAMES[key]} is {message}")
    return Record((block, key), NAMES[key], errors[worst], {"answers": answers})


def _row(record: Record, records: Sequence[Record]) -> Row:
    (block, key), answers = record.entry, record.facts["answers"]
    return {
        "part": block.part,
        "title": block.title,
        "key": key,
        "name": record.name + (f" ({chosen_mesh(block, RANKS)})" if key == "cuboid_auto" else ""),
        "sent_bytes": [sent(answer["collectives"]) for answer in answers],
        "saved_bytes": [answer["saved_bytes"] for answer in answers],
        "peak_bytes": [answer["peak_bytes"] for answer in answers],
        "errors": answers[0]["errors"],
        "collectives": sorted({collective.operation for collective in answers[0]["collectives"]}),
        **record.numbers([(other.entry[1], other) for other in records if other.entry[1] == YARDSTICK]),
    }


def sent(collectives: Mapping[Collective, int]) -> int:
    """Bytes that a rank sends in these calls. Ranks send their slices of a reduce-scatter by an exchange, too."""
    return sum(
        count * round(sent_bytes(call.operation.replace("all_to_all", "reduce_scatter"), call.whole_bytes, call.ranks))
        for call, count in collectives.items()
    )


def _time(row: Row) -> str:
    """How many times as fast as the yardstick it is in brackets."""
    # ``ratios`` has how many times as long the yardstick takes.
    ratio = row["ratios"].get(YARDSTICK)
    return ranged(row["step_s"], 3) + ("" if ratio is None else f" [{ratio['median']:.2f}]")


def _mib(by_rank: Sequence[int]) -> str:
    """Of the rank that has most."""
    return f"{max(by_rank) / MIB:.1f}"


CASE = Colossalai3d()

if __name__ == "__main__":
    sys.exit(CASE.main())
