"""One table of columns for the console, for the pages of docs/ and for the files beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

Row = dict[str, Any]

GIB, MIB, MB = 2**30, 2**20, 1e6
DASH = "–"


@dataclass(frozen=True)
class Column:
    """One column."""

    title: str  # over it
    cell: Callable[[Row], str]  # of a row, in Markdown
    align: str = "r"  # ``"r"`` for numbers, ``"l"`` for names
    on_page: bool = True  # otherwise only on the console and in the table's file


@dataclass(frozen=True)
class Table:
    """Rows as they are shown."""

    columns: Sequence[Column]  # from the left
    rows: Sequence[Row]  # from the top
    title: str = ""  # above it; on pages with a colon behind it
    part: str | None = None  # name of the page's part that it is alone in, if it is
    file: str | None = None  # what the record's name ends with in the name of the file that has all of it
    page_rows: Sequence[Row] | None = None  # which of the rows pages show, if not all

    def for_page(self) -> Table:
        """Only the columns and rows that pages show."""
        columns = [column for column in self.columns if column.on_page]
        return replace(self, columns=columns, rows=self.rows if self.page_rows is None else self.page_rows)

    def cells(self) -> list[list[str]]:
        titles = [column.title for column in self.columns]
        return [titles, *([column.cell(row) for column in self.columns] for row in self.rows)]

    def markdown(self) -> str:
        return markdown(self.cells(), "".join(column.align for column in self.columns))

    def text(self) -> str:
        return text(self.plain_cells())

    def plain_cells(self) -> list[list[str]]:
        return [[cell.replace("**", "").replace("`", "") for cell in line] for line in self.cells()]


def markdown(cells: Sequence[Sequence[str]], align: str) -> str:
    """A Markdown table, whose first line is the header, with one of ``l`` and ``r`` for each column."""
    lines = [[cell.replace("|", "\\|") for cell in line] for line in cells]
    lines.insert(1, [{"l": "---", "r": "---:"}[side] for side in align])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def text(cells: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
    return "\n".join(line.rstrip() for line in lines)


def ranged(numbers: dict[str, float] | None, digits: int = 2, *, none: str = DASH) -> str:
    """A median with its quartiles in brackets; ``none`` where there isn't any."""
    if numbers is None:
        return none
    median, low, high = (f"{numbers[key]:.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} ({low}–{high})"


def percent(numbers: dict[str, float], form: str = ".0%", *, base: float = 0.0, bold: bool = False) -> str:
    """A share likewise; ``base`` is taken from all three."""
    median, low, high = (f"{numbers[key] - base:{form}}" for key in ("median", "low", "high"))
    return f"{'**' * bold}{median}{'**' * bold} ({low} to {high})"


def known(
    value: float | None, form: str, *, none: str = DASH, unit: float = 1.0, before: str = "", end: str = ""
) -> str:
    """A number in some unit, between two texts; ``none`` where it isn't known."""
    return none if value is None else f"{before}{value / unit:{form}}{end}"


def error(row: Row) -> str:
    return f"{row['error']:.0e}"


def grouped(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by what they have for some keys, in the order in which they were measured."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups
