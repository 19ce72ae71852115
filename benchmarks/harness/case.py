"""What a case is: options, measuring, and how its numbers are shown on the console and on the pages of docs/."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from cuboid.errors import CuboidError
from cuboid.library_warnings import quiet
from harness import freshness
from harness.tables import Row, Table
from harness.watch import QUIET


class Case:
    """One benchmark; a script makes one and calls :meth:`main`."""

    name: str  # of the script and of the files that it writes
    sources: Sequence[str]  # globs of the code whose behaviour it measures; see :mod:`harness.freshness`
    packages: Sequence[str] = ("torch", "transformers", "deepspeed")  # whose versions are in the record
    repeats, limit_s = 10, 1800.0  # rounds, and time to wait for quiet, where the command line doesn't say
    networks: Sequence[str] = ("loopback",)  # what ranks may communicate over
    rate_mbit: float | None = None  # of each rank's link on the shaped network; None where the case finds it by itself
    unit = "steps"  # what the rounds consist of
    cores = "{cores} cores for all ranks"  # who had how many

    # --- measuring ---

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Options besides those that all cases have."""

    def check(self, args: argparse.Namespace, error: Callable[[str], Any]) -> None:
        """Complete the options, and call ``error`` with a sentence where they contradict one another."""

    def measure(self, args: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        """Measure all of it into ``result``, and call ``write`` whenever a part is complete."""
        raise NotImplementedError

    # --- showing ---

    def setting(self, result: Row) -> list[str]:
        """What was measured, in sentences, without the machine and the command."""
        raise NotImplementedError

    def facts(self, result: Row) -> list[str]:
        """What was measured, on which machine, by which command, in sentences."""
        host, rounds = result["machine"], result["repeats"]
        return [
            f"Machine: {self.processor(result)}; {host['system']}, {versions(result)}.",
            *self.setting(result),
            f"Command: `{result['command']}`; {rounds} round{'s' if rounds > 1 else ''}.",
        ]

    def remarks(self, result: Row) -> list[str]:
        """What a reader must know before believing the numbers, in sentences."""
        return self.busy(result)

    def tables(self, result: Row) -> list[Table]:
        raise NotImplementedError

    def record_name(self, result: Row) -> str:  # noqa: ARG002 -- most cases have one record only
        """Of the record among those that are kept, and of its picture."""
        return self.name

    def processor(self, result: Row) -> str:
        """Its name, and who had how many of its cores."""
        host = result["machine"]
        return f"{host['processor']}, {self.cores.format(cores=host['cores'], ranks=result.get('ranks'))}"

    def busy(self, result: Row) -> list[str]:
        """That others used the machine meanwhile, if they did."""
        rows = result["rows"]
        taken = sum(len(row["samples"]) if isinstance(row["samples"], list) else result["repeats"] for row in rows)
        busy = taken - sum(row["undisturbed"] for row in rows)
        return [f"The machine was busy with other work during {busy} of {taken} {self.unit}."] if busy else []

    # --- the script ---

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        described = sys.modules[type(self).__module__].__doc__ or ""
        parser = argparse.ArgumentParser(description=described.partition("\n\n")[0])
        rounds, out = f"rounds (default {self.repeats})", Path("runs") / "benchmarks" / self.name
        limit = f"seconds to wait for quiet times, or to repeat what was disturbed (default {self.limit_s:g})"
        parser.add_argument("--repeats", "--rounds", type=at_least(1), default=self.repeats, metavar="N", help=rounds)
        parser.add_argument("--limit", type=float, default=self.limit_s, metavar="S", help=limit)
        parser.add_argument("--network", choices=self.networks, default="loopback", help="shaped needs root")
        quick = "small sizes and one round, to see that everything works; the times say nothing"
        parser.add_argument("--quick", action="store_true", help=quick)
        parser.add_argument("--out", type=Path, default=out, metavar="DIR", help=f"for the results (default {out})")
        if self.rate_mbit is not None:
            rate = f"of each rank's link, either way (default {self.rate_mbit:g})"
            parser.add_argument("--rate-mbit", type=at_least(0.1, float), metavar="R", help=rate)
        self.add_options(parser)
        args = parser.parse_args(arguments)
        if self.rate_mbit is not None:
            if args.network == "loopback" and args.rate_mbit is not None:
                parser.error("--rate-mbit needs --network shaped: loopback has no rate that could be set")
            if args.network == "shaped" and args.rate_mbit is None:
                args.rate_mbit = self.rate_mbit
        if args.quick:
            args.repeats, args.limit = 1, 0.0
        self.check(args, parser.error)
        return args

    def main(self) -> int:
        """Measure, print and write; the exit status."""
        args = self.parse()
        quiet()
        # A process that has multiplied on several threads can't be forked safely; and a rank has one core at most.
        torch.set_num_threads(1)
        args.out.mkdir(parents=True, exist_ok=True)
        file = args.out / f"{self.name}.json"
        result: Row = {
            "benchmark": self.name,
            "command": " ".join(["python", os.path.relpath(sys.argv[0], freshness.ROOT), *sys.argv[1:]]),
            "measures": freshness.stamp(self.sources),
            "machine": {**machine(), "versions": {name: version(name) for name in self.packages}},
            "network": args.network,
            "rate_mbit": getattr(args, "rate_mbit", None),
            "measured_mbit": None,
            "quick": args.quick,
            "repeats": args.repeats,
            "quiet_below": QUIET,
            "rows": [],
        }

        def write() -> None:
            file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

        # As Ctrl-C, they end the run by an exception, so that what it has made is removed.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: sys.exit(128 + number))
        try:
            self.measure(args, result, write)
        except CuboidError as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            return 1
        write()
        for table in self.tables(result):
            print(f"\n{table.title or table.part or self.name} (medians, quartiles)\n{table.text()}")
        print("\n".join(["", *self.facts(result), *self.remarks(result)]).replace("**", ""))
        print(f"\n{file}")
        return 0


def machine() -> Row:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    """Its name, as precisely as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name", platform.machine())
    return f"{name}, family {fields['cpu family']} model {fields['model']}" if "cpu family" in fields else name


def versions(result: Row) -> str:
    return ", ".join(f"{name} {number}" for name, number in result["machine"]["versions"].items())


def at_least(least: float, kind: type = int) -> Callable[[str], float]:
    """A type of options: numbers from ``least`` on."""

    def parse(text: str) -> float:
        if kind(text) < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more")
        return kind(text)

    parse.__name__ = "number"
    return parse
