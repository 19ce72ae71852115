"""What checkpointed layers keep, in host memory between forward and backward: bits, bytes, order, buffers."""

import copy
import gc
import itertools

import pytest
import torch
from test_activation_checkpointing import IDS, MESH, SEGMENTS, assert_same_bits, checkpointing, counts, small
from transformers import AutoConfig, AutoModelForSeq2SeqLM

import cuboid
from cuboid.config.schema import ActivationCheckpointingConfig, parse_config
from cuboid.errors import ConfigError, CuboidError, UnsupportedModelError
from cuboid.integrations.handoff import adopt_model
from cuboid.models.sharded.activation_checkpointing import enable_checkpointing
from cuboid.seq1f1b.runtime.host_store import HostBuffers
from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.units_on_host import fetched_before, units_on_host
from proofs.late_copies import LateCopies
from threaded import Threaded, step_of

HOST = {"cpu_checkpointing": True}
HIDDEN, HEADS, FLOAT_BYTES = 48, 12, 8
#: Of a layer: its input, and with attention the output and the log-sum-exp.
KEPT_BYTES = {
    "layers": IDS.numel() * HIDDEN * FLOAT_BYTES,
    "attention": IDS.numel() * (2 * HIDDEN + HEADS) * FLOAT_BYTES,
}


def on_host(runs, mode, late=False, **options):
    model = cuboid.shard(small(**options), {**runs, **checkpointing(mode, **HOST)})
    if late:
        model.cuboid.state.host_store.make_copies = LateCopies
    return model


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("runs", [MESH, SEGMENTS], ids=["mesh", "segments"])
@pytest.mark.parametrize("mode", ["layers", "attention"])
def test_bits_are_those_of_the_device_alone(runs, mode, late):
    expected = counts(cuboid.shard(small(), {**runs, **checkpointing(mode)}))
    model = on_host(runs, mode, late)
    for _ in range(2):
        actual = counts(model)
        assert_same_bits(actual, expected)
        assert actual[2] == expected[2]
    assert model.cuboid.state.host_store.buffers.used_bytes == 0


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("runs", [MESH, SEGMENTS], ids=["mesh", "segments"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_dropout_draws_the_same(runs, implementation):
    options = {"architecture": "gpt_neox", "attention_dropout": 0.3, "hidden_dropout": 0.2}
    options["implementation"] = implementation
    expected = counts(cuboid.shard(small(**options), {**runs, **checkpointing("attention")}))
    assert_same_bits(counts(on_host(runs, "attention", late=True, **options)), expected)


@pytest.mark.parametrize("mode", ["layers", "attention"])
def test_a_mesh_moves_what_the_formula_says(mode):
    model = on_host(MESH, mode, num_hidden_layers=3)
    counts(model)
    store = model.cuboid.state.host_store
    # All layers go out; the last one's tensors are still on the device when their backward comes.
    assert (store.out_bytes, store.back_bytes) == (3 * KEPT_BYTES[mode], 2 * KEPT_BYTES[mode])
    assert store.buffers.held_bytes == 3 * KEPT_BYTES[mode]


@pytest.mark.parametrize(("segments", "gone"), [(3, 3), (4, 3)])
def test_segments_move_what_the_formula_says(segments, gone):
    pipeline = {**SEGMENTS["pipeline"], "segments": segments, "partition": "even"}
    model = on_host({"pipeline": pipeline}, "attention", num_hidden_layers=3)
    counts(model)
    store, layer = model.cuboid.state.host_store, KEPT_BYTES["attention"] // segments
    # The last of four segments stays: a quarter of what the rank holds, whose backward is next. Nothing runs between
    # the last layer of the last unit that goes and the time to bring it back.
    assert (store.out_bytes, store.back_bytes) == (gone * 3 * layer, (gone * 3 - 1) * layer)


def test_the_order_of_copies_and_uses():
    model = on_host(MESH, "layers", late=True, num_hidden_layers=3)
    counts(model)
    copies = model.cuboid.state.host_store.copies_on(IDS.device)
    forward = ["out 0", "out 1", "wait out 0", "out 2", "wait out 1"]
    # A layer is read when the one before it has begun to come back.
    assert copies.order == [*forward, "back 1", "wait out 2", "back 0", "wait back 1", "wait back 0"]
    copies.order.clear()
    counts(model)
    assert [name for name in copies.order if name.startswith("out")] == ["out 0", "out 1", "out 2"]


def test_a_unit_begins_to_come_back_with_the_computation_before_its_backward():
    program = [Action(op, 0, 0, segment) for op, segment in zip([Op.FORWARD] * 4, range(4), strict=True)]
    program += [Action(Op.BACKWARD, 0, 0, segment) for segment in reversed(range(4))]
    assert units_on_host(program, lambda _: 1.0) == {(0, 0, 0), (0, 0, 1), (0, 0, 2)}
    assert units_on_host(program[1:-1], lambda _: 1.0) == {(0, 0, 1), (0, 0, 2), (0, 0, 3)}
    assert units_on_host(program, lambda action: 1.0 + 9 * (action.segment == 3)) == {(0, 0, n) for n in range(4)}
    assert fetched_before(program)[Action(Op.BACKWARD, 0, 0, 3)] == (0, 0, 2)


@pytest.mark.sample(1, ci=2)
@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2", "2x1x1", "2x2x2"])
@pytest.mark.parametrize("mode", ["layers", "attention"])
def test_meshes(mode, mesh):
    mask = torch.ones_like(IDS)
    mask[0, -3:] = 0
    step = step_of(input_ids=IDS, labels=IDS.masked_fill(mask == 0, -100), attention_mask=mask)
    runs = []
    for cpu in (False, True):
        threaded = Threaded(small(), mesh)
        for model in threaded.models:
            enable_checkpointing(model, ActivationCheckpointingConfig(mode=mode, cpu_checkpointing=cpu))
            if cpu:
                model.cuboid.state.host_store.make_copies = LateCopies
        runs.append((threaded.run(step), threaded.gradients()))
    assert [loss.item() for loss in runs[0][0]] == [loss.item() for loss in runs[1][0]]
    for name, gradient in runs[0][1].items():
        assert torch.equal(runs[1][1][name], gradient), name
    ranks = torch.tensor([int(size) for size in mesh.split("x")]).prod().item()
    for model in threaded.models:
        assert model.cuboid.state.host_store.out_bytes == 2 * KEPT_BYTES[mode] // ranks


def test_an_encoders_output_goes_once():
    config = AutoConfig.for_model("t5", vocab_size=61, d_model=24, d_kv=6, d_ff=48, num_layers=2, num_heads=4)
    config.dropout_rate, config.decoder_start_token_id, config.pad_token_id = 0.0, 0, 0
    torch.manual_seed(0)
    plain = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float64).train()
    batch = {"input_ids": IDS, "labels": IDS}
    results = []
    for more in ({}, HOST):
        model = cuboid.shard(copy.deepcopy(plain), {**MESH, **checkpointing("layers", **more)})
        loss = model(**batch).loss
        loss.backward()
        results.append((float(loss.detach()), cuboid.full_gradients(model), None, None))
    assert_same_bits(results[1], results[0])
    hidden, scores = IDS.numel() * 24, IDS.shape[1] ** 2 * 4
    # Inputs of two and two layers, the encoder's output, and the biases of positions of both. (Masks are smaller.)
    moved = model.cuboid.state.host_store.out_bytes / FLOAT_BYTES
    assert 5 * hidden <= moved <= 5 * hidden + 6 * scores


def test_a_step_that_fails_returns_its_buffers():
    for runs in (MESH, SEGMENTS):
        expected = counts(cuboid.shard(small(), {**runs, **checkpointing("attention")}))
        model = on_host(runs, "attention", late=True)
        mlp = next(module for name, module in model.named_modules() if name.endswith("layers.1.mlp"))
        # In a forward, and in the first recomputation.
        for fails_at in (1, 2) if runs is MESH else (2, 4):
            calls = itertools.count(1)

            @cuboid.local_hook
            def fail(*_, calls=calls, fails_at=fails_at):
                if next(calls) == fails_at:
                    raise RuntimeError("a failing layer")

            hook = mlp.register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="a failing layer"):
                counts(model)
            hook.remove()
            model.zero_grad()
            gc.collect()
            assert model.cuboid.state.host_store.buffers.used_bytes == 0
        assert_same_bits(counts(model), expected)


def test_buffers_of_former_shapes_are_released():
    buffers = HostBuffers()
    sizes = []
    for size in (8, 8, 16, 16, 16):
        buffers.begin_step()
        taken = [buffers.take(size, pinned=False) for _ in range(2)]
        sizes.append(buffers.held_bytes)
        for buffer in taken:
            buffers.give(buffer)
    assert sizes == [16, 16, 48, 32, 32]


def test_evaluation_and_copies_keep_nothing():
    model = on_host(MESH, "layers")
    with torch.no_grad():
        model(input_ids=IDS)
    model.eval()
    model(input_ids=IDS)
    twin = copy.deepcopy(model.train())
    counts(twin)
    assert model.cuboid.state.host_store.out_bytes == 0
    assert twin.cuboid.state.host_store.out_bytes == 2 * KEPT_BYTES["layers"]


def test_a_graph_that_is_kept_is_read_twice():
    results = []
    for more in ({}, HOST):
        model = cuboid.shard(small(), {**MESH, **checkpointing("layers", **more)})
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward(retain_graph=True)
        loss.backward()
        results.append(cuboid.full_gradients(model))
    for name, gradient in results[0].items():
        assert torch.equal(results[1][name], gradient), name


def test_two_forwards_before_their_backwards():
    results = []
    for more in ({}, HOST):
        model = cuboid.shard(small(), {**MESH, **checkpointing("attention", **more)})
        first, second = (model(input_ids=ids, labels=ids).loss for ids in (IDS, IDS.flip(1)))
        (first + 2 * second).backward()
        results.append(cuboid.full_gradients(model))
    for name, gradient in results[0].items():
        assert torch.equal(results[1][name], gradient), name


def test_what_a_script_enables_goes_to_the_host_too():
    model = on_host(MESH, "layers")
    model.gradient_checkpointing_enable()
    counts(model)
    assert model.cuboid.state.host_store.out_bytes == 2 * KEPT_BYTES["layers"]
    with pytest.raises(CuboidError, match=r'cpu_checkpointing" is true.*"use_reentrant": true'):
        model.gradient_checkpointing_enable({"use_reentrant": True})
    model = cuboid.shard(small(), MESH)
    adopt_model(model, parse_config({**MESH, **checkpointing("layers", **HOST)}))
    counts(model)
    assert model.cuboid.state.host_store.out_bytes == 2 * KEPT_BYTES["layers"]
    with pytest.raises(ConfigError, match="cpu_checkpointing true, but the config has false"):
        adopt_model(model, parse_config({**MESH, **checkpointing("layers")}))


def test_inputs_that_are_changed_in_place_are_refused():
    model = on_host(MESH, "layers")
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp"))
    inputs = []
    model.base_model.layers[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    layer.register_forward_hook(lambda *_: inputs[0].data.add_(1) is None or inputs[0].detach().add_(0) is None)
    with pytest.raises(UnsupportedModelError, match="changes the input of a layer in place"):
        counts(model)


def test_layers_that_get_their_hidden_state_by_keyword_are_refused():
    model = on_host(MESH, "layers")
    layer = model.base_model.layers[0]
    forward = layer.forward
    layer.forward = lambda hidden, **options: forward(hidden_states=hidden, **options)
    with pytest.raises(UnsupportedModelError, match=r"LlamaDecoderLayer its hidden state by keyword"):
        counts(model)
