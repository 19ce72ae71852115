"""A Trainer script with one changed line, on a pipeline, against the unmodified Trainer in one process."""

import dataclasses
import json
import textwrap
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from comparing import stored
from cuboid.config.schema import split_config
from cuboid.distributed.topology import AXES, MeshShape, Topology
from cuboid.errors import ConfigError
from cuboid_patches import accelerate
from launching import alone, world

#: What the Trainer's argument is called by this version.
CHECKPOINTING = (
    "activation_checkpointing"
    if any(field.name == "activation_checkpointing" for field in dataclasses.fields(TrainingArguments))
    else "gradient_checkpointing"
)
SCRIPT = """
    import json, sys
    import torch
    from torch.utils.data import Dataset, IterableDataset
    from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments, logging

    plan = json.loads(sys.argv[1])
    if plan["config"] is None:
        from transformers import Trainer
    else:
        from cuboid import CuboidTrainer as Trainer

    logging.set_verbosity_error()

    class Stream(IterableDataset):
        def __init__(self, rows):
            self.rows = rows
        def __iter__(self):
            return (self.rows[row] for row in range(len(self.rows)))

    class Tokens(Dataset):
        def __init__(self, count, seed):
            self.ids = torch.randint(0, 67, (count, 11), generator=torch.Generator().manual_seed(seed))
        def __len__(self):
            return len(self.ids)
        def __getitem__(self, row):
            labels = self.ids[row].clone()
            labels[: row % 7] = -100
            return {"input_ids": self.ids[row], "labels": labels}

    class Calls(TrainerCallback):
        def __init__(self):
            self.names = []
        def on_step_begin(self, *args, **kwargs):
            self.names.append("begin")
        def on_substep_end(self, *args, **kwargs):
            self.names.append("substep")
        def on_step_end(self, *args, **kwargs):
            self.names.append("end")

    arguments = TrainingArguments(
        plan["out"], deepspeed=plan["config"], use_cpu=True, report_to=[], disable_tqdm=True, seed=5,
        per_device_train_batch_size=plan["rows"],
        # In one batch, the plain Trainer evaluates the mean over all labels; in several, that of the batches.
        per_device_eval_batch_size=plan["evaluate"] if plan["config"] is None else plan["rows"],
        gradient_accumulation_steps=2, num_train_epochs=2, logging_steps=1, learning_rate=1e-3, warmup_steps=2,
        max_grad_norm=0.5, weight_decay=0.0, include_num_input_tokens_seen="all", **plan["arguments"],
    )
    calls, rows = Calls(), Tokens(plan["train"], 3)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(plan["start"]), args=arguments,
        train_dataset=Stream(rows) if plan["stream"] else rows, eval_dataset=Tokens(plan["evaluate"], 4),
        callbacks=[calls],
    )
    before = None if plan["resume"] else trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=plan["resume"])
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(plan["out"])
    if arguments.process_index == 0:
        state = trainer.state
        print("RESULT" + json.dumps([before, after, state.log_history, calls.names, state.total_flos]))
    # A rank that leaves first would take the others' connections along.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""

SIZES = {"vocab_size": 67, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3}


def config_of(stages, mesh):
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True, "weight_decay": 0.0}},
        "pipeline": {"engine": "seq1f1b", "stages": stages, "segments": 2, "stage_balance": "layers"},
        "tensor_parallel": {"mode": "3d_tensor", "mesh": mesh},
    }


def result_of(status, output):
    assert status == 0, output
    line = next(line for line in output.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("trainer")
    (path / "script.py").write_text(textwrap.dedent(SCRIPT))
    for name, tied in (("untied", False), ("tied", True)):
        torch.manual_seed(0)
        config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, **SIZES)
        LlamaForCausalLM(config).save_pretrained(path / name)
    return path


def plan_of(root, out, start, rows, *, config=None, resume=None, stream=False, train=26, evaluate=13, **arguments):
    arguments = {"eval_strategy": "epoch", "save_strategy": "no", **arguments}
    plan = {"out": str(root / out), "start": str(root / start), "config": config, "resume": resume, "stream": stream}
    return json.dumps({**plan, "rows": rows, "train": train, "evaluate": evaluate, "arguments": arguments})


def compare(expected, result, *, logs_next_rate=False):
    for one, other in zip(expected[:2], result[:2], strict=True):
        assert other == pytest.approx(one, rel=1e-5)
    assert len(expected[2]) == len(result[2])
    tolerances = {"loss": 1e-5, "eval_loss": 1e-5, "grad_norm": 1e-4, "train_loss": 1e-5, "epoch": 1e-9}
    tolerances |= {"num_input_tokens_seen": 0, "step": 0}
    for one, other in zip(expected[2], result[2], strict=True):
        assert {key for key in tolerances if key in one} == {key for key in tolerances if key in other}
        for key in tolerances.keys() & one.keys():
            assert other[key] == pytest.approx(one[key], rel=tolerances[key]), (key, one, other)
    rates, ours = ([entry["learning_rate"] for entry in run[2] if "loss" in entry] for run in (expected, result))
    if logs_next_rate:
        rates, ours = rates[1:], ours[:-1]
    assert ours == pytest.approx(rates, rel=1e-9)
    assert expected[3] == result[3]
    assert result[4] == pytest.approx(expected[4], rel=1e-6)


def compare_weights(root, expected, saved):
    one, other = (stored(root / name) for name in (expected, saved))
    assert one.keys() == other.keys()
    for name, weight in one.items():
        # Adam's first steps have the size of the learning rate where a gradient is nearly zero, whatever its sign.
        torch.testing.assert_close(other[name], weight, rtol=0, atol=2e-4, msg=name)


def test_a_pipeline_trains_evaluates_and_saves_as_one_process_does(root):
    """Seven micro-batches an epoch, the last one short, in groups of two: each epoch ends with a group of one."""
    script, config = root / "script.py", config_of(2, {})
    # The Trainer's own optimizer and schedule.
    del config["optimizer"]
    expected = result_of(*alone(script, plan_of(root, "alone", "tied", 4)))
    plan = plan_of(root, "piped", "tied", 4, config=config, **{CHECKPOINTING: True})
    piped = result_of(*world(2, script, plan))
    assert piped[3].count("end") == 8
    assert piped[3].count("substep") == 6
    compare(expected, piped)
    compare_weights(root, "alone", "piped")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["rows", "stream"])
def test_two_replicas_whose_ranks_are_not_neighbours(root, stream):
    script = root / "script.py"
    # Of a stream, whole epochs of two steps, since the Trainer can't know where they end.
    settings = {"stream": True, "train": 32, "max_steps": 5, "eval_strategy": "no"} if stream else {"train": 40}
    expected = result_of(*alone(script, plan_of(root, f"alone{stream}", "untied", 8, **settings)))
    plan = plan_of(root, f"piped{stream}", "untied", 4, config=config_of(2, {}), **settings)
    # DeepSpeed's optimizer: its engine steps the schedule before the Trainer logs the rate.
    compare(expected, result_of(*world(4, script, plan)), logs_next_rate=True)
    compare_weights(root, f"alone{stream}", f"piped{stream}")


@pytest.mark.slow
def test_a_checkpoint_resumes_where_it_was_saved(root):
    save = {"save_strategy": "steps", "save_steps": 3}
    config = config_of(2, {"sequence": 2})
    uninterrupted = result_of(*world(4, root / "script.py", plan_of(root, "saved", "tied", 4, config=config, **save)))
    checkpoint = str(root / "saved" / "checkpoint-3")
    plan = plan_of(root, "resumed", "tied", 4, config=config, resume=checkpoint, **save)
    resumed = result_of(*world(4, root / "script.py", plan))
    losses, rest = ({e["step"]: e["loss"] for e in run[2] if "loss" in e} for run in (uninterrupted, resumed))
    assert {step: rest[step] for step in range(4, 9)} == pytest.approx({s: losses[s] for s in range(4, 9)}, rel=1e-6)
    assert resumed[1] == pytest.approx(uninterrupted[1], rel=1e-6)
    # What the Trainer saves beside the engine's own files opens with plain transformers.
    reopened = LlamaForCausalLM.from_pretrained(checkpoint).state_dict()
    started = LlamaForCausalLM.from_pretrained(root / "tied").state_dict()
    assert reopened.keys() == started.keys()
    assert not all(torch.equal(reopened[name], started[name]) for name in started)


HALF = """
    import json, sys
    from unittest import mock
    import cuboid, deepspeed, torch
    from deepspeed.accelerator import get_accelerator
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, logging

    logging.set_verbosity_error()
    start, out, config = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    # A collective that would have to be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    class Sequential(cuboid.CuboidTrainer if "pipeline" in config else Trainer):
        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

    class Scales(TrainerCallback):
        seen = []
        def on_step_end(self, *args, **kwargs):
            self.seen.append([float(trainer.deepspeed.optimizer.loss_scale), trainer.deepspeed.skipped_steps])

    ids = torch.randint(0, 67, (28, 9), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": x, "labels": x} for x in ids]
    # torch multiplies float16 on every CPU; DeepSpeed wants one that is fast at it.
    with mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True):
        arguments = TrainingArguments(
            out, deepspeed=config, fp16=True, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
            per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=7, logging_steps=1, warmup_steps=2,
            learning_rate=1e-3, lr_scheduler_type="linear", max_grad_norm=0.5, logging_nan_inf_filter=False,
        )
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float16)
        trainer = Sequential(
            model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:3], callbacks=[Scales()]
        )
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    if arguments.process_index == 0:
        logs = [one for one in trainer.state.log_history if "loss" in one]
        print("RESULT" + json.dumps([[[one["loss"], one["learning_rate"]] for one in logs], Scales.seen, evaluated]))
    torch.distributed.destroy_process_group()
"""


@pytest.mark.ci
def test_float16_scales_and_skips_in_a_pipeline_as_deepspeed_alone_does(root):
    (root / "half.py").write_text(textwrap.dedent(HALF))
    config = config_of(2, {}) | {
        # The first two steps overflow, and the scale grows after every two that don't.
        "fp16": {"enabled": "auto", "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}
    }
    plain = {name: section for name, section in config.items() if name not in ("pipeline", "tensor_parallel")}
    steps, scales, evaluated = result_of(
        *world(1, root / "half.py", root / "untied", root / "half alone", json.dumps(plain))
    )
    piped = result_of(*world(2, root / "half.py", root / "untied", root / "half piped", json.dumps(config)))
    assert [skipped for _, skipped in scales] == [1, 2, 2, 2, 2, 3, 3]
    assert piped[1] == scales
    assert piped[2] == pytest.approx(evaluated, rel=1e-4)
    for step, expected in zip(piped[0], steps, strict=True):
        assert step == pytest.approx(expected, rel=1e-4)


STEPS = """
    import json, sys
    import torch
    from transformers import AutoModelForCausalLM, TrainingArguments, logging

    out, start, config = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    if config is None:
        from transformers import Trainer
    else:
        from cuboid import CuboidTrainer as Trainer
    logging.set_verbosity_error()

    class Masked(Trainer):
        def training_step(self, model, inputs, *counted):
            # The loss is still over the labels that the Trainer has counted.
            labels = inputs["labels"].masked_fill(inputs["labels"] % 3 == 0, -100)
            return super().training_step(model, {**inputs, "labels": labels}, *counted)

    ids = torch.randint(0, 67, (16, 11), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        out, deepspeed=config, use_cpu=True, report_to=[], disable_tqdm=True, seed=5, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, num_train_epochs=2, logging_steps=1, learning_rate=1e-3, save_strategy="no",
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Masked(model=AutoModelForCausalLM.from_pretrained(start), args=arguments, train_dataset=rows)
    trainer.train()
    message = None
    if config is not None:
        try:
            trainer.train()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
    logged = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]
    if int(__import__("os").environ.get("RANK", 0)) == 0:
        print("RESULT" + json.dumps([logged, message]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


def test_a_step_of_ones_own_and_a_second_call_of_train(root):
    (root / "steps.py").write_text(textwrap.dedent(STEPS))
    config = config_of(2, {})
    # The Trainer's own optimizer and schedule.
    del config["optimizer"]
    expected, _ = result_of(*alone(root / "steps.py", root / "steps alone", root / "untied", "null"))
    logged, message = result_of(*world(2, root / "steps.py", root / "steps piped", root / "untied", json.dumps(config)))
    assert len(expected) == 4
    for one, other in zip(expected, logged, strict=True):
        assert other == pytest.approx(one, rel=1e-4)
    assert message.startswith("CuboidError: train() was called before on this trainer")


REFUSALS = """
    import json, sys
    import torch
    from cuboid.errors import CuboidError
    from cuboid import CuboidTrainer
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    out, start, config = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

    class OwnLoss(CuboidTrainer):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    class Derived(Trainer):
        pass

    def message_of(cls=CuboidTrainer, arguments=None, **given):
        options = TrainingArguments(out, deepspeed=config, use_cpu=True, report_to=[], save_strategy="no")
        for name, value in (arguments or {}).items():
            setattr(options, name, value)
        try:
            trainer = cls(model=AutoModelForCausalLM.from_pretrained(start), args=options, **given)
            row = torch.arange(8)
            if cls is OwnLoss:
                trainer.evaluate([{"input_ids": row, "labels": row}])
            trainer.predict([{"input_ids": row, "labels": row}])
        except CuboidError as error:
            return str(error)

    values = {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0}
    names = ["torch_compile", "fp16_full_eval", "bf16_full_eval", "use_liger_kernel", "auto_find_batch_size"]
    messages = {name: message_of(arguments={name: values.get(name, True)}) for name in [*values, *names]}
    messages["compute_loss_func"] = message_of(compute_loss_func=lambda *_: None)
    messages["OwnLoss.compute_loss"] = message_of(OwnLoss)
    messages["compute_metrics"] = message_of(compute_metrics=lambda _: {})
    messages["cuboid.CuboidTrainer in its place"] = message_of(Trainer)
    messages["class Mine(CuboidTrainer, Derived)"] = message_of(Derived)
    of_trl = {"__module__": "trl.trainer", "training_step": lambda *_: None}
    messages["class Mine(CuboidTrainer, SFTTrainer)"] = message_of(type("SFTTrainer", (Trainer,), of_trl))
    messages["TRL's ORPOTrainer trains a loss of its own"] = message_of(type("ORPOTrainer", (CuboidTrainer,), of_trl))
    dpo = type("DPOTrainer", (CuboidTrainer,), {"__module__": "trl.trainer"})
    messages["sync_ref_model"] = message_of(dpo, {"sync_ref_model": True})
    messages["router_aux_loss_coef"] = message_of(dpo, {"router_aux_loss_coef": 0.1})
    messages["predictions"] = message_of()
    allowed = message_of(compute_metrics=lambda _: {}, arguments={"prediction_loss_only": True})
    print("RESULT" + json.dumps([messages, allowed]))
    # A rank that leaves first would take the others' connections along.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


def test_what_a_pipeline_cannot_do_is_refused_by_name(root):
    (root / "refusals.py").write_text(textwrap.dedent(REFUSALS))
    plan = (root / "refused", root / "untied", json.dumps(config_of(1, {})))
    messages, allowed = result_of(*world(1, root / "refusals.py", *plan))
    assert all(message is not None and name in message for name, message in messages.items()), messages
    assert allowed is None


WORLDS = [(4, 2, {}), (8, 2, {"sequence": 2}), (12, 3, {"hidden": 2}), (4, 1, {"sequence": 2})]


@pytest.mark.parametrize(("ranks", "stages", "mesh"), WORLDS)
def test_ranks_of_a_replica_share_their_data_and_no_others_do(monkeypatch, ranks, stages, mesh):
    config = config_of(stages, mesh) | {"train_micro_batch_size_per_gpu": 4}
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))
    monkeypatch.setattr(accelerate, "AcceleratorState", lambda: state)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))

    def loader(dataloader, num_processes=None, process_index=None, dispatch_batches=None, torch_device_mesh=None):
        return num_processes, process_index, dispatch_batches, torch_device_mesh

    prepare = accelerate._prepare_data_loader(loader)
    replicas = {}
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        count, index, dispatches, device_mesh = prepare(
            [], num_processes=ranks, process_index=rank, torch_device_mesh=object()
        )
        assert (dispatches, device_mesh) == (False, None)
        replicas.setdefault(index, []).append(rank)
        with pytest.raises(ConfigError, match="dispatch_batches"):
            prepare([], dispatch_batches=True)
    topology = Topology(MeshShape(**mesh), ranks, stages)
    assert count == topology.data == len(replicas)
    assert list(replicas.values()) == topology.groups(("pipe", *AXES))
    # Of what was gathered from all ranks, one copy of each replica's rows remains, in the order of the replicas.
    gathered = torch.arange(ranks).repeat_interleave(3)
    ours, _ = split_config(config)
    kept = accelerate._one_of_each_copy(gathered, config=ours)
    assert kept.tolist() == [members[0] for members in replicas.values() for _ in range(3)]


def test_other_configs_keep_accelerates_data_loader(monkeypatch):
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config={"tensor_parallel": {"autotp_size": 2}}))
    monkeypatch.setenv("WORLD_SIZE", "4")

    def loader(dataloader, **keywords):
        return keywords

    for other in (state, SimpleNamespace(deepspeed_plugin=None), SimpleNamespace()):
        monkeypatch.setattr(accelerate, "AcceleratorState", lambda other=other: other)
        assert accelerate._prepare_data_loader(loader)([], process_index=3) == {"process_index": 3}


GROUPS = """
    import copy, json, re, sys
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from torch.utils.data import Dataset
    from transformers import AutoModelForCausalLM, TrainingArguments, logging

    plan = json.loads(sys.argv[1])
    if plan["piped"]:
        import cuboid
        from cuboid import CuboidTrainer as Trainer
    else:
        from transformers import Trainer

    logging.set_verbosity_error()

    class Tokens(Dataset):
        def __len__(self):
            return 16
        def __getitem__(self, row):
            ids = torch.randint(0, 67, (11,), generator=torch.Generator().manual_seed(row))
            return {"input_ids": ids, "labels": ids}

    def layer_of(name):
        found = re.search(r"layers\\.(\\d+)\\.", name)
        return 0 if "embed" in name else int(found[1]) + 1 if found else 5

    def trains(case, name):
        return {"lower": layer_of(name) > 2, "upper": layer_of(name) <= 2, "norms": "norm" not in name}.get(case, True)

    def optimizers(case, model):
        rates = {"head": lambda name: "lm_head" in name, "embedding": lambda name: "embed" in name,
                 "layers": layer_of}
        if case not in rates:
            return None, None
        groups = {}
        for name, parameter in model.named_parameters():
            groups.setdefault(int(rates[case](name)), []).append(parameter)
        groups = [{"params": groups[key], "lr": 1e-3 * 0.7**key} for key in sorted(groups)]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    results = []
    for number, (case, config) in enumerate(plan["cases"]):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        arguments = TrainingArguments(
            plan["out"] + str(number), deepspeed=config, use_cpu=True, report_to=[], disable_tqdm=True, seed=5,
            per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2, logging_steps=1,
            learning_rate=1e-3, max_grad_norm=0.5, weight_decay=0.1, save_strategy="no",
        )
        model = cuboid.from_pretrained(plan["start"], config) if plan["piped"] else None
        model = model or AutoModelForCausalLM.from_pretrained(plan["start"])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trains(case, name))
        trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(), optimizers=optimizers(case, model))
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        results.append([[entry[key] for key in ("loss", "grad_norm", "learning_rate")] for entry in logged])
    if int(__import__("os").environ.get("RANK", 0)) == 0:
        print("RESULT" + json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""

ODD_GROUPS = ["lower", "upper", "norms", "head", "embedding", "layers"]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("groupings", "zeros", "layers"),
    [
        (["lower", "head"], [1], [[2, 2]]),
        pytest.param(ODD_GROUPS, [0, 1], [[2, 2], [1, 3]], marks=pytest.mark.slow),
    ],
)
def test_groups_that_differ_by_stage(root, tmp_path, groupings, zeros, layers):
    """Frozen stages with the Trainer's own groups and schedule, and groups and schedule of the script's own."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 4}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "start")
    (tmp_path / "script.py").write_text(textwrap.dedent(GROUPS))
    cases = []
    for grouping in groupings:
        for zero in zeros:
            for counts in layers:
                config = {**config_of(2, {}), "zero_optimization": {"stage": zero}}
                config["pipeline"] |= {"stage_balance": counts}
                del config["optimizer"]
                cases.append((grouping, config))
    plan = {"out": str(tmp_path / "out"), "start": str(tmp_path / "start"), "piped": True, "cases": cases}
    piped = result_of(*world(2, tmp_path / "script.py", json.dumps(plan)))
    plan |= {"piped": False, "cases": [(grouping, None) for grouping in groupings]}
    expected = dict(zip(groupings, result_of(*alone(tmp_path / "script.py", json.dumps(plan))), strict=True))
    for (grouping, config), steps in zip(cases, piped, strict=True):
        assert len(steps) == len(expected[grouping]) == 4
        for step, wanted in zip(steps, expected[grouping], strict=True):
            assert step == pytest.approx(wanted, rel=2e-4), (
                grouping,
                config["zero_optimization"],
                steps,
                expected[grouping],
            )


RATES = """
    import json, sys
    import torch
    import cuboid
    from transformers import TrainingArguments, logging

    logging.set_verbosity_error()
    start, out, resume, config = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
    arguments = TrainingArguments(
        out, deepspeed=config, use_cpu=True, report_to=[], disable_tqdm=True, per_device_train_batch_size=2,
        max_steps=4 if resume else 2, save_strategy="steps", save_steps=2,
    )
    model = cuboid.from_pretrained(start, config)
    # The last stage's come first, which the first stage doesn't have.
    is_upper = lambda name: "lm_head" in name or "layers.2." in name or name == "model.norm.weight"
    groups = [
        {"params": [p for name, p in model.named_parameters() if is_upper(name) == upper], "lr": 2e-2 - 1e-2 * upper}
        for upper in (True, False)
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rows = [{"input_ids": x, "labels": x} for x in torch.randint(0, 67, (16, 9))]
    trainer = cuboid.CuboidTrainer(
        model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, schedule)
    )
    trainer.train(resume_from_checkpoint=resume or None)
    names = [group[0] for group in trainer.deepspeed.checkpointing.groups]
    rates = dict(zip(map(is_upper, names), trainer.deepspeed.get_lr()))
    if arguments.process_index == 0:
        print("RESULT" + json.dumps([names, rates[True], rates[False]]))
    torch.distributed.destroy_process_group()
"""


@pytest.mark.ci
def test_a_schedule_finds_its_groups_on_other_stages(root):
    (root / "rates.py").write_text(textwrap.dedent(RATES))
    orders = []
    for stages, resume in ((1, ""), (2, str(root / "rates" / "checkpoint-2"))):
        config = config_of(stages, {"sequence": 2} if stages == 1 else {})
        del config["optimizer"]
        names, upper, lower = result_of(
            *world(2, root / "rates.py", root / "untied", root / "rates", resume, json.dumps(config))
        )
        orders.append(names)
        steps = 4 if resume else 2
        assert (upper, lower) == pytest.approx((1e-2 / (1 + steps), 2e-2 / (1 + steps)))
    assert len(orders[0]) == 2
    assert orders[0] == orders[1][::-1]
