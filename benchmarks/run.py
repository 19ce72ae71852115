"""One door to all benchmarks: which there are, how long they take, what they need; and runs one, or all that can run.

python benchmarks/run.py [list | all | CASE] [options of the case …]
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.tables import text
from network.networks import why_not_shaped

from cuboid.config.schema import suggestion
from cuboid.errors import CuboidError

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """A benchmark.

    Args:
        name: of its script, without the ending.
        measures: in a few words.
        minutes: on two idle cores, with the options that it is given by default.
        shaped: whether links of a set rate are what it is about; it has them by default where they can be had.
        colossalai: whether ColossalAI must be installed.
        linux: whether it runs on Linux only.
    """

    name: str
    measures: str
    minutes: int
    shaped: bool = False
    colossalai: bool = False
    linux: bool = False

    @property
    def needs(self) -> str:
        """In words, for the list."""
        needs = ["root, or else it is measured over loopback"] if self.shaped else []
        needs += ["ColossalAI (make colossalai)"] if self.colossalai else []
        needs += ["Linux"] if self.linux else []
        return "; ".join(needs) or "–"

    def why_not(self) -> str | None:
        """In a sentence, why it can't run here; None where it can."""
        if not (_FOLDER / f"{self.name}.py").is_file():
            return f"{_FOLDER.name}/{self.name}.py isn't there"
        if self.colossalai and importlib.util.find_spec("colossalai") is None:
            return "it needs ColossalAI, which `make colossalai` installs"
        if self.linux and not sys.platform.startswith("linux"):
            return f"it measures by what Linux says of its processes, and this is {sys.platform}"
        return None

    def options(self) -> tuple[str, ...]:
        """What it is given before the options of the command line."""
        return ("--network", "shaped") if self.shaped and why_not_shaped() is None else ()

    def run(self, options: list[str]) -> int:
        """Run it as a process of its own; its exit status, negative if a signal ended it."""
        command = [sys.executable, str(_FOLDER / f"{self.name}.py"), *self.options(), *options]
        print(f"— {self.name}: {' '.join(command[1:])}", flush=True)
        process = subprocess.Popen(command)
        # Signals are the case's business, which has networks to take down; Ctrl-C reaches both by itself.
        before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


CASES = {
    case.name: case
    for case in (
        Case("pipeline", "Seq1F1B beside DeepSpeed's and PyTorch's pipelines, two stages", 12),
        Case("layer_meshes", "one layer on meshes of 8 ranks, over links of a set rate", 10, shaped=True),
        Case("training_step", "a training step beside AutoTP, tp_plan and FSDP2, 8 ranks", 30, shaped=True),
        Case("loading", "time and memory of loading 2 GiB on 4 and 8 ranks", 40, linux=True),
        Case("memory", "activations kept on 8 ranks, beside the formula", 3),
        Case("colossalai_3d", "Colossal-AI's 3-D layers and ours, 8 ranks", 5, colossalai=True),
        Case("hidden_communication", "how much communication hides behind computing", 15, shaped=True),
        Case("overhead", "what Cuboid adds where nothing is split", 10),
        Case("pipeline_emulated", "8 and 16 stages, computing emulated by sleeping", 30),
    )
}


def find(name: str) -> Case:
    """The case of that name, which can run here.

    Raises:
        CuboidError: there is none, with which was probably meant; or it can't, with why.
    """
    if name not in CASES:
        raise CuboidError(f"{name} is not a benchmark; {suggestion(name, ['list', 'all', *CASES])}")
    why_not = CASES[name].why_not()
    if why_not is not None:
        raise CuboidError(f"{name} can't run here: {why_not}")
    return CASES[name]


def print_list() -> None:
    """Every case with what it measures, takes and needs."""
    lines = [["case", "measures", "minutes", "needs"]]
    for case in CASES.values():
        why_not = case.why_not()
        needs = case.needs if why_not is None else f"can't run here: {why_not}"
        lines.append([case.name, case.measures, str(case.minutes), needs])
    print(text(lines))
    print(
        '\nmake bench CASE=layer_meshes ARGS="--quick"   runs one; without CASE all that can run here do, one after '
        "another.\nEach tells its own options with ARGS=--help. Nothing else should run meanwhile."
    )


def run_all(options: list[str]) -> int:
    """Run every case that can run here; 0 if all of them did well."""
    outcomes: dict[str, str] = {}
    # Python ends by the signal itself, or says 128 + its number where it has tidied up after it.
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    interrupts = {status for number in signals for status in (-number, 128 + number)}
    for case in CASES.values():
        why_not = case.why_not()
        if why_not is not None:
            outcomes[case.name] = f"left out: {why_not}"
            continue
        status = case.run(options)
        outcomes[case.name] = "done" if status == 0 else f"failed with status {status}"
        if status in interrupts:
            outcomes[case.name] = "interrupted"
            break
    print()
    print(text([["case", "outcome"], *([name, outcome] for name, outcome in outcomes.items())]))
    return 0 if all(outcome.startswith(("done", "left out")) for outcome in outcomes.values()) else 1


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("case", nargs="?", default="all", help="a name of the list, or list, or all (default)")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="handed to the case, or to all of them")
    given = parser.parse_args(arguments)
    if given.case == "list":
        print_list()
        return 0
    if given.case == "all":
        return run_all(given.options)
    try:
        return find(given.case).run(given.options)
    except CuboidError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
