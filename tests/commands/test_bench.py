"""`cuboid bench` under a launcher: what it measures is what the formulas and the schedules say."""

import json
import sys

import pytest
import torch

from cuboid.integrations.callbacks import memory_use
from cuboid.train.bench.report import BenchReport
from cuboid.verify import SmallModel
from launching import BIN, world

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}
FP8 = {"recipe": "rowwise_with_gw_hp", "min_dimension": 16}
MESH = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 1, "sequence": 2, "hidden": 1}, "fp8": FP8}}
STAGES = {"pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 2}}


def bench(checkpoint, folder, config, *options):
    """Exit status, what was printed, and the report if there is one."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    arguments = ("--model", checkpoint, "--config", folder / "config.json", "--json", folder / "out" / "report.json")
    status, output = world(
        2, BIN / "cuboid", "bench", *arguments, "--seq-len", 32, "--steps", 2, "--warmup", 1, *options
    )
    report = folder / "out" / "report.json"
    return status, output, json.loads(report.read_text()) if report.exists() else None


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint(SmallModel("llama", layers=2))


def test_a_mesh_sends_what_the_formula_says(model, tmp_path):
    status, output, report = bench(model, tmp_path, {**MESH, "bf16": {"enabled": True}})
    assert status == 0, output
    assert report["sent_bytes"] == report["formula_bytes"] != {}
    assert report["tokens"] == 2 * 2 * 32
    assert len(report["step_s"]) == 2
    assert report["flops"] > 0
    assert report["mfu"] is None, "nobody knows what a CPU could do"
    assert "tokens/s" in output


def test_a_pipeline_sends_each_hidden_state_and_its_gradient_once(model, tmp_path):
    status, output, report = bench(model, tmp_path, STAGES)
    assert status == 0, output
    hidden = 2 * 32 * 64 * 4
    assert report["sent_bytes"] == {"pipe": 2 * hidden}
    assert report["formula_bytes"] is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset a process's peak")
def test_the_peak_counts_from_the_warm_up_also_on_the_cpu():
    # Whatever ran in this process before may have needed more.
    if not memory_use.reset_peak():
        pytest.skip("no /proc/self/clear_refs here")
    block = torch.ones(100 << 20, dtype=torch.uint8)
    before = memory_use.peak_bytes()
    del block
    memory_use.reset_peak()
    assert memory_use.peak_bytes() < before - (80 << 20)
    block = torch.ones(100 << 20, dtype=torch.uint8)
    assert memory_use.peak_bytes() > before - (20 << 20)
    del block


def test_the_median_step_counts():
    report = BenchReport("", "", 100, (1.0, 9.0, 2.0, 4.0), 6e12, 1e12, 2, {}, None, "", 0, None)
    assert report.median_s == 3.0
    assert report.mfu == 1.0
