"""Schedules that are generated: valid, within their memory, free of deadlock, as short as they were said to be."""

import json
import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuboid.errors import ConfigError
from cuboid.seq1f1b.schedule.actions import Op
from cuboid.seq1f1b.schedule.choice import (
    CHUNKED,
    NAMES,
    MemoryLimit,
    PlacedCosts,
    Request,
    choose_schedule,
    compare_schedules,
    name_of_placement,
    place_stages,
)
from cuboid.seq1f1b.schedule.list_scheduling import ActionCosts, BackwardMode, list_schedule
from cuboid.seq1f1b.schedule.lowering import lower
from cuboid.seq1f1b.schedule.schedules import (
    PipelineShape,
    interleaved_placement,
    seq1f1b_interleaved,
    v_placement,
)
from cuboid.seq1f1b.schedule.simulator import peak_bytes, simulate
from cuboid.seq1f1b.schedule.validation import validate

EQUAL, ATTENTION_HEAVY = (1.0, 1.0, 1.0), (4.0, 8.5, 1.0)


def timing(times, chunks=1):
    """Durations of F, I and W (and of B, both) of a rank's layers, divided by its chunks."""
    forward, inputs, weights = times
    table = {Op.FORWARD: forward, Op.INPUT_GRADIENT: inputs, Op.WEIGHT_GRADIENT: weights, Op.BACKWARD: inputs + weights}
    return lambda action: table[action.op] / chunks


def equal_shares(segments, chunks):
    return lambda _: 1 / (segments * chunks)


def request(ranks, micro_batches, segments, limit=None, chunks=1, times=EQUAL, transfer=0.0):
    def costs(rank_of):
        chunks_per_rank = len(rank_of) // ranks
        return PlacedCosts(
            ActionCosts(timing(times, chunks_per_rank), equal_shares(segments, chunks_per_rank), transfer)
        )

    return Request(ranks, micro_batches, segments, costs, limit and MemoryLimit(sequences=limit), chunks)


def check(schedule, shape, limits, costs):
    """Valid, so free of deadlock, and within the limits; messages can be put in; orders are those of 1F1B."""
    validate(schedule, shape)
    split = any(action.op is Op.WEIGHT_GRADIENT for actions in schedule for action in actions)
    frees = costs.input_gradient_frees if split else 0
    for actions, limit in zip(schedule, limits, strict=True):
        assert peak_bytes(actions, costs.kept, frees) <= limit * (1 + 1e-6)
    for op in (Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT):
        for stage in range(shape.stages):
            order = [
                (a.micro_batch, -a.segment) for actions in schedule for a in actions if a.stage == stage and a.op is op
            ]
            assert order == sorted(order)


@st.composite
def cases(draw, most_ranks=5, most_chunks=3, most_micro_batches=5, most_segments=4):
    ranks, chunks = draw(st.integers(1, most_ranks)), draw(st.integers(1, most_chunks))
    place = draw(st.sampled_from([interleaved_placement, v_placement]))
    shape = PipelineShape(ranks * chunks, draw(st.integers(1, most_micro_batches)), draw(st.integers(1, most_segments)))
    rank_of = place(ranks, chunks)
    times = draw(st.lists(st.integers(0, 9), min_size=5, max_size=5))
    sizes = draw(st.lists(st.integers(1, 9), min_size=3, max_size=3))
    # Any numbers that differ between stages and segments.
    weights = {
        (stage, segment): sizes[(stage + segment) % 3]
        for stage in range(shape.stages)
        for segment in range(shape.segments)
    }
    totals = [0] * ranks
    for (stage, _), weight in weights.items():
        totals[rank_of[stage]] += weight
    costs = ActionCosts(
        lambda a: times[(len(a.op.value) + ord(a.op.value) + a.stage + 2 * a.segment) % 5],
        lambda a: weights[a.stage, a.segment] / totals[rank_of[a.stage]],
        draw(st.sampled_from([0.0, 0.5, 3.0])),
        draw(st.sampled_from([0.0, 0.23, 1.0, -1.0])),
    )
    # The headroom of an input gradient that needs more than it frees.
    extra = max(0.0, -costs.input_gradient_frees) * max(
        weight / totals[rank_of[stage]] for (stage, _), weight in weights.items()
    )
    limits = [1 + extra + draw(st.sampled_from([0.0, 0.1, 0.5, 3.0]))] * ranks
    return shape, rank_of, costs, limits


def check_case(case, modes):
    shape, rank_of, costs, limits = case
    schedule = list_schedule(shape, rank_of, costs, limits, modes)
    check(schedule, shape, limits, costs)
    assert [next(iter({rank_of[a.stage] for a in actions})) for actions in schedule] == list(range(len(limits)))
    return schedule


@settings(max_examples=40)
@given(cases(), st.sampled_from(BackwardMode))
def test_generated_schedules_are_valid_and_keep_to_the_limit(case, mode):
    check_case(case, (mode,))


@settings(max_examples=10)
@given(cases(most_ranks=3, most_micro_batches=3, most_segments=3))
def test_messages_can_be_put_into_generated_schedules(case):
    schedule = check_case(case, tuple(BackwardMode))
    programs = lower(schedule, case[0])
    assert [tuple(a for a in program if a.op.computes) for program in programs] == list(schedule)


@pytest.mark.slow
@settings(max_examples=400)
@given(cases(8, 4, 9, 6), st.sampled_from(BackwardMode))
def test_generated_schedules_are_valid_and_keep_to_the_limit_everywhere(case, mode):
    check_case(case, (mode,))


@settings(max_examples=20)
@given(cases())
def test_the_same_input_gives_the_same_schedule(case):
    shape, rank_of, costs, limits = case
    assert list_schedule(shape, rank_of, costs, limits) == list_schedule(shape, rank_of, costs, limits)


def test_a_limit_below_one_micro_batch_is_rejected_with_what_would_work():
    costs = ActionCosts(timing(EQUAL), equal_shares(4, 1))
    with pytest.raises(
        ConfigError, match=r"limit of 0\.9 sequences.*rank 0.*micro-batch.*, 1 sequences; give at least"
    ):
        list_schedule(PipelineShape(2, 2, 4), (0, 1), costs, [0.9, 0.9])
    more = ActionCosts(timing(EQUAL), equal_shares(4, 1), input_gradient_frees=-2.0)
    with pytest.raises(ConfigError, match=r"rank 1.*, 1\.5 sequences"):
        list_schedule(PipelineShape(2, 2, 4), (0, 1), more, [1.5, 1.4])


@pytest.mark.sample(1, ci=2)
@pytest.mark.parametrize(
    ("name", "segments", "chunks", "limit", "times", "most"),
    [
        ("zero_bubble", 8, 1, 2.0, EQUAL, 0.06),
        ("zero_bubble-interleaved", 8, 2, 2.0, EQUAL, 0.02),
        ("zero_bubble-v", 8, 2, 2.0, EQUAL, 0.02),
        ("zero_bubble-interleaved", 8, 2, 1.5, EQUAL, 0.05),
        ("zero_bubble-v", 8, 2, 1.5, EQUAL, 0.05),
        ("zero_bubble-interleaved", 16, 2, 1.5, EQUAL, 0.015),
        ("zero_bubble-v", 16, 2, 1.5, EQUAL, 0.015),
        ("zero_bubble-interleaved", 16, 2, 1.5, ATTENTION_HEAVY, 0.065),
        ("zero_bubble-interleaved", 16, 2, 2.0, ATTENTION_HEAVY, 0.025),
    ],
)
def test_the_bubble_of_eight_stages_and_eight_micro_batches(name, segments, chunks, limit, times, most):
    chosen = choose_schedule(name, request(8, 8, segments, limit, chunks, times))
    assert chosen.timeline.bubble <= most
    assert chosen.peak_micro_batches <= limit + 1e-9


def test_weight_gradients_of_a_micro_batch_come_together_where_there_is_memory():
    shape, costs = PipelineShape(4, 4, 4), ActionCosts(timing(EQUAL), equal_shares(4, 1))
    schedule = list_schedule(shape, range(4), costs, [4.0] * 4, (BackwardMode.SPLIT_BY_MICRO_BATCH,))
    for actions in schedule:
        places = [index for index, action in enumerate(actions) if action.op is Op.WEIGHT_GRADIENT]
        for micro_batch in range(4):
            run = places[4 * micro_batch : 4 * micro_batch + 4]
            assert run == list(range(run[0], run[0] + 4))


def test_messages_that_take_long_are_counted():
    slow = choose_schedule("zero_bubble", request(4, 8, 4, 2.0, transfer=1.0))
    unaware = choose_schedule("zero_bubble", request(4, 8, 4, 2.0))
    delayed = simulate(unaware.schedule, unaware.shape, timing(EQUAL), transfer_s=lambda _: 1.0)
    assert unaware.timeline.makespan_s < slow.timeline.makespan_s < delayed.makespan_s


# Seq1F1B-I


def check_interleaved(ranks, chunks, micro_batches, segments):
    shape = PipelineShape(ranks * chunks, micro_batches, segments)
    schedule = seq1f1b_interleaved(shape, ranks)
    validate(schedule, shape)
    timeline = simulate(schedule, shape, lambda action: 1 if action.op is Op.FORWARD else 2)
    if micro_batches * segments >= ranks and micro_batches >= -(-ranks // segments):
        expected = (ranks - 1) / (chunks * segments * micro_batches + ranks - 1)
        assert timeline.bubble == pytest.approx(expected, abs=1e-12)
    if chunks == 1:
        assert schedule[-1] == choose_schedule("seq1f1b", request(ranks, micro_batches, segments)).schedule[-1]


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 9), st.integers(1, 6))
def test_interleaved_stages_have_the_published_bubble_whatever_divides_what(ranks, chunks, micro_batches, segments):
    check_interleaved(ranks, chunks, micro_batches, segments)


@pytest.mark.slow
def test_interleaved_stages_have_the_published_bubble_everywhere():
    for case in product(range(1, 8), range(1, 5), range(1, 9), range(1, 6)):
        check_interleaved(*case)


def test_interleaved_stages_warm_up_as_published():
    for rank, actions in enumerate(seq1f1b_interleaved(PipelineShape(8, 4, 2), 4)):
        first = next(index for index, action in enumerate(actions) if action.op is Op.BACKWARD)
        # In the steady state a forward comes before each backward.
        assert first == (2 - 1) * 4 + 2 * (4 - rank - 1) + 2 - 1 + 1


def test_stages_that_ranks_cannot_share_are_rejected():
    with pytest.raises(ConfigError, match="5 stages can't be placed on 2 ranks"):
        seq1f1b_interleaved(PipelineShape(5, 1, 1), 2)


# The choice by name


@pytest.mark.parametrize("name", NAMES)
def test_every_name_gives_a_valid_schedule(name):
    chosen = choose_schedule(name, request(3, 4, 1, chunks=2 if name in CHUNKED else 1))
    validate(chosen.schedule, chosen.shape)
    assert chosen.name == name or name.startswith("auto")
    assert chosen.peak_micro_batches == pytest.approx(max(chosen.timeline.peak_bytes))


def test_auto_takes_the_shortest_that_fits():
    def bubble(name, chunks):
        return choose_schedule(name, request(4, 4, 4, 1.5, chunks)).timeline.makespan_s

    chosen = choose_schedule("auto", request(4, 4, 4, 1.5, 2))
    others = [bubble("zero_bubble", 1), *(bubble(name, 2) for name in CHUNKED if name != "seq1f1b-interleaved")]
    assert chosen.timeline.makespan_s <= min(others)
    assert chosen.peak_micro_batches <= 1.5 + 1e-9
    with pytest.raises(ConfigError, match=r"limit of 0\.5 sequences"):
        choose_schedule("auto", request(4, 4, 4, 0.5, 2))


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("ranks", "segments"), [(4, 1), (8, 4), (8, 8)])
def test_without_a_limit_auto_keeps_no_more_than_whole_stages(ranks, segments):
    compared = compare_schedules("auto", request(ranks, 8, segments, chunks=2))
    usual = choose_schedule("seq1f1b", request(ranks, 8, segments)).peak_micro_batches
    assert max(chosen.peak_micro_batches for chosen in compared.fitting) <= usual + 1e-6
    interleaved = choose_schedule("seq1f1b-interleaved", request(ranks, 8, segments, chunks=2))
    assert ("seq1f1b-interleaved of 2 chunks" in compared.rejected) == (interleaved.peak_micro_batches > usual)


def test_schedules_with_the_same_places_stand_for_one_another():
    compared = compare_schedules("auto-interleaved", request(4, 4, 4, 2.0, chunks=3))
    assert {str(chosen) for chosen in compared.fitting} | compared.rejected.keys() == {
        "seq1f1b-interleaved of 3 chunks",
        "zero_bubble-interleaved of 3 chunks",
    }
    for name in NAMES:
        alike = name_of_placement(name)
        chunks = 3 if name in CHUNKED else 1
        assert place_stages(alike, 4, chunks) == place_stages(name, 4, chunks)
        assert name_of_placement(alike) == alike


def test_further_chunks_must_be_worth_it():
    """With many short units nobody waits, however many chunks there are."""
    compared = compare_schedules("auto", request(2, 8, 8, 2.0, chunks=(2, 3)))
    shortest = min(chosen.timeline.makespan_s for chosen in compared.fitting)
    assert compared.best.chunks == 1
    assert shortest < compared.best.timeline.makespan_s <= 1.01 * shortest
    assert choose_schedule("auto", request(2, 8, 8, 2.0, 3)).chunks == 3
    few = compare_schedules("auto", request(4, 1, 2, 1.0, chunks=(2, 3)))
    assert few.best.chunks > 1
    assert few.best.timeline.makespan_s <= 1.01 * min(chosen.timeline.makespan_s for chosen in few.fitting)


def test_a_comparison_says_what_the_others_would_take():
    said = str(compare_schedules("auto", request(4, 4, 4, 1.5, 2)))
    best, *others = said.split("; ")
    assert re.fullmatch(r"zero_bubble-\w+ of 2 chunks: \d+\.\d% idle, 1\.\d\d sequences kept", best)
    assert "not seq1f1b: the schedule" in said
    assert any(re.fullmatch(r"zero_bubble takes \+\d+\.\d%", other) for other in others)


def test_a_formula_that_needs_more_than_the_limit_is_rejected():
    with pytest.raises(
        ConfigError, match=r'"seq1f1b" keeps up to 1\.75 sequences .* rank 0, .*limit of 1\.5 sequences'
    ):
        choose_schedule("seq1f1b", request(4, 8, 4, 1.5))


@pytest.mark.parametrize(
    ("name", "chunks", "problem"),
    [
        ("zero_bubble", 2, "one chunk on each rank; with 2 chunks, take zero_bubble-interleaved or zero_bubble-v"),
        ("gpipe", 3, "one chunk on each rank; with 3 chunks"),
        ("zero_bubble-v", 1, 'give 2 chunks or more, or take "zero_bubble"'),
    ],
)
def test_chunks_and_schedules_that_do_not_match_are_rejected(name, chunks, problem):
    with pytest.raises(ConfigError, match=problem):
        choose_schedule(name, request(2, 2, 2, chunks=chunks))


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (1.5, MemoryLimit(sequences=1.5)),
        ("2", MemoryLimit(sequences=2.0)),
        ("12 GiB", MemoryLimit(bytes=12 * 2**30)),
        ("0.5GiB", MemoryLimit(bytes=2**29)),
    ],
)
def test_memory_limits_are_read(text, limit):
    assert MemoryLimit.parse(text) == limit


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "nan", "inf", "12 GB", "1.5 GiB more"])
def test_other_texts_are_no_memory_limits(text):
    with pytest.raises(ConfigError, match=r"memory_limit is .*; write a number of sequences such as 1\.5"):
        MemoryLimit.parse(text)


def test_a_limit_in_bytes_is_each_ranks_own():
    def costs(rank_of):
        del rank_of
        return PlacedCosts(ActionCosts(timing(EQUAL), equal_shares(2, 1)), (50.0, 100.0))

    chosen = choose_schedule("zero_bubble", Request(2, 4, 2, costs, MemoryLimit(bytes=100)))
    assert chosen.timeline.peak_bytes[1] <= 1 < chosen.timeline.peak_bytes[0] <= 2


def test_memory_follows_the_halves_of_a_backward():
    shape = PipelineShape(1, 1, 1)
    schedule = list_schedule(shape, (0,), ActionCosts(timing(EQUAL), lambda _: 1.0), [1.0], (BackwardMode.SPLIT,))
    timeline = simulate(schedule, shape, timing(EQUAL), kept_bytes=lambda _: 100, input_gradient_frees=0.25)
    assert timeline.memory == (((0, 100), (2, 75), (3, 0)),)
    assert timeline.peak_bytes == (100,)


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize(
    ("name", "chunks", "limit", "gain"),
    [
        ("1f1b", 1, None, 0.0),
        ("seq1f1b", 1, None, 0.0),
        ("zero_bubble", 1, 2.0, 0.0),
        ("seq1f1b-interleaved", 2, None, 0.0),
        ("zero_bubble-interleaved", 2, 2.0, 0.018),
        ("zero_bubble-v", 2, 2.0, 0.018),
    ],
)
def test_ranks_that_wait_for_all_at_the_end_lose_little(name, chunks, limit, gain):
    """Two steps of which each rank begins the second when it is done with the first: the next one's first forwards are
    on the rank whose backwards are the last, or nearly so."""
    segments = 1 if name == "1f1b" else 8
    chosen = choose_schedule(name, request(8, 8, segments, limit, chunks))
    again = tuple(
        (*actions, *(action._replace(micro_batch=action.micro_batch + 8) for action in actions))
        for actions in chosen.schedule
    )
    shape = PipelineShape(8 * chunks, 16, segments)
    freely_s = simulate(again, shape, timing(EQUAL, chunks)).makespan_s - chosen.timeline.makespan_s
    assert 1 - freely_s / chosen.timeline.makespan_s == pytest.approx(gain, abs=0.001)


# The command line


@pytest.fixture
def numbers(tmp_path, capsys):
    """Runs ``cuboid timeline --json``; returns what is written."""
    from cuboid.cli import commands

    def run(*arguments):
        commands(
            ["timeline", "--output", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.json"), *map(str, arguments)],
            standalone_mode=False,
        )
        assert "drawn in" in capsys.readouterr().out
        return json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))

    return run


@pytest.mark.ci
def test_the_command_writes_the_numbers_of_the_issue(numbers):
    shape = ("--stages", 8, "--micro-batches", 8)
    printed = numbers(*shape, "--segments", 8, "--schedule", "zero_bubble", "--memory-limit", 2)
    assert printed["bubble"] <= 0.06
    assert printed["peak_micro_batches"] <= 2.0 + 1e-9
    assert printed["schedule"] == "zero_bubble"
    heavy = ("--segments", 16, "--memory-limit", 1.5, "--durations", "4,8.5,1")
    assert numbers(*shape, *heavy, "--schedule", "zero_bubble-interleaved", "--chunks", 2)["bubble"] <= 0.065


def test_the_command_chooses_by_a_models_costs(numbers, tmp_path):
    from transformers import LlamaConfig

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "vocab_size": 131,
    }
    LlamaConfig(**sizes, max_position_embeddings=4096).save_pretrained(tmp_path)
    model = ("--model", tmp_path, "--seq-len", 4096, "--stages", 2, "--micro-batches", 4)
    printed = numbers(*model, "--schedule", "auto", "--memory-limit", "1GiB")
    assert max(printed["peak_bytes_by_rank"]) <= 2**30
    assert printed["bubble"] <= numbers(*model)["bubble"]
    printed = numbers(*model, "--schedule", "auto", "--chunks", "auto", "--micro-batches", 2)
    # Eight layers on two ranks: four chunks at most.
    assert len(printed["compared"]) + len(printed["rejected"]) == 2 + 3 * 3
    chosen = printed["schedule"] + (f" of {printed['chunks']} chunks" if printed["chunks"] > 1 else "")
    assert printed["compared"][chosen] == printed["makespan"] <= 1.01 * min(printed["compared"].values())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--memory-limit", "many"), "memory_limit is 'many'"),
        (("--memory-limit", "1GiB"), "give it in sequences"),
        (("--durations", "1,2"), "three times such as"),
        (("--durations", "1,2,3", "--backward-ratio", "3"), "neither"),
        (("--schedule", "zero_bubble", "--memory-limit", "0.5"), "give at least that"),
        (("--schedule", "zero_bubble-v", "--chunks", "1"), "2 chunks or more"),
        (("--schedule", "zero_bubble-v", "--chunks", "auto"), "for --schedule auto"),
        (("--schedule", "auto", "--chunks", "0"), "neither auto nor a number"),
    ],
)
def test_the_command_rejects_what_makes_no_schedule(numbers, arguments, problem):
    from typer import BadParameter

    with pytest.raises((BadParameter, ConfigError), match=problem):
        numbers(*arguments)
