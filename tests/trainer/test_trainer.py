"""The unmodified Hugging Face Trainer, which finds the mode in ``TrainingArguments(deepspeed=…)``."""

import json
import math
import textwrap
from importlib.util import find_spec

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
)
from transformers.integrations import HfDeepSpeedConfig

from comparing import stored
from cuboid.errors import UnsupportedModelError
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


TRL = """
    import json, sys
    import cuboid
    import torch
    from datasets import Dataset
    from peft import LoraConfig, PeftModel
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast, logging
    )
    from trl import (
        DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
    )

    logging.set_verbosity_error()
    path, out, config, mode = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
    words = ["<pad>", "<eos>", *(f"w{at}" for at in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }} <eos>"
        "{% endgeneration %} {% else %}{{ message.content }} {% endif %}{% endfor %}"
    )
    says = lambda first, count: " ".join(f"w{(first + 7 * at) % 60}" for at in range(count))
    turns = lambda at: [("user", at, 3), ("assistant", at + 5, 2 + at % 3), ("user", at + 9, 2), ("assistant", at, 3)]
    texts = [{"text": says(at, 4 + at % 7)} for at in range(48)]
    answers = [{"prompt": says(at, 3 + at % 4), "completion": " " + says(at + 3, 2 + at % 5)} for at in range(48)]
    chats = [
        {"messages": [{"role": role, "content": says(first, count)} for role, first, count in turns(at)]}
        for at in range(48)
    ]
    pairs = [
        {"prompt": says(at, 4), "chosen": " " + says(at + 3, 5 - at % 2), "rejected": " " + says(at + 11, 3)}
        for at in range(48)
    ]
    margins = [{**pair, "margin": 0.2 * (at % 3)} for at, pair in enumerate(pairs)]
    marked = [{**answer, "label": at % 3 > 0} for at, answer in enumerate(answers)]
    trainer_class, config_class, data, options = {
        "sft": (SFTTrainer, SFTConfig, texts, {}),
        "sft, packed": (SFTTrainer, SFTConfig, texts, {"packing": True, "max_length": 16}),
        "sft, wrapped": (
            SFTTrainer, SFTConfig, texts, {"packing": True, "packing_strategy": "wrapped", "max_length": 12}
        ),
        "sft, padding-free": (SFTTrainer, SFTConfig, texts, {"padding_free": True, "max_length": None}),
        "sft, completions": (SFTTrainer, SFTConfig, answers, {}),
        "sft, assistant's turns": (SFTTrainer, SFTConfig, chats, {"assistant_only_loss": True}),
        "sft, dft": (SFTTrainer, SFTConfig, texts, {"loss_type": "dft"}),
        "sft, lora": (SFTTrainer, SFTConfig, texts, {}),
        "sft, adapter": (SFTTrainer, SFTConfig, texts, {}),
        "dpo, lora": (DPOTrainer, DPOConfig, pairs, {}),
        "reward, lora": (RewardTrainer, RewardConfig, pairs, {}),
        "dpo": (DPOTrainer, DPOConfig, pairs, {}),
        "dpo, reference": (DPOTrainer, DPOConfig, pairs, {}),
        "dpo, adapter": (DPOTrainer, DPOConfig, pairs, {}),
        "dpo, losses": (
            DPOTrainer, DPOConfig, pairs,
            {"loss_type": ["ipo", "aot", "sft"], "loss_weights": [1.0, 0.5, 0.3], "use_weighting": False,
             "ld_alpha": 0.5},
        ),
        "reward": (RewardTrainer, RewardConfig, pairs, {}),
        "reward, centred": (RewardTrainer, RewardConfig, margins, {"center_rewards_coefficient": 0.3}),
        "reward, adapter": (RewardTrainer, RewardConfig, pairs, {}),
        "kto": (KTOTrainer, KTOConfig, marked, {}),
        "kto, reference": (KTOTrainer, KTOConfig, marked, {}),
    }[mode]
    arguments = config_class(
        out, deepspeed=config, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, seed=5, save_strategy="no",
        per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=2, max_steps=3,
        logging_steps=1, learning_rate=1e-3, lr_scheduler_type="constant", max_grad_norm=0.5, **options,
    )
    auto_class = AutoModelForSequenceClassification if "reward" in mode else AutoModelForCausalLM
    models = {"model": auto_class.from_pretrained(path, dtype=torch.float32)}
    if "reference" in mode:
        models["ref_model"] = AutoModelForCausalLM.from_pretrained(path + "-reference", dtype=torch.float32)
    if config and "pipeline" in config:
        trainer_class = type("Staged", (cuboid.CuboidTrainer, trainer_class), {})
    if "adapter" in mode:
        models["model"] = PeftModel.from_pretrained(models["model"], path + "-adapter", is_trainable=True)
    if "lora" in mode:
        options = {"task_type": "SEQ_CLS"} if "reward" in mode else {}
        models["peft_config"] = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, **options)
        # Of the factors, which are made here.
        torch.manual_seed(3)
    trainer = trainer_class(
        **models, args=arguments, train_dataset=Dataset.from_list(data), eval_dataset=Dataset.from_list(data[:8]),
        processing_class=tokenizer,
    )
    trainer.train()
    evaluated = trainer.evaluate()
    if arguments.process_index == 0:
        print("RESULT" + json.dumps([trainer.state.log_history, evaluated]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""
TRL_MODES = (
    *(
        "sft",
        "sft, packed",
        "sft, wrapped",
        "sft, padding-free",
        "sft, completions",
        "sft, assistant's turns",
        "sft, dft",
    ),
    *("dpo, reference", "dpo, lora", "reward", "reward, lora", "kto", "kto, reference"),
)
#: What no two runs have in common.
TIMES = ("runtime", "per_second")


@pytest.fixture(scope="module")
def trl_paths(paths):
    """The script, and what else it loads: a reference model, and one with a head for rewards."""
    (paths / "preferences.py").write_text(textwrap.dedent(TRL))
    config = LlamaConfig.from_pretrained(paths / "start", num_labels=1, pad_token_id=0)
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(paths / "start-reference")
    LlamaForSequenceClassification(config).save_pretrained(paths / "reward")
    # In stages, the initial values of an adapter that is made there are others.
    from peft import LoraConfig, get_peft_model

    options = {"r": 4, "lora_alpha": 32, "target_modules": "all-linear", "init_lora_weights": False}
    for name, model_class, task in (
        ("start", LlamaForCausalLM, "CAUSAL_LM"),
        ("reward", LlamaForSequenceClassification, "SEQ_CLS"),
    ):
        model = model_class.from_pretrained(paths / name)
        get_peft_model(model, LoraConfig(task_type=task, **options)).save_pretrained(paths / f"{name}-adapter")
    return paths


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL isn't installed")
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mode", ["dpo", "sft, lora", *(pytest.param(mode, marks=pytest.mark.slow) for mode in TRL_MODES)]
)
def test_trainers_of_trl_report_what_they_do_without_a_mesh(trl_paths, mode, replicas):
    script, start = trl_paths / "preferences.py", trl_paths / ("reward" if "reward" in mode else "start")
    # As many processes as replicas, since some trainers pair the rows of a process's batch.
    plain = (script, start, trl_paths / "plain", "null", mode)
    expected, expected_evaluation = result_of(*(alone(*plain) if replicas == 1 else world(replicas, *plain)))
    sharded = (script, start, trl_paths / "sharded", json.dumps(config_of({"sequence": 2})), mode)
    reported, evaluation = result_of(*world(2 * replicas, *sharded))
    assert len(expected) == 3
    for step, wanted in zip([*reported, evaluation], [*expected, expected_evaluation], strict=True):
        assert step.keys() == wanted.keys()
        for name in (name for name in step if not name.endswith(TIMES)):
            assert step[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL isn't installed")
@pytest.mark.parametrize(
    ("mode", "mesh", "replicas", "schedule"),
    [
        ("sft", {}, 1, "seq1f1b"),
        pytest.param("sft, packed", {"sequence": 2}, 1, "seq1f1b", marks=pytest.mark.slow),
        pytest.param("sft, completions", {"batch": 2}, 1, "zero_bubble", marks=pytest.mark.slow),
        pytest.param("sft, assistant's turns", {"hidden": 2}, 1, "seq1f1b", marks=pytest.mark.slow),
        pytest.param("sft, padding-free", {}, 2, "zero_bubble", marks=pytest.mark.slow),
        pytest.param("sft, adapter", {"sequence": 2}, 1, "seq1f1b", marks=pytest.mark.slow),
        pytest.param("reward", {}, 1, "seq1f1b", marks=pytest.mark.slow),
        pytest.param("reward, centred", {"sequence": 2}, 1, "zero_bubble", marks=pytest.mark.slow),
        pytest.param("reward, adapter", {}, 2, "seq1f1b", marks=pytest.mark.slow),
        pytest.param("dpo", {}, 1, "seq1f1b", marks=pytest.mark.slow),
        pytest.param("dpo, reference", {"sequence": 2}, 1, "zero_bubble", marks=pytest.mark.slow),
        pytest.param("dpo, adapter", {"sequence": 2}, 1, "seq1f1b", marks=pytest.mark.slow),
        pytest.param("dpo, losses", {}, 2, "seq1f1b", marks=pytest.mark.slow),
        pytest.param("kto", {}, 2, "seq1f1b", marks=pytest.mark.slow),
        pytest.param("kto, reference", {"sequence": 2}, 1, "seq1f1b", marks=pytest.mark.slow),
    ],
)
def test_trainers_of_trl_in_stages_report_what_they_do_in_one_process(trl_paths, mode, mesh, replicas, schedule):
    """Two stages, two segments; with the trainer's own loss and metrics, of training and of evaluation."""
    script, start = trl_paths / "preferences.py", trl_paths / ("reward" if "reward" in mode else "start")
    plain = (script, start, trl_paths / "plain", "null", mode)
    expected, expected_evaluation = result_of(*(alone(*plain) if replicas == 1 else world(replicas, *plain)))
    # The head of rewards reads the last token of a whole row.
    keys = {"engine": "seq1f1b", "stages": 2, "segments": 1 if "reward" in mode else 2}
    config = config_of(mesh) | {"pipeline": {**keys, "stage_balance": "layers", "schedule": schedule}}
    ranks = 2 * replicas * math.prod(mesh.values())
    reported, evaluation = result_of(*world(ranks, script, start, trl_paths / "staged", json.dumps(config), mode))
    assert len(expected) == 3
    for step, wanted in zip([*reported, evaluation], [*expected, expected_evaluation], strict=True):
        assert step.keys() == wanted.keys()
        for name in (name for name in step if not name.endswith(TIMES)):
            assert step[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name


def made_by(module, name, base=Trainer):
    return type(name, (base,), {"__module__": module})


@pytest.mark.parametrize(
    ("trainer", "refused"),
    [
        (made_by("trl.trainer.grpo_trainer", "GRPOTrainer"), "GRPOTrainer"),
        (made_by("mine", "Mine", made_by("trl.trainer.rloo_trainer", "RLOOTrainer")), "RLOOTrainer"),
        # Derived from one that works.
        (made_by("trl.experimental.gold", "GOLDTrainer", made_by("trl", "SFTTrainer")), "GOLDTrainer"),
        (made_by("mine", "Mine", made_by("trl.trainer.sft_trainer", "SFTTrainer")), None),
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
    del kept
