"""`cuboid train` under each launcher, on real processes."""

import functools
import json
import math
import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cuboid.data.initial_model import train_tokenizer
from cuboid.errors import CuboidError
from cuboid.integrations.run_report.schema import TrainReport
from cuboid.train.job import TrainOptions, plan
from cuboid.train.resume import find_run
from launching import BIN, ROOT, as_ranks, end, finish, free_port, run, start
from tiny_text import write_model_and_text
from traces import read_chrome_trace
from warm_python import warm_python

STEPS, RANKS = 20, 4
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
#: Two replicas each: of a mesh of two ranks, and of two stages of one rank. One rank with the same batch, and one with
#: slow steps.
CONFIGS = {
    "mesh": CONFIG,
    "pipeline": {**{key: CONFIG[key] for key in CONFIG if key != "tensor_parallel"}, "pipeline": PIPELINE},
    "alone": {**CONFIG, "gradient_accumulation_steps": 4, "tensor_parallel": {"mode": "3d_tensor", "mesh": {}}},
    "long": {**CONFIG, "gradient_accumulation_steps": 250, "tensor_parallel": {"mode": "3d_tensor", "mesh": {}}},
}
DEEPSPEED = [BIN / "deepspeed", "--quiet", "--master_port", free_port()]
SHIELD = [sys.executable, "-P", ROOT / "plugin" / "cuboid" / "failures" / "shielded_launcher.py"]
LAUNCHERS = {
    "none": [sys.executable, "-m"],
    "shielded": [*SHIELD, *DEEPSPEED, "--num_accelerators", RANKS, "--module"],
    "deepspeed": [*DEEPSPEED, "--num_accelerators", RANKS, "--module"],
    "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", RANKS, "-m"],
    # accelerate needs MPI for several CPU processes; --multi_gpu starts them too, without checking for GPUs.
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
    for name, dropout in (("model", 0.0), ("dropping", 0.1)):
        config.attention_dropout = dropout
        LlamaForCausalLM(config).save_pretrained(folder / name)
        train_tokenizer(texts, 300).save_pretrained(folder / name)
    for name, content in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def train_arguments(job, out, config="mesh", *more):
    names = {"model": job / "model", "data": job / "text", "config": job / f"{config}.json", "out": out}
    options = [f"--{name}={value}" for name, value in names.items()]
    return ["cuboid.cli", "train", *options, "--sequence-length=32", "--heldout-blocks=5", *more]


@pytest.fixture(scope="module")
def finished(job, tmp_path_factory):
    """The folder and the output of an uninterrupted run, made once for each launcher and config."""

    @functools.cache
    def run_of(launcher, config):
        out = tmp_path_factory.mktemp("finished")
        arguments = train_arguments(job, out, config, f"--steps={STEPS}")
        status, output = run(warm_python(), *LAUNCHERS[launcher], *arguments)
        assert status == 0, output
        return out, output

    return run_of


def report_of(out):
    return TrainReport.model_validate_json((out / "report.json").read_text())


@pytest.mark.sample(1)
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
def test_a_run_writes_a_report_and_a_model_that_plain_transformers_loads(job, finished, launcher, config):
    out, output = finished(launcher, config)
    assert output.count(f"step {STEPS}/{STEPS}") == 1, output
    report = report_of(out)
    check_report(report, job)
    CHECKS[config](report, job, out, output)
    assert (out / "loss.png").is_file()
    assert not (out / "checkpoints").exists()

    status, output = run(sys.executable, ROOT / "docs/examples/evaluate.py", out, "--tokens=5")
    assert status == 0, output
    report = report_of(out)
    assert report.losses.relative_difference < 1e-5
    assert report.sample.startswith("def ")


def check_report(report, job):
    assert report.losses.last < report.losses.first
    assert report.losses.heldout_last < report.losses.heldout_first
    assert (report.losses.first, report.losses.last) == (report.train_losses[0], report.train_losses[-1])
    assert [point.step for point in report.heldout_losses] == [0, 4, 8, 12, 16, 20]
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
    # In each direction, full hidden states of both micro-batches are sent once.
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
    options = (f"--steps={STEPS}", f"--config={tmp_path / 'config.json'}")
    arguments = train_arguments(job, tmp_path / "out", "mesh", *options)
    results = as_ranks(RANKS, BIN / "cuboid", *arguments[1:])
    assert all(status != 0 for status, _ in results), results
    output = "\n".join(output for _, output in results)
    assert output.count("cuboid: ") == 1, output
    assert "tensor_parallel.mesh" in output
    assert "Traceback" not in output
    assert not (tmp_path / "out").exists()


def interrupt(process, when, *numbers):
    """Send signals to a process and its children: the first after some output, the others when that is confirmed."""
    try:
        for number in numbers:
            assert any(when in line for line in process.stdout), f"{process.args} never says {when!r}"
            os.killpg(process.pid, number)
            when = "stopping after this step"
        return finish(process, timeout_s=120)
    finally:
        end(process)


#: How a run is started and stopped, and its launcher's exit status. DeepSpeed's, which is interrupted too, has another
#: one if it notices its ranks' end before its own.
WAYS = {
    "shielded": ("mesh", signal.SIGINT, {130}),
    "deepspeed": ("pipeline", signal.SIGINT, {-signal.SIGINT, 1}),
    "torchrun": ("mesh", signal.SIGTERM, {1}),
}


@pytest.fixture(scope="module")
def interrupted(job, tmp_path_factory):
    """The folder, the last step and the output of a run that was stopped halfway, made once for each way."""

    @functools.cache
    def run_of(launcher):
        config, number, expected = WAYS[launcher]
        out = tmp_path_factory.mktemp("interrupted")
        options = (f"--steps={STEPS}", "--save-every=3", "--keep-last=2", "--log-every=0")
        process = start(*LAUNCHERS[launcher], *train_arguments(job, out, config, *options))
        status, output = interrupt(process, f"step 6/{STEPS}", number)
        assert status in expected, output
        stopped = re.search(rf"stopped by {number.name} after step (\d+) of {STEPS}; --resume .* from (\S+)", output)
        assert stopped, output
        assert Path(stopped[2]) == out / "checkpoints" / f"global_step{stopped[1]}"
        return out, int(stopped[1]), output

    return run_of


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    ["shielded", pytest.param("deepspeed", marks=pytest.mark.slow), pytest.param("torchrun", marks=pytest.mark.slow)],
)
def test_an_interrupted_run_resumes_to_the_same_losses(job, finished, interrupted, launcher):
    config, _, _ = WAYS[launcher]
    out, step, output = interrupted(launcher)
    assert 6 <= step < STEPS
    assert not (out / "report.json").exists()
    # Besides the last one, a regular one of every third step is kept; older ones are removed.
    regular = (step - 1) // 3 * 3
    names = {path.name for path in (out / "checkpoints").iterdir()}
    assert names == {"latest", f"global_step{regular}", f"global_step{step}"}
    if launcher == "shielded":
        assert "Traceback" not in output

    status, output = run(*LAUNCHERS[launcher], *train_arguments(job, out, config, "--resume"))
    assert status == 0, output
    assert output.count(f"going on after step {step} of {STEPS}, from {out}") == 1, output
    report, uninterrupted = report_of(out), report_of(finished("deepspeed", config)[0])
    assert report.train_losses == uninterrupted.train_losses
    assert report.heldout_losses == uninterrupted.heldout_losses
    assert report.resumed_after == [step]
    assert report.speed.tokens == uninterrupted.speed.tokens
    assert (out / "loss.png").is_file()


@pytest.mark.slow
def test_an_interrupted_run_resumes_on_one_rank(job, finished, interrupted):
    out, step, _ = interrupted("shielded")
    status, output = run(*LAUNCHERS["none"], *train_arguments(job, out, "alone", "--resume", f"--steps={STEPS}"))
    assert status == 0, output
    report, uninterrupted = report_of(out), report_of(finished("deepspeed", "mesh")[0])
    assert report.world_size == 1
    assert report.train_losses[:step] == uninterrupted.train_losses[:step]
    assert report.train_losses == pytest.approx(uninterrupted.train_losses, rel=1e-5)
    assert report.losses.heldout_last == pytest.approx(uninterrupted.losses.heldout_last, rel=1e-5)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_at_once(job, tmp_path):
    process = start(*LAUNCHERS["none"], *train_arguments(job, tmp_path, "long", "--steps=1000"))
    status, output = interrupt(process, "after 0 steps", signal.SIGINT, signal.SIGINT)
    assert status == 130, output
    assert output.count("cuboid: interrupted\n") == 1, output
    assert "Traceback" not in output
    assert not (tmp_path / "checkpoints").exists()


def test_sigterm_saves_a_checkpoint_from_which_only_the_same_batch_resumes(job, tmp_path):
    arguments = train_arguments(job, tmp_path, "alone", "--steps=1000", "--log-every=0")
    process = start(warm_python(), "-m", *arguments)
    status, output = interrupt(process, "step 20/1000", signal.SIGTERM)
    assert status == 143, output
    latest = (tmp_path / "checkpoints" / "latest").read_text()
    assert latest in output
    step = int(latest.removeprefix("global_step"))

    ((status, output),) = as_ranks(1, BIN / "cuboid", *train_arguments(job, tmp_path, "long", "--resume")[1:])
    assert status == 1
    assert f"{latest} had 8 sequences of all ranks in a step, not 500. Give the same again" in output, output

    # A run that was resumed, and killed after it had made the evaluation that the stopped one left to it.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "heldout_loss": 1.0}) + "\n")

    # There is no time for more than a step.
    more = ("--resume", f"--steps={step + 3}")
    arguments = train_arguments(job, tmp_path, "alone", *more, "--max-time=0.1s")[1:]
    ((status, output),) = as_ranks(1, BIN / "cuboid", *arguments)
    assert status == 124, output
    assert f"stopped by --max-time after step {step + 1} of {step + 3}; --resume" in output

    ((status, output),) = as_ranks(1, BIN / "cuboid", *train_arguments(job, tmp_path, "alone", *more)[1:])
    assert status == 0, output
    assert output.count(f"going on after step {step + 1} of {step + 3}") == 1, output
    report = report_of(tmp_path)
    assert report.resumed_after == [step, step + 1]
    figures = [line for line in figures_of(tmp_path) if line["loss"] is not None]
    assert [line["step"] for line in figures] == [*range(1, step + 4)]
    assert [line["loss"] for line in figures] == report.train_losses
    evaluated = [(line["step"], line["heldout_loss"]) for line in figures_of(tmp_path) if line["loss"] is None]
    assert evaluated == [(point.step, point.loss) for point in report.heldout_losses]


@pytest.mark.ci
@pytest.mark.parametrize("has_optimizer", [True, False], ids=["schedule", "schedule and optimizer"])
def test_a_schedule_of_the_trainers_is_resumed_to_the_last_bit(job, tmp_path, has_optimizer):
    arguments = {"lr_scheduler_type": "cosine", "warmup_steps": 2}
    config = dict(CONFIGS["alone"])
    if not has_optimizer:
        arguments |= {"optim": "adamw_torch", "learning_rate": 1e-2}
        del config["optimizer"]
    (tmp_path / "arguments.json").write_text(json.dumps(arguments))
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = (f"--config={tmp_path / 'config.json'}", f"--model={job / 'dropping'}", "--steps=5", "--resume=auto")
    named = (*options, f"--trainer-args={tmp_path / 'arguments.json'}")

    def train(name, *more):
        ((status, output),) = as_ranks(1, BIN / "cuboid", *train_arguments(job, tmp_path / name, "alone", *more)[1:])
        return status, output

    assert train("whole", *named)[0] == 0
    status, output = train("parts", *named, "--max-time=0.1s")
    assert status == 124, output
    assert "--max-time after step 1 of 5" in output
    status, output = train("parts", *(options if has_optimizer else named[:-1]))
    assert status == 1
    assert ("--trainer-args with " if has_optimizer else "optimizer is missing") in output, output
    status, output = train("parts", *named)
    assert status == 0, output
    figures = figures_of(tmp_path / "whole")
    assert figures_of(tmp_path / "parts") == figures
    rates = [line["learning_rate"] for line in figures if line["loss"] is not None]
    # That of the next step: two of warm-up, and a quarter of a period.
    expected = [5e-3, 1e-2, 7.5e-3, 2.5e-3, 0.0]
    assert rates == pytest.approx(expected, abs=1e-12)
    for path in (tmp_path / "whole" / "model").iterdir():
        assert (tmp_path / "parts" / "model" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_a_new_model_has_the_same_weights_on_one_rank_and_on_a_mesh(job, tmp_path):
    prepare = ("-m", "cuboid.cli", "prepare", f"--tokenizer={job / 'model'}", f"--data={job / 'text'}")
    status, output = run(sys.executable, *prepare, f"--out={tmp_path}")
    assert status == 0, output
    assert not (tmp_path / "start").exists()
    losses = {}
    for config, launcher in (("alone", "none"), ("mesh", "torchrun")):
        out = tmp_path / config
        names = {"arch-config": job / "model/config.json", "data": tmp_path / "tokens", "out": out}
        options = [f"--{name}={value}" for name, value in {**names, "config": job / f"{config}.json"}.items()]
        arguments = ("cuboid.cli", "train", *options, "--sequence-length=32", "--heldout-blocks=5", "--steps=2")
        status, output = run(*LAUNCHERS[launcher], *arguments)
        assert status == 0, output
        losses[config] = report_of(out).losses
        assert LlamaForCausalLM.from_pretrained(out / "model").config.vocab_size == 300
    assert losses["mesh"].first == pytest.approx(losses["alone"].first, rel=1e-5)
    assert losses["mesh"].heldout_last == pytest.approx(losses["alone"].heldout_last, rel=1e-4)


def test_a_model_comes_from_a_checkpoint_or_from_a_config_and_a_tokenizer(job, tmp_path):
    def options(**more):
        return TrainOptions(
            **{"model": None, "data": job / "text", "config": job / "alone.json", "out": tmp_path, **more}
        )

    config, tokenizer = job / "model/config.json", job / "model"
    for wrong, message in (
        (options(), "give either --model, a checkpoint, or --arch-config"),
        (options(model=job / "model", arch_config=config), "give either --model, a checkpoint, or --arch-config"),
        (options(model=job / "model", tokenizer=tokenizer), "--tokenizer goes with --arch-config"),
        (
            options(arch_config=config, steps=1),
            r"text' has no tokenizer that transformers can load; name its folder by --tokenizer",
        ),
        (options(arch_config=tmp_path / "none.json"), r"--arch-config '.*none.json' does not exist"),
    ):
        with pytest.raises(CuboidError, match=message):
            plan(wrong)
    from_config = plan(options(arch_config=config, tokenizer=tokenizer, steps=1))
    from_model = plan(options(model=job / "model", steps=1))
    assert (from_config.vocabulary, from_config.model_sha256) == (from_model.vocabulary, from_model.model_sha256)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["finetune.py", "pipeline.py", "scratch.py"])
def test_the_example_scripts_train(job, tmp_path, script):
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text("def f(x):\n    return x\n" * 1000)
    arguments = (ROOT / "docs/examples" / script, job / "model", text, out)
    status, output = run(*DEEPSPEED, "--num_accelerators", 8, *arguments)
    assert status == 0, output
    assert output.count("step 20: loss") == 1
    LlamaForCausalLM.from_pretrained(out)
    assert (out / "trace" / "step_3.png").is_file() == (script == "pipeline.py")


@pytest.mark.slow
def test_the_example_that_resumes_continues(job, tmp_path):
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text("def f(x):\n    return x\n" * 1000)
    arguments = (ROOT / "docs/examples/resume.py", job / "model", text, out, ROOT / "configs/llama_2x2x2.json")
    for first, last in ((1, 10), (11, 20)):
        status, output = run(*DEEPSPEED, "--num_accelerators", 8, *arguments)
        assert status == 0, output
        steps = [int(number) for number in re.findall(r"step (\d+): loss", output)]
        assert steps == list(range(first, last + 1))
        assert (out / "latest").read_text() == f"global_step{last}"
    assert sorted(path.name for path in out.iterdir()) == ["global_step15", "global_step20", "latest"]


# --- killed, and started again by the same command line -------------------------------------------------------------


def start_again(job, out, config):
    """A run on two ranks, by a command line that begins it and goes on with it."""
    launcher = (BIN / "deepspeed", "--quiet", "--master_port", free_port(), "--num_accelerators", 2, "--module")
    options = (f"--steps={STEPS}", "--save-every=3", "--keep-last=2", "--resume", "auto")
    return start(*launcher, *train_arguments(job, out, config, f"--model={job / 'dropping'}", *options))


def ranks_of(launcher):
    """The processes of the ranks, by rank."""
    processes = {}
    for child in psutil.Process(launcher.pid).children(recursive=True):
        for part in child.cmdline():
            if part.startswith("--local_rank="):
                processes[int(part.partition("=")[2])] = child
    return processes


def kill_a_rank_in_a_step(launcher, checkpoints):
    # Some steps aren't printed.
    for beginning in ("checkpoint after 6 steps", "step "):
        assert any(line.startswith(beginning) for line in launcher.stdout)
    ranks_of(launcher)[1].kill()


def kill_all_in_a_save(launcher, checkpoints):
    assert any(line.startswith("checkpoint after 3 steps") for line in launcher.stdout)
    # Stopped in the middle of a save, so that none gets further while the others are killed.
    while launcher.poll() is None:
        if not list(checkpoints.glob("*.incomplete")):
            continue
        everybody = [*psutil.Process(launcher.pid).children(recursive=True), launcher]
        for process in everybody:
            process.send_signal(signal.SIGSTOP)
        is_saving = bool(list(checkpoints.glob("*.incomplete")))
        for process in everybody:
            process.send_signal(signal.SIGKILL if is_saving else signal.SIGCONT)
        if is_saving:
            return
    raise AssertionError("it ended")


@pytest.fixture(scope="module")
def uninterrupted(job, tmp_path_factory):
    """The folder of a run that nobody kills, made once for each config."""

    @functools.cache
    def run_of(config):
        out = tmp_path_factory.mktemp("uninterrupted")
        status, output = finish(start_again(job, out, config), timeout_s=240)
        assert status == 0, output
        assert output.count(f"nothing to resume from in {out}; beginning a new run") == 1, output
        return out

    return run_of


@pytest.mark.slow
@pytest.mark.parametrize(("config", "kill"), [("mesh", kill_all_in_a_save), ("pipeline", kill_a_rank_in_a_step)])
def test_a_killed_run_goes_on_by_the_same_command_line_as_if_nothing_had_happened(
    job, uninterrupted, tmp_path, config, kill
):
    launcher = start_again(job, tmp_path, config)
    try:
        kill(launcher, tmp_path / "checkpoints")
        status, output = finish(launcher, timeout_s=120)
    finally:
        end(launcher)
    assert status != 0, output
    latest = find_run(tmp_path).state.step
    assert latest in range(3, STEPS, 3), output
    # As one that is killed while it writes tokens leaves.
    (tmp_path / "tokens" / f".{'0' * 32}.tokens.json").touch()

    status, output = finish(start_again(job, tmp_path, config), timeout_s=240)
    assert status == 0, output
    assert output.count(f"going on after step {latest} of {STEPS}, from {tmp_path}") == 1, output
    expected_out = uninterrupted(config)
    report, expected = report_of(tmp_path), report_of(expected_out)
    assert report.resumed_after == [latest]
    assert report.train_losses == expected.train_losses
    assert report.heldout_losses == expected.heldout_losses
    for path in (expected_out / "model").iterdir():
        assert (tmp_path / "model" / path.name).read_bytes() == path.read_bytes(), path.name
    assert figures_of(tmp_path) == figures_of(expected_out)
    # Neither a lock nor anything incomplete is left.
    assert files_in(tmp_path) == files_in(expected_out)


def figures_of(folder):
    """What doesn't depend on the machine."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line.get(name) for name in ("step", "loss", "heldout_loss", "learning_rate")} for line in lines]


def files_in(folder):
    # Which step is traced depends on how many were left after a resume.
    paths = (path.relative_to(folder) for path in folder.rglob("*"))
    return sorted(str(path) for path in paths if path.parts[0] != "trace")


@pytest.mark.slow
def test_of_two_runs_that_are_started_together_one_is_refused_with_the_others_name(job, uninterrupted, tmp_path):
    launchers = [start_again(job, tmp_path, "mesh") for _ in range(2)]
    with ThreadPoolExecutor() as threads:
        ended = list(threads.map(functools.partial(finish, timeout_s=240), launchers))
    (status, output), (refused_status, refusal) = sorted(ended, key=lambda one: one[0])
    assert status == 0, output
    assert refused_status == 1, refusal
    named = re.search(r"in use by another run: `cuboid train`, process \d+ on host (\S+), begun 2\d{3}-", refusal)
    assert named, refusal
    assert named[1] == os.uname().nodename
    assert refusal.count("cuboid: ") == 1, refusal
    assert "Traceback" not in refusal
    assert "step 1/" not in refusal
    assert report_of(tmp_path).train_losses == report_of(uninterrupted("mesh")).train_losses
    assert files_in(tmp_path) == files_in(uninterrupted("mesh"))


# --- bad losses ------------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_a_step_with_a_bad_loss_is_skipped_and_the_run_goes_on(job, tmp_path):
    """The model doesn't know one byte, which is in one block of the text."""
    write_model_and_text(tmp_path, layers=1)
    path = tmp_path / "model"
    (unknown,) = AutoTokenizer.from_pretrained(path)("Z")["input_ids"]
    model = LlamaForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.model.embed_tokens.weight[unknown] = math.nan
    model.save_pretrained(path)
    text = (tmp_path / "text").read_text()
    (tmp_path / "text").write_text(text[:3000] + "Z" + text[3000:9000])
    blocks = (len(AutoTokenizer.from_pretrained(path)((tmp_path / "text").read_text())["input_ids"]) // 32) * 24 // 25
    options = (f"--model={path}", f"--data={tmp_path / 'text'}", f"--steps={blocks // 8 + 1}")
    (tmp_path / "more").write_text(text[9000:11000])
    evaluated = (f"--eval=code={tmp_path / 'more'}", f"--eval=all={job / 'text'}")
    logger = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "log"}}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["alone"], **logger}))
    arguments = train_arguments(job, tmp_path / "out", "alone", *options, "--on-bad-loss=skip", *evaluated)[1:]
    arguments.append(f"--config={tmp_path / 'config.json'}")
    ((status, output),) = as_ranks(1, BIN / "cuboid", *arguments)
    assert status == 0, output
    message = re.findall(
        r"the loss is nan at step (\d+), in micro-batch [1-4] of rank 0; its update is skipped", output
    )
    report = report_of(tmp_path / "out")
    assert len(message) in (1, 2), output
    bad = [step for step, loss in enumerate(report.train_losses, start=1) if loss is None]
    assert bad == [int(step) for step in message]
    assert report.losses.heldout_last < report.losses.heldout_first
    # Other texts are evaluated wherever the held-out one is.
    assert all(point.others.keys() == {"code", "all"} for point in report.heldout_losses)
    lines = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    points = [line for line in lines if "heldout_loss" in line]
    expected = [
        {"step": point.step, "heldout_loss": point.loss, **{f"{name}_loss": x for name, x in point.others.items()}}
        for point in report.heldout_losses
    ]
    assert points == expected
    logged = (tmp_path / "log" / "Train_Samples_code_loss.csv").read_text().splitlines()[1:]
    assert [float(line.split(",")[1]) for line in logged] == [point["code_loss"] for point in points]
    assert logged[-1].startswith(f"{report.steps * 8},")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "out" / "model")
    ids = torch.from_numpy(np.load(tmp_path / "out" / "tokens" / "code" / "heldout.npy")).long()
    blocks = ids[: len(ids) // 32 * 32].view(-1, 32)
    blocks = blocks[[n * len(blocks) // 5 for n in range(5)]]
    with torch.no_grad():
        assert points[-1]["code_loss"] == pytest.approx(float(model(input_ids=blocks, labels=blocks).loss), rel=1e-5)
