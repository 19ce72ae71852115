"""The page that ``make gpu`` writes, from results that need no GPU."""

from gpu.page import Result, page

MACHINE = {"GPU": "1 × Some GPU, 80 GiB", "torch": "2.13.0"}
RESULTS = [
    Result("test_kernels.py::test_a[1]", "passed", 1.0, (("Kernels", "bf16", "error", "1e-3"),)),
    Result("test_kernels.py::test_a[2]", "passed", 2.0, (("Kernels", "fp16", "kernel", "CudaFlash"),)),
    Result("test_stage.py::test_b", "failed", 3.0),
    Result("test_stage.py::test_c", "skipped", 0.0),
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
