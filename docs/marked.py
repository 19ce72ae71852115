"""Pages that are partly generated: text between two marks that belongs to a script, inside text written by hand."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DOCS = Path(__file__).parent


def fill(page: Path, parts: dict[str, str], script: str) -> str:
    """The page's text with each named part in its place.

    Raises:
        ValueError: a part has no marks in the page.
    """
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- {name}: written by {script} -->", f"<!-- {name}: end -->"
        before, opened, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (opened and closed):
            raise ValueError(f"{page} has no part between {begin!r} and {end!r}")
        text = f"{before}{begin}\n{part.strip()}\n{end}{after}"
    return text


def update(page: Path, parts: dict[str, str], script: str, *, check: bool) -> int:
    """Write the parts into the page; with ``check``, only say whether that would change it. The exit status."""
    text = fill(page, parts, script)
    if text == page.read_text(encoding="utf-8"):
        return 0
    if check:
        print(f"{page} is out of date; run: python {script}", file=sys.stderr)
        return 1
    page.write_text(text, encoding="utf-8")
    return 0


def parser(description: str) -> argparse.ArgumentParser:
    """Options that every script of this folder has."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    return arguments


def table(header: list[str], rows: list[list[str]], align: str = "") -> str:
    """A Markdown table; ``align`` has one of ``l`` and ``r`` for each column."""
    rules = {"l": "---", "r": "---:"}
    marks = [rules[side] for side in align or "l" * len(header)]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (cells[0], marks, *cells[1:]))
