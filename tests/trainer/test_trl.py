"""TRL's trainers, under the launcher of DeepSpeed, report what they report in one process.

TRL isn't among the packages that the tests install. Where it is missing, an environment for it is made in
``build/trl`` once: what ``.venv`` lacks for it, behind everything else.
"""

import json
import math
import os
import sys
import textwrap

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_trainer import config_of as config_of_trainer
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from extra_packages import search_path_with
from launching import BIN, free_port, run, torchrun

pytestmark = pytest.mark.slow

#: TRL and what it needs beside Cuboid's requirements. datasets can't hash tables of pyarrow 26 outside site-packages.
PACKAGES = (
    *("trl==1.16.*", "datasets", "pyarrow", "pandas", "dill", "multiprocess", "xxhash", "fsspec", "requests", "httpx"),
    *("aiohttp", "python-dateutil", "pytz", "tzdata", "six", "urllib3", "charset-normalizer", "idna", "certifi"),
)
SCRIPT = """
    import json, os, sys
    import cuboid
    import torch
    from datasets import Dataset, disable_progress_bars
    from peft import LoraConfig, PeftModel
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast, logging
    )
    from trl import (
        DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig,
        SFTTrainer,
    )

    logging.set_verbosity_error()
    disable_progress_bars()
    # DeepSpeed's launcher adds the rank.
    path, out, config, modes, steps = [text for text in sys.argv[1:] if not text.startswith("--local_rank")]
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
    texts = [{"text": says(at, 4 + at % 7)} for at in range(96)]
    prompts = [{"prompt": says(at, 3 + at % 4)} for at in range(96)]
    answers = [{**prompt, "completion": " " + says(at + 3, 2 + at % 5)} for at, prompt in enumerate(prompts)]
    chats = [
        {"messages": [{"role": role, "content": says(first, count)} for role, first, count in turns(at)]}
        for at in range(96)
    ]
    pairs = [
        {"prompt": says(at, 4), "chosen": " " + says(at + 3, 5 - at % 2), "rejected": " " + says(at + 11, 3)}
        for at in range(96)
    ]
    margins = [{**pair, "margin": 0.2 * (at % 3)} for at, pair in enumerate(pairs)]
    marked = [{**answer, "label": at % 3 > 0} for at, answer in enumerate(answers)]

    def even_words(completions, **_):
        return [sum(word.startswith("w") and int(word[1:]) % 2 == 0 for word in c.split()) / 4 for c in completions]

    def shortness(completion_ids, **_):
        return [-0.1 * len(ids) for ids in completion_ids]

    losses = {
        "loss_type": ["ipo", "aot", "sft"], "loss_weights": [1.0, 0.5, 0.3], "use_weighting": False, "ld_alpha": 0.5
    }
    online = {"num_generations": 2, "max_completion_length": 6}
    known = {
        "sft": (SFTTrainer, SFTConfig, texts, {}),
        "sft packed": (SFTTrainer, SFTConfig, texts, {"packing": True, "max_length": 16}),
        "sft wrapped": (
            SFTTrainer, SFTConfig, texts, {"packing": True, "packing_strategy": "wrapped", "max_length": 12}
        ),
        "sft padding-free": (SFTTrainer, SFTConfig, texts, {"padding_free": True, "max_length": None}),
        "sft completions": (SFTTrainer, SFTConfig, answers, {}),
        "sft assistant's turns": (SFTTrainer, SFTConfig, chats, {"assistant_only_loss": True}),
        "sft dft": (SFTTrainer, SFTConfig, texts, {"loss_type": "dft"}),
        "dpo": (DPOTrainer, DPOConfig, pairs, {}),
        "dpo losses": (DPOTrainer, DPOConfig, pairs, losses),
        "reward": (RewardTrainer, RewardConfig, pairs, {}),
        "reward centred": (RewardTrainer, RewardConfig, margins, {"center_rewards_coefficient": 0.3}),
        "kto": (KTOTrainer, KTOConfig, marked, {}),
        "grpo": (GRPOTrainer, GRPOConfig, prompts, {**online, "beta": 0.0}),
        "grpo with kl": (GRPOTrainer, GRPOConfig, prompts, {**online, "beta": 0.2}),
        "grpo twice": (GRPOTrainer, GRPOConfig, prompts, {**online, "beta": 0.0, "num_iterations": 2}),
    }

    def reported(mode):
        name, _, extra = mode.partition(", ")
        trainer_class, config_class, data, options = known[name]
        is_reward, settings = name.startswith("reward"), json.loads(config)
        if settings and "pipeline" in settings:
            trainer_class = type("Staged", (cuboid.CuboidTrainer, trainer_class), {})
            # The head of rewards reads the last token of a whole row.
            settings["pipeline"]["segments"] = 1 if is_reward else settings["pipeline"]["segments"]
        arguments = config_class(
            out, deepspeed=settings, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, seed=5,
            save_strategy="no", per_device_train_batch_size=2, per_device_eval_batch_size=2,
            gradient_accumulation_steps=2, max_steps=int(steps), logging_steps=1, learning_rate=1e-3,
            lr_scheduler_type="constant", max_grad_norm=0.5, adam_epsilon=1e-4, **options,
        )
        auto_class = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
        start = path + ("/reward" if is_reward else "/start")
        model = auto_class.from_pretrained(start, dtype=torch.float32)
        others = {"reward_funcs": [even_words, shortness]} if name.startswith("grpo") else {}
        if extra == "reference":
            others["ref_model"] = AutoModelForCausalLM.from_pretrained(start + "-reference", dtype=torch.float32)
        if extra == "adapter":
            model = PeftModel.from_pretrained(model, start + "-adapter", is_trainable=True)
        if extra == "lora":
            task = "SEQ_CLS" if is_reward else "CAUSAL_LM"
            others["peft_config"] = LoraConfig(
                r=4, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, task_type=task
            )
            # Of the factors, which are made here.
            torch.manual_seed(3)
        trainer = trainer_class(
            model=model, args=arguments, train_dataset=Dataset.from_list(data),
            eval_dataset=Dataset.from_list(data[:8]), processing_class=tokenizer, **others,
        )
        trainer.train()
        trainer.evaluate()
        return trainer.state.log_history

    results = {mode: reported(mode) for mode in modes.split("; ")}
    if int(os.environ.get("RANK", 0)) == 0:
        with open(out + ".json", "w") as file:
            json.dump(results, file)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""
SFT = ("sft", "sft packed", "sft padding-free", "sft completions", "sft assistant's turns")
OTHERS = ("dpo", "kto", "reward", "grpo", "grpo with kl")
MODES = (
    *SFT,
    *OTHERS,
    *("dpo, reference", "kto, reference", "sft wrapped", "sft dft", "grpo twice"),
    *(f"{mode}, lora" for mode in (*SFT, *OTHERS)),
)
#: What no two runs have in common.
TIMES = ("runtime", "per_second", "step_time")


def config_of(mesh):
    config = config_of_trainer(mesh)
    # With a smaller epsilon, Adam's first steps have the size of the rate where a gradient is nearly zero, whatever its
    # sign, which is then that of rounding.
    config["optimizer"]["params"]["eps"] = "auto"
    return config


@pytest.fixture(scope="module")
def search_path():
    """``PYTHONPATH`` of processes that import TRL."""
    return search_path_with("trl", PACKAGES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The script, and what it loads: a small Llama, one for rewards, one as a reference, and adapters."""
    root = tmp_path_factory.mktemp("trl")
    (root / "script.py").write_text(textwrap.dedent(SCRIPT))
    sizes = {"vocab_size": 67, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, num_labels=1, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(root / "start")
    LlamaForCausalLM(config).save_pretrained(root / "start-reference")
    LlamaForSequenceClassification(config).save_pretrained(root / "reward")
    # In stages, the initial values of an adapter that is made there are others.
    options = {"r": 4, "lora_alpha": 32, "target_modules": "all-linear", "init_lora_weights": False}
    for name, model_class, task in (
        ("start", LlamaForCausalLM, "CAUSAL_LM"),
        ("reward", LlamaForSequenceClassification, "SEQ_CLS"),
    ):
        model = model_class.from_pretrained(root / name)
        get_peft_model(model, LoraConfig(task_type=task, **options)).save_pretrained(root / f"{name}-adapter")
    return root


@pytest.fixture(scope="module")
def plain(folder, search_path):
    """What trainers report in plain processes, as many as there are replicas: some pair a process's rows."""
    known = {}

    def reported(modes, steps, processes=1):
        missing = [mode for mode in modes if (mode, steps, processes) not in known]
        if missing:
            arguments = (folder / "script.py", folder, folder / "plain", "null", "; ".join(missing), steps)
            options = {"timeout_s": 1800, "PYTHONPATH": search_path, "HF_HUB_OFFLINE": "1"}
            launch = (
                torchrun(processes, *arguments, **options)
                if processes > 1
                else run(sys.executable, *arguments, **options)
            )
            for mode, history in _results(folder / "plain", *launch).items():
                known[mode, steps, processes] = history
        return {mode: known[mode, steps, processes] for mode in modes}

    return reported


def _results(out, status, output):
    assert status == 0, output[-6000:]
    return json.loads(out.with_name(f"{out.name}.json").read_text())


def launched(folder, search_path, ranks, config, modes, steps):
    """What trainers report under DeepSpeed's launcher."""
    launcher = (BIN / "deepspeed", "--num_accelerators", ranks, "--master_port", free_port())
    arguments = (folder, folder / "sharded", json.dumps(config), "; ".join(modes), steps)
    # The launcher starts the interpreter that its own PATH has.
    options = {"PYTHONPATH": search_path, "HF_HUB_OFFLINE": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    return _results(folder / "sharded", *run(*launcher, folder / "script.py", *arguments, timeout_s=3600, **options))


def assert_alike(reported, expected):
    assert reported.keys() == expected.keys()
    for mode, history in expected.items():
        for step, (entry, wanted) in enumerate(zip(reported[mode], history, strict=True)):
            assert entry.keys() == wanted.keys(), (mode, step)
            for name in (name for name in entry if not name.endswith(TIMES) and name != "total_flos"):
                # An adapter with values of its own enlarges rounding, from step to step: norms of one plain process in
                # float32 are 1e-4 off those in float64. There, stages' are within 1e-9 (adapters/test_lora_stages.py).
                rel = 5e-4 if name == "grad_norm" and mode.endswith(", adapter") else 1e-5
                assert entry[name] == pytest.approx(wanted[name], rel=rel, abs=1e-5), (mode, step, name)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", [{"sequence": 2}, {"batch": 2}], ids=["1x2x1", "2x1x1"])
def test_ten_steps_on_a_mesh_are_those_of_one_process(folder, search_path, plain, mesh):
    """Losses and every metric, of training and of evaluation; GRPO's completions too, and so its rewards."""
    reported = launched(folder, search_path, 2, config_of(mesh), MODES, 10)
    assert all(len(history) == 12 for history in reported.values())
    assert_alike(reported, plain(MODES, 10))


def test_two_replicas_are_two_processes(folder, search_path, plain):
    """Each has its own prompts and rows; GRPO compares rewards over both."""
    reported = launched(folder, search_path, 4, config_of({"sequence": 2}), MODES, 3)
    assert_alike(reported, plain(MODES, 3, 2))


@pytest.mark.parametrize(
    ("modes", "mesh", "replicas", "schedule"),
    [
        (("sft", "reward", "dpo"), {}, 1, "seq1f1b"),
        (
            ("sft packed", "sft, adapter", "dpo, adapter", "kto, reference"),
            {"sequence": 2},
            1,
            "seq1f1b",
        ),
        (("sft completions",), {"batch": 2}, 1, "zero_bubble"),
        (("sft assistant's turns",), {"hidden": 2}, 1, "seq1f1b"),
        (("sft padding-free",), {}, 2, "zero_bubble"),
        (("reward centred", "dpo, reference"), {"sequence": 2}, 1, "zero_bubble"),
        (("reward, adapter", "dpo losses", "kto"), {}, 2, "seq1f1b"),
    ],
)
def test_in_two_stages_they_report_what_they_do_without(folder, search_path, plain, modes, mesh, replicas, schedule):
    """Two segments; with the trainer's own loss and metrics, of training and of evaluation."""
    keys = {"engine": "seq1f1b", "stages": 2, "segments": 2, "stage_balance": "layers", "schedule": schedule}
    ranks = 2 * replicas * math.prod(mesh.values())
    reported = launched(folder, search_path, ranks, config_of(mesh) | {"pipeline": keys}, modes, 3)
    assert_alike(reported, plain(modes, 3, replicas))
