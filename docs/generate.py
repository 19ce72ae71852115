"""Make every generated part of the pages again, and every picture.

python docs/generate.py [CASE …] [--check] [--from FOLDER …] [--figures FOLDER] [--probe [ARCHITECTURE …]]

A part stands between two marks in a page and belongs to this script; the text around it is written by hand. Tables with
too many rows for a page are files in docs/data, which belong to it as a whole. Parts that show measurements are made
from the records in benchmarks/measured, which ``--from`` adds to.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from generators.marked import DOCS, SCRIPT, fill
from generators.measured import Measured
from harness import freshness

#: Modules of generators/.
WRITTEN = (
    *("api", "architectures", "checkpoints", "choosing", "config", "formulas", "layout", "planner", "readme"),
    *("timeline", "traffic"),
)
#: Cases of benchmarks/.
MEASURED = (
    *("pipeline", "pipeline_emulated", "layer_meshes", "training_step", "layouts", "hidden_communication", "overhead"),
    *("loading", "memory", "colossalai_3d", "pipeline_head"),
)


def main(arguments: list[str] | None = None) -> int:
    """Do what is asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join((*WRITTEN, *MEASURED))}; default: all")
    parser.add_argument("--check", action="store_true", help="write no page; fail if one is out of date")
    sources = "first take over what runs of benchmarks have left in these folders"
    parser.add_argument("--from", dest="sources", type=Path, nargs="+", default=[], metavar="FOLDER", help=sources)
    figures = "where pictures go (default docs/figures; with --check none are drawn by default)"
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help=figures)
    probe = "probe these architectures again, or all, in minutes"
    parser.add_argument("--probe", nargs="*", metavar="ARCHITECTURE", help=probe)
    args = parser.parse_args(arguments)
    unknown = [case for case in args.cases if case not in (*WRITTEN, *MEASURED)]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join((*WRITTEN, *MEASURED))}")
    taken: list[str] = []
    for folder in args.sources:
        recorded = [case for case in MEASURED if (folder / f"{case}.json").is_file()]
        if not recorded:
            parser.error(f"{folder} has no record of a benchmark")
        for case in recorded:
            Measured(case).take(folder)
        taken += recorded
    if args.probe is not None:
        importlib.import_module("generators.architectures").probe(args.probe)
        taken.append("architectures")
    folder = args.figures or (None if args.check else DOCS / "figures")
    texts: dict[Path, str] = {}
    for case in args.cases or taken or (*WRITTEN, *MEASURED):
        _generate(case, texts, folder)
    if args.check:
        stale = [page for page, text in texts.items() if not page.exists() or _lasting(text) != _lasting(_read(page))]
        for page in stale:
            print(f"{page} is out of date; run: python {SCRIPT}", file=sys.stderr)
        return 1 if stale else 0
    for page, text in texts.items():
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    return 0


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _lasting(text: str) -> str:
    """A page without the remarks that code has changed since it was measured: else each change of code would fail."""
    return "\n".join(line for line in text.splitlines() if not line.endswith(freshness.HAS_CHANGED))


def _generate(case: str, texts: dict[Path, str], folder: Path | None) -> None:
    """Put a case's parts into the texts of pages, add its files, and draw its pictures into a folder, if any."""
    maker: Any = Measured(case) if case in MEASURED else importlib.import_module(f"generators.{case}")
    for name, parts in maker.parts().items() if hasattr(maker, "parts") else ():
        page = DOCS / name
        texts[page] = fill(page, parts, texts.get(page))
    texts |= {DOCS / name: text for name, text in (maker.files() if hasattr(maker, "files") else {}).items()}
    if folder is not None and hasattr(maker, "draw"):
        import matplotlib

        matplotlib.use("Agg")
        folder.mkdir(parents=True, exist_ok=True)
        # What one of them sets isn't for the others.
        with matplotlib.rc_context():
            maker.draw(folder)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.exit(main())
