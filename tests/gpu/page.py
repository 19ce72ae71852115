"""docs/gpu.md: what was run on which GPU, what passed, and the figures."""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One check.

    Args:
        name: ``test_file.py::test``.
        outcome: ``"passed"``, ``"failed"`` or ``"skipped"``.
        seconds: that it took.
        figures: (table, row, column, value as text) of what it measured.
    """

    name: str
    outcome: str
    seconds: float
    figures: tuple[tuple[str, str, str, str], ...] = ()


def page(machine: dict[str, str], results: list[Result]) -> str:
    """The page, as Markdown.

    Args:
        machine: what the run was on, by name: device, driver, versions.
        results: of all checks.
    """
    counts = Counter(result.outcome for result in results)
    lines = [
        "# What was run on a GPU",
        "",
        "Written by `make gpu` from one run of the checks in `tests/gpu`; nothing on this page is written by hand.",
        "",
        *_table(("", ""), list(machine.items())),
        "",
        f"{counts['passed']} checks passed, {counts['failed']} failed, {counts['skipped']} were skipped.",
        "",
    ]
    failed = [f"* `{result.name}`" for result in results if result.outcome == "failed"]
    if failed:
        lines += ["Failed:", "", *failed, ""]
    for title in dict.fromkeys(figure[0] for result in results for figure in result.figures):
        lines += [f"## {title}", "", *_figures(title, results), ""]
    by_file: dict[str, list[Result]] = {}
    for result in results:
        by_file.setdefault(result.name.partition("::")[0], []).append(result)
    rows = []
    for name, own in by_file.items():
        counted = Counter(result.outcome for result in own)
        outcome = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counted.items()))
        rows.append((f"`{name}`", outcome, f"{sum(result.seconds for result in own):.0f}"))
    lines += ["## Checks", "", *_table(("file", "outcome", "s"), rows), ""]
    return "\n".join(lines)


def _figures(title: str, results: list[Result]) -> list[str]:
    cells = {(row, column): value for r in results for table, row, column, value in r.figures if table == title}
    columns = list(dict.fromkeys(column for _, column in cells))
    rows = list(dict.fromkeys(row for row, _ in cells))
    return _table(("", *columns), [(row, *(cells.get((row, column), "") for column in columns)) for row in rows])


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]
