"""Weights that a script changes behind an optimizer with copies of them: the next step begins from the new values."""

import copy
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_set_full_fp32_param
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.errors import CuboidError
from cuboid.optim.flat_params import FlatParameters
from cuboid.optim.master_weights import follow
from cuboid.verify import SmallModel
from training import ROWS, _batches, make_engine, settings

SMALL = SmallModel("llama", heads=4, kv_heads=2)
RATE, STEPS = 0.1, 5


def test_only_changed_elements_of_the_masters_follow():
    master = torch.randn(40, generator=torch.Generator().manual_seed(0))
    parameters, before = master.bfloat16(), master.clone()
    follow(master, parameters)
    assert torch.equal(master, before)
    parameters[7:9] *= 2
    follow(master, parameters)
    assert torch.equal(master[7:9], parameters[7:9].float())
    assert torch.equal(master[9:], before[9:])


@pytest.mark.parametrize("working", [torch.float32, torch.bfloat16])
def test_a_parameter_whose_data_is_another_tensor_returns_to_the_flat_one(working):
    parameters = [torch.nn.Parameter(torch.full((3, 2), float(number))) for number in range(3)]
    flat = FlatParameters(parameters, torch.float32, working, (0, 1))
    parameters[1].data = torch.full((3, 2), 5.0, dtype=working)
    parameters[2].data.mul_(3)
    flat.take_changes()
    flat.master.data.add_(1.0)
    flat.publish(None)
    assert [parameter.unique().item() for parameter in parameters] == [1.0, 6.0, 7.0]


def change(step, model):
    """What a script does to all parameters before a step."""
    for parameter in model.parameters():
        if step == 1:
            parameter.data.mul_(0.9)
        elif step == 2:
            parameter.data = parameter.data * 0.9
        elif step == 3:
            parameter.detach().mul_(1.1)


def under_deepspeed(path, config):
    dtype = torch.bfloat16 if "bf16" in config else torch.float16 if "fp16" in config else torch.float32
    model = cuboid.from_pretrained(path, config, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    # torch multiplies float16 on every CPU; DeepSpeed wants one that is fast at it.
    with mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True):
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=copy.deepcopy(config))[0]
    batches, losses = _batches(0, 1), []
    for step in range(STEPS):
        change(step, engine.module)
        if "pipeline" in config:
            losses.append(float(engine.train_batch(batches)))
            continue
        loss = engine(**next(batches)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def plain(path):
    model = AutoModelForCausalLM.from_pretrained(path).train()
    optimizer, batches, losses = torch.optim.SGD(model.parameters(), lr=RATE), _batches(0, 1), []
    for step in range(STEPS):
        change(step, model)
        loss = model(**next(batches)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("mesh", "stages", "options", "tolerance"),
    [
        ("1x2x1", None, {"zero": 1}, 1e-4),
        ("1x1x2", None, {"zero": 1, "bf16": True}, 5e-2),
        ("1x1x1", 2, {"zero": 1, "bf16": True}, 5e-2),
        pytest.param("1x1x1", 2, {"zero": 1}, 1e-4, marks=pytest.mark.slow),
        pytest.param("2x1x1", None, {"zero": 0}, 1e-4, marks=pytest.mark.slow),
        pytest.param("2x1x1", None, {"zero": 1, "fp16": {"initial_scale_power": 4}}, 5e-2, marks=pytest.mark.slow),
    ],
)
def test_changes_count_in_an_engines_next_step(pool, checkpoint, mesh, stages, options, tolerance):
    config = settings(mesh, stages, **options) | {"gradient_clipping": 0.0, "gradient_accumulation_steps": 1}
    config |= {"zero_allow_untested_optimizer": True, "train_micro_batch_size_per_gpu": ROWS}
    del config["optimizer"], config["scheduler"]
    path = checkpoint(SMALL)
    wanted = plain(path)
    for losses in pool.run(2, under_deepspeed, path, config):
        assert losses == pytest.approx(wanted, rel=tolerance)


def set_by_deepspeed(path, config):
    model = cuboid.from_pretrained(path, config, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=copy.deepcopy(config))[0]
    norm = engine.module.model.norm.weight
    safe_set_full_fp32_param(norm, torch.full(norm.shape, 0.375))
    before = norm.detach().float().unique().tolist()
    loss = engine(**next(_batches(0, 1))).loss
    engine.backward(loss)
    engine.step()
    return before, norm.detach().float().unique().tolist()


def test_masters_that_are_set_by_deepspeeds_function_are_kept(pool, checkpoint):
    config = settings("1x2x1", bf16=True) | {"gradient_accumulation_steps": 1, "zero_allow_untested_optimizer": True}
    del config["optimizer"], config["scheduler"]
    for before, after in pool.run(2, set_by_deepspeed, checkpoint(SMALL), config):
        assert before == after == [0.375]


def scale(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def leave_out(model):
    model.lm_head.weight.grad = None


#: What scripts do to gradients before a step.
EDITS = {
    "scale": scale,
    "leave out": leave_out,
    "drop": lambda model: model.zero_grad(),
    "norm": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.1),
}


def edited(path, options):
    """What is said of edits before a step; whether a model that is copied there has parameters as any other, and .grad
    is as usual after the step; and what is said of a step without gradients.
    """
    engine = make_engine(path, {**settings("1x2x1", **options), "gradient_accumulation_steps": 1})
    other = torch.nn.Linear(2, 2)
    ids, said = torch.arange(24).view(2, 12), {}
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    for name, edit in EDITS.items():
        with pytest.raises(CuboidError) as caught:
            edit(engine.module)
        said[name] = str(caught.value)
    other(torch.ones(2)).sum().backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    copied = copy.deepcopy(engine.module)
    engine.step()
    models = copied, engine.module
    is_usual = all(type(p) is torch.nn.Parameter and p.grad is None for m in models for p in m.parameters())
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.zero_grad()
    scale(engine.module)
    with pytest.raises(CuboidError) as caught:
        engine.step()
    return said, is_usual, str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 1},
        pytest.param({"zero": 2}, marks=pytest.mark.slow),
        pytest.param({"zero": 2, "bf16": True}, marks=pytest.mark.slow),
    ],
)
def test_edits_of_gradients_that_zero_has_taken_are_refused(pool, checkpoint, options):
    for said, is_usual, without in pool.run(2, edited, checkpoint(SMALL), options):
        for message in said.values():
            assert message.startswith(
                ".grad between engine.backward and engine.step: ZeRO has taken this step's gradient"
            )
            assert '"gradient_clipping"' in message
        assert said.keys() == EDITS.keys()
        assert is_usual
        assert "no gradients to step on" in without


def with_two_backwards(path):
    """What is said of a second backward that ends a step; and losses where the first gradients are kept, or dropped."""
    engine = make_engine(path, {**settings("1x2x1"), "gradient_accumulation_steps": 1})
    ids = torch.arange(24).view(2, 12)

    def backward():
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        return float(loss)

    losses = [backward()]
    with pytest.raises(CuboidError) as caught:
        backward()
    engine.step()
    with engine.no_sync():
        losses.append(backward())
    losses.append(backward())
    engine.zero_grad()
    losses.append(backward())
    engine.step()
    return str(caught.value), losses


def test_a_backward_whose_gradients_would_replace_those_of_another_is_refused(pool, checkpoint):
    for message, losses in pool.run(2, with_two_backwards, checkpoint(SMALL)):
        assert "ZeRO has reduced this step's gradients, and would replace them" in message
        assert losses[1] == losses[2] == losses[3]


def cast_between_steps(path, config):
    """What is said of steps after casts of a running engine's model."""
    engine, messages = make_engine(path, config), []
    batches = _batches(0, 1)

    def step():
        if "pipeline" in config:
            return engine.train_batch(batches)
        loss = engine(**next(batches)).loss
        engine.backward(loss)
        return engine.step()

    step()
    for cast in (engine.double, engine.module.bfloat16):
        cast()
        with pytest.raises(CuboidError) as caught:
            step()
        messages.append(str(caught.value))
        engine.zero_grad()
        engine.module.float()
    step()
    return messages


@pytest.mark.parametrize(("mesh", "stages"), [("1x2x1", None), pytest.param("1x1x1", 2, marks=pytest.mark.slow)])
def test_a_cast_that_the_step_would_take_back_is_refused(pool, checkpoint, mesh, stages):
    config = settings(mesh, stages) | {"gradient_accumulation_steps": 1}
    for messages in pool.run(2, cast_between_steps, checkpoint(SMALL), config):
        for message, dtype in zip(messages, ("float64", "bfloat16"), strict=True):
            assert f"was cast from torch.float32 to torch.{dtype} after deepspeed.initialize" in message


def dropped(path, options, clear):
    """Weights after a step whose first backward's gradients are dropped; and what is said of edits in between."""
    options = dict(options)
    accumulated = options.pop("accumulated", None)
    config = settings("1x2x1", **options) | {"zero_allow_untested_optimizer": True}
    if accumulated is not None:
        config["data_types"] = {"grad_accum_dtype": accumulated}
    del config["optimizer"], config["scheduler"]
    model = cuboid.from_pretrained(path, config, dtype=torch.bfloat16 if "bf16" in config else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=copy.deepcopy(config))[0]
    batches, said = _batches(0, 1), None
    for number in range(2):
        loss = engine(**next(batches)).loss
        engine.backward(loss * 0 if clear is None and number == 0 else loss)
        if number == 0 and clear is not None:
            with pytest.raises(CuboidError) as caught:
                scale(engine.module)
            said = str(caught.value)
            {"engine": engine, "own": optimizer}[clear].zero_grad()
        engine.step()
    return said, cuboid.full_state_dict(engine.module)


@pytest.mark.parametrize(
    ("options", "clear"),
    [
        ({"zero": 2}, "own"),
        pytest.param({"zero": 2}, "engine", marks=pytest.mark.slow),
        pytest.param({"zero": 2, "bf16": True}, "own", marks=pytest.mark.slow),
        pytest.param({"zero": 1, "bf16": True, "accumulated": "fp32"}, "engine", marks=pytest.mark.slow),
        pytest.param({"zero": 2, "bf16": True, "accumulated": "fp32"}, "own", marks=pytest.mark.slow),
    ],
)
def test_gradients_that_are_dropped_before_the_end_of_a_step_are_not_stepped_on(pool, checkpoint, options, clear):
    path = checkpoint(SMALL)
    said, weights = pool.run(2, dropped, path, options, clear)[0]
    _, expected = pool.run(2, dropped, path, options, None)[0]
    assert said.startswith(".grad between engine.backward and engine.step")
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight)


def past_the_engine(path):
    """What is said of a script's loss.backward() without ZeRO, of a second one under ZeRO, and of .grad after the
    first; and whether the step after it, and zero_grad of the script's optimizer before another, do what they say.
    """
    config = settings("1x2x1", zero=0) | {"gradient_accumulation_steps": 1}
    engine, messages = make_engine(path, config), []

    def message_of(action):
        with pytest.raises(CuboidError) as caught:
            action()
        messages.append(str(caught.value))

    def loss():
        return engine(**next(_batches(0, 1))).loss

    message_of(lambda: loss().backward())
    config = settings("1x2x1") | {"gradient_accumulation_steps": 1}
    del config["scheduler"]
    engine = make_engine(path, config)
    before = loss()
    before.backward()
    message_of(lambda: scale(engine.module))
    message_of(lambda: loss().backward())
    engine.step()
    after = loss()
    engine.backward(after)
    engine.basic_optimizer.zero_grad()
    message_of(engine.step)
    return messages, float(before), float(after)


def test_a_scripts_own_backward_and_zero_grad_do_what_the_engines_do(pool, checkpoint):
    for messages, before, after in pool.run(2, past_the_engine, checkpoint(SMALL)):
        assert "without ZeRO" in messages[0]
        assert messages[1].startswith(".grad between")
        assert "would replace them" in messages[2]
        assert "no gradients to step on" in messages[3]
        assert after < before
