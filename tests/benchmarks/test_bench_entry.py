"""The one door to all benchmarks: names, what it refuses, and that a case runs as a user would run it."""

import json
import re
import sys

import pytest

from launching import ROOT, finish, start

sys.path.insert(0, str(ROOT / "benchmarks"))

import run as bench

SCRIPT = ROOT / "benchmarks" / "run.py"
TIMEOUT_S = 200


def door(*arguments):
    """Status and output."""
    return finish(start(sys.executable, SCRIPT, *arguments), TIMEOUT_S)


def test_the_list_says_how_long_and_what_it_needs(capsys):
    assert bench.main(["list"]) == 0
    output = capsys.readouterr().out
    for name, (measures, minutes, needs) in bench.CASES.items():
        assert re.search(rf"^{name} +{re.escape(measures)} +{minutes} +{re.escape(needs)}$", output, re.MULTILINE)


def test_a_near_miss_is_told_what_it_may_mean(capsys):
    assert bench.main(["layer_mesh", "--quick"]) == 2
    assert 'layer_mesh is not a benchmark; did you mean "layer_meshes"?' in capsys.readouterr().err


@pytest.mark.slow
def test_one_case_runs_with_its_options(tmp_path):
    status, output = door("memory", "--quick", "--out", tmp_path)
    assert status == 0, output
    assert json.loads((tmp_path / "memory.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.slow
def test_options_that_a_case_does_not_know_are_its_own_error():
    status, output = door("memory", "--no-such-option")
    assert status == 2
    assert "unrecognized arguments: --no-such-option" in output


@pytest.fixture
def cases(monkeypatch, tmp_path):
    """Three cases in a folder: one works, one fails, and one can't run here."""
    monkeypatch.setattr(bench, "_FOLDER", tmp_path / "benchmarks")
    bench._FOLDER.mkdir()
    (bench._FOLDER / "good.py").write_text("import sys; open(sys.argv[1], 'w').close()\n")
    (bench._FOLDER / "bad.py").write_text("raise SystemExit(3)\n")
    (bench._FOLDER / "elsewhere.py").write_text("raise SystemExit(2)\n")
    monkeypatch.setattr(bench, "CASES", dict.fromkeys(("bad", "good", "elsewhere"), ("something", 1, "–")))
    return tmp_path


def test_a_case_that_fails_does_not_keep_the_others_but_is_told(cases, capfd):
    assert bench.main(["all", str(cases / "written")]) == 1
    assert (cases / "written").exists()
    output = capfd.readouterr().out
    assert re.search(r"^bad +failed with status 3$", output, re.MULTILINE)
    assert re.search(r"^good +done$", output, re.MULTILINE)
    assert re.search(r"^elsewhere +refused, as said above$", output, re.MULTILINE)


def test_a_case_that_cannot_run_here_is_no_failure(cases):
    del bench.CASES["bad"]
    assert bench.main(["all", str(cases / "written")]) == 0
    del bench.CASES["good"]
    assert bench.main(["all", str(cases / "written")]) == 1


def test_an_interrupted_case_ends_all(cases, capfd):
    (bench._FOLDER / "bad.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGTERM)\n")
    assert bench.main(["all", str(cases / "written")]) == 1
    assert not (cases / "written").exists()
    assert "interrupted" in capfd.readouterr().out


def test_links_of_a_set_rate_are_used_where_they_can_be_had(cases, monkeypatch):
    monkeypatch.setattr(bench, "SHAPED", ("good",))
    for reason, expected in ((None, True), ("no root", False)):
        monkeypatch.setattr(bench, "why_not_shaped", lambda reason=reason: reason)
        (bench._FOLDER / "good.py").write_text("import sys; raise SystemExit(sys.argv[1:3] == ['--network', 'shaped'])")
        assert bench.main(["good"]) == expected


def test_make_hands_case_and_arguments_on():
    status, output = finish(start("make", "--dry-run", "bench", "CASE=memory", "ARGS=--quick --repeats 2"), TIMEOUT_S)
    assert status == 0, output
    assert re.search(r"benchmarks/run\.py memory --quick --repeats 2$", output, re.MULTILINE)
    status, output = finish(start("make", "--dry-run", "bench"), TIMEOUT_S)
    assert re.search(r"benchmarks/run\.py all\s*$", output, re.MULTILINE)
