"""One door to all benchmarks: which there are, how long they take, what they need; and runs one, or all that can run.

python benchmarks/run.py [list | all | CASE] [options of the case …]
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path

from harness.tables import text
from network.networks import why_not_shaped

from cuboid.config.schema import suggestion

_FOLDER = Path(__file__).parent
#: What each measures, its minutes on two idle cores, and what it needs.
CASES = {
    "pipeline": ("Seq1F1B beside DeepSpeed's and PyTorch's pipelines, two stages", 12, "–"),
    "layer_meshes": ("one layer on meshes of 8 ranks, over links of a set rate", 10, "root, or loopback is measured"),
    "training_step": ("a step beside AutoTP, tp_plan and FSDP2, 8 ranks", 30, "root, or loopback is measured"),
    "layouts": ("layouts of 8 ranks in the planner's order", 6, "root, or loopback is measured"),
    "loading": ("time and memory of loading 2 GiB on 4 and 8 ranks", 40, "Linux"),
    "memory": ("activations kept on 8 ranks, beside the formula", 3, "–"),
    "colossalai_3d": ("Colossal-AI's 3-D layers and ours, 8 ranks", 5, "ColossalAI (make colossalai)"),
    "hidden_communication": ("how much communication hides behind computing", 15, "root, or loopback is measured"),
    "overhead": ("what Cuboid adds where nothing is split", 10, "–"),
    "pipeline_emulated": ("8 and 16 stages, computing emulated by sleeping", 30, "–"),
    "pipeline_head": ("a head on the last stage and on all, emulated stages", 15, "–"),
}
#: Links of a set rate are what these are about; they have them by default where they can be had.
SHAPED = ("layer_meshes", "training_step", "layouts", "hidden_communication")
#: Python ends by the signal itself, or says 128 + its number where it has tidied up after it.
_INTERRUPTS = {
    status for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) for status in (-number, 128 + number)
}


def run_case(name: str, options: list[str]) -> int:
    """Run a case as a process of its own; its exit status, negative if a signal ended it."""
    shaped = ["--network", "shaped"] if name in SHAPED and why_not_shaped() is None else []
    command = [sys.executable, str(_FOLDER / f"{name}.py"), *shaped, *options]
    print(f"— {name}: {' '.join(command[1:])}", flush=True)
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    try:
        return process.wait()
    except KeyboardInterrupt:
        # Ctrl-C has reached the case too, which tidies up.
        return process.wait()


def run_all(options: list[str]) -> int:
    """Run every case; 0 if all that can run here did well. One that can't says why, with status 2."""
    outcomes: dict[str, str] = {}
    statuses: set[int] = set()
    for name in CASES:
        status = run_case(name, options)
        statuses.add(status)
        outcomes[name] = {0: "done", 2: "refused, as said above"}.get(status, f"failed with status {status}")
        if status in _INTERRUPTS:
            outcomes[name] = "interrupted"
            break
    print("\n" + text([["case", "outcome"], *map(list, outcomes.items())]))
    return 0 if "done" in outcomes.values() and statuses <= {0, 2} else 1


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("case", nargs="?", default="all", help="a name of the list, or list, or all (default)")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="handed to the case, or to all of them")
    args = parser.parse_args(arguments)
    if args.case == "all":
        return run_all(args.options)
    if args.case == "list":
        rows = ([name, measures, str(minutes), needs] for name, (measures, minutes, needs) in CASES.items())
        print(text([["case", "measures", "minutes", "needs"], *rows]))
        print("\nEach tells its own options with ARGS=--help. Nothing else should run meanwhile.")
        return 0
    if args.case not in CASES:
        print(f"{args.case} is not a benchmark; {suggestion(args.case, ['list', 'all', *CASES])}", file=sys.stderr)
        return 2
    return run_case(args.case, args.options)


if __name__ == "__main__":
    sys.exit(main())
