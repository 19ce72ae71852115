"""What autograd would run backward of a tensor."""

from __future__ import annotations

from typing import Any

import torch

#: In the metadata of a node of what a sharded model hands to a script.
IS_OUTPUT = "cuboid: an output"


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


def leaves_of_script(loss: torch.Tensor) -> list[torch.Tensor]:
    """The leaves from which a script itself has computed a loss.

    They are looked for up to the outputs of sharded models and up to Cuboid's functions, whose gradients are right.
    """
    leaves: list[torch.Tensor] = []
    seen: set[Any] = {None}
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf, function = getattr(node, "variable", None), getattr(node, "_forward_cls", None)
        if leaf is not None:
            leaves.append(leaf)
        elif IS_OUTPUT not in node.metadata and not (function and function.__module__.startswith("cuboid.")):
            left.extend(following for following, _ in node.next_functions)
    return leaves
