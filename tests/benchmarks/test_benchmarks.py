"""The benchmarks run, and what they compare computes the same. Times are not looked at: tests run on busy machines."""

import json
import math
import subprocess
import sys

import pytest

from launching import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from pipeline import CASE

TIMEOUT_S = 600


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Numbers of the smallest run of benchmarks/pipeline.py that has everything in it."""
    out = tmp_path_factory.mktemp("benchmark")
    options = ["--quick", "--repeats", "1", "--limit", "0", "--micro-batches", "2", "--segments", "1", "3"]
    command = [sys.executable, str(ROOT / "benchmarks" / "pipeline.py"), *options, "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    numbers = json.loads((out / "pipeline.json").read_text(encoding="utf-8"))
    assert all(table.text() in ended.stdout for table in CASE.tables(numbers))
    return numbers


@pytest.mark.slow
def test_everyone_takes_part(result):
    taking_part = [(row["kind"], row["schedule"], row["segments"], row["partition"]) for row in result["rows"]]
    peers = [("torch", "1f1b"), ("deepspeed", "1f1b")]
    # DualPipeV needs four micro-batches on two ranks.
    peers += [("torch", "interleaved"), ("torch", "interleaved zero bubble"), ("torch", "ZBV")]
    ours = [("seq1f1b", 1, "flops"), ("seq1f1b", 3, "flops"), ("seq1f1b", 3, "even"), ("zero_bubble", 2, "flops")]
    expected = [(*peer, 1, "flops") for peer in peers] + [("cuboid", *entry) for entry in ours]
    assert taking_part == expected


@pytest.mark.slow
def test_all_compute_the_same(result):
    first = result["rows"][0]
    for row in result["rows"]:
        assert row["loss"] == pytest.approx(first["loss"], rel=1e-5)
        assert row["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-5)
    assert math.log(256) - 1 < first["loss"] < math.log(256) + 1
    assert first["gradient_norm"] > 0


@pytest.mark.slow
def test_rows_have_all_their_numbers(result):
    for row in result["rows"]:
        assert sum(row["lengths"]) == result["workload"]["length"]
        assert len(row["samples"]) == 1
        assert 0 < row["step_s"]["low"] <= row["step_s"]["median"] <= row["step_s"]["high"]
        assert set(row["ratios"]) == {"torch", "deepspeed", "own_1f1b"}
        assert 0 < row["bubble"] < 1
        assert all(peak > 0 for peak in row["peak_bytes"])


@pytest.mark.slow
def test_theory_is_the_paper_s(result):
    by_segments = {row["segments"]: row for row in result["rows"] if row["schedule"] == "seq1f1b"}
    assert by_segments[1]["bubble_theory"] == pytest.approx(1 / 3)
    assert by_segments[3]["bubble_theory"] == pytest.approx(1 / 7)
    assert by_segments[3]["ratio_theory"] == pytest.approx(3 / (2 + 1 / 3))


@pytest.mark.slow
def test_segments_keep_less(result):
    unsplit = [row for row in result["memory"] if row["schedule"] != "zero_bubble"]
    peaks = {(row["kind"], row["segments"], row["partition"]): row["peak_bytes"] for row in unsplit}
    unsegmented = peaks["cuboid", 1, "flops"]
    # The same layers and schedule keep the same, whoever runs them; but the last stage keeps no logits here.
    *front, last = peaks["torch", 1, "flops"]
    assert front == pytest.approx(unsegmented[:-1], rel=0.02)
    assert last > unsegmented[-1]
    assert max(peaks["cuboid", 3, "even"]) < 0.6 * max(unsegmented)
    for row in unsplit:
        assert row["sequences_in_flight"][0] == max(row["sequences_in_flight"])
