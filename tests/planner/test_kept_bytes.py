"""The bytes that the planner counts for a layer, against what autograd saves in models whose ranks are threads."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from cuboid.distributed.topology import MeshShape
from cuboid.models.stages.model_costs import decoder_layers
from cuboid.planner.description.kept import CountedAs, _Saved, count_kept
from cuboid.planner.description.meta_model import describe
from cuboid.planner.description.modules import describe_modules
from cuboid.seq1f1b.runtime.memory import MeteredPool
from planning import on_meta, small
from threaded import Threaded

ROWS, LENGTH = 4, 128
RECURRENT = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    **{"shared_expert_intermediate_size": 24, "mamba_n_heads": 12, "mamba_d_head": 8, "mamba_d_state": 8},
}
MODELS = {
    "llama": {},
    "gpt2": {"attn_pdrop": 0.0, "n_positions": 1024},
    # Attention whole on every rank, since one product has queries, keys and values.
    "phi3": {"eos_token_id": None, "bos_token_id": None},
    "qwen3": {},
    "mixtral": {},
    "qwen3_moe": {},
    "gpt_oss": {"layer_types": None, "sliding_window": 32},
    # Heads of one size, for which CPUs have a fused kernel.
    "deepseek_v3": {"num_key_value_heads": 12, "v_head_dim": 12},
    "qwen3_next": RECURRENT,
    "granitemoehybrid": {**RECURRENT, "mamba_chunk_size": 32, "layer_types": ["mamba", "attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "mamba2": {"chunk_size": 32, "num_heads": 12, "head_dim": 8, "state_size": 8, "n_groups": 1},
}
MESHES = ["1x2x1", "1x1x2", "1x2x2", "2x1x1", "2x2x1", "1x4x1"]


def saved_by_layer(model, verdict, mesh, ids):
    """On each rank, the bytes that each of its layers saves in a forward."""
    threaded = Threaded(model, mesh, verdict)
    records = [_Saved(rank, list(decoder_layers(rank).values())) for rank in threaded.models]

    def step(rank):
        record = records[threaded.models.index(rank)]
        with record.hooks():
            rank(input_ids=ids, labels=ids, use_cache=False)
        return record.bytes_by_place(MeteredPool())

    return threaded.run(step)


def check(config, mesh):
    """Compare each kind of layer that the model has twice: the last one has nothing that it shares with others."""
    torch.manual_seed(0)
    described, shape = describe(config), MeshShape.parse(mesh)
    assert described.limits.reason_against(shape) is None
    counted = count_kept(described, CountedAs(shape))
    assert not counted.obstacle
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    ids = torch.randint(2, 100, (ROWS, LENGTH))
    ranks = saved_by_layer(model, described.verdict, mesh, ids)
    sizes = ROWS // shape.batch, LENGTH, LENGTH
    for kind, layer in enumerate(described.kinds):
        indices = [index for index, other in enumerate(described.kind_of_layers) if other == kind]
        reached = layer.attention.window is not None and layer.attention.window < LENGTH
        count = (counted.windowed if reached else counted.layers)[kind]
        if len(indices) > 1:
            assert count.kept.of(*sizes) == pytest.approx(max(rank[indices[-1]] for rank in ranks), rel=1e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_of_a_mesh_keeps_what_is_counted(name, mesh):
    check(small(name, **MODELS[name]), mesh)


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("mesh", ["1x8x1", "1x1x8", "1x2x8"])
@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3_moe", "deepseek_v3"])
def test_a_layer_of_a_mesh_with_long_axes_keeps_what_is_inferred(name, mesh):
    # Fewer heads of keys and values than ranks, unless latents make one for each query head.
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16 if name == "deepseek_v3" else 4, "hidden_size": 64}
    # All sizes divide by eight, as real ones do: padding isn't inferred.
    sizes = {"num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 32}
    latents = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    latents |= {"head_dim": 8} if name == "deepseek_v3" else {}
    check(small(name, **{**MODELS[name], **heads, **sizes, **latents, "intermediate_size": 128}), mesh)


def test_layers_whose_kernels_are_installed_are_left_to_formulas(monkeypatch):
    # Its certificate doesn't matter here, and a probe of one takes seconds.
    described = describe_modules(on_meta(small("mamba2", **MODELS["mamba2"])))
    monkeypatch.setattr("cuboid.planner.description.kept.find_spec", lambda name: name if name == "mamba_ssm" else None)
    count_kept.cache_clear()
    assert "kernels of mamba_ssm" in count_kept(described, CountedAs(MeshShape())).obstacle
    count_kept.cache_clear()
