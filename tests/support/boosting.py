"""The same few steps in one process, under DeepSpeed and under a Booster, for the workers of a pool."""

import contextlib

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.kinds.causal import Causal

MICRO_BATCHES, ROWS, LENGTH, VOCABULARY = 2, 4, 24, 131
STEPS, CLIPPING = 5, 0.5
#: Within these, float64 and float32 runs are the same.
EXACT, CLOSE = 1e-9, 2e-5


def settings(mesh="1x1x1", stages=None, *, data=1, segments=4, **others):
    """A config for both frameworks, whose global batch is the same on every layout."""
    batch, sequence, hidden = map(int, mesh.split("x"))
    config = {
        "train_micro_batch_size_per_gpu": ROWS // data,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": CLIPPING,
        "tensor_parallel": {
            "mode": "3d_tensor",
            "mesh": {"batch": batch, "sequence": sequence, "hidden": hidden},
        },
        **others,
    }
    if stages is not None:
        config["pipeline"] = {"engine": "seq1f1b", "stages": stages, "segments": segments}
    return config


def global_batch(step):
    """Two micro-batches of four rows with padding, and labels in unequal numbers."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (MICRO_BATCHES * ROWS, LENGTH), generator=generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (MICRO_BATCHES * ROWS, 1), generator=generator)
    real = torch.arange(LENGTH) < lengths
    return {
        "input_ids": ids.masked_fill(~real, 0),
        "attention_mask": real.long(),
        "labels": ids.masked_fill(~real, -100),
    }


def micro_batches(step, replica=0, replicas=1):
    """One replica's share of a global batch."""
    batch = global_batch(step)
    pieces = [{name: x[first : first + ROWS] for name, x in batch.items()} for first in (0, ROWS)]
    return [{name: x[replica::replicas] for name, x in piece.items()} for piece in pieces]


def adamw(model, **options):
    """The same optimizer everywhere."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, "foreach": False, **options})


def schedule(optimizer):
    """A schedule of torch's own."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def one_process(path, dtype, *, by_tokens, data=1, steps=STEPS):
    """Plain transformers: losses, norms, the first step's gradients, and the weights after the last.

    Args:
        by_tokens: whether a step's loss is the mean over all its label tokens, or the mean of its micro-batches'.
    """
    cuboid.unregister()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).train()
        with KeepFloat64():
            optimizer = adamw(model)
            learning_rate = schedule(optimizer)
            losses, norms, gradients = [], [], {}
            for step in range(steps):
                losses.append(reference_backward(model, step, data, by_tokens))
                if step == 0:
                    named = model.named_parameters(remove_duplicate=False)
                    gradients = {name: p.grad.clone() for name, p in named}
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
                optimizer.step()
                learning_rate.step()
                optimizer.zero_grad()
            return {"losses": losses, "norms": norms, "gradients": gradients, "weights": model.state_dict()}
    finally:
        cuboid.register()


def reference_backward(model, step, data, by_tokens):
    """Gradients of a global batch in one process, and its loss."""
    pieces = [piece for replica in range(data) for piece in micro_batches(step, replica, data)]
    tokens = sum(int(Causal().items(piece)) for piece in pieces)
    total = 0.0
    for piece in pieces:
        options = {"num_items_in_batch": torch.tensor(tokens)} if by_tokens else {}
        loss = model(**piece, **options, use_cache=False).loss / (1 if by_tokens else len(pieces))
        loss.backward()
        total += float(loss.detach())
    return total


def boosted(path, config, dtype=torch.float64, *, in_memory=False, **options):
    """(booster, model, optimizer, schedule) around a checkpoint."""
    from colossalai.booster import Booster

    plugin = cuboid.CuboidPlugin(config)
    if in_memory:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    else:
        model = cuboid.from_pretrained(path, plugin.config, dtype=dtype)
    optimizer = adamw(model, **options)
    learning_rate = schedule(optimizer)
    booster = Booster(plugin=plugin)
    model, optimizer, _, _, learning_rate = booster.boost(model.train(), optimizer, lr_scheduler=learning_rate)
    return booster, model, optimizer, learning_rate


def booster_backward(booster, model, optimizer, step):
    """Gradients of a global batch; its loss over all replicas."""
    at, replicas = cuboid.mesh_of(model).coordinate.data, booster.plugin.dp_size
    pieces = micro_batches(step, at, replicas)
    if model.pipeline is not None:
        batch = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        return float(booster.execute_pipeline(iter([batch]), model, None, optimizer)["loss"])
    total = torch.zeros((), dtype=torch.float64)
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        with contextlib.nullcontext() if last else booster.no_sync(model, optimizer):
            loss = model(**piece).loss / len(pieces)
            booster.backward(loss, optimizer)
        total += loss.detach()
    if replicas > 1:
        dist.all_reduce(total, group=booster.plugin.dp_group)
    return float(total) / replicas


def under_booster(path, config, dtype=torch.float64, *, steps=STEPS, **options):
    """As :func:`one_process`; gradients and weights on rank 0."""
    booster, model, optimizer, learning_rate = boosted(path, config, dtype, **options)
    with KeepFloat64():
        losses, norms, gradients = [], [], {}
        for step in range(steps):
            losses.append(booster_backward(booster, model, optimizer, step))
            if step == 0:
                norms.append(float(optimizer.clip_grad_by_norm(1e9)))
                # An error where each replica has a share of their sum.
                with contextlib.suppress(cuboid.CuboidError):
                    gradients = cuboid.full_gradients(model)
            optimizer.step()
            norms[step:] = [optimizer.get_grad_norm()]
            learning_rate.step()
            optimizer.zero_grad()
        weights = cuboid.full_state_dict(model)
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def under_deepspeed(path, config, dtype=torch.float64, *, steps=STEPS):
    """As :func:`one_process`, without gradients."""
    model = cuboid.from_pretrained(path, config, dtype=dtype)
    optimizer = adamw(model)
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, lr_scheduler=schedule(optimizer)
    )
    with KeepFloat64():
        losses, norms = [], []
        for step in range(steps):
            losses.append(deepspeed_step(engine, step))
            norms.append(float(engine.get_global_grad_norm()))
        weights = cuboid.full_state_dict(engine)
    return {"losses": losses, "norms": norms, "weights": weights}


def deepspeed_step(engine, step):
    """One optimizer step of an engine on a global batch."""
    pieces = micro_batches(step, cuboid.mesh_of(engine).coordinate.data, cuboid.mesh_of(engine).topology.data)
    if hasattr(engine, "train_batch"):
        return float(engine.train_batch(iter(pieces)))
    total = 0.0
    for piece in pieces:
        loss = engine(**piece).loss
        engine.backward(loss)
        engine.step()
        total += float(loss.detach()) / len(pieces)
    return total


def assert_alike(actual, wanted, tolerance):
    """Check that everything that two runs have in common is equal except for rounding."""
    assert actual["losses"] == pytest_approx(wanted["losses"], tolerance)
    assert actual["norms"] == pytest_approx(wanted["norms"], tolerance)
    for kind in ("gradients", "weights"):
        if kind in actual and kind in wanted:
            assert actual[kind].keys() == wanted[kind].keys()
            for name, tensor in actual[kind].items():
                torch.testing.assert_close(tensor, wanted[kind][name], rtol=tolerance, atol=tolerance)


def pytest_approx(values, tolerance):
    """Numbers that differ by rounding only."""
    import pytest

    return pytest.approx(values, rel=tolerance, abs=tolerance)
