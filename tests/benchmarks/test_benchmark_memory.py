"""benchmarks/memory.py runs, and its numbers hang together."""

import json
import sys

import pytest

from launching import ROOT, finish, start

sys.path.insert(0, str(ROOT / "benchmarks"))

from layer_meshes import distinct
from memory import CASE, QUICK, fullest

from cuboid.errors import CuboidError

TIMEOUT_S = 240
SCRIPT = ROOT / "benchmarks" / "memory.py"


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("memory")
    status, output = finish(start(sys.executable, SCRIPT, "--quick", "--out", out), TIMEOUT_S)
    assert status == 0, output
    numbers = json.loads((out / "memory.json").read_text(encoding="utf-8"))
    assert all(row["name"] in output for row in numbers["rows"])
    return numbers


@pytest.mark.slow
def test_ranks_keep_exactly_what_the_formula_says(result):
    plain, *ours = result["rows"]
    assert plain["formula_total_bytes"] is None
    for row in ours:
        assert row["kept_bytes"] == row["formula_total_bytes"] == sum(row["formula_bytes"].values())
        assert row["peak_bytes"] >= row["kept_bytes"]


@pytest.mark.slow
def test_no_mesh_keeps_more_than_an_even_part_of_what_plain_transformers_keeps(result):
    plain, alone, *meshes = result["rows"]
    for row in meshes:
        assert row["ranks"] == 8
        assert row["kept_bytes"] * 8 < plain["kept_bytes"]
        assert 1 <= row["kept_bytes"] * 8 / alone["kept_bytes"] < 1.05


@pytest.mark.slow
def test_everyone_computes_the_same(result):
    first = result["rows"][0]
    for row in result["rows"]:
        assert row["loss"] == pytest.approx(first["loss"], rel=1e-5)
        assert row["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-5)


def test_the_automatic_mesh_takes_part_once():
    model = QUICK.model()
    meshes = distinct(["1x8x1", "auto", "1×8×1"], 8, QUICK, model)
    assert {mesh: str(shape) for mesh, shape in meshes.items()} == {"1x8x1": "1×8×1", "auto": "4×2×1"}
    with pytest.raises(CuboidError, match="mesh 1×4×1 has 4 ranks"):
        distinct(["1x4x1"], 8, QUICK, model)


def test_who_computes_something_else_is_named():
    def found(loss):
        return {"loss": loss, "gradient_norm": 1.0, "kept_bytes": 8, "peak_bytes": 9, "formula_bytes": {"norm": 1}}

    plain = fullest("plain", [found(2.0)], None)
    assert fullest("2×1×1", [found(2.0), {**found(2.0), "kept_bytes": 10}], plain)["kept_bytes"] == 10
    with pytest.raises(CuboidError, match=r"2×1×1 has loss 3\.0, but plain has 2\.0"):
        fullest("2×1×1", [found(2.0), found(3.0)], plain)


def test_options_that_make_no_sense_are_refused(capsys):
    with pytest.raises(SystemExit):
        CASE.parse(["--repeats", "0"])
    assert "--repeats" in capsys.readouterr().err
