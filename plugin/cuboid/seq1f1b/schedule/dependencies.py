"""What each action depends on, and which messages stages exchange: the rules that all other modules here build on."""

from __future__ import annotations

from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.schedules import PipelineShape

_GRADIENT_OPS = (Op.BACKWARD, Op.INPUT_GRADIENT)


def dependencies(action: Action, shape: PipelineShape) -> tuple[Action, ...]:
    """The actions whose results this one uses directly.

    A dependency on a backward is always given as ``B``; in a schedule that splits it, ``I`` counts as that ``B`` (see
    :func:`fulfils`). A segment's forward needs the keys and values of the previous segment; its backward needs the
    gradients from the next segment. Attention's backward, which computes those gradients, is part of ``I``, so ``W``
    needs only its own unit's ``I``. Where the head is spread, each share needs the last stage's forward, the gradients
    of each need the sums of all, and the last stage's backward needs the gradients of all.
    """
    op, stage, micro_batch, segment = action.op, action.stage, action.micro_batch, action.segment
    match op:
        case Op.FORWARD:
            before = (Action(op, stage - 1, micro_batch, segment),) if stage else ()
            return (*before, Action(op, stage, micro_batch, segment - 1)) if segment else before
        case Op.BACKWARD | Op.INPUT_GRADIENT:
            needs = [Action(Op.FORWARD, stage, micro_batch, segment)]
            if stage + 1 < shape.stages:
                needs.append(Action(Op.BACKWARD, stage + 1, micro_batch, segment))
            else:
                needs += [Action(Op.HEAD_BACKWARD, share, micro_batch, segment) for share in shape.head_stages]
            if segment + 1 < shape.segments:
                needs.append(Action(Op.BACKWARD, stage, micro_batch, segment + 1))
            return tuple(needs)
        case Op.SEND_ACTIVATION:
            return (Action(Op.FORWARD, stage, micro_batch, segment),)
        case Op.WEIGHT_GRADIENT | Op.SEND_GRADIENT:
            return (Action(Op.BACKWARD, stage, micro_batch, segment),)
        case Op.RECEIVE_ACTIVATION | Op.RECEIVE_GRADIENT:
            return (counterpart(action),)
        case Op.HEAD_FORWARD:
            return (Action(Op.FORWARD, shape.stages - 1, micro_batch, segment),)
        case Op.HEAD_BACKWARD:
            return tuple(Action(Op.HEAD_FORWARD, share, micro_batch, segment) for share in shape.head_stages)
        case Op.BROADCAST_HIDDEN:
            last = shape.stages - 1
            return (Action(Op.FORWARD if stage == last else op, last, micro_batch, segment),)
        case Op.GATHER_STATISTICS:
            return (Action(Op.HEAD_FORWARD, stage, micro_batch, segment),)
        case Op.REDUCE_GRADIENT:
            return (Action(Op.HEAD_BACKWARD, stage, micro_batch, segment),)


def fulfils(action: Action) -> Action:
    """Return the action that this one stands for in :func:`dependencies`: ``B`` for ``I``, otherwise itself."""
    if action.op is Op.INPUT_GRADIENT:
        return Action(Op.BACKWARD, action.stage, action.micro_batch, action.segment)
    return action


def incoming(action: Action, shape: PipelineShape) -> Action | None:
    """Return the receive of a computation's input, or the collective; None if no stage sends it anything.

    Whether the neighbour is on another rank, so that there really is a message, is for the caller to check.
    """
    if action.op is Op.FORWARD and action.stage > 0:
        return Action(Op.RECEIVE_ACTIVATION, action.stage, action.micro_batch, action.segment)
    if action.op in _GRADIENT_OPS and action.stage + 1 < shape.stages:
        return Action(Op.RECEIVE_GRADIENT, action.stage, action.micro_batch, action.segment)
    if action.op in _GRADIENT_OPS and shape.head_ranks:
        return Action(Op.REDUCE_GRADIENT, action.stage, action.micro_batch, action.segment)
    if action.op is Op.HEAD_FORWARD:
        return Action(Op.BROADCAST_HIDDEN, action.stage, action.micro_batch, action.segment)
    if action.op is Op.HEAD_BACKWARD:
        return Action(Op.GATHER_STATISTICS, action.stage, action.micro_batch, action.segment)
    return None


def outgoing(action: Action, shape: PipelineShape) -> Action | None:
    """Return the send of a computation's result, or the collective; None if no stage needs it. See :func:`incoming`."""
    if action.op is Op.FORWARD and action.stage + 1 < shape.stages:
        return Action(Op.SEND_ACTIVATION, action.stage, action.micro_batch, action.segment)
    if action.op in _GRADIENT_OPS and action.stage > 0:
        return Action(Op.SEND_GRADIENT, action.stage, action.micro_batch, action.segment)
    if action.op is Op.FORWARD and shape.head_ranks:
        return Action(Op.BROADCAST_HIDDEN, action.stage, action.micro_batch, action.segment)
    if action.op is Op.HEAD_FORWARD:
        return Action(Op.GATHER_STATISTICS, action.stage, action.micro_batch, action.segment)
    if action.op is Op.HEAD_BACKWARD:
        return Action(Op.REDUCE_GRADIENT, action.stage, action.micro_batch, action.segment)
    return None


def other_ends(message: Action, shape: PipelineShape) -> tuple[Action, ...]:
    """Return what must be posted for a message to complete: its counterpart, or a collective's on other ranks."""
    if not message.op.is_collective:
        return (counterpart(message),)
    return tuple(
        Action(message.op, stage, message.micro_batch, message.segment)
        for stage in shape.head_stages
        if stage != message.stage
    )


def counterpart(message: Action) -> Action:
    """Return the other end of a message between two stages: the receive of a send, or the send of a receive."""
    op, step = {
        Op.SEND_ACTIVATION: (Op.RECEIVE_ACTIVATION, 1),
        Op.RECEIVE_ACTIVATION: (Op.SEND_ACTIVATION, -1),
        Op.SEND_GRADIENT: (Op.RECEIVE_GRADIENT, -1),
        Op.RECEIVE_GRADIENT: (Op.SEND_GRADIENT, 1),
    }[message.op]
    return Action(op, message.stage + step, message.micro_batch, message.segment)


def channel(message: Action) -> tuple[int, int]:
    """Return a message's source and target stage. A channel's messages arrive in the order in which they are sent."""
    other = counterpart(message).stage
    if message.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT):
        return message.stage, other
    return other, message.stage
