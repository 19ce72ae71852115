"""Stages whose computing is emulated: what they really compute is small, and the rest of a unit's time is slept.

A stage takes as long as the layers of a large model would on it, in proportion. What it really computes, and sends on,
is small: every feature is scaled, and the mean of those before it in its sequence is mixed in. So segments depend on
one another as in attention, and an order that is wrong gives other gradients.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from network.serving import sleep_until
from torch import nn

from contestants.pipelines import Entry, Pipeline, Task
from cuboid.errors import ConfigError
from cuboid.seq1f1b.runtime.p2p import Channel
from cuboid.seq1f1b.runtime.profiler import Profiler
from cuboid.seq1f1b.runtime.runtime import Interpreter
from cuboid.seq1f1b.schedule.actions import Action, Op, Program
from cuboid.seq1f1b.schedule.lowering import lower
from cuboid.seq1f1b.schedule.schedules import SCHEDULES, PipelineShape
from cuboid.seq1f1b.schedule.unit_costs import LayerSizes, ModelSizes, kept_bytes

_SEED = 20240605
#: Llama-2-7B's layers (Touvron et al. 2023).
_HIDDEN, _INTERMEDIATE = 4096, 11008
#: What weights start from: near 1, so that hidden states neither grow nor shrink over the stages.
_WEIGHT, _MIX = 0.9, 0.1

Channels = dict[tuple[int, int], Channel]


@dataclass(frozen=True)
class Work(Task):
    """A task of P stages and M micro-batches.

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
    #: Each step does the same.
    learning_rate = 0.0
    is_emulated = True

    def __post_init__(self) -> None:
        if self.stages < 2 or self.layers % self.stages:
            fitting = [str(stages) for stages in range(2, self.layers + 1) if self.layers % stages == 0]
            raise ConfigError(
                f"{self.stages} stages can't share {self.layers} layers equally, as theory takes them to; "
                f"{', '.join(fitting)} would work"
            )

    @property
    def sizes(self) -> ModelSizes:
        """The head is left out, for it would make the last stage slower than the others."""
        layer = LayerSizes.decoder(_HIDDEN, _HIDDEN, _HIDDEN, _INTERMEDIATE)
        return ModelSizes((layer,) * self.layers, head=0)

    def cost(self, lengths: Sequence[int]) -> Callable[[Action], float]:
        """Seconds of each unit's forward and backward, whole or in parts, in proportion to its operations."""
        flops = super().cost(lengths)
        whole = super().cost((self.length,))(Action(Op.FORWARD, 0, 0, 0))
        # Equal for all stages and micro-batches, and asked for in the middle of what is timed.
        table = {
            (op, segment): self.forward_s * flops(Action(op, 0, 0, segment)) / whole
            for op in (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)
            for segment in range(len(lengths))
        }
        return lambda action: table[action.op, action.segment]

    def kept_bytes(self, lengths: tuple[int, ...]) -> Callable[[Action], int]:
        """What a unit of the real model would keep for its backward in bf16, by estimate."""
        return kept_bytes(self.sizes, self.balance, lengths)

    def message_bytes(self, tokens: int) -> int:
        """Of a segment's hidden states."""
        return tokens * self.width * torch.float32.itemsize

    def stage(self, number: int) -> nn.Module:
        return WholeStage(self, number)

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states for the first stage and what the last one should give, ``[M, S, W]`` each."""
        return _batch(self)

    def loss(self, output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Half the mean squared difference."""
        return 0.5 * (output - wanted).square().mean()

    def parameters(self, stage: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A stage's weight and its weight for the mean before a token, ``[W]`` each."""
        generator = torch.Generator().manual_seed(_SEED + stage)
        noise = 0.1 * torch.rand((2, self.width), generator=generator)
        return _WEIGHT + noise[0], _MIX + noise[1]

    def reference(self) -> tuple[float, float]:
        """Loss and gradient norm of the step in float64, by autograd, without any pipeline."""
        hidden, wanted = (tensor.double() for tensor in self.data())
        leaves = []
        for stage in range(self.stages):
            weight, mix = (each.double().requires_grad_() for each in self.parameters(stage))
            leaves += [weight, mix]
            hidden = weight * hidden + mix * hidden.cumsum(dim=1) / self.length
        loss = self.loss(hidden, wanted)
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


@contextmanager
def _lasting(seconds: float) -> Iterator[None]:
    """Compute inside; the rest of the time is slept."""
    end_s = time.perf_counter() + seconds
    yield
    sleep_until(end_s)


class Gradients(NamedTuple):
    """Of a segment's hidden states ``[1, L, W]``, of the sum before it ``[1, 1, W]``, and of the parameters ``[W]``."""

    given: torch.Tensor
    before: torch.Tensor
    weight: torch.Tensor
    mix: torch.Tensor


class Parameters(nn.Module):
    """A stage's parameters, ``[W]`` each, and its arithmetic on hidden states ``[1, L, W]`` of a segment.

    ``before`` and ``after``, ``[1, 1, W]``, are for a segment what keys and values and their gradients are in
    attention: the sum of all hidden states of earlier segments, and the gradient of the sum up to here from later ones.
    """

    def __init__(self, work: Work, stage: int) -> None:
        super().__init__()
        weight, mix = work.parameters(stage)
        self.weight, self.mix = nn.Parameter(weight), nn.Parameter(mix)
        self._length = work.length

    def run_forward(self, given: torch.Tensor, before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states for the next stage, and the sums up to each token."""
        sums = given.cumsum(dim=1)
        if before is not None:
            sums = sums + before
        return self.weight * given + (self.mix / self._length) * sums, sums

    def run_backward(
        self, gradient: torch.Tensor, after: torch.Tensor | None, given: torch.Tensor, sums: torch.Tensor
    ) -> Gradients:
        """Gradients, from that of :meth:`run_forward`'s hidden states."""
        through = (gradient * (self.mix / self._length)).flip(1).cumsum(dim=1).flip(1)
        if after is not None:
            through = through + after
        return Gradients(
            given=self.weight * gradient + through,
            before=through[:, :1].clone(),
            weight=(gradient * given).sum(dim=(0, 1)),
            mix=(gradient * sums).sum(dim=(0, 1)) / self._length,
        )


class SegmentedStage:
    """A stage as Cuboid's interpreter takes one (:class:`cuboid.seq1f1b.runtime.runtime.Stage`).

    Args:
        work: what it does.
        lengths: tokens of each segment.
        stage: its number.
    """

    hidden_dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, work: Work, lengths: tuple[int, ...], stage: int) -> None:
        self._work, self._stage = work, stage
        self._ends = list(pairwise(accumulate(lengths, initial=0)))
        self._given, self._wanted = work.data()
        self._duration_s = work.cost(lengths)
        self.parameters = Parameters(work, stage)
        #: By unit: what backward needs, on the last stage with the gradient of the loss.
        self._pending: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        self._waiting: dict[tuple[int, int], Gradients] = {}
        self.begin()

    def begin(self) -> None:
        """A step. Gradients add up to those that are there."""
        #: Of the step so far, on the last stage.
        self.loss = 0.0
        #: By micro-batch: the sum of earlier segments' hidden states, and its gradient from later ones.
        self._before: dict[int, torch.Tensor] = {}
        self._after: dict[int, torch.Tensor] = {}

    def hidden_shape(self, micro_batch: int, segment: int) -> tuple[int, ...]:  # noqa: ARG002 -- all are cut alike
        """Of a unit's hidden states."""
        start, stop = self._ends[segment]
        return 1, stop - start, self._work.width

    def forward(self, micro_batch: int, segment: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """The last stage computes the loss too."""
        unit = micro_batch, segment
        with torch.no_grad(), _lasting(self._duration_s(Action(Op.FORWARD, self._stage, *unit))):
            given = self._part(self._given, unit) if hidden is None else hidden
            output, sums = self.parameters.run_forward(given, self._before.get(micro_batch))
            self._before[micro_batch] = sums[:, -1:].clone()
            is_last = self._stage == self._work.stages - 1
            self._pending[unit] = given, sums, self._gradient(output, unit) if is_last else None
        return None if is_last else output

    def backward(self, micro_batch: int, segment: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient for the stage before."""
        with torch.no_grad(), _lasting(self._duration_s(Action(Op.BACKWARD, self._stage, micro_batch, segment))):
            found = self._gradients((micro_batch, segment), gradient)
            self._add(found)
        return None if self._stage == 0 else found.given

    def input_gradient(self, micro_batch: int, segment: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient for the stage before; those of the parameters are added in :meth:`weight_gradients`."""
        action = Action(Op.INPUT_GRADIENT, self._stage, micro_batch, segment)
        with torch.no_grad(), _lasting(self._duration_s(action)):
            found = self._waiting[micro_batch, segment] = self._gradients((micro_batch, segment), gradient)
        return None if self._stage == 0 else found.given

    def weight_gradients(self, micro_batch: int, segments: Sequence[int]) -> None:
        """For as long as those of the segments take together."""
        for segment in segments:
            action = Action(Op.WEIGHT_GRADIENT, self._stage, micro_batch, segment)
            with torch.no_grad(), _lasting(self._duration_s(action)):
                self._add(self._waiting.pop((micro_batch, segment)))

    def _gradients(self, unit: tuple[int, int], gradient: torch.Tensor | None) -> Gradients:
        given, sums, of_loss = self._pending.pop(unit)
        gradient = of_loss if gradient is None else gradient
        assert gradient is not None
        found = self.parameters.run_backward(gradient, self._after.get(unit[0]), given, sums)
        self._after[unit[0]] = found.before
        return found

    def _add(self, found: Gradients) -> None:
        for parameter, own in ((self.parameters.weight, found.weight), (self.parameters.mix, found.mix)):
            parameter.grad = own if parameter.grad is None else parameter.grad + own

    def _gradient(self, output: torch.Tensor, unit: tuple[int, int]) -> torch.Tensor:
        """Of the step's loss, to which this adds the unit's share."""
        wanted = self._part(self._wanted, unit)
        share = output.shape[1] / (self._work.length * self._work.micro_batches)
        self.loss += self._work.loss(output, wanted).item() * share
        return (output - wanted) * (share / output.numel())

    def _part(self, whole: torch.Tensor, unit: tuple[int, int]) -> torch.Tensor:
        micro_batch, segment = unit
        start, stop = self._ends[segment]
        return whole[micro_batch : micro_batch + 1, start:stop]


class WholeStage(nn.Module):
    """A stage as peers take one: a module of hidden states ``[1, S, W]``, whose gradient autograd asks for."""

    def __init__(self, work: Work, stage: int) -> None:
        super().__init__()
        self.parts = Parameters(work, stage)
        self._stage, self._duration_s = stage, work.cost((work.length,))
        self.begin(None)

    def begin(self, recorder: Profiler | None) -> None:
        """Count micro-batches anew; ``recorder`` sees each unit from now on."""
        self._recorder = recorder
        self._counts = {op: itertools.count() for op in (Op.FORWARD, Op.BACKWARD)}

    @contextmanager
    def unit(self, op: Op) -> Iterator[None]:
        """Enter for the time of the next unit; 1F1B runs micro-batches in order, forward and backward."""
        action = Action(op, self._stage, next(self._counts[op]), 0)
        if self._recorder is None:
            yield
            return
        with self._recorder.observe(action), _lasting(self._duration_s(action)):
            yield

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return _Whole.apply(given, self.parts.weight, self.parts.mix, self)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, _: torch.Tensor, __: torch.Tensor, stage: WholeStage) -> torch.Tensor:
        with stage.unit(Op.FORWARD):
            output, sums = stage.parts.run_forward(given, None)
            ctx.save_for_backward(given, sums)
            ctx.stage = stage
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        with ctx.stage.unit(Op.BACKWARD):
            found = ctx.stage.parts.run_backward(gradient, None, *ctx.saved_tensors)
        return found.given if ctx.needs_input_grad[0] else None, found.weight, found.mix, None


class CuboidRuntime(Pipeline):
    """Cuboid's own interpreter, channels, schedules and lowering."""

    def __init__(self, entry: Entry, work: Work, channels: Channels) -> None:
        super().__init__(work)
        self._shape, self._channels = entry.shape(work), channels
        self._program = programs(entry.schedule, self._shape)[self.number]
        self._stage = SegmentedStage(work, entry.lengths(work), self.number)
        self.optimizer = torch.optim.SGD(self._stage.parameters.parameters(), lr=work.learning_rate)

    def step(self) -> None:
        assert self._recorder is not None
        self._stage.begin()
        Interpreter({self.number: self._stage}, self._channels, self._recorder.observe).run(self._program, self._shape)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = self._stage.loss


@functools.cache
def programs(schedule: str, shape: PipelineShape) -> tuple[Program, ...]:
    """What each rank does, messages and all."""
    return lower(SCHEDULES[schedule](shape), shape)
