"""From records to numbers: medians with their spread, ratios of paired rounds, and what the links allow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from network.layer_results import disturbances, processor_counts, shared_cores
from summary import spread, times_as_fast, undisturbed
from transformers import LlamaForCausalLM

from whole_step.checking import Checked
from whole_step.entries import AUTO_KEY
from whole_step.workload import RANKS, StepWorkload

#: Whom the automatic mesh is compared with, at the best of each one's layouts.
PEERS = {"autotp": "DeepSpeed AutoTP", "tp_plan": "Transformers tp_plan", "fsdp2": "FSDP2"}


def rows(
    checked: Sequence[Checked], workload: StepWorkload, model: LlamaForCausalLM, rate_mbit: float | None
) -> list[dict[str, Any]]:
    """A row of numbers for each contestant; plain values only."""
    return [_row(own, checked, workload, model, rate_mbit) for own in checked]


def _row(
    own: Checked,
    checked: Sequence[Checked],
    workload: StepWorkload,
    model: LlamaForCausalLM,
    rate_mbit: float | None,
) -> dict[str, Any]:
    record, entry = own.record, own.entry
    quiet = undisturbed(record.samples)
    floor = spread([sample.step_s for sample in undisturbed(record.floor)]) if record.floor else None
    sent = sent_bytes(own)
    link_s = None if rate_mbit is None or sent is None else sent * 8 / (rate_mbit * 1e6)
    others = [other for other in checked if other is not own]
    last = record.samples[-1]
    return {
        **asdict(entry),
        "shape": str(workload.shape(entry.mesh, model, reshard=entry.reshard)) if entry.family == "cuboid" else None,
        "losses": list(own.losses),
        "gradient_norm": own.gradient_norm,
        "error": record.error,
        "calls": record.calls,
        "sent_bytes": sent,
        "counted_bytes": last.counted_bytes or None,
        "interface_bytes": last.interface_bytes,
        "formula_bytes": _formula_bytes(own, workload, model),
        "floor_s": floor,
        "link_s": link_s,
        "link_to_floor": None if link_s is None or floor is None else link_s / floor["median"],
        "step_s": spread([sample.step_s for sample in quiet]),
        "computing_s": statistics.median(sample.computing_s for sample in quiet),
        "ratios": {other.entry.key: times_as_fast(record.samples, other.record.samples) for other in others},
        "ratios_bytes": _byte_ratios(own, others),
        "undisturbed": sum(sample.is_quiet for sample in record.samples),
        "rejected": record.rejected,
        "samples": [asdict(sample) for sample in record.samples],
        "floor_samples": [asdict(sample) for sample in record.floor],
    }


def sent_bytes(own: Checked) -> float | None:
    """What a rank sends in a step: by the interfaces, on loopback by Cuboid's counter; None for others there."""
    last = own.record.samples[-1]
    return last.interface_bytes or last.counted_bytes or None


def _byte_ratios(own: Checked, others: Sequence[Checked]) -> dict[str, float]:
    """How many times as much each of the others sends, where it is known."""
    sent = sent_bytes(own)
    known = {other.entry.key: sent_bytes(other) for other in others}
    return {key: theirs / sent for key, theirs in known.items() if theirs is not None and sent is not None}


def _formula_bytes(own: Checked, workload: StepWorkload, model: LlamaForCausalLM) -> int | None:
    """What a rank sends by theory: for Cuboid in all layers; for FSDP2 all that collectives of the fewest bytes would
    send, two gathers of each weight (one, if weights are kept) and the scatter of its gradient; None for others."""
    entry = own.entry
    if entry.family == "cuboid":
        shape = workload.shape(entry.mesh, model, reshard=entry.reshard)
        return workload.layers_bytes(shape, model, reshard=entry.reshard)
    if entry.family == "fsdp2":
        whole_bytes = sum(p.numel() for p in model.parameters()) * workload.element_bytes
        return (3 if entry.reshard else 2) * whole_bytes * (RANKS - 1) // RANKS
    return None


def comparisons(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The automatic mesh beside each peer's layout that has the shortest median step, and beside AutoTP on all ranks.

    Returns:
        For each: ``against`` (key), ``what`` (a name), ``ratio`` (times as fast, of paired rounds), ``bytes`` (times as
        much sent, or None). Empty where the automatic mesh or all peers didn't take part.
    """
    own = next((row for row in table if row["key"] == AUTO_KEY), None)
    if own is None:
        return []
    found = [{"against": row["key"], "what": row["name"]} for row in table if row["key"] == f"autotp-{RANKS}"]
    for family, name in PEERS.items():
        layouts = [row for row in table if row["family"] == family]
        if layouts:
            best = min(layouts, key=lambda row: row["step_s"]["median"])
            what = f"{name} at its best ({best['name']})" if len(layouts) > 1 else best["name"]
            found.append({"against": best["key"], "what": what})
    ratios, sent = own["ratios"], own["ratios_bytes"]
    return [{**one, "ratio": ratios[one["against"]], "bytes": sent.get(one["against"])} for one in found]


def remarks(result: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the numbers, in sentences."""
    said = disturbances(result)
    for row in result["rows"]:
        said += processor_counts(row, row["name"])
        if row["family"] == "fsdp2" and row["sent_bytes"] is not None:
            said.append(
                f"{row['name']}: sends {row['sent_bytes'] / row['formula_bytes']:.2f} times what its collectives need, "
                "since PyTorch's reduce-scatter over gloo sends as much as an all-reduce; over NCCL it doesn't."
            )
    return said + shared_cores(result)
