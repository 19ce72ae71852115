"""From the ranks' figures to numbers: errors against float64, bytes by one convention, medians with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from summary import spread, undisturbed, undisturbed_rounds

from cuboid.distributed.comm_counter import Operation, sent_bytes
from cuboid.errors import CuboidError
from three_d.cases import Case
from three_d.instruments import Collective
from three_d.measuring import Figures, Sample, outcome_path
from three_d.ours import chosen_mesh, cube, formula_bytes
from three_d.places import read_pieces, relative_error
from three_d.ranks import DEPTH, RANKS

NAMES = {
    "colossalai_1d": "Colossal-AI 1-D (own environment)",
    "colossalai_3d": "Colossal-AI 3-D",
    "colossalai_3d_exchange": "Colossal-AI 3-D, reduce-scatter as ours",
    "cuboid": "Cuboid 2×2×2",
    "cuboid_auto": "Cuboid, mesh chosen by bytes",
}
#: Whom the others are compared with.
YARDSTICK = "colossalai_3d"
#: A larger error than this is a mistake and no rounding.
TOLERANCE = 1e-5
#: Ranks send their slices of a reduce-scatter either way.
_OPERATIONS: dict[str, Operation] = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "reduce_scatter",
    "all_reduce": "all_reduce",
}


def case_result(case: Case, by_contestant: Sequence[Sequence[Figures]], folder: Path) -> dict[str, Any]:
    """All numbers of one case; plain values only.

    Args:
        case: what was computed.
        by_contestant: for each contestant the figures of all ranks.
        folder: where the ranks wrote what they computed.

    Raises:
        CuboidError: a contestant computed something else than the others.
    """
    truth = case.truth()
    rows = []
    for figures in by_contestant:
        errors = _errors(truth, case, figures[0].key, folder)
        worst = max(errors, key=lambda name: errors[name])
        if not errors[worst] <= TOLERANCE:
            message = f"{errors[worst]:.1e} away from float64, where {TOLERANCE} is the most that rounding explains"
            raise CuboidError(f"{case.part}: {worst} of {NAMES[figures[0].key]} is {message}")
        rows.append(_row(case, figures, errors))
    yardstick = next(own for own in by_contestant if own[0].key == YARDSTICK)
    for row, own in zip(rows, by_contestant, strict=True):
        # What ran in another environment had its rounds at another time.
        is_paired = own[0].key != "colossalai_1d"
        row["times_as_fast"] = _times_as_fast(yardstick[0].samples, own[0].samples) if is_paired else None
    return {"case": case.numbers(), "title": case.title, "rows": rows}


def _errors(truth: Mapping[str, Any], case: Case, key: str, folder: Path) -> dict[str, float]:
    """See :func:`three_d.places.relative_error`, for the output and the gradients of the input and each weight."""
    ranks = [read_pieces(outcome_path(folder, case, key, rank)) for rank in range(RANKS)]
    missing = {name for pieces in ranks for name in truth.keys() ^ pieces.keys()}
    if missing:
        raise CuboidError(f"{case.part}: {NAMES[key]} and GPT-2 don't both have {', '.join(sorted(missing))}")
    return {name: relative_error(whole, [pieces[name] for pieces in ranks]) for name, whole in truth.items()}


def _row(case: Case, figures: Sequence[Figures], errors: dict[str, float]) -> dict[str, Any]:
    samples = figures[0].samples
    quiet = undisturbed(samples)
    by_rank = zip(*(sample.step_s for sample in quiet), strict=True)
    mesh = {"cuboid": cube(DEPTH), "cuboid_auto": chosen_mesh(case, RANKS)}.get(figures[0].key)
    formula = None if mesh is None else formula_bytes(case, mesh)
    saved = [each.saved_bytes for each in figures]
    return {
        "key": figures[0].key,
        "name": NAMES[figures[0].key] + (f" ({mesh})" if figures[0].key == "cuboid_auto" else ""),
        "step_s": spread([sample.slowest_s for sample in quiet]),
        "step_s_by_rank": [statistics.median(own) for own in by_rank],
        "sent_bytes": [sent(each.collectives) for each in figures],
        "calls": [sum(each.collectives.values()) for each in figures],
        "counted_bytes": [each.counted_bytes for each in figures] if formula is not None else None,
        "formula_bytes": formula,
        "saved_bytes": [sum(each.values()) for each in saved],
        "saved_by_kind": {kind: [each[kind] for each in saved] for kind in saved[0]},
        "peak_bytes": [each.peak_bytes for each in figures],
        "errors": errors,
        "undisturbed": sum(sample.is_quiet for sample in samples),
        "rejected": figures[0].rejected,
        "collectives": [
            {**collective._asdict(), "calls": calls} for collective, calls in sorted(figures[0].collectives.items())
        ],
        "samples": [asdict(sample) for sample in samples],
    }


def sent(collectives: Mapping[Collective, int]) -> int:
    """Bytes that a rank sends in these calls, as :func:`cuboid.distributed.comm_counter.sent_bytes` counts."""
    return sum(
        calls * round(sent_bytes(_OPERATIONS[each.operation], each.whole_bytes, each.ranks))
        for each, calls in collectives.items()
    )


def _times_as_fast(theirs: Sequence[Sample], own: Sequence[Sample]) -> dict[str, float]:
    """Round by round, over the rounds in which both were undisturbed."""
    rounds = undisturbed_rounds(zip(theirs, own, strict=True))
    return spread([their.slowest_s / our.slowest_s for their, our in rounds])
