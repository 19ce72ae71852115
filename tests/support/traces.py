"""Reads back what schedules are written as: actions, and traces for Perfetto."""

import json
import re
from pathlib import Path

from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.simulator import Span, Timeline


def parse_action(text):
    """The inverse of ``str(action)``."""
    op, *unit = re.fullmatch(r"([A-Z]+)(\d+)\.(\d+)\.(\d+)", text).groups()
    return Action(Op(op), *map(int, unit))


def read_chrome_trace(path):
    """The timeline that ``write_chrome_trace`` wrote, without its memory curves."""
    trace = json.loads(Path(path).read_text(encoding="utf-8"))
    peaks = tuple(trace["otherData"]["peak_bytes"])
    spans = [[] for _ in peaks]
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start_s = event["ts"] / 1e6
            spans[event["tid"]].append(
                Span(parse_action(event["args"]["action"]), start_s, start_s + event["dur"] / 1e6)
            )
    return Timeline(tuple(map(tuple, spans)), peaks)
