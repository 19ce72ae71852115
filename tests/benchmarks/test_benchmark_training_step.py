"""benchmarks/training_step.py, and layouts.py made of it, run, and their numbers hang together. Times say nothing."""

import json
import statistics
import sys

import pytest

from launching import ROOT, finish, start

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "docs"))

from generators.measured import Measured
from layouts import CASE as LAYOUTS
from layouts import QUICK_LAYOUTS, judged, rank_correlation
from network.networks import why_not_shaped
from training_step import CASE, DEFAULT, QUICK, FirstSteps, check, comparisons, find

from cuboid.errors import CuboidError

TIMEOUT_S = 240
SCRIPT = ROOT / "benchmarks" / "training_step.py"
#: At the quick size the choice of "auto".
AUTO_SHAPE = "4×2×1"


def measured(out, *options):
    """Numbers of a quick run, which has written all that it should."""
    status, output = finish(start(sys.executable, SCRIPT, "--quick", *options, "--out", out), TIMEOUT_S)
    assert status == 0, output
    numbers = json.loads((out / "training_step.json").read_text(encoding="utf-8"))
    assert all(row["name"] in output for row in numbers["rows"])
    assert all(sentence.replace("**", "") in output for sentence in CASE.remarks(numbers))
    return numbers


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Of the smallest run that has every contestant in it, on loopback in float32."""
    return measured(tmp_path_factory.mktemp("step"))


def by_key(result):
    return {row["key"]: row for row in result["rows"]}


@pytest.mark.slow
def test_every_contestant_takes_part_once(result):
    assert [row["key"] for row in result["rows"]] == DEFAULT
    meshes = [row["shape"] for row in result["rows"] if row["family"] == "cuboid"]
    assert meshes == ["1×8×1", "1×4×2", "2×2×2", "8×1×1", "8×1×1", AUTO_SHAPE, AUTO_SHAPE]


@pytest.mark.slow
def test_all_compute_what_plain_hugging_face_gives_in_float64(result):
    reference = result["reference"]
    # Training does something, and clipping has something to do.
    assert reference["losses"][1] < reference["losses"][0]
    assert reference["gradient_norm"] > result["workload"]["clip"]
    for row in result["rows"]:
        assert 0 < row["error"] < 1e-5
        assert row["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert row["gradient_norm"] == pytest.approx(reference["gradient_norm"], rel=1e-5)


@pytest.mark.slow
def test_who_counts_tells_what_it_sent(result):
    meshes = [row for row in result["rows"] if row["family"] == "cuboid"]
    assert all(0 < row["sent_bytes"] == row["counted_bytes"] for row in meshes)
    assert min(meshes, key=lambda row: row["sent_bytes"])["key"] == "cuboid-auto-kept"


@pytest.mark.slow
def test_ratios_are_those_of_the_rounds(result):
    rows = by_key(result)
    auto = rows["cuboid-auto"]
    assert auto["ratios"].keys() == rows.keys() - {"cuboid-auto"}
    for key, ratio in auto["ratios"].items():
        expected = rows[key]["samples"][0]["step_s"] / auto["samples"][0]["step_s"]
        assert ratio["median"] == pytest.approx(expected)


@pytest.mark.slow
def test_the_automatic_mesh_is_compared_with_the_best_layout_of_each_peer(result):
    rows = by_key(result)
    first, *best = comparisons(result["rows"])
    assert first["against"] == "autotp-8"
    assert [rows[one["against"]]["family"] for one in best] == ["autotp", "tp_plan", "fsdp2"]
    for one in best:
        family = rows[one["against"]]["family"]
        medians = [row["step_s"]["median"] for row in result["rows"] if row["family"] == family]
        assert rows[one["against"]]["step_s"]["median"] == min(medians)
        assert one["ratio"] == rows["cuboid-auto"]["ratios"][one["against"]]


@pytest.mark.slow
def test_loopback_says_nothing_of_links(result):
    assert result["network"] == "loopback"
    for row in result["rows"]:
        assert row["link_s"] is row["floor_s"] is row["interface_bytes"] is None
        assert len(row["samples"]) == result["repeats"] == 1
        assert row["step_s"]["median"] > 0
        if row["family"] != "cuboid":
            assert row["sent_bytes"] is None


@pytest.mark.slow
def test_low_precision_stays_near_float64_for_all(tmp_path):
    contestants = ["cuboid-auto", "autotp-8", "autotp-2-head", "tp-plan", "fsdp2"]
    numbers = measured(tmp_path, "--dtype", "bfloat16", "--contestants", *contestants)
    assert numbers["workload"]["dtype"] == "bfloat16"
    assert [row["key"] for row in numbers["rows"]] == contestants
    # Nobody computes in float32 in secret.
    assert all(1e-5 < row["error"] < 0.02 for row in numbers["rows"])


@pytest.mark.skipif(why_not_shaped() is not None, reason=str(why_not_shaped()))
@pytest.mark.slow
def test_interfaces_count_for_all_alike(tmp_path):
    contestants = ["cuboid-2x2x2", "cuboid-4x2x1", "cuboid-auto", "autotp-8", "fsdp2", "fsdp2-keep"]
    numbers = measured(tmp_path, "--network", "shaped", "--rate-mbit", "50", "--contestants", *contestants)
    assert numbers["measured_mbit"] == pytest.approx(50, rel=0.1)
    rows = by_key(numbers)
    # The automatic choice is one that was asked for by name.
    assert list(rows) == ["cuboid-2x2x2", "cuboid-auto", "autotp-8", "fsdp2", "fsdp2-keep"]
    for row in rows.values():
        assert row["sent_bytes"] == row["interface_bytes"] > 0
        assert row["link_s"] == pytest.approx(row["sent_bytes"] * 8 / 50e6)
        assert row["floor_s"]["count"] == 1
    for key in ("cuboid-2x2x2", "cuboid-auto"):
        assert rows[key]["sent_bytes"] > rows[key]["counted_bytes"]
    auto = rows["cuboid-auto"]
    assert auto["ratios_bytes"]["autotp-8"] == pytest.approx(rows["autotp-8"]["sent_bytes"] / auto["sent_bytes"])


def test_a_contestant_that_computes_something_else_is_named():
    model = QUICK.model()
    (entry,) = find(["autotp-4"], QUICK, model)
    reference = FirstSteps((3.0, 2.0), 1.0)
    right = [FirstSteps((3.0 + shift, 2.0 - shift), 1.0) for shift in (-0.5, 0.5)]
    assert check(entry, right, reference, "float32").facts["losses"] == [3.0, 2.0]
    assert statistics.fmean(rank.losses[0] for rank in right) == 3.0
    for wrong, what in [
        (FirstSteps((3.1, 2.0), 1.0), "first loss 3.1, but plain Hugging Face in float64 has 3.0"),
        (FirstSteps((3.0, 2.1), 1.0), "loss after a step 2.1, but"),
        (FirstSteps((3.0, 2.0), 1.1), "gradient norm on rank 0 1.1, but"),
        (FirstSteps((float("nan"), 2.0), 1.0), "first loss nan"),
    ]:
        with pytest.raises(CuboidError, match=f"DeepSpeed AutoTP, TP 4 × DP 2 has {what}"):
            check(entry, [wrong, wrong], reference, "float32")


def test_contestants_that_there_are_not_are_refused():
    model = QUICK.model()
    with pytest.raises(CuboidError, match='no contestant autotp8; did you mean "autotp-8"'):
        find(["autotp8"], QUICK, model)
    with pytest.raises(CuboidError, match="cuboid-2x2x4: mesh 2×2×4 has 16 ranks, which don't divide 8"):
        find(["cuboid-2x2x4"], QUICK, model)
    with pytest.raises(CuboidError, match="not of the form BATCHxSEQUENCExHIDDEN"):
        find(["cuboid-cube-kept"], QUICK, model)
    with pytest.raises(CuboidError, match="not of the form BATCHxSEQUENCExHIDDEN"):
        find(["cuboid-cube"], QUICK, model)


@pytest.mark.parametrize("options", [["--rate-mbit", "10"], ["--repeats", "0"], ["--dtype", "float16"]])
def test_options_that_make_no_sense_are_refused(capsys, options):
    with pytest.raises(SystemExit) as ended:
        CASE.parse(options)
    assert ended.value.code == 2
    assert options[0] in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_tells_a_result(result):
    text = Measured("training_step").parts_of({CASE.record_name(result): result})["training step, loopback, float32"]
    assert all(f"| {row['name']} |" in text for row in result["rows"])
    assert all(one["what"] in text for one in comparisons(result["rows"]))
    assert "(figures/training_step_loopback_float32.png)" in text


@pytest.mark.slow
def test_meshes_and_stages_are_measured_beside_what_is_predicted(tmp_path):
    command = [
        sys.executable,
        ROOT / "benchmarks" / "layouts.py",
        "--quick",
        "--dtype",
        "float32",
        "--contestants",
        *QUICK_LAYOUTS,
    ]
    status, output = finish(start(*command, "--out", tmp_path), TIMEOUT_S)
    assert status == 0, output
    result = json.loads((tmp_path / "layouts.json").read_text(encoding="utf-8"))
    assert [row["key"] for row in result["rows"]] == QUICK_LAYOUTS
    assert all(row["error"] < 1e-5 for row in result["rows"])
    assert [row["predicted_s"] is None for row in result["rows"]] == [False, False, True]
    assert all(sentence.replace("**", "") in output for sentence in LAYOUTS.remarks(result))


def test_the_planners_choice_is_judged_by_what_was_measured():
    def row(name, measured_s, predicted_s, family="cuboid"):
        return {"name": name, "family": family, "step_s": {"median": measured_s}, "predicted_s": predicted_s}

    said = judged([row("a", 1.1, 2.0), row("b", 1.0, 3.0), row("c", 2.0, 4.0), row("d", 1.21, None, "autotp")])
    assert "choice of 3 layouts is a: 10.0% behind the fastest, b." in said[0]
    assert said[0].endswith("is 0.50.")
    assert said[1] == "It is 1.10 times as fast as d."
    assert rank_correlation([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
