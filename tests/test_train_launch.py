"""`cuboid train` under each launcher, on real processes."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from cuboid.seq1f1b.trace import read_chrome_trace
from cuboid.train.report import Report
from cuboid.train.start import train_tokenizer
from launching import BIN, ROOT, end, finish, free_port, run, start

STEPS, RANKS = 5, 4
MESH = {"batch": 1, "sequence": 2, "hidden": 1}
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "tensor_parallel": {"mode": "3d_tensor", "mesh": MESH},
}
PIPELINE = {"engine": "seq1f1b", "stages": 2, "segments": 3, "partition": [16, 10, 6], "trace": True}
#: Two replicas each: of a mesh of two ranks, and of two stages of one rank.
CONFIGS = {
    "mesh": CONFIG,
    "pipeline": {**{key: CONFIG[key] for key in CONFIG if key != "tensor_parallel"}, "pipeline": PIPELINE},
}
DEEPSPEED = [BIN / "deepspeed", "--quiet", "--master_port", free_port()]
LAUNCHERS = {
    "deepspeed": [*DEEPSPEED, "--num_accelerators", RANKS, "--module"],
    "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", RANKS, "-m"],
    # accelerate's own way to several CPU processes needs MPI; --multi_gpu starts them without asking for GPUs.
    "accelerate": [
        BIN / "accelerate",
        "launch",
        "--multi_gpu",
        "--num_processes",
        RANKS,
        "--main_process_port",
        0,
        "-m",
    ],
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A tiny checkpoint with tied embeddings, text, and configs."""
    folder = tmp_path_factory.mktemp("job")
    texts = [f"def function_{n}(x):\n    return x * {n}\n" * 20 for n in range(60)]
    (folder / "text").mkdir()
    for index, text in enumerate(texts):
        (folder / "text" / f"{index:02}.py").write_text(text)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    train_tokenizer(texts, 300).save_pretrained(folder / "model")
    for name, content in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def train_arguments(job, out, config="mesh"):
    names = {"model": job / "model", "data": job / "text", "config": job / f"{config}.json", "out": out}
    options = [f"--{name}={value}" for name, value in names.items()]
    return ["cuboid.cli", "train", *options, f"--steps={STEPS}", "--sequence-length=32", "--heldout-blocks=5"]


@pytest.mark.parametrize(
    ("launcher", "config"),
    [
        ("deepspeed", "mesh"),
        ("deepspeed", "pipeline"),
        pytest.param("torchrun", "mesh", marks=pytest.mark.slow),
        pytest.param("torchrun", "pipeline", marks=pytest.mark.slow),
        pytest.param("accelerate", "mesh", marks=pytest.mark.slow),
    ],
)
def test_a_run_leaves_a_report_and_a_checkpoint_that_plain_transformers_opens(job, tmp_path, launcher, config):
    status, output = run(*LAUNCHERS[launcher], *train_arguments(job, tmp_path, config))
    assert status == 0, output
    assert output.count(f"step {STEPS}/{STEPS}") == 1, output
    report = Report.model_validate_json((tmp_path / "report.json").read_text())
    check_report(report, job)
    CHECKS[config](report, job, tmp_path, output)
    assert (tmp_path / "loss.png").is_file()

    status, output = run(sys.executable, ROOT / "docs/examples/evaluate.py", tmp_path, "--tokens=5")
    assert status == 0, output
    report = Report.model_validate_json((tmp_path / "report.json").read_text())
    assert report.losses.relative_difference < 1e-5
    assert report.sample.startswith("def ")


def check_report(report, job):
    assert report.losses.last < report.losses.first
    assert report.losses.heldout_last < report.losses.heldout_first
    assert (report.losses.first, report.losses.last) == (report.train_losses[0], report.train_losses[-1])
    assert [point.step for point in report.heldout_losses] == [0, 1, 2, 3, 4, 5]
    assert report.world_size == len(report.ranks) == RANKS
    assert report.parameters == LlamaForCausalLM.from_pretrained(job / "model").num_parameters()
    assert all(rank.peak_memory_bytes > 0 for rank in report.ranks)
    assert report.speed.tokens == STEPS * 2 * 2 * 2 * 32


def check_mesh(report, job, out, output):
    assert report.pipeline is None
    assert report.mesh.model_dump() == {**MESH, "data_parallel": 2}
    assert {rank.parameters for rank in report.ranks} == {report.parameters // 2}
    assert {tuple(rank.sent_bytes_per_step) for rank in report.ranks} == {("sequence",)}
    assert all(rank.sent_bytes_per_step["sequence"] > 0 for rank in report.ranks)


def check_pipeline(report, job, out, output):
    assert report.mesh.model_dump() == {"batch": 1, "sequence": 1, "hidden": 1, "data_parallel": 2}
    pipeline = report.pipeline
    assert (pipeline.stages, pipeline.layers, pipeline.segment_lengths) == (2, [1, 1], [16, 10, 6])
    assert [rank.stage for rank in report.ranks] == [0, 0, 1, 1]
    # Each stage has a layer and the tied embedding, the last one a norm too.
    embedding = 300 * 32
    assert sum(rank.parameters for rank in report.ranks) == 2 * (report.parameters + embedding)
    # In each direction, whole hidden states of both micro-batches pass once.
    assert {rank.sent_bytes_per_step["pipe"] for rank in report.ranks} == {2 * 2 * 32 * 32 * 4}
    trace = pipeline.trace
    assert trace.step == 3
    assert Path(trace.picture) == out / "trace" / "step_3.png"
    assert Path(trace.picture).read_bytes().startswith(b"\x89PNG")
    assert len(read_chrome_trace(trace.perfetto).spans) == 2
    assert 0 < trace.measured_bubble < 1
    assert 0 < trace.simulated_bubble < 1
    assert output.count(f"drawn in {trace.picture}") == 1


CHECKS = {"mesh": check_mesh, "pipeline": check_pipeline}


def test_a_mesh_that_does_not_fit_ends_all_ranks_with_one_message(job, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 3}}})
    )
    arguments = [*train_arguments(job, tmp_path / "out"), f"--config={tmp_path / 'config.json'}"]
    status, output = run(*LAUNCHERS["deepspeed"], *arguments)
    assert status != 0
    assert output.count("cuboid: ") == 1, output
    assert "tensor_parallel.mesh" in output
    assert "Traceback" not in output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(job, tmp_path):
    process = start(*LAUNCHERS["deepspeed"], *train_arguments(job, tmp_path), "--steps=100000", "--evaluations=1")
    try:
        for line in process.stdout:
            if "step 0" in line or "after 0 steps" in line:
                break
        os.killpg(process.pid, signal.SIGINT)
        status, _ = finish(process, timeout_s=60)
    finally:
        end(process)
    assert status != 0
    assert not (tmp_path / "report.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["finetune.py", "pipeline.py"])
def test_the_example_scripts_train(job, tmp_path, script):
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text("def f(x):\n    return x\n" * 1000)
    arguments = (ROOT / "docs/examples" / script, job / "model", text, out)
    status, output = run(*DEEPSPEED, "--num_accelerators", 8, *arguments)
    assert status == 0, output
    assert output.count("step 20: loss") == 1
    LlamaForCausalLM.from_pretrained(out)
    assert (out / "trace" / "step_3.png").is_file() == (script == "pipeline.py")
