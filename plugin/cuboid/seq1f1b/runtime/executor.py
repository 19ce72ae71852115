"""The interpreter of one rank's program: the only place where actions are turned into computation and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from cuboid.seq1f1b.runtime.p2p import Arrival, Channel
from cuboid.seq1f1b.runtime.pipe_collectives import Joined, PipeCollectives
from cuboid.seq1f1b.schedule.actions import Action, Op, Program
from cuboid.seq1f1b.schedule.dependencies import channel, counterpart, incoming, outgoing
from cuboid.seq1f1b.schedule.schedules import PipelineShape


class Stage(Protocol):
    """The computation of one stage. Inputs and outputs are hidden states ``[B, L, H]`` and gradients of that shape."""

    def message_shape(self, micro_batch: int, segment: int) -> tuple[int, ...]:
        """Shape of a unit's messages, as this rank sends and receives them."""

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Dtype of the messages."""

    @property
    def device(self) -> torch.device:
        """Device of this rank."""

    def forward(self, micro_batch: int, segment: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """Hidden states for the next stage. The first stage has no input, the last one returns None."""

    def backward(self, micro_batch: int, segment: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Gradient for the previous stage. The last stage has no input, the first one returns None."""

    def input_gradient(self, micro_batch: int, segment: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """I of a split backward: like :meth:`backward`, but without what :meth:`weight_gradients` computes."""

    def weight_gradients(self, micro_batch: int, segments: Sequence[int]) -> None:
        """W of a split backward, for some segments of a micro-batch, in order; may accumulate their sum."""


class HeadPart(Protocol):
    """This rank's share of a head that is spread over all ranks."""

    def buffer(self, micro_batch: int, segment: int) -> torch.Tensor:
        """An empty tensor for a unit's output of the last stage."""

    def forward(self, micro_batch: int, segment: int, hidden: torch.Tensor) -> torch.Tensor:
        """What the other ranks need to know of this share's logits of a unit."""

    def backward(self, micro_batch: int, segment: int, statistics: torch.Tensor) -> torch.Tensor:
        """This share's part of the gradient of ``hidden``, given what all ranks returned from :meth:`forward`."""

    def finish(self) -> None:
        """Called on all ranks once they have joined the last unit's last collective; may start other collectives."""


@dataclass(frozen=True)
class SpreadHead:
    """A rank's share of the head, and the collectives with the others' shares."""

    share: HeadPart
    collectives: PipeCollectives


#: Called with each action that computes; the context manager it returns surrounds the computation.
Observer = Callable[[Action], AbstractContextManager[None]]


class Interpreter:
    """Runs one rank's programs.

    Args:
        stages: this rank's stages, by stage number.
        channels: by (source, target) stage, for every pair of neighbours of which exactly one is on this rank.
        observe: see :data:`Observer`.
        head: this rank's share of the head, if the program has any.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        channels: Mapping[tuple[int, int], Channel],
        observe: Observer,
        head: SpreadHead | None = None,
    ) -> None:
        self._stages = stages
        self._head = head
        self._channels = channels
        self._observe = observe
        #: The last action that was started, for error messages.
        self.running: Action | None = None
        #: Inputs of later computations that come from other ranks, by their receive action.
        self._arrivals: dict[Action, Arrival | Joined] = {}
        #: Inputs of later computations from another stage on this rank, likewise. No messages are sent for these.
        self._here: dict[Action, torch.Tensor] = {}
        #: Results to be sent, by their send action.
        self._outgoing: dict[Action, torch.Tensor] = {}

    def run(self, program: Program, shape: PipelineShape) -> None:
        """Run a program, and wait until all messages are sent.

        Raises:
            PeerLostError: the connection to a neighbour is lost.
        """
        exchanges = sum(action.op.is_collective for action in program)
        for run in _runs(program):
            action = self.running = run[0]
            match action.op:
                case Op.RECEIVE_ACTIVATION | Op.RECEIVE_GRADIENT:
                    self._receive(action)
                case Op.SEND_ACTIVATION | Op.SEND_GRADIENT:
                    self._channels[channel(action)].send(self._outgoing.pop(action))
                case Op.WEIGHT_GRADIENT:
                    self._weight_gradients(run)
                case Op.BROADCAST_HIDDEN | Op.GATHER_STATISTICS | Op.REDUCE_GRADIENT:
                    exchanges -= 1
                    self._join(action, shape, is_last=not exchanges)
                case Op.HEAD_FORWARD | Op.HEAD_BACKWARD:
                    self._compute_share(action, shape)
                case _:
                    self._compute(action, shape)
        for p2p_channel in self._channels.values():
            p2p_channel.drain()
        if self._head is not None:
            self._head.collectives.drain()
        unconsumed = [*self._arrivals, *self._here, *self._outgoing]
        assert not unconsumed, f"unconsumed message {unconsumed[0]}"

    def _receive(self, action: Action) -> None:
        stage = self._stages[action.stage]
        size = stage.message_shape(action.micro_batch, action.segment)
        self._arrivals[action] = self._channels[channel(action)].post_receive(size, stage.hidden_dtype, stage.device)

    def _join(self, action: Action, shape: PipelineShape, *, is_last: bool) -> None:
        assert self._head is not None
        self._start_exchange(action, shape, self._head)
        if is_last:
            self._head.share.finish()

    def _start_exchange(self, action: Action, shape: PipelineShape, head: SpreadHead) -> None:
        result, collectives = self._outgoing.pop(action, None), head.collectives
        if action.op is Op.BROADCAST_HIDDEN:
            buffer = head.share.buffer(action.micro_batch, action.segment) if result is None else result
            self._arrivals[action] = collectives.broadcast(buffer)
            return
        assert result is not None
        if action.op is Op.GATHER_STATISTICS:
            self._arrivals[action] = collectives.all_gather(result)
            return
        joined = collectives.reduce(result)
        if action.stage == shape.stages - 1:
            self._arrivals[action] = joined

    def _compute_share(self, action: Action, shape: PipelineShape) -> None:
        assert self._head is not None
        message, share = self._take(incoming(action, shape)), self._head.share
        assert message is not None
        compute = share.forward if action.op is Op.HEAD_FORWARD else share.backward
        with self._observe(action):
            result = compute(action.micro_batch, action.segment, message)
        send = outgoing(action, shape)
        assert send is not None
        self._outgoing[send] = result

    def _compute(self, action: Action, shape: PipelineShape) -> None:
        stage, message = self._stages[action.stage], self._take(incoming(action, shape))
        with self._observe(action):
            match action.op:
                case Op.FORWARD:
                    result = stage.forward(action.micro_batch, action.segment, message)
                case Op.BACKWARD:
                    result = stage.backward(action.micro_batch, action.segment, message)
                case _:
                    result = stage.input_gradient(action.micro_batch, action.segment, message)
        send = outgoing(action, shape)
        if send is None or result is None:
            return
        if not send.op.is_collective and channel(send)[1] in self._stages:
            # The stage that uses the result is another chunk of this rank.
            self._here[counterpart(send)] = result
        else:
            self._outgoing[send] = result

    def _weight_gradients(self, run: Sequence[Action]) -> None:
        """Compute all Ws of a run at once. Observers see the whole time as the first action's."""
        first = run[0]
        with self._observe(first):
            self._stages[first.stage].weight_gradients(first.micro_batch, [action.segment for action in run])
        for action in run[1:]:
            with self._observe(action):
                pass

    def _take(self, receive: Action | None) -> torch.Tensor | None:
        if receive is None:
            return None
        arrival = self._arrivals.pop(receive, None)
        return self._here.pop(receive) if arrival is None else arrival.wait()


def _runs(program: Program) -> Iterator[tuple[Action, ...]]:
    """Group consecutive Ws of one micro-batch, accumulated as one sum; every other action is a group of its own."""

    def key(numbered: tuple[int, Action]) -> tuple[int, ...]:
        index, action = numbered
        # No stage is -1, so the index gives every other action a group of its own.
        return (action.stage, action.micro_batch) if action.op is Op.WEIGHT_GRADIENT else (-1, index)

    for _, run in groupby(enumerate(program), key):
        yield tuple(action for _, action in run)
