"""From what ranks found to rows of numbers, and what must be true of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuboid.errors import CuboidError
from memory_parts.rank import Kept

#: How far losses and gradient norms may be apart, relatively.
AGREEMENT = 1e-5
#: How far the formula may be from what is measured.
_EXACT = 0.02


@dataclass(frozen=True)
class Record:
    """All ranks of one mesh.

    Args:
        name: "plain transformers", or the mesh.
        mesh: as asked for; None for plain transformers.
        ranks: what each found.
    """

    name: str
    mesh: str | None
    ranks: list[Kept]


def check_agreement(records: list[Record]) -> None:
    """Make sure that all computed the same.

    Raises:
        CuboidError: a loss or gradient norm isn't that of the first, plain transformers.
    """
    first = records[0].ranks[0]
    for record in records[1:]:
        for found in record.ranks:
            for what in ("loss", "gradient_norm"):
                own, other = getattr(found, what), getattr(first, what)
                if not abs(own - other) <= AGREEMENT * abs(other):
                    raise CuboidError(f"{record.name} has {what} {own}, but plain transformers has {other}")


def rows(records: list[Record]) -> list[dict[str, Any]]:
    """A row for each record, of the rank that has most; plain values only.

    The first record is of plain transformers, the second of Cuboid on one rank.
    """
    plain, alone = (_largest(record) for record in records[:2])
    return [_row(record, plain, alone) for record in records]


def _largest(record: Record) -> Kept:
    return max(record.ranks, key=lambda found: found.peak_bytes)


def _row(record: Record, plain: Kept, alone: Kept) -> dict[str, Any]:
    count = len(record.ranks)
    peak = max(found.peak_bytes for found in record.ranks)
    kept = max(found.kept_bytes for found in record.ranks)
    formulas = [found.formula_bytes for found in record.ranks if found.formula_bytes is not None]
    formula = max(formulas, key=lambda parts: sum(parts.values()), default=None)
    first = record.ranks[0]
    return {
        "name": record.name,
        "mesh": record.mesh,
        "ranks": count,
        "loss": first.loss,
        "gradient_norm": first.gradient_norm,
        "parameter_bytes": max(found.parameter_bytes for found in record.ranks),
        "kept_bytes": kept,
        "kept_by_rank_bytes": [found.kept_bytes for found in record.ranks],
        "formula_bytes": formula,
        "formula_total_bytes": None if formula is None else sum(formula.values()),
        "peak_bytes": peak,
        # 1 is an even part of what one process has; below it is better than that.
        "kept_share_of_plain": kept * count / plain.kept_bytes,
        "kept_share_of_alone": kept * count / alone.kept_bytes,
        "peak_share_of_plain": peak * count / plain.peak_bytes,
        "peak_share_of_alone": peak * count / alone.peak_bytes,
    }


def remarks(result: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the numbers, in sentences."""
    said = []
    for row in result["rows"]:
        formula = row["formula_total_bytes"]
        if formula is not None and abs(row["kept_bytes"] - formula) > _EXACT * formula:
            said.append(
                f"{row['name']} keeps {row['kept_bytes'] / formula - 1:+.1%} against the formula: one is wrong."
            )
    said.append(
        "The peak has in it what lives for a moment: gathered weights and activations, and gradients on their way. It "
        "is what PyTorch's operations return; what a kernel or gloo allocates by itself isn't seen."
    )
    return said
