"""What scripts change on stages of a pipeline between steps: as in one process, or one error that names it."""

import copy
import functools
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.errors import CuboidError
from cuboid.verify import SmallModel, WorkerError
from training import _batches, ranks_of, settings, train

TIMEOUT_S = 90.0
SMALL = SmallModel("llama", heads=4, kv_heads=2, layers=4)
TIED = SmallModel("llama", heads=4, kv_heads=2, layers=4, tied=True)
RATE = 0.3


def config_of(stages=2, *, zero=1, data=1, pipeline=(), **options):
    config = settings("1x1x1", stages, zero=zero, data=data, pipeline=pipeline)
    del config["scheduler"], config["optimizer"], config["tensor_parallel"]
    return config | {"gradient_clipping": 0.0, "zero_allow_untested_optimizer": True, **options}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


def engine_of(path, config, make=sgd):
    model = cuboid.from_pretrained(path, config, dtype=torch.float32)
    return deepspeed.initialize(model=model, optimizer=make(list(model.parameters())), config=config)[0]


class Plain:
    """One process, with the methods of an engine that the scripts here call."""

    def __init__(self, path, make=sgd):
        self.module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
        self.optimizer = make(list(self.module.parameters()))

    def train_batch(self, batches):
        total = torch.zeros(())
        for _ in range(2):
            loss = self.module(**next(batches)).loss / 2
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def steps_of(engine, change, batches):
    """Losses of steps, between which a script changes something."""
    losses = []
    for step in range(4):
        if step == 2:
            change(engine.module)
        losses.append(float(engine.train_batch(batches)))
    return losses


def message_of(action, *errors):
    try:
        action()
    except errors as error:
        return str(error)
    return None


# --- copies of a tied weight -----------------------------------------------------------------------------------------


@torch.no_grad()
def shrunk(model):
    model.get_input_embeddings().weight.mul_(0.5)


@torch.no_grad()
def shrunk_head(model):
    for parameter in model.lm_head.parameters():
        parameter.mul_(0.5)


@torch.no_grad()
def a_row_of_the_head(model):
    model.get_output_embeddings().weight[-1] = 1.0


@torch.no_grad()
def drawn(model):
    for parameter in reversed(list(model.parameters())):
        parameter.add_(0.1 * torch.randn_like(parameter))


def tied_copies(path):
    config, messages = config_of(), []
    losses = steps_of(engine_of(path, config), shrunk, _batches(0, 1))
    for change in (shrunk_head, a_row_of_the_head, drawn):
        engine = engine_of(path, config)
        batch = [next(_batches(0, 1))]
        engine.train_batch(_batches(0, 1))
        change(engine.module)
        messages.append(message_of(lambda: engine.eval_batch(iter(batch), num_micro_batches=1), CuboidError))  # noqa: B023
        messages.append(message_of(lambda: engine.train_batch(_batches(0, 1)), CuboidError))  # noqa: B023
    return losses, messages


def test_copies_of_a_tied_weight_that_become_different_are_an_error_on_all_ranks(pool, checkpoint):
    path = checkpoint(TIED)
    expected = steps_of(Plain(path), shrunk, _batches(0, 1))
    for losses, messages in pool.run(2, tied_copies, path, timeout_s=TIMEOUT_S):
        assert losses == pytest.approx(expected, rel=1e-5)
        for message in messages:
            assert message.startswith("model.embed_tokens.weight is tied to a parameter of the last stage")
            assert "model.get_input_embeddings()" in message


# --- what is trained -------------------------------------------------------------------------------------------------


def train_layer(model, index, *, trains):
    for name, parameter in model.named_parameters():
        if f"layers.{index}." in name:
            parameter.requires_grad_(trains)


def trained_later(path, zero, trains):
    """Losses where a layer of the first stage is trained, or frozen, from the third step on."""
    config = config_of(zero=zero)
    model = cuboid.from_pretrained(path, config, dtype=torch.float32)
    train_layer(model, 1, trains=not trains)
    optimizer = adamw(list(model.parameters()))
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    return steps_of(engine, functools.partial(train_layer, index=1, trains=trains), _batches(0, 1))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.1)


@pytest.mark.parametrize("trains", [True, False])
def test_an_optimizer_of_flat_copies_is_refused_what_it_cant_train_or_leave_alone(pool, checkpoint, trains):
    path = checkpoint(SMALL)
    plain = Plain(path, adamw)
    train_layer(plain.module, 1, trains=not trains)
    expected = steps_of(plain, functools.partial(train_layer, index=1, trains=trains), _batches(0, 1))
    for losses in pool.run(2, trained_later, path, 0, trains, timeout_s=TIMEOUT_S):
        assert losses == pytest.approx(expected, rel=1e-5)
    with pytest.raises(WorkerError) as caught:
        pool.run(2, trained_later, path, 1, trains, timeout_s=TIMEOUT_S)
    said = "was frozen in deepspeed.initialize" if trains else "was frozen after deepspeed.initialize"
    assert "model.layers.1." in caught.value.explanation
    assert said in caught.value.explanation


# --- steps that are refused, and several calls for one step -----------------------------------------------------------


def refused_in_between(path, config):
    """Losses of three steps, with one between that is refused after its backward."""

    def refuse(_):
        raise CuboidError("a bad loss")

    engine = engine_of(path, config)
    losses = train(engine, 1)
    engine.before_update = refuse
    message = message_of(lambda: train(engine, 1, skip=5), CuboidError)
    engine.before_update = None
    return [*losses, *train(engine, 2, skip=1)], message


@pytest.mark.parametrize(
    ("stages", "zero"), [(2, 0), (None, 0), *(pytest.param(stages, 1, marks=pytest.mark.slow) for stages in (2, None))]
)
def test_gradients_of_a_refused_step_are_dropped(pool, checkpoint, stages, zero):
    path, config = checkpoint(TIED), config_of(stages, zero=zero)
    if stages is None:
        config["tensor_parallel"] = {"mode": "3d_tensor", "mesh": {"sequence": 2}}
    plain, batches = Plain(path), _batches(0, 1)
    expected = [float(plain.train_batch(batches)) for _ in range(3)]
    for losses, message in pool.run(2, refused_in_between, path, config, timeout_s=TIMEOUT_S):
        assert message == "a bad loss"
        assert losses == pytest.approx(expected, rel=1e-5)


def accumulated(path, calls):
    """Every gradient of this rank after several calls without a step in between."""
    model = cuboid.from_pretrained(path, config_of(), dtype=torch.float32)
    pipeline, batches = cuboid.Pipeline(model), _batches(0, 1)
    for _ in range(calls):
        pipeline.train(batches, 1)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_calls_of_train_add_up_also_for_a_tied_weight(pool, checkpoint):
    path = checkpoint(TIED)
    model, batches = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), _batches(0, 1)
    for _ in range(3):
        model(**next(batches)).loss.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradients in pool.run(2, accumulated, path, 3, timeout_s=TIMEOUT_S):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6, msg=name)


# --- ranks that disagree ----------------------------------------------------------------------------------------------


def checkpointed_by_stage(path):
    """A step under a schedule that depends on checkpointing, which only the last stage has enabled."""
    config = config_of(pipeline={"schedule": "zero_bubble", "segments": 4})
    model = cuboid.from_pretrained(path, config, dtype=torch.float32)
    if cuboid.mesh_of(model).has_last_stage:
        model.gradient_checkpointing_enable()
    engine = deepspeed.initialize(model=model, optimizer=sgd(list(model.parameters())), config=config)[0]
    return [float(engine.train_batch(_batches(0, 1))) for _ in range(2)]


def test_stages_that_recompute_and_others_have_one_schedule(pool, checkpoint):
    path = checkpoint(SMALL)
    plain = Plain(path)
    expected = [float(plain.train_batch(_batches(0, 1))) for _ in range(2)]
    for losses in pool.run(2, checkpointed_by_stage, path, timeout_s=TIMEOUT_S):
        assert losses == pytest.approx(expected, rel=1e-5)


def evaluated_alone(path):
    engine = engine_of(path, config_of())
    if engine.stage_id == 0:
        engine.eval_batch(_batches(0, 1), num_micro_batches=1)
    engine.train_batch(_batches(0, 1))


def test_a_rank_that_evaluates_while_others_train_is_named(pool, checkpoint):
    with pytest.raises(WorkerError) as caught:
        pool.run(2, evaluated_alone, checkpoint(SMALL), timeout_s=TIMEOUT_S)
    assert "rank 0 evaluates on 1 micro-batches, and rank 1 trains on 2" in str(caught.value)


def of_nothing(path):
    """What is said where a call could have no effect, or not the one that it asks for."""
    config = config_of(zero=0)
    model = cuboid.from_pretrained(path, config, dtype=torch.float32)
    other = config | {"pipeline": config["pipeline"] | {"segments": 3}}
    yield message_of(lambda: deepspeed.initialize(model=model, config=other), CuboidError)
    engine = deepspeed.initialize(model=model, config=config)[0]
    yield message_of(lambda: engine.train_batch(_batches(0, 1)), CuboidError)
    yield message_of(lambda: engine.eval_batch(_batches(0, 1), num_micro_batches=0), CuboidError)


def messages_of_nothing(path):
    return list(of_nothing(path))


def test_what_would_have_no_effect_is_refused(pool, checkpoint):
    for setting, optimizer, number in pool.run(2, messages_of_nothing, checkpoint(SMALL), timeout_s=TIMEOUT_S):
        assert "pipeline.segments" in setting
        assert "but the config has 3" in setting
        assert "the engine has none" in optimizer
        assert "at least 1 micro-batch" in number


# --- settings of DeepSpeed's ------------------------------------------------------------------------------------------


def trained_with(path, config, dtype=torch.float32):
    config = copy.deepcopy(config)
    # torch multiplies float16 on every CPU; DeepSpeed wants one that is fast at it.
    with mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True):
        model = cuboid.from_pretrained(path, config, dtype=dtype)
        engine = deepspeed.initialize(model=model, optimizer=sgd(list(model.parameters())), config=config)[0]
    mesh = cuboid.mesh_of(engine)
    batches = _batches(mesh.coordinate.data, mesh.topology.data)
    return [float(engine.train_batch(batches)) for _ in range(3)]


@pytest.mark.parametrize(
    ("stages", "data", "dtype", "options", "tolerance"),
    [
        # The gradients of the replicas' common mean are summed, whatever DeepSpeed does with them.
        (1, 2, torch.float32, {"gradient_allreduce_op": "sum"}, 1e-5),
        # Then ZeRO has them in an attribute of its own, of which both stages of a tied weight need the sum.
        (
            2,
            1,
            torch.float16,
            {"fp16": {"enabled": True, "loss_scale": 64}, "data_types": {"grad_accum_dtype": "fp32"}},
            2e-3,
        ),
    ],
    ids=["sum", "accumulation"],
)
def test_a_setting_of_deepspeeds_changes_no_loss(pool, checkpoint, stages, data, dtype, options, tolerance):
    path, config = checkpoint(TIED), config_of(stages, data=data, **options)
    plain, batches = Plain(path), _batches(0, 1)
    expected = [float(plain.train_batch(batches)) for _ in range(3)]
    ranks = ranks_of(settings(stages=stages, data=data), data)
    for losses in pool.run(ranks, trained_with, path, config, dtype, timeout_s=TIMEOUT_S):
        assert losses == pytest.approx(expected, rel=tolerance)


# --- several engines --------------------------------------------------------------------------------------------------


def beside_another(path, config, other):
    """Losses of an engine, and of another one that was made later, whose replicas are other ranks."""
    engines = [engine_of(path, config), engine_of(path, other)]
    losses = [[loss for engine in engines for loss in train(engine, 1, skip=step)] for step in range(3)]
    return list(zip(*losses, strict=True))


@pytest.mark.ci
def test_engines_of_other_layouts_have_replicas_of_their_own(pool, checkpoint):
    path = checkpoint(SMALL)
    plain, batches = Plain(path), _batches(0, 1)
    expected = [float(plain.train_batch(batches)) for _ in range(3)]
    staged, replicated = config_of(zero=0, data=2), config_of(None, zero=0, data=4)
    replicated["tensor_parallel"] = {"mode": "3d_tensor", "mesh": {"batch": 1}}
    for losses in pool.run(4, beside_another, path, staged, replicated, timeout_s=TIMEOUT_S):
        for of_engine in losses:
            assert of_engine == pytest.approx(expected, rel=1e-5)
