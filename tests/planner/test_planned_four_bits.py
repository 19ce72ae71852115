"""Which layouts plans have for weights in 4 bits: those that loading takes, and no others."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.sharded.parallel_plan import make_parallel_plan
from cuboid.models.sharded.quantization import Quantization
from cuboid.planner.description.limits import LayoutLimits
from cuboid.planner.description.meta_model import describe
from cuboid.planner.description.trunk import LaterAdapters, Trunk
from planning import on_meta

QUANTIZATION = Quantization("nf4", torch.bfloat16, nested=False, skipped=None)
#: Blocks of each type that every rank computes whole, in some of the cases.
TYPES = {"llama": ("self_attn", "mlp"), "phi3": ("self_attn",), "qwen2": ("mlp",), "deepseek_v3": ()}
SIZES = st.sampled_from([24, 32, 48, 64, 96, 128, 160, 192])


@st.composite
def models(draw):
    """A model on the meta device with rows that meshes cut between scales, and inside of them; and a verdict on it."""
    name = draw(st.sampled_from(sorted(TYPES)))
    heads, dim = draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from([4, 8, 16, 24, 32]))
    sizes = {"hidden_size": heads * dim, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": dim}
    sizes |= {"intermediate_size": draw(SIZES), "num_hidden_layers": 1, "vocab_size": 64, "pad_token_id": None}
    sizes |= {"q_lora_rank": draw(SIZES), "kv_lora_rank": draw(SIZES), "qk_nope_head_dim": dim, "v_head_dim": dim}
    sizes |= {"qk_rope_head_dim": 4, "n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 0}
    sizes |= {"num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    known = {*vars(AutoConfig.for_model(name)), *type(AutoConfig.for_model(name)).attribute_map}
    config = AutoConfig.for_model(name, **{key: value for key, value in sizes.items() if key in known})
    blocks = draw(st.sets(st.sampled_from(TYPES[name]))) if TYPES[name] else ()
    return on_meta(config), MeshVerdict(whole_blocks=tuple(sorted(blocks)))


@functools.cache
def meshes():
    return [mesh for size in (1, 2, 3, 4, 6, 8) for mesh in MeshShape.of_size(size)]


@settings(max_examples=15, deadline=None)
@given(models())
def test_a_plan_has_the_meshes_that_loading_takes(drawn):
    model, verdict = drawn
    limits = LayoutLimits.of(model, verdict, four_bits=True)
    for mesh in meshes():
        try:
            QUANTIZATION.layers_of(model, make_parallel_plan(model, mesh, verdict))
            refusal = None
        except CuboidError as error:
            refusal = str(error)
        reason = limits.reason_against(mesh)
        assert (reason is None) == (refusal is None), (mesh, reason, refusal)
        assert reason is None or reason in refusal


def test_rows_that_end_between_scales_together_are_planned():
    """Rows of 96 elements have a scale and a half: an even number of them is cut where a scale ends."""
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = AutoConfig.for_model("llama", **sizes, num_hidden_layers=2, vocab_size=64)
    limits = describe(config, trunk=Trunk(LaterAdapters(), four_bits=True)).limits
    assert limits.reason_against(MeshShape(2, 1, 1)) is None
    assert "a rank's rows of model.layers.0.self_attn.q_proj would have 48 of 96 elements, and 64 " in str(
        limits.reason_against(MeshShape(1, 1, 2))
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [("gpt2", r"c_attn stores its weight transposed \(Conv1D\)"), ("falcon", "has no linear layer that transformers")],
)
def test_models_that_are_refused_on_any_mesh_have_no_plan(name, message):
    with pytest.raises(UnsupportedModelError, match=message):
        describe(AutoConfig.for_model(name), trunk=Trunk(LaterAdapters(), four_bits=True))
