"""Cuts of sequences and of layers: the best there are, and balanced by what models really multiply."""

import math
from itertools import accumulate, combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cuboid import ConfigError
from cuboid.errors import UnsupportedModelError
from cuboid.models.stages.model_costs import model_sizes
from cuboid.models.stages.stage_cut import draw_outline
from cuboid.seq1f1b.schedule.actions import Action, Op
from cuboid.seq1f1b.schedule.partition import (
    HeadShare,
    MeasuredCut,
    balance_stages,
    check_lengths,
    cut_sequence,
    even_cut,
    segment_cost,
)
from cuboid.seq1f1b.schedule.unit_costs import LayerSizes, ModelSizes, kept_bytes, seen_keys, segment_flops, unit_flops

#: Llama 2 7B.
SEVEN_B = ModelSizes((LayerSizes.decoder(4096, 4096, 4096, 11008),) * 32, head=4096 * 32000)

weights = st.lists(st.integers(0, 9), min_size=1, max_size=9) | st.lists(
    st.floats(0, 9, allow_subnormal=False), min_size=1, max_size=9
)


def ends(lengths):
    return list(pairwise(accumulate(lengths, initial=0)))


def every_cut(count, parts):
    for stops in combinations(range(1, count), parts - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *stops, count)))


def costliest(lengths, cost):
    return max(cost(start, stop) for start, stop in ends(lengths))


@given(weights, st.integers(1, 9), st.sampled_from([1, 3, 8]), st.sampled_from([0, 2, 5.5]))
def test_no_cut_has_a_cheaper_costliest_segment(weights, segments, multiple, overhead):
    segments = min(segments, len(weights))
    sums = list(accumulate(weights, initial=0))

    def cost(start, stop):
        return sums[stop // multiple] - sums[start // multiple] + overhead

    lengths = cut_sequence(len(weights) * multiple, segments, multiple=multiple, cost=cost)
    assert sum(lengths) == len(weights) * multiple
    assert len(lengths) == segments
    assert all(length >= multiple and length % multiple == 0 for length in lengths)
    best = min(costliest([part * multiple for part in parts], cost) for parts in every_cut(len(weights), segments))
    # Sums of fractions depend on their order.
    assert costliest(lengths, cost) == pytest.approx(best, rel=1e-12)


@given(st.lists(st.integers(1, 5), min_size=3, max_size=9), st.integers(2, 4))
def test_costs_that_are_no_sums_are_cut_as_well(steps, segments):
    segments = min(segments, len(steps))
    sums = list(accumulate(steps, initial=0))

    def cost(start, stop):
        return (sums[stop] - sums[start]) ** 2

    lengths = cut_sequence(len(steps), segments, cost=cost)
    assert costliest(lengths, cost) == min(costliest(parts, cost) for parts in every_cut(len(steps), segments))


@given(st.integers(1, 400), st.integers(1, 12), st.sampled_from([1, 4]))
def test_tokens_of_equal_cost_are_cut_evenly(grains, segments, multiple):
    segments = min(grains, segments)
    lengths = cut_sequence(grains * multiple, segments, multiple=multiple, cost=lambda start, stop: stop - start)
    assert max(lengths) - min(lengths) <= multiple
    assert sorted(lengths, reverse=True) == list(even_cut(grains * multiple, segments, multiple))


@pytest.mark.parametrize("segments", [2, 16, 64])
def test_a_million_tokens_are_cut_by_few_looks_at_costs(segments):
    cost, multiple, looks = segment_cost(SEVEN_B), 8, 0

    def counted(start, stop):
        nonlocal looks
        looks += 1
        return cost(start, stop)

    lengths = cut_sequence(1_000_000, segments, multiple=multiple, cost=counted)
    # Each of the cost's bits is found by one search, of log2(n) looks, for the end of each segment.
    assert looks <= 64 * segments * (math.log2(1_000_000 / multiple) + 3)
    assert list(lengths) == sorted(lengths, reverse=True)
    # No segment is over an equal share by more than the last grain's cost.
    share = cost(0, 1_000_000) / segments
    assert costliest(lengths, cost) <= share + cost(1_000_000 - multiple, 1_000_000)
    assert min(cost(*segment) for segment in ends(lengths)) > 0.99 * share


def test_sequences_too_short_for_their_segments_are_refused():
    for cut in (lambda: even_cut(24, 4, 8), lambda: cut_sequence(24, 4, multiple=8, cost=seen_keys)):
        with pytest.raises(ConfigError, match=r"24 tokens .*pipeline.segments = 4.* multiple of 8 .*3 or fewer"):
            cut()


@pytest.mark.parametrize(
    ("lengths", "problem"),
    [((8, 8), "2 lengths, but pipeline.segments is 3"), ((8, 8, 4), "segment of 4"), ((8, 8, 0), "segment of 0")],
)
def test_wrong_lengths_are_refused(lengths, problem):
    with pytest.raises(ConfigError, match=problem):
        check_lengths(lengths, segments=3, multiple=8)


def test_lengths_of_another_sum_are_refused():
    check_lengths((16, 8), length=24, segments=2, multiple=8)
    with pytest.raises(ConfigError, match="adds up to 24, but sequences have 32"):
        check_lengths((16, 8), length=32, segments=2, multiple=8)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_no_other_stages_have_a_cheaper_costliest_one(costs, stages, first, last):
    stages = min(stages, len(costs))

    def load(counts):
        stage_costs = [sum(costs[start:stop]) for start, stop in ends(counts)]
        stage_costs[0] += first
        stage_costs[-1] += last
        return max(stage_costs)

    counts = balance_stages(costs, stages, first=first, last=last)
    assert len(counts) == stages
    assert min(counts) >= 1
    assert sum(counts) == len(costs)
    assert load(counts) == min(load(parts) for parts in every_cut(len(costs), stages))


def test_a_large_head_makes_room_on_the_last_stage():
    counts = balance_stages([1.0] * 16, 4, last=3.0)
    assert counts[-1] == 2
    assert max(counts) == 5
    assert balance_stages([1.0] * 8, 4) == (2, 2, 2, 2)
    with pytest.raises(ConfigError, match=r"4 layers .*pipeline.stages = 5"):
        balance_stages([1.0] * 4, 5)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_seen_keys_are_counted_one_by_one(window):
    for start in range(8):
        for stop in range(start, 9):
            seen = sum(min(position + 1, window or 9) for position in range(start, stop))
            assert seen_keys(start, stop, window) == seen


UNITS = (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)


def test_units_of_all_stages_and_segments_add_up_to_the_model():
    layers = (*[LayerSizes.decoder(8, 8, 4, 24)] * 3, *[LayerSizes.decoder(8, 8, 8, 16, gated=False, window=5)] * 2)
    sizes, counts, lengths = ModelSizes(layers, head=8 * 100), (2, 1, 2), (7, 5, 4)
    flops = unit_flops(sizes, counts, lengths)

    def total(op):
        return sum(flops(Action(op, stage, 0, segment)) for stage in range(3) for segment in range(3))

    head = sizes.head_flops(16)
    sequence_flops = segment_flops(sizes)(0, 16)
    assert sum(sizes.layer_flops(16)) + head == sequence_flops
    assert total(Op.FORWARD) == sequence_flops + 2 * head
    assert total(Op.FORWARD) + total(Op.BACKWARD) == 3 * sequence_flops
    assert total(Op.INPUT_GRADIENT) + total(Op.WEIGHT_GRADIENT) == total(Op.BACKWARD)
    kept = kept_bytes(sizes, counts, lengths, rows=3)
    per_token = 2 * 3 * sum(layer.kept for layer in layers)
    assert sum(kept(Action(Op.FORWARD, stage, 0, s)) for stage in range(3) for s in range(3)) == 16 * per_token


@pytest.mark.parametrize(("backward_ratio", "head_ranks"), [(2, 0), (3, 0), (2, 3)])
def test_units_of_a_frozen_model_compute_no_gradients_of_weights(backward_ratio, head_ranks):
    layers = (*[LayerSizes.decoder(8, 8, 4, 24)] * 2, LayerSizes.decoder(8, 8, 8, 16, gated=False, window=5))
    options = {"backward_ratio": backward_ratio, "head_ranks": head_ranks}
    trained, frozen = (
        unit_flops(ModelSizes(layers, 8 * 100, is_frozen), (1, 1, 1), (7, 5), **options) for is_frozen in (False, True)
    )
    for stage, segment in ((stage, segment) for stage in range(3) for segment in range(2)):
        cost = {op: (trained(Action(op, stage, 0, segment)), frozen(Action(op, stage, 0, segment))) for op in UNITS}
        weights = cost[Op.WEIGHT_GRADIENT][0]
        assert cost[Op.WEIGHT_GRADIENT][1] == 0
        assert cost[Op.BACKWARD][1] == cost[Op.INPUT_GRADIENT][1] == cost[Op.BACKWARD][0] - weights
        head = 2 * 8 * 100 * (7, 5)[segment]
        has_head = stage == 2 and not head_ranks
        assert cost[Op.FORWARD][0] - cost[Op.FORWARD][1] == (head if has_head else 0)
        if head_ranks:
            action = Action(Op.HEAD_BACKWARD, stage, 0, segment)
            assert trained(action) == 2 * frozen(action) == 2 * head / head_ranks


def test_measured_times_are_explained_by_what_made_them():
    measured = MeasuredCut()
    assert not measured.is_ready
    weights = (3e-6, 5e-9, 2e-3)
    for lengths in ((1024, 1024, 1024, 1024), (1400, 1100, 900, 696)):
        seconds = [
            weights[0] * (stop - start) + weights[1] * seen_keys(start, stop) + weights[2]
            for start, stop in ends(lengths)
        ]
        measured.add(lengths, seconds)
    assert measured.is_ready
    cost = measured.cost()
    assert cost(0, 1000) == pytest.approx(3e-3 + 5e-9 * 500500 + 2e-3, rel=1e-9)
    assert cost(4000, 4096) == pytest.approx(3e-6 * 96 + 5e-9 * seen_keys(4000, 4096) + 2e-3, rel=1e-9)


@given(
    st.lists(st.floats(1e-4, 1e-1), min_size=3, max_size=3),
    st.lists(st.floats(0.8, 1.25), min_size=8, max_size=8),
)
def test_noisy_times_give_a_usable_cost(weights, noise):
    measured = MeasuredCut()
    for lengths, factors in (((64,) * 4, noise[:4]), ((90, 70, 60, 36), noise[4:])):
        units = [weights[0] * (b - a) + weights[1] * seen_keys(a, b) + weights[2] for a, b in ends(lengths)]
        measured.add(lengths, [unit * factor for unit, factor in zip(units, factors, strict=True)])
    cost = measured.cost()
    assert all(0 < cost(0, stop) <= cost(0, stop + 1) for stop in range(1, 300))
    assert sum(cut_sequence(512, 4, multiple=4, cost=cost)) == 512


def test_one_even_cut_tells_tokens_from_what_they_see():
    measured = MeasuredCut()
    # Equal lengths can't tell tokens from overhead; the one that also explains other lengths is taken.
    measured.add((100,) * 4, [1e-3 * 100 + 1e-5 * seen_keys(100 * i, 100 * i + 100) for i in range(4)])
    assert measured.cost()(0, 50) == pytest.approx(1e-3 * 50 + 1e-5 * seen_keys(0, 50))


def test_a_flat_machine_makes_segments_of_equal_length():
    measured = MeasuredCut()
    measured.add((700, 500, 400, 300), [0.7, 0.5, 0.4, 0.3])
    assert cut_sequence(1900, 4, cost=measured.cost()) == (475, 475, 475, 475)


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 131,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=8),
    "qwen3": lambda: Qwen3Config(**GROUPED, head_dim=24),
    "gemma2": lambda: Gemma2Config(**GROUPED, head_dim=24, sliding_window=8),
    "gemma3": lambda: Gemma3TextConfig(**GROUPED, head_dim=24, sliding_window=8),
    "gpt2": lambda: GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=131, bos_token_id=0, eos_token_id=0),
    "gpt_neox": lambda: GPTNeoXConfig(**SMALL),
    "opt": lambda: OPTConfig(**{**SMALL, "ffn_dim": 96}, word_embed_proj_dim=64),
    "mixtral": lambda: MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: GptOssConfig(**GROUPED, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: Qwen2MoeConfig(**GROUPED, **EXPERTS, shared_expert_intermediate_size=48),
    "qwen3_moe": lambda: Qwen3MoeConfig(**GROUPED, **EXPERTS),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, **LATENT, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, moe_intermediate_size=32, first_k_dense_replace=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_what_the_model_really_multiplies(name):
    config, length = CONFIGS[name](), 32
    sizes = model_sizes(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None])
    # This kind of attention multiplies all pairs, those that are masked too.
    squares = sum(2 * (layer.query + layer.value) * length * length for layer in sizes.layers)
    projections = sum(layer.projection_flops(0, length) for layer in sizes.layers)
    assert counter.get_total_flops() == projections + squares + sizes.head_flops(length)


def test_layers_are_as_in_the_formula_and_windows_are_each_layers_own():
    assert model_sizes(CONFIGS["llama"]()).layers == (LayerSizes.decoder(64, 64, 32, 96),) * 3
    assert [layer.window for layer in model_sizes(CONFIGS["gemma2"]()).layers] == [8, None, 8]
    assert [layer.window for layer in model_sizes(CONFIGS["mistral"]()).layers] == [8, 8, 8]
    assert model_sizes(CONFIGS["gpt2"]()).layers[0].weights == 12 * 64 * 64
    # Where num_hidden_layers is the encoder's number, the layers are those that a pipeline cuts.
    decoder = BartConfig(d_model=64, encoder_layers=2, decoder_layers=3, decoder_attention_heads=4, vocab_size=67)
    assert len(model_sizes(decoder, BartForCausalLM).layers) == draw_outline(BartForCausalLM, decoder).count == 3


def test_a_token_pays_for_its_own_experts_only():
    one, two = (
        model_sizes(MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=count)).layers[0]
        for count in (1, 2)
    )
    assert two.weights - one.weights == 3 * 64 * 96
    # The gate and the projection up are one weight here, with one input.
    assert two.kept - one.kept == 2 * 64 + 3 * 96


def test_experts_whose_use_is_unknown_are_refused(monkeypatch):
    monkeypatch.setattr("cuboid.models.stages.model_costs._EXPERTS_OF_TOKEN", ("a_name_that_no_config_has",))
    with pytest.raises(UnsupportedModelError, match=r"experts.*'mixtral'.*\"stage_balance\": \"layers\""):
        model_sizes(CONFIGS["mixtral"]())


def test_what_the_head_is_worth():
    sizes = ModelSizes((LayerSizes(100, 0, 0),) * 4, head=150)
    share = HeadShare.of(sizes, (2, 2), 10)
    assert share.layers == 1.5
    assert share.of_stage == 150 / 350
    assert share.excess == pytest.approx(350 / 275 - 1)
    # A stage of layers may be the costliest one.
    assert HeadShare.of(sizes, (3, 1), 10).excess == pytest.approx(300 / 275 - 1)
