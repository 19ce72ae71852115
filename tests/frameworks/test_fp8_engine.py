"""Linear layers in fp8 under DeepSpeed's engine and ColossalAI's Booster: steps as with an emulation of the recipe."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import boosting
import cuboid
from fp8_emulation import FP8, counted_products
from training import VOCABULARY, _batches, make_engine, ranks_of, settings, train

STEPS, LAYERS = 3, 2
#: Products of a layer and micro-batch: seven in forward and in backward; on a mesh one for each of four rows and two
#: ranks, of o and down in forward and of the five others in backward.
ALONE, ON_MESH = 2 * 7, 5 + 2 * 8 + 5 * 8 + 2
#: Of the product that tells whether the device has any.
OF_DEVICE = (16, 16)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    folder = tmp_path_factory.mktemp("fp8")
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(folder)
    return str(folder)


def under_engine(path, config, emulated):
    """The losses and the last norm of some steps, and how many products in fp8 they had."""
    with counted_products(emulated) as shapes:
        engine = make_engine(path, config)
        losses = train(engine, STEPS)
    return losses, float(engine.get_global_grad_norm()), sum(shape != OF_DEVICE for shape in shapes)


def first_loss(path, config):
    """Of the same step without an engine."""
    model, batches = cuboid.from_pretrained(path, config, dtype=torch.bfloat16).train(), _batches(0, 1)
    return sum(float(model(**next(batches)).loss.detach()) / 2 for _ in range(2))


def check_steps(pool, run, path, config, products):
    """Steps are those with the emulation, bit for bit, and others than in bf16, though nearly the same."""
    config["tensor_parallel"]["fp8"] = FP8
    ranks = ranks_of(config)
    losses, norm, count = pool.run(ranks, run, path, config, False)[0]
    assert count == products
    assert pool.run(ranks, run, path, config, True)[0] == (losses, norm, count)
    plain = {**config, "tensor_parallel": {**config["tensor_parallel"], "fp8": None}}
    wide, wide_norm, count = pool.run(ranks, run, path, plain, False)[0]
    assert count == 0
    assert losses != wide
    assert losses == pytest.approx(wide, rel=3e-3)
    assert norm == pytest.approx(wide_norm, rel=3e-2)
    return losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero", [1, 2])
def test_an_engine_on_a_mesh(pool, path, zero):
    config = settings("1x2x1", zero=zero, bf16=True, learning_rate=1e-2)
    losses = check_steps(pool, under_engine, path, config, STEPS * 2 * LAYERS * ON_MESH)
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(pool.run(2, first_loss, path, config)[0], rel=1e-7)


@pytest.mark.ci
def test_an_engine_of_two_stages(pool, path):
    config = settings("1x1x1", 2, zero=1, bf16=True, learning_rate=1e-2)
    check_steps(pool, under_engine, path, config, STEPS * 2 * 2 * (LAYERS // 2) * ALONE)


def under_booster(path, config, emulated):
    """As :func:`under_engine`."""
    with counted_products(emulated) as shapes:
        results = boosting.under_booster(path, config, torch.bfloat16, steps=STEPS)
    return results["losses"], results["norms"][-1], sum(shape != OF_DEVICE for shape in shapes)


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize(("mesh", "stages", "products"), [("1x2x1", None, ON_MESH), ("1x1x1", 2, 4 * ALONE // 2)])
def test_a_booster(pool, path, mesh, stages, products):
    pytest.importorskip("colossalai", reason="ColossalAI isn't installed")
    config = boosting.settings(mesh, stages, bf16={"enabled": True}, zero_optimization={"stage": 1})
    check_steps(pool, under_booster, path, config, STEPS * 2 * LAYERS * products)
