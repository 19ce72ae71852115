"""Several processes on one GPU, or on several: meshes and a pipeline against the plain model."""

import pytest
import torch

import cuboid
from cuboid.verify import WorkerPool
from gpu.test_gpu_frameworks import dropping_model
from gpu.test_gpu_stage import SIZES, model_of

RANKS = 4
MESHES = [(4, 1, 1), (1, 4, 1), (1, 2, 2), (2, 2, 1), (2, 1, 2)]


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(RANKS) as workers:
        yield workers


def ids_on(device):
    return (torch.arange(4 * 64, device=device).view(4, 64) * 7) % 512


def gradients(device, axes, stages, dtype, *, autocast=False, gather="layer"):
    """The loss of two micro-batches, and the gradients on rank 0."""
    device = torch.device(device)
    model = model_of(SIZES, device, dtype)
    section = {"mode": "3d_tensor", "mesh": dict(zip(("batch", "sequence", "hidden"), axes, strict=True))}
    config = {"tensor_parallel": section if stages > 1 else {**section, "weight_gather": gather}}
    if stages > 1:
        config["pipeline"] = {"engine": "seq1f1b", "stages": stages, "segments": 2, "certification": "verified"}
    ids = ids_on(device)
    if axes == (1, 1, 1) and stages == 1:
        loss = sum(model(input_ids=part, labels=part, use_cache=False).loss / 2 for part in (ids, ids.flip(1)))
        loss.backward()
        return float(loss.detach()), {name: p.grad.cpu() for name, p in model.named_parameters()}
    model = cuboid.shard(model, config)
    parts = [{"input_ids": part, "labels": part} for part in (ids, ids.flip(1))]
    if stages > 1:
        loss = cuboid.Pipeline(model).train(iter(parts), 2)
    else:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = sum(model(**part).loss / 2 for part in parts)
        loss.backward()
    return float(loss.detach()), {name: x.cpu() for name, x in (cuboid.full_gradients(model) or {}).items()}


def assert_close(actual, wanted, tolerance):
    assert actual[0] == pytest.approx(wanted[0], rel=tolerance)
    for name, gradient in wanted[1].items():
        error = (actual[1][name] - gradient).abs().max() / gradient.abs().max()
        assert error < tolerance, (name, error)


@pytest.fixture(scope="module")
def plain(alone, device):
    return alone.run(1, gradients, str(device), (1, 1, 1), 1, torch.float32)[0]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_mesh_is_the_plain_model(pool, device, plain, axes):
    assert_close(pool.run(RANKS, gradients, str(device), axes, 1, torch.float32)[0], plain, 1e-3)


@pytest.mark.parametrize("axes", [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)], ids=str)
def test_a_pipeline_of_meshes_is_the_plain_model(pool, device, plain, axes):
    size = axes[0] * axes[1] * axes[2]
    stages = 2
    assert_close(pool.run(stages * size, gradients, str(device), axes, stages, torch.float32)[0], plain, 1e-3)


def kept_and_cast(device):
    return gradients(device, (4, 1, 1), 1, torch.float32, autocast=True, gather="step")


def test_kept_weights_under_autocast(pool, device, plain):
    # Bfloat16 has three digits.
    assert_close(pool.run(RANKS, kept_and_cast, str(device))[0], plain, 0.1)


def dropped(device, checkpointing):
    """The loss and gradients of a model with dropout, whose second seed is the same in each call."""
    section = {"mode": "3d_tensor", "mesh": {"sequence": 2, "hidden": 2}}
    model = cuboid.shard(dropping_model(device), {"tensor_parallel": section})
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(3)
    ids = ids_on(torch.device(device))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach()), {name: x.cpu() for name, x in (cuboid.full_gradients(model) or {}).items()}


def test_a_recomputation_drops_the_same(pool, device):
    first, again = (pool.run(RANKS, dropped, str(device), False)[0] for _ in range(2))
    assert_close(again, first, 1e-5)
    assert_close(pool.run(RANKS, dropped, str(device), True)[0], first, 1e-5)


@pytest.mark.parametrize("how", ["fp32", "backend"])
def test_gradients_in_bfloat16(pool, device, plain, how, figure):
    gradients = pool.run(RANKS, in_bfloat16, str(device), how)[0][1]
    squares = sum((gradients[n].double() - g.double()).pow(2).sum() for n, g in plain[1].items())
    error = (squares / sum(g.double().pow(2).sum() for g in plain[1].values())).sqrt().item()
    figure(f"Gradients in bf16 over {RANKS} ranks", f'"gradient_reduce": "{how}"', "relative error", f"{error:.2e}")
    assert error < 0.1


def in_bfloat16(device, how):
    model = cuboid.shard(
        model_of(SIZES, torch.device(device), torch.bfloat16),
        {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": RANKS}, "gradient_reduce": how}},
    )
    ids = ids_on(device)
    loss = sum(model(input_ids=part, labels=part).loss / 2 for part in (ids, ids.flip(1)))
    loss.backward()
    return float(loss.detach()), {name: x.cpu().float() for name, x in (cuboid.full_gradients(model) or {}).items()}
