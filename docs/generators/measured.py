"""Tables and pictures of measurements, made by the cases in benchmarks/ from the records that they keep there."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from generators.marked import DOCS

RECORDS = DOCS.parent / "benchmarks" / "measured"


class Measured:
    """The generator of one case, with `parts` and `draw` as a module has them.

    Args:
        name: of the case.
    """

    def __init__(self, name: str) -> None:
        self._case = importlib.import_module(name).CASE

    def parts(self) -> dict[str, dict[str, str]]:
        """From all records of the case."""
        return {self._case.page: self._case.parts(self._records())}

    def draw(self, folder: Path) -> None:
        """From all records of the case; what a record lacks for a picture stays as it is."""
        for result in self._records().values():
            self._case.draw(result, folder)

    def _records(self) -> dict[str, dict[str, Any]]:
        found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.json"))}
        return {stem: result for stem, result in found.items() if result["benchmark"] == self._case.name}

    def take(self, folder: Path) -> None:
        """Keep the record that a run has left in a folder."""
        result = json.loads((folder / f"{self._case.name}.json").read_text(encoding="utf-8"))
        text = json.dumps(result, indent=1) + "\n"
        (RECORDS / f"{self._case.record_name(result)}.json").write_text(text, encoding="utf-8")
