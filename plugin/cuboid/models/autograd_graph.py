"""What autograd would run backward of a tensor."""

from __future__ import annotations

from typing import Any

import torch


def graph_of(output: torch.Tensor) -> list[Any]:
    """All nodes of a tensor's graph; those of leaves have the leaf as their ``variable``, and ``None`` is none."""
    nodes: list[Any] = []
    seen: set[Any] = {None}
    left: list[Any] = [output.grad_fn]
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            nodes.append(node)
            # Not a comprehension, which is a Python call: this runs in each step.
            for following, _ in node.next_functions:
                left.append(following)
    return nodes
