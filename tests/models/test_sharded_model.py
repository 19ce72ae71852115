"""What a sharded model holds, saves and sends."""

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.distributed import sharding_utils

import cuboid
from comparing import stored
from cuboid.distributed.topology import MeshShape
from cuboid.models.cross_entropy.incomplete_output import MissingOutputError
from cuboid.planner.comm_formula import layer_bytes
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.model_formulas import block_sizes
from cuboid.tensor3d.layers.dropout import ShardedDropout
from cuboid.tensor3d.sharding.sharded_param import ShardedModule, ShardedState
from cuboid.verify import SmallModel
from fresh_ranks import endings_of

BATCH, LENGTH = 8, 24
WIDE = SmallModel("llama", heads=24, kv_heads=24, head_dim=4)
FIVE_MESHES = ["1x8x1", "8x1x1", "2x2x2", "1x2x3", "4x1x2"]


def built(small, **options):
    torch.manual_seed(small.seed)
    config = small.config()
    config.update(options)
    return AutoModelForCausalLM.from_config(config).train()


def mode(mesh, **keys):
    shape = MeshShape.parse(mesh)
    axes = {"batch": shape.batch, "sequence": shape.sequence, "hidden": shape.hidden}
    return {"tensor_parallel": {"mode": "3d_tensor", "mesh": axes, **keys}}


def sharded(small, mesh, **keys):
    return cuboid.shard(built(small), mode(mesh, **keys))


def tokens(small, batch=BATCH, length=LENGTH):
    return torch.randint(0, small.vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


# --- bytes -------------------------------------------------------------------------------------------------------


def bytes_of_one_layer(small, mesh):
    """Bytes by axes of one decoder layer's forward and backward: those of three layers less those of two."""
    counts = []
    for layers in (2, 3):
        deeper = SmallModel(small.architecture, small.heads, small.kv_heads, small.head_dim, layers, bias=small.bias)
        model = sharded(deeper, mesh)
        traffic = cuboid.mesh_of(model).comm_counter
        ids = tokens(deeper)
        model(input_ids=ids, labels=ids).loss.backward()
        counts.append(traffic.snapshot())
    two, three = counts
    return {axes: three[axes] - two.get(axes, 0) for axes in three if three[axes] != two.get(axes, 0)}


@pytest.mark.sample(1, ci=2)
@pytest.mark.parametrize("mesh", FIVE_MESHES)
@pytest.mark.parametrize("small", [WIDE, SmallModel("gpt2", heads=24, kv_heads=24, head_dim=4)], ids=["llama", "gpt2"])
def test_counted_bytes_are_the_formula(threads, mesh, small):
    shape = MeshShape.parse(mesh)
    expected = layer_bytes(block_sizes(describe_modules(built(small)), shape), shape, BATCH, LENGTH, element_bytes=4)
    for counted in threads.run(shape.size, bytes_of_one_layer, small, mesh):
        assert counted.keys() == expected.keys()
        for axes, count in counted.items():
            # Each collective's share is rounded to a whole byte.
            assert count == pytest.approx(expected[axes], abs=40), axes


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize(("kv_heads", "mesh"), [(2, "1x2x4"), (1, "2x2x2"), (4, "1x8x1")])
@pytest.mark.parametrize("bias", [False, True])
def test_counted_bytes_are_the_formula_with_few_key_value_heads(threads, kv_heads, mesh, bias):
    small = SmallModel("llama", heads=8, kv_heads=kv_heads, bias=bias)
    shape = MeshShape.parse(mesh)
    expected = layer_bytes(block_sizes(describe_modules(built(small)), shape), shape, BATCH, LENGTH, element_bytes=4)
    for counted in threads.run(shape.size, bytes_of_one_layer, small, mesh):
        assert counted == {axes: pytest.approx(count, abs=40) for axes, count in expected.items()}


# --- what is held ------------------------------------------------------------------------------------------------


def parameter_sizes(small, mesh):
    model = sharded(small, mesh)
    return {name: (p.numel(), p.untyped_storage().nbytes() // p.element_size()) for name, p in model.named_parameters()}


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", FIVE_MESHES)
def test_every_parameter_is_an_exact_fraction(threads, mesh):
    small = SmallModel("llama", heads=24, kv_heads=24, head_dim=4, vocabulary=144)
    sizes = {name: p.numel() for name, p in built(small).named_parameters()}
    ranks = MeshShape.parse(mesh).size
    for held in threads.run(ranks, parameter_sizes, small, mesh):
        assert held == {name: (size // ranks, size // ranks) for name, size in sizes.items()}


def saved_for_backward(small, mesh):
    """Shapes of everything that autograd keeps between forward and backward, weights apart."""
    model = sharded(small, mesh)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = []

    def pack(x):
        if x.untyped_storage().data_ptr() not in parameters and x.is_floating_point():
            kept.append((x.untyped_storage().data_ptr(), x.numel()))
        return x

    ids = tokens(small)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = model(input_ids=ids, labels=ids)
    del output
    return sum(dict(kept).values())


def test_saved_activations_are_sharded(threads):
    # One KV head for each query head, so that attention saves nothing twice.
    small = SmallModel("llama", heads=16, kv_heads=16, head_dim=4, vocabulary=144)
    (alone,) = threads.run(1, saved_for_backward, small, "1x1x1")
    for mesh in ("2x2x2", "1x4x2", "8x1x1"):
        for rank_saves in threads.run(8, saved_for_backward, small, mesh):
            # An eighth, and what isn't an activation: gathered norm weights, statistics, rotary tables.
            assert rank_saves < alone / 8 * 1.25, mesh


def collectives_over_sequence(small, mesh):
    model = sharded(small, mesh)
    traffic = cuboid.mesh_of(model).comm_counter
    layer = model.model.layers[0]
    entered = []
    note = cuboid.local_hook(lambda *_: entered.append(traffic.calls()["sequence"]))
    layer.self_attn.register_forward_pre_hook(note, prepend=True)
    layer.self_attn.register_forward_hook(note)
    ids = tokens(small)
    model(input_ids=ids)
    before, after = entered
    return after - before


def test_one_gather_of_the_sequence_for_all_projections_of_a_block(threads):
    # The gather of the input, and the scatter of the output projection.
    assert threads.run(2, collectives_over_sequence, WIDE, "1x2x1") == [2, 2]


def sharded_states(small, mesh):
    """States of two layers' weights: when the first layer computes, in the backward of the last one, and after all."""
    model = sharded(small, mesh)
    seen = {}
    params = [[layer.mlp.up_proj.sharded_params["weight"] for layer in model.model.layers]]

    def look(when):
        seen[when] = [param.state for param in params[0]]

    first, last = (layer.mlp.act_fn for layer in model.model.layers)
    first.register_forward_hook(cuboid.local_hook(lambda *_: look("forward")))
    last.register_forward_hook(
        cuboid.local_hook(lambda _, __, out: out.register_hook(lambda _: look("backward")) and None)
    )
    ids = tokens(small)
    model(input_ids=ids, labels=ids).loss.backward()
    look("after")
    states = {g.state for m in model.modules() if isinstance(m, ShardedModule) for g in m.sharded_params.values()}
    param, shard = params[0][0], model.model.layers[0].mlp.up_proj.weight
    for wrong in (param.reshard, param.unsharded):
        with pytest.raises(AssertionError, match="not unsharded"):
            wrong()
    param.start_unshard(shard)
    with pytest.raises(AssertionError, match="unsharded twice"):
        param.expect_unshard(shard, None)
    param.discard()
    return seen, states


def test_weights_are_prefetched_one_layer_ahead_and_resharded_at_once(threads):
    sharded_, unsharding = ShardedState.SHARDED, ShardedState.UNSHARDING
    for seen, after in threads.run(2, sharded_states, WIDE, "2x1x1"):
        # The first layer's "up" has been multiplied, the second's is on its way.
        assert seen["forward"] == [sharded_, unsharding]
        assert seen["backward"] == [unsharding, unsharding]
        assert after == {sharded_}


# --- forward -----------------------------------------------------------------------------------------------------


def check_missing(output):
    """What reads logits that there aren't is told why; what goes over the output's entries isn't."""
    for read in (lambda: output.logits, lambda: output["logits"]):
        with pytest.raises(MissingOutputError, match=r"^logits: given labels, .*gather_logits"):
            read()
    assert list(output) == ["loss"]
    assert len(output.to_tuple()) == 1
    assert "logits=None" in repr(output)
    for made in (copy.copy(output), type(output)(**output)):
        assert made.logits is None
        assert torch.equal(made.loss, output.loss)


def logits_by_mode(small, mesh, gather_logits):
    model = sharded(small, mesh, gather_logits=gather_logits)
    ids = tokens(small, length=13)
    shapes = {}
    for mode in ("train", "eval"):
        getattr(model, mode)()
        for labels in (None, ids):
            output = model(input_ids=ids, labels=labels)
            logits = getattr(output, "logits", None)
            shapes[mode, labels is not None] = None if logits is None else tuple(logits.shape)
            if logits is None:
                check_missing(output)
    return shapes


@pytest.mark.sample(1)
@pytest.mark.parametrize("setting", ["auto", True, False])
def test_whole_unpadded_logits_where_they_are_wanted(threads, setting):
    full_shape = (BATCH, 13, WIDE.vocabulary)
    for shapes in threads.run(6, logits_by_mode, WIDE, "1x2x3", setting):
        assert shapes["train", False] == shapes["eval", False] == full_shape
        assert shapes["train", True] == (full_shape if setting is True else None)
        assert shapes["eval", True] == (None if setting is False else full_shape)


def refusals(small, mesh):
    model = sharded(small, mesh)
    ids = tokens(small)
    cases = {
        "use_cache": {"use_cache": True},
        "token_type_ids": {"token_type_ids": ids},
        "inputs_embeds": {"inputs_embeds": torch.zeros(BATCH, LENGTH, small.hidden)},
        "output_attentions": {"output_attentions": True},
        "logits_to_keep": {"logits_to_keep": 1, "labels": ids},
        "attention_mask": {"attention_mask": torch.ones(BATCH, LENGTH + 1)},
        "beyond": {"input_ids": ids + small.vocabulary},
    }
    messages = {}
    for name, arguments in cases.items():
        with pytest.raises((cuboid.CuboidError, RuntimeError)) as error:
            model(**{"input_ids": ids, **arguments})
        messages[name] = str(error.value)
    with pytest.raises(cuboid.CuboidError):
        model.resize_token_embeddings(200)
    with pytest.raises(cuboid.CuboidError, match="sharded already"):
        cuboid.shard(model, {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 2}}})
    return messages


def test_arguments_without_a_rule_are_refused_by_name(threads):
    for messages in threads.run(2, refusals, WIDE, "2x1x1"):
        for name in ("use_cache", "token_type_ids", "inputs_embeds", "output_attentions", "logits_to_keep"):
            assert messages[name].startswith(name)
        assert messages["attention_mask"] == "attention_mask is [8, 25], but input_ids is [8, 24]"
        assert messages["beyond"].startswith("input_ids[0, 0] (and 191 more) is ")
        assert f"vocabulary has {WIDE.vocabulary} entries" in messages["beyond"]


def different_batches(mesh):
    model = sharded(WIDE, mesh)
    ids = tokens(WIDE) if cuboid.mesh_of(model).rank == 0 else tokens(WIDE).flip(0)
    with pytest.raises(cuboid.CuboidError) as error:
        model(input_ids=ids)
    return str(error.value)


def test_ranks_of_a_mesh_with_different_data_are_refused_on_all_of_them(pool):
    for message in pool.run(2, different_batches, "1x2x1"):
        assert "must be given the same micro-batch" in message
        assert "coordinate.data" in message


def base_that_fails_on_one_rank(mesh, failing):
    dist.init_process_group("gloo")
    model = sharded(WIDE, mesh)

    def fail(*_):
        raise ValueError("boom")

    if cuboid.mesh_of(model).rank == failing:
        model.model.layers[0].register_forward_pre_hook(cuboid.local_hook(fail))
    model.base_model(input_ids=tokens(WIDE))


def test_a_failure_in_the_forward_of_a_base_model_is_raised_on_all_ranks():
    told, failed = endings_of(2, base_that_fails_on_one_rank, "1x2x1", 1)
    assert (failed.kind, failed.text) == ("ValueError", "boom")
    assert (told.kind, told.text, told.rank) == ("RankError", "forward: ValueError: boom", 1)


def autocast_loss(mesh):
    model = built(WIDE) if mesh is None else sharded(WIDE, mesh)
    ids = tokens(WIDE)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    norm = sum(float(p.grad.pow(2).sum()) for p in model.parameters())
    return loss.item(), norm, {p.grad.dtype for p in model.parameters()}


def test_autocast_gives_what_it_gives_alone(threads):
    ((loss, norm, _),) = threads.run(1, autocast_loss, None)
    ranks = threads.run(4, autocast_loss, "2x2x1")
    for sharded_loss, _, dtypes in ranks:
        assert sharded_loss == pytest.approx(loss, rel=1e-3)
        assert dtypes == {torch.float32}
    assert sum(squares for _, squares, _ in ranks) == pytest.approx(norm, rel=0.03)


def loss_with(mesh, implementation, sliding_window):
    small = SmallModel("mistral", heads=8, kv_heads=2, sliding_window=sliding_window)
    model = built(small)
    model.config._attn_implementation = implementation
    if mesh is not None:
        cuboid.shard(model, mode(mesh))
    ids = tokens(small, length=13)
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, -4:] = 0
    loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    return loss.item()


@pytest.mark.sample(2)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("sliding_window", [None, 5])
def test_masks_are_right_for_each_attention_implementation(threads, implementation, sliding_window):
    (alone,) = threads.run(1, loss_with, None, implementation, sliding_window)
    for loss in threads.run(4, loss_with, "1x2x2", implementation, sliding_window):
        assert loss == pytest.approx(alone, rel=1e-6)


# --- dropout -----------------------------------------------------------------------------------------------------


def dropout_masks(mesh):
    shape = MeshShape.parse(mesh)
    layer = ShardedDropout(0.5, cuboid.Mesh(shape))
    torch.manual_seed(7)
    mask = layer(torch.ones(1000))
    return mask, torch.rand(3)


def test_masks_differ_between_ranks_and_generators_stay_in_step(pool):
    masks, after = zip(*pool.run(8, dropout_masks, "2x2x2"), strict=True)
    assert all(torch.equal(after[0], other) for other in after)
    for i in range(8):
        assert 400 < int((masks[i] == 0).sum()) < 600
        for j in range(i):
            assert 400 < int((masks[i] == masks[j]).sum()) < 600


def dropout_gradients(mesh, checkpoints):
    small = SmallModel("gpt2", heads=8, kv_heads=8)
    section = {"activation_checkpointing": {"mode": checkpoints}}
    model = cuboid.shard(built(small, attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.2), {**mode(mesh), **section})
    ids = tokens(small)
    torch.manual_seed(3)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("checkpoints", ["layers", "attention"])
def test_activation_checkpointing_repeats_the_masks(pool, checkpoints):
    plain = pool.run(4, dropout_gradients, "1x2x2", "none")
    again = pool.run(4, dropout_gradients, "1x2x2", checkpoints)
    for (loss, gradients), (loss_again, gradients_again) in zip(plain, again, strict=True):
        assert loss == loss_again
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradients_again[name], gradient, rtol=1e-5, atol=1e-7)


# --- loading and saving ------------------------------------------------------------------------------------------


def bytes_read(path, mesh):
    """Bytes of tensors that the loader takes out of the files."""
    taken = []
    original = sharding_utils.DtensorShardOperation.shard_tensor

    def counting(self, source, *args, **kwargs):
        shard = original(self, source, *args, **kwargs)
        taken.append(shard.nbytes)
        return shard

    sharding_utils.DtensorShardOperation.shard_tensor = counting
    try:
        model = cuboid.from_pretrained(path, mode(mesh))
    finally:
        sharding_utils.DtensorShardOperation.shard_tensor = original
    return sum(taken), sum(p.nbytes for p in model.parameters())


@pytest.mark.sample(1)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
def test_a_rank_reads_its_slices_only(pool, checkpoint, architecture):
    path = checkpoint(SmallModel(architecture, heads=8, kv_heads=8))
    stored = sum(
        os.path.getsize(os.path.join(path, name)) for name in os.listdir(path) if name.endswith(".safetensors")
    )
    read, held = zip(*pool.run(8, bytes_read, path, "2x2x2"), strict=True)
    # All ranks together read every byte of a parameter once; the file's header is what is left.
    assert 0.97 * stored < sum(read) <= stored
    assert max(read) <= max(held) < 1.05 * stored / 8


def reloaded(path, mesh, out):
    cuboid.from_pretrained(path, mode(mesh)).save_pretrained(out)


@pytest.mark.sample(1)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("mesh", ["1x2x3", "2x2x2"])
def test_load_and_save_give_the_same_checkpoint(pool, checkpoint, tmp_path, architecture, mesh):
    path = checkpoint(SmallModel(architecture, heads=12, kv_heads=12))
    pool.run(MeshShape.parse(mesh).size, reloaded, path, mesh, str(tmp_path))
    before, after = stored(path), stored(tmp_path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "config.json").read_text() == (Path(path) / "config.json").read_text()


class LlamaWithBiasForCausalLM(LlamaForCausalLM):
    """Its head has a bias, which a vocabulary that doesn't divide cuts as the head's weight."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()


def head_reloaded(path, mesh):
    with cuboid.scope(mode(mesh)):
        model = LlamaWithBiasForCausalLM.from_pretrained(path)
    return cuboid.full_state_dict(model)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", ["1x1x2", "1x2x3", "2x1x3", "2x2x2"])
def test_a_heads_bias_is_cut_as_its_weight(pool, tmp_path, mesh):
    small = SmallModel("llama", heads=12, kv_heads=12, vocabulary=133)
    torch.manual_seed(0)
    model = LlamaWithBiasForCausalLM(small.config())
    nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(tmp_path)
    reloaded = pool.run(MeshShape.parse(mesh).size, head_reloaded, tmp_path, mesh)[0]
    expected = model.state_dict()
    assert reloaded.keys() == expected.keys()
    assert all(torch.equal(reloaded[name], expected[name]) for name in expected)
