"""benchmarks/layer_meshes.py runs, and its numbers hang together. Times are not looked at: machines are busy."""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

from launching import ROOT, finish, start

sys.path.insert(0, str(ROOT / "benchmarks"))

from layer_meshes import CASE, QUICK, distinct
from network.networks import why_not_shaped

from cuboid.errors import CuboidError

TIMEOUT_S = 240
SCRIPT = ROOT / "benchmarks" / "layer_meshes.py"


def measured(out, *options):
    """Numbers of a quick run, which has written all that it should."""
    status, output = finish(start(sys.executable, SCRIPT, "--quick", *options, "--out", out), TIMEOUT_S)
    assert status == 0, output
    numbers = json.loads((out / "layer_meshes.json").read_text(encoding="utf-8"))
    assert all(row["shape"] in output for row in numbers["rows"])
    return numbers


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Of the smallest run that has everything in it, on loopback."""
    return measured(tmp_path_factory.mktemp("layer"), "--meshes", "1x8x1", "1x4x2", "2x2x2", "4x2x1", "auto")


@pytest.mark.slow
def test_every_mesh_takes_part_once(result):
    assert [row["shape"] for row in result["rows"]] == ["1×8×1", "1×4×2", "2×2×2", "4×2×1"]
    # The automatic choice is one of those that were asked for by name.
    assert [row["mesh"] for row in result["rows"]] == ["1x8x1", "1x4x2", "2x2x2", "auto"]


@pytest.mark.slow
def test_all_compute_what_float64_gives(result):
    assert all(0 < row["error"] < 1e-5 for row in result["rows"])


@pytest.mark.slow
def test_the_counter_agrees_with_the_formula(result):
    for row in result["rows"]:
        # Every collective's bytes are rounded.
        assert row["counted_bytes"] == pytest.approx(row["formula_bytes"], abs=100)
    assert result["rows"][-1]["formula_bytes"] == min(row["formula_bytes"] for row in result["rows"])


@pytest.mark.slow
def test_ratios_are_those_of_the_rounds(result):
    first, *others = result["rows"]
    for row in others:
        expected = first["samples"][0]["step_s"] / row["samples"][0]["step_s"]
        assert row["ratios"]["1×8×1"]["median"] == pytest.approx(expected)
        assert row["ratios_theory"]["1×8×1"] == pytest.approx(first["formula_bytes"] / row["formula_bytes"])


@pytest.mark.slow
def test_loopback_says_nothing_of_links(result):
    assert result["network"] == "loopback"
    for row in result["rows"]:
        assert row["link_s"] is row["floor_s"] is row["interface_bytes"] is None
        assert len(row["samples"]) == result["repeats"] == 1
        assert row["step_s"]["median"] > 0


@pytest.mark.skipif(why_not_shaped() is not None, reason=str(why_not_shaped()))
@pytest.mark.slow
def test_interfaces_send_what_the_counter_counts(tmp_path):
    numbers = measured(tmp_path, "--network", "shaped", "--meshes", "1x8x1", "2x2x2", "--rate-mbit", "50")
    assert numbers["measured_mbit"] == pytest.approx(50, rel=0.1)
    for row in numbers["rows"]:
        assert 0 < row["interface_excess"] < 0.5
        assert row["link_s"] == pytest.approx(row["formula_bytes"] * 8 / 50e6)
        assert row["floor_s"]["count"] == 1


def test_meshes_of_other_sizes_are_refused():
    model = QUICK.model()
    with pytest.raises(CuboidError, match="mesh 1×4×1 has 4 ranks, but there are 8"):
        distinct(["1x4x1"], 8, QUICK, model)
    assert list(distinct(["1x8x1", "1×8×1", "2x2x2"], 8, QUICK, model)) == ["1x8x1", "2x2x2"]


@pytest.mark.parametrize("options", [["--rate-mbit", "10"], ["--repeats", "0"], ["--ranks", "7"]])
def test_options_that_make_no_sense_are_refused(capsys, options):
    with pytest.raises(SystemExit) as ended:
        CASE.parse(options)
    assert ended.value.code == 2
    assert options[0] in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.slow
def test_without_root_the_shaped_network_is_refused_in_a_sentence():
    nobody = 65534
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, nobody, nobody)
        code = f"""
import os, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import layer_meshes
os.seteuid({nobody})
sys.argv = ["layer_meshes.py", "--network", "shaped", "--quick", "--out", {folder!r}]
sys.exit(layer_meshes.CASE.main())
"""
        status, output = finish(start(sys.executable, "-c", code), TIMEOUT_S)
        assert list(Path(folder).iterdir()) == []
    assert status == 1, output
    assert "the shaped network needs root" in output
    assert "Traceback" not in output
