"""The page that ``make gpu`` writes, from results that need no GPU, and whose time its checks' limits are for."""

import signal
from dataclasses import replace
from pathlib import Path

from gpu import conftest
from gpu.page import Record, Result, page

DOCS = Path(__file__).parents[2] / "docs"
MACHINE = {"GPU": "1 × Some GPU, 80 GiB", "torch": "2.13.0"}
RESULTS = [
    Result("test_kernels.py::test_a[1]", "passed", 1.0, (("Kernels", "bf16", "error", "1e-3"),)),
    Result("test_kernels.py::test_a[2]", "passed", 2.0, (("Kernels", "fp16", "kernel", "CudaFlash"),)),
    Result("test_stage.py::test_b", "failed", 3.0, text="\n".join(f"line {n}" for n in range(100))),
    Result("test_stage.py::test_c", "skipped", 0.0, text="needs 2 GPUs, and there are 1"),
]


def record(results, **machine):
    return Record.of("2026-11-27", "abc1234", {**MACHINE, **machine}, results)


def test_the_page_in_docs_is_that_of_the_records():
    records = [Record.read(path) for path in sorted((DOCS / "data" / "gpu").glob("*.json"))]
    assert (DOCS / "gpu.md").read_text(encoding="utf-8") == page(records) + "\n"


def test_a_record_is_read_as_it_was_written(tmp_path):
    written = record(RESULTS)
    written.write(tmp_path / "record.json")
    read = Record.read(tmp_path / "record.json")
    assert replace(read, passed=tuple(read.passed)) == written


def test_the_page_has_the_machine_the_outcomes_and_the_figures():
    lines = page([record(RESULTS)]).splitlines()
    assert "| GPU | 1 × Some GPU, 80 GiB |" in lines
    assert "| [1](#run-1) | 2026-11-27 | abc1234 | 1 × Some GPU, 80 GiB | 2 | 1 | 1 |" in lines
    table = lines.index("## Kernels")
    assert lines[table + 2 : table + 8] == [
        "Run 1:",
        "",
        "|  | error | kernel |",
        "| --- | --- | --- |",
        "| bf16 | 1e-3 |  |",
        "| fp16 |  | CudaFlash |",
    ]
    assert "| `test_kernels.py` | 2 passed | 3 |" in lines
    assert "| `test_stage.py` | 1 failed, 1 skipped | 3 |" in lines


def test_a_machine_of_several_runs_is_shown_once():
    text = page([record(RESULTS), record(RESULTS[:1]), record(RESULTS, GPU="1 × Another GPU")])
    assert text.count("| GPU | 1 × Some GPU, 80 GiB |") == text.count("| GPU | 1 × Another GPU |") == 1
    assert "## Run 2\n\nOn the machine of [run 1](#run-1), with the same versions.\n" in text


def test_figures_are_those_of_the_newest_run_that_has_them():
    again = Result("test_kernels.py::test_a[2]", "passed", 2.0, (("Kernels", "fp16", "kernel", "CudaCudnn"),))
    text = page([record(RESULTS), record([again], GPU="1 × Another GPU")])
    first, second = text.index("| bf16 | 1e-3 |"), text.index("| fp16 | CudaCudnn |")
    assert text.index("Run 1:") < first < text.index("Run 2:") < second
    assert "CudaFlash" not in text


def test_a_failure_that_a_later_run_has_mended_is_a_line():
    text = page([record(RESULTS), record([Result("test_stage.py::test_b", "passed", 1.0)])])
    assert "Failed, and passed in a later run: `test_stage.py::test_b`." in text
    assert "line 99" not in text
    assert "line 99" in page([record([Result("test_stage.py::test_b", "passed", 1.0)]), record(RESULTS)])


def test_the_page_has_enough_of_a_failure_to_fix_it():
    lines = page([record(RESULTS)]).splitlines()
    assert "* 1: needs 2 GPUs, and there are 1" in lines
    start = lines.index("### Failed: `test_stage.py::test_b`")
    assert lines[start + 2 : start + 4] == ["```text", "line 0"]
    assert "…" in lines[start:]
    assert lines[-2:] == ["line 99", "```"]


def test_the_same_failure_of_many_checks_is_shown_once():
    failures = [Result(f"test_a.py::test[{n}]", "failed", 1.0, text="```no kernel image```") for n in range(3)]
    text = page([record(failures)])
    assert text.count("no kernel image") == 1
    assert "### Failed: `test_a.py::test[0]` and 2 others" in text
    assert "```no" not in text


def test_the_page_of_a_run_that_was_stopped_says_in_which_check():
    text = page([record([RESULTS[0], Result("test_cold.py::test_d", "running", 0.0)])])
    assert "before `test_cold.py::test_d` ended" in text
    assert "before" not in page([record(RESULTS)])


def test_the_time_limit_of_a_check_is_for_no_other_test(request):
    # pytest calls this hook of a folder's conftest for all tests of a session.
    running = conftest.pytest_runtest_protocol(request.node)
    next(running)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    running.close()
