"""Schedules as data: valid, free of deadlock, as quick and as small as the theory says, and refused where wrong."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuboid.errors import ConfigError
from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.dependencies import channel, counterpart, dependencies, fulfils, incoming, outgoing
from cuboid.seq1f1b.schedule.lowering import insert_messages, insert_messages_once_sent, lower
from cuboid.seq1f1b.schedule.schedules import SCHEDULES, PipelineShape, forwards_only
from cuboid.seq1f1b.schedule.simulator import Span, Timeline, peak_bytes, simulate
from cuboid.seq1f1b.schedule.validation import DeadlockError, ScheduleError, validate, validate_programs, walk
from proofs.former import former_programs
from traces import parse_action

shapes = st.builds(PipelineShape, st.integers(1, 16), st.integers(1, 32), st.integers(1, 16))
small_shapes = st.builds(PipelineShape, st.integers(2, 5), st.integers(1, 4), st.integers(1, 4)).filter(
    lambda shape: shape.units > 1
)
published = st.sampled_from(["gpipe", "seq1f1b"])
#: All closed rules but "1f1b", which has whole sequences alone.
unchunked = st.sampled_from(sorted(SCHEDULES.keys() - {"1f1b"}))
durations = st.fractions(Fraction(1, 8), 8, max_denominator=8)
numbers = st.integers(0, 999)

RECEIVES = (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT)
SENDS = (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)


def actions(text):
    return tuple(parse_action(word) for word in text.split())


def replaced(sequences, rank, changed):
    return (*sequences[:rank], tuple(changed), *sequences[rank + 1 :])


def one(_):
    return 1


def critical_path(shape, duration, transfer):
    """Length of the longest chain of dependencies if each rank could do all that is ready at once."""

    @cache
    def end(action):
        needs = dependencies(action, shape)
        return duration[action] + max((end(n) + transfer * (n.stage != action.stage) for n in needs), default=0)

    order = sorted(duration, key=lambda a: (a.op is not Op.FORWARD, a.stage, a.micro_batch, a.segment))
    return max(end(action) for action in order)


def list_schedule(placement, shape, split, priorities):
    """Some valid schedule of the stages on any ranks: whatever is ready, in an order that the priorities choose."""
    ops = [Op.FORWARD, *([Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT] if split else [Op.BACKWARD])]
    todo = [
        Action(op, stage, micro_batch, segment)
        for op in ops
        for stage in range(shape.stages)
        for micro_batch in range(shape.micro_batches)
        for segment in range(shape.segments)
    ]
    ranks, done = [[] for _ in range(max(placement) + 1)], set()
    for turn in range(len(todo)):
        ready = [action for action in todo if done.issuperset(dependencies(action, shape))]
        action = ready[priorities[turn % len(priorities)] % len(ready)]
        todo.remove(action)
        done.add(fulfils(action))
        ranks[placement[action.stage]].append(action)
    return tuple(map(tuple, ranks))


def run_threads(programs, shape, timeout_s=60.0):
    """Every rank a thread: the results pass through all stages and come to the end.

    Each action begins as one does that synchronises a CUDA device whose sends and receives are kernels: it waits until
    all messages that its rank has posted have been sent, and all that it has sent have been posted.
    """
    messages = [action for program in programs for action in program if not action.op.computes]
    posted = {channel(action): queue.Queue() for action in messages}
    happened = {action: threading.Event() for action in messages}
    here, stuck = {}, threading.Event()

    def run(program):
        under_way, receives, results, got = [], {}, {}, {}
        for action in program:
            for message in under_way:
                if stuck.is_set() or not happened[counterpart(message)].wait(timeout_s):
                    stuck.set()
                    raise DeadlockError(f"{action} waits for {counterpart(message)}")
            under_way = []
            if action.op in RECEIVES:
                receives[action] = queue.Queue(1)
                posted[channel(action)].put(receives[action])
                happened[action].set()
                under_way.append(action)
            elif action.op in SENDS:
                happened[action].set()
                buffer = posted[channel(action)].get(timeout=timeout_s)
                buffer.put((action, results.pop(dependencies(action, shape)[0])))
                under_way.append(action)
            else:
                receive, path = incoming(action, shape), ()
                if receive in receives:
                    sent, path = receives.pop(receive).get(timeout=timeout_s)
                    assert sent == counterpart(receive)
                elif receive is not None:
                    path = here.pop(counterpart(receive))
                results[fulfils(action)] = got[action] = (*path, action.stage)
                here[outgoing(action, shape)] = got[action]
        return got

    with ThreadPoolExecutor(len(programs)) as threads:
        paths = {action: path for got in threads.map(run, programs) for action, path in got.items()}
    for action, path in paths.items():
        last = shape.stages - 1
        if action.op is Op.FORWARD:
            assert path == tuple(range(action.stage + 1))
        elif action.op is not Op.WEIGHT_GRADIENT:
            assert path == tuple(range(last, action.stage - 1, -1))


def unit(action):
    return action.stage, action.micro_batch, action.segment


# Actions


@given(st.builds(Action, st.sampled_from(Op), numbers, numbers, numbers))
def test_actions_are_read_as_they_are_written(action):
    assert parse_action(str(action)) == action


def test_a_unit_depends_on_its_neighbours_in_the_pipeline_and_in_the_sequence():
    shape = PipelineShape(stages=3, micro_batches=2, segments=3)
    needs = {
        "F0.1.0": "",
        "F1.1.1": "F0.1.1 F1.1.0",
        "B1.1.1": "F1.1.1 B2.1.1 B1.1.2",
        "I1.1.1": "F1.1.1 B2.1.1 B1.1.2",
        "B2.1.2": "F2.1.2",
        "W1.1.1": "B1.1.1",
        "SA1.1.1": "F1.1.1",
        "RA1.1.1": "SA0.1.1",
        "SG1.1.1": "B1.1.1",
        "RG1.1.1": "SG2.1.1",
    }
    assert {text: dependencies(parse_action(text), shape) for text in needs} == {
        text: actions(names) for text, names in needs.items()
    }
    assert fulfils(parse_action("I1.1.1")) == parse_action("B1.1.1")


# The schedules


@pytest.mark.parametrize("field", ["stages", "micro_batches", "segments"])
def test_an_empty_pipeline_is_refused(field):
    with pytest.raises(ConfigError, match=field):
        PipelineShape(**{"stages": 1, "micro_batches": 1, "segments": 1, field: 0})


def test_1f1b_is_seq1f1b_of_one_segment_and_refuses_more():
    shape = PipelineShape(4, 6, 1)
    assert SCHEDULES["1f1b"](shape) == SCHEDULES["seq1f1b"](shape)
    with pytest.raises(ConfigError, match=r"pipeline\.segments.*seq1f1b"):
        SCHEDULES["1f1b"](PipelineShape(4, 6, 2))


def test_seq1f1b_is_the_published_order():
    last, first = reversed(SCHEDULES["seq1f1b"](PipelineShape(2, 2, 2)))
    assert first == actions("F0.0.0 F0.0.1 F0.1.0 B0.0.1 F0.1.1 B0.0.0 B0.1.1 B0.1.0")
    assert last == actions("F1.0.0 F1.0.1 B1.0.1 F1.1.0 B1.0.0 F1.1.1 B1.1.1 B1.1.0")


def check_schedule(name, shape, forward, backward):
    schedule = SCHEDULES[name](shape)
    validate(schedule, shape)
    lower(schedule, shape)
    for stage, rank in enumerate(schedule):
        in_flight = shape.stages - stage - 1 + shape.segments if name == "seq1f1b" else shape.units
        assert peak_bytes(rank, one) == min(in_flight, shape.units)
    timeline = simulate(schedule, shape, lambda action: forward if action.op is Op.FORWARD else backward)
    assert timeline.bubble == Fraction(shape.stages - 1, shape.units + shape.stages - 1)
    assert timeline.busy_s == (shape.units * (forward + backward),) * shape.stages


@pytest.mark.ci
@settings(max_examples=12)
@given(published, shapes, durations, durations)
def test_equal_units_have_the_published_bubble_and_units_in_flight(name, shape, forward, backward):
    check_schedule(name, shape, forward, backward)


@pytest.mark.slow
@settings(max_examples=200)
@given(published, shapes, durations, durations)
def test_equal_units_have_the_published_bubble_and_units_in_flight_everywhere(name, shape, forward, backward):
    check_schedule(name, shape, forward, backward)


@settings(max_examples=12)
@given(published, shapes.filter(lambda shape: shape.units < 40))
def test_the_schedules_receive_most_messages_one_computation_ahead(name, shape):
    schedule = SCHEDULES[name](shape)
    programs = lower(schedule, shape)
    assert programs == insert_messages(schedule, shape)
    for program in programs:
        order = {action: number for number, action in enumerate(program)}
        computations = [action for action in program if action.op.computes]
        for before, action in pairwise(computations):
            receive = incoming(action, shape)
            if receive is not None:
                early = action.op is Op.FORWARD or before.op is not Op.FORWARD
                assert (order[receive] < order[before]) == early
                assert order[receive] < order[action]


@settings(max_examples=30)
@given(unchunked, small_shapes)
def test_other_receives_one_computation_ahead_would_deadlock_or_gain_nothing(name, shape):
    """A gradient that is offered a buffer before the forward in front of its use keeps that forward waiting."""
    programs = list(lower(SCHEDULES[name](shape), shape))
    for rank, program in enumerate(programs):
        forwards = [i for i, (a, b) in enumerate(pairwise(program)) if a.op in SENDS and b.op is Op.RECEIVE_GRADIENT]
        if not forwards:
            continue
        sent = forwards[0]
        early = [*program[: sent - 1], program[sent + 1], *program[sent - 1 : sent + 1], *program[sent + 2 :]]
        with pytest.raises(DeadlockError, match=f"rank {rank} waits at {program[sent - 1]} for "):
            validate_programs(replaced(tuple(programs), rank, early), shape)
        return


def test_a_gradient_that_is_received_from_the_start_of_the_program_deadlocks_a_device_that_is_synchronised():
    """As programs were until November 2026: an activation and a gradient posted at the start, and always one ahead."""
    shape = PipelineShape(2, 1, 2)
    first = actions("RG0.0.1 F0.0.0 SA0.0.0 F0.0.1 SA0.0.1 RG0.0.0 B0.0.1 B0.0.0")
    last = actions("RA1.0.0 RA1.0.1 F1.0.0 F1.0.1 B1.0.1 SG1.0.1 B1.0.0 SG1.0.0")
    stalls = r"rank 0 waits at F0\.0\.0 for SG1\.0\.1; rank 1 waits at RA1\.0\.1 for SA0\.0\.0"
    with pytest.raises(DeadlockError, match=stalls):
        validate_programs((first, last), shape)
    with pytest.raises((DeadlockError, queue.Empty)):
        run_threads((first, last), shape, timeout_s=0.2)
    run_threads(lower(SCHEDULES["seq1f1b"](shape), shape), shape)


@given(small_shapes)
def test_evaluation_runs_forward_only(shape):
    schedule = forwards_only(shape, range(shape.stages))
    validate(schedule, shape, backward=False)
    programs = lower(schedule, shape)
    assert sum(action.op is Op.SEND_ACTIVATION for program in programs for action in program) == (
        (shape.stages - 1) * shape.units
    )
    assert simulate(schedule, shape, one).makespan_s == shape.units + shape.stages - 1
    with pytest.raises(ScheduleError, match=r"B0\.0\.0 is missing"):
        validate(schedule, shape)


# Messages


def test_a_program_receives_behind_a_computation_and_sends_at_once():
    shape = PipelineShape(2, 1, 2)
    first, last = lower(SCHEDULES["seq1f1b"](shape), shape)
    assert first == actions("F0.0.0 SA0.0.0 F0.0.1 SA0.0.1 RG0.0.1 RG0.0.0 B0.0.1 B0.0.0")
    assert last == actions("RA1.0.0 RA1.0.1 F1.0.0 F1.0.1 B1.0.1 SG1.0.1 B1.0.0 SG1.0.0")
    steady = lower(SCHEDULES["1f1b"](PipelineShape(3, 3, 1)), PipelineShape(3, 3, 1))[1]
    assert steady == actions(
        "RA1.0.0 RA1.1.0 F1.0.0 SA1.0.0 F1.1.0 SA1.1.0 RG1.0.0 RA1.2.0 B1.0.0 SG1.0.0 "
        "F1.2.0 SA1.2.0 RG1.1.0 RG1.2.0 B1.1.0 SG1.1.0 B1.2.0 SG1.2.0"
    )


def test_where_one_computation_ahead_deadlocks_receives_follow_the_sends():
    shape = PipelineShape(2, 4, 1)
    schedule = (SCHEDULES["gpipe"](shape)[0], SCHEDULES["1f1b"](shape)[1])
    with pytest.raises(DeadlockError, match=r"rank 0 waits at F0\.3\.0 for RA1\.2\.0; rank 1 waits at"):
        validate_programs(insert_messages(schedule, shape), shape)
    programs = lower(schedule, shape)
    assert programs == insert_messages_once_sent(schedule, shape)
    run_threads(programs, shape)


def makespan(programs, shape, duration, transfer):
    """Of programs whose messages begin to travel when they are sent and posted."""
    clocks, when = [0.0] * len(programs), {}

    def needs(action):
        arrivals = [incoming(action, shape)] if action.op.computes else [] if action.op in RECEIVES else [action]
        ends = [receive for receive in arrivals if receive in messages and action.op.computes]
        return [*ends, *map(counterpart, ends), *(d for d in dependencies(action, shape) if d.stage == action.stage)]

    messages = {action for program in programs for action in program if not action.op.computes}
    for rank, action in walk(programs, needs):
        receive = incoming(action, shape) if action.op.computes else None
        if receive in when:
            clocks[rank] = max(clocks[rank], max(when[receive], when[counterpart(receive)]) + transfer)
        clocks[rank] += duration(action) if action.op.computes else 0
        when[action] = clocks[rank]
    return max(clocks)


@pytest.mark.parametrize(("slow_stage", "most"), [(None, 0.002), (0, 0.011), (3, 0.001)])
def test_receives_that_are_posted_later_than_they_could_be_cost_little(slow_stage, most):
    shape = PipelineShape(4, 4, 4)

    def duration(action):
        return (1 if action.op is Op.FORWARD else 2) * (1.3 if action.stage == slow_stage else 1)

    before = makespan(former_programs(SCHEDULES["seq1f1b"](shape), shape), shape, duration, 0.1)
    now = makespan(lower(SCHEDULES["seq1f1b"](shape), shape), shape, duration, 0.1)
    assert 0 <= now / before - 1 < most * 1.1


@given(unchunked, small_shapes)
def test_receives_that_follow_the_sends_are_never_blocked(name, shape):
    validate_programs(insert_messages_once_sent(SCHEDULES[name](shape), shape), shape)


@settings(max_examples=10)
@given(unchunked, small_shapes)
def test_threads_that_synchronise_their_device_at_every_action_come_to_the_end(name, shape):
    run_threads(lower(SCHEDULES[name](shape), shape), shape)


# Placements and split backwards to come


placements = st.sampled_from([(0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2), (0, 0, 1), (1, 0)])


@settings(max_examples=50)
@given(placements, st.integers(1, 3), st.integers(1, 3), st.booleans(), st.lists(numbers, min_size=1), durations)
def test_any_order_on_any_placement_can_be_lowered_and_simulated(
    placement, micro_batches, segments, split, priorities, gradient
):
    shape = PipelineShape(len(placement), micro_batches, segments)
    schedule = list_schedule(placement, shape, split, priorities)
    validate(schedule, shape)
    programs = lower(schedule, shape)
    for rank, program in enumerate(programs):
        assert tuple(action for action in program if action.op.computes) == schedule[rank]
        for action in program:
            if not action.op.computes:
                assert placement[counterpart(action).stage] != rank
    run_threads(programs, shape)
    timeline = simulate(schedule, shape, lambda action: 1 if action.op is Op.FORWARD else gradient)
    assert timeline.makespan_s >= max(timeline.busy_s)


def test_a_v_placement_by_hand():
    shape = PipelineShape(stages=4, micro_batches=1, segments=2)
    schedule = (
        actions("F0.0.0 F0.0.1 F3.0.0 F3.0.1 B3.0.1 B3.0.0 B0.0.1 B0.0.0"),
        actions("F1.0.0 F2.0.0 F1.0.1 F2.0.1 B2.0.1 B1.0.1 B2.0.0 B1.0.0"),
    )
    validate(schedule, shape)
    timeline = simulate(schedule, shape, one, kept_bytes=lambda action: 10 ** (action.stage // 2))
    assert [[span.start_s for span in rank] for rank in timeline.spans] == [
        [0, 1, 3, 5, 6, 7, 9, 11],
        [1, 2, 3, 4, 7, 8, 9, 10],
    ]
    assert timeline.makespan_s == 12
    assert timeline.bubbles == (1 - 8 / 12, 1 - 8 / 12)
    assert timeline.peak_bytes == (22, 22)
    assert lower(schedule, shape)[1] == actions(
        "RA1.0.0 RA1.0.1 F1.0.0 F2.0.0 SA2.0.0 F1.0.1 F2.0.1 SA2.0.1 "
        "RG2.0.1 RG2.0.0 B2.0.1 B1.0.1 SG1.0.1 B2.0.0 B1.0.0 SG1.0.0"
    )


def test_a_split_backward_by_hand():
    shape = PipelineShape(stages=2, micro_batches=2, segments=1)
    schedule = (
        actions("F0.0.0 F0.1.0 I0.0.0 W0.0.0 I0.1.0 W0.1.0"),
        actions("F1.0.0 I1.0.0 F1.1.0 W1.0.0 I1.1.0 W1.1.0"),
    )
    validate(schedule, shape)
    timeline = simulate(schedule, shape, one, kept_bytes=one)
    assert [[span.start_s for span in rank] for rank in timeline.spans] == [[0, 1, 3, 4, 6, 7], [1, 2, 3, 4, 5, 6]]
    # A unit's activations are kept for its W.
    assert timeline.peak_bytes == (2, 2)
    assert lower(schedule, shape)[1] == actions(
        "RA1.0.0 F1.0.0 RA1.1.0 I1.0.0 SG1.0.0 F1.1.0 W1.0.0 I1.1.0 SG1.1.0 W1.1.0"
    )
    mixed = replaced(schedule, 0, actions("F0.0.0 F0.1.0 I0.0.0 W0.0.0 B0.1.0"))
    validate(mixed, shape)
    with pytest.raises(ScheduleError, match=r"W0\.1\.0 is missing"):
        validate(replaced(schedule, 0, schedule[0][:-1]), shape)
    with pytest.raises(ScheduleError, match=r"B0\.1\.0 does what W0\.1\.0 does too"):
        validate(replaced(mixed, 0, (*mixed[0], parse_action("W0.1.0"))), shape)
    with pytest.raises(ScheduleError, match=r"W0\.0\.0 comes before B0\.0\.0"):
        validate(replaced(schedule, 0, actions("F0.0.0 F0.1.0 W0.0.0 I0.0.0 I0.1.0 W0.1.0")), shape)


# The simulator


@settings(max_examples=50)
@given(unchunked, small_shapes, st.lists(durations, min_size=7, max_size=7), durations)
def test_no_simulated_step_beats_the_critical_path(name, shape, pattern, transfer):
    schedule = SCHEDULES[name](shape)
    everything = [action for rank in schedule for action in rank]
    duration = {action: pattern[i % len(pattern)] for i, action in enumerate(everything)}
    free = simulate(schedule, shape, duration.__getitem__)
    slow = simulate(schedule, shape, duration.__getitem__, transfer_s=lambda _: transfer)
    assert free.makespan_s >= max(critical_path(shape, duration, 0), *free.busy_s)
    assert slow.makespan_s >= max(critical_path(shape, duration, transfer), free.makespan_s)
    assert free.busy_s == slow.busy_s
    for rank in free.spans:
        assert all(span.end_s <= following.start_s for span, following in pairwise(rank))


def test_a_transfer_delays_only_who_waits_for_it():
    shape = PipelineShape(2, 1, 2)
    sent = []

    def transfer_s(action):
        sent.append(str(action))
        return 3

    timeline = simulate(SCHEDULES["seq1f1b"](shape), shape, one, transfer_s=transfer_s)
    assert [[span.start_s for span in rank] for rank in timeline.spans] == [[0, 1, 10, 11], [4, 5, 6, 7]]
    assert sorted(sent) == ["B1.0.0", "B1.0.1", "F0.0.0", "F0.0.1"]


def test_a_timeline_may_be_measured():
    spans = ("F0.0.0", 100.0, 101.0), ("SA0.0.0", 101.0, 103.0), ("B0.0.0", 106.0, 108.0)
    rank = tuple(Span(parse_action(name), start, end) for name, start, end in spans)
    timeline = Timeline((rank,), (17,))
    assert (timeline.makespan_s, timeline.busy_s, timeline.bubble) == (8.0, (3.0,), 1 - 3 / 8)
    assert Timeline(((), ()), (0, 0)).bubble == 0


# What is wrong is refused


@given(unchunked, small_shapes, numbers, numbers)
def test_a_unit_that_runs_backward_first_is_refused(name, shape, rank, which):
    schedule = SCHEDULES[name](shape)
    rank %= len(schedule)
    changed = list(schedule[rank])
    forwards = [action for action in changed if action.op is Op.FORWARD]
    forward = forwards[which % len(forwards)]
    backward = Action(Op.BACKWARD, *unit(forward))
    i, j = changed.index(forward), changed.index(backward)
    changed[i], changed[j] = backward, forward
    with pytest.raises(ScheduleError, match=f"on rank {rank}, .*({forward}|{backward})"):
        validate(replaced(schedule, rank, changed), shape)


@given(unchunked, small_shapes, numbers, numbers, numbers)
def test_swapped_actions_are_refused_or_still_right(name, shape, rank, first, second):
    """The validator and the simulator, which only ever runs what can be run, judge alike."""
    schedule = SCHEDULES[name](shape)
    rank %= len(schedule)
    changed = list(schedule[rank])
    i, j = first % len(changed), second % len(changed)
    changed[i], changed[j] = changed[j], changed[i]
    schedule = replaced(schedule, rank, changed)
    try:
        simulate(schedule, shape, one)
    except DeadlockError:
        with pytest.raises(ScheduleError, match=r"[FB]\d+\.\d+\.\d+"):
            validate(schedule, shape)
    else:
        validate(schedule, shape)


@given(unchunked, small_shapes, numbers, numbers, numbers)
def test_missing_and_repeated_actions_are_refused(name, shape, rank, which, other):
    schedule = SCHEDULES[name](shape)
    rank, other = rank % len(schedule), other % len(schedule)
    which %= len(schedule[rank])
    action = schedule[rank][which]
    with pytest.raises(ScheduleError, match=f"{action} is missing"):
        validate(replaced(schedule, rank, schedule[rank][:which] + schedule[rank][which + 1 :]), shape)
    with pytest.raises(ScheduleError, match=f"{action} is done more than once"):
        validate(replaced(schedule, other, (*schedule[other], action)), shape)


def test_ranks_that_wait_for_each_other_are_named():
    shape = PipelineShape(2, 2, 1)
    schedule = (actions("F0.0.0 B0.0.0 F0.1.0 B0.1.0"), actions("F1.0.0 F1.1.0 B1.0.0 B1.1.0"))
    with pytest.raises(DeadlockError, match=r"rank 0 waits at B0.0.0 for B1.0.0; rank 1 waits at F1.1.0 for F0.1.0"):
        validate(schedule, shape)


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        ("F0.0.0 F1.0.0", "B1.0.0 B0.0.0", r"B1\.0\.0 is on rank 1, but stage 1 is on rank 0"),
        ("F0.0.0 B0.0.0", "F1.0.0 B1.0.0 F2.0.0", r"F2\.0\.0 is outside"),
        ("F0.0.0 SA0.0.0 B0.0.0", "F1.0.0 B1.0.0", r"SA0\.0\.0 doesn't belong"),
    ],
)
def test_actions_that_do_not_belong_are_refused(first, last, message):
    with pytest.raises(ScheduleError, match=message):
        validate((actions(first), actions(last)), PipelineShape(2, 1, 1))


def test_lowering_refuses_what_is_not_valid():
    shape = PipelineShape(2, 2, 1)
    first, last = SCHEDULES["1f1b"](shape)
    with pytest.raises(ScheduleError, match=r"F0\.0\.0 is missing"):
        lower((first[1:], last), shape)


@given(unchunked, small_shapes, numbers, st.sampled_from(SENDS + RECEIVES))
def test_another_order_at_one_end_of_a_channel_is_refused(name, shape, which, op):
    programs = lower(SCHEDULES[name](shape), shape)
    rank, indices = next(
        (rank, places)
        for rank, program in enumerate(programs)
        if len(places := [i for i, action in enumerate(program) if action.op is op]) > 1
    )
    which %= len(indices) - 1
    i, j = indices[which : which + 2]
    changed = list(programs[rank])
    changed[i], changed[j] = changed[j], changed[i]
    with pytest.raises(ScheduleError, match=f"({changed[i]}|{changed[j]}).*the orders must be the same"):
        validate_programs(replaced(programs, rank, changed), shape)


@given(unchunked, small_shapes, numbers, numbers)
def test_messages_without_a_counterpart_or_a_use_are_refused(name, shape, rank, which):
    programs = lower(SCHEDULES[name](shape), shape)
    rank %= len(programs)
    messages = [action for action in programs[rank] if not action.op.computes]
    message = messages[which % len(messages)]
    without = [tuple(action for action in program if action != message) for program in programs]
    with pytest.raises(ScheduleError, match=rf"{message}|{counterpart(message)}"):
        validate_programs(without, shape)
    neither = [tuple(action for action in program if action != counterpart(message)) for program in without]
    receive = message if message.op in RECEIVES else counterpart(message)
    with pytest.raises(DeadlockError, match=f"for {receive}"):
        validate_programs(neither, shape)
    with pytest.raises(ScheduleError, match=f"{message} is done more than once"):
        validate_programs(replaced(programs, rank, (*programs[rank], message)), shape)
    useless = Action(Op.SEND_GRADIENT, 0, 0, 0)
    with pytest.raises(ScheduleError, match=r"SG0\.0\.0 carries nothing"):
        validate_programs(replaced(programs, 0, (*programs[0], useless)), shape)
