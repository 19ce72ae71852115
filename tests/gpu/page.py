"""docs/gpu.md: what was run on which GPU, what passed, the figures, and enough of each failure to fix it elsewhere.

A run writes a record; ``python -m gpu.page docs/data/gpu/*.json`` prints the page of the records that it is given.
"""

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

#: Lines of a failure's text that are shown, of its beginning and its end.
_FIRST, _LAST = 12, 40


@dataclass(frozen=True)
class Result:
    """One check.

    Args:
        name: ``test_file.py::test``.
        outcome: ``"passed"``, ``"failed"``, ``"skipped"``, or ``"running"`` while it is.
        seconds: that it took.
        figures: (table, row, column, value as text) of what it measured.
        text: why it failed or was skipped.
    """

    name: str
    outcome: str
    seconds: float
    figures: tuple[tuple[str, str, str, str], ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Record:
    """One run.

    Args:
        date: when it began.
        commit: what was run.
        machine: device, driver, versions, by name.
        files: of each file of checks, how many had which outcome, and their ``"s"`` together.
        passed: names of checks.
        failed: texts, by the names of checks.
        skipped: numbers of checks, by the reason.
        figures: as those of results.
        running: the check that hadn't ended when this was written.
    """

    date: str
    commit: str
    machine: dict[str, str]
    files: dict[str, dict[str, float]] = field(default_factory=dict)
    passed: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    figures: tuple[tuple[str, str, str, str], ...] = ()
    running: str | None = None

    @classmethod
    def of(cls, date: str, commit: str, machine: dict[str, str], results: list[Result]) -> "Record":
        """The record of some results."""
        files: dict[str, dict[str, float]] = {}
        for result in results:
            counts = files.setdefault(result.name.partition("::")[0], {})
            counts[result.outcome] = counts.get(result.outcome, 0) + 1
            counts["s"] = counts.get("s", 0.0) + result.seconds
        unfinished = [result.name for result in results if result.outcome == "running"]
        return cls(
            date,
            commit,
            machine,
            files,
            passed=tuple(result.name for result in results if result.outcome == "passed"),
            failed={result.name: _shortened(result.text) for result in results if result.outcome == "failed"},
            skipped=dict(Counter(result.text for result in results if result.outcome == "skipped" and result.text)),
            figures=tuple(figure for result in results for figure in result.figures),
            running=unfinished[0] if unfinished else None,
        )

    @classmethod
    def read(cls, path: Path) -> "Record":
        """The record that a run has written."""
        entries = json.loads(path.read_text(encoding="utf-8"))
        figures = tuple((table, row, column, value) for table, row, column, value in entries.pop("figures"))
        return cls(**entries, figures=figures)

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def count(self, outcome: str) -> int:
        """How many checks had this outcome."""
        return int(sum(counts.get(outcome, 0) for counts in self.files.values()))


def page(records: list[Record]) -> str:
    """The page of some runs, the oldest first, as Markdown: each figure is of the newest run that has it."""
    lines = [
        "# What was run on a GPU",
        "",
        "Written by `make gpu` from the records of its runs in `docs/data/gpu`; nothing on this page is written by "
        "hand. Each figure is of the newest run that has measured it.",
        "",
        *_table(
            ("run", "of", "commit", "GPU", "passed", "failed", "skipped"),
            [
                (
                    f"[{number}](#run-{number})",
                    record.date,
                    record.commit,
                    record.machine.get("GPU", "none"),
                    *(str(record.count(outcome)) for outcome in ("passed", "failed", "skipped")),
                )
                for number, record in enumerate(records, 1)
            ],
        ),
        "",
    ]
    newest = {figure[:3]: number for number, record in enumerate(records) for figure in record.figures}
    for title in dict.fromkeys(title for title, _, _ in newest):
        lines += [f"## {title}", ""]
        for number, record in enumerate(records):
            figures = [figure for figure in record.figures if figure[0] == title and newest[figure[:3]] == number]
            if figures:
                lines += [f"Run {number + 1}:", "", *_figures(figures), ""]
    for number, record in enumerate(records, 1):
        first = next(n for n, other in enumerate(records, 1) if other.machine == record.machine)
        same = [f"On the machine of [run {first}](#run-{first}), with the same versions."]
        lines += [f"## Run {number}", ""]
        lines += [*(_table(("", ""), list(record.machine.items())) if first == number else same), ""]
        if record.running:
            lines += [f"This was written before `{record.running}` ended, and has nothing of what came after it.", ""]
        lines += [*_table(("file", "outcome", "s"), [_row(*item) for item in record.files.items()]), ""]
        if record.skipped:
            lines += ["Skipped:", "", *(f"* {count}: {reason}" for reason, count in record.skipped.items()), ""]
        passed_later = {name for later in records[number:] for name in later.passed}
        lines += _failures(record.failed, passed_later)
    return "\n".join(lines)


def _failures(failed: dict[str, str], passed_later: set[str]) -> list[str]:
    """What failed: the same text once, and none of what has passed since."""
    lines = [f"Failed, and passed in a later run: `{name}`.\n" for name in failed if name in passed_later]
    names_by_text: dict[str, list[str]] = {}
    for name, text in failed.items():
        if name not in passed_later:
            names_by_text.setdefault(text, []).append(name)
    for text, names in names_by_text.items():
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        lines += [f"### Failed: `{names[0]}`{others}", "", "```text", text, "```", ""]
    return lines


def _row(name: str, counts: dict[str, float]) -> tuple[str, str, str]:
    outcome = ", ".join(f"{int(count)} {outcome}" for outcome, count in sorted(counts.items()) if outcome != "s")
    return f"`{name}`", outcome, f"{counts['s']:.0f}"


def _shortened(text: str) -> str:
    lines = text.splitlines()
    if len(lines) > _FIRST + _LAST:
        lines = [*lines[:_FIRST], "…", *lines[-_LAST:]]
    # A fence inside would end the block.
    return "\n".join(line.replace("```", "'''") for line in lines)


def _figures(figures: list[tuple[str, str, str, str]]) -> list[str]:
    cells = {(row, column): value for _, row, column, value in figures}
    columns = list(dict.fromkeys(column for _, column in cells))
    rows = list(dict.fromkeys(row for row, _ in cells))
    return _table(("", *columns), [(row, *(cells.get((row, column), "") for column in columns)) for row in rows])


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]


if __name__ == "__main__":
    print(page([Record.read(Path(name)) for name in sorted(sys.argv[1:])]))
