"""benchmarks/hidden_communication.py runs, and its numbers hang together. Times are not looked at, for noise."""

import json
import sys

import pytest

from launching import ROOT, finish, start

sys.path.insert(0, str(ROOT / "benchmarks"))

from hidden_communication import CASE
from layer_meshes import LayerWorkload, compute_reference, rotary_tables
from network.networks import why_not_shaped

pytestmark = pytest.mark.slow
TIMEOUT_S = 240
SCRIPT = ROOT / "benchmarks" / "hidden_communication.py"
SIZES = {"batch": 2, "length": 8, "hidden": 16, "intermediate": 24, "heads": 2}


def measured(out, *options):
    """Numbers of a quick run, which has written all that it should."""
    status, output = finish(start(sys.executable, SCRIPT, "--quick", *options, "--out", out), TIMEOUT_S)
    assert status == 0, output
    numbers = json.loads((out / "hidden_communication.json").read_text(encoding="utf-8"))
    assert all(row["shape"] in output for row in numbers["rows"])
    return numbers


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Of each mesh of two ranks, on loopback."""
    return measured(tmp_path_factory.mktemp("hidden"))


def test_each_axis_takes_part(result):
    assert [row["shape"] for row in result["rows"]] == ["2×1×1", "1×2×1", "1×1×2"]


def test_the_step_computes_what_float64_gives(result):
    assert all(0 < row["error"] < 1e-5 for row in result["rows"])


def test_the_step_sends_what_the_formula_says(result):
    for row in result["rows"]:
        # Every collective's bytes are rounded.
        assert row["counted_bytes"] == pytest.approx(row["formula_bytes"], abs=100)


def test_ratios_are_those_of_the_rounds(result):
    for row in result["rows"]:
        (step,), (computing,), (communication,) = row["samples"].values()
        t, c, m = (sample["step_s"] for sample in (step, computing, communication))
        assert row["exposed"]["median"] == pytest.approx((t - c) / m)
        assert row["waited"]["median"] == pytest.approx(step["waited_s"] / m)
        assert row["to_perfect"]["median"] == pytest.approx(t / max(c, m))
        assert row["to_none"]["median"] == pytest.approx(t / (c + m))
        assert row["to_possible"]["median"] <= row["to_perfect"]["median"]


def test_loopback_has_no_rate(result):
    for row in result["rows"]:
        assert row["rate_mbit"] is row["measured_mbit"] is row["interface_bytes"] is None


@pytest.mark.skipif(why_not_shaped() is not None, reason=str(why_not_shaped()))
def test_on_links_the_rate_is_that_at_which_sending_takes_as_long_as_computing(tmp_path):
    for row in measured(tmp_path, "--network", "shaped")["rows"]:
        assert row["rate_mbit"] == pytest.approx(min(row["wanted_mbit"], 50))
        assert row["measured_mbit"] == pytest.approx(row["rate_mbit"], rel=0.1)
        # What is still in an interface's queue when a rank's step ends counts in the next one.
        assert -0.01 < row["interface_excess"] < 0.5
        # The step whose collectives do nothing sends nothing.
        _, silent, _ = row["samples"].values()
        assert all(sample["interface_bytes"] < 0.01 * row["counted_bytes"] for sample in silent)


def test_the_reference_runs_every_layer():
    workload = LayerWorkload(**SIZES, layers=3)
    model = workload.model()
    reference = compute_reference(workload, model)
    hidden, _ = workload.inputs()
    expected = model.double().model.layers[0](hidden, position_embeddings=rotary_tables(model, workload.length))
    assert set(reference.gradients) == {name for name, _ in model.model.layers.named_parameters(prefix="model.layers")}
    assert {name.split(".")[2] for name in reference.gradients} == {"0", "1", "2"}
    assert not reference.output.equal(expected)


@pytest.mark.parametrize("options", [["--repeats", "0"], ["--network", "wifi"]])
def test_options_that_make_no_sense_are_refused(capsys, options):
    with pytest.raises(SystemExit) as ended:
        CASE.parse(options)
    assert ended.value.code == 2
    assert options[0] in capsys.readouterr().err
