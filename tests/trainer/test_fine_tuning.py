"""What fine-tuning scripts do with the plain Trainer, PEFT and generation, on a mesh and in one process."""

import json
import re
import textwrap

import pytest
import torch
from test_trainer import config_of
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from launching import alone, as_ranks

SCRIPT = """
    import json, sys
    import cuboid
    import deepspeed
    import numpy as np
    import torch
    from accelerate.state import AcceleratorState, GradientState
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer
    from transformers import (
        AutoModelForCausalLM, AutoModelForSeq2SeqLM, EarlyStoppingCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments,
        Trainer, TrainingArguments, default_data_collator, get_cosine_schedule_with_warmup, logging,
    )

    logging.set_verbosity_error()
    # Which accelerate would let DeepSpeed compile for a minute, before the config is read.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    root, out, config = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    draws = torch.Generator().manual_seed(3)
    common = dict(
        # On a host without GPUs, DeepSpeed's device says enough.
        deepspeed=config, use_cpu=config is None or torch.cuda.is_available(), report_to=[], disable_tqdm=True, seed=5,
        save_strategy="no", max_steps=3, per_device_train_batch_size=4, per_device_eval_batch_size=4, logging_steps=1,
        adam_epsilon=1e-4,
    )
    results = {}

    def note(name, values):
        skipped = ("runtime", "per_second", "flos", "preparation")
        for key, x in values.items():
            if not any(part in key for part in skipped):
                results[f"{name} {key}"] = np.asarray(x, dtype=float).tolist()

    def note_history(name, trainer):
        for number, entry in enumerate(trainer.state.log_history):
            note(f"{name} {number}", entry)

    # A causal model: predictions before training, LoRA+ and a schedule of the script's own, metrics of tokens, and a
    # second adapter.
    rows = []
    for row in range(16):
        ids = torch.randint(2, 67, (11,), generator=draws)
        rows.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(11) < row % 5, -100)})

    def metrics(p):
        shown = p.label_ids[:, 1:] != -100
        return {"accuracy": (p.predictions[:, :-1] == p.label_ids[:, 1:])[shown].mean(), "count": shown.sum()}

    def trainer_of(model, optimizers, **options):
        return Trainer(
            model, TrainingArguments(out, **common, **options), train_dataset=rows, eval_dataset=rows[:7],
            data_collator=default_data_collator, compute_metrics=metrics, optimizers=optimizers,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        )

    kept = TrainingArguments(out, **common)
    torch.manual_seed(7)
    options = dict(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(root + "/llama"), LoraConfig(**options))
    plus = dict(optimizer_cls=torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16, eps=1e-4)
    optimizer = create_loraplus_optimizer(model=model, **plus)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, 3)
    trainer = trainer_of(model, (optimizer, schedule), eval_strategy="steps", eval_steps=1)
    predicted = trainer.predict(rows[:7])
    note("before", {"tokens": predicted.predictions, "labels": predicted.label_ids, **predicted.metrics})
    trainer.train()
    note_history("first", trainer)
    model.add_adapter("second", LoraConfig(**{**options, "target_modules": "all-linear"}))
    model.set_adapter("second")
    trainer = trainer_of(model, (None, None))
    trainer.train()
    note_history("second", trainer)

    # An encoder-decoder, whose evaluations generate.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    texts = []
    for row in range(16):
        words = torch.randint(2, 67, (9,), generator=draws)
        texts.append({"input_ids": words, "labels": torch.cat([words[: 2 + row % 4], torch.tensor([1])])})

    def padded(rows):
        longest = max(len(row["labels"]) for row in rows)
        labels = [torch.nn.functional.pad(row["labels"], (0, longest - len(row["labels"])), value=-100) for row in rows]
        ids = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.stack(labels)}

    arguments = Seq2SeqTrainingArguments(
        out, **common, predict_with_generate=True, generation_max_length=8, eval_strategy="steps", eval_steps=2,
    )
    torch.manual_seed(7)
    adapter = LoraConfig(r=4, target_modules=["q", "v"], init_lora_weights=False, task_type="SEQ_2_SEQ_LM")
    trainer = Seq2SeqTrainer(
        get_peft_model(AutoModelForSeq2SeqLM.from_pretrained(root + "/t5"), adapter), arguments, train_dataset=texts,
        eval_dataset=texts[:7], data_collator=padded,
        compute_metrics=lambda p: {"sum": p.predictions.sum(), "labels": p.label_ids.sum()},
    )
    note("untrained", trainer.evaluate(num_beams=2))
    trainer.train()
    note_history("translated", trainer)
    predicted = trainer.predict(texts[5:], max_length=6, num_beams=2)
    note("after", {"tokens": predicted.predictions, "labels": predicted.label_ids, **predicted.metrics})
    print("RESULT" + json.dumps(results), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("fine_tuning")
    (root / "script.py").write_text(textwrap.dedent(SCRIPT))
    torch.manual_seed(0)
    tokens = {"vocab_size": 67, "pad_token_id": 0, "eos_token_id": 1}
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    llama = LlamaConfig(num_key_value_heads=2, bos_token_id=1, **sizes, **tokens)
    sizes = {"d_model": 48, "d_kv": 12, "d_ff": 96, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
    t5 = T5Config(dropout_rate=0.0, decoder_start_token_id=0, **sizes, **tokens)
    for name, model in (("llama", LlamaForCausalLM(llama)), ("t5", T5ForConditionalGeneration(t5))):
        with torch.no_grad():
            for parameter in model.parameters():
                # Of larger weights, the model's choice of a token doesn't hang on rounding.
                if parameter.dim() > 1:
                    parameter.normal_(std=0.15)
        model.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def plain(root):
    status, output = alone(root / "script.py", root, root / "plain", "null")
    assert status == 0, output
    return json.loads(output.partition("RESULT")[2].splitlines()[0])


@pytest.mark.ci
@pytest.mark.parametrize("mesh", [{"sequence": 2}, pytest.param({"batch": 2}, marks=pytest.mark.slow)], ids=str)
def test_every_value_and_token_is_that_of_one_process(root, plain, mesh):
    """Evaluations before training too, an optimizer given to the Trainer, ``predict_with_generate`` with beams."""
    config = config_of(mesh)
    del config["optimizer"]
    for status, output in as_ranks(2, root / "script.py", root, root / "sharded", json.dumps(config)):
        assert status == 0, output
        values = json.loads(output.partition("RESULT")[2].splitlines()[0])
        assert values.keys() == plain.keys()
        for name, expected in plain.items():
            actual, wanted = torch.tensor(values[name]), torch.tensor(expected)
            torch.testing.assert_close(actual, wanted, rtol=2e-5, atol=2e-5, msg=f"{name}: {actual}, not {wanted}")


REFUSED = """
    import json, sys
    import cuboid
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    root, out, config = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    before = AutoModelForCausalLM.from_pretrained(root + "/llama")
    adapted = get_peft_model(before, LoraConfig(target_modules=["q_proj"]))
    options = dict(use_cpu=True, report_to=[], deepspeed=config)
    kept = TrainingArguments(out, **options)
    model = AutoModelForCausalLM.from_pretrained(root + "/llama")
    messages = []
    given = torch.optim.SGD(model.parameters())
    for trained, optimizer, more in (
        (adapted, None, {}), (model, given, {}), (model, None, {"neftune_noise_alpha": 5.0})
    ):
        try:
            Trainer(trained, TrainingArguments(out, **options, **more), optimizers=(optimizer, None))
        except cuboid.CuboidError as error:
            messages.append(f"{type(error).__name__}: {error}")
    print("RESULT" + json.dumps(messages), flush=True)
"""


def test_what_has_no_rule_is_refused_when_the_trainer_is_made(root):
    (root / "refused.py").write_text(textwrap.dedent(REFUSED))
    status, output = alone(root / "refused.py", root, root / "refused", json.dumps(config_of({})))
    assert status == 0, output
    adapters, optimizer, noise = json.loads(output.partition("RESULT")[2].splitlines()[0])
    assert re.search(r"^UnsupportedModelError: .* after its TrainingArguments\(deepspeed=…\)", adapters)
    assert optimizer.startswith(
        "ConfigError: Trainer(optimizers=…) gives a SGD, but the config has a section optimizer"
    )
    assert noise.startswith("ConfigError: TrainingArguments.neftune_noise_alpha can't be combined with")
