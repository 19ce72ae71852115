"""How much of a layer's communication is hidden behind its computing, where both would take the same time.

python benchmarks/hidden_communication.py [--network loopback|shaped] [--ranks 2|4|8] [--meshes 2x1x1 1x2x1 auto …]
                                          [--layers N] [--most-mbit R] [--repeats N] [--limit S] [--quick]
                                          [--out DIR]

In each round three things take turns: a step (forward and backward), the same step with collectives that do nothing,
and the step's collectives alone, one after another. On the shaped network the links' rate is set for each mesh so that
what the step sends takes as long as its computing. Two ranks, a core each, are what a machine of two cores can measure:
where ranks share cores, one computes while another waits, which isn't overlap.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from layer_meshes import distinct
from network.calm import Bystanders
from network.hidden_rank import KINDS, HiddenRank, key_of
from network.hidden_report import draw, print_table
from network.hidden_results import Trio, computing_alone_s, row
from network.hidden_workload import StackWorkload, compute_reference
from network.layer_measuring import AGREEMENT, TIMEOUT_S, Record, run_rounds
from network.layer_workload import AUTO
from network.networks import Network, Shaped, open_network
from network.ranks import Ranks, forked_ranks
from network.rate import verify_rate
from network.script import run_script
from pipeline import machine
from quiet import QUIET
from transformers import LlamaForCausalLM

from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError

_DEFAULT_OUT = Path("runs") / "benchmarks" / "hidden_communication"
_MESHES = {
    2: ["2x1x1", "1x2x1", "1x1x2"],
    4: ["4x1x1", "1x4x1", "1x2x2", "2x2x1"],
    8: [AUTO, "2x2x2", "1x8x1", "1x4x2"],
}
_QUICK = StackWorkload(batch=8, length=64, hidden=128, intermediate=192, heads=8)
#: Steps without communication that the rate is found by.
_COMPUTING_STEPS = 5
#: What links of one machine can be relied on to hold, and what they hold on a busy one too.
_MOST_MBIT, _QUICK_MOST_MBIT = 1200.0, 50.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--network", choices=["loopback", "shaped"], default="loopback", help="shaped needs root")
    parser.add_argument("--ranks", type=int, choices=sorted(_MESHES), default=2)
    parser.add_argument("--meshes", nargs="+", metavar="BxSxH", help="meshes, or auto")
    parser.add_argument("--layers", type=int, default=1, metavar="N", help="decoder layers, one after another")
    parser.add_argument(
        "--most-mbit", type=float, metavar="R", help="never set links to more (default 1200; 50 with --quick)"
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
    if given.repeats < 1 or given.layers < 1:
        parser.error("--repeats and --layers must be 1 or more")
    if given.most_mbit is not None and (given.network == "loopback" or given.most_mbit <= 0):
        parser.error("--most-mbit must be more than 0 and needs --network shaped: loopback has no rate")
    given.meshes = given.meshes or _MESHES[given.ranks]
    if given.most_mbit is None:
        given.most_mbit = _QUICK_MOST_MBIT if given.quick else _MOST_MBIT
    if given.quick:
        given.repeats, given.limit = 1, 0.0
    return given


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Everything; the result is complete only after the last mesh, but is written after each."""
    with open_network(given.network, given.ranks) as network:
        workload = dataclasses.replace(_QUICK if given.quick else StackWorkload(), layers=given.layers)
        model = workload.model()
        result: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "machine": machine(),
            "workload": workload.numbers(),
            "network": given.network,
            "ranks": given.ranks,
            "repeats": given.repeats,
            "quiet_below": QUIET,
            "rows": [],
        }
        meshes = distinct(given.meshes, given.ranks, workload, model)
        reference = compute_reference(workload, model)

        def build(_: int) -> HiddenRank:
            return HiddenRank(network, workload, model, reference)

        with forked_ranks(network, build, timeout_s=TIMEOUT_S) as ranks:
            bystanders = Bystanders(given.limit)
            for mesh in meshes:
                trio = _prepare(ranks, mesh, workload, model)
                _measure_mesh(network, ranks, trio, given, bystanders)
                result["rows"].append(row(trio, mesh, given.ranks))
                (given.out / "hidden_communication.json").write_text(
                    json.dumps(result, indent=1) + "\n", encoding="utf-8"
                )
    return result


def _prepare(ranks: Ranks, mesh: str, workload: StackWorkload, model: LlamaForCausalLM) -> Trio:
    """Build everything on a mesh and compare the step with float64.

    Raises:
        CuboidError: it computes something else.
    """
    answers = ranks.call("prepare", mesh, timeout_s=TIMEOUT_S)
    shape, error = answers[0][0], max(error for _, error in answers)
    if not error <= AGREEMENT:
        raise CuboidError(f"mesh {shape} is {error:.1e} away from float64: it doesn't do the same")
    whole, computing, sending = (Record(key_of(mesh, kind), shape, error) for kind in KINDS)
    return Trio(whole, computing, sending, workload.formula_bytes(MeshShape.parse(shape), model))


def _measure_mesh(
    network: Network, ranks: Ranks, trio: Trio, given: argparse.Namespace, bystanders: Bystanders
) -> None:
    """Find the rate at which what is sent takes as long as what is computed, set it, and have the rounds."""
    run_rounds(ranks, [trio.computing], _COMPUTING_STEPS, bystanders, lambda record: record.floor)
    if isinstance(network, Shaped):
        trio.wanted_mbit = trio.formula_bytes * 8 / computing_alone_s(trio) / 1e6
        trio.rate_mbit = min(trio.wanted_mbit, given.most_mbit)
        network.set_rate(trio.rate_mbit)
        trio.measured_mbit = verify_rate(network, ranks)
    run_rounds(ranks, trio.records, given.repeats, bystanders, lambda record: record.samples)
    network.set_rate(None)


def main() -> int:
    """Measure, print and write; the exit status."""
    return run_script("hidden_communication", parse(), measure, print_table, draw)


if __name__ == "__main__":
    sys.exit(main())
