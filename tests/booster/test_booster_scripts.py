"""What scripts do around a Booster: it is what one plain process computes, or an error that says what to do."""

import functools
import json

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM

import cuboid
from boosting import (
    EXACT,
    ROWS,
    adamw,
    assert_alike,
    boosted,
    booster_backward,
    global_batch,
    reference_backward,
    settings,
)
from cuboid.errors import CuboidError
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.verify import SmallModel
from fresh_ranks import endings_of

pytest.importorskip("colossalai", reason="ColossalAI isn't installed: `make colossalai` does it, or tells why it can't")

LLAMA = SmallModel("llama", heads=8, kv_heads=4, layers=2)
REPLICAS = settings("1x1x1", data=2)


def said(calls):
    """The message of each call's error, by name."""
    messages = {}
    for name, call in calls.items():
        try:
            call()
            messages[name] = "nothing"
        except CuboidError as error:
            messages[name] = str(error)
    return messages


def assert_said(messages, expected):
    assert messages.keys() == expected.keys()
    for name, message in messages.items():
        assert expected[name] in message, f"{name}: {message}"


def past_the_wrapper(path, config):
    """What a script is told that goes past the optimizer that boost returned; one call after the other."""
    from colossalai.booster import Booster

    booster, model, optimizer, _ = boosted(path, config, torch.float32)
    inner = model.unwrap()

    def one_row_of_losses():
        logits = model(input_ids=global_batch(0)["input_ids"]).logits
        booster.backward(logits.mean((1, 2)), optimizer)

    def direct_backward():
        optimizer.zero_grad()
        model(**global_batch(0)).loss.backward()
        optimizer.step()

    def thaw():
        optimizer.zero_grad()
        inner.lm_head.weight.requires_grad_(False)
        booster_backward(booster, model, optimizer, 0)
        optimizer.step()

    def more_parameters():
        inner.lm_head.weight.requires_grad_(True)
        optimizer.unwrap().param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))
        optimizer.step()

    def boost(new):
        return Booster(plugin=cuboid.CuboidPlugin(config)).boost(model.unwrap(), new)

    calls = {
        "no norm": lambda: optimizer.clip_grad_by_norm(1.0, norm_type=0),
        "rows": one_row_of_losses,
        "direct backward": direct_backward,
        "torch's clipping": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "of the optimizer's": lambda: nn.utils.clip_grad_norm_(optimizer.parameters, 1.0),
        "by value": lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        "inner step": optimizer.unwrap().step,
        "state": optimizer.state_dict,
        "a state": lambda: optimizer.load_state_dict({}),
        "a group": lambda: optimizer.add_param_group({"params": []}),
        "frozen": thaw,
        "more": more_parameters,
        "the same optimizer": lambda: boost(optimizer.unwrap()),
    }
    messages = said(calls)
    boost(torch.optim.SGD(inner.parameters(), lr=1e-2))
    return messages | said({"two optimizers": optimizer.step})


EXPECTED = {
    "rows": "not a tensor of shape [8]; of many take the mean()",
    "direct backward": "not of booster.backward(loss, optimizer)",
    "torch's clipping": "call clip_grad_by_norm or clip_grad_by_value of the optimizer that booster.boost returned",
    "of the optimizer's": "since ",
    "by value": "clip_grad_value_ of torch",
    "no norm": "norm_type=0.0",
    "inner step": "the optimizer was boosted",
    "state": "booster.save_optimizer(optimizer, folder)",
    "a state": "booster.load_optimizer(optimizer, folder)",
    "a group": "give all groups to the optimizer before it is boosted",
    "frozen": "lm_head.weight was frozen after booster.boost",
    "more": "aren't those that it was boosted with",
    "the same optimizer": "was boosted before",
    "two optimizers": "was given to booster.boost again",
}


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize("others", [{}, {"bf16": {"enabled": True}}, {"zero_optimization": {"stage": 1}}], ids=str)
def test_what_goes_past_the_wrapper_is_an_error(pool, checkpoint, others):
    for messages in pool.run(2, past_the_wrapper, checkpoint(LLAMA), {**REPLICAS, **others}):
        assert_said(messages, EXPECTED)


def losses_with(path, config, *, clears_inner):
    """Losses of three steps, with gradients cleared by the inner optimizer or by the one that boost returned."""
    booster, model, optimizer, _ = boosted(path, config, torch.float32)
    losses = []
    for step in range(3):
        losses.append(booster_backward(booster, model, optimizer, step))
        optimizer.step()
        (optimizer.unwrap() if clears_inner else optimizer).zero_grad()
    return losses


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("others", [{"zero_optimization": {"stage": 1}}, {"bf16": {"enabled": True}}, {}], ids=str)
def test_the_inner_optimizers_zero_grad_clears_all_gradients(pool, checkpoint, others):
    inner, outer = (
        pool.run(2, functools.partial(losses_with, clears_inner=clears), checkpoint(LLAMA), {**REPLICAS, **others})
        for clears in (True, False)
    )
    assert inner == outer


def edited(path, config):
    """What is said of edits of .grad after a backward and after its norm; whether all is as usual at the end."""
    booster, model, optimizer, _ = boosted(path, config, torch.float32)
    messages = []

    def scale():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    for step in range(2):
        booster_backward(booster, model, optimizer, step)
        messages.append(said({"scale": scale})["scale"])
        optimizer.clip_grad_by_norm(1e9)
        messages.append(said({"scale": scale})["scale"])
        optimizer.step()
        (optimizer if step else model).zero_grad()
    return messages, all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (settings("1x2x1", bf16={"enabled": True}), [True, True]),
        (settings("1x1x1", 2, bf16={"enabled": True}), [True, True]),
        ({**REPLICAS, "zero_optimization": {"stage": 1}}, [False, True]),
        (settings("1x2x1"), [False, False]),
    ],
    ids=["bf16", "stages in bf16", "ZeRO 1", "float32"],
)
def test_edits_of_gradients_that_are_elsewhere_are_refused(pool, checkpoint, config, refused):
    for messages, is_usual in pool.run(2, edited, checkpoint(LLAMA), config):
        assert [message.startswith(".grad between booster.backward") for message in messages] == refused * 2
        assert is_usual


def loads_by_itself(path, config):
    """What a pipeline says of batches that it would read in vain, or for nothing."""
    booster, model, optimizer, _ = boosted(path, config, torch.float32)
    batch = global_batch(0)

    def run(data, criterion=None):
        return lambda: booster.execute_pipeline(data, model, criterion, optimizer)

    loader = torch.utils.data.DataLoader([batch], batch_size=None)
    return said(
        {
            "list": run([batch]),
            "loader": run(loader),
            "batch": run(batch),
            "nothing": run(iter([batch]), lambda outputs, inputs: outputs.loss * 0),
            "iterator": run(iter(loader)),
        }
    )


def test_a_pipeline_reads_iterators_alone(pool, checkpoint):
    first = "of which it would take the first batch each time"
    wanted = {
        "list": f"a list, {first}",
        "loader": first,
        "batch": f"a dict, {first}",
        "nothing": "makes 0 of any loss",
    }
    for messages in pool.run(2, loads_by_itself, checkpoint(LLAMA), settings("1x1x1", 2)):
        assert_said(messages, {**wanted, "iterator": "nothing"})


def with_own_criterion(path, config, evaluates):
    torch.distributed.init_process_group("gloo")
    booster, model, optimizer, _ = boosted(path, config, torch.float32)
    criterion = None if torch.distributed.get_rank() == 0 else lambda outputs, inputs: outputs.loss / 4
    with torch.set_grad_enabled(not evaluates):
        batch = {name: x[:ROWS] for name, x in global_batch(0).items()}
        booster.execute_pipeline(iter([batch]), model, criterion, optimizer)


@pytest.mark.parametrize(
    ("layout", "evaluates"),
    [
        ({"stages": 2}, False),
        pytest.param({"stages": 1, "data": 2}, True, marks=pytest.mark.ci),
        pytest.param({"stages": 2}, True, marks=pytest.mark.slow),
        pytest.param({"stages": 1, "data": 2}, False, marks=pytest.mark.slow),
    ],
)
def test_ranks_with_other_criteria_are_told_so_in_the_first_step(checkpoint, layout, evaluates):
    config = settings("1x1x1", **layout)
    for ending in endings_of(2, with_own_criterion, checkpoint(LLAMA), config, evaluates):
        assert "rank 0 multiplies the loss by 1, and rank 1 by 0.25; give all ranks the same" in ending.text


def thawed(path, config):
    """Losses, norms and weights where a layer is thawed, and another frozen, after the first step."""
    booster, model, optimizer, _ = boosted(path, config)
    return _thawed(model.unwrap(), optimizer, functools.partial(booster_backward, booster, model, optimizer))


def thawed_alone(path):
    cuboid.unregister()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).train()
        return _thawed(model, adamw(model), lambda step: reference_backward(model, step, 1, False))
    finally:
        cuboid.register()


def _thawed(model, optimizer, backward):
    losses, norms = [], []
    first, second = model.model.layers
    with KeepFloat64():
        for step in range(3):
            first.requires_grad_(step > 0)
            second.requires_grad_(step == 0)
            losses.append(backward(step))
            if isinstance(optimizer, torch.optim.Optimizer):
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
            else:
                optimizer.step()
                norms.append(optimizer.get_grad_norm())
            optimizer.zero_grad()
        weights = cuboid.full_state_dict(model) if hasattr(model, "cuboid") else model.state_dict()
    return {"losses": losses, "norms": norms, "weights": weights}


def test_on_one_replica_layers_are_thawed_and_frozen_as_in_one_process(pool, checkpoint):
    results = pool.run(2, thawed, checkpoint(LLAMA), settings("1x2x1"))[0]
    assert_alike(results, pool.run(1, thawed_alone, checkpoint(LLAMA))[0], EXACT)


def thawed_from_nothing(path, config):
    """What is said where all that a rank's optimizer has was frozen, as on a stage that is frozen as a whole."""
    from colossalai.booster import Booster

    booster = Booster(plugin=cuboid.CuboidPlugin(config))
    model = cuboid.from_pretrained(path, booster.plugin.config).train()
    embedding = model.get_input_embeddings().weight.requires_grad_(False)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD([embedding], lr=0.1))
    embedding.requires_grad_(True)
    booster.backward(model(**global_batch(0)).loss, optimizer)
    return said({"step": optimizer.step})


@pytest.mark.parametrize("options", [{}, pytest.param({"zero_optimization": {"stage": 1}}, marks=pytest.mark.ci)])
def test_replicas_refuse_what_is_thawed_also_where_nothing_was_trained(pool, checkpoint, options):
    for messages in pool.run(2, thawed_from_nothing, checkpoint(LLAMA), settings("1x1x1", data=2, **options)):
        assert_said(messages, {"step": "model.embed_tokens.weight was frozen in booster.boost"})


def adapted(path, config, folder):
    """Losses with an adapter from a folder, which is saved again; and what is said of calls in a wrong order."""
    from colossalai.booster import Booster

    plugin = cuboid.CuboidPlugin(config)
    booster = Booster(plugin=plugin)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"])
    messages = said({"quantised": lambda: booster.enable_lora(model, lora_config=lora, quantize=True)})
    model = booster.enable_lora(model.train(), pretrained_dir=folder / "adapter")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    with KeepFloat64():
        for step in range(3):
            losses.append(booster_backward(booster, model, optimizer, step))
            optimizer.step()
            optimizer.zero_grad()
    booster.save_lora_as_pretrained(model, folder / "saved")
    return losses, messages | said({"late": lambda: booster.enable_lora(model, lora_config=lora)})


def adapted_alone(path, folder):
    """The same in one process of PEFT."""
    cuboid.unregister()
    try:
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).train()
        model = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
        losses = []
        with KeepFloat64():
            for step in range(3):
                losses.append(reference_backward(model, step, 1, False))
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        model.save_pretrained(folder / "alone")
        return losses
    finally:
        cuboid.register()


def write_adapter(path, folder):
    """An adapter whose factors are none of them zero."""
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(path), lora)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder / "adapter")


def test_enable_lora_trains_and_saves_as_plain_peft(pool, checkpoint, tmp_path):
    path = checkpoint(LLAMA)
    write_adapter(path, tmp_path)
    wanted = pool.run(1, adapted_alone, path, tmp_path)[0]
    for losses, messages in pool.run(2, adapted, path, settings("1x2x1"), tmp_path):
        assert losses == pytest.approx(wanted, rel=EXACT)
        assert_said(messages, {"quantised": "quantised weights can't be cut", "late": "comes before booster.boost"})
    saved, alone = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("saved", "alone"))
    assert saved.keys() == alone.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, alone[name], rtol=1e-7, atol=1e-9)
    assert json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["r"] == 4


def without_adapters(path, config, folder):
    booster, model, *_ = boosted(path, config, torch.float32)
    return said({"none": lambda: booster.save_lora_as_pretrained(model, folder)})


def test_a_model_without_adapters_has_none_to_save(pool, checkpoint, tmp_path):
    for messages in pool.run(2, without_adapters, checkpoint(LLAMA), settings("1x2x1"), tmp_path / "none"):
        assert_said(messages, {"none": "the model has no adapters to save"})
    assert not (tmp_path / "none").exists()


def disagree(path, config, others):
    """What is said where the second rank has another config."""
    from colossalai.booster import Booster

    plugin = cuboid.CuboidPlugin({**config, **(others if torch.distributed.get_rank() else {})})
    model = cuboid.from_pretrained(path, plugin.config, dtype=torch.float32)
    optimizer = None if others == {} and torch.distributed.get_rank() else adamw(model)
    return said({"boost": lambda: Booster(plugin=plugin).boost(model, optimizer)})


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("config", "others", "word"),
    [
        (REPLICAS, {"zero_optimization": {"stage": 1}}, "zero_optimization.stage is 0 on rank 0, but 1 on rank 1"),
        (REPLICAS, {}, "the optimizer is 'AdamW' on rank 0, but 'NoneType' on rank 1"),
        (REPLICAS, {"gradient_clipping": 9.0}, "gradient_clipping is 0.5 on rank 0, but 9.0 on rank 1"),
        (
            settings("1x1x1", 2),
            {"pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 2}},
            "pipeline.segments is 4 on rank 0, but 2 on rank 1",
        ),
    ],
    ids=["zero", "optimizer", "clipping", "segments"],
)
def test_ranks_that_disagree_are_told_by_key(pool, checkpoint, config, others, word):
    for messages in pool.run(2, disagree, checkpoint(LLAMA), config, others):
        assert_said(messages, {"boost": word})


def frozen_on_one(path, config):
    """What is said where the second rank has frozen a layer, and where its model is none of transformers."""
    from colossalai.booster import Booster

    is_second = torch.distributed.get_rank() == 1
    plugin = cuboid.CuboidPlugin(config)
    model = cuboid.from_pretrained(path, plugin.config, dtype=torch.float32)
    model.model.layers[1].mlp.up_proj.requires_grad_(not is_second)
    other = nn.Linear(2, 2) if is_second else model
    return said(
        {
            "model": lambda: Booster(plugin=cuboid.CuboidPlugin(config)).boost(other),
            "frozen": lambda: Booster(plugin=plugin).boost(model, adamw(model)),
        }
    )


def test_a_rank_with_another_model_or_other_frozen_layers_is_named(pool, checkpoint):
    frozen = "model.layers.1.mlp.up_proj.weight is frozen on rank 1, but not on rank 0"
    for messages in pool.run(2, frozen_on_one, checkpoint(LLAMA), settings("1x2x1")):
        assert_said(messages, {"model": "all ranks must make the same calls", "frozen": frozen})


def other_plugin(path, config):
    """What is said of a plugin of ColossalAI's own with a sharded model."""
    from colossalai.booster import Booster
    from colossalai.booster.plugin import LowLevelZeroPlugin

    model = cuboid.from_pretrained(path, config, dtype=torch.float32)
    booster = Booster(plugin=LowLevelZeroPlugin(precision="fp32"))
    return said({"low level": lambda: booster.boost(model, adamw(model))})


def test_plugins_that_average_over_all_ranks_are_refused(pool, checkpoint):
    for messages in pool.run(2, other_plugin, checkpoint(LLAMA), settings("1x2x1")):
        assert_said(messages, {"low level": "takes all ranks for replicas that have the same parameters"})


class _Endless(IterableDataset):
    def __iter__(self):
        yield from iter(int, 1)


@pytest.mark.parametrize(
    ("dataset", "options", "word"),
    [
        (_Endless(), {}, "a _Endless doesn't have"),
        (list(range(8)), {"batch_sampler": [[0]]}, "batch_sampler would replace"),
        (list(range(8)), {"sampler": range(8)}, "give distributed_sampler_cls"),
    ],
)
def test_a_loader_that_replicas_cannot_share_is_refused(monkeypatch, dataset, options, word):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    plugin = cuboid.CuboidPlugin(REPLICAS)
    with pytest.raises(CuboidError, match=word):
        plugin.prepare_dataloader(dataset, ROWS, **options)
    assert len(plugin.prepare_dataloader(list(range(8)), 2, generator=torch.Generator())) == 2
