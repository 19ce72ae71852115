"""The unmodified Hugging Face Trainer, which finds the mode in ``TrainingArguments(deepspeed=…)``."""

import json
import textwrap
from dataclasses import dataclass

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.integrations import HfDeepSpeedConfig

import cuboid
from comparing import stored
from cuboid.errors import ConfigError, UnsupportedModelError
from launching import alone, as_ranks, world

SCRIPT = """
    import json, sys
    import cuboid
    import numpy as np
    import torch
    from torch.utils.data import Dataset
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, logging

    logging.set_verbosity_error()
    path, out, config, rows = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])

    class Tokens(Dataset):
        def __init__(self, count):
            self.ids = torch.randint(0, 67, (count, 11), generator=torch.Generator().manual_seed(3))
        def __len__(self):
            return len(self.ids)
        def __getitem__(self, row):
            labels = self.ids[row].clone()
            labels[: row % 5] = -100
            return {"input_ids": self.ids[row], "labels": labels}

    arguments = TrainingArguments(
        out, deepspeed=config, use_cpu=True, report_to=[], disable_tqdm=True, seed=5, save_strategy="steps",
        save_steps=2,
        per_device_train_batch_size=rows, per_device_eval_batch_size=rows, gradient_accumulation_steps=2,
        max_steps=3, logging_steps=1, learning_rate=1e-3, lr_scheduler_type="constant", max_grad_norm=0.5,
        include_num_input_tokens_seen="all",
    )
    metrics = lambda p: {"shape": list(p.predictions.shape), "mean": float(np.mean(p.predictions))}
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(path), args=arguments, train_dataset=Tokens(int(sys.argv[5])),
        eval_dataset=Tokens(int(sys.argv[6])), compute_metrics=metrics,
    )
    trainer.train(resume_from_checkpoint=sys.argv[7] if len(sys.argv) > 7 else None)
    evaluated = trainer.evaluate()
    trainer.save_model(out)
    if arguments.process_index == 0:
        print("RESULT" + json.dumps([trainer.state.log_history, {**evaluated, "flos": trainer.state.total_flos}]))
    # A rank that leaves first would take the others' connections along.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


EVALUATION = """
    import json, sys
    import cuboid
    import torch
    from transformers import AutoModelForCausalLM, TrainingArguments, logging

    logging.set_verbosity_error()
    path, out, config = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    ids = torch.randint(0, 67, (11, 9), generator=torch.Generator().manual_seed(3))
    labels = ids.masked_fill(torch.arange(9) < torch.arange(11)[:, None] % 9, -100)
    rows = [{"input_ids": x, "labels": y} for x, y in zip(ids, labels)]
    losses = []
    for average in (True, False):
        arguments = TrainingArguments(
            out, deepspeed=config, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_steps=1,
            learning_rate=0.0, lr_scheduler_type="constant", per_device_train_batch_size=2,
            per_device_eval_batch_size=2, average_tokens_across_devices=average,
        )
        model = AutoModelForCausalLM.from_pretrained(path)
        trainer = cuboid.CuboidTrainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    print("RESULT" + json.dumps(losses), flush=True)
    torch.distributed.destroy_process_group()
"""


def config_of(mesh):
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True, "weight_decay": 0.0}},
        "tensor_parallel": {"mode": "3d_tensor", "mesh": mesh},
    }


def result_of(status, output):
    assert status == 0, output
    line = next(line for line in output.splitlines() if line.startswith("RESULT"))
    history, evaluated = json.loads(line.removeprefix("RESULT"))
    return [entry for entry in history if "loss" in entry], evaluated


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("trainer")
    (root / "script.py").write_text(textwrap.dedent(SCRIPT))
    torch.manual_seed(0)
    sizes = {"vocab_size": 67, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
    model.save_pretrained(root / "start")
    return root


def resumes_on_another_mesh(paths, losses, evaluation):
    checkpoint = paths / "sharded2" / "checkpoint-2"
    AutoModelForCausalLM.from_pretrained(checkpoint)
    config = json.dumps(config_of({"hidden": 2}))
    arguments = (paths / "script.py", paths / "start", paths / "resumed", config, 4, 23, 29, checkpoint)
    rest, evaluated = result_of(*world(2, *arguments))
    assert [entry["step"] for entry in rest] == [1, 2, 3]
    assert rest[-1]["loss"] == pytest.approx(losses[-1]["loss"], rel=1e-6)
    assert evaluated["eval_loss"] == pytest.approx(evaluation, rel=1e-6)


def test_an_evaluation_counts_each_label_of_all_replicas_once(paths):
    """Eleven rows in batches of two on two replicas: the last batch of the second one is filled up with a row."""
    (paths / "evaluation.py").write_text(textwrap.dedent(EVALUATION))
    endings = as_ranks(2, paths / "evaluation.py", paths / "start", paths / "evaluated", json.dumps(config_of({})))
    ids = torch.randint(0, 67, (11, 9), generator=torch.Generator().manual_seed(3))
    labels = ids.masked_fill(torch.arange(9) < torch.arange(11)[:, None] % 9, -100)
    expected = LlamaForCausalLM.from_pretrained(paths / "start")(input_ids=ids, labels=labels).loss.item()
    for status, output in endings:
        assert status == 0, output
        by_labels, by_batches = json.loads(output.partition("RESULT")[2].splitlines()[0])
        assert by_labels == pytest.approx(expected, rel=1e-6)
        # The Trainer's own mean, for which there is an argument.
        assert by_batches != pytest.approx(expected, rel=1e-4)


# Two ranks share one stream of data, whose last batch is short, and odd; of four ranks, two pairs have one stream each,
# of which accelerate fills up the last batch, so that only whole batches compare.
@pytest.mark.parametrize(
    ("ranks", "mesh", "trained", "evaluated"),
    [(2, {"batch": 2}, 23, 29), pytest.param(4, {"hidden": 2}, 32, 32, marks=pytest.mark.slow)],
    ids=["one replica", "two replicas"],
)
def test_the_trainer_gives_what_it_gives_alone(paths, ranks, mesh, trained, evaluated):
    rows, replicas = 4, ranks // 2
    script, start = paths / "script.py", paths / "start"
    plain = alone(script, start, paths / f"alone{ranks}", "null", rows * replicas, trained, evaluated)
    expected, expected_evaluation = result_of(*plain)
    arguments = (start, paths / f"sharded{ranks}", json.dumps(config_of(mesh)), rows, trained, evaluated)
    sharded = world(ranks, script, *arguments)
    losses, evaluation = result_of(*sharded)
    assert len(losses) == len(expected) == 3
    for step, expected_step in zip(losses, expected, strict=True):
        assert step["loss"] == pytest.approx(expected_step["loss"], rel=1e-5)
        assert step["grad_norm"] == pytest.approx(expected_step["grad_norm"], rel=1e-4)
        assert step["num_input_tokens_seen"] == expected_step["num_input_tokens_seen"]
    assert evaluation["eval_loss"] == pytest.approx(expected_evaluation["eval_loss"], rel=1e-5)
    assert evaluation["flos"] == expected_evaluation["flos"]
    assert evaluation["eval_shape"] == expected_evaluation["eval_shape"] == [evaluated, 11, 67]
    assert evaluation["eval_mean"] == pytest.approx(expected_evaluation["eval_mean"], rel=1e-3)
    if ranks == 2:
        resumes_on_another_mesh(paths, losses, evaluation["eval_loss"])
    weights, saved = (stored(paths / f"{run}{ranks}") for run in ("alone", "sharded"))
    assert weights.keys() == saved.keys()
    for name, weight in weights.items():
        # Adam's first steps have the size of the learning rate where a gradient is nearly zero, whatever its sign.
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=2e-4, msg=name)


def made_by(module, name, base=Trainer):
    return type(name, (base,), {"__module__": module})


@pytest.mark.parametrize(
    ("trainer", "refused"),
    [
        (made_by("trl.trainer.distillation_trainer", "DistillationTrainer"), "DistillationTrainer"),
        (made_by("mine", "Mine", made_by("trl.trainer.rloo_trainer", "RLOOTrainer")), "RLOOTrainer"),
        # Derived from one that works.
        (
            made_by("trl.experimental.gold", "GOLDTrainer", made_by("trl", "SFTTrainer")),
            "trl.experimental.gold.GOLDTrainer",
        ),
        # It has the name of one that works.
        (
            made_by("trl.experimental.bema", "DPOTrainer", made_by("trl", "DPOTrainer")),
            "trl.experimental.bema.DPOTrainer",
        ),
        (made_by("mine", "Mine", made_by("trl.trainer.sft_trainer", "SFTTrainer")), None),
        (made_by("trl.trainer.grpo_trainer", "GRPOTrainer"), None),
        (made_by("trlx", "PPOTrainer"), None),
    ],
)
def test_trainers_of_trl_that_count_by_rank_are_refused_when_they_are_made(monkeypatch, tmp_path, trainer, refused):
    monkeypatch.setenv("WORLD_SIZE", "2")
    plain = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    kept = HfDeepSpeedConfig(config_of({"hidden": 2}))
    monkeypatch.setenv("WORLD_SIZE", "1")
    said = ""
    try:
        trainer(model=plain, args=TrainingArguments(tmp_path, use_cpu=True, report_to=[]))
    except UnsupportedModelError as error:
        said = str(error)
    assert said.partition(" has no rule")[0] == (f"TRL's {refused}" if refused else "")
    if refused:
        # One whose init isn't the Trainer's.
        with pytest.raises(UnsupportedModelError, match=f"^TRL's {refused} has no rule"):
            object.__new__(trainer).create_optimizer()
    del kept


@dataclass
class OnlineArguments(TrainingArguments):
    use_vllm: bool = False
    sync_ref_model: bool = False


@pytest.mark.parametrize("name", ["use_vllm", "sync_ref_model"])
def test_arguments_of_trl_without_a_rule_are_refused_when_the_trainer_is_made(monkeypatch, tmp_path, name):
    monkeypatch.setenv("WORLD_SIZE", "2")
    kept = HfDeepSpeedConfig(config_of({"hidden": 2}))
    monkeypatch.setenv("WORLD_SIZE", "1")
    trainer = made_by("trl.trainer.grpo_trainer", "GRPOTrainer")
    with pytest.raises(ConfigError, match=f"^{name} can't be combined with tensor_parallel.mode 3d_tensor: "):
        trainer(model=None, args=OnlineArguments(tmp_path, use_cpu=True, report_to=[], **{name: True}))
    del kept


@pytest.mark.parametrize(
    ("options", "named"), [(None, "fused_linear_cross_entropy"), ({"layer_norm": True}, "layer_norm")]
)
def test_ligers_kernels_are_refused_by_name_when_a_trainer_is_made(tmp_path, options, named):
    plain = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    arguments = TrainingArguments(
        tmp_path, use_cpu=True, report_to=[], use_liger_kernel=True, liger_kernel_config=options
    )
    Trainer(model=plain, args=arguments)
    sharded = cuboid.shard(plain, {"tensor_parallel": {"mode": "3d_tensor", "mesh": {}}})
    with pytest.raises(UnsupportedModelError, match=f"use_liger_kernel has no rule for a sharded model.*; {named}: "):
        Trainer(model=sharded, args=arguments)
