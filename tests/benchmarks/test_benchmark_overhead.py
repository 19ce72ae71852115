"""benchmarks/overhead.py runs, and its numbers hang together. Times are not looked at: machines are busy."""

import json
import sys

import pytest
import torch

from launching import ROOT, finish, start

sys.path.insert(0, str(ROOT / "benchmarks"))

from overhead import CASE, differences

from cuboid.errors import CuboidError

pytestmark = pytest.mark.slow
TIMEOUT_S = 240
SCRIPT = ROOT / "benchmarks" / "overhead.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Numbers and output of the smallest run that has everything in it."""
    out = tmp_path_factory.mktemp("overhead")
    status, output = finish(start(sys.executable, SCRIPT, "--quick", "--out", out), TIMEOUT_S)
    assert status == 0, output
    return json.loads((out / "overhead.json").read_text(encoding="utf-8")), output


def test_every_training_takes_part_in_both_dtypes(run):
    result, output = run
    names = ["Hugging Face with Cuboid", "DeepSpeed with Cuboid"]
    assert [(row["name"], row["dtype"]) for row in result["rows"]] == [
        (name, dtype) for dtype in ("float32", "bfloat16") for name in names
    ]
    assert all(name in output for name in names)


def test_losses_and_gradients_are_the_same(run):
    for row in run[0]["rows"]:
        assert row["loss_difference"] < 1e-5
        assert row["gradient_difference"] < {"float32": 1e-5, "bfloat16": 1e-2}[row["dtype"]]


def test_ratios_are_those_of_the_rounds(run):
    result = run[0]
    for row in result["rows"]:
        (plain,), (ours,) = row["samples"]["plain"], row["samples"]["cuboid"]
        assert row["ratio"]["median"] == pytest.approx(ours["step_s"] / plain["step_s"])
        assert row["ratio_processor"]["median"] == pytest.approx(ours["computing_s"] / plain["computing_s"])
        assert row["ratio"]["count"] == result["repeats"] == 1


def first(loss, gradients):
    """What a training tells of its first step."""
    return loss, torch.tensor(gradients, dtype=torch.float64)


def test_trainings_that_differ_are_refused_by_name():
    plain = first(2.0, [3.0, 4.0])
    assert differences("A", plain, first(2.0, [3.0, 4.0]), 1e-5) == (0.0, 0.0)
    for ours, message in [
        (first(2.2, [3.0, 4.0]), "A has loss 2.2, but the same without it has 2.0"),
        (first(2.0, [3.0, 4.5]), "A: gradients are 1.0e-01 away"),
        (first(2.0, [3.0]), "A: 1 elements have gradients, but 2 without it"),
        (first(2.0, [3.0, float("nan")]), "gradients are nan away"),
    ]:
        with pytest.raises(CuboidError, match=message):
            differences("A", plain, ours, 1e-5)


@pytest.mark.parametrize("options", [["--repeats", "0"], ["--engines", "jax"]])
def test_options_that_make_no_sense_are_refused(capsys, options):
    with pytest.raises(SystemExit) as ended:
        CASE.parse(options)
    assert ended.value.code == 2
    assert options[0] in capsys.readouterr().err
