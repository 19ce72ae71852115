"""``cuboid inspect``: show what a checkpoint contains, and whether it is intact."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from cuboid.convert.inspection import Inspection, TensorEntry


def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint, or a folder of them.")],
    parameters: Annotated[bool, typer.Option("--parameters", help="List every tensor, not only totals.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file and compare checksums, where they are recorded.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show a checkpoint's step, layout, lineage, files and tensors. Exits with status 1 if it is damaged.

    DIR is a checkpoint of cuboid or a folder of them (the latest is shown), a Hugging Face folder, per-rank files, or
    what DeepSpeed writes, whose pickles aren't opened.
    """
    from rich.console import Console

    from cuboid.convert.inspection import inspect_checkpoint
    from cuboid.convert.sources import find_checkpoint
    from cuboid.library_warnings import quiet

    quiet()
    inspection = inspect_checkpoint(find_checkpoint(directory), verify=verify)
    if json:
        # Not pydantic's, which can't encode the names of some files.
        typer.echo(dumps(inspection.model_dump(), indent=1))
    else:
        _print(Console(), inspection, parameters=parameters, verified=verify)
    raise typer.Exit(1 if inspection.faults else 0)


def _print(console: Console, inspection: Inspection, *, parameters: bool, verified: bool) -> None:
    console.print(f"{inspection.path}: {inspection.kind}", highlight=False, soft_wrap=True)
    _table(console, "", ("", ""), _facts(inspection))
    _table(console, "lineage, oldest first", ("step", "created", "layout", "path"), _lineage(inspection))
    rows = ([file.name, f"{file.bytes:,}", (file.sha256 or "")[:12]] for file in inspection.files)
    _table(console, "files", ("name", "bytes", "sha256"), rows)
    if parameters:
        tensors = ([x.name, " × ".join(map(str, x.shape)) or "()", x.dtype, x.file] for x in inspection.tensors)
        _table(console, "tensors", ("name", "shape", "dtype", "file"), tensors)
    else:
        _table(console, "tensors", ("of", "tensors", "parameters", "bytes", "dtype"), _totals(inspection))
    for fault in inspection.faults:
        console.print(f"wrong: {fault}", style="red", highlight=False, soft_wrap=True)
    recorded = sum(file.sha256 is not None for file in inspection.files)
    if not recorded:
        console.print(
            "no checksums are recorded: values that were damaged or exchanged can't be detected", soft_wrap=True
        )
    elif not verified:
        console.print(f"{recorded} checksums are recorded; --verify compares them", soft_wrap=True)
    elif not inspection.faults:
        console.print(f"{recorded} checksums compared, none differs")


def _table(console: Console, title: str, columns: Sequence[str], rows: Any) -> None:
    """Print a table, unless it is empty."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=any(columns))
    for column in columns:
        number = column in _NUMBERS
        table.add_column(column, overflow="fold", justify="right" if number else "left", no_wrap=number)
    for row in rows:
        table.add_row(*row)
    if table.row_count:
        console.print(table)


_NUMBERS = ("step", "bytes", "tensors", "parameters")


def _facts(inspection: Inspection) -> Iterator[list[str]]:
    optimizer = inspection.optimizer or {}
    facts = {
        "step": inspection.step,
        "created": inspection.created,
        "id": inspection.id,
        "layout": _layout(inspection.layout),
        "optimizer": f"{optimizer['class']}: {', '.join(optimizer['quantities'] or ())}" if optimizer else None,
        "versions": ", ".join(f"{name} {number}" for name, number in (inspection.versions or {}).items()),
    }
    return ([name, str(value)] for name, value in facts.items() if value not in (None, ""))


def _layout(layout: dict[str, Any] | None) -> str:
    if layout is None:
        return ""
    sizes = layout.get("mesh", {})
    words = [f"mesh {'×'.join(str(sizes.get(axis, '?')) for axis in ('batch', 'sequence', 'hidden'))}"]
    layers = layout.get("layers")
    ranks = layout.get("placement")
    words.append(
        f"{len(ranks) if ranks else layout.get('stages', 1)} stage(s)"
        + (f" of {', '.join(map(str, layers))} layers" if layers else "")
        + (f" on the pipeline's ranks {', '.join(map(str, ranks))}" if ranks else "")
    )
    words += [
        f"{name.replace('_', ' ')} {layout[name]}"
        for name in ("data_parallel", "world_size", "dtype")
        if name in layout
    ]
    return ", ".join(words)


def _lineage(inspection: Inspection) -> Iterator[list[str]]:
    for ancestor in inspection.lineage:
        step = ancestor.get("step")
        yield [
            "" if step is None else str(step),
            str(ancestor.get("created") or ""),
            _layout(ancestor.get("layout")),
            str(ancestor.get("path", "")),
        ]


def _totals(inspection: Inspection) -> Iterator[list[str]]:
    """One row for the weights, for each subfolder with tensors, and for each other file."""
    groups: dict[str, list[TensorEntry]] = {}
    for tensor in inspection.tensors:
        folder, _, file = tensor.file.rpartition("/")
        group = folder or ("weights" if file.startswith(("model", "rank-")) else file)
        groups.setdefault(group, []).append(tensor)
    for name, tensors in groups.items():
        yield [
            name,
            f"{len(tensors):,}",
            f"{sum(math.prod(tensor.shape) for tensor in tensors):,}",
            f"{sum(tensor.bytes for tensor in tensors):,}",
            ", ".join(sorted({tensor.dtype for tensor in tensors})),
        ]
