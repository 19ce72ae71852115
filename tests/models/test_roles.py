"""Roles, refusals by name, and the meshes that an error proposes. All on the meta device."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

import cuboid
from cuboid.distributed.topology import Coordinate, MeshShape
from cuboid.errors import MeshError, UnsupportedModelError
from cuboid.models.architectures.attention_heads import HeadCounts, copies_of_key_value_heads
from cuboid.models.architectures.norm_formula import NormFormula, norm_formula
from cuboid.models.architectures.roles import Role, find_roles, split_blocks
from cuboid.models.certification.small_config import small_config
from cuboid.models.sharded.customizations import check_as_made, made_anew
from cuboid.models.sharded.parallel_plan import make_parallel_plan
from cuboid.verify import SmallModel


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def llama(**sizes):
    defaults = {"vocab_size": 131, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 1}
    return on_meta(LlamaConfig(**{**defaults, "num_attention_heads": 12, "num_key_value_heads": 4, **sizes}))


def test_every_parameter_of_the_supported_architectures_has_a_role():
    for architecture in ("llama", "qwen2", "qwen3", "mistral", "gpt2"):
        model = on_meta(SmallModel(architecture, heads=8, kv_heads=2).config())
        roles = find_roles(model)
        owners = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
        assert roles.keys() == owners
    assert find_roles(model)["transformer.h.0.attn.c_attn"].heads == "query_key_value"


def test_blocks_with_a_module_that_no_rule_covers_are_whole():
    model = llama()
    model.model.layers[0].mlp.adapter = nn.Linear(4, 4, device="meta")
    roles = find_roles(model)
    assert roles["model.layers.0.mlp"].kind == "whole"
    assert {roles[f"model.layers.0.mlp.{name}"].kind for name in ("adapter", "up_proj", "down_proj")} == {"inside"}
    assert roles["model.layers.0.self_attn.q_proj"].heads == "query"
    model = llama()
    model.model.layers[0].mlp.up_proj = type("Quantised", (nn.Linear,), {})(96, 192, bias=False, device="meta")
    assert find_roles(model)["model.layers.0.mlp"].kind == "whole"


def small_on_meta(architecture):
    config = small_config(AutoConfig.for_model(architecture))
    return on_meta(config)


def test_what_is_over_or_of_all_heads_is_split_as_they_are():
    olmo2 = find_roles(small_on_meta("olmo2"))
    norms = {name: olmo2[f"model.layers.0.self_attn.{name}"] for name in ("q_norm", "k_norm")}
    assert {name: (role.kind, role.heads) for name, role in norms.items()} == {
        "q_norm": ("norm", "query"),
        "k_norm": ("norm", "key_value"),
    }
    # Behind attention it is one of the hidden dim, and Qwen 3's is one of each head.
    assert olmo2["model.layers.0.post_attention_layernorm"].heads is None
    assert find_roles(small_on_meta("qwen3"))["model.layers.0.self_attn.q_norm"].kind == "gathered"
    assert find_roles(small_on_meta("gpt_oss"))["model.layers.0.self_attn"].kind == "per head"


def test_latents_are_made_whole_and_heads_made_of_them_are_split():
    roles = find_roles(small_on_meta("deepseek_v3"))
    kinds = {name.rpartition(".")[2]: role.kind for name, role in roles.items() if ".0.self_attn." in name}
    assert kinds == {
        **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "latent"),
        **dict.fromkeys(("q_a_layernorm", "kv_a_layernorm"), "gathered"),
        **dict.fromkeys(("q_b_proj", "kv_b_proj"), "from latent"),
        "o_proj": "down",
    }


@pytest.mark.parametrize(
    "counts",
    [HeadCounts(8, 2, 4), HeadCounts(8, 1, 4), HeadCounts(12, 3, 4), HeadCounts(8, 8, 4), HeadCounts(12, 6, 4)],
)
@pytest.mark.parametrize("mesh", ["1x2x2", "1x1x4", "1x4x1", "1x2x1"])
def test_the_copies_of_all_ranks_make_every_key_head_once(counts, mesh):
    mesh = MeshShape.parse(mesh)
    shares = sum(
        1 / copies
        for sequence in range(mesh.sequence)
        for hidden in range(mesh.hidden)
        for copies in copies_of_key_value_heads(counts, mesh, Coordinate(0, 0, 0, sequence, hidden))
    )
    assert shares == pytest.approx(counts.key_value)


def test_styles_come_from_the_plan_of_the_model_then_from_the_table():
    neox = find_roles(on_meta(AutoConfig.for_model("gpt_neox", num_hidden_layers=1)))
    assert neox["gpt_neox.layers.0.attention.query_key_value"] == Role("up", "query_key_value")
    phi3 = find_roles(on_meta(AutoConfig.for_model("glm", num_hidden_layers=1)))
    assert phi3["model.layers.0.mlp.gate_up_proj"] == Role("up", parts=2)
    gpt2 = find_roles(on_meta(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64)))
    assert gpt2["transformer.h.0.attn.c_attn"] == Role("up", "query_key_value", 3)
    opt = find_roles(on_meta(OPTConfig(num_hidden_layers=1, hidden_size=32, ffn_dim=32, num_attention_heads=2)))
    assert opt["model.decoder.layers.0.fc1"] == Role("up", alone=True)
    assert opt["model.decoder.embed_positions"].kind == "embedding"


def test_layers_and_what_is_around_them_can_be_whole():
    model = llama()
    roles = find_roles(model, [""])
    assert roles["model.layers.0"].kind == "whole"
    assert {role.kind for name, role in roles.items() if name.startswith("model.layers.0.")} == {"inside"}
    late = find_roles(model, splits_late=True)
    assert late["model.norm"] == Role("whole", late=True)
    assert late["model.embed_tokens"] == Role("embedding", late=True)
    assert split_blocks(model) == ["self_attn", "mlp"]


def test_what_a_model_has_beyond_its_architecture_is_rejected_by_name():
    model = llama()
    model.model.layers[0].mlp.adapter = nn.Linear(4, 4, device="meta")
    with pytest.raises(
        UnsupportedModelError, match=r"'model\.layers\.0\.mlp\.adapter' is a Linear \(parameters: weight, bias\), which"
    ):
        check_as_made(model, made_anew(type(model), model.config), stages=False)


def test_tables_with_options_of_their_own_are_rejected():
    model = llama()
    model.set_input_embeddings(nn.Embedding(131, 96, max_norm=1.0, device="meta"))
    with pytest.raises(UnsupportedModelError, match="max_norm"):
        find_roles(model)


def test_what_is_refused_leaves_the_model_as_it_was():
    class SquaredRMSNorm(LlamaRMSNorm):
        def forward(self, x):
            return super().forward(x) ** 2

    one_rank = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 1}}}
    model = AutoModelForCausalLM.from_config(llama().config)
    model.model.norm = SquaredRMSNorm(96)
    before = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedModelError, match="SquaredRMSNorm"):
        cuboid.shard(model, one_rank)
    assert [type(module) for module in model.modules()] == before
    model = AutoModelForCausalLM.from_config(llama().config)
    model.config._attn_implementation = "home-made"
    with pytest.raises(UnsupportedModelError, match="'home-made' has no rule; choose one of eager, sdpa"):
        cuboid.shard(model, one_rank)
    assert not any(type(module).__module__.startswith("cuboid") for module in model.modules())


@pytest.mark.parametrize(
    ("sizes", "mesh", "message"),
    [
        ({}, "1x5x1", r"12 attention heads don't divide by sequence × hidden = 5.*: 5×1×1"),
        ({"intermediate_size": 100}, "1x2x3", r"gate_proj: 100 features don't divide by sequence × hidden = 6"),
    ],
)
def test_a_mesh_that_does_not_divide_names_the_nearest_that_do(sizes, mesh, message):
    with pytest.raises(MeshError, match=message) as error:
        make_parallel_plan(llama(**sizes), MeshShape.parse(mesh))
    proposed = str(error.value).rpartition(": ")[2].split(", ")
    assert proposed
    for text in proposed:
        make_parallel_plan(llama(**sizes), MeshShape.parse(text))


def test_the_formula_of_a_norm_is_found_out_by_running_it():
    assert norm_formula(LlamaRMSNorm(16, eps=1e-5)) == NormFormula("rms", 1e-5)
    assert norm_formula(GemmaRMSNorm(16, eps=1e-6)) == NormFormula("rms", 1e-6, 1.0)

    class SquaredRMSNorm(LlamaRMSNorm):
        def forward(self, x):
            return super().forward(x) ** 2

    assert norm_formula(SquaredRMSNorm(16)) is None
    assert norm_formula(nn.RMSNorm(16, eps=1e-3)) == NormFormula("rms", 1e-3)
    assert norm_formula(nn.LayerNorm(16, eps=1e-12)) == NormFormula("layer", 1e-12)
    assert norm_formula(nn.LayerNorm(16, elementwise_affine=False)) == NormFormula("layer", 1e-5)
    assert norm_formula(OlmoLayerNorm(16)) == NormFormula("layer", 1e-5)
    assert norm_formula(Gemma3nRMSNorm(16, eps=1e-4, with_scale=False)) == NormFormula("rms", 1e-4)
