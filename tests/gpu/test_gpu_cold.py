"""The first step of a process, while a kernel on another stream doesn't end, as a receive whose peer is late.

Whatever synchronises the whole device (a kernel's first load, an allocator that has to free) would wait for it.
"""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, time
import torch
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
    side, over = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(10 * torch.cuda.get_device_properties(0).clock_rate * 1e3))
        over.record()
    start = time.perf_counter()
    pipeline.train(iter([batch]), 1)
    torch.cuda.current_stream().synchronize()
    return time.perf_counter() - start, over.query()

if __name__ == "__main__":
    with WorkerPool(1) as workers:
        ((seconds, is_over),) = workers.run(1, cold, sys.argv[1] == "full", timeout_s=70)
    print(seconds, is_over)
    sys.exit(is_over)
"""


@pytest.mark.gpus(1)
@pytest.mark.parametrize("memory", ["free", "full"])
def test_a_first_step_waits_for_no_other_stream(tmp_path, memory, figure):
    script = tmp_path / "cold.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), memory], capture_output=True, text=True, timeout=85, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figure("A cold first step beside a kernel of ten seconds", f"memory {memory}", "s", done.stdout.split()[0])
