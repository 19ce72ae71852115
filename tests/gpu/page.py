"""docs/gpu.md: what was run on which GPU, what passed, the figures, and enough of each failure to fix it elsewhere."""

from collections import Counter
from dataclasses import dataclass

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
    unfinished = [result.name for result in results if result.outcome == "running"]
    if unfinished:
        lines += [f"This was written before `{unfinished[0]}` ended, and has nothing of what came after it.", ""]
    failed = [result for result in results if result.outcome == "failed"]
    if failed:
        lines += ["Failed:", "", *(f"* `{result.name}`" for result in failed), ""]
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
    skipped = Counter(result.text for result in results if result.outcome == "skipped" and result.text)
    if skipped:
        lines += ["Skipped:", "", *(f"* {count}: {reason}" for reason, count in skipped.items()), ""]
    if failed:
        lines += ["## Failures", ""]
    # The same failure of many cases is shown once.
    shown: dict[str, list[str]] = {}
    for result in failed:
        shown.setdefault(_shortened(result.text), []).append(result.name)
    for text, names in shown.items():
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        lines += [f"### `{names[0]}`{others}", "", "```text", text, "```", ""]
    return "\n".join(lines)


def _shortened(text: str) -> str:
    lines = text.splitlines()
    if len(lines) > _FIRST + _LAST:
        lines = [*lines[:_FIRST], "…", *lines[-_LAST:]]
    # A fence inside would end the block.
    return "\n".join(line.replace("```", "'''") for line in lines)


def _figures(title: str, results: list[Result]) -> list[str]:
    cells = {(row, column): value for r in results for table, row, column, value in r.figures if table == title}
    columns = list(dict.fromkeys(column for _, column in cells))
    rows = list(dict.fromkeys(row for row, _ in cells))
    return _table(("", *columns), [(row, *(cells.get((row, column), "") for column in columns)) for row in rows])


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]
