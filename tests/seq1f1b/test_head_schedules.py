"""Schedules in which all ranks have a share of the head: complete, bounded, and free of deadlock."""

import dataclasses
import json
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cuboid.cli import commands
from cuboid.config.schema import PipelineConfig
from cuboid.errors import ConfigError
from cuboid.models.pipeline import step_schedule
from cuboid.models.stages.stage_cut import StageLayout
from cuboid.seq1f1b.schedule import list_scheduling
from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.choice import MemoryLimit, ModelPipeline, Request, choose_schedule, compare_schedules
from cuboid.seq1f1b.schedule.dependencies import dependencies, incoming, outgoing
from cuboid.seq1f1b.schedule.lowering import lower
from cuboid.seq1f1b.schedule.partition import balance_by_flops, cut_sequence, segment_cost
from cuboid.seq1f1b.schedule.schedules import PipelineShape
from cuboid.seq1f1b.schedule.simulator import simulate
from cuboid.seq1f1b.schedule.unit_costs import LayerSizes, ModelSizes, unit_flops
from cuboid.seq1f1b.schedule.validation import ScheduleError, validate, validate_programs

#: Llama 3 8B.
LLAMA = ModelSizes((LayerSizes.decoder(4096, 4096, 1024, 14336),) * 32, head=4096 * 128256)
GENERATED = ("zero_bubble", "zero_bubble-interleaved", "zero_bubble-v")


def choose(name, ranks, micro_batches, segments, limit=None, chunks=1, length=32768, spread=True):
    """The schedule of Llama 3 8B."""
    lengths = cut_sequence(length, segments, multiple=1, cost=segment_cost(LLAMA))

    def costs(rank_of):
        counts = balance_by_flops(LLAMA, len(rank_of), length, has_head=not spread)
        return ModelPipeline(name, ranks, chunks, counts, lengths, spreads_head=spread).costs(LLAMA, rank_of)

    limit = limit and MemoryLimit(sequences=limit)
    return choose_schedule(name, Request(ranks, micro_batches, segments, costs, limit, chunks, spreads_head=spread))


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("segments", "limit", "longer"), [(2, 2.5, True), (2, None, False), (8, 4.0, False)])
def test_a_spread_head_that_makes_the_step_longer_is_said_once_by_rank_0(caplog, monkeypatch, segments, limit, longer):
    config = {"engine": "seq1f1b", "stages": 4, "schedule": "zero_bubble", "head": "spread", "memory_limit": limit}
    pipeline = PipelineConfig(**config)
    layout = StageLayout((8, 8, 8, 8), (0, 1, 2, 3))
    stages = SimpleNamespace(config=SimpleNamespace(pipeline=pipeline), sizes=LLAMA, layout=layout)
    shape, lengths = PipelineShape(4, 8, segments, head_ranks=4), (32768 // segments,) * segments
    for rank in (1, 0):
        monkeypatch.setattr(step_schedule, "current_rank", lambda rank=rank: rank)
        schedules = step_schedule.StepSchedules(stages)
        for micro_batches in (8, 4):
            schedules.of(replace(shape, micro_batches=micro_batches), lengths, recomputes=False)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == longer
    assert all("few segments (2) and memory_limit 2.5" in text for text in said)


def action(text):
    op, *numbers = text
    return Action(Op(op), *map(int, numbers))


def test_what_a_share_needs_and_who_needs_it():
    shape = PipelineShape(4, 1, 2, head_ranks=2)
    assert list(shape.head_stages) == [2, 3]
    assert dependencies(action("H201"), shape) == (action("F301"),)
    assert dependencies(action("G201"), shape) == (action("H201"), action("H301"))
    needs = {"B301": "F301 G201 G301", "I300": "F300 G200 G300 B301", "B201": "F201 B301"}
    for text, expected in needs.items():
        assert list(dependencies(action(text), shape)) == list(map(action, expected.split()))
    assert incoming(action("H201"), shape).op is outgoing(action("F301"), shape).op is Op.BROADCAST_HIDDEN
    assert incoming(action("G201"), shape) == outgoing(action("H201"), shape)
    assert incoming(action("B301"), shape) == outgoing(action("G301"), shape)
    # Without shares, the last stage's backward is given nothing.
    assert incoming(action("B301"), replace(shape, head_ranks=0)) is None


def test_shares_have_all_of_the_heads_operations():
    alone = unit_flops(LLAMA, (16, 16), (512, 512))
    spread = unit_flops(LLAMA, (16, 16), (512, 512), head_ranks=2)
    shares = sum(spread(action(f"{op}{stage}00")) for op, stage in product("HG", "01"))
    assert shares == 3 * LLAMA.head_flops(512) == alone(action("F100")) - spread(action("F100"))
    assert spread(action("F000")) == alone(action("F000"))


@pytest.mark.ci
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(GENERATED), st.integers(2, 5), st.integers(1, 4), st.integers(1, 4), st.sampled_from([None, 1, 2.5])
)
def test_any_shape_is_complete_bounded_and_free_of_deadlock(name, ranks, micro_batches, segments, limit):
    chunks = 1 if name == "zero_bubble" else 2
    chosen = choose(name, ranks, micro_batches, segments, limit, chunks=chunks)
    validate(chosen.schedule, chosen.shape)
    # By default, the units of three stages more than seq1f1b keeps.
    most = limit or (ranks - 1 + 3 / chunks) / segments + 1
    assert max(chosen.timeline.peak_bytes) <= min(most, max(micro_batches, 1)) * (1 + 1e-6)
    # Each collective once on each rank, in one order; in the worst case, every action waits for all that is under way.
    programs = lower(chosen.schedule, chosen.shape)
    orders = [[a.op for a in program if a.op.is_collective] for program in programs]
    assert len(orders[0]) == 3 * micro_batches * segments
    assert all(order == orders[0] for order in orders)
    for program in programs:
        ahead = 0
        for step in program:
            ahead += (step.op is Op.HEAD_FORWARD) - (step.op is Op.HEAD_BACKWARD)
            assert 0 <= ahead <= 2


def test_a_program_may_be_lowered_by_any_durations():
    chosen = choose("zero_bubble-v", 3, 2, 3, chunks=2)
    for weights in ({Op.HEAD_FORWARD: 50}, {Op.HEAD_BACKWARD: 0.01}, {Op.FORWARD: 30}):
        lower(chosen.schedule, chosen.shape, lambda step, weights=weights: weights.get(step.op, 1))


def test_a_collective_is_over_when_all_ranks_have_joined_it():
    shape = PipelineShape(2, 2, 1, head_ranks=2)
    texts = "F000 F010 H000 G000 H010 G010 B000 B010", "F100 H100 G100 B100 F110 H110 G110 B110"
    schedule = tuple(tuple(map(action, text.split())) for text in texts)
    validate(schedule, shape)

    def duration_s(step):
        return 10 if step == action("F010") else 1

    def starts(sequences, **options):
        timeline = simulate(sequences, shape, duration_s, **options)
        return {span.action: span.start_s for rank in timeline.spans for span in rank}

    # By what it needs alone, rank 1 has its share after its forward; but rank 0 is in its second forward until 11.
    assert starts(schedule)[action("H100")] == 2
    programs = lower(schedule, shape, duration_s)
    joined = starts(programs)
    assert (joined[action("H100")], joined[action("H000")], joined[action("G100")]) == (11, 11, 12)
    late = starts(programs, transfer_s=lambda message: 5 if message.op.is_collective else 0)
    assert (late[action("F100")], late[action("H100")], late[action("G100")]) == (1, 16, 22)
    # The numbers of a schedule that was chosen are those of its programs.
    chosen = choose("zero_bubble", 3, 2, 3)
    assert chosen.timeline.makespan_s >= simulate(chosen.schedule, chosen.shape, durations(chosen)).makespan_s
    lowered = lower(chosen.schedule, chosen.shape, durations(chosen))
    assert chosen.timeline.spans == simulate(lowered, chosen.shape, durations(chosen)).spans


def durations(chosen):
    spans = (span for rank in chosen.timeline.spans for span in rank)
    return {span.action: round(span.end_s - span.start_s) for span in spans}.__getitem__


def without(sequences, removed):
    return tuple(tuple(step for step in rank if step != removed) for rank in sequences)


def test_missing_shares_and_collectives_are_refused():
    chosen = choose("zero_bubble", 2, 1, 2)
    for text in ("H000", "G101"):
        with pytest.raises(ScheduleError, match=r"is missing"):
            validate(without(chosen.schedule, action(text)), chosen.shape)
    with pytest.raises(ScheduleError, match="is no share of the head"):
        validate(chosen.schedule, dataclasses.replace(chosen.shape, head_ranks=0))
    programs = lower(chosen.schedule, chosen.shape)
    gathered = Action(Op.GATHER_STATISTICS, 1, 0, 1)
    with pytest.raises(ScheduleError, match="joins the collective"):
        validate_programs(without(programs, gathered), chosen.shape)
    swapped = list(programs[1])
    first, second = (i for i, step in enumerate(swapped) if step.op is Op.GATHER_STATISTICS)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    with pytest.raises(ScheduleError):
        validate_programs((programs[0], tuple(swapped)), chosen.shape)


def test_schedules_of_a_fixed_order_are_refused_and_auto_leaves_them_out():
    for name in ("seq1f1b", "gpipe", "1f1b"):
        with pytest.raises(ConfigError, match=f'"{name}" has the head on its last stage.*zero_bubble'):
            choose(name, 2, 2, 1)
    request = Request(2, 2, 2, lambda _: None, spreads_head=True)
    with pytest.raises(ConfigError, match="seq1f1b-interleaved"):
        compare_schedules("seq1f1b-interleaved", replace(request, chunks=2))
    assert choose("auto", 2, 2, 2).name == "zero_bubble"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("shape", "most_idle", "idle_whole"),
    [
        pytest.param((8, 8, 8, 2.0, 2), 0.05, 0.17, id="k8"),
        pytest.param((8, 8, 16, 2.0, 2), 0.03, 0.16, id="k16", marks=pytest.mark.slow),
    ],
)
def test_a_real_vocabulary_leaves_little_idle(shape, most_idle, idle_whole):
    assert choose("zero_bubble-interleaved", *shape).timeline.bubble <= most_idle
    assert choose("zero_bubble-interleaved", *shape, spread=False).timeline.bubble >= idle_whole


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("name", "ranks", "segments", "micro_batches", "gain"),
    [
        ("zero_bubble", 4, 4, 16, 1.15),
        ("zero_bubble", 4, 2, 32, 1.05),
        ("zero_bubble", 8, 8, 16, 1.12),
        ("zero_bubble", 4, 1, 16, 1.0),
        ("zero_bubble-v", 4, 4, 16, 1.04),
        pytest.param("zero_bubble-interleaved", 8, 4, 16, 1.12, marks=pytest.mark.slow),
        pytest.param("zero_bubble-interleaved", 4, 2, 64, 1.04, marks=pytest.mark.slow),
    ],
)
def test_the_default_limit_lets_a_spread_head_gain(name, ranks, segments, micro_batches, gain):
    shape = (name, ranks, micro_batches, segments, None, 1 if name == "zero_bubble" else 2)
    assert choose(*shape, spread=False).timeline.makespan_s >= gain * choose(*shape).timeline.makespan_s


def test_under_a_low_limit_a_smaller_slack_is_taken(monkeypatch):
    shape = ("zero_bubble", 4, 16, 2, 2.5)
    steps_s = []
    for slacks in ((2.0,), (2.0, 0.0)):
        monkeypatch.setattr(list_scheduling, "_SLACKS", slacks)
        steps_s.append(choose(*shape).timeline.makespan_s)
    assert steps_s[1] < 0.95 * steps_s[0]


def timeline(tmp_path, *options):
    """What the command writes about a model of four layers, whose head is as heavy as six."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = ["--model", str(tmp_path), "--output", str(tmp_path / "t.png"), "--json", str(tmp_path / "t.json")]
    sizes = ["--stages", "4", "--micro-batches", "4", "--segments", "4", "--seq-len", "256"]
    ended = CliRunner().invoke(commands, ["timeline", *sizes, *files, *options])
    return ended, json.loads((tmp_path / "t.json").read_text()) if ended.exit_code == 0 else None


@pytest.mark.ci
def test_the_command_simulates_a_head_on_all_stages(tmp_path):
    options = ["--schedule", "zero_bubble", "--memory-limit", "3"]
    _, last = timeline(tmp_path, *options)
    ended, spread = timeline(tmp_path, *options, "--head", "spread")
    assert "each rank has an equal share of it" in ended.output
    assert spread["bubble"] < 0.2 < 0.5 < last["bubble"]
    assert last["head"]["costs"] == pytest.approx(1 - spread["makespan"] / last["makespan"], abs=0.05)


def test_the_command_refuses_a_head_that_it_cannot_spread(tmp_path):
    ended, _ = timeline(tmp_path, "--head", "spread")
    assert ended.exit_code != 0
    assert isinstance(ended.exception, ConfigError) or "seq1f1b" in ended.output
    ended = CliRunner().invoke(commands, ["timeline", "--head", "spread"])
    assert ended.exit_code == 2
    assert "--model" in ended.output


@pytest.mark.slow
def test_one_long_row_leaves_little_idle():
    shape = (8, 1, 32, None, 4, 131072)
    assert choose("zero_bubble-interleaved", *shape).timeline.bubble <= 0.06
    assert choose("zero_bubble-interleaved", *shape, spread=False).timeline.bubble >= 0.16
