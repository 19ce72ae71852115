"""New weights: each rank makes its slices, and they are the same for a seed on every mesh and in every pipeline."""

import functools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import cuboid
from cuboid.distributed.topology import MeshShape
from cuboid.errors import MeshError, UnsupportedModelError
from cuboid.tensor3d.sharding.sharding_spec import put_shard
from cuboid.weights import from_scratch
from cuboid.weights.state_dict_map import sharding_specs

LLAMA = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3}
CONFIGS = {
    "llama": AutoConfig.for_model("llama", **LLAMA),
    "tied": AutoConfig.for_model("llama", **LLAMA, num_key_value_heads=2, tie_word_embeddings=True),
    "gpt2": AutoConfig.for_model("gpt2", vocab_size=67, n_embd=32, n_head=4, n_layer=3),
}


def ds_config(mesh, stages):
    shape = MeshShape.parse(mesh)
    section = {"batch": shape.batch, "sequence": shape.sequence, "hidden": shape.hidden}
    config = {"tensor_parallel": {"mode": "3d_tensor", "mesh": section}}
    # Two stages of three layers share one.
    balance = "halves" if stages == 2 else "flops"
    pipeline = {"engine": "seq1f1b", "stages": stages, "segments": 1, "stage_balance": balance}
    return config if stages == 1 else {**config, "pipeline": pipeline}


def made_by_rank(monkeypatch, config, mesh, stages, rank, seed=0):
    """What one rank of a job makes, without the others."""
    size = MeshShape.parse(mesh).size * stages
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    torch.manual_seed(seed)
    return cuboid.from_config(config, ds_config(mesh, stages))


def put_together(monkeypatch, config, mesh, stages):
    weights = {}
    for rank in range(MeshShape.parse(mesh).size * stages):
        model = made_by_rank(monkeypatch, config, mesh, stages, rank)
        specs, made_mesh = sharding_specs(model), model.cuboid.mesh
        for name, shard in model.named_parameters(remove_duplicate=False):
            if made_mesh.shape.size == 1:
                weights[name] = shard.detach()
            else:
                full = weights.setdefault(name, torch.full(specs[name].shape, torch.nan))
                put_shard(full, shard.detach(), specs[name], made_mesh.shape, made_mesh.coordinate)
    return weights


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize(("mesh", "stages"), [("2x2x2", 1), ("1x1x1", 3), ("1x2x2", 2)])
def test_a_seed_gives_the_same_weights_on_every_mesh_and_in_every_pipeline(monkeypatch, architecture, mesh, stages):
    config = CONFIGS[architecture]
    alone = made_by_rank(monkeypatch, config, "1x1x1", 1, 0)
    expected = dict(alone.named_parameters(remove_duplicate=False))
    weights = put_together(monkeypatch, config, mesh, stages)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name
    other = made_by_rank(monkeypatch, config, "1x1x1", 1, 0, seed=1)
    assert not torch.equal(other.get_input_embeddings().weight, alone.get_input_embeddings().weight)


@pytest.mark.parametrize(("mesh", "stages"), [("1x2x1", 1), ("1x1x1", 2)])
def test_chunks_of_positions_are_rejected_by_name(monkeypatch, mesh, stages):
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4}
    config = AutoConfig.for_model("bert", **sizes, architectures=["BertForMaskedLM"], chunk_size_feed_forward=4)
    with pytest.raises(UnsupportedModelError, match=r"chunk_size_feed_forward is 4, .* set it to 0"):
        made_by_rank(monkeypatch, config, mesh, stages, 0)


def test_weights_are_distributed_as_those_of_plain_transformers(monkeypatch):
    config = CONFIGS["gpt2"]
    alone = dict(made_by_rank(monkeypatch, config, "1x1x1", 1, 0, seed=0).named_parameters())
    plain = AutoModelForCausalLM.from_config(config)
    for name, parameter in plain.named_parameters():
        assert alone[name].shape == parameter.shape
        assert alone[name].mean().item() == pytest.approx(parameter.mean().item(), abs=0.01), name
        assert alone[name].std().item() == pytest.approx(parameter.std().item(), rel=0.25, abs=1e-6), name
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, made_by_rank(monkeypatch, config, "1x1x1", 1, 0).get_buffer(name))


def test_a_rank_never_holds_more_than_its_slices_and_a_unit(monkeypatch):
    config = AutoConfig.for_model("llama", **{**LLAMA, "num_hidden_layers": 6})
    largest = []
    initialized = from_scratch.initialized

    def watched(*args, **kwargs):
        unit = initialized(*args, **kwargs)
        largest.append(sum(x.numel() for x in unit.values()))
        return unit

    monkeypatch.setattr(from_scratch, "initialized", watched)
    model = made_by_rank(monkeypatch, config, "2x2x2", 1, 3)
    total = model.num_parameters()
    assert max(largest) < total / 4
    assert sum(parameter.numel() for parameter in model.parameters()) < total / 7


def test_in_a_scope_every_from_config_makes_slices(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with cuboid.scope(ds_config("1x2x1", 1)):
        model = AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.bfloat16)
    assert model.cuboid.mesh.shape.size == 2
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def connected(config, ds_config, seeds, extra):
    """The error of connecting ranks that have made a model with these seeds."""
    torch.manual_seed(seeds[torch.distributed.get_rank()])
    torch.rand(extra[torch.distributed.get_rank()])
    model = cuboid.from_config(config, ds_config)
    try:
        cuboid.mesh_of(model).connect()
    except MeshError as error:
        return str(error)
    return ""


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("mesh", "stages"), [("1x1x1", 1), ("1x1x2", 1), ("1x1x1", 2)])
def test_ranks_that_made_different_weights_are_told_when_they_connect(pool, mesh, stages):
    run = functools.partial(pool.run, 2, connected, CONFIGS["tied"], ds_config(mesh, stages))
    assert run((7, 7), (0, 0)) == ["", ""]
    for message in run((7, 8), (0, 0)):
        assert "different random numbers" in message
        assert "rank 0's generator has the seed 7, rank 1's has 8. Call torch.manual_seed with the same" in message
    for message in run((7, 7), (0, 1)):
        assert "rank 0 and rank 1 have the seed 7, but one drew more before" in message


def connected_in_memory(config, ds_config, changed):
    """The error of connecting ranks that have sharded a model in memory, which is another one on the last rank."""
    is_last = torch.distributed.get_rank() == 1
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    if is_last and changed == "seed":
        model = AutoModelForCausalLM.from_config(config)
    if is_last and changed == "one":
        torch.nn.init.ones_(model.model.layers[1].mlp.up_proj.weight)
    if is_last and changed == "bias":
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA, attention_bias=True))
    try:
        cuboid.mesh_of(cuboid.shard(model, ds_config)).connect()
    except MeshError as error:
        return str(error)
    return ""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("mesh", "stages"), [("1x1x2", 1), ("1x1x1", 2)])
def test_ranks_that_shard_different_models_are_told_when_they_connect(pool, mesh, stages):
    run = functools.partial(pool.run, 2, connected_in_memory, CONFIGS["llama"], ds_config(mesh, stages))
    assert run(None) == ["", ""]
    for message in run("seed"):
        assert "model.embed_tokens.weight differs between rank 0 and rank 1" in message
        assert "call torch.manual_seed with the same number on all ranks" in message
    for message in run("one"):
        assert "model.layers.1.mlp.up_proj.weight differs between rank 0 and rank 1, and so do 0 more of" in message
    for message in run("bias"):
        assert "rank 0's has no model.layers.0.self_attn.q_proj.bias" in message
