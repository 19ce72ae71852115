"""The segments of a stage whose layers are compiled: what their graphs are told about the one that is running."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from cuboid.models.attention.forward_context import UnitSlot
from cuboid.models.attention.segment_call import number_calls
from cuboid.models.attention.segments import AttentionRecord, find_record
from cuboid.seq1f1b.attention.segment_operators import place_of


class SegmentsInGraphs:
    """Tells the attention of compiled layers, before each runs, where its segment is."""

    def __init__(self, layers: Sequence[nn.Module], slot: UnitSlot) -> None:
        self._slot = slot
        self._records = [_records_in(layer) for layer in layers]

    def use(self, *, in_graphs: bool) -> None:
        """Let attention find its segment as a graph's input, or by itself."""
        for records in self._records:
            for record in records:
                record.is_in_graph, record.place = in_graphs, None

    def begin(self, number: int) -> None:
        """Before a layer runs, by its number."""
        unit = self._slot.current
        for record in self._records[number]:
            # A whole sequence needs no KV cache.
            if unit is None or unit.is_whole:
                record.place = None
            else:
                record.place = place_of(unit.store, record.number, unit.start)

    def complete(self, graph: torch.fx.GraphModule) -> None:
        """Complete a layer's graph: see :func:`number_calls`."""
        number_calls(graph)


def _records_in(layer: nn.Module) -> list[AttentionRecord]:
    records = {id(record): record for record in map(find_record, layer.modules()) if record is not None}
    return list(records.values())
