"""LoRA under DeepSpeed's engine, on meshes and in pipelines: training, checkpoints, and PEFT's own folder."""

import functools
import json
import os
import sys
import textwrap
from pathlib import Path

import deepspeed
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import cuboid
from cuboid.verify import SmallModel
from launching import BIN, ROOT, free_port, run, world
from tiny_text import write_model_and_text
from training import _batches, ranks_of, settings, train
from warm_python import warm_python

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model

TIMEOUT_S = 120.0
SMALL = SmallModel("llama", heads=4, kv_heads=2, layers=4)
RATE, DECAY, EPS, STEPS = 1e-2, 0.1, 1e-4, 3
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def config_of(mesh, stages, zero, data, schedule=None):
    pipeline = {"schedule": schedule} if schedule else {}
    config = settings(mesh, stages, zero=zero, data=data, learning_rate=RATE, pipeline=pipeline)
    del config["scheduler"]
    # Large, so that an update doesn't depend on the rounding of a gradient that is about zero.
    config["optimizer"]["params"]["eps"] = EPS
    return config


def engine_of(path, adapter, config):
    model = cuboid.from_pretrained(path, config, dtype=torch.bfloat16 if "bf16" in config else torch.float32)
    model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def trained_sharded(path, adapter, config, other, root):
    """Losses, the last norm, the adapter; one more step is from a checkpoint, perhaps on another layout."""
    engine = engine_of(path, adapter, config)
    losses = train(engine, STEPS)
    norm = float(engine.get_global_grad_norm())
    engine.save_checkpoint(root)
    engine.module.save_pretrained(f"{root}/adapter")
    again = engine_of(path, adapter, other)
    again.load_checkpoint(root)
    return (
        losses + train(again, 1, skip=STEPS),
        norm,
        sum(p.numel() for p in engine.module.parameters() if p.requires_grad),
    )


def losses_and_dtypes(path, adapter, config):
    engine = engine_of(path, adapter, config)
    losses = train(engine, STEPS)
    return losses, {p.dtype for p in engine.module.parameters() if p.requires_grad}


def adamw(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=RATE, weight_decay=DECAY, eps=EPS)


def trained_plain(path, adapter):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = adamw(model)
    batches, losses, state = _batches(0, 1), [], None
    for step in range(STEPS + 1):
        losses.append(0.0)
        for _ in range(2):
            loss = model(**next(batches)).loss / 2
            loss.backward()
            losses[-1] += float(loss.detach())
        if step == STEPS:
            break
        norm = float(torch.nn.utils.clip_grad_norm_(trained, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    state = {name: x.detach().clone() for name, x in model.named_parameters() if x.requires_grad}
    return losses, norm, state


def boosted(path, adapter, config, folder):
    """Losses of a Booster's steps; the adapter is saved."""
    from colossalai.booster import Booster

    model = PeftModel.from_pretrained(
        cuboid.from_pretrained(path, config, dtype=torch.float32), adapter, is_trainable=True
    )
    optimizer = adamw(model.train())
    booster, batches, losses = Booster(plugin=cuboid.CuboidPlugin(config)), _batches(0, 1), []
    inside, optimizer, *_ = booster.boost(model, optimizer)
    for _ in range(STEPS):
        micro_batches = [next(batches) for _ in range(2)]
        if "pipeline" in config:
            joined = {
                name: torch.cat([micro_batch[name] for micro_batch in micro_batches]) for name in micro_batches[0]
            }
            losses.append(float(booster.execute_pipeline(iter([joined]), inside, None, optimizer)["loss"]))
        else:
            losses.append(0.0)
            for batch in micro_batches:
                loss = inside(**batch).loss / 2
                booster.backward(loss, optimizer)
                losses[-1] += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return losses


@pytest.fixture(scope="module")
def adapter_with(checkpoint, tmp_path_factory):
    """Writes an adapter of plain PEFT whose factors have values, with options; returns its folder."""

    @functools.cache
    def write(**options):
        folder = tmp_path_factory.mktemp("adapter")
        model = AutoModelForCausalLM.from_pretrained(checkpoint(SMALL), dtype=torch.float32)
        torch.manual_seed(3)
        options = {"target_modules": TARGETS, **options}
        options = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
        lora = LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options)
        get_peft_model(model, lora).save_pretrained(folder)
        return str(folder)

    return write


@pytest.fixture
def adapter(adapter_with):
    """The folder of one without options."""
    return adapter_with()


CASES = [
    ("1x2x1", None, 1, 1, None, ("1x1x2", None), {"use_dora": True}),
    ("1x1x1", 2, 1, 1, None, ("1x1x1", None), {}),
    ("1x2x1", 2, 0, 1, "zero_bubble", ("1x2x1", 2), {}),
    ("1x2x1", None, 1, 1, None, ("1x1x1", 2), {"trainable_token_indices": (3, 60, 7, 100)}),
    # One of the stages has no adapter.
    ("1x1x1", 2, 1, 1, None, ("1x2x1", None), {"target_modules": ("lm_head",)}),
    ("1x1x1", 2, 0, 1, None, ("2x1x1", None), {"target_modules": ("embed_tokens",)}),
    ("1x1x1", 2, 1, 1, None, ("1x2x1", None), {"modules_to_save": ("embed_tokens", "lm_head", "norm")}),
    pytest.param(
        *("1x1x2", None, 1, 1, None, ("1x1x1", 2), {"modules_to_save": ("embed_tokens", "lm_head", "norm")}),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("mesh", "stages", "zero", "data", "schedule", "other", "options"), CASES)
def test_training_resuming_and_the_saved_adapter_are_those_of_plain_peft(
    pool, checkpoint, adapter_with, tmp_path, mesh, stages, zero, data, schedule, other, options
):
    adapter = adapter_with(**options)
    config = config_of(mesh, stages, zero, data, schedule)
    ranks = ranks_of(config, data)
    resumed = config_of(*other, zero, ranks // ranks_of(config_of(*other, zero, 1)))
    path = checkpoint(SMALL)
    results = pool.run(ranks, trained_sharded, path, adapter, config, resumed, str(tmp_path), timeout_s=TIMEOUT_S)
    losses, norm, state = trained_plain(path, adapter)
    for rank_losses, last_norm, _ in results:
        assert rank_losses == pytest.approx(losses, rel=2e-6)
        assert last_norm == pytest.approx(norm, rel=1e-5)
    if data == 1:
        # Every element of the factors has one owner.
        assert sum(count for *_, count in results) == sum(x.numel() for x in state.values())
    folders = [tmp_path / "adapter", next(tmp_path.glob("global_step*"))]
    for folder in folders:
        saved = load_file(folder / "adapter_model.safetensors")
        # As plain PEFT names them.
        written = load_file(Path(adapter) / "adapter_model.safetensors").keys()
        assert saved.keys() == {name for name in written if not name.endswith("base_layer.weight")}
        for name, value in state.items():
            key = name.replace("vector.default.weight", "vector").replace(".default", "")
            key = key.replace(".modules_to_save", "")
            # AdamW divides by the gradient's own size, and so enlarges the rounding of one that is almost zero.
            torch.testing.assert_close(saved[key], value, rtol=1e-5, atol=1e-5, msg=name)
        assert not list(folder.glob("model*.safetensors"))
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), folders[1])
    assert plain.peft_config["default"].base_model_name_or_path == path


@pytest.mark.ci
def test_the_engine_has_factors_in_bf16_and_their_masters_in_float32(pool, checkpoint, adapter):
    config = config_of("1x2x1", None, 1, 1) | {"bf16": {"enabled": True}}
    losses, *_ = trained_plain(checkpoint(SMALL), adapter)
    for rank_losses, dtypes in pool.run(2, losses_and_dtypes, checkpoint(SMALL), adapter, config, timeout_s=TIMEOUT_S):
        assert rank_losses == pytest.approx(losses[:STEPS], rel=5e-3)
        assert dtypes == {torch.bfloat16}


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("mesh", "stages"), [("1x1x2", None), ("1x1x1", 2)])
def test_a_booster_trains_an_adapter_as_plain_peft(pool, checkpoint, adapter, tmp_path, mesh, stages):
    pytest.importorskip("colossalai.booster", reason="ColossalAI isn't installed")
    config = {
        key: value
        for key, value in config_of(mesh, stages, 0, 1).items()
        if key not in ("optimizer", "zero_optimization")
    }
    results = pool.run(2, boosted, checkpoint(SMALL), adapter, config, str(tmp_path), timeout_s=TIMEOUT_S)
    losses, _, state = trained_plain(checkpoint(SMALL), adapter)
    for rank_losses in results:
        assert rank_losses == pytest.approx(losses[:STEPS], rel=2e-5)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    for name, value in state.items():
        torch.testing.assert_close(saved[name.replace(".default.", ".")], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(("mesh", "stages"), [pytest.param({"sequence": 2}, None, marks=pytest.mark.slow), ({}, 2)])
def test_the_example_trains_an_adapter_that_plain_peft_loads(tmp_path, mesh, stages):
    torch.manual_seed(0)
    write_model_and_text(tmp_path, 2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"mode": "3d_tensor", "mesh": mesh},
    }
    if stages:
        config["pipeline"] = {"engine": "seq1f1b", "stages": stages, "segments": 2}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    text, start, out = tmp_path / "text", tmp_path / "model", tmp_path / "adapter"
    status, output = world(2, ROOT / "docs/examples/lora.py", start, text, out, tmp_path / "ds_config.json")
    assert status == 0, output
    losses = [float(line.partition("loss ")[2]) for line in output.splitlines() if "loss " in line]
    assert len(losses) == 20
    ids = AutoTokenizer.from_pretrained(start)(text.read_text(), return_tensors="pt").input_ids[:, :512].view(4, 128)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    with torch.no_grad():
        assert float(model(input_ids=ids, labels=ids).loss) == pytest.approx(losses[0], rel=1e-4)
        adapted = PeftModel.from_pretrained(model, out)
        assert float(adapted(input_ids=ids, labels=ids).loss) < losses[0] - 0.1


@pytest.mark.ci
def test_an_adapter_is_trained_by_the_launcher_writes_before_and_after_and_is_checked_by_plain_peft(tmp_path):
    """What ``make finetune`` runs, with a smaller model and fewer steps."""
    torch.manual_seed(0)
    write_model_and_text(tmp_path, 2)
    config = json.loads((ROOT / "configs/lora_1x2x2.json").read_text())
    assert config["tensor_parallel"]["mesh"] == {"batch": 1, "sequence": 2, "hidden": 2}
    # Two ranks show what four do.
    config["tensor_parallel"]["mesh"] = {"batch": 1, "sequence": 2, "hidden": 1}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    launcher = (BIN / "deepspeed", "--quiet", "--num_accelerators", 2, "--master_port", free_port())
    options = ("--config", tmp_path / "ds_config.json", "--steps", 20)
    script, out = ROOT / "docs/examples/adapt.py", tmp_path / "out"
    status, output = run(warm_python(), *launcher, script, tmp_path / "model", out, *options)
    assert status == 0, output
    assert output.count("it writes: 'One day") == 2
    status, output = run(sys.executable, ROOT / "docs/examples/check_adapter.py", out)
    assert status == 0, output
    assert "the texts are the same, token for token" in output
    report = json.loads((out / "report.json").read_text())
    assert report["after"]["loss"] < report["before"]["loss"]
    assert report["before"]["tokens"] != report["after"]["tokens"]
    assert report["trained_parameters"]["model"] == 2 * report["trained_parameters"]["rank"]


TRAINER = """
    import json, sys
    import cuboid
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, TrainingArguments, logging

    logging.set_verbosity_error()
    path, out, config, resume = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4] == "resume"
    arguments = TrainingArguments(
        out, deepspeed=config, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, seed=5, save_steps=2,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, logging_steps=1, learning_rate=1e-2,
        lr_scheduler_type="constant",
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(7)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, 131, (16,), generator=generator) for _ in range(32)]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = cuboid.CuboidTrainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train(resume_from_checkpoint=f"{out}/checkpoint-2" if resume else None)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{out}/final")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if arguments.process_index == 0:
        print("RESULT" + json.dumps([losses, evaluated]))
    torch.distributed.destroy_process_group()
"""


@pytest.mark.ci
@pytest.mark.parametrize(("mesh", "stages"), [pytest.param("1x2x1", None, marks=pytest.mark.slow), ("1x1x1", 2)])
def test_a_trainer_saves_and_resumes_an_adapter(checkpoint, tmp_path, mesh, stages):
    (tmp_path / "script.py").write_text(textwrap.dedent(TRAINER))
    config = {key: value for key, value in config_of(mesh, stages, 1, 1).items() if key != "optimizer"}
    config |= dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
    )
    results = []
    for how in ("start", "resume"):
        arguments = (checkpoint(SMALL), tmp_path / "out", json.dumps(config), how)
        status, output = world(2, tmp_path / "script.py", *arguments)
        assert status == 0, output
        line = next(line for line in output.splitlines() if line.startswith("RESULT"))
        results.append(json.loads(line.removeprefix("RESULT")))
    (losses, evaluated), (resumed, evaluated_again) = results
    assert len(losses) == 4
    assert resumed == pytest.approx(losses, rel=1e-6)
    assert evaluated_again == pytest.approx(evaluated, rel=1e-6)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint(SMALL), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randint(2, 131, (16,), generator=generator) for _ in range(4)])
    with torch.no_grad():
        loss = PeftModel.from_pretrained(plain, tmp_path / "out" / "final")(input_ids=ids, labels=ids).loss
    assert float(loss) == pytest.approx(evaluated, rel=1e-5)


def steps_and_logits(path, adapter, config, root):
    """Losses, one more from a checkpoint, and before that the logits of a batch; the adapter is saved there."""
    engine = engine_of(path, adapter, config)
    losses = train(engine, STEPS)
    engine.save_checkpoint(root)
    engine.module.save_pretrained(f"{root}/adapter")
    with torch.no_grad():
        logits = engine.module.eval()(input_ids=next(_batches(0, 1))["input_ids"]).logits
    again = engine_of(path, adapter, config)
    again.load_checkpoint(root)
    return losses + train(again, 1, skip=STEPS), logits.tolist()


LAUNCHED = """
    import json, sys
    from pathlib import Path
    import torch
    from test_lora_engine import steps_and_logits

    path, adapter, config, root = [text for text in sys.argv[1:] if not text.startswith("--local_rank")]
    result = steps_and_logits(path, adapter, json.loads(config), root)
    Path(root, f"{torch.distributed.get_rank()}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()
"""
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("small", "mesh", "adapter_config"),
    [
        (SMALL, "1x2x1", IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
        (
            SmallModel("qwen3_moe", heads=4, kv_heads=2),
            "2x1x1",
            LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"], target_parameters=EXPERTS),
        ),
    ],
    ids=["IA³", "experts"],
)
def test_under_deepspeeds_launcher_the_saved_adapter_is_the_runs(checkpoint, tmp_path, small, mesh, adapter_config):
    path, adapter, root = checkpoint(small), tmp_path / "start", tmp_path / "run"
    torch.manual_seed(3)
    get_peft_model(AutoModelForCausalLM.from_pretrained(path), adapter_config).save_pretrained(adapter)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(LAUNCHED))
    root.mkdir()
    config = json.dumps(config_of(mesh, None, 1, 1))
    launcher = (BIN / "deepspeed", "--num_accelerators", 2, "--master_port", free_port())
    search_path = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    on_path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    status, output = run(*launcher, script, path, adapter, config, root, PYTHONPATH=search_path, PATH=on_path)
    assert status == 0, output[-4000:]
    losses, _, state = trained_plain(path, str(adapter))
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), root / "adapter")
    with torch.no_grad():
        expected = plain.eval()(input_ids=next(_batches(0, 1))["input_ids"]).logits
    for rank in range(2):
        rank_losses, logits = json.loads((root / f"{rank}.json").read_text())
        assert rank_losses == pytest.approx(losses, rel=5e-6)
        # Relative to the largest, of whose size the rounding of sums is.
        torch.testing.assert_close(torch.tensor(logits), expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    saved = load_file(root / "adapter" / "adapter_model.safetensors")
    assert len(saved) == len(state)
