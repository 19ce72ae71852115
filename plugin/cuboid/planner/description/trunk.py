"""A frozen model of which only adapters are trained (LoRA), and whose linear layers may be in 4 bits (QLoRA)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol

from transformers import PreTrainedModel

#: Bytes of an element in 4 bits: with its share of the scale, in float32, of 64 neighbours.
QUANTIZED_BYTES = 0.5 + 4 / 64


@dataclass(frozen=True)
class Factors:
    """The factors of a layer's low-rank update B A x, or of several layers' that have one input.

    Args:
        features: rows of all A, between which and B's columns there is no weight.
        outputs: rows of all B.
        a, b: elements of all A and of all B.
        updates: of how many weights, in how many layers of PEFT.
    """

    features: int
    outputs: int
    a: int
    b: int
    updates: int = 1

    def __add__(self, other: Factors) -> Factors:
        sums = (getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        return Factors(*sums)

    @property
    def parameters(self) -> int:
        """Elements of all factors."""
        return self.a + self.b

    @property
    def inputs(self) -> float:
        """Columns of A."""
        return self.a / self.features

    @property
    def rank(self) -> float:
        """Columns of B."""
        return self.b / self.outputs


class PlannedAdapters(Protocol):
    """Adapters that are counted with a model. Its text names all that determines them."""

    def factors_of(self, model: PreTrainedModel) -> Mapping[str, Factors]:
        """The factors that a whole model would have, by the names of the modules that they are for.

        The module of experts has those of their weights. The model, on any device, stays as it is.
        """
        ...

    def put_into(self, model: PreTrainedModel) -> None:
        """Freeze a model, whose layers are sharded or not, and put the adapters into its layers."""
        ...


class LaterAdapters:
    """Adapters that are made when the layout is chosen already: only the frozen model counts."""

    def factors_of(self, _: PreTrainedModel) -> Mapping[str, Factors]:
        """None."""
        return {}

    def put_into(self, model: PreTrainedModel) -> None:
        """See :class:`PlannedAdapters`."""
        model.requires_grad_(False)

    def __str__(self) -> str:
        return "adapters, which aren't counted"


@dataclass(frozen=True)
class Trunk:
    """How a frozen model is trained.

    Args:
        adapters: all that is trained.
        four_bits: whether bitsandbytes' 4 bits are what linear layers in the model's blocks are kept in.
    """

    adapters: PlannedAdapters
    four_bits: bool = False

    def __str__(self) -> str:
        return f"{self.adapters}, the rest frozen" + (" in 4 bits" if self.four_bits else "")
