"""Time, bytes, memory and error of Colossal-AI's legacy 3-D layers and of Cuboid, for the same block on 8 ranks.

python benchmarks/colossalai_3d.py [--peer-1d] …
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from harness import freshness, pictures
from harness.case import Case, chosen
from harness.rounds import Record, run_rounds, undisturbed
from harness.tables import MIB, Column, Row, Table, in_order, ranged, versions
from harness.watch import Watch, pin
from network.networks import Loopback
from network.ranks import Ranks, forked_ranks
from network.rate import Link, timed_step
from network.serving import Step
from three_d import gpt2
from three_d.instruments import Collective
from three_d.one_dimension import prepare, ranks_1d
from three_d.ours import build_ours, chosen_mesh, cube, formula_bytes
from three_d.sides import Side

from cuboid.distributed.comm_counter import Operation, sent_bytes
from cuboid.errors import CuboidError

#: b, s and h of the mesh, and Colossal-AI's depth.
DEPTH = 2
RANKS = DEPTH**3
NAMES = {
    "colossalai_1d": "Colossal-AI 1-D (own environment)",
    "colossalai_3d": "Colossal-AI 3-D",
    "colossalai_3d_exchange": "Colossal-AI 3-D, reduce-scatter as ours",
    "cuboid": "Cuboid 2×2×2",
    "cuboid_auto": "Cuboid, mesh chosen by bytes",
}
#: Whom the others are compared with.
YARDSTICK = "colossalai_3d"
#: A larger error than this is a mistake and no rounding.
TOLERANCE = 1e-5
#: Ranks send their slices of a reduce-scatter either way.
_OPERATIONS: dict[str, Operation] = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "reduce_scatter",
    "all_reduce": "all_reduce",
}
_COLOURS = {
    "colossalai_1d": pictures.YELLOW,
    "colossalai_3d": pictures.GREY,
    "colossalai_3d_exchange": pictures.DARK_GREY,
    "cuboid": pictures.BLUE,
    "cuboid_auto": pictures.CYAN,
}


class Colossalai3d(Case):
    """Outputs and all gradients are compared with one process in float64 before anything is timed."""

    name = "colossalai_3d"
    sources = freshness.MESHES
    packages = (*Case.packages, "colossalai")
    page, part = "colossalai.md", "measured"
    limit_s = 900.0

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        text = "Colossal-AI's HybridParallelPlugin with tp_size=8 too, in an environment of 6 GB that is made for it"
        parser.add_argument("--peer-1d", action="store_true", help=text)

    def check(self, given: argparse.Namespace, error: Callable[[str], Any]) -> None:  # noqa: ARG002
        if importlib.util.find_spec("colossalai") is None:
            error("colossalai isn't installed; `make colossalai` does that")

    def measure(self, given: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        cases = gpt2.QUICK if given.quick else gpt2.CASES
        keys = chosen(given, [key for key in NAMES if given.peer_1d or key != "colossalai_1d"], NAMES.__getitem__)
        result.update(mesh=[DEPTH] * 3, workload=[case.numbers() for case in cases])
        for case in cases:
            # Here, for all ranks that are forked.
            case.truth()
        with contextlib.ExitStack() as stack:
            ours = stack.enter_context(forked_ranks(Loopback(RANKS), _keep))
            of_key = dict.fromkeys(keys, ours)
            if "colossalai_1d" in keys:
                python = prepare(given.out.resolve() / "environment_1d")
                of_key["colossalai_1d"] = stack.enter_context(ranks_1d(python, RANKS))
            for case in cases:
                records = [_prepared(case, key, of_key[key]) for key in keys]
                watch = Watch(given.limit)

                def step(record: Record, watch: Watch = watch) -> Any:
                    return timed_step(of_key[record.entry[1]], watch, record, figures=_by_rank)

                run_rounds(records, given.repeats, watch, step)
                result["rows"] += [_row(record, records) for record in records]
                for ranks in in_order(list(of_key.values())):
                    ranks.call("discard")
                write()

    def facts(self, result: Row) -> list[str]:
        own = result["machine"]
        return [
            f"Measured on {own['processor']}, {own['cores']} cores for 8 ranks, gloo, float32; {versions(result)}; "
            f"`{result['command']}`. Slowest or largest rank; times are medians of {result['repeats']} steps with "
            "quartiles, in brackets how many times as fast as Colossal-AI's 3-D in the same rounds."
        ]

    def remarks(self, result: Row) -> list[str]:
        doubtful = in_order([row["name"] for row in result["rows"] if row["undisturbed"] == 0])
        if doubtful:
            return [f"The machine was busy in all steps of {', '.join(doubtful)}: those times say nothing."]
        return []

    def tables(self, result: Row) -> list[Table]:
        figures: list[Row] = [
            {"name": "forward + backward, s", "of": _time},
            {"name": "sent by a rank, MiB", "of": lambda row: _mib(row["sent_bytes"])},
            {"name": "kept for backward, MiB", "of": lambda row: _mib(row["saved_bytes"])},
            {"name": "of it inputs of linear layers", "of": lambda row: _mib(row["saved_by_kind"]["linear_inputs"])},
            {"name": "peak of live tensors, MiB", "of": lambda row: _mib(row["peak_bytes"])},
            {"name": "largest error against float64", "of": lambda row: f"{max(row['errors'].values()):.1e}"},
        ]
        found = []
        for rows in _by_part(result).values():
            columns = [Column(rows[0]["title"], lambda figure: figure["name"], "l")]
            columns += [Column(row["name"], lambda figure, row=row: figure["of"](row)) for row in rows]
            found.append(Table(columns, figures))
        return found

    def draw(self, result: Row, folder: Path) -> list[Path]:
        """Bars for time, bytes, saved activations and peak, a row of panels for each case."""
        shown: dict[str, Callable[[Row], float]] = {
            "forward + backward, s": lambda row: row["step_s"]["median"],
            "sent for each rank, MiB": lambda row: max(row["sent_bytes"]) / MIB,
            "saved for backward, MiB": lambda row: max(row["saved_bytes"]) / MIB,
            "peak of live tensors, MiB": lambda row: max(row["peak_bytes"]) / MIB,
        }
        parts, path = _by_part(result), folder / "colossalai_3d.png"
        figure, grid = pictures.panels(13, 2.6 * len(parts), len(parts), len(shown))
        for line, rows in zip(grid, parts.values(), strict=True):
            for axes, (name, value_of) in zip(line, shown.items(), strict=True):
                for place, row in enumerate(rows):
                    value, colour = value_of(row), _COLOURS[row["key"]]
                    if axes is line[0]:
                        pictures.bar(axes, place, row["step_s"], colour)
                    else:
                        axes.barh(place, value, color=colour, height=0.7)
                    axes.text(0, place, f" {value:.3g}", va="center", fontsize=8)
                names = [row["name"] for row in rows]
                pictures.finish(axes, names, name, fontsize=8)
                if axes is not line[0]:
                    axes.set_yticks([])
            line[0].set_title(rows[0]["title"], loc="left", fontsize=9)
        pictures.save(figure, path)
        return [path]


def _keep(rank: int) -> Link:
    """What a rank keeps: Colossal-AI's world of layers, and whatever is built."""
    pin(rank)
    logging.getLogger("colossalai").setLevel(logging.ERROR)
    # Here, so that the process which only collects the numbers needn't import Colossal-AI, which takes seconds and may
    # not be there.
    from three_d.peer import build_peer, launch

    launch(DEPTH)
    builders: dict[str, Callable[[gpt2.Case], Side]] = {
        "colossalai_3d": build_peer,
        "colossalai_3d_exchange": partial(build_peer, exchange=True),
        "cuboid": partial(build_ours, shape=cube(DEPTH)),
        "cuboid_auto": build_ours,
    }
    return Link(Loopback(dist.get_world_size()), lambda entry: builders[entry[1]](entry[0]))


def _prepared(case: gpt2.Case, key: str, ranks: Ranks) -> Record:
    """Build a contestant and check what it computes.

    Raises:
        CuboidError: it computes something else than one process in float64.
    """
    answers: list[Row] = ranks.call("prepare", (case, key))
    errors = answers[0]["errors"]
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] <= TOLERANCE:
        message = f"{errors[worst]:.1e} away from float64, where {TOLERANCE} is the most that rounding explains"
        raise CuboidError(f"{case.part}: {worst} of {NAMES[key]} is {message}")
    return Record((case, key), NAMES[key], errors[worst], {"answers": answers})


def _by_rank(_: Record, steps: Sequence[Step]) -> Row:
    return {"step_s_by_rank": [step.duration_s for step in steps]}


def _row(record: Record, records: Sequence[Record]) -> Row:
    (case, key), answers = record.entry, record.facts["answers"]
    mesh = {"cuboid": cube(DEPTH), "cuboid_auto": chosen_mesh(case, RANKS)}.get(key)
    by_rank = zip(*(sample.figures["step_s_by_rank"] for sample in undisturbed(record.samples)), strict=True)
    saved = [answer["saved_bytes"] for answer in answers]
    return {
        "part": case.part,
        "title": case.title,
        "key": key,
        "name": record.name + (f" ({mesh})" if key == "cuboid_auto" else ""),
        "step_s_by_rank": [statistics.median(own) for own in by_rank],
        "sent_bytes": [sent(answer["collectives"]) for answer in answers],
        "calls": [sum(answer["collectives"].values()) for answer in answers],
        "counted_bytes": None if mesh is None else [answer["counted_bytes"] for answer in answers],
        "formula_bytes": None if mesh is None else formula_bytes(case, mesh),
        "saved_bytes": [sum(each.values()) for each in saved],
        "saved_by_kind": {kind: [each[kind] for each in saved] for kind in saved[0]},
        "peak_bytes": [answer["peak_bytes"] for answer in answers],
        "errors": answers[0]["errors"],
        "collectives": [
            {**collective._asdict(), "calls": calls} for collective, calls in sorted(answers[0]["collectives"].items())
        ],
        **record.numbers([(other.entry[1], other) for other in records if other.entry[1] == YARDSTICK]),
    }


def sent(collectives: Mapping[Collective, int]) -> int:
    """Bytes that a rank sends in these calls, as :func:`cuboid.distributed.comm_counter.sent_bytes` counts."""
    return sum(
        calls * round(sent_bytes(_OPERATIONS[each.operation], each.whole_bytes, each.ranks))
        for each, calls in collectives.items()
    )


def _by_part(result: Row) -> dict[str, list[Row]]:
    parts = in_order([row["part"] for row in result["rows"]])
    return {part: [row for row in result["rows"] if row["part"] == part] for part in parts}


def _time(row: Row) -> str:
    """How many times as fast as the yardstick it is in brackets."""
    # ``ratios`` has how many times as long the yardstick takes.
    ratio = row["ratios"].get(YARDSTICK)
    return ranged(row["step_s"], 3) + ("" if ratio is None else f" [{ratio['median']:.2f}]")


def _mib(by_rank: list[int]) -> str:
    return f"{max(by_rank) / MIB:.1f}"


CASE = Colossalai3d()

if __name__ == "__main__":
    sys.exit(CASE.main())
