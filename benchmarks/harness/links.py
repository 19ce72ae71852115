"""What cases over links of a set rate say of them."""

from __future__ import annotations

from collections.abc import Sequence

from harness.tables import Column, Row, known

#: Below this, the links' time isn't what a step is made of.
_LEAST_LINK_TO_FLOOR = 3.0
#: What headers and acknowledgements may add to the bytes that are counted.
_MOST_HEADERS = 0.1


def link_numbers(sent_bytes: float | None, rate_mbit: float | None, floor_s: Row | None) -> Row:
    """How long the links need for so many bytes, alone and beside a step without a limit."""
    link_s = None if rate_mbit is None or sent_bytes is None else sent_bytes * 8 / (rate_mbit * 1e6)
    return {"link_s": link_s, "link_to_floor": None if None in (link_s, floor_s) else link_s / floor_s["median"]}


def interface_numbers(last: Row) -> Row:
    """What the interfaces sent in a step beside what Cuboid counted, from a sample's figures."""
    counted, carried = last["counted_bytes"], last["interface_bytes"]
    return {**last, "interface_excess": None if carried is None else carried / counted - 1}


def _floor_s(row: Row) -> float | None:
    return None if row["floor_s"] is None else row["floor_s"]["median"]


#: What the links alone and the processors alone would take.
MARKS = {"bytes ÷ rate": lambda row: row["link_s"], "without a limit": _floor_s}
LIMITS = [Column(f"{name}, s", lambda row, of=of: known(of(row), ".1f")) for name, of in MARKS.items()]


def links(result: Row) -> str:
    """What ranks communicate over, in words."""
    if result["rate_mbit"] is None:
        return "loopback, without a limit"
    return f"{result['rate_mbit']:g} Mbit/s for each rank, {result['measured_mbit']:.2f} measured before"


def processor_counts(rows: Sequence[Row], name: str) -> list[str]:
    """Which steps aren't made of the links' time, in sentences."""
    return [
        f"{row[name]}: the links' time is only {row['link_to_floor']:.1f} times the step without them; the processor "
        "counts."
        for row in rows
        if row["link_to_floor"] is not None and row["link_to_floor"] < _LEAST_LINK_TO_FLOOR
    ]


def interface_doubts(rows: Sequence[Row]) -> list[str]:
    """Where the interfaces sent something else than Cuboid counted, in sentences. Less is never right."""
    return [
        f"{row['shape']}: the interfaces sent {row['interface_excess']:+.1%} against what Cuboid counted, where "
        "headers explain some percent: don't trust the bytes."
        for row in rows
        if row["interface_excess"] is not None and not 0 <= row["interface_excess"] <= _MOST_HEADERS
    ]


def shared_cores(result: Row) -> list[str]:
    """What times on loopback are of."""
    if result["network"] != "loopback":
        return []
    return ["On loopback the ranks share the machine's cores: the times are of computing, not of links."]
