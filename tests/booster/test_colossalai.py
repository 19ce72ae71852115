"""A Booster with Cuboid's plugin trains what DeepSpeed trains, and what one process of plain transformers does."""

import copy
import dataclasses
import functools

import pytest
import torch

import cuboid
from boosting import (
    CLOSE,
    EXACT,
    adamw,
    assert_alike,
    boosted,
    booster_backward,
    global_batch,
    one_process,
    settings,
    under_booster,
    under_deepspeed,
)
from cuboid.config.schema import parse_config
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError, OptimizerError
from cuboid.integrations.colossalai.criterion import scale_of
from cuboid.integrations.colossalai.parallel_sizes import StageManager
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.verify import SmallModel

pytest.importorskip("colossalai", reason="ColossalAI isn't installed: `make colossalai` does it, or tells why it can't")

LLAMA = SmallModel("llama", heads=8, kv_heads=4, layers=2)
TIED = SmallModel("qwen3", heads=8, kv_heads=4, layers=2, tied=True)


@pytest.fixture(scope="module")
def reference(pool, checkpoint):
    """What one process computes, once for each question."""

    @functools.cache
    def run(small, **question):
        return pool.run(1, functools.partial(one_process, **question), checkpoint(small), torch.float64)[0]

    return run


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("mesh", "stages"), [("1x1x2", 2), ("2x2x1", None), ("1x2x2", None)], ids=["2 stages of 1x1x2", "2x2x1", "1x2x2"]
)
def test_five_steps_equal_those_of_one_process(pool, checkpoint, reference, mesh, stages):
    results = pool.run(4, under_booster, checkpoint(LLAMA), settings(mesh, stages))[0]
    assert_alike(results, reference(LLAMA, by_tokens=stages is not None), EXACT)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("mesh", "stages"), [("1x1x1", 2), ("2x1x1", None), ("1x1x2", 2), ("2x2x1", None)], ids=str)
def test_five_steps_equal_those_of_deepspeed(pool, checkpoint, mesh, stages):
    # DeepSpeed refuses gradients in float64.
    path, config = checkpoint(LLAMA), settings(mesh, stages)
    ranks = MeshShape.parse(mesh).size * (stages or 1)
    results = pool.run(ranks, under_booster, path, config, torch.float32)[0]
    assert_alike(results, pool.run(ranks, under_deepspeed, path, config, torch.float32)[0], CLOSE)


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    ("mesh", "stages", "data"),
    [("2x1x1", None, 2), ("1x1x1", None, 4), ("1x2x1", 2, 1), ("1x1x1", 2, 2)],
    ids=["2 x 2x1x1", "4 x 1x1x1", "2 stages of 1x2x1", "2 x 2 stages of 1x1x1"],
)
def test_replicas_compute_what_one_process_does(pool, checkpoint, reference, mesh, stages, data, zero):
    config = settings(mesh, stages, data=data, zero_optimization={"stage": zero})
    results = pool.run(4, under_booster, checkpoint(LLAMA), config)[0]
    wanted = reference(LLAMA, by_tokens=stages is not None, data=data if stages is None else 1)
    if zero == 1 and data > 1:
        # A rank's own gradients are its replica's alone; only its share of the sum is anywhere.
        del results["gradients"]
    assert_alike(results, wanted, EXACT)


@pytest.mark.parametrize("schedule", ["zero_bubble-v", pytest.param("seq1f1b-interleaved", marks=pytest.mark.slow)])
def test_ranks_with_several_chunks_compute_what_one_process_does(pool, checkpoint, reference, schedule):
    small, config = dataclasses.replace(TIED, layers=4), settings("1x1x1", 2, zero_optimization={"stage": 1})
    config["pipeline"] |= {"schedule": schedule, "chunks": 2}
    results = pool.run(2, under_booster, checkpoint(small), config)[0]
    assert_alike(results, reference(small, by_tokens=True), EXACT)
    places = [StageManager(stage, 2, parse_config(config).placement) for stage in range(2)]
    ends = [(place.num_model_chunks, place.is_first_stage(), place.is_last_stage()) for place in places]
    is_v = schedule == "zero_bubble-v"
    assert ends == [(2, True, is_v), (2, False, not is_v)]


@pytest.mark.ci
def test_a_model_in_memory_is_sharded_with_its_optimizer_and_schedule(pool, checkpoint, reference):
    results = pool.run(4, functools.partial(under_booster, in_memory=True), checkpoint(TIED), settings("1x2x1", 2))[0]
    assert_alike(results, reference(TIED, by_tokens=True), EXACT)


def on_host(path, config, in_memory):
    """A step's losses and gradients, what is then done to the weights, and the bytes that went to the host and back."""
    booster, model, optimizer, _ = boosted(path, config, torch.float32, in_memory=in_memory)
    losses = []
    for step in range(2):
        losses.append(booster_backward(booster, model, optimizer, step))
        gradients = cuboid.full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    store = model.unwrap().cuboid.state.host_store
    return losses, gradients, None if store is None else (store.out_bytes, store.back_bytes)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("mesh", "stages", "in_memory"),
    [("1x2x1", None, False), ("1x1x1", 2, True), pytest.param("2x1x1", None, True, marks=pytest.mark.slow)],
    ids=str,
)
def test_what_layers_keep_goes_to_the_host_and_comes_back(pool, checkpoint, mesh, stages, in_memory):
    runs = []
    for cpu in (False, True):
        section = {"mode": "attention", "cpu_checkpointing": cpu}
        config = settings(mesh, stages, activation_checkpointing=section)
        runs.append(pool.run(2, on_host, checkpoint(LLAMA), config, in_memory))
    for (losses, gradients, no_bytes), (host_losses, host_gradients, moved) in zip(*runs, strict=True):
        assert host_losses == losses
        assert host_gradients.keys() == gradients.keys()
        assert all(torch.equal(host_gradients[name], gradients[name]) for name in gradients)
        assert no_bytes is None
        # The last layer's are read before they have left the device.
        assert moved[0] >= moved[1] > 0


def accumulate(path, config, passes):
    """The gradient and its norm after so many global batches without a step, with a look at the norm between."""
    booster, model, optimizer, _ = boosted(path, config)
    with KeepFloat64():
        for step in range(passes):
            booster_backward(booster, model, optimizer, step)
            norm = float(optimizer.clip_grad_by_norm(1e9))
        largest = float(optimizer.clip_grad_by_norm(1e9, norm_type=float("inf")))
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.clip_grad_by_norm(1.0) == 0
        changed = any(not torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    return norm, largest, changed, cuboid.full_state_dict(model)


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("small", "stages"), [(LLAMA, None), (TIED, 2)], ids=["replicas", "a tied pipeline"])
def test_gradients_go_on_adding_up_after_a_look_at_their_norm(pool, checkpoint, small, stages, zero):
    mesh, data = ("1x2x1", 2) if stages is None else ("1x1x1", 2)
    config = settings(mesh, stages, data=data, zero_optimization={"stage": zero})
    config["gradient_clipping"] = 0.0
    path = checkpoint(small)
    norm, largest, changed, weights = pool.run(4, accumulate, path, config, 3)[0]
    alone = pool.run(1, accumulate_alone, path, 3, stages is not None, data if stages is None else 1)[0]
    assert changed
    assert (norm, largest) == pytest.approx(alone[:2], rel=EXACT)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, alone[2][name], rtol=EXACT, atol=EXACT)


def accumulate_alone(path, passes, by_tokens, data):
    """As :func:`accumulate`, in one process of plain transformers."""
    from transformers import AutoModelForCausalLM

    from boosting import reference_backward

    cuboid.unregister()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).train()
        with KeepFloat64():
            optimizer = adamw(model)
            for step in range(passes):
                reference_backward(model, step, data, by_tokens)
            gradients = [parameter.grad for parameter in model.parameters()]
            norms = [float(torch.nn.utils.get_total_norm(gradients, p)) for p in (2.0, float("inf"))]
            optimizer.step()
        return *norms, model.state_dict()
    finally:
        cuboid.register()


def step_in_bf16(path, config, steps):
    """Weights and masters after so many steps that are too small for bfloat16 to show one by one."""
    booster, model, optimizer, _ = boosted(path, config, torch.float32, lr=1e-5, weight_decay=0.0)
    before = cuboid.full_state_dict(model)
    for step in range(steps):
        booster_backward(booster, model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    masters = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
    runs = model.adapter.state().quantities["master"]
    parameters = dict(model.module.named_parameters())
    followed = all(
        torch.equal(run.values.bfloat16(), parameters[name].detach().view(-1)[run.start : run.stop])
        for name, run in runs.items()
    )
    moved = {
        name: run.values.sub(parameters[name].detach().view(-1)[run.start : run.stop].float())
        for name, run in runs.items()
    }
    return {parameter.dtype for parameter in model.parameters()}, masters, followed, before, moved


@pytest.mark.sample(1)
@pytest.mark.parametrize(("mesh", "stages", "zero"), [("1x2x1", None, 0), ("1x2x1", None, 1), ("1x1x1", 2, 1)])
def test_bf16_has_masters_that_keep_what_the_weights_cannot_show(pool, checkpoint, mesh, stages, zero):
    config = settings(mesh, stages, data=2, bf16={"enabled": True}, zero_optimization={"stage": zero})
    for dtypes, masters, followed, before, moved in pool.run(4, step_in_bf16, checkpoint(LLAMA), config, 3):
        assert dtypes == {torch.bfloat16}
        assert masters == {torch.float32}
        assert followed
        assert any(difference.count_nonzero() > 0 for difference in moved.values())
        assert all(tensor.dtype == torch.bfloat16 for tensor in before.values())


def norms_after_clearing(path, config):
    """The norm of the same batch's gradient again and again, each time after another way to clear the last one."""
    booster, model, optimizer, _ = boosted(path, config, torch.float32, lr=0.0)
    ways = [model.zero_grad, model.unwrap().zero_grad, functools.partial(model.zero_grad, set_to_none=False)]
    norms = []
    for clear in (optimizer.zero_grad, *ways):
        clear()
        booster_backward(booster, model, optimizer, 0)
        optimizer.step()
        norms.append(optimizer.get_grad_norm())
    copied = copy.deepcopy(model.unwrap())
    copied.zero_grad()
    return norms, float(optimizer.clip_grad_by_norm(1e9))


@pytest.mark.sample(1, ci=2)
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("mesh", "stages", "zero"), [("1x1x2", None, 0), ("1x1x1", None, 1), ("1x1x1", 2, 0)])
def test_a_models_zero_grad_clears_what_its_optimizer_keeps(pool, checkpoint, mesh, stages, zero, bf16):
    data = 2 if zero else 1
    config = settings(mesh, stages, data=data, bf16={"enabled": bf16}, zero_optimization={"stage": zero})
    for norms, kept in pool.run(2, norms_after_clearing, checkpoint(LLAMA), config):
        assert norms == pytest.approx([norms[0]] * 4, rel=1e-6)
        # A copy's gradients are its own, so that clearing them leaves the model's.
        assert kept == pytest.approx(min(norms[0], config["gradient_clipping"]), rel=1e-2)


def frozen_later(path, config):
    """What a step says of a weight that was frozen after the model was boosted."""
    booster, model, optimizer, _ = boosted(path, config, torch.float32)
    for step in range(2):
        booster_backward(booster, model, optimizer, step)
        if step == 1:
            model.unwrap().model.norm.weight.requires_grad_(False)
        try:
            optimizer.step()
        except OptimizerError as error:
            return str(error)
        optimizer.zero_grad()
    return None


@pytest.mark.ci
@pytest.mark.parametrize(("bf16", "said"), [(True, "model.norm.weight was frozen after booster.boost"), (False, None)])
def test_a_weight_that_is_frozen_later_is_refused_where_flat_tensors_are_stepped(pool, checkpoint, bf16, said):
    config = settings("1x1x2", bf16={"enabled": bf16})
    for message in pool.run(2, frozen_later, checkpoint(LLAMA), config):
        assert message is None if said is None else message.startswith(said)


def dtypes(path, config, dtype):
    """Of the parameters, after a model was loaded in another precision."""
    _, model, _, _ = boosted(path, config, dtype)
    return {parameter.dtype for parameter in model.parameters()}


@pytest.mark.parametrize(
    ("loaded", "trained"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)], ids=["bf16", "float64"]
)
def test_fp32_is_the_least_precision_unless_bf16_is_on(pool, checkpoint, loaded, trained):
    assert pool.run(2, dtypes, checkpoint(LLAMA), settings("1x2x1"), loaded) == [{trained}] * 2


def test_bf16_trains_like_deepspeed(pool, checkpoint):
    path, config = checkpoint(LLAMA), settings("1x2x1", bf16={"enabled": True}, zero_optimization={"stage": 1})
    ours = pool.run(2, under_booster, path, config, torch.bfloat16)[0]
    theirs = pool.run(2, under_deepspeed, path, config, torch.bfloat16)[0]
    del ours["gradients"], ours["weights"]
    assert_alike(ours, theirs, 2e-2)


def evaluate(path, config):
    """The loss of a batch in evaluation: of the booster and, on the reading rank alone, given an iterator."""
    booster, model, optimizer, _ = boosted(path, config, torch.float32)
    batch = global_batch(0)
    with torch.no_grad():
        everywhere = float(booster.execute_pipeline(iter([batch]), model, None, optimizer)["loss"])
        mine = iter([batch]) if model.pipeline.mesh.rank == 0 else None
        one = float(booster.execute_pipeline(mine, model, lambda outputs, inputs: outputs["loss"] / 4)["loss"])
        none = booster.execute_pipeline(iter([batch]), model, None, return_loss=False)
    ended = "no error"
    try:
        booster.execute_pipeline(iter([]), model, None, optimizer)
    except StopIteration:
        ended = "StopIteration"
    graded = [parameter.grad for parameter in model.parameters()]
    return everywhere, one, none, ended, all(gradient is None for gradient in graded)


def test_a_pipeline_evaluates_without_gradients_and_reads_on_one_rank(pool, checkpoint):
    for everywhere, one, none, ended, ungraded in pool.run(4, evaluate, checkpoint(LLAMA), settings("1x2x1", 2)):
        assert one == pytest.approx(everywhere / 4, rel=1e-6)
        assert none == {"loss": None, "outputs": None}
        assert ended == "StopIteration"
        assert ungraded


def refusals(path, config):
    """What the booster says to calls that can't be answered."""
    from colossalai.booster import Booster

    booster, model, optimizer, _ = boosted(path, config, torch.float32)
    pipeline = model.pipeline is not None
    batch = global_batch(0)

    def run(**options):
        arguments = {"data_iter": iter([batch]), "model": model, "criterion": None, "optimizer": optimizer}
        return booster.execute_pipeline(**{**arguments, **options})

    calls = {
        "boost again": lambda: booster.boost(model.module),
        "a closure": lambda: optimizer.step(lambda: 0.0),
        "lora": lambda: booster.plugin.enable_lora(model, "", {}),
        "another model": lambda: booster.save_model(model.module, "nowhere"),
        "not a checkpoint": lambda: booster.load_optimizer(optimizer, "/nonexistent"),
        "prefix": lambda: booster.save_optimizer(optimizer, "nowhere", prefix="x"),
        "another norm": lambda: optimizer.get_grad_norm(norm_type=1.0),
        "not an optimizer": lambda: Booster(plugin=cuboid.CuboidPlugin(config)).boost(model.module, object()),
    }
    if pipeline:
        calls |= {
            "forward": lambda: model(**batch),
            "backward": lambda: booster.backward(torch.ones((), requires_grad=True), optimizer),
            "outputs": lambda: run(return_outputs=True),
            "no optimizer": lambda: run(optimizer=None),
            "logits": lambda: run(criterion=lambda outputs, inputs: outputs.logits.sum()),
            "labels": lambda: run(criterion=lambda outputs, inputs: outputs.loss * inputs["labels"].sum()),
            "square": lambda: run(criterion=lambda outputs, inputs: outputs.loss**2),
            "another key": lambda: run(data_iter=iter([{**batch, "pixel_values": batch["labels"]}])),
            "too many rows": lambda: run(data_iter=iter([{n: torch.cat([x, x]) for n, x in batch.items()}])),
        }
    else:
        calls["execute"] = run
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing"
        except CuboidError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize(
    ("bend", "loss"),
    [
        (lambda loss: loss.clamp(max=10), "16"),
        (lambda loss: 2 * loss.clamp(min=1e-6), "2.32831e-10"),
        (lambda loss: loss + 1e-15, "2"),
        (lambda loss: torch.where(loss > 1e6, loss / 2, loss), "4.29497e\\+09"),
        (torch.sqrt, "2"),
    ],
)
def test_a_criterion_that_is_a_multiple_of_most_losses_only_is_refused(bend, loss):
    with pytest.raises(CuboidError, match=rf"of a loss of 1 but \S+ of a loss of {loss}, but a pipeline"):
        scale_of(lambda outputs, inputs: bend(outputs.loss))


@pytest.mark.parametrize("factor", [0.1, 1 / 3, -2.5e-7, 0.0])
def test_a_criterions_factor_is_exact(factor):
    assert scale_of(lambda outputs, inputs: outputs.loss * factor) == factor


EXPECTED = {
    "boost again": "has boosted a model already",
    "a closure": "call step without it",
    "lora": "enable_lora comes before booster.boost",
    "another model": "isn't what this booster's boost gave",
    "not a checkpoint": "is not a folder",
    "prefix": "prefix has no meaning",
    "another norm": "only the 2-norm is kept",
    "not an optimizer": "of torch's kind, not a object",
    "execute": '"pipeline": {"engine": "seq1f1b"',
    "forward": "use booster.execute_pipeline",
    "backward": "go on with optimizer.step()",
    "outputs": "leave it False",
    "no optimizer": "needs the optimizer that boost gave",
    "logits": "asks for outputs.logits",
    "labels": "asks for inputs['labels']",
    "square": "makes 1 of a loss of 1 but 4 of a loss of 2",
    "another key": "pixel_values has no rule",
    "too many rows": "a batch of 16 rows, more than",
}


@pytest.mark.parametrize("stages", [None, 2])
def test_what_has_no_rule_is_refused_on_all_ranks_with_a_reason(pool, checkpoint, stages):
    for said in pool.run(2, refusals, checkpoint(LLAMA), settings("1x2x1" if stages is None else "1x1x1", stages)):
        assert len(said) >= 9
        for name, message in said.items():
            assert EXPECTED[name] in message, name
