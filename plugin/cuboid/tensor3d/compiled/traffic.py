"""What a graph's collectives send, counted each time it runs, as those outside of graphs are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from cuboid.distributed.comm_counter import Operation

#: Functional collectives, and whether the unsplit tensor is their result or their input.
_OPERATIONS: dict[str, tuple[Operation, bool]] = {
    "all_gather_into_tensor": ("all_gather", True),
    "reduce_scatter_tensor": ("reduce_scatter", False),
    "all_reduce": ("all_reduce", False),
}
_Counted = Counter[tuple[Operation, int]]


class CountedGraph:
    """A compiled graph; what its collectives send is added to the counters of their process groups.

    Args:
        graph: a forward's or a backward's, in aten's operations. A compiler changes it, so this comes before.
        counters: by the names of process groups.

    Attributes:
        run: the compiled graph, which takes its arguments as a list; to be set.
    """

    run: Callable[[Sequence[Any]], Any]

    def __init__(self, graph: torch.fx.GraphModule, counters: Mapping[str, _Counted]) -> None:
        # For AOTAutograd, whose wrappers copy only an object's own attributes: arguments come as a list.
        self._boxed_call = True
        #: For each collective: the counter, the operation and the unsplit tensor's bytes, perhaps symbolic.
        self._sent: list[tuple[_Counted, Operation, Any]] = []
        for node in graph.graph.nodes:
            if isinstance(node.target, OpOverload) and node.target.namespace == "_c10d_functional":
                operation, is_result = _OPERATIONS.get(node.target._opname, (None, False))
                if operation is not None:
                    x = (node if is_result else node.args[0]).meta["val"]
                    self._sent.append((counters[node.args[-1]], operation, x.numel() * x.dtype.itemsize))
        places = [node for node in graph.graph.nodes if node.op == "placeholder"]
        symbols = {place.meta["val"].node.expr: n for n, place in enumerate(places) if _is_symbolic(place.meta["val"])}
        #: The arguments that are lengths, if any length is symbolic.
        self._lengths = symbols if any(_is_symbolic(nbytes) for _, _, nbytes in self._sent) else {}
        self._bytes: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """Count, and run."""
        lengths = tuple([arguments[place] for place in self._lengths.values()])
        sizes = self._bytes.get(lengths)
        if sizes is None:
            sizes = self._bytes[lengths] = self._bytes_with(lengths)
        for (counter, operation, _), nbytes in zip(self._sent, sizes, strict=True):
            counter[operation, nbytes] += 1
        return self.run(arguments)

    def _bytes_with(self, lengths: Sequence[int]) -> list[int]:
        values = dict(zip(self._lengths, lengths, strict=True))
        return [
            int(nbytes.node.expr.xreplace(values)) if _is_symbolic(nbytes) else nbytes for _, _, nbytes in self._sent
        ]


def _is_symbolic(number: Any) -> bool:
    return isinstance(number, torch.SymInt) and number.node.expr.free_symbols != set()
