"""Which micro-batches a config asks for: those that cross its thresholds, on either side of them, padded and packed."""

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from cuboid.models.batch.length_cases import LONGEST, Case, cases, covering, shrunk, thresholds

SCALED = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
ORIGINAL = "rope_parameters.original_max_position_embeddings"
LONG = {"rope_type": "longrope", **SCALED, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
CONFIGS = (
    transformers.LlamaConfig(),
    transformers.LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    transformers.LlamaConfig(rope_parameters={"rope_type": "yarn", **SCALED}),
    transformers.Phi3Config(rope_parameters=LONG, original_max_position_embeddings=64, sliding_window=2047),
    transformers.Llama4TextConfig(),
    transformers.Gemma3TextConfig(sliding_window=12),
    transformers.Gemma3TextConfig(rope_parameters={"full_attention": {"rope_type": "yarn", **SCALED}}),
    transformers.GPTNeoConfig(),
    transformers.GPT2Config(),
    transformers.GPT2Config(n_positions=16),
    transformers.BloomConfig(),
)


def keys(config: PretrainedConfig) -> dict[str, int]:
    return {threshold.key: threshold.tokens for threshold in thresholds(config)}


def test_thresholds_are_found_where_configs_have_them() -> None:
    assert keys(CONFIGS[0]) == {}  # what its rotary embeddings do is the same at every length
    assert keys(CONFIGS[1]) == {"max_position_embeddings": 2048}
    assert keys(CONFIGS[2]) == {ORIGINAL: 64, "max_position_embeddings": 2048}
    assert {"sliding_window", ORIGINAL, "max_position_embeddings"} < keys(CONFIGS[3]).keys()
    assert keys(CONFIGS[4]) == {"attention_chunk_size": 8192, "floor_scale": 8192}
    assert keys(CONFIGS[6])["rope_parameters.full_attention.original_max_position_embeddings"] == 64
    assert [threshold.is_end for threshold in thresholds(CONFIGS[7])] == [False, True]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
@pytest.mark.parametrize("longest", [LONGEST, 12, 64])
def test_a_shrunk_config_is_crossed_and_says_the_same_otherwise(config: PretrainedConfig, longest: int) -> None:
    small, before = shrunk(config, longest), config.to_dict()
    assert config.to_dict() == before
    old, new = thresholds(config), thresholds(small)
    assert {(t.key, t.is_end) for t in old} == {(t.key, t.is_end) for t in new}
    assert all(t.tokens < longest for t in new if not t.is_end)
    assert {t for t in old if t.is_end} == {t for t in new if t.is_end}
    ranks = [sorted({t.tokens for t in some}) for some in (old, new) if not any(t.is_end for t in some)]
    places = [{t.key: rank.index(t.tokens) for t in some} for some, rank in zip((old, new), ranks, strict=False)]
    assert places[:1] == places[1:]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
@pytest.mark.parametrize("choose", [cases, covering])
def test_cases_cross_every_threshold_and_no_end(config: PretrainedConfig, choose: type) -> None:
    small = shrunk(config, LONGEST)
    chosen: tuple[Case, ...] = choose(small)
    for threshold in thresholds(small):
        reached = [case.first_position + case.length for case in chosen]
        if threshold.is_end:
            assert max(reached) == threshold.tokens
        else:
            assert {case.length > threshold.tokens for case in chosen} == {True, False}
            assert any(max(case.packed, default=0) > threshold.tokens for case in chosen)
    assert len({case.name for case in chosen}) == len(chosen)
    assert len(covering(small)) == 4
    assert {"longest", "short", "packed"} <= {case.name for case in cases(small)}


def test_masks_and_positions_of_a_case() -> None:
    mask = Case("", 8, "rows").attention_mask(5)
    assert mask is not None
    assert mask.tolist() == [[0] * 2 + [1] * 6, [1] * 6 + [0] * 2, [1] * 8, [1] * 8, [0] * 2 + [1] * 6]
    assert Case("", 8, "rows").row_kinds(2, first=3) == ["without labels", "left"]
    assert "left" not in Case("", 8, "right rows").row_kinds(6)
    assert Case("", 8).attention_mask(2) is Case("", 8).position_ids(2) is None
    packed = Case("", 6, packed=(3, 2, 1)).position_ids(2)
    assert packed is not None
    assert packed.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 1, 2]]
    late = Case("", 3, first_position=5).position_ids(2)
    assert late is not None
    assert torch.equal(late, torch.tensor([[5, 6, 7]] * 2))
