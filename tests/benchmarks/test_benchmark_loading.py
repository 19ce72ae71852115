"""benchmarks/loading.py runs, and its numbers hang together. Times are not looked at: machines are busy."""

import json
import sys

import pytest

from launching import ROOT, finish, start

sys.path.insert(0, str(ROOT / "benchmarks"))

from loading import CASE, watched, ways

TIMEOUT_S = 240
SCRIPT = ROOT / "benchmarks" / "loading.py"
MIB = 2**20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures by /proc"),
]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("loading")


@pytest.fixture(scope="module")
def result(out):
    status, output = finish(start(sys.executable, SCRIPT, "--quick", "--out", out), TIMEOUT_S)
    assert status == 0, output
    numbers = json.loads((out / "loading.json").read_text(encoding="utf-8"))
    assert all(row["name"] in output for row in numbers["rows"])
    return numbers


def test_every_way_loads_the_same_model(result):
    first, *others = result["rows"]
    assert [row["name"] for row in result["rows"]] == [way.name for way in ways(4)]
    for row in others:
        assert row["loss"] == pytest.approx(first["loss"], rel=1e-4)
        assert row["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-4)


def test_footprints_hang_together(result):
    for row in result["rows"]:
        (sample,) = row["samples"]
        assert len(sample["footprints"]) == row["ranks"] == 4
        for footprint in sample["footprints"]:
            assert footprint["peak_bytes"] > footprint["proportional_bytes"] > 0
            assert footprint["floor_bytes"] > 0
        peaks = [footprint["peak_bytes"] - footprint["floor_bytes"] for footprint in sample["footprints"]]
        assert row["peak_bytes"]["median"] == max(peaks)
        assert row["peak_sum_bytes"]["median"] == sum(peaks)
        assert row["ideal_file_bytes"] == result["files_bytes"] / 4


def test_ratios_are_those_of_the_rounds(result):
    first, *others = result["rows"]
    for row in others:
        expected = row["samples"][0]["step_s"] / first["samples"][0]["step_s"]
        assert row["ratio_time"]["median"] == pytest.approx(expected)


def test_the_checkpoint_is_gone_afterwards(result, out):
    assert sorted(path.name for path in out.iterdir()) == ["loading.json"]


def test_a_process_that_takes_memory_is_seen(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * MIB))
    with watched() as footprint:
        taken = bytearray(path.read_bytes() * 4)
    assert footprint["peak_bytes"] - footprint["floor_bytes"] >= len(taken) - MIB


@pytest.mark.parametrize("options", [["--repeats", "0"], ["--stored", "int8"]])
def test_options_that_make_no_sense_are_refused(capsys, options):
    with pytest.raises(SystemExit) as ended:
        CASE.parse(options)
    assert ended.value.code == 2
    assert options[0] in capsys.readouterr().err
