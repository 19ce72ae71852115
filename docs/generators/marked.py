"""Pages that are partly generated: text between two marks that belongs to a script, inside text written by hand."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from harness.tables import markdown

DOCS = Path(__file__).parents[1]
SCRIPT = "docs/generate.py"


def fill(page: Path, parts: dict[str, str], text: str | None = None) -> str:
    """The page's text, or another one for it, with each named part in its place.

    Raises:
        ValueError: a part has no marks in the page.
    """
    text = page.read_text(encoding="utf-8") if text is None else text
    for name, part in parts.items():
        begin, end = f"<!-- {name}: written by {SCRIPT} -->", f"<!-- {name}: end -->"
        before, opened, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (opened and closed):
            raise ValueError(f"{page} has no part between {begin!r} and {end!r}")
        text = f"{before}{begin}\n{part.strip()}\n{end}{after}"
    return text


def table(header: list[str], rows: list[list[str]], align: str = "") -> str:
    """A Markdown table; ``align`` has one of ``l`` and ``r`` for each column."""
    return markdown([header, *rows], align or "l" * len(header))


def comma_separated(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The text of a CSV file, for tables with too many rows or columns for a page."""
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows([header, *rows])
    return written.getvalue()
