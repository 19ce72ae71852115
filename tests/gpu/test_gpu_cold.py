"""The first units of a process, while a kernel on another stream doesn't end, as a receive whose peer is late.

Whatever synchronises the whole device (a kernel's first load, an allocator that has to free) would wait for it. Before
its first unit a step may wait: no receive has been posted by then.
"""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, time
from unittest import mock
import torch
from cuboid.models.stages.stage_runner import StageRunner
from gpu.test_gpu_stage import SIZES, batch_of, model_of, pipeline_of
from cuboid.verify.workers.pool import WorkerPool

def cold(fill):
    torch.cuda.init()
    model = model_of(SIZES, "cuda", torch.bfloat16)
    pipeline, batch = pipeline_of(model, 4), batch_of("plain", "cuda")
    torch.cuda.synchronize()
    if fill:
        # All but a little: the allocator has to do with what it has.
        free, _ = torch.cuda.mem_get_info()
        kept = torch.empty(max(free - 2 * 2**30, 0), dtype=torch.uint8, device="cuda")
    side, over, started = torch.cuda.Stream(), torch.cuda.Event(), []
    # Newer versions of CUDA don't tell the clock; at 2 GHz, other GPUs take longer.
    kilohertz = getattr(torch.cuda.get_device_properties(0), "clock_rate", 2_000_000)
    forward = StageRunner.forward

    def after_kernel(*args, **options):
        if not started:
            started.append(time.perf_counter())
            with torch.cuda.stream(side):
                torch.cuda._sleep(int(10e3 * kilohertz))
                over.record()
        return forward(*args, **options)

    with mock.patch.object(StageRunner, "forward", after_kernel):
        pipeline.train(iter([batch]), 1)
    torch.cuda.current_stream().synchronize()
    return time.perf_counter() - started[0], over.query()

if __name__ == "__main__":
    with WorkerPool(1) as workers:
        ((seconds, is_over),) = workers.run(1, cold, sys.argv[1] == "full", timeout_s=70)
    print(seconds, is_over)
"""


#: As ``cuboid train`` sets them, which is what is promised; CUDA's own way is only noted.
SETTINGS = {
    "as set by cuboid train": {"CUDA_MODULE_LOADING": "EAGER", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    "as CUDA does by itself": {"CUDA_MODULE_LOADING": "LAZY"},
}


@pytest.mark.gpus(1)
@pytest.mark.parametrize(
    ("settings", "memory"),
    [("as set by cuboid train", "free"), ("as set by cuboid train", "full"), ("as CUDA does by itself", "free")],
)
def test_first_units_wait_for_no_other_stream(tmp_path, settings, memory, figure):
    script = tmp_path / "cold.py"
    script.write_text(SCRIPT, encoding="utf-8")
    # The script finds this package where pytest has found it.
    environment = {**os.environ, **SETTINGS[settings], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(script), memory], env=environment, capture_output=True, text=True, timeout=85, check=False
    )
    seconds, _, is_over = done.stdout.strip().rpartition("\n")[2].partition(" ")
    assert is_over in ("True", "False"), done.stdout + done.stderr
    table = "The first units of a process beside a kernel of ten seconds"
    figure(table, f"{settings}, memory {memory}", "s", f"{float(seconds):.1f}")
    figure(table, f"{settings}, memory {memory}", "waits for it", "yes" if is_over == "True" else "no")
    if settings == "as set by cuboid train":
        assert is_over == "False"
