"""What autograd would run backward of a tensor."""

from __future__ import annotations

from typing import Any

import torch

#: In the metadata of a node of what a sharded model hands to a script, or differentiates itself.
IS_OUTPUT = "cuboid: an output"
#: In that of an output from which the model's own later layers don't go on: they do from the rank's part of it.
IS_COPY = "cuboid: a copy"


def graph_of(output: torch.Tensor, *, of_script: bool = False) -> list[Any]:
    """All nodes of a tensor's graph; those of leaves have the leaf as their ``variable``, and ``None`` is none.

    Args:
        output: a tensor.
        of_script: end at the outputs of sharded models and at Cuboid's functions, whose gradients are right: what is
            before them, a script itself has computed.
    """
    nodes: list[Any] = []
    seen: set[Any] = {None}
    left: list[Any] = [output.grad_fn]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes.append(node)
        if of_script:
            function = getattr(node, "_forward_cls", None)
            if IS_OUTPUT in node.metadata or (function is not None and function.__module__.startswith("cuboid.")):
                continue
        # Not a comprehension, which is a Python call: this runs in each step.
        for following, _ in node.next_functions:
            left.append(following)
    return nodes
