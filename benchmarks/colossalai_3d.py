"""Time, bytes, memory and error of Colossal-AI's legacy 3-D layers and of Cuboid, for the same block on 8 ranks.

python benchmarks/colossalai_3d.py [--quick] [--repeats 10] [--limit 900] [--peer-1d] [--out DIR]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline import machine
from quiet import QUIET
from three_d.cases import CASES, QUICK
from three_d.measuring import Figures
from three_d.one_dimension import measure_1d, prepare
from three_d.ranks import DEPTH, RANKS, run_cases
from three_d.report import draw, print_tables
from three_d.results import case_result

from cuboid.errors import CuboidError
from cuboid.verify import WorkerPool

_TIMEOUT_S = 3600.0
_DEFAULT_OUT = Path("runs") / "benchmarks" / "colossalai_3d"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything works")
    parser.add_argument("--repeats", type=int, default=10, help="rounds for each case (default 10)")
    parser.add_argument(
        "--limit", type=float, default=900.0, help="seconds for each case to wait for quiet times (default 900)"
    )
    parser.add_argument(
        "--peer-1d",
        action="store_true",
        help="Colossal-AI's HybridParallelPlugin with tp_size=8 too, in an environment of 6 GB that is made for it",
    )
    parser.add_argument(
        "--out", type=Path, default=_DEFAULT_OUT, help=f"folder for the results (default {_DEFAULT_OUT})"
    )
    given = parser.parse_args(arguments)
    if given.repeats < 1:
        parser.error("--repeats must be 1 or more")
    if importlib.util.find_spec("colossalai") is None:
        parser.error("colossalai isn't installed; `pip install --no-deps colossalai==0.5.0` and what it imports")
    return given


def run(given: argparse.Namespace) -> dict[str, Any]:
    """All cases with all contestants: what the JSON file holds.

    Raises:
        CuboidError: a contestant couldn't run, or computed something else than the others.
    """
    before = machine()
    before["versions"]["colossalai"] = version("colossalai")
    cases = QUICK if given.quick else CASES
    python = prepare(given.out.resolve() / "environment_1d") if given.peer_1d else None
    with tempfile.TemporaryDirectory(prefix="cuboid-") as directory:
        folder = Path(directory)
        with WorkerPool(RANKS) as pool:
            arguments = (cases, given.repeats, given.limit, folder)
            by_rank = pool.run(RANKS, run_cases, *arguments, timeout_s=_TIMEOUT_S)
        results = []
        for number, case in enumerate(cases):
            by_contestant: list[tuple[Figures, ...]] = list(zip(*(own[number] for own in by_rank), strict=True))
            if python is not None:
                options = {"quick": given.quick, "repeats": given.repeats, "limit_s": given.limit}
                own = measure_1d(python, case.part, folder=folder, timeout_s=_TIMEOUT_S, **options)
                by_contestant.insert(0, tuple(own))
            results.append(case_result(case, by_contestant, folder))
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": before,
        "mesh": [DEPTH] * 3,
        "repeats": given.repeats,
        "quiet_below": QUIET,
        "cases": results,
    }


def main() -> int:
    """Measure, print and write; the exit status."""
    given = parse()
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        result = run(given)
    except CuboidError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 1
    (given.out / "colossalai_3d.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print_tables(result)
    draw(result, given.out / "colossalai_3d.png")
    print(f"{given.out}/colossalai_3d.json, colossalai_3d.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
