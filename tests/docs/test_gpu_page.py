"""The page that ``make gpu`` writes, from results that need no GPU, and whose time its checks' limits are for."""

import signal

from gpu import conftest
from gpu.page import Result, page

MACHINE = {"GPU": "1 × Some GPU, 80 GiB", "torch": "2.13.0"}
RESULTS = [
    Result("test_kernels.py::test_a[1]", "passed", 1.0, (("Kernels", "bf16", "error", "1e-3"),)),
    Result("test_kernels.py::test_a[2]", "passed", 2.0, (("Kernels", "fp16", "kernel", "CudaFlash"),)),
    Result("test_stage.py::test_b", "failed", 3.0, text="\n".join(f"line {n}" for n in range(100))),
    Result("test_stage.py::test_c", "skipped", 0.0, text="needs 2 GPUs, and there are 1"),
]


def test_the_page_has_the_machine_the_outcomes_and_the_figures():
    lines = page(MACHINE, RESULTS).splitlines()
    assert "| GPU | 1 × Some GPU, 80 GiB |" in lines
    assert "2 checks passed, 1 failed, 1 were skipped." in lines
    assert "* `test_stage.py::test_b`" in lines
    table = lines.index("## Kernels")
    assert lines[table + 2 : table + 6] == [
        "|  | error | kernel |",
        "| --- | --- | --- |",
        "| bf16 | 1e-3 |  |",
        "| fp16 |  | CudaFlash |",
    ]
    assert "| `test_kernels.py` | 2 passed | 3 |" in lines
    assert "| `test_stage.py` | 1 failed, 1 skipped | 3 |" in lines


def test_the_page_has_enough_of_a_failure_to_fix_it():
    lines = page(MACHINE, RESULTS).splitlines()
    assert "* 1: needs 2 GPUs, and there are 1" in lines
    start = lines.index("### `test_stage.py::test_b`")
    assert lines[start + 2 : start + 4] == ["```text", "line 0"]
    assert "…" in lines[start:]
    assert lines[-2:] == ["line 99", "```"]


def test_the_same_failure_of_many_checks_is_shown_once():
    failures = [Result(f"test_a.py::test[{n}]", "failed", 1.0, text="```no kernel image```") for n in range(3)]
    text = page(MACHINE, failures)
    assert text.count("no kernel image") == 1
    assert "### `test_a.py::test[0]` and 2 others" in text
    assert "```no" not in text


def test_the_page_of_a_run_that_was_stopped_says_in_which_check():
    text = page(MACHINE, [RESULTS[0], Result("test_cold.py::test_d", "running", 0.0)])
    assert "before `test_cold.py::test_d` ended" in text
    assert "before" not in page(MACHINE, RESULTS)


def test_the_time_limit_of_a_check_is_for_no_other_test(request):
    # pytest calls this hook of a folder's conftest for all tests of a session.
    running = conftest.pytest_runtest_protocol(request.node)
    next(running)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    running.close()
