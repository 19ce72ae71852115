"""What the units of a step cost: floating-point operations, and bytes kept from forward for backward.

A multiplication and the addition that follows it are two operations. Counted are the products of weights and
activations and those inside attention; norms, activation functions and the like are left out, as usual (Kaplan et al.
2020, Narayanan et al. 2021). All counts are for one row of a batch, and exact integers as long as ratios are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from cuboid.seq1f1b.schedule.actions import Action, Op

#: Backward multiplies each gradient twice: by the weight, and by the input.
BACKWARD_RATIO = 2.0
#: Part of what a forward keeps that the input gradient of a split backward frees: what only attention, norms and
#: activation functions need. The inputs of linear layers, which are kept for the weight gradient, are the rest. It was
#: measured on Llama layers.
INPUT_GRADIENT_FREES = 0.23


@dataclass(frozen=True)
class LayerSizes:
    """What one layer multiplies.

    Args:
        weights: elements of the weights that one token is multiplied by. With experts: of the router, of the shared
            ones, and of as many as a token is sent to.
        query: features of a token that are multiplied by each key it sees, over all query heads.
        value: features of a token that are summed over the values it sees, over all query heads.
        window: number of keys that a token sees at most, itself counted; None where it sees all before it.
        kept: features of a token that are kept from forward for backward. An estimate; see :func:`kept_bytes`.
    """

    weights: int
    query: int
    value: int
    window: int | None = None
    kept: int = 0

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
        """Sizes of a decoder layer like Llama's (or GPT-2's, with ``gated=False``).

        Args:
            hidden: features of the residual stream.
            query: features of all query heads.
            key_value: features of all key heads, and as many of all value heads.
            intermediate: features inside the MLP; with experts, of all those together that a token is sent to.
            gated: whether the MLP has two projections up, one a gate for the other.
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
        """Forward of everything but attention, on positions ``[start, stop)``."""
        return 2 * self.weights * (stop - start)

    def attention_flops(self, start: int, stop: int) -> int:
        """Forward of attention from positions ``[start, stop)`` to themselves and all before them."""
        return 2 * (self.query + self.value) * seen_keys(start, stop, self.window)


@dataclass(frozen=True)
class ModelSizes:
    """What a causal language model multiplies.

    Args:
        layers: one for each layer.
        head: elements of the weights after the layers that one token is multiplied by; hidden × vocabulary.
    """

    layers: tuple[LayerSizes, ...]
    head: int

    def layer_flops(self, length: int) -> tuple[int, ...]:
        """Forward of each layer on a whole sequence."""
        return tuple(_forward_flops([layer], 0, length) for layer in self.layers)

    def head_flops(self, tokens: int) -> int:
        """Forward of the head."""
        return 2 * self.head * tokens


def seen_keys(start: int, stop: int, window: int | None = None) -> int:
    """Pairs of a position in ``[start, stop)`` and a key that it sees: itself and those before it, within a window."""
    if window is None:
        return _triangle(stop) - _triangle(start)
    growing = _triangle(min(stop, window)) - _triangle(min(start, window))
    return growing + window * (max(stop, window) - max(start, window))


def segment_flops(sizes: ModelSizes) -> Callable[[int, int], int]:
    """Forward of the whole model on positions ``[start, stop)``, as a function of them.

    It only grows as a segment is made longer, on either side.
    """
    kinds = Counter(sizes.layers)

    def cost(start: int, stop: int) -> int:
        layers = sum(count * _forward_flops([layer], start, stop) for layer, count in kinds.items())
        return layers + sizes.head_flops(stop - start)

    return cost


def unit_flops(
    sizes: ModelSizes, layers: Sequence[int], lengths: Sequence[int], *, backward_ratio: float = BACKWARD_RATIO
) -> Callable[[Action], float]:
    """Operations of each action that computes, as a function of it.

    The last stage runs the head's backward right behind its forward, inside the action F, so that logits needn't be
    kept; what is left for B are the layers. Of a backward in two parts, W is the gradient of the weights, I the rest.

    Args:
        sizes: of the model.
        layers: number of layers of each stage.
        lengths: tokens of each segment.
        backward_ratio: operations of backward for each one of forward; 3 if all is computed again in backward.
    """
    assert sum(layers) == len(sizes.layers)
    forward: list[list[int]] = []
    projections: list[list[int]] = []
    for own in _stages(sizes.layers, layers):
        kinds = Counter(own)
        forward.append([_forward_flops(kinds.elements(), *ends) for ends in _ends(lengths)])
        projections.append([sum(layer.projection_flops(*ends) for layer in own) for ends in _ends(lengths)])
    last = len(layers) - 1

    def flops(action: Action) -> float:
        whole, weights = (table[action.stage][action.segment] for table in (forward, projections))
        match action.op:
            case Op.FORWARD:
                head = sizes.head_flops(lengths[action.segment]) if action.stage == last else 0
                return whole + (1 + BACKWARD_RATIO) * head
            case Op.BACKWARD:
                return backward_ratio * whole
            case Op.INPUT_GRADIENT:
                return backward_ratio * whole - weights
            case Op.WEIGHT_GRADIENT:
                return weights
        raise AssertionError(f"{action} computes nothing")

    return flops


def kept_bytes(
    sizes: ModelSizes, layers: Sequence[int], lengths: Sequence[int], *, element_bytes: int = 2, rows: int = 1
) -> Callable[[Action], int]:
    """Bytes that a unit keeps from its forward until its backward, as a function of an action of it.

    An estimate: the features that go into and come out of each projection, at ``element_bytes`` each. Projections that
    share their input count it each, which stands for the norms' copies. Activation checkpointing keeps less.

    Args:
        sizes: of the model.
        layers: number of layers of each stage.
        lengths: tokens of each segment.
        element_bytes: of a number of the activations; 2 for bf16.
        rows: rows of a micro-batch.
    """
    features = [sum(layer.kept for layer in own) for own in _stages(sizes.layers, layers)]

    def kept(action: Action) -> int:
        return features[action.stage] * lengths[action.segment] * element_bytes * rows

    return kept


def _forward_flops(layers: Iterable[LayerSizes], start: int, stop: int) -> int:
    return sum(layer.projection_flops(start, stop) + layer.attention_flops(start, stop) for layer in layers)


def _stages(layers: tuple[LayerSizes, ...], counts: Sequence[int]) -> list[tuple[LayerSizes, ...]]:
    return [layers[first:stop] for first, stop in _ends(counts)]


def _ends(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Start and stop of each of some pieces that follow one another."""
    return list(pairwise(accumulate(lengths, initial=0)))


def _triangle(number: int) -> int:
    return number * (number + 1) // 2
