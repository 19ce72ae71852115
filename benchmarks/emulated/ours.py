"""Cuboid's own interpreter, channels, schedules and lowering, around stages that sleep."""

from __future__ import annotations

import functools
from itertools import accumulate, pairwise

import torch

from cuboid.seq1f1b.runtime.p2p import Channel
from cuboid.seq1f1b.runtime.profiler import Profiler
from cuboid.seq1f1b.runtime.runtime import Interpreter
from cuboid.seq1f1b.schedule.actions import Action, Op, Program
from cuboid.seq1f1b.schedule.lowering import lower
from cuboid.seq1f1b.schedule.schedules import SCHEDULES, PipelineShape
from emulated.computing import Parameters, Sleeper
from emulated.work import Work, mean_square

Channels = dict[tuple[int, int], Channel]


class SegmentedStage:
    """One stage (:class:`cuboid.seq1f1b.runtime.runtime.Stage`).

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
        self._given, self._wanted = work.batch()
        self._sleeper = Sleeper(work.duration_s(lengths))
        self.parameters = Parameters(work, stage)
        #: By unit: what backward needs, on the last stage with the gradient of the loss.
        self._pending: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        self.begin()

    def begin(self) -> None:
        """A step. Gradients add up to those that are there."""
        #: Of the step so far, on the last stage.
        self.loss = 0.0
        #: By micro-batch: the sum of earlier segments' hidden states, and its gradient from later ones.
        self._before: dict[int, torch.Tensor] = {}
        self._after: dict[int, torch.Tensor] = {}

    def hidden_shape(self, micro_batch: int, segment: int) -> tuple[int, ...]:  # noqa: ARG002 -- all are cut alike
        """See :class:`cuboid.seq1f1b.runtime.runtime.Stage`."""
        start, stop = self._ends[segment]
        return 1, stop - start, self._work.width

    def forward(self, micro_batch: int, segment: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """See :class:`cuboid.seq1f1b.runtime.runtime.Stage`; the last stage computes the loss too."""
        unit = micro_batch, segment
        with torch.no_grad(), self._sleeper.unit(Action(Op.FORWARD, self._stage, *unit)):
            given = self._part(self._given, unit) if hidden is None else hidden
            output, sums = self.parameters.run_forward(given, self._before.get(micro_batch))
            self._before[micro_batch] = sums[:, -1:].clone()
            is_last = self._stage == self._work.stages - 1
            self._pending[unit] = given, sums, self._gradient(output, unit) if is_last else None
        return None if is_last else output

    def backward(self, micro_batch: int, segment: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """See :class:`cuboid.seq1f1b.runtime.runtime.Stage`."""
        unit = micro_batch, segment
        with torch.no_grad(), self._sleeper.unit(Action(Op.BACKWARD, self._stage, *unit)):
            given, sums, of_loss = self._pending.pop(unit)
            gradient = of_loss if gradient is None else gradient
            assert gradient is not None
            found = self.parameters.run_backward(gradient, self._after.get(micro_batch), given, sums)
            self._after[micro_batch] = found.before
            for parameter, own in ((self.parameters.weight, found.weight), (self.parameters.mix, found.mix)):
                parameter.grad = own if parameter.grad is None else parameter.grad + own
        return None if self._stage == 0 else found.given

    def _gradient(self, output: torch.Tensor, unit: tuple[int, int]) -> torch.Tensor:
        """Of the step's loss, to which this adds the unit's share."""
        wanted = self._part(self._wanted, unit)
        share = output.shape[1] / (self._work.length * self._work.micro_batches)
        self.loss += mean_square(output, wanted).item() * share
        return (output - wanted) * (share / output.numel())

    def _part(self, whole: torch.Tensor, unit: tuple[int, int]) -> torch.Tensor:
        micro_batch, segment = unit
        start, stop = self._ends[segment]
        return whole[micro_batch : micro_batch + 1, start:stop]


class CuboidPipeline:
    """A contestant: see :class:`emulated.entries.Contestant`."""

    def __init__(self, work: Work, schedule: str, lengths: tuple[int, ...], stage: int, channels: Channels) -> None:
        self._shape = PipelineShape(work.stages, work.micro_batches, len(lengths))
        self._program = programs(schedule, self._shape)[stage]
        self._number, self._channels = stage, channels
        self._stage = SegmentedStage(work, lengths, stage)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self._stage.parameters.parameters(), lr=0.0)

    def step(self, recorder: Profiler) -> float:
        """See :class:`emulated.entries.Contestant`."""
        self._stage.begin()
        Interpreter({self._number: self._stage}, self._channels, recorder.observe).run(self._program, self._shape)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._stage.loss

    def close(self) -> None:
        """See :class:`emulated.entries.Contestant`."""


@functools.cache
def programs(schedule: str, shape: PipelineShape) -> tuple[Program, ...]:
    """What each rank does, messages and all."""
    return lower(SCHEDULES[schedule](shape), shape)
