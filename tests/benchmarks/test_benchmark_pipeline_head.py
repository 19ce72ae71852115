"""benchmarks/pipeline_head.py runs, and its numbers hang together. Times are not looked at: machines are busy."""

import json
import sys
from dataclasses import replace

import pytest

from launching import ROOT, finish, start

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "docs"))

from generators.measured import Measured
from pipeline import Entry
from pipeline_emulated import EMULATED
from pipeline_head import CASE, TORCH, HeadTask, HeadWork

from cuboid.seq1f1b.schedule.actions import Action, Op

pytestmark = pytest.mark.slow
TIMEOUT_S = 240
LENGTHS = (16384, 9000, 7384)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Of a quick run, which has written all that it should."""
    out = tmp_path_factory.mktemp("head")
    status, output = finish(
        start(sys.executable, ROOT / "benchmarks/pipeline_head.py", "--quick", "--out", out), TIMEOUT_S
    )
    assert status == 0, output
    numbers = json.loads((out / "pipeline_head.json").read_text(encoding="utf-8"))
    assert all(table.text() in output for table in CASE.tables(numbers))
    assert all(sentence in output for sentence in CASE.remarks(numbers))
    return numbers


@pytest.fixture(params=[False, True], ids=["computing", "emulated"])
def rows(result, request):
    return [row for row in result["rows"] if row["emulated"] == request.param]


def test_everyone_takes_part(rows):
    heads = [row["head"] for row in rows]
    assert heads == ["last"] * len(TORCH) + ["last", "spread"] * 2
    assert all(0 <= row["idle"]["median"] < 1 for row in rows)


def test_ratios_are_to_the_same_schedule_and_to_torchs_fastest(rows):
    fastest_s = min(row["samples"][0]["step_s"] for row in rows if row["kind"] == "torch")
    for last, spread in (rows[-4:-2], rows[-2:]):
        assert (last["schedule"], last["head"], spread["head"]) == (spread["schedule"], "last", "spread")
        step_s = spread["samples"][0]["step_s"]
        assert spread["ratios"]["last"]["median"] == pytest.approx(last["samples"][0]["step_s"] / step_s)
        assert spread["ratios"]["torch"]["median"] == pytest.approx(fastest_s / step_s)
        assert spread["ratio_simulated"] == pytest.approx(last["simulated_s"] / spread["simulated_s"])


def test_the_page_can_be_written_from_it(result):
    (text,) = Measured("pipeline_head").parts_of({"pipeline_head": result}).values()
    assert text.count(EMULATED) == 1
    assert all(sentence in text for sentence in CASE.remarks(result))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_a_step_takes_as_long_wherever_the_head_is_and_whoever_runs_it(stages, chunks):
    work = HeadWork(stages, micro_batches=8)
    assert work.sizes.head_flops(work.length) == pytest.approx(1.5 * work.sizes.layer_flops(work.length)[0], rel=1e-6)
    spread = replace(work, spreads_head=True)
    assert sum(work.balance(chunks)) == sum(spread.balance(chunks)) == work.layers
    assert work.balance(chunks)[-1] < spread.balance(chunks)[-1]
    parts = range(stages * chunks)

    def seconds(duration_s, actions):
        return sum(map(duration_s, actions))

    def of_stages(segments, *ops):
        return [Action(op, stage, 0, segment) for op in ops for stage in parts for segment in range(segments)]

    split = Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT
    shares = [
        Action(op, rank, 0, segment)
        for op in (Op.HEAD_FORWARD, Op.HEAD_BACKWARD)
        for rank in range(stages)
        for segment in range(len(LENGTHS))
    ]
    # Layers and head, each of them three times a forward.
    expected = 3 * work.forward_s * stages * (1 + work.head_layers / work.layers)
    for duration_s, actions in [
        (work.cost(LENGTHS, chunks), of_stages(len(LENGTHS), *split)),
        (spread.cost(LENGTHS, chunks), of_stages(len(LENGTHS), *split) + shares),
        (work.whole_cost(chunks), of_stages(1, *split)),
        (work.whole_cost(chunks), of_stages(1, Op.FORWARD, Op.BACKWARD)),
    ]:
        assert seconds(duration_s, actions) == pytest.approx(expected, rel=1e-3)


def test_the_head_that_computes_is_as_heavy_as_the_emulated_one():
    sizes = HeadTask().sizes
    assert sizes.head_flops(HeadTask.length) == pytest.approx(1.5 * sizes.layer_flops(HeadTask.length)[0], rel=0.01)


def test_a_spread_head_is_simulated_to_be_faster():
    entry = Entry("cuboid", "zero_bubble-interleaved", 8, chunks=2, limit=2.0)
    last, spread = (
        entry.chosen(HeadWork(8, micro_batches=8, spreads_head=spreads)).timeline for spreads in (False, True)
    )
    assert last.makespan_s > 1.1 * spread.makespan_s
    assert spread.bubble < 0.05
