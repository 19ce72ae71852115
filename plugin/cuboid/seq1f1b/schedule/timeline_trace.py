"""Writes timelines to files for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``.

The format is Chrome's "Trace Event Format": complete events (``"ph": "X"``) in microseconds, one thread for each rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cuboid.seq1f1b.schedule.simulator import Span, Timeline

_CATEGORIES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward", "H": "head", "G": "head"}


def write_chrome_trace(
    timeline: Timeline, path: str | Path, *, name: str = "pipeline", details: Mapping[str, Any] | None = None
) -> None:
    """Write a timeline, including its messages if it has any.

    Args:
        timeline: a simulated or measured timeline.
        path: path of the JSON file.
        name: name of the pipeline, which the viewer shows as a process.
        details: additional data to store in the file, such as metrics of the run.
    """
    events: list[dict[str, Any]] = [_label("process_name", 0, name)]
    for rank, spans in enumerate(timeline.spans):
        events.append(_label("thread_name", rank, f"stage {rank_label(spans, rank)}"))
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank, "args": {"sort_index": rank}})
        events.extend(_event(span, rank) for span in spans)
    summary = {"bubble": timeline.bubble, "makespan_s": timeline.makespan_s, "peak_bytes": list(timeline.peak_bytes)}
    other = {**summary, **(details or {})}
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    Path(path).write_text(json.dumps(trace, indent=1) + "\n", encoding="utf-8")


def rank_label(spans: tuple[Span, ...], rank: int) -> str:
    """Return a label with the stages of a rank; with the rank itself if it did nothing."""
    stages = sorted({span.action.stage for span in spans}) or [rank]
    return ", ".join(map(str, stages))


def _label(kind: str, rank: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 0, "tid": rank, "args": {"name": text}}


def _event(span: Span, rank: int) -> dict[str, Any]:
    action = span.action
    return {
        "ph": "X",
        "name": str(action),
        "cat": _CATEGORIES.get(action.op.value, "message"),
        "pid": 0,
        "tid": rank,
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {
            "action": str(action),
            "stage": action.stage,
            "micro_batch": action.micro_batch,
            "segment": action.segment,
        },
    }
