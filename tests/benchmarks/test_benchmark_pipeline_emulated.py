"""benchmarks/pipeline_emulated.py runs, and its numbers hang together. Times are not looked at: machines are busy."""

import json
import sys
from dataclasses import replace
from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launching import ROOT, finish, start

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "docs"))

from generators.measured import Measured
from harness.rounds import Record
from pipeline import Entry
from pipeline_emulated import CASE, EMULATED, SegmentedStage, Work, check_agreement, entries

from cuboid.errors import CuboidError
from cuboid.seq1f1b.schedule.actions import Action, Op

pytestmark = pytest.mark.slow
TIMEOUT_S = 240
SCRIPT = ROOT / "benchmarks" / "pipeline_emulated.py"
SMALL = Work(stages=2, micro_batches=2, forward_s=0.0, width=3, length=12, layers=2)


def measured(out, *options):
    """Numbers of a quick run, which has written all that it should."""
    status, output = finish(start(sys.executable, SCRIPT, "--quick", *options, "--out", out), TIMEOUT_S)
    assert status == 0, output
    numbers = json.loads((out / "pipeline_emulated.json").read_text(encoding="utf-8"))
    assert all(table.text() in output for table in CASE.tables(numbers))
    assert all(sentence in output for sentence in CASE.remarks(numbers))
    assert EMULATED in output
    return numbers


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Of a run on loopback, with fewer micro-batches than stages and with as many."""
    return measured(tmp_path_factory.mktemp("emulated"), "--micro-batches", "2", "4", "8")


def rows_of(result, micro_batches):
    """The contestants with so many micro-batches, by name."""
    return {row["name"]: row for row in result["rows"] if row["micro_batches"] == micro_batches}


def work_of(row, result):
    """What a row's contestant did."""
    sizes = result["workload"]
    return Work(row["stages"], row["micro_batches"], sizes["forward_s"], sizes["width"])


def entry_of(row):
    """A row's contestant."""
    return Entry(*(row[key] for key in ("kind", "schedule", "segments", "partition", "chunks", "limit")))


def test_the_numbers_say_that_computing_was_emulated(result):
    assert result["emulated"] == EMULATED
    assert CASE.remarks(result)[0].startswith("Computing is emulated")


def test_everyone_takes_part_who_can(result):
    everyone = [entry.name for entry in entries([2, 4])]
    assert list(rows_of(result, 8)) == everyone
    assert list(rows_of(result, 4)) == [name for name in everyone if "DualPipeV" not in name]
    assert list(rows_of(result, 2)) == [name for name in everyone if "torch" not in name and "DualPipeV" not in name]


def test_schedules_that_only_peers_have_are_measured_and_not_simulated(result):
    peers = [row for row in result["rows"] if row["kind"] != "cuboid" and row["chunks"] == 2]
    assert len(peers) == 3 + 5
    for row in peers:
        assert row["simulated_s"] is row["bubble_theory"] is row["sequences_in_flight_simulated"] is None
        assert 1 <= max(row["sequences_in_flight"]) <= row["micro_batches"]


def test_all_compute_what_float64_gives(result):
    assert all(row["error"] < 1e-5 for row in result["rows"])


def test_theory_and_simulation_are_those_of_the_schedules(result):
    for count in (2, 4):
        rows = rows_of(result, count)
        for row in (row for row in rows.values() if entry_of(row).is_known):
            others = 0 if row["limit"] else 3
            assert row["bubble_theory"] == pytest.approx(others / (row["segments"] * count + others))
            timeline = entry_of(row).chosen(work_of(row, result)).timeline
            assert row["simulated_s"] == pytest.approx(timeline.makespan_s)
            if row["segments"] == 1:
                assert row["bubble_simulated"] == pytest.approx(row["bubble_theory"])
                assert row["ratio_simulated"] == pytest.approx(1)
        for k in (2, 4):
            flops, even = (rows[f"Cuboid seq1f1b, k={k}, {cut} cut"] for cut in ("flops", "even"))
            assert flops["ratio_simulated"] == pytest.approx(flops["ratio_theory"], rel=0.01)
            assert even["ratio_simulated"] < 0.95 * flops["ratio_simulated"]


def test_no_more_is_in_flight_than_the_schedules_say(result):
    for row in (row for row in result["rows"] if entry_of(row).is_known):
        assert row["sequences_in_flight"] == pytest.approx(row["sequences_in_flight_simulated"])
    unsegmented, cut = (rows_of(result, 4)[name] for name in ("Cuboid 1f1b", "Cuboid seq1f1b, k=4, flops cut"))
    assert unsegmented["sequences_in_flight"] == [4, 3, 2, 1]
    assert cut["sequences_in_flight"][0] < 0.6 * unsegmented["sequences_in_flight"][0]
    split = [row for row in result["rows"] if row["limit"]]
    assert len(split) == 3 * 4
    assert all(max(row["sequences_in_flight"]) <= row["limit"] + 1e-9 for row in split)


def test_ratios_are_those_of_the_rounds(result):
    rows = rows_of(result, 4)
    step_s = rows["Cuboid 1f1b"]["samples"][0]["step_s"]
    for row in rows.values():
        assert row["ratios"]["own_1f1b"]["median"] == pytest.approx(step_s / row["samples"][0]["step_s"])
        assert row["ratios"].keys() == {"own_1f1b", "torch", "deepspeed"}
        assert len(row["samples"]) == result["repeats"] == 1


def test_the_page_can_be_written_from_it(result):
    (text,) = Measured("pipeline_emulated").parts_of({"pipeline_emulated": result}).values()
    assert text.count(EMULATED) == 3
    # Of each kind the fastest; the files have all.
    assert text.count(", even |") == 3
    names = [row[0] for table in CASE.tables(result) for row in table.plain_cells()]
    assert names.count("torch.distributed.pipelining, DualPipeV") == 1
    assert all(sentence in text for sentence in CASE.remarks(result))


@st.composite
def cuts(draw):
    """Lengths of segments that add up to the small work's sequence."""
    stops = sorted(draw(st.sets(st.integers(1, SMALL.length - 1))))
    return tuple(stop - start for start, stop in zip([0, *stops], [*stops, SMALL.length], strict=True))


@given(cuts())
def test_segments_compute_what_whole_sequences_do(lengths):
    first, last = (SegmentedStage(SMALL, lengths, stage) for stage in range(2))
    for micro_batch in range(SMALL.micro_batches):
        for segment in range(len(lengths)):
            hidden = first.forward(micro_batch, segment, None)
            assert hidden.shape == last.message_shape(micro_batch, segment)
            assert last.forward(micro_batch, segment, hidden) is None
        for segment in reversed(range(len(lengths))):
            gradient = last.backward(micro_batch, segment, None)
            assert first.backward(micro_batch, segment, gradient) is None
    squares = sum(p.grad.double().square().sum().item() for stage in (first, last) for p in stage.mixer.parameters())
    assert {"loss": last.loss, "gradient_norm": sqrt(squares)} == pytest.approx(SMALL.reference(), rel=1e-5)


@given(cuts())
def test_a_split_backward_computes_what_a_whole_one_does(lengths):
    first, last = (SegmentedStage(SMALL, lengths, stage) for stage in range(2))
    for micro_batch in range(SMALL.micro_batches):
        for segment in range(len(lengths)):
            last.forward(micro_batch, segment, first.forward(micro_batch, segment, None))
        order = list(reversed(range(len(lengths))))
        for segment in order:
            assert first.input_gradient(micro_batch, segment, last.input_gradient(micro_batch, segment, None)) is None
        for stage in (first, last):
            stage.weight_gradients(micro_batch, order)
    squares = sum(p.grad.double().square().sum().item() for stage in (first, last) for p in stage.mixer.parameters())
    assert {"loss": last.loss, "gradient_norm": sqrt(squares)} == pytest.approx(SMALL.reference(), rel=1e-5)


def test_another_order_of_segments_gives_other_gradients():
    hidden, _ = SMALL.data()
    gradients = []
    for order in ((1, 0), (0, 1)):
        last = SegmentedStage(SMALL, (6, 6), 1)
        for segment in (0, 1):
            last.forward(0, segment, hidden[:1, 6 * segment : 6 * segment + 6])
        gradient_of = {segment: last.backward(0, segment, None) for segment in order}
        gradients.append(torch.cat([gradient_of[0], gradient_of[1]], dim=1))
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3 * gradients[0].abs().max()


@given(cuts())
def test_however_a_sequence_is_cut_its_units_take_as_long_together(lengths):
    duration_s = replace(SMALL, forward_s=1.0).cost(lengths)
    for ops, total_s in (((Op.FORWARD,), 1.0), ((Op.BACKWARD,), 2.0), ((Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT), 2.0)):
        parts_s = [duration_s(Action(op, 0, 0, s)) for op in ops for s in range(len(lengths))]
        assert sum(parts_s) == pytest.approx(total_s)


@settings(deadline=None)
@given(st.sampled_from([8, 16]), st.sampled_from([8, 16]), st.sampled_from([2, 4, 8]))
def test_cuts_by_operations_are_simulated_as_theory_says(stages, micro_batches, segments):
    work, entry = Work(stages, micro_batches, 0.1, 1), Entry("cuboid", "seq1f1b", segments)
    assert entry.chosen(work).timeline.bubble == pytest.approx(entry.theory(work), abs=0.01)


def test_who_computes_something_else_is_named():
    record = Record((Entry("torch"), SMALL), Entry("torch").name)
    right = {"loss": 1.0, "gradient_norm": 2.0}
    check_agreement(record, {**right, "gradient_norm": 2.0 + 1e-6}, right)
    assert record.error == pytest.approx(5e-7)
    with pytest.raises(CuboidError, match=r"torch.distributed.pipelining 1F1B has gradient_norm 2.1, but .* 2.0"):
        check_agreement(record, {**right, "gradient_norm": 2.1}, right)
    with pytest.raises(CuboidError, match="has loss nan"):
        check_agreement(record, {**right, "loss": float("nan")}, right)


@pytest.mark.parametrize(
    "options",
    [
        *(["--network", "shaped"], ["--repeats", "0"], ["--segments", "1"]),
        *(["--stages", "5"], ["--micro-batches", "0"]),
    ],
)
def test_options_that_make_no_sense_are_refused(capsys, options):
    with pytest.raises(SystemExit) as ended:
        CASE.parse(options)
    assert ended.value.code == 2
    assert options[0] in capsys.readouterr().err
