"""What all contestants do: the units of a real model's pipeline, in time, and a little real arithmetic, to be compared.

A stage takes as long as the layers of a large model would on it, in proportion, but most of that it sleeps. What it
really computes, and sends on, is small: every feature is scaled, and the mean of those before it in its sequence is
mixed in. So segments depend on one another as in attention, and an order that is wrong gives other gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cuboid.errors import ConfigError
from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.partition import cut_sequence, even_cut, segment_cost
from cuboid.seq1f1b.schedule.unit_costs import LayerSizes, ModelSizes, kept_bytes, unit_flops

_SEED = 20240605
#: Llama-2-7B's layers (Touvron et al. 2023).
_HIDDEN, _INTERMEDIATE = 4096, 11008
#: What weights start from: near 1, so that hidden states neither grow nor shrink over the stages.
_WEIGHT, _MIX = 0.9, 0.1


@dataclass(frozen=True)
class Work:
    """A step of one pipeline: P stages, M micro-batches of one sequence each.

    Args:
        stages: P, which must divide the layers.
        micro_batches: M.
        forward_s: what the forward of a whole sequence takes on one stage; backward takes twice as long.
        width: features of a token in the messages between stages, in float32.
        length: S, tokens of a sequence.
        layers: of the whole model.

    Raises:
        ConfigError: the stages can't have equally many layers.
    """

    stages: int
    micro_batches: int
    forward_s: float
    width: int
    length: int = 32768
    layers: int = 32

    def __post_init__(self) -> None:
        if self.stages < 2 or self.layers % self.stages:
            fitting = [str(stages) for stages in range(2, self.layers + 1) if self.layers % stages == 0]
            raise ConfigError(
                f"{self.stages} stages can't share {self.layers} layers equally, as theory takes them to; "
                f"{', '.join(fitting)} would work"
            )

    @property
    def sizes(self) -> ModelSizes:
        """What the layers multiply. The head is left out, for it would make the last stage slower than the others."""
        layer = LayerSizes.decoder(_HIDDEN, _HIDDEN, _HIDDEN, _INTERMEDIATE)
        return ModelSizes((layer,) * self.layers, head=0)

    @property
    def balance(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return (self.layers // self.stages,) * self.stages

    def lengths(self, segments: int, partition: str) -> tuple[int, ...]:
        """Tokens of each segment, by operations (``"flops"``) or ``"even"``."""
        if partition == "even":
            return even_cut(self.length, segments)
        return cut_sequence(self.length, segments, cost=segment_cost(self.sizes))

    def duration_s(self, lengths: tuple[int, ...]) -> Callable[[Action], float]:
        """Seconds of each unit's forward and backward, in proportion to its operations."""
        flops = unit_flops(self.sizes, self.balance, lengths)
        whole = unit_flops(self.sizes, self.balance, (self.length,))(Action(Op.FORWARD, 0, 0, 0))
        # Equal for all stages and micro-batches, and asked for in the middle of what is timed.
        table = {
            (op, segment): self.forward_s * flops(Action(op, 0, 0, segment)) / whole
            for op in (Op.FORWARD, Op.BACKWARD)
            for segment in range(len(lengths))
        }
        return lambda action: table[action.op, action.segment]

    def kept_bytes(self, lengths: tuple[int, ...]) -> Callable[[Action], int]:
        """What a unit of the real model would keep for its backward in bf16, by estimate."""
        return kept_bytes(self.sizes, self.balance, lengths)

    def message_bytes(self, tokens: int) -> int:
        """Of a segment's hidden states."""
        return tokens * self.width * torch.float32.itemsize

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states for the first stage and what the last one should give, ``[M, S, W]``, the same every time."""
        return _batch(self)

    def parameters(self, stage: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A stage's weight and its weight for the mean before a token, ``[W]`` each."""
        generator = torch.Generator().manual_seed(_SEED + stage)
        noise = 0.1 * torch.rand((2, self.width), generator=generator)
        return _WEIGHT + noise[0], _MIX + noise[1]

    def reference(self) -> tuple[float, float]:
        """Loss and gradient norm of the step in float64, by autograd, without any pipeline."""
        hidden, wanted = (tensor.double() for tensor in self.batch())
        leaves = []
        for stage in range(self.stages):
            weight, mix = (each.double().requires_grad_() for each in self.parameters(stage))
            leaves += [weight, mix]
            hidden = weight * hidden + mix * hidden.cumsum(dim=1) / self.length
        loss = mean_square(hidden, wanted)
        squares = sum(gradient.square().sum().item() for gradient in torch.autograd.grad(loss, leaves))
        return loss.item(), math.sqrt(squares)

    def numbers(self) -> dict[str, Any]:
        """For the record."""
        return {**asdict(self), "hidden": _HIDDEN, "intermediate": _INTERMEDIATE}


# All contestants of a rank share it.
@functools.lru_cache(maxsize=1)
def _batch(work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    given, wanted = torch.rand((2, work.micro_batches, work.length, work.width), generator=generator)
    return given, wanted


def mean_square(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Half the mean squared difference: the loss of a micro-batch, or the mean of several."""
    return 0.5 * (output - wanted).square().mean()
