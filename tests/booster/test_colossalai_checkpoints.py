"""Checkpoints of a Booster, which writes one in several calls, and of DeepSpeed: each resumes from the other's."""

import functools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import cuboid
from boosting import CLOSE, adamw, boosted, booster_backward, deepspeed_step, schedule, settings
from converting import run
from cuboid.errors import CuboidError
from cuboid.verify import SmallModel
from training import small_checkpoint

pytest.importorskip("colossalai", reason="ColossalAI isn't installed: `make colossalai` does it, or tells why it can't")

LLAMA = SmallModel("llama", heads=8, kv_heads=4, layers=2)
BEFORE, AFTER = 2, 4
#: The layouts that write a checkpoint, and that resume from it.
LAYOUTS = {
    "2x2x1": settings("2x2x1", zero_optimization={"stage": 1}),
    "2 stages of 1x1x2": settings("1x1x2", 2, zero_optimization={"stage": 1}),
    "2 x 1x2x1": settings("1x2x1", data=2, zero_optimization={"stage": 1}),
    "2 x 2 stages": settings("1x1x1", 2, data=2, zero_optimization={"stage": 1}),
}


def with_bf16(config):
    return {**config, "bf16": {"enabled": True}}


def dtype_of(config):
    return torch.bfloat16 if "bf16" in config else torch.float32


def booster_run(path, config, load, save, steps):
    """Losses of some steps under a Booster, which may resume from a folder and end with saving into one."""
    booster, model, optimizer, learning_rate = boosted(path, config, dtype_of(config))
    if load:
        booster.load_model(model, load)
        booster.load_optimizer(optimizer, load)
        booster.load_lr_scheduler(learning_rate, load)
        assert (model.progress.optimizer, learning_rate.last_epoch) == (steps.start, steps.start)
        assert model.progress.samples == 8 * steps.start
        assert model.client_state == {"mark": 7}
    losses = []
    for step in steps:
        losses.append(booster_backward(booster, model, optimizer, step))
        optimizer.step()
        learning_rate.step()
        optimizer.zero_grad()
    if save:
        model.client_state["mark"] = 7
        booster.save_lr_scheduler(learning_rate, save)
        booster.save_model(model, save, shard=True)
        booster.save_optimizer(optimizer, save, shard=True)
    return losses, cuboid.full_state_dict(model)


def deepspeed_run(path, config, load, save, steps):
    """The same under DeepSpeed."""
    import deepspeed

    model = cuboid.from_pretrained(path, config, dtype=dtype_of(config))
    optimizer = adamw(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=schedule(optimizer))
    if load:
        _, client_state = engine.load_checkpoint(load)
        assert client_state == {"mark": 7}
        assert (engine.global_steps, engine.lr_scheduler.last_epoch) == (steps.start, steps.start)
    losses = [deepspeed_step(engine, step) for step in steps]
    if save:
        engine.save_checkpoint(Path(save).parent, tag=Path(save).name, client_state={"mark": 7})
    return losses, cuboid.full_state_dict(engine)


RUNS = {"booster": booster_run, "deepspeed": deepspeed_run}


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("layouts", [("2x2x1", "2 stages of 1x1x2"), ("2 stages of 1x1x2", "2x2x1")], ids=" to ".join)
@pytest.mark.parametrize("frameworks", [("booster", "deepspeed"), ("deepspeed", "booster")], ids=" to ".join)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_framework_resumes_from_the_others_checkpoint(pool, checkpoint, tmp_path, layouts, frameworks, precision):
    path, folder = checkpoint(LLAMA), tmp_path / "runs" / "step"
    written, resumed = (with_bf16(LAYOUTS[name]) if precision == "bf16" else LAYOUTS[name] for name in layouts)
    first, second = (RUNS[name] for name in frameworks)
    pool.run(4, first, path, written, None, folder, range(BEFORE))
    losses = pool.run(4, second, path, resumed, folder, None, range(BEFORE, AFTER))[0][0]
    # The framework that wrote it resumes with the same losses, which differ from those without the checkpoint.
    wanted = pool.run(4, first, path, resumed, folder, None, range(BEFORE, AFTER))[0][0]
    fresh = pool.run(4, second, path, resumed, None, None, range(BEFORE, AFTER))[0][0]
    tolerance = 3e-3 if precision == "bf16" else CLOSE
    assert losses == pytest.approx(wanted, rel=tolerance)
    assert fresh != pytest.approx(wanted, rel=tolerance)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["2 x 1x2x1", "2 x 2 stages"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_layout_resumes_bit_for_bit_and_plain_transformers_loads_it(
    pool, checkpoint, tmp_path, layout, precision
):
    path, folder = checkpoint(LLAMA), tmp_path / "step"
    # A script may have created the folder itself.
    folder.mkdir()
    config = with_bf16(LAYOUTS[layout]) if precision == "bf16" else LAYOUTS[layout]
    weights = pool.run(4, booster_run, path, config, None, folder, range(BEFORE))[0][1]
    opened = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype_of(config))
    for name, tensor in opened.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert not (tmp_path / "latest").exists()
    assert sorted(json.loads((folder / "manifest.json").read_text())["files"]) == sorted(
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*")
        if file.is_file() and file.name != "manifest.json"
    )
    uninterrupted = pool.run(4, booster_run, path, config, None, None, range(AFTER))[0][0]
    assert pool.run(4, booster_run, path, config, folder, None, range(BEFORE, AFTER))[0][0] == uninterrupted[BEFORE:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "auto"),
    [("gpt2", AutoModelForCausalLM), ("mixtral", AutoModelForCausalLM), ("t5", AutoModelForSeq2SeqLM)],
)
def test_weights_survive_two_meshes_and_come_back_as_plain_ones(pool, tmp_path, architecture, auto):
    path, out, again = small_checkpoint(auto, architecture, tmp_path / "model"), tmp_path / "out", tmp_path / "again"
    saved, other = LAYOUTS["2x2x1"], LAYOUTS["2 x 1x2x1"]
    pool.run(4, booster_run, path, saved, None, out, range(BEFORE))
    wanted = pool.run(4, booster_run, path, saved, out, None, range(BEFORE, AFTER))[0][0]
    losses, weights = pool.run(4, booster_run, path, other, out, again, range(BEFORE, AFTER))[0]
    # What a loss is divided by is a replica's own number of labels.
    assert losses == pytest.approx(wanted, rel=2e-2)
    run(again, tmp_path / "plain")
    plain = auto.from_pretrained(tmp_path / "plain").state_dict()
    assert plain.keys() == weights.keys()
    assert all(torch.equal(plain[name], weights[name]) for name in weights)
    before = auto.from_pretrained(path).state_dict()
    assert any(not torch.equal(plain[name], x) for name, x in before.items())


def save_parts(path, config, root):
    """Which parts a folder has after each of some calls, with steps between some of them."""
    booster, model, optimizer, learning_rate = boosted(path, config, torch.float32)

    def step(number):
        booster_backward(booster, model, optimizer, number)
        optimizer.step()
        optimizer.zero_grad()

    def parts():
        torch.distributed.barrier()
        names = {"weights": "config.json", "moments": "optimizer/exp_avg", "state": "state.json"}
        there = {part for part, name in names.items() if (root / "mixed" / name).exists()}
        state = json.loads((root / "mixed" / "state.json").read_text())
        torch.distributed.barrier()
        return there | ({"schedule"} if state["scheduler"] else set())

    parts_saved = []
    step(0)
    for call in (
        lambda: booster.save_optimizer(optimizer, root / "mixed"),
        lambda: booster.save_model(model, root / "mixed"),
        lambda: booster.save_lr_scheduler(learning_rate, root / "mixed"),
        lambda: booster.save_model(model, root / "mixed"),
        lambda: (step(1), booster.save_model(model, root / "mixed")),
    ):
        call()
        parts_saved.append(parts())
    errors = []
    booster.save_optimizer(optimizer, root / "apart")
    for call in (
        lambda: booster.load_optimizer(optimizer, root / "mixed"),
        lambda: booster.load_lr_scheduler(learning_rate, root / "mixed"),
        lambda: booster.load_model(model, root / "mixed"),
        lambda: booster.load_optimizer(optimizer, root / "apart"),
        lambda: booster.load_model(model, root / "mixed"),
        lambda: booster.load_model(model, root / "apart"),
    ):
        try:
            call()
            errors.append("")
        except CuboidError as error:
            errors.append(str(error))
    return parts_saved, errors


def test_parts_of_one_state_are_combined_and_parts_of_different_states_are_not(pool, checkpoint, tmp_path):
    for parts_saved, errors in pool.run(4, save_parts, checkpoint(LLAMA), LAYOUTS["2 x 2 stages"], tmp_path):
        everything = {"weights", "moments", "state", "schedule"}
        assert parts_saved == [
            {"moments", "state"},
            {"weights", "moments", "state"},
            everything,
            everything,
            # After another step, the saved moments would be those of another state.
            {"weights", "state"},
        ]
        assert "has no optimizer state" in errors[0]
        assert "has no schedule" in errors[1]
        assert errors[2:4] == ["", ""]
        assert "load_model before load_optimizer" in errors[4]
        assert errors[5]


def save_often(path, config, root):
    """Save in the background after each of three steps; the names that are left, on rank 0."""
    booster, model, optimizer, _ = boosted(path, config, torch.float32)
    for step in range(3):
        booster_backward(booster, model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        booster.save_model(model, root / f"step{step}")
        booster.save_optimizer(optimizer, root / f"step{step}")
    assert booster.plugin.wait_for_checkpoint()
    weights = cuboid.full_state_dict(model)
    booster.load_model(model, root / "step2")
    booster.load_optimizer(optimizer, root / "step2")
    alike = all(torch.equal(tensor, weights[name]) for name, tensor in cuboid.full_state_dict(model).items())
    return alike, sorted(folder.name for folder in root.iterdir())


def test_asynchronous_saves_are_sequential_and_older_ones_are_pruned(pool, checkpoint, tmp_path):
    config = {**LAYOUTS["2 x 2 stages"], "checkpoint": {"asynchronous": True, "keep_last": 2}}
    alike, names = pool.run(4, save_often, checkpoint(LLAMA), config, tmp_path)[0]
    assert alike
    assert names == ["step1", "step2"]


def save_in_parts(path, config, root):
    """Each part of a state in a folder of its own, as ColossalAI's examples save them; what is left, on each rank."""
    booster, model, optimizer, learning_rate = boosted(path, config, torch.float32)
    left = []
    for step in range(2):
        booster.save_model(model, root / "modeling", shard=True)
        booster.save_optimizer(optimizer, root / "optimizer", shard=True)
        booster.save_lr_scheduler(learning_rate, root / "lr_scheduler")
        booster.save_model(model, root / f"step{step}")
        left.append(sorted(folder.name for folder in root.iterdir()))
        booster_backward(booster, model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    booster.load_model(model, root / "modeling")
    booster.load_optimizer(optimizer, root / "optimizer")
    booster.load_lr_scheduler(learning_rate, root / "lr_scheduler")
    return left


def test_parts_of_the_last_state_are_kept_together(pool, checkpoint, tmp_path):
    config = {**settings("1x2x1"), "checkpoint": {"keep_last": 1}}
    parts = ["lr_scheduler", "modeling", "optimizer"]
    for left in pool.run(2, save_in_parts, checkpoint(LLAMA), config, tmp_path):
        assert left == [[*parts, "step0"], [*parts, "step1"]]


def save_without_optimizer(path, config, root):
    """The files that a booster without an optimizer writes, and its error for saving one."""
    from colossalai.booster import Booster

    plugin = cuboid.CuboidPlugin(config)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(cuboid.from_pretrained(path, plugin.config))
    booster.save_model(model, root / "model")
    errors = []
    for call in (booster.save_optimizer, booster.load_optimizer):
        try:
            call(optimizer, root / "model")
        except CuboidError as error:
            errors.append(str(error))
    return optimizer, errors


def test_a_model_is_saved_without_an_optimizer(pool, checkpoint, tmp_path):
    optimizer, errors = pool.run(2, save_without_optimizer, checkpoint(LLAMA), settings("1x2x1"), tmp_path)[0]
    assert optimizer is None
    assert len(errors) == 2
    assert all("no optimizer was boosted" in message for message in errors)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.num_hidden_layers == 2


def start_from(path, config, other):
    """The loss after the weights of a plain Hugging Face checkpoint were loaded over others."""
    booster, model, optimizer, _ = boosted(path, config, torch.float32)
    booster.load_model(model, other)
    return booster_backward(booster, model, optimizer, 0)


def test_load_model_takes_any_hugging_face_checkpoint(pool, checkpoint):
    other = checkpoint(SmallModel("llama", heads=8, kv_heads=4, layers=2, seed=1))
    config = LAYOUTS["2 x 1x2x1"]
    loaded = pool.run(4, start_from, checkpoint(LLAMA), config, other)[0]
    assert loaded == pytest.approx(pool.run(4, start_from, other, config, other)[0], rel=1e-7)
    assert loaded != pool.run(4, functools.partial(start_from, other=checkpoint(LLAMA)), checkpoint(LLAMA), config)[0]


RATES = {"embedding": 1e-3, "body": 1e-2, "head": 4e-3}


def rates_of_groups(path, config, load, save, steps):
    """A Booster with a rate for each of three groups, made of the parameters of this rank's stage only."""
    from colossalai.booster import Booster

    plugin = cuboid.CuboidPlugin(config)
    model = cuboid.from_pretrained(path, plugin.config, dtype=torch.float32)
    groups = {}
    for name, parameter in model.named_parameters():
        kind = "embedding" if "embed" in name else "head" if "lm_head" in name else "body"
        groups.setdefault(kind, {"params": [], "lr": RATES[kind], "kind": kind})["params"].append(parameter)
    optimizer = torch.optim.AdamW(groups.values())
    booster = Booster(plugin=plugin)
    model, optimizer, _, _, learning_rate = booster.boost(model.train(), optimizer, lr_scheduler=schedule(optimizer))
    if load:
        booster.load_model(model, load)
        booster.load_optimizer(optimizer, load)
        booster.load_lr_scheduler(learning_rate, load)
    seen = []
    for step in steps:
        loss = booster_backward(booster, model, optimizer, step)
        optimizer.step()
        learning_rate.step()
        optimizer.zero_grad()
        seen.append((loss, {group["kind"]: group["lr"] for group in optimizer.param_groups}))
    if save:
        booster.save_model(model, save)
        booster.save_optimizer(optimizer, save)
        booster.save_lr_scheduler(learning_rate, save)
    return seen


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("target", ["2 x 2 stages", "2 stages of 1x1x2", "2x2x1"])
def test_rates_of_groups_go_on_where_they_were(pool, checkpoint, tmp_path, target):
    path, folder = checkpoint(LLAMA), tmp_path / "runs" / "step"
    source = LAYOUTS["2 stages of 1x1x2"]
    pool.run(4, rates_of_groups, path, source, None, folder, range(BEFORE))
    straight = pool.run(4, rates_of_groups, path, source, None, None, range(AFTER))[0][BEFORE:]
    for resumed in pool.run(4, rates_of_groups, path, LAYOUTS[target], folder, None, range(BEFORE, AFTER)):
        assert [rates for _, rates in resumed] == [rates for _, rates in straight]
        # Without a pipeline, the loss is another mean of a step's micro-batches.
        if "stages" in target:
            assert [loss for loss, _ in resumed] == pytest.approx([loss for loss, _ in straight], rel=CLOSE)
    assert straight[-1][1] == {kind: rate / (1 + AFTER) for kind, rate in RATES.items()}
