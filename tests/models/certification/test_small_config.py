"""What a small config keeps of a real one: whatever decides which code runs, also where only sizes differ."""

import pytest
import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.roles import find_roles
from cuboid.models.attention.segments import check_segments
from cuboid.models.certification.small_config import LONGEST, small_config


def bases_of(config):
    rope = config.rope_parameters
    return {inner["rope_theta"] for inner in rope.values()} if "rope_theta" not in rope else {rope["rope_theta"]}


@pytest.mark.parametrize("base", [10000.0, 500000.0, 5])
def test_one_base_of_rotary_embeddings_is_as_good_as_any_other(base):
    config = transformers.LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": base})
    assert bases_of(small_config(config)) == {10000.0}


@pytest.mark.parametrize("architecture", ["gemma3_text", "modernbert-decoder", "laguna"])
def test_layers_with_rotary_embeddings_of_different_bases_still_have_different_ones(architecture):
    # A model that gives a layer the tables of other layers must not compute the same.
    assert len(bases_of(small_config(AutoConfig.for_model(architecture)))) == 2


@pytest.mark.parametrize(
    ("architecture", "options", "has_projection"),
    [
        ("opt", {}, False),
        ("opt", {"hidden_size": 1024, "word_embed_proj_dim": 512, "num_attention_heads": 16}, True),
        ("electra", {}, True),
        ("electra", {"embedding_size": 256}, False),
    ],
)
def test_embeddings_are_projected_if_they_are_in_the_real_model(architecture, options, has_projection):
    config = AutoConfig.for_model(architecture, **options)
    small = small_config(config)
    with torch.device("meta"):
        models = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](one) for one in (config, small)]
    projections = [
        {name.rpartition(".")[2] for name, _ in model.named_modules()} & {"project_in", "embeddings_project"}
        for model in models
    ]
    assert projections[0] == projections[1]
    assert bool(projections[0]) == has_projection


@pytest.mark.parametrize(
    ("architecture", "name"), [("inkling_text", "unpadded_vocab_size"), ("gemma4_text", "vocab_size_per_layer_input")]
)
def test_a_part_of_the_vocabulary_is_still_a_part_of_it(architecture, name):
    vocabulary = AutoConfig.for_model(architecture).vocab_size
    for tokens, is_part in ((vocabulary - 64, True), (vocabulary, False)):
        small = small_config(AutoConfig.for_model(architecture, **{name: tokens}))
        assert (getattr(small, name) < small.vocab_size) == is_part


def test_attention_to_chosen_blocks_has_more_blocks_than_it_may_choose():
    config = AutoConfig.for_model("minimax_m3_vl_text", layer_types=["minimax_m3_sparse"] * 60)
    small = small_config(config)
    assert 2 * small.index_block_size * small.index_topk_blocks < LONGEST


def test_a_plan_inside_a_config_is_not_taken_for_that_of_its_class():
    # The small model that is tested has the class's.
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    expected = find_roles(model)
    model.config.base_model_tp_plan = {"layers.*.mlp.down_proj": "colwise"}
    assert find_roles(model) == expected


def test_attention_that_looks_ahead_in_images_alone_runs_in_segments():
    check_segments(AutoConfig.for_model("gemma4_unified_text", attn_implementation="sdpa"), 2)
    with pytest.raises(UnsupportedModelError, match="positions see later ones"):
        check_segments(
            AutoConfig.for_model("gemma4_unified_text", attn_implementation="sdpa", use_bidirectional_attention="all"),
            2,
        )
