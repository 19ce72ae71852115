"""Training with frozen parameters, whole stages of them too: the same as plain transformers."""

import re

import deepspeed
import pytest
import torch
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.errors import ConfigError
from cuboid.integrations.callbacks.utilization import computed_share
from cuboid.models.pipeline.training_pipeline import Pipeline
from cuboid.verify import SmallModel
from training import _batches, ranks_of, settings, train

TIMEOUT_S = 90.0
SMALL = SmallModel("llama", heads=4, kv_heads=2, layers=4)
TIED = SmallModel("llama", heads=4, kv_heads=2, layers=4, tied=True)
LEARNING_RATE, DECAY, STEPS = 1e-2, 0.1, 3


def _trains(frozen, name):
    """Whether a parameter is trained, by what is frozen; with two stages each has two of the four layers."""
    match = re.search(r"layers\.(\d+)\.", name)
    layer = int(match[1]) if match else None
    return {
        "nothing": True,
        "first stage": "embed" not in name and layer not in (0, 1),
        "last stage": "embed" in name or layer in (0, 1),
        "middle stages": layer not in (1, 2),
        "all but the head": "lm_head" in name,
        "every other layer": layer in (1, 3),
        "all but the norms": "norm" in name,
        "everything": False,
    }[frozen]


def _freeze(model, frozen):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_trains(frozen, name))


def _config(mesh, stages, zero, data, *, bf16=False):
    config = settings(mesh, stages, zero=zero, data=data, bf16=bf16, learning_rate=LEARNING_RATE)
    del config["scheduler"]
    return config


def _engine(path, config, frozen):
    model = cuboid.from_pretrained(path, config, dtype=torch.bfloat16 if "bf16" in config else torch.float32)
    _freeze(model, frozen)
    return deepspeed.initialize(model=model, config=config)[0]


def trained_sharded(path, config, frozen, root):
    """Losses, the last norm, and the weights; one more step is from a checkpoint."""
    engine = _engine(path, config, frozen)
    losses = train(engine, STEPS)
    norm = float(engine.get_global_grad_norm())
    engine.save_checkpoint(root)
    state = cuboid.full_state_dict(engine)
    again = _engine(path, config, frozen)
    again.load_checkpoint(root)
    losses += train(again, 1, skip=STEPS)
    return losses, norm, state


def trained_plain(path, frozen):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    _freeze(model, frozen)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=DECAY)
    batches, losses = _batches(0, 1), []
    for step in range(STEPS + 1):
        losses.append(0.0)
        for _ in range(2):
            loss = model(**next(batches)).loss / 2
            loss.backward()
            losses[-1] += float(loss)
        if step == STEPS:
            break
        norm = float(torch.nn.utils.clip_grad_norm_(trained, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norm, model.state_dict()


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize(
    ("frozen", "mesh", "stages", "zero", "data"),
    [
        ("first stage", "1x1x1", 2, 0, 1),
        ("first stage", "1x1x1", 2, 1, 2),
        ("middle stages", "1x1x1", 4, 1, 1),
        ("every other layer", "1x2x1", 2, 1, 1),
        ("all but the head", "1x1x2", None, 1, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("first stage", "1x1x1", 2, 1, 1),
                ("first stage", "1x2x1", 2, 0, 1),
                ("first stage", "1x2x1", 2, 1, 2),
                ("first stage", "1x2x2", None, 2, 1),
                ("last stage", "1x1x1", 2, 0, 1),
                ("last stage", "1x1x2", 2, 1, 1),
                ("middle stages", "1x1x1", 4, 0, 2),
                ("every other layer", "1x1x1", 4, 0, 1),
                ("all but the head", "1x1x1", 2, 0, 1),
                ("all but the head", "1x1x2", 2, 1, 2),
                ("all but the norms", "1x1x2", 2, 1, 1),
                ("all but the norms", "2x1x2", None, 0, 1),
            ]
        ),
    ],
)
def test_frozen_parameters_train_as_in_plain_transformers(pool, checkpoint, tmp_path, frozen, mesh, stages, zero, data):
    check_frozen(pool, checkpoint, tmp_path, frozen, _config(mesh, stages, zero, data), data)


@pytest.mark.sample(1)
@pytest.mark.parametrize("frozen", ["every other layer", "first stage", "all but the norms"])
@pytest.mark.parametrize("mesh", ["1x1x1", "1x2x1", "2x1x1"])
def test_frozen_parameters_under_a_split_backward(pool, checkpoint, tmp_path, frozen, mesh):
    config = _config(mesh, 2, 1, 1)
    config["pipeline"] |= {"schedule": "zero_bubble", "memory_limit": 2}
    check_frozen(pool, checkpoint, tmp_path, frozen, config, 1)


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("frozen", ["last stage", "all but the head", "first stage"])
def test_frozen_parameters_with_a_head_on_all_stages(pool, checkpoint, tmp_path, frozen):
    config = _config("1x1x1", 2, 1, 1)
    config["pipeline"] |= {"schedule": "zero_bubble", "memory_limit": 3, "head": "spread"}
    check_frozen(pool, checkpoint, tmp_path, frozen, config, 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("frozen", ["first stage", "middle stages", "all but the head", "last stage"])
@pytest.mark.parametrize("schedule", ["zero_bubble-v", "seq1f1b-interleaved"])
def test_frozen_parameters_of_chunks(pool, checkpoint, tmp_path, frozen, schedule):
    config = _config("1x1x1", 2, 1, 1)
    config["pipeline"] |= {"schedule": schedule, "chunks": 2, "stage_balance": "layers"}
    check_frozen(pool, checkpoint, tmp_path, frozen, config, 1)


def check_frozen(pool, checkpoint, tmp_path, frozen, config, data):
    path = checkpoint(SMALL)
    losses, norm, state = pool.run(
        ranks_of(config, data), trained_sharded, path, config, frozen, str(tmp_path), timeout_s=TIMEOUT_S
    )[0]
    plain_losses, plain_norm, plain_state = trained_plain(path, frozen)
    assert losses == pytest.approx(plain_losses, abs=2e-5)
    assert norm == pytest.approx(plain_norm, rel=1e-4)
    untouched = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    for name, weight in state.items():
        if _trains(frozen, name):
            # A step is up to the learning rate, and Adam makes a gradient of nothing but rounding one of that length.
            assert float((weight - plain_state[name]).abs().max()) < LEARNING_RATE / 20, name
            assert not torch.equal(weight, untouched[name]), name
        else:
            assert torch.equal(weight, untouched[name]), name


@pytest.mark.ci
@pytest.mark.parametrize("data", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_frozen_stage_in_bfloat16(pool, checkpoint, tmp_path, data):
    path, config = checkpoint(SMALL), _config("1x1x1", 2, 1, data, bf16=True)
    losses, norm, state = pool.run(
        ranks_of(config, data), trained_sharded, path, config, "first stage", str(tmp_path), timeout_s=TIMEOUT_S
    )[0]
    plain_losses, plain_norm, _ = trained_plain(path, "first stage")
    assert losses == pytest.approx(plain_losses, abs=2e-2)
    assert norm == pytest.approx(plain_norm, rel=5e-2)
    untouched = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(weight, untouched[name]) != _trains("first stage", name) for name, weight in state.items())


def _adapted(model):
    pytest.importorskip("peft", reason="PEFT isn't installed")
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"]))


def _computed_shares(path, config):
    model = cuboid.from_pretrained(path, config)
    return computed_share(model), computed_share(_adapted(model))


@pytest.mark.parametrize(("mesh", "stages"), [("1x2x1", None), ("1x1x1", 2)], ids=["mesh", "stages"])
def test_a_utilization_has_no_gradients_of_what_is_frozen(pool, checkpoint, mesh, stages):
    plain = _adapted(AutoModelForCausalLM.from_pretrained(checkpoint(SMALL)))
    counts = [plain.num_parameters(exclude_embeddings=True, only_trainable=trained) for trained in (True, False)]
    expected = 2 / 3 + counts[0] / (3 * counts[1])
    for full, adapted in pool.run(2, _computed_shares, checkpoint(SMALL), settings(mesh, stages), timeout_s=TIMEOUT_S):
        assert full == 1.0
        assert adapted == pytest.approx(expected)


def _refused(path, tied, config):
    seen = []
    for frozen, where in ((path, "everything"), (tied, "first stage")):
        model = cuboid.from_pretrained(frozen, config)
        _freeze(model, where)
        if where == "first stage" and cuboid.mesh_of(model).has_last_stage:
            # The head is the embedding.
            model.get_parameter("model.embed_tokens.weight").requires_grad_()
        try:
            deepspeed.initialize(model=model, config=config)
        except ConfigError as error:
            seen.append((str(error), error.rank))
    return seen


def test_nothing_to_train_and_half_frozen_ties_are_errors_on_all_ranks(pool, checkpoint):
    config = _config("1x1x1", 2, 1, 1)
    for seen in pool.run(2, _refused, checkpoint(SMALL), checkpoint(TIED), config, timeout_s=TIMEOUT_S):
        (nothing, first), (tied, second) = seen
        assert nothing.startswith("every parameter is frozen")
        assert tied.startswith("model.embed_tokens.weight is tied to a parameter of the last stage, and is frozen")
        assert first is second is None


def _head_frozen_late(path):
    """The error of a step, and the loss of one in which all ranks have frozen both ends."""
    model = cuboid.from_pretrained(path, {"pipeline": {"engine": "seq1f1b", "stages": 3, "segments": 2}})
    pipeline = Pipeline(model)
    # The tied weight, on the last stage; the other stages have a placeholder without parameters.
    model.lm_head.requires_grad_(False)
    message = None
    try:
        pipeline.train(_batches(0, 1), 2)
    except ConfigError as error:
        message = str(error)
    model.get_input_embeddings().requires_grad_(False)
    return message, float(pipeline.train(_batches(0, 1), 2)), "model.embed_tokens.weight" in _with_gradients(model)


def _with_gradients(model):
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_a_tied_head_that_is_frozen_later_is_an_error_on_all_ranks_unless_the_embedding_is_too(pool, checkpoint):
    results = pool.run(3, _head_frozen_late, checkpoint(TIED), timeout_s=TIMEOUT_S)
    for message, loss, has_gradient in results:
        assert message.startswith("model.embed_tokens.weight is tied to a parameter of the last stage, and is trained")
        assert "model.get_input_embeddings().requires_grad_" in message
        assert loss == pytest.approx(results[0][1])
        assert not has_gradient
