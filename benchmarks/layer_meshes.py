"""One transformer layer on 1-D, 2-D, 3-D and the automatic mesh, over links of a set rate: the 3-D paper's comparison.

python benchmarks/layer_meshes.py [--network loopback|shaped] [--ranks 8|64] [--meshes 1x8x1 2x2x2 auto …]
                                  [--rate-mbit R] [--repeats N] [--limit S] [--quick] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from network.calm import Bystanders
from network.layer_measuring import TIMEOUT_S, limit_rate, prepare, run_rounds
from network.layer_rank import LayerRank
from network.layer_report import draw, print_table
from network.layer_results import rows
from network.layer_workload import AUTO, QUICK, LayerWorkload, compute_reference
from network.networks import open_network
from network.ranks import forked_ranks
from network.script import run_script
from pipeline import machine
from quiet import QUIET
from transformers import LlamaForCausalLM

from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError

_DEFAULT_OUT = Path("runs") / "benchmarks" / "layer_meshes"
_MESHES = {8: ["1x8x1", "1x4x2", "2x2x2", AUTO], 64: ["1x64x1", "1x8x8", "4x4x4", AUTO]}
#: At which the links take three times as long as two cores do, even on the mesh that sends least.
_RATES_MBIT = {8: 40.0, 64: 4.0}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--network", choices=["loopback", "shaped"], default="loopback", help="shaped needs root")
    parser.add_argument("--ranks", type=int, choices=sorted(_MESHES), default=8)
    parser.add_argument("--meshes", nargs="+", metavar="BxSxH", help="meshes, or auto; ratios are to the first two")
    parser.add_argument(
        "--rate-mbit", type=float, metavar="R", help="of each rank's link, either way (default 40; 4 for 64 ranks)"
    )
    parser.add_argument("--repeats", type=int, default=10, help="rounds (default 10)")
    parser.add_argument(
        "--limit", type=float, default=1800.0, help="seconds to wait for quiet times, or repeat steps (default 1800)"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny layer and one round, to see that everything works")
    parser.add_argument(
        "--out", type=Path, default=_DEFAULT_OUT, help=f"folder for the results (default {_DEFAULT_OUT})"
    )
    given = parser.parse_args(arguments)
    if given.rate_mbit is not None and given.network == "loopback":
        parser.error("--rate-mbit needs --network shaped: loopback has no rate that could be set")
    if given.repeats < 1 or (given.rate_mbit is not None and given.rate_mbit <= 0):
        parser.error("--repeats must be 1 or more, and --rate-mbit more than 0")
    given.meshes = given.meshes or _MESHES[given.ranks]
    if given.network == "shaped" and given.rate_mbit is None:
        given.rate_mbit = _RATES_MBIT[given.ranks]
    if given.quick:
        given.repeats, given.limit = 1, 0.0
    return given


def distinct(meshes: list[str], ranks: int, workload: LayerWorkload, model: LlamaForCausalLM) -> list[str]:
    """The meshes that are to be measured: each only once, as ``"auto"`` where the automatic choice is one of them.

    Raises:
        CuboidError: a mesh isn't one, or isn't of so many ranks, or can't cut the layer.
    """
    chosen: dict[MeshShape, str] = {}
    for mesh in meshes:
        shape = workload.shape(mesh, ranks, model)
        if shape.size != ranks:
            raise CuboidError(f"mesh {shape} has {shape.size} ranks, but --ranks is {ranks}")
        if mesh == AUTO or shape not in chosen:
            chosen[shape] = mesh
    return list(chosen.values())


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Everything; the result is complete only after the last round, but is written after each."""
    with open_network(given.network, given.ranks) as network:
        workload = QUICK if given.quick else LayerWorkload()
        model = workload.model()
        meshes = distinct(given.meshes, given.ranks, workload, model)
        result: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "machine": machine(),
            "workload": workload.numbers(),
            "network": given.network,
            "ranks": given.ranks,
            "rate_mbit": given.rate_mbit,
            "measured_mbit": None,
            "repeats": given.repeats,
            "quiet_below": QUIET,
        }
        reference = compute_reference(workload, model)

        def build(_: int) -> LayerRank:
            return LayerRank(network, workload, model, reference)

        with forked_ranks(network, build, timeout_s=TIMEOUT_S) as ranks:
            records = prepare(ranks, meshes)

            def write() -> None:
                result["rows"] = rows(records, workload, model, given.rate_mbit)
                (given.out / "layer_meshes.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

            bystanders = Bystanders(given.limit)
            if given.rate_mbit is not None:
                result["measured_mbit"] = limit_rate(
                    network, ranks, records, given.rate_mbit, given.repeats, bystanders
                )
            run_rounds(ranks, records, given.repeats, bystanders, lambda record: record.samples, write)
    return result


def main() -> int:
    """Measure, print and write; the exit status."""
    return run_script("layer_meshes", parse(), measure, print_table, draw)


if __name__ == "__main__":
    sys.exit(main())
