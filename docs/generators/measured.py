"""Tables and pictures of measurements, from the records that the cases of benchmarks/ have left in benchmarks/measured:
a case says what was measured, this module where it stands on the pages and what is drawn of it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import freshness
from harness.case import versions
from harness.links import MARKS
from harness.tables import Table, known, markdown

from generators import bars
from generators.bars import Bar, Panel
from generators.marked import DOCS, comma_separated

RECORDS = DOCS.parent / "benchmarks" / "measured"
#: Of docs/: files with all rows and columns of the tables that pages shorten.
FILES = "data/measured"
#: The page that has machines and commands once, in a part of this name.
RUNS_PAGE, RUNS = "performance.md", "runs"
MIB = 2**20
Row = dict[str, Any]


def _step_bar(row: Row, text: str = "") -> Bar:
    name = row.get("name") or row["shape"]
    chosen = "auto" in name or row.get("mesh") == "auto"
    colour = bars.BLUE if chosen else bars.CYAN if "cuboid" in name.lower() else bars.GREY
    return Bar.of(name, row["step_s"], colour, text)


def _theory(row: Row) -> str:
    """Of the bubble, behind what was measured; nothing for schedules that only peers have."""
    return known(row["bubble_theory"], ".1%", before=", theory ", none="")


def _exposed_bar(row: Row) -> Bar:
    step, computing = (row["seconds"][kind]["median"] for kind in ("step", "computing"))
    exposed = (max(step - computing, 0), bars.CYAN, "exposed communication")
    parts = [(min(step, computing), bars.GREY, "computing"), exposed]
    return Bar(row["shape"], parts, text=f"{row['exposed']['median']:.0%} exposed")


def _overhead_bar(row: Row) -> Bar:
    more = {key: (row["ratio"][key] - 1) * 100 for key in ("low", "median", "high")}
    return Bar.of(f"{row['name']}, {row['dtype']}", more, bars.BLUE)


#: What the formula of memory tells apart; what is left is "ends".
_KINDS = {
    "layers' linear_inputs": ("inputs of linear layers", bars.BLUE),
    "layers' attention": ("attention", bars.CYAN),
    "layers' norms": ("norms", bars.GREEN),
    "layers' nonlinearity": ("inside the MLP", bars.YELLOW),
    "ends": ("embedding, head, loss", bars.PURPLE),
}


def _memory_bar(row: Row) -> Bar:
    parts = dict.fromkeys(_KINDS, 0.0)
    for name, size in (row["formula_bytes"] or {}).items():
        parts[name if name in _KINDS else "ends"] += size * row["ranks"] / MIB
    return Bar(row["name"], [(parts[key], colour, label) for key, (label, colour) in _KINDS.items()])


@dataclass(frozen=True)
class Shown:
    """How a case is shown.

    Args:
        places: names of the page's parts, by those of the records that they show. Tables that name a part of their own
            are alone in it.
        label: what bars measure.
        picture: its description under the tables; None where the page has it elsewhere.
        bar, group: of a row: its bar, and the title of the panel in which that is.
        marks: beside bars, where they are known.
        page: of docs/.
    """

    places: Mapping[str, str]
    label: str = "seconds for a step"
    picture: str | None = None
    bar: Callable[[Row], Bar] = _step_bar
    group: Callable[[Row], str] = lambda _: ""
    marks: Mapping[str, Callable[[Row], float | None]] = field(default_factory=dict)
    page: str = "performance.md"


SHOWN = {
    "pipeline": Shown(
        {"pipeline": "machine"},
        bar=lambda row: _step_bar(row, f"bubble {row['bubble']:.1%}"),
        group=lambda row: f"M = {row['micro_batches']}",
    ),
    "pipeline_emulated": Shown(
        {"pipeline_emulated": "emulated stages"},
        bar=lambda row: _step_bar(
            row,
            f"bubble {row['bubble']['median']:.1%}" + known(row["bubble_theory"], ".1%", before=", theory ", none=""),
        ),
        group=lambda row: f"{row['stages']} stages, M = {row['micro_batches']}; computing emulated by sleeping",
        marks={"simulated": lambda row: row["simulated_s"]},
    ),
    "pipeline_head": Shown(
        {"pipeline_head": "spread head"},
        bar=lambda row: _step_bar(row, f"idle {row['idle']['median']:.1%}"),
        group=lambda row: (
            f"{row['stages']} stages, M = {row['micro_batches']}"
            + ("; computing emulated by sleeping" if row["emulated"] else "")
        ),
        # Where computing is real, the simulation counts operations.
        marks={"simulated": lambda row: row["simulated_s"] if row["emulated"] else None},
    ),
    "layer_meshes": Shown(
        {"layer_meshes_8": "8 ranks", "layer_meshes_64": "64 ranks"},
        "seconds for a layer's forward and backward",
        marks=MARKS,
    ),
    "training_step": Shown(
        {
            f"training_step_{network}_{dtype}": f"training step, {network}, {dtype}"
            for network in ("shaped", "loopback")
            for dtype in ("float32", "bfloat16")
        },
        "seconds for a training step",
        "Step times of all contestants",
        marks=MARKS,
    ),
    "layouts": Shown(
        {f"layouts_{network}_bfloat16": f"layouts, {network}" for network in ("shaped", "loopback")},
        "seconds for a training step",
        "Step times of layouts, measured and predicted",
        marks={"predicted": lambda row: row["predicted_s"]},
        page="planner.md",
    ),
    "hidden_communication": Shown(
        {"hidden_communication": "hidden"},
        "seconds for a layer's forward and backward, 2 ranks",
        "Steps of two ranks, with what of their communication is exposed",
        _exposed_bar,
        marks={"communication alone": lambda row: row["seconds"]["communication"]["median"]},
    ),
    "overhead": Shown(
        {"overhead": "overhead"},
        "overhead of a training step with Cuboid on 1×1×1, %",
        "How much longer a step takes with Cuboid on a mesh of 1×1×1",
        _overhead_bar,
    ),
    "loading": Shown(
        {f"loading_{stored}": f"loading {stored}" for stored in ("float32", "bfloat16")},
        "seconds",
        "Times of loading",
        group=lambda row: f"{row['ranks']} ranks",
    ),
    "memory": Shown(
        {"memory": "activations"},
        "MiB of activations, on the fullest rank × ranks",
        "What all ranks together keep on each mesh",
        _memory_bar,
        marks={
            "kept, measured": lambda row: row["kept_bytes"] * row["ranks"] / MIB,
            "peak, measured": lambda row: row["peak_bytes"] * row["ranks"] / MIB,
        },
    ),
    "colossalai_3d": Shown(
        {"colossalai_3d": "measured"},
        "seconds for forward and backward",
        group=lambda row: row["title"],
        page="colossalai.md",
    ),
}


class Measured:
    """The generator of one case, with `parts` and `draw` as a module has them."""

    def __init__(self, name: str) -> None:
        self._case, self._shown = importlib.import_module(name).CASE, SHOWN[name]

    def parts(self) -> dict[str, dict[str, str]]:
        """From all records of the case."""
        parts = self.parts_of(self._records())
        if self._shown.page == RUNS_PAGE:
            parts[RUNS] = runs()
        return {self._shown.page: parts}

    def files(self) -> dict[str, str]:
        """What stands in files beside the pages, by their paths in docs/."""
        texts = {}
        for name, result in self._records().items():
            for table in self._case.tables(result):
                if table.file is not None:
                    header, *rows = table.plain_cells()
                    texts[_file(name, table)] = comma_separated(header, rows)
        return texts

    def parts_of(self, records: Mapping[str, Row]) -> dict[str, str]:
        """The page's parts in Markdown, from records by their names."""
        parts = {}
        for name, part in self._shown.places.items():
            if name not in records:
                parts[part] = "Not measured yet."
                continue
            tables = self._case.tables(records[name])
            parts |= {table.part: _shortened(name, table) for table in tables if table.part is not None}
            parts[part] = self._markdown(name, records[name], [table for table in tables if table.part is None])
        return parts

    def _markdown(self, name: str, result: Row, tables: list[Any]) -> str:
        """What was measured, how old that is, what must be known of it, tables, and perhaps a picture."""
        stale = freshness.remark(result)
        facts = self._case.setting(result) if self._shown.page == RUNS_PAGE else self._case.facts(result)
        sentences = [*facts, *([] if stale is None else [stale]), *self._case.remarks(result)]
        blocks = ["\n".join(f"* {sentence}" for sentence in sentences)]
        for table in tables:
            shown = _shortened(name, table)
            blocks.append(f"{table.title}:\n\n{shown}" if table.title else shown)
        if self._shown.picture is not None:
            blocks.append(f"![{self._shown.picture}](figures/{name}.png)")
        return "\n\n".join(blocks)

    def draw(self, folder: Path) -> None:
        """From all records of the case."""
        for name, result in self._records().items():
            groups: dict[str, list[Row]] = {}
            for row in result["rows"]:
                # One that was left out has nothing to show.
                if row.get("samples", True):
                    groups.setdefault(self._shown.group(row), []).append(row)
            panels = []
            for title, rows in groups.items():
                marks = {label: [of(row) for row in rows] for label, of in self._shown.marks.items()}
                panels.append(Panel(self._shown.label, [self._shown.bar(row) for row in rows], marks, title))
            bars.draw(folder / f"{name}.png", panels)

    def _records(self) -> dict[str, Row]:
        return {stem: result for stem, result in _all_records().items() if result["benchmark"] == self._case.name}

    def take(self, folder: Path) -> None:
        """Keep the record that a run has left in a folder."""
        result = json.loads((folder / f"{self._case.name}.json").read_text(encoding="utf-8"))
        text = json.dumps(result, indent=1) + "\n"
        (RECORDS / f"{self._case.record_name(result)}.json").write_text(text, encoding="utf-8")


def runs() -> str:
    """Table of the machine and the command of each record that the page shows."""
    lines = [["measured", "on", "machine", "versions", "rounds", "command"]]
    for name, result in _all_records().items():
        if SHOWN[result["benchmark"]].page == RUNS_PAGE:
            case = importlib.import_module(result["benchmark"]).CASE
            record, date = f"[{name}](../benchmarks/measured/{name}.json)", result["measures"]["date"]
            rounds, command = str(result["repeats"]), f"`{result['command']}`"
            lines.append([record, date, case.processor(result), versions(result), rounds, command])
    return markdown(lines, "llllrl")


def _all_records() -> dict[str, Row]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.json"))}


def _file(name: str, table: Table) -> str:
    return f"{FILES}/{name}{table.file}.csv"


def _shortened(name: str, table: Table) -> str:
    """A table in Markdown; one that has a file only with what people compare, and a link to the rest."""
    if table.file is None:
        return table.markdown()
    return f"{table.for_page().markdown()}\n\n[All rows and columns]({_file(name, table)})"
