"""Callbacks for the Trainer, on a mesh with the unmodified one, and in a pipeline with CuboidTrainer."""

import json
import math
import textwrap
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cuboid import ConfigError, CuboidError, LossGuardCallback, MetricsCallback, RunLockCallback
from cuboid.checkpoint.run_lock import LOCK, Holder
from cuboid.distributed.topology import MeshShape, Topology
from cuboid.integrations.callbacks import loss_guard
from cuboid.integrations.run_report.schema import CURVE, REPORT, TrainReport
from launching import as_ranks, world

#: The embedding of this token is NaN.
POISON = 66
SCRIPT = """
    import json, os, signal, sys, time
    import cuboid
    import torch
    from torch.utils.data import Dataset, SequentialSampler
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, logging

    logging.set_verbosity_error()
    plan = json.loads(sys.argv[1])

    class Sequential(cuboid.CuboidTrainer if "pipeline" in plan["config"] else Trainer):
        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

    class Rows(Dataset):
        def __init__(self, numbers, poisoned):
            self.numbers, self.poisoned = numbers, poisoned
        def __len__(self):
            return len(self.numbers)
        def __getitem__(self, index):
            row = self.numbers[index]
            ids = torch.randint(0, 66, (9,), generator=torch.Generator().manual_seed(row))
            if row in self.poisoned:
                ids[3] = 66
            return {"input_ids": ids, "labels": ids}

    def bits(engine):
        states = [x for state in engine.optimizer.optimizer.state.values() for x in state.values() if x.dim()]
        return [x.detach().clone().view(torch.int32) for x in [*engine.module.parameters(), *states]]

    class Bits(TrainerCallback):
        def __init__(self):
            self.after = []
        def on_step_end(self, args, state, control, model=None, **_):
            self.after.append(bits(model.cuboid.state.engine()))

    def trainer_of(out, rows, poisoned, callbacks, **arguments):
        from accelerate.state import AcceleratorState, GradientState
        AcceleratorState._reset_state()
        GradientState._reset_state()
        settings = TrainingArguments(
            out, deepspeed=plan["config"], use_cpu=True, report_to=[], disable_tqdm=True, seed=5,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=len(rows) // 4, logging_steps=1,
            learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=0.5, weight_decay=0.0,
            logging_nan_inf_filter=False, include_num_input_tokens_seen="all", **{"save_strategy": "no", **arguments},
        )
        model = AutoModelForCausalLM.from_pretrained(plan["start"])
        return Sequential(model=model, args=settings, train_dataset=Rows(rows, poisoned), callbacks=callbacks)

    def report(result):
        print("RESULT" + json.dumps(result), flush=True)
"""
JUDGE = """
    same = lambda one, other: len(one) == len(other) and all(map(torch.equal, one, other))
    said = []
    guard, watch = cuboid.LossGuardCallback("skip", say=said.append), Bits()
    trainer_of(plan["out"] + "a", list(range(16)), [11], [guard, watch]).train()
    # The same without the rows of the step that was skipped.
    other = Bits()
    trainer_of(plan["out"] + "b", [*range(8), *range(12, 16)], [], [other]).train()
    stopped, last = None, Bits()
    try:
        trainer_of(plan["out"] + "c", list(range(16)), [11], [cuboid.LossGuardCallback(), last]).train()
    except cuboid.CuboidError as error:
        stopped = str(error)
    went_on = []
    trainer_of(
        plan["out"] + "d", list(range(8)), [5], [cuboid.LossGuardCallback("continue", say=went_on.append)]
    ).train()
    report({
        "said": said, "skipped": guard.skipped, "kept": same(watch.after[2], watch.after[1]),
        "moved": not same(watch.after[3], watch.after[2]), "as without": same(watch.after[3], other.after[2]),
        "stopped": stopped, "steps": len(last.after), "went on": went_on,
    })
    torch.distributed.destroy_process_group()
"""
INTERRUPT = """
    class Signal(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 2 and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                while not stop._interrupts.own()[1]:
                    time.sleep(0.01)

    stop = cuboid.InterruptCallback(plan["max_time_s"], exits=plan["exits"])
    callbacks = [stop, cuboid.MetricsCallback(), cuboid.ReportCallback(), cuboid.RunLockCallback()]
    callbacks += [cuboid.RunProgressCallback()]
    callbacks += [Signal()] if plan["signals"] else []
    trainer = trainer_of(plan["out"], list(range(16)), [], callbacks)
    trainer.train(resume_from_checkpoint=plan["resume"])
    report([str(stop.stopped_by), trainer.state.global_step])
    torch.distributed.destroy_process_group()
"""
ALONE = """
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2 and torch.distributed.get_rank() == 1:
                control.should_training_stop = True

    try:
        trainer_of(plan["out"], list(range(16)), [], [Stop()]).train()
    except cuboid.CuboidError as error:
        report([type(error).__name__, str(error), error.rank])
"""
AGAIN = """
    from pathlib import Path

    saves = {"save_strategy": "steps", "save_steps": 2}
    def run(resume):
        trainer = trainer_of(plan["out"], list(range(16)), [], [], **saves)
        trainer.train(resume_from_checkpoint=resume)
        history = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        return history, bits(trainer.model_wrapped)

    history, weights = run(None)
    # As a run that was killed in the next save leaves it, and one whose state is cut off.
    unfinished = Path(plan["out"]) / "checkpoint-6"
    unfinished.mkdir(exist_ok=True)
    (Path(plan["out"]) / "checkpoint-5").mkdir(exist_ok=True)
    (Path(plan["out"]) / "checkpoint-5" / "trainer_state.json").write_text("{")
    torch.distributed.barrier()
    again, other_weights = run(True)
    try:
        run(str(unfinished))
    except cuboid.CheckpointError as error:
        report([len(history), history == again, all(map(torch.equal, weights, other_weights)), str(error)])
    torch.distributed.destroy_process_group()
"""


def config_of(kind):
    sections = {
        "mesh": {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"sequence": 2}}},
        "pipeline": {"pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 2, "stage_balance": "layers"}},
        "replicas": {"tensor_parallel": {"mode": "3d_tensor", "mesh": {}}},
    }
    return {
        **sections[kind],
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True, "weight_decay": 0.0}},
        **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"),
        "zero_optimization": {"stage": 1},
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("callbacks")
    sizes = {"vocab_size": 67, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    for name, dropout in (("start", 0.0), ("dropping", 0.1)):
        torch.manual_seed(0)
        config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, attention_dropout=dropout, **sizes)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            model.model.embed_tokens.weight[POISON] = math.nan
        model.save_pretrained(path / name)
    for name, body in (("judge", JUDGE), ("interrupt", INTERRUPT), ("alone", ALONE), ("again", AGAIN)):
        (path / f"{name}.py").write_text(textwrap.dedent(SCRIPT) + textwrap.dedent(body))
    return path


def plan_of(root, out, kind, start, **more):
    return json.dumps({"start": str(root / start), "out": str(root / out), "config": config_of(kind), **more})


def results_of(output):
    return [json.loads(line.removeprefix("RESULT")) for line in output.splitlines() if line.startswith("RESULT")]


@pytest.mark.parametrize("kind", ["pipeline", pytest.param("mesh", marks=pytest.mark.slow)])
def test_a_bad_loss_is_named_and_its_update_skipped_to_the_last_bit(root, kind):
    status, output = world(2, root / "judge.py", plan_of(root, kind, kind, "start"))
    assert status == 0, output
    first, second = results_of(output)
    where = "the loss is nan at step {}, in micro-batch 2 of ranks 0, 1; {}"
    for rank, result in enumerate((first, second)):
        assert result["said"] == ([] if result["went on"] == [] else [where.format(3, "its update is skipped")]), rank
        assert result["skipped"] == [3]
        assert all(result[name] for name in ("kept", "moved", "as without")), result
        assert result["stopped"].startswith(where.format(3, "a lower learning rate")), result
        assert result["steps"] == 2
    assert sorted([first["went on"], second["went on"]]) == [
        [],
        [where.format(2, "training goes on").replace("2 of", "1 of")],
    ]


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["mesh", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_a_rank_that_stops_training_alone_is_told_so_on_all(root, kind):
    status, output = world(2, root / "alone.py", plan_of(root, f"alone-{kind}", kind, "start"))
    assert status == 0, output
    # Where the Trainer sums up tokens.
    why = "rank 1 is in the end of training, and rank 0 waits for it in torch.distributed.all_gather ("
    for result in results_of(output):
        assert (result[0], result[1][: len(why)], result[2]) == ("RankError", why, 1)
    assert len(results_of(output)) == 2, output


@pytest.mark.ci
def test_a_checkpoint_that_is_not_whole_is_passed_over_and_one_of_the_last_step_trained_no_further(root):
    status, output = world(2, root / "again.py", plan_of(root, "again", "pipeline", "start"))
    assert status == 0, output
    for steps, same_history, same_weights, refusal in results_of(output):
        assert (steps, same_history, same_weights) == (4, True, True)
        assert "checkpoint-6: isn't whole: the run that wrote it ended" in refusal
    assert len(results_of(output)) == 2, output
    assert (
        output.count(f"checkpoint-6 isn't whole: its run ended while it was written; resuming from {root}/again/") == 1
    )


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["mesh", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_a_signal_of_one_rank_stops_all_with_a_checkpoint_and_a_resumed_run_goes_on_to_the_digit(root, kind):
    def lines_of(out):
        lines = map(json.loads, (root / out / "metrics.jsonl").read_text().splitlines())
        return [{name: line[name] for name in ("step", "loss", "learning_rate")} for line in lines]

    def run(out, status, signals, resume=None, max_time_s=None, exits=True):
        plan = plan_of(root, out, kind, "dropping", signals=signals, resume=resume, max_time_s=max_time_s, exits=exits)
        endings = as_ranks(2, root / "interrupt.py", plan)
        assert [code for code, _ in endings] == [status, status], endings
        return "\n".join(output for _, output in endings)

    out = f"{kind} stopped"
    output = run(out, 143, signals=True)
    assert not (root / out / REPORT).exists()
    assert output.count("stopped by SIGTERM after step 3 of 4; train(resume_from_checkpoint=True) resumes") == 1, output
    assert output.count("stopping after this step") <= 1
    # In a pipe: the first and the last step, and no others in ten seconds.
    assert output.count("step 1/4 · loss ") == 1, output
    if kind == "pipeline":
        assert "{'loss'" not in output
    assert not results_of(output)
    assert [line["step"] for line in lines_of(out)] == [1, 2, 3]
    assert results_of(run(out, 0, signals=False, resume=True)) == [["None", 4]] * 2
    assert results_of(run(f"{kind} whole", 0, signals=False, exits=False)) == [["None", 4]] * 2
    assert not (root / out / LOCK).exists()
    assert lines_of(out) == lines_of(f"{kind} whole")
    pickles = {path.name for path in (root / out / "checkpoint-3").rglob("*") if path.suffix in (".bin", ".pt", ".pth")}
    assert bool(pickles) == (kind == "mesh"), pickles
    report, uninterrupted = (
        TrainReport.model_validate_json((root / name / REPORT).read_text()) for name in (out, f"{kind} whole")
    )
    assert (report.resumed_after, uninterrupted.resumed_after) == ([3], [])
    assert report.train_losses == uninterrupted.train_losses == [line["loss"] for line in lines_of(out)]
    assert (root / out / CURVE).read_bytes().startswith(b"\x89PNG")
    tokens = 2 * 2 * 9  # of a step, whose two micro-batches have two rows
    assert report.speed.tokens == tokens * 4
    # On the mesh, a row of its own fills up the vocabulary of the embedding and the head.
    filled = 2 * 48 if kind == "mesh" else 0
    assert report.parameters == LlamaForCausalLM.from_pretrained(root / "dropping").num_parameters() + filled
    assert [rank.stage for rank in report.ranks] == ([0, 1] if kind == "pipeline" else [0, 0])
    (axis,) = report.ranks[0].sent_bytes_per_step
    assert axis == ("pipe" if kind == "pipeline" else "sequence")
    assert report.ranks == [
        rank.model_copy(update={"peak_memory_bytes": other.peak_memory_bytes})
        for rank, other in zip(uninterrupted.ranks, report.ranks, strict=True)
    ]
    figures = json.loads((root / out / "metrics.jsonl").read_text().splitlines()[1])
    assert figures["tokens_per_s"] > 0
    assert 0 <= figures["idle_share"] < 1
    assert figures["left_s"] > 0
    if kind == "mesh":
        assert "stopped by --max-time after step 1 of 4" in run("late", 124, signals=False, max_time_s=0.01)
        assert results_of(run("late", 0, signals=False, max_time_s=0.01, exits=False)) == [["--max-time", 1]] * 2


def guarding(monkeypatch, losses_of_steps, replicas=1, **options):
    """What a guard says of the losses of some steps, ``[replicas][micro-batches]`` for each."""
    topology = Topology(MeshShape(hidden=2), 2 * replicas)
    mesh = SimpleNamespace(topology=topology, rank=0)
    said = []
    guard = LossGuardCallback("skip", say=said.append, **options)
    guard._engine = SimpleNamespace(global_steps=0)
    monkeypatch.setattr(loss_guard, "mesh_of", lambda _: mesh)
    monkeypatch.setattr(loss_guard, "unwrap", lambda engine: engine)
    monkeypatch.setattr(guard, "_of_replicas", lambda parts: parts)
    decisions = []
    for losses in losses_of_steps:
        decisions.append(guard.decide(losses))
        guard._engine.global_steps += 1
    return guard, decisions, said


def test_a_spike_is_told_from_noise_and_from_a_higher_level(monkeypatch):
    steps = [[[1.0 + 0.01 * (n % 3), 1.0]] for n in range(8)]
    spike, higher = [[5.0, 9.0]], [[3.0, 3.0]]
    guard, decisions, said = guarding(monkeypatch, [spike, *steps, spike], spike=6, window=8)
    # Half a window has to come first.
    assert decisions == [True] * 9 + [False]
    assert guard.skipped == [10]
    assert said[0].startswith("the loss is 14 at step 10, ")
    assert (
        "standard deviations above the mean 2.00875 of the 8 steps before, most of it in micro-batch 2 of ranks 0, 1"
        in said[0]
    )
    _, decisions, _ = guarding(monkeypatch, [*steps, *[higher] * 5], spike=6, window=8)
    assert decisions == [True] * 8 + [False, True, True, True, True]


def test_the_replica_of_a_loss_that_is_no_number_is_named_and_skips_have_an_end(monkeypatch):
    bad = [[1.0, 1.0], [math.inf, math.nan]]
    good = [[1.0, 1.0], [1.0, 1.0]]
    _, decisions, said = guarding(monkeypatch, [good, bad, bad], replicas=2)
    assert decisions == [True, False, False]
    assert said[0].startswith("the loss is nan at step 2, in micro-batch 1 of replica 1 (ranks 2, 3), micro-batch 2 of")
    monkeypatch.setattr(loss_guard, "run_on_all_ranks", lambda action, *_, **__: action())
    with pytest.raises(Exception, match=r"step 4, in .*, and 2 updates before it were skipped; a lower learning rate"):
        guarding(monkeypatch, [good, bad, bad, bad], replicas=2, most_skips=2)


def test_a_guard_that_is_resumed_knows_the_losses_before(monkeypatch):
    steps = [[[1.0 + 0.01 * (n % 3)]] for n in range(8)]
    guard, _, _ = guarding(monkeypatch, steps, spike=6, window=8)
    saved = {"LossGuardCallback": guard.state()}
    state = SimpleNamespace(stateful_callbacks=json.loads(json.dumps(saved)))
    resumed = LossGuardCallback("skip", spike=6, window=8)
    engine = SimpleNamespace(before_update=None)
    monkeypatch.setattr(loss_guard, "engine_of", lambda _: engine)
    resumed.on_train_begin(None, state, None)
    assert resumed.state()["attributes"] == guard.state()["attributes"]
    assert len(guard.state()["attributes"]["recent"]) == 8
    assert engine.before_update is not None
    resumed.on_train_end(None, state, None)
    assert engine.before_update is None
    for wrong in ({"policy": "halt"}, {"spike": math.nan}, {"window": 1}, {"most_skips": 0}):
        with pytest.raises(ConfigError, match=r"bad loss is .*; it (must be|is one of)"):
            LossGuardCallback(**wrong)


def test_without_an_engine_of_cuboids_a_guard_is_refused_and_metrics_are_written(tmp_path):
    state = SimpleNamespace(
        is_world_process_zero=True, global_step=0, max_steps=4, num_input_tokens_seen=0, total_flos=0.0
    )
    args = SimpleNamespace(output_dir=tmp_path / "out", device=torch.device("cpu"), eval_on_start=False)
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="an engine of Cuboid's"):
        LossGuardCallback().on_train_begin(args, state, None, model=model)
    metrics = MetricsCallback()
    metrics.on_train_begin(args, state, None, model=model)
    metrics.on_step_begin(args, state, None)
    state.global_step, state.num_input_tokens_seen = 1, 64
    metrics.on_step_end(args, state, None)
    metrics.on_log(args, state, None, logs={"loss": 2.0, "learning_rate": 0.1, "epoch": 0.5})
    metrics.on_log(args, state, None, logs={"eval_loss": 1.5, "eval_runtime": 1.0})
    metrics.on_log(args, state, None, logs={"train_loss": 1.5})
    metrics.on_train_end(args, state, None)
    first, second = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    names = ["step", "loss", "learning_rate", "grad_norm", "step_s", "tokens_per_s", "memory_bytes", "left_s"]
    assert list(first) == [*names, "idle_share"]
    assert (first["loss"], first["grad_norm"]) == (2.0, None)
    assert second == {"step": 1, "eval_loss": 1.5}


def test_the_folder_of_a_run_belongs_to_it_until_it_ends(tmp_path):
    state, args = SimpleNamespace(is_world_process_zero=True), SimpleNamespace(output_dir=str(tmp_path / "out"))
    saving, going = SimpleNamespace(should_save=True), SimpleNamespace(should_save=False)
    first, second = RunLockCallback(), RunLockCallback()
    first.on_train_begin(args, state, going)
    with pytest.raises(CuboidError, match=r"out' is in use by another run: `training`, process \d+ on host"):
        second.on_train_begin(args, state, going)
    first.on_step_end(args, state, saving)
    first.on_train_end(args, state, going)
    # The folder, in which nothing was written, is gone with the lock.
    assert not (tmp_path / "out").exists()
    second.on_train_begin(args, state, going)
    (tmp_path / "out" / LOCK).write_text(Holder.here("another").model_dump_json())
    second.on_step_end(args, state, going)
    for event in (second.on_step_end, second.on_evaluate):
        with pytest.raises(CuboidError, match="was taken over by another run, `another`"):
            event(args, state, saving)
    second.release()
    assert (tmp_path / "out" / LOCK).exists()
    # One that nobody releases goes with its callback.
    (tmp_path / "out" / LOCK).unlink()
    third = RunLockCallback()
    third.on_train_begin(args, state, going)
    del third
    assert not (tmp_path / "out" / LOCK).exists()
