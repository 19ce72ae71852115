"""`cuboid train`: which run it resumes, when it ends, and how it handles signals."""

import errno
import itertools
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st

from cuboid import CheckpointError, CuboidError
from cuboid.checkpoint import run_lock
from cuboid.checkpoint.format.folder import begin, commit, point_latest
from cuboid.checkpoint.format.manifest import Manifest, record_of
from cuboid.checkpoint.format.state_file import STATE, write_state
from cuboid.cli import app
from cuboid.cli.limits import duration, named_path
from cuboid.failures.interrupts import Interrupts
from cuboid.failures.launched_world import World
from cuboid.integrations.callbacks.metrics_file import METRICS, MetricsFile, digest_of, read_losses
from cuboid.integrations.callbacks.step_times import StepTimes
from cuboid.integrations.deepspeed.training_step import train_step
from cuboid.integrations.loss_mean import LossMean
from cuboid.integrations.run_report.schema import HeldoutPoint
from cuboid.train.checkpoints import RunLength
from cuboid.train.job import TrainOptions, plan
from cuboid.train.prepare import prepare
from cuboid.train.resume import RunState, find_run, reject_other_run
from cuboid.train.run import run
from launching import ROOT, end, finish, start
from tiny_text import write_model_and_text

SHIELD = (sys.executable, "-P", ROOT / "plugin" / "cuboid" / "failures" / "shielded_launcher.py")


# --- the run to resume ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A tiny checkpoint, tokens of its tokenizer, and a config."""
    folder = tmp_path_factory.mktemp("job")
    write_model_and_text(folder, layers=1)
    prepare(folder, model=folder / "model", data=folder / "text", vocabulary=300, seed=0, say=lambda _: None)
    schedule = {"type": "WarmupCosineLR", "params": {"total_num_steps": 300, "warmup_num_steps": 30}}
    pipeline = {"engine": "seq1f1b", "stages": 2, "trace": True, "trace_step": 3}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": optimizer,
        "scheduler": schedule,
        "pipeline": pipeline,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def options(job, tmp_path, monkeypatch):
    # One rank per pipeline stage, as a launcher would set it.
    monkeypatch.setenv("WORLD_SIZE", "2")

    def make(**changes):
        names = {"model": job / "model", "data": job / "tokens", "config": job / "config.json"}
        return TrainOptions(**{**names, "out": tmp_path, "sequence_length": 32, **changes})

    return make


def save(out, step, client):
    """A checkpoint that has only a client state."""
    root, tag = out / "checkpoints", f"global_step{step}"
    folder = begin(root, tag)
    write_state(folder, {"client": client})
    commit(root, tag, Manifest(step=step, files={STATE: record_of(folder / STATE)}))
    point_latest(root, tag)
    return root / tag


@pytest.fixture
def interrupted(options, tmp_path):
    """Writes the checkpoint of a run that was interrupted after 7 of 40 steps; returns its state."""

    def leave(**changes):
        job = plan(options(steps=40))
        state = RunState(
            step=7,
            steps=40,
            seed=0,
            sequence_length=32,
            global_batch=4,
            heldout_blocks=32,
            model_sha256=job.model_sha256,
            data_fingerprint=job.tokens.meta.data_sha256,
            train_losses=[1 / (n + 3) for n in range(7)],
            heldout_losses=[HeldoutPoint(step=0, loss=0.1)],
            step_s=0.5,
            wall_s=10.0,
            resumed_after=[],
        ).model_copy(update=changes)
        save(tmp_path, state.step, state.model_dump())
        return state

    return leave


def test_a_resumed_run_keeps_its_length_unless_steps_is_given(options, interrupted, tmp_path):
    state = interrupted()
    job = plan(options(resume=True))
    assert job.resumed.state == state
    assert job.resumed.path == tmp_path / "checkpoints" / "global_step7"
    assert job.steps == job.config["scheduler"]["params"]["total_num_steps"] == 40
    assert plan(options(resume=True, steps=60)).steps == 60
    assert plan(options(resume=True, steps=7)).steps == 7
    with pytest.raises(CuboidError, match=r"--steps is 6, but the run in .*global_step7 is 7 steps long already"):
        plan(options(resume=True, steps=6))


def test_losses_of_a_run_are_read_back_to_the_last_bit_or_not_at_all(tmp_path):
    path, losses = tmp_path / METRICS, [1 / (n + 3) for n in range(9)]
    metrics = MetricsFile(path, pytest.fail)
    metrics.begin(0)
    metrics.add(0, {"heldout_loss": 2.0})
    for step, loss in enumerate(losses, start=1):
        metrics.add(step, {"loss": loss, "grad_norm": None})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[:2] == [{"step": 0, "heldout_loss": 2.0}, {"step": 1, "loss": 1 / 3, "grad_norm": None}]
    assert read_losses(path, 9, digest_of(losses)) == losses
    # After resuming from an earlier step, the later ones are dropped.
    assert read_losses(path, 6, digest_of(losses[:6])) == losses[:6]
    metrics = MetricsFile(path, pytest.fail)
    metrics.begin(6)
    assert path.read_text().count("\n") == 7
    metrics.add(7, {"loss": 0.5})
    assert read_losses(path, 7, digest_of([*losses[:6], 0.5])) == [*losses[:6], 0.5]
    # Of another run, too short, damaged, or gone.
    assert read_losses(path, 7, digest_of(losses[:7])) is None
    assert read_losses(path, 9, digest_of(losses)) is None
    for damage in (
        b'{"step": 1, "loss": 0.3' + bytes(9000),
        b"[" * 4000,
        b'{"step": 1, "loss": "0.3"}\n',
        b'{"step":\n',
    ):
        path.write_bytes(damage)
        assert read_losses(path, 1, digest_of(losses[:1])) is None
    assert read_losses(tmp_path / "none.jsonl", 2, None) is None


def test_a_line_that_a_killed_run_left_incomplete_is_cut_off(tmp_path):
    path = tmp_path / METRICS
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    metrics = MetricsFile(path, pytest.fail)
    metrics.begin(2)
    metrics.add(2, {"loss": math.inf})
    metrics.sync()
    assert path.read_text() == '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": null}\n'
    # A hash is the same whatever kind of no number a loss was.
    assert read_losses(path, 2, digest_of([3.0, math.inf]))[0] == 3.0
    assert digest_of([3.0, math.inf]) == digest_of([3.0, -math.nan])


def test_an_evaluation_that_a_killed_run_made_after_its_checkpoint_is_written_once(tmp_path):
    path = tmp_path / METRICS
    lines = ['{"step": 0, "heldout_loss": 4.0}\n', '{"step": 1, "loss": 3.0}\n', '{"step": 1, "heldout_loss": 2.0}\n']
    for is_evaluated, left in ((True, 3), (False, 2)):
        path.write_text("".join(lines) + '{"step": 2, "loss": 1.0}\n')
        MetricsFile(path, pytest.fail).begin(1, is_evaluated=is_evaluated)
        assert path.read_text() == "".join(lines[:left])


def test_metrics_that_cannot_be_written_wait_and_are_named_once(tmp_path, monkeypatch):
    path, said = tmp_path / METRICS, []
    metrics = MetricsFile(path, said.append)
    metrics.begin(0)
    with monkeypatch.context() as context:
        context.setattr(
            "cuboid.integrations.callbacks.metrics_file.os.write",
            lambda descriptor, line: os.pwrite(descriptor, line[:4], 0),
        )
        metrics.add(1, {"loss": 3.0})
        metrics.add(2, {"loss": 2.0})
        with pytest.raises(CheckpointError, match="No space left on device"):
            metrics.sync()
    assert said == [f"{path} can't be written (No space left on device); training goes on"]
    assert path.read_text() == ""
    metrics.add(3, {"loss": 1.0})
    assert read_losses(path, 3, digest_of([3.0, 2.0, 1.0])) == [3.0, 2.0, 1.0]


def test_a_file_that_holds_no_metrics_is_not_replaced(options, tmp_path):
    path = tmp_path / METRICS
    path.write_text("mine")
    with pytest.raises(CheckpointError, match="isn't a file of metrics"):
        MetricsFile(path, pytest.fail).begin(0)
    with pytest.raises(CheckpointError, match="isn't a file of metrics"):
        plan(options())
    assert path.read_text() == "mine"


def test_the_trace_step_is_within_the_remaining_steps(options, interrupted):
    interrupted(steps=9)
    assert plan(options(resume=True)).config["pipeline"]["trace_step"] == 2
    assert plan(options(resume=True, steps=70)).config["pipeline"]["trace_step"] == 3


def test_a_run_does_not_resume_with_other_settings(options, interrupted, job, tmp_path):
    interrupted(seed=3, sequence_length=16, data_fingerprint="other", model_sha256="other")
    with pytest.raises(CuboidError) as caught:
        plan(options(resume=True))
    message = str(caught.value)
    for part in ("--seed 3, not 0", "--sequence-length 16, not 32", "another model", "other data"):
        assert part in message
    resumed = find_run(tmp_path)
    resumed.reject_differences(global_batch=4)
    with pytest.raises(CuboidError, match="4 sequences of all ranks in a step, not 6"):
        resumed.reject_differences(global_batch=6)


def test_a_checkpoint_of_another_program_is_not_resumed(options, interrupted, tmp_path):
    with pytest.raises(CheckpointError, match=r"--resume has nothing to resume from: .*is not a folder"):
        plan(options(resume=True))
    save(tmp_path, 3, {"epoch": 2})
    with pytest.raises(CheckpointError, match="global_step3 isn't a checkpoint that this version of `cuboid train`"):
        plan(options(resume=True))


def test_a_new_run_does_not_overwrite_another_ones_checkpoints(options, interrupted, job, tmp_path):
    reject_other_run(tmp_path)
    interrupted()
    with pytest.raises(CuboidError, match=r"the newest is global_step7\)\. Go on with it: --resume \(make train RES"):
        plan(options())
    with pytest.raises(CuboidError, match="has checkpoints of another run"):
        prepare(tmp_path, model=None, data=job / "text", vocabulary=300, seed=0, say=lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_new_run_does_not_replace_another_ones_result(options, job, tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(CuboidError, match=r"has the result of another run \(model\).*another --out \(NAME=…\)"):
        plan(options())
    (tmp_path / "report.json").write_text("{}")
    for begin_run in (
        lambda: plan(options()),
        lambda: prepare(tmp_path, model=None, data=job / "text", vocabulary=300, seed=0, say=lambda _: None),
    ):
        with pytest.raises(CuboidError, match=r"has the result of another run \(.*report.json\)"):
            begin_run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "report.json"]


def test_for_a_damaged_checkpoint_the_error_names_an_intact_one_and_the_option_to_resume_it(
    options, interrupted, tmp_path
):
    root = tmp_path / "checkpoints"
    state = interrupted(step=3, train_losses=[1.0] * 3)
    for step in (5, 7):
        save(tmp_path, step, state.model_copy(update={"step": step, "train_losses": [1.0] * step}).model_dump())
    for damaged in ("global_step5", "global_step7"):
        content = bytearray((root / damaged / STATE).read_bytes())
        content[len(content) // 2] ^= 1
        (root / damaged / STATE).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        plan(options(resume=True))
    message = str(caught.value)
    assert f"{root / 'global_step7' / STATE}: its sha256 isn't the one in manifest.json" in message
    assert "--resume-from global_step3 (make train RESUME=global_step3)" in message
    job = plan(options(resume=True, resume_from="global_step3"))
    assert job.resumed.path == root / "global_step3"
    assert job.resumed.state == state
    for name, expected in (("global_step4", "complete ones there"), ("../x", "isn't the name of a checkpoint")):
        with pytest.raises(CheckpointError, match=expected):
            plan(options(resume=True, resume_from=name))
    (root / "global_step3" / STATE).unlink()
    with pytest.raises(CheckpointError, match="no other checkpoint beside it is intact"):
        plan(options(resume=True))


def test_resume_auto_begins_a_run_and_resumes_it(options, interrupted, tmp_path):
    auto = {"resume": True, "resume_if_any": True}
    assert plan(options(**auto, steps=40)).resumed is None
    # Killed in its first save.
    (tmp_path / "checkpoints" / "global_step7.incomplete").mkdir(parents=True)
    (tmp_path / "checkpoints" / "global_step7.incomplete" / "manifest.json").write_text("{}")
    assert plan(options(**auto, steps=40)).resumed is None
    shutil.rmtree(tmp_path / "checkpoints")
    state = interrupted()
    assert plan(options(**auto)).resumed.state == state
    with pytest.raises(CuboidError, match="--seed 0, not 1"):
        plan(options(**auto, seed=1))


def test_what_a_killed_run_left_half_written_is_removed_before_the_next_begins(options, interrupted, tmp_path):
    interrupted()
    kept = sorted(tmp_path.rglob("*"))
    unfinished = tmp_path / "checkpoints" / "global_step3.incomplete"
    unfinished.mkdir()
    (unfinished / "model.safetensors").touch()
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / f".{'0' * 32}.train.npy").touch()
    with pytest.raises(CheckpointError, match="none"):
        run(options(resume=True, resume_from="none"), World(0, 1, 0), Interrupts())
    assert sorted(tmp_path.rglob("*")) == sorted([*kept, tmp_path / "tokens"])


def test_resume_auto_passes_over_a_damaged_checkpoint_and_says_so(options, interrupted, tmp_path, caplog):
    auto = {"resume": True, "resume_if_any": True}
    root, state = tmp_path / "checkpoints", interrupted()
    for step in (9, 11):
        save(tmp_path, step, state.model_copy(update={"step": step, "train_losses": [1.0] * step}).model_dump())
    # One ends early, and one's manifest is no JSON.
    (root / "global_step11" / STATE).write_bytes(b"")
    (root / "global_step9" / "manifest.json").write_text("{")
    job = plan(options(**auto))
    assert job.resumed.path == root / "global_step7"
    assert "global_step11" in caplog.text
    assert "Resuming from global_step7" in caplog.text
    # Without an intact one, no new run takes its place.
    (root / "global_step7" / STATE).unlink()
    with pytest.raises(CheckpointError, match="no other checkpoint beside it is intact"):
        plan(options(**auto))
    for step in (7, 11):
        shutil.rmtree(root / f"global_step{step}")
    with pytest.raises(CheckpointError, match="nothing to resume from"):
        plan(options(**auto))


def test_resume_auto_begins_again_where_the_result_was_being_written(options, tmp_path):
    auto = {"resume": True, "resume_if_any": True}
    (tmp_path / "model").mkdir()
    with pytest.raises(CuboidError, match="has the result of another run"):
        plan(options(**auto))
    (tmp_path / ".result.incomplete").touch()
    assert plan(options(**auto)).resumed is None
    with pytest.raises(CuboidError, match="has the result of another run"):
        plan(options())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), (False, False, None)),
        (("--resume",), (True, False, None)),
        (("--resume", "auto"), (True, True, None)),
        (("--resume=auto",), (True, True, None)),
        (("--resume", "--seed", "3"), (True, False, None)),
        (("--resume-from", "global_step4"), (True, False, "global_step4")),
        (("--resume", "--resume-from=a"), (True, False, "a")),
        (("--resume", "soon"), "unexpected extra argument"),
        (("--resume=soon",), "'soon' is not one of"),
    ],
)
def test_resume_stands_alone_or_before_auto(arguments, expected, monkeypatch, capsys):
    seen = []

    def note(options, *_):
        seen.append((options.resume, options.resume_if_any, options.resume_from))
        raise CuboidError("seen")

    monkeypatch.setattr("cuboid.train.run.run", note)
    names = ("--model", "m", "--data", "d", "--config", "c", "--out", "o")
    monkeypatch.setattr(sys, "argv", ["cuboid", "train", *names, *arguments])
    with pytest.raises(SystemExit):
        app()
    if isinstance(expected, str):
        assert expected in capsys.readouterr().err
        assert not seen
    else:
        assert seen == [expected]


@pytest.mark.parametrize(
    "place", ["checkpoints", "trace", "checkpoints/global_step20", "loss.png/x", "checkpoints/latest/x"]
)
def test_what_is_in_the_way_of_a_result_is_found_before_training(options, tmp_path, place):
    (tmp_path / place).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / place).write_text("mine")
    with pytest.raises(CheckpointError, match=place.removesuffix("/x").replace(".", r"\.")):
        plan(options(steps=40, save_every=10))
    assert (tmp_path / place).read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("a b", "text", "--eval a b=.*: the name is part of a figure's"),
        ("heldout", "text", "neither heldout nor train"),
        ("code", "none", "--eval code=.*none does not exist"),
        ("code", "empty", "empty' is empty"),
    ],
)
def test_texts_to_evaluate_are_checked_before_anything_is_read(options, job, tmp_path, name, path, message):
    (tmp_path / "empty").touch()
    path = tmp_path / path if path == "empty" else job / path
    with pytest.raises(CuboidError, match=message):
        plan(options(eval_data=((name, path),)))
    with pytest.raises(CuboidError, match="names code twice"):
        plan(options(eval_data=(("code", job / "text"),) * 2))
    with pytest.raises(typer.BadParameter, match="isn't NAME=PATH"):
        named_path("code", "--eval")


def test_what_is_in_the_way_of_tokens_is_found_before_they_are_made(job, tmp_path):
    (tmp_path / "tokens").write_text("mine")
    with pytest.raises(CheckpointError, match=r"tokens: can't be written: .* is a file, not a folder"):
        prepare(tmp_path, model=job / "model", data=job / "text", vocabulary=300, seed=0, say=lambda _: None)


def test_data_that_cannot_be_read_is_blamed_on_data(options, job, tmp_path):
    def prepared(data):
        prepare(tmp_path / "out", model=job / "model", data=data, vocabulary=300, seed=0, say=lambda _: None)

    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one").write_text("words")
    # Reading it is an error of the system, for root too.
    (tmp_path / "texts" / "two").symlink_to("/proc/self/mem")
    with pytest.raises(CuboidError, match=r"^--data: .*texts/two can't be read: Input/output error"):
        prepared(tmp_path / "texts")
    for begin_run in (prepared, lambda data: plan(options(data=data))):
        with pytest.raises(CuboidError, match=r"^--data 'x+' can't be read: File name too long"):
            begin_run(Path("x" * 300))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CuboidError, match="pipe' is neither a file nor a folder"):
        prepared(tmp_path / "pipe")


# --- two runs in one folder ----------------------------------------------------------------------------------------

_HOLDING = """
    import sys, time
    from pathlib import Path
    from cuboid.checkpoint.run_lock import held

    with held(Path(sys.argv[1]), "cuboid train", print):
        print("held", flush=True)
        time.sleep(600)
"""


@pytest.fixture
def held_elsewhere(tmp_path):
    """Another process that holds the lock on the folder."""
    process = start(sys.executable, "-c", textwrap.dedent(_HOLDING), tmp_path)
    assert process.stdout.readline().strip() == "held"
    yield process
    end(process)


def test_a_second_run_is_refused_with_the_first_ones_name_and_a_killed_one_is_taken_over(held_elsewhere, tmp_path):
    def hold():
        with run_lock.held(tmp_path, "cuboid train", print) as lock:
            lock.check()

    named = (
        rf"in use by another run: `cuboid train`, process {held_elsewhere.pid} on host {os.uname().nodename}, begun 2"
    )
    for number in (signal.SIGCONT, signal.SIGSTOP):  # a stopped process goes on some time
        held_elsewhere.send_signal(number)
        with pytest.raises(CuboidError, match=named):
            hold()
    with pytest.raises(CuboidError, match=named):
        prepare(tmp_path, model=None, data=None, vocabulary=300, seed=0, say=print)
    # A zombie, as long as nobody waits for it.
    held_elsewhere.kill()
    os.waitid(os.P_PID, held_elsewhere.pid, os.WEXITED | os.WNOWAIT)
    hold()
    assert list(tmp_path.iterdir()) == []


def test_a_process_id_that_is_another_process_by_now_holds_nothing(tmp_path):
    here = run_lock.Holder.here("cuboid train")
    earlier = here.model_copy(update={"id": "a", "started": here.started - 1})
    (tmp_path / run_lock.LOCK).write_text(earlier.model_dump_json())
    with (
        run_lock.held(tmp_path, "cuboid train", print),
        pytest.raises(CuboidError, match=f"in use by another run: .* process {os.getpid()} on"),
        run_lock.held(tmp_path, "cuboid train", print),
    ):
        pass
    # Left by a process that ended before it had written anything.
    (tmp_path / run_lock.LOCK).touch()
    with run_lock.held(tmp_path, "cuboid train", print):
        pass


def test_another_hosts_lock_is_taken_over_without_a_sign_of_life_and_its_owner_then_stops(tmp_path, monkeypatch):
    for name, seconds in (("_WATCH_S", 1.5), ("_LOOK_S", 0.1), ("_BEAT_S", 0.3)):
        monkeypatch.setattr(run_lock, name, seconds)
    said, there = [], "another boot"
    with run_lock.held(tmp_path, "cuboid train", said.append) as first, monkeypatch.context() as patch:
        patch.setattr(run_lock, "_process_table", lambda: there)
        with (
            pytest.raises(CuboidError, match="in use by another run"),
            run_lock.held(tmp_path, "cuboid train", said.append),
        ):
            pass
        assert "watching for" in said[0]
        first._released.set()  # it is cut off from the file system
        with run_lock.held(tmp_path, "cuboid train", said.append) as second:
            with pytest.raises(CuboidError, match="was taken over by another run"):
                first.check()
            second.check()
            first.release()
            second.check()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / run_lock.LOCK
    path.write_text("mine")
    with pytest.raises(CuboidError, match=r"isn't the lock of a run"), run_lock.held(tmp_path, "cuboid train", print):
        pass
    assert path.read_text() == "mine"
    path.unlink()
    path.mkdir()
    with pytest.raises(CuboidError, match="is a folder"), run_lock.held(tmp_path, "cuboid train", print):
        pass


def test_of_many_that_start_together_one_gets_the_folder(tmp_path):
    (tmp_path / run_lock.LOCK).write_text(
        run_lock.Holder.here("cuboid train").model_copy(update={"started": 1.0}).model_dump_json()
    )
    got, barrier, done = [], threading.Barrier(8), threading.Event()

    def hold():
        barrier.wait()
        try:
            with run_lock.held(tmp_path, "cuboid train", print):
                got.append("held")
                done.wait(20)
        except CuboidError:
            got.append("refused")
        if got.count("refused") == 7:
            done.set()

    threads = [threading.Thread(target=hold) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == ["held", *["refused"] * 7]


def test_an_output_that_cannot_be_written_is_rejected_before_anything_is_read(options, job, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(CheckpointError, match="file is a file, not a folder"):
            plan(options(out=out))
        with pytest.raises(CheckpointError, match="file is a file, not a folder"):
            prepare(out, model=None, data=job / "text", vocabulary=300, seed=0, say=lambda _: None)
    usage = shutil.disk_usage(tmp_path)

    def refuse(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(CheckpointError, match=r"has room for 0\.0 GB"):
            plan(options())
        patch.setattr(tempfile, "TemporaryFile", refuse)
        with pytest.raises(CheckpointError, match="can't be written: Read-only file system"):
            plan(options())
    assert (tmp_path / "file").read_text() == "mine"


def test_keep_last_is_set_in_the_config(options, job, tmp_path):
    assert "checkpoint" not in plan(options()).config
    assert plan(options(keep_last=2)).config["checkpoint"] == {"keep_last": 2}
    settings = json.loads((job / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "checkpoint": {"verify": False, "keep_last": 5}}))
    config = plan(options(keep_last=2, config=tmp_path / "config.json")).config
    assert config["checkpoint"] == {"verify": False, "keep_last": 2}
    with pytest.raises(CuboidError, match="--keep-last is 0"):
        plan(options(keep_last=0))
    with pytest.raises(CuboidError, match="--save-every is -1"):
        plan(options(save_every=-1))


# --- the length of a run -------------------------------------------------------------------------------------------


@given(steps=st.integers(1, 60), evaluations=st.integers(1, 70), save_every=st.integers(0, 70))
def test_the_last_step_is_evaluated_and_saved(steps, evaluations, save_every):
    goal = RunLength(steps, evaluations, save_every)
    evaluated = [step for step in range(steps + 1) if goal.evaluates_after(step)]
    assert evaluated[0] == 0
    assert evaluated[-1] == steps
    assert len(evaluated) == 1 + min(steps, evaluations)
    saved = [step for step in range(1, steps + 1) if goal.saves_after(step)]
    assert saved == (sorted({*range(save_every, steps + 1, save_every), steps}) if save_every else [])


def test_a_run_is_finished_when_its_last_step_is_evaluated():
    goal = RunLength(2, 1, 0)
    first, last = (HeldoutPoint(step=step, loss=1.0) for step in (0, 2))
    assert not goal.is_reached(1, [first])
    assert not goal.is_reached(2, [first])
    assert goal.is_reached(2, [first, last])


def timed(monkeypatch, seconds, **arguments):
    """The clock of a run whose steps took these seconds, with a second between them."""
    ticks = [0.0]
    monkeypatch.setattr("cuboid.integrations.callbacks.step_times.time.perf_counter", lambda: ticks[0])
    times = StepTimes(**arguments)
    for one in seconds:
        ticks[0] += 1
        times.begin()
        ticks[0] += one
        times.end()
    return times


def test_the_mean_step_time_is_that_since_the_run_was_resumed(monkeypatch):
    assert timed(monkeypatch, [9.0, 1.0, 2.0], earlier_s=7.0).mean_s == 1.5
    assert timed(monkeypatch, [9.0], earlier_s=7.0).mean_s == 9.0
    assert timed(monkeypatch, [], earlier_s=7.0).mean_s == 7.0


def test_rates_are_those_since_the_last_line(monkeypatch):
    times = timed(monkeypatch, [9.0, 1.0, 3.0])
    rates = times.rates(10, tokens=26, flops=13.0, peak_flops=4.0)
    assert {**rates, "memory_bytes": None} == pytest.approx(
        {"step_s": 13 / 3, "tokens_per_s": 2, "memory_bytes": None, "left_s": 20, "mfu": 0.25, "idle_share": 3 / 16}
    )
    assert times.rates(10, tokens=0, flops=None, peak_flops=4.0).keys() == {"memory_bytes", "left_s", "idle_share"}


# --- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_reported_and_sigterm_never_ends_the_process(number):
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    reported = threading.Semaphore(0)
    with Interrupts() as interrupts:
        interrupts.defer(reported.release)
        assert interrupts.own() == [0, 0, 0]
        for later in (number, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), later)
        assert reported.acquire(timeout=20)
        deadline = time.monotonic() + 20
        while not interrupts.own()[1] and time.monotonic() < deadline:
            time.sleep(0.001)
        assert interrupts.own() == [float(number is signal.SIGINT), 1, 0]
        assert not reported.acquire(blocking=False)
        assert interrupts.stop is None
        interrupts.agree([0, 0, 0])
        assert interrupts.stop is None
        interrupts.agree([0, 3, 1])
        interrupts.agree([1, 3, 1])
        assert interrupts.stop is signal.SIGTERM
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers


#: Lines are written with one call each, since several processes write to one pipe.
RANK = """
import os, signal, subprocess, sys, time
kind, own = sys.argv[1], [sys.executable, "-c", open(sys.argv[2]).read()]
children = [subprocess.Popen([*own, "child", sys.argv[2]])] if kind == "rank" else []
def on_signal(number, _):
    os.write(1, f"{kind} got {number}\\n".encode())
    for child in children:
        child.kill()
    if kind != "stubborn":
        sys.exit(128 + number)
for number in (2, 15):
    signal.signal(number, on_signal)
os.write(1, f"{kind} ready\\n".encode())
time.sleep(600)
"""
LAUNCHER = """
import os, signal, subprocess, sys, time
signal.signal(2, lambda *_: os.write(1, b"launcher got 2\\n"))
kind, count, script = sys.argv[1], int(sys.argv[2]), sys.argv[3]
command = [sys.executable, "-c", open(script).read(), kind, script]
ranks = [subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": str(rank)}) for rank in range(count)]
os.write(1, b"launcher ready\\n")
if not ranks:
    time.sleep(600)
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.fixture
def shielded(tmp_path):
    """Starts a launcher that is shielded, and returns it when that many processes have reported to be ready."""

    def launch(kind, ranks, ready):
        (tmp_path / "rank.py").write_text(RANK)
        (tmp_path / "launcher.py").write_text(LAUNCHER)
        process = start(*SHIELD, sys.executable, tmp_path / "launcher.py", kind, ranks, tmp_path / "rank.py")
        lines = itertools.islice((line for line in process.stdout if "ready" in line), ready)
        assert len(list(lines)) == ready
        return process

    return launch


def test_only_the_ranks_are_signalled_and_the_launcher_exits_with_their_status(shielded):
    process = shielded("rank", 2, ready=5)
    os.killpg(process.pid, signal.SIGINT)
    status, output = finish(process, timeout_s=120)
    assert status == 130
    assert output.count("rank got 2\n") == 2
    assert "launcher got" not in output
    assert "child got" not in output


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_signals_that_ask_to_stop_are_passed_on(shielded, number, status):
    process = shielded("rank", 1, ready=3)
    os.kill(process.pid, number)
    assert finish(process, timeout_s=120) == (status, "rank got 15\n")


def test_a_launcher_without_ranks_is_terminated(shielded):
    process = shielded("rank", 0, ready=1)
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process, timeout_s=120) == (143, "")


def test_the_third_ctrl_c_kills_all_processes(shielded):
    process = shielded("stubborn", 1, ready=2)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "stubborn got 2\n"
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process, timeout_s=120) == (128 + signal.SIGKILL, "")


class _Engine(torch.nn.Module):
    """Notes whether each forward is one of training, whose loss is the first token of the batch."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.modes = []

    def gradient_accumulation_steps(self):
        return 2

    def forward(self, input_ids, labels):
        self.modes.append(self.training)
        return SimpleNamespace(loss=input_ids[0, 0].double() + labels[0, 0])

    def backward(self, loss):
        """Nothing to compute."""

    def step(self):
        """Nothing to update."""


def test_a_step_is_one_of_training_though_models_are_loaded_for_evaluation():
    engine, rows = _Engine().eval(), {"input_ids": torch.full((1, 4), 3), "labels": torch.full((1, 4), 1)}
    assert train_step(engine, iter([rows] * 3)) == 4
    assert engine.modes == [True, True]


def test_an_evaluation_is_the_mean_over_tokens_and_batches_without_any_count_for_nothing():
    mean = LossMean(torch.device("cpu"))
    for loss, tokens in ((6.0, 1), (2.0, 3), (math.nan, 0)):
        mean.add(torch.tensor(loss), tokens)
    assert mean.over_ranks([4.0]) == (3.0, [4.0])
    nothing, _ = LossMean(torch.device("cpu")).over_ranks()
    assert math.isnan(nothing)


def test_a_run_is_late_if_another_step_and_a_save_would_end_too_late(monkeypatch):
    monkeypatch.setattr(
        "cuboid.integrations.callbacks.step_times.time.time", lambda: psutil.Process().create_time() + 100
    )
    assert not timed(monkeypatch, [], earlier_s=50.0).is_late(1)  # at least one step is made
    times = timed(monkeypatch, [30.0, 5.0, 7.0])
    times.saved(began=times._begun + 3.0)
    assert times.is_late(109.5)
    assert not times.is_late(110.5)
    with Interrupts() as interrupts:
        interrupts.is_late = lambda: True
        assert interrupts.own() == [0, 0, 1]
        interrupts.agree([0, 0, 1])
        assert interrupts.stop == "--max-time"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5h", 5400),
        ("90m", 5400),
        ("1:30:00", 5400),
        ("05:10", 310),
        ("2-00:00:01", 172801),
        ("1d", 86400),
    ],
)
def test_durations(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0:00", "-5", "1e3", "nan", "5 m", "1:2:3:4", "3-4", "9" * 400, "١"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(typer.BadParameter, match="is no "):
        duration(text)


def test_a_run_of_any_length_is_checked_at_once(options, tmp_path):
    (tmp_path / "checkpoints" / f"global_step{10**12}").mkdir(parents=True)
    (tmp_path / "checkpoints" / f"global_step{10**12}" / "mine").touch()
    plan(options(steps=10**11, save_every=1))
    with pytest.raises(CheckpointError, match="isn't a checkpoint of Cuboid's"):
        plan(options(steps=10**13, save_every=7))


def test_data_that_is_too_little_is_found_before_the_model_is_loaded(options, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one").write_text("words")
    (tmp_path / "texts" / "two").touch()
    for name, message in (("texts", r"texts' holds 1 text files"), ("texts/two", "texts/two' is empty")):
        with pytest.raises(CuboidError, match=message):
            plan(options(data=tmp_path / name))
