"""Costs of the units of a step: floating-point operations, and bytes kept from forward for backward.

A multiplication and the addition that follows it count as two operations. Matrix products with weights and those inside
attention are counted; norms, activation functions and the like are left out, as usual (Kaplan et al. 2020, Narayanan et
al. 2021). All counts are for one row of a batch, and they are exact integers if the ratios are integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, floor
from typing import TypeVar

from cuboid.seq1f1b.schedule.actions import Action, Op

#: Lengths in tokens, or numbers of layers, which may be whole and a half.
Number = TypeVar("Number", int, float)
#: Operations of backward per operation of forward: each output gradient is multiplied by the weight and by the input.
BACKWARD_RATIO = 2.0
#: Fraction of what a forward keeps that the input gradient of a split backward frees: what only attention, norms and
#: activation functions need. The rest, the inputs of linear layers, is kept for the weight gradient. Measured on Llama
#: layers.
INPUT_GRADIENT_FREES = 0.23


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one layer that determine its operations.

    Args:
        weights: elements of the weights that one token is multiplied by. With experts: those of the router, of the
            shared experts, and of as many experts as a token is sent to.
        query: features of a token that are multiplied by each key it sees, over all query heads.
        value: features of a token that are summed over the values it sees, over all query heads.
        window: maximum number of keys that a token sees, including its own; None if it sees all before it.
        kept: features of a token that are kept from forward for backward. An estimate; see :func:`kept_bytes`.
        second_weights: of ``weights``, those behind attention; None if no stage can begin there.
        second_kept: likewise of ``kept``.
    """

    weights: int
    query: int
    value: int
    window: int | None = None
    kept: int = 0
    second_weights: int | None = None
    second_kept: int = 0

    @property
    def halves(self) -> tuple[LayerSizes, LayerSizes]:
        """The layer up to attention, and what follows it, for a layer inside which a stage may begin."""
        assert self.second_weights is not None
        second = LayerSizes(self.second_weights, 0, 0, kept=self.second_kept)
        weights, kept = self.weights - self.second_weights, self.kept - self.second_kept
        return LayerSizes(weights, self.query, self.value, self.window, kept), second

    @classmethod
    def decoder(
        cls,
        hidden: int,
        query: int,
        key_value: int,
        intermediate: int,
        *,
        gated: bool = True,
        window: int | None = None,
    ) -> LayerSizes:
        """Return the sizes of a decoder layer like Llama's (or GPT-2's, with ``gated=False``).

        Args:
            hidden: features of the residual stream.
            query: features of all query heads together.
            key_value: features of all key heads together, and likewise of all value heads.
            intermediate: features inside the MLP; with experts, the total of those that a token is sent to.
            gated: whether the MLP has a gate projection beside the up projection.
            window: see :class:`LayerSizes`.
        """
        ups = 2 if gated else 1
        return cls(
            weights=hidden * (2 * query + 2 * key_value + (ups + 1) * intermediate),
            query=query,
            value=query,
            window=window,
            kept=2 * (hidden + query) + 2 * (hidden + key_value) + (ups + 1) * (hidden + intermediate),
        )

    def projection_flops(self, start: int, stop: int) -> int:
        """Forward operations of everything but attention, on positions ``[start, stop)``."""
        return 2 * self.weights * (stop - start)

    def attention_flops(self, start: int, stop: int) -> int:
        """Forward operations of attention from positions ``[start, stop)`` to themselves and those before them."""
        return 2 * (self.query + self.value) * seen_keys(start, stop, self.window)


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a causal language model that determine its operations.

    Args:
        layers: the sizes of each layer.
        head: elements of the weights after the layers that one token is multiplied by: hidden × vocabulary.
        is_frozen: whether none of the weights is trained, but adapters, which are so small that they don't count.
    """

    layers: tuple[LayerSizes, ...]
    head: int
    is_frozen: bool = False

    def layer_flops(self, length: int) -> tuple[int, ...]:
        """Forward operations of each layer on a whole sequence of ``length`` tokens."""
        return tuple(_forward_flops([layer], 0, length) for layer in self.layers)

    def head_flops(self, tokens: int) -> int:
        """Forward operations of the head."""
        return 2 * self.head * tokens


def ends_of(lengths: Sequence[Number]) -> list[tuple[Number, Number]]:
    """Return the start and stop of each of some consecutive pieces."""
    return list(pairwise(accumulate(lengths, initial=0)))


def seen_keys(start: int, stop: int, window: int | None = None) -> int:
    """Count pairs of a position in ``[start, stop)`` and a key it sees: its own and earlier ones, within a window."""
    if window is None:
        return _triangle(stop) - _triangle(start)
    growing = _triangle(min(stop, window)) - _triangle(min(start, window))
    return growing + window * (max(stop, window) - max(start, window))


def segment_flops(sizes: ModelSizes) -> Callable[[int, int], int]:
    """Return a function of ``start, stop`` that gives the whole model's forward operations on these positions.

    The result never shrinks when a segment is extended at either end.
    """
    kinds = Counter(sizes.layers)

    def cost(start: int, stop: int) -> int:
        layers = sum(count * _forward_flops([layer], start, stop) for layer, count in kinds.items())
        return layers + sizes.head_flops(stop - start)

    return cost


def unit_flops(
    sizes: ModelSizes,
    layers: Sequence[float],
    lengths: Sequence[int],
    *,
    backward_ratio: float = BACKWARD_RATIO,
    head_ranks: int = 0,
) -> Callable[[Action], float]:
    """Return a function that gives the operations of a compute action.

    The last stage runs the head's backward right after its forward, inside the action F, so that logits needn't be
    kept; only the layers are left for B. In a split backward, W is the weight gradients and I is the rest; frozen
    weights have none.

    Args:
        sizes: sizes of the model.
        layers: number of layers of each stage.
        lengths: tokens of each segment.
        backward_ratio: operations of backward per operation of forward; 3 if backward recomputes everything.
        head_ranks: number of ranks that the head is spread over, each of which has an equal share of its operations; 0
            if the last stage has it.
    """
    assert sum(layers) == len(sizes.layers)
    forward: list[list[int]] = []
    projections: list[list[int]] = []
    for stage_layers in layers_of_stages(sizes, layers):
        kinds = Counter(stage_layers)
        forward.append([_forward_flops(kinds.elements(), *ends) for ends in ends_of(lengths)])
        projections.append([sum(layer.projection_flops(*ends) for layer in stage_layers) for ends in ends_of(lengths)])
    last = len(layers) - 1
    # The other half would be the gradients of its weights.
    head_ratio = BACKWARD_RATIO / 2 if sizes.is_frozen else BACKWARD_RATIO

    def flops(action: Action) -> float:
        forward_flops, weight_flops = (table[action.stage][action.segment] for table in (forward, projections))
        match action.op:
            case Op.FORWARD:
                has_head = action.stage == last and not head_ranks
                head = sizes.head_flops(lengths[action.segment]) if has_head else 0
                return forward_flops + (1 + head_ratio) * head
            case Op.BACKWARD if not sizes.is_frozen:
                return backward_ratio * forward_flops
            case Op.BACKWARD | Op.INPUT_GRADIENT:
                return backward_ratio * forward_flops - weight_flops
            case Op.WEIGHT_GRADIENT:
                return 0 if sizes.is_frozen else weight_flops
            case Op.HEAD_FORWARD:
                return sizes.head_flops(lengths[action.segment]) / head_ranks
            case Op.HEAD_BACKWARD:
                return head_ratio * sizes.head_flops(lengths[action.segment]) / head_ranks
        raise AssertionError(f"{action} computes nothing")

    return flops


def kept_bytes(
    sizes: ModelSizes, layers: Sequence[float], lengths: Sequence[int], *, element_bytes: int = 2, rows: int = 1
) -> Callable[[Action], int]:
    """Return a function that gives the bytes that an action's unit keeps from its forward until its backward.

    An estimate: the input and output features of each projection, at ``element_bytes`` each. An input that several
    projections share is counted once for each, to account for the norms' copies. Activation checkpointing keeps less.
    ``layers`` has the number of layers of each stage, ``lengths`` the tokens of each segment; a micro-batch has
    ``rows``.
    """
    features = [sum(layer.kept for layer in stage_layers) for stage_layers in layers_of_stages(sizes, layers)]

    def kept(action: Action) -> int:
        return features[action.stage] * lengths[action.segment] * element_bytes * rows

    return kept


def _forward_flops(layers: Iterable[LayerSizes], start: int, stop: int) -> int:
    return sum(layer.projection_flops(start, stop) + layer.attention_flops(start, stop) for layer in layers)


def layers_of_stages(sizes: ModelSizes, counts: Sequence[float]) -> list[tuple[LayerSizes, ...]]:
    """The layers of each stage; of a layer that two stages share, each has a half."""
    return [tuple(_layers_between(sizes.layers, *ends)) for ends in ends_of(counts)]


def _layers_between(layers: tuple[LayerSizes, ...], start: float, stop: float) -> list[LayerSizes]:
    pieces = list(layers[floor(start) : ceil(stop)])
    # The end first: a single piece may be the second half of one layer.
    if stop != ceil(stop):
        pieces[-1] = pieces[-1].halves[0]
    if start != floor(start):
        pieces[0] = pieces[0].halves[1]
    return pieces


def _triangle(number: int) -> int:
    return number * (number + 1) // 2
