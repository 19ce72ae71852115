"""From records to numbers: medians with their spread, ratios of paired rounds, and what the links allow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from summary import spread, times_as_fast, undisturbed
from transformers import LlamaForCausalLM

from cuboid.distributed.topology import AXES, Axis, MeshShape
from network.layer_measuring import Record
from network.layer_workload import LayerWorkload

#: The paper's three dimensions over 1-D and 2-D on 64 devices (Bian et al., arXiv 2105.14450, abstract).
PAPER = {"4×4×4": {"1×64×1": 2.32, "1×8×8": 1.57}}
#: Below this, the links' time isn't what a step is made of.
LEAST_LINK_TO_FLOOR = 3.0
#: What headers and acknowledgements of full packets may add to the bytes that are counted.
_HEADERS = 0.02
#: And what each message may: gloo asks, and is answered, before it sends, and sends in parts; 700 to 900 bytes were
#: measured, 1010 on a busy machine, where each part is acknowledged by itself.
_MESSAGE_BYTES = 1200


def rows(
    records: Sequence[Record], workload: LayerWorkload, model: LlamaForCausalLM, rate_mbit: float | None
) -> list[dict[str, Any]]:
    """A row of numbers for each mesh; plain values only."""
    sent = {record.mesh: workload.formula_bytes(MeshShape.parse(record.shape), model) for record in records}
    return [_row(record, records, sent, rate_mbit) for record in records]


def _row(record: Record, records: Sequence[Record], sent: dict[str, int], rate_mbit: float | None) -> dict[str, Any]:
    quiet = undisturbed(record.samples)
    floor = spread([sample.step_s for sample in undisturbed(record.floor)]) if record.floor else None
    link_s = None if rate_mbit is None else sent[record.mesh] * 8 / (rate_mbit * 1e6)
    others = [other for other in records if other is not record]
    last = record.samples[-1]
    return {
        "mesh": record.mesh,
        "shape": record.shape,
        "error": record.error,
        "calls": record.calls,
        "formula_bytes": sent[record.mesh],
        "counted_bytes": last.counted_bytes,
        "interface_bytes": last.interface_bytes,
        "interface_excess": None if last.interface_bytes is None else last.interface_bytes / last.counted_bytes - 1,
        "excess_allowed": allowed_excess(record, last.counted_bytes),
        "floor_s": floor,
        "link_s": link_s,
        "link_to_floor": None if link_s is None or floor is None else link_s / floor["median"],
        "step_s": spread([sample.step_s for sample in quiet]),
        "computing_s": statistics.median(sample.computing_s for sample in quiet),
        "ratios": {other.shape: times_as_fast(record.samples, other.samples) for other in others},
        "ratios_theory": {other.shape: sent[other.mesh] / sent[record.mesh] for other in others},
        "ratios_paper": PAPER.get(record.shape, {}),
        "undisturbed": sum(sample.is_quiet for sample in record.samples),
        "rejected": record.rejected,
        "samples": [asdict(sample) for sample in record.samples],
        "floor_samples": [asdict(sample) for sample in record.floor],
    }


def allowed_excess(record: Record, counted_bytes: float) -> float:
    """By how much interfaces may send more than is counted, as a part of that. Less than is counted is never right."""
    shape = MeshShape.parse(record.shape)
    # A collective sends one message for each of the others, whichever way it goes.
    messages = sum(calls * (shape.of(*axes_of(label)) - 1) for label, calls in record.calls.items())
    return _HEADERS + messages * _MESSAGE_BYTES / counted_bytes


def axes_of(label: str) -> list[Axis]:
    """The axes that a label of Cuboid's counter names, as ``"batch+sequence"`` does."""
    return [axis for axis in AXES if axis in label.split("+")]


def remarks(result: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the numbers, in sentences."""
    said = disturbances(result)
    for row in result["rows"]:
        said += processor_counts(row, row["shape"])
        excess = row["interface_excess"]
        if excess is not None and not 0 <= excess <= row["excess_allowed"]:
            said.append(
                f"{row['shape']}: the interfaces sent {excess:+.1%} against what Cuboid counted, but headers "
                f"explain no more than {row['excess_allowed']:.1%}: don't trust the bytes."
            )
    return said + shared_cores(result)


def disturbances(result: dict[str, Any]) -> list[str]:
    """That others used the machine meanwhile, if they did."""
    table, repeats = result["rows"], result["repeats"]
    if min(row["undisturbed"] for row in table) >= repeats:
        return []
    rejected = sum(row["rejected"] for row in table)
    return [
        f"Other processes took more than {result['quiet_below']:.0%} of the machine during some of the {repeats} "
        f"rounds ({rejected} steps were measured again, until the time for that was over)."
    ]


def processor_counts(row: dict[str, Any], name: str) -> list[str]:
    """That a row's step isn't made of the links' time, if it isn't."""
    near = row["link_to_floor"]
    if near is None or near >= LEAST_LINK_TO_FLOOR:
        return []
    return [f"{name}: the links' time is only {near:.1f} times the step without them; the processor counts."]


def shared_cores(result: dict[str, Any]) -> list[str]:
    """What times on loopback are of."""
    if result["network"] != "loopback":
        return []
    return ["On loopback the ranks share the machine's cores: the times are of computing, not of links."]
