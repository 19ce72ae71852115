"""``generate`` with a key/value cache on a mesh: the tokens of plain transformers, from caches of ranks' own heads."""

import copy
import logging
from collections import Counter

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig, StaticCache
from transformers.generation import BaseStreamer, LogitsProcessor, LogitsProcessorList

import cuboid
from comparing import mesh_section
from conftest import TIMEOUT_S
from cuboid.distributed.topology import MeshShape
from cuboid.models.batch.rank_cache import COMPARED, RankCache
from cuboid.models.certification.float64 import KeepFloat64, precision
from cuboid.models.certification.mesh_certificates import mesh_verdict
from cuboid.verify import SmallModel
from threaded import Threaded

SIZES = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
TYPES = {
    "llama": {"intermediate_size": 96, "num_key_value_heads": 2},
    "qwen3": {"intermediate_size": 96, "num_key_value_heads": 4, "head_dim": 12},
    # A window that ends inside the prompt.
    "gemma2": {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 6},
    "gpt2": {"n_positions": 40},
}
PROMPT, NEW = 11, 9


def whole_model(architecture, **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **SIZES, **TYPES[architecture], **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


def prompts(rows=3):
    """Ids, and a mask with padding on the left of the first row."""
    ids = torch.randint(1, 61, (rows, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.sample(2, ci=2)
@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2", "2x1x1", "2x2x2"])
@pytest.mark.parametrize("architecture", TYPES)
def test_a_mesh_generates_what_plain_transformers_does(architecture, mesh):
    model = whole_model(architecture)
    threaded, shape = Threaded(model, mesh), MeshShape.parse(mesh)
    limits = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    kinds = [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}]
    for options in kinds if architecture in ("llama", "gemma2") else kinds[:1]:
        batch = prompts(1 if "prompt_lookup_num_tokens" in options else 3)
        # Plain transformers would compute the softmax of a row that sees nothing in float32, where it is NaN.
        with KeepFloat64():
            expected = model.generate(**batch, **limits, **options)

        def step(on_rank, batch=batch, options=options):
            return on_rank.generate(**batch, **limits, **options, return_dict_in_generate=True)

        for output in threaded.run(step):
            assert torch.equal(output.sequences, expected), options
            if not options:
                heads = getattr(model.config, "num_key_value_heads", 4)
                layer = output.past_key_values.layers[-1]
                assert output.past_key_values.get_seq_length() == PROMPT + NEW - 1
                assert layer.keys.shape[:2] == (-(-3 // shape.batch), max(1, heads // (shape.sequence * shape.hidden)))


def generated_by(model, ids, **options):
    try:
        return model.generate(ids, max_new_tokens=3, do_sample=False, **options)
    except cuboid.CuboidError as error:
        return str(error)


def test_what_has_no_rule_is_refused_by_name_and_other_models_run_without_a_cache(caplog):
    model, ids = whole_model("llama"), prompts()["input_ids"]
    threaded = Threaded(model, "1x2x1")
    filled = DynamicCache()
    filled.update(torch.ones(3, 2, 4, 12), torch.ones(3, 2, 4, 12), 0)
    for options, message in [
        ({"past_key_values": filled}, "past_key_values: a DynamicCache with other tokens in it has no rule on a mesh"),
        ({"past_key_values": StaticCache(model.config, 32)}, "past_key_values: a StaticCache has no rule on a mesh"),
        ({"cache_implementation": "static"}, "cache_implementation='static' has no rule on a mesh"),
        ({"inputs_embeds": torch.ones(3, 4, 48)}, "generate(inputs_embeds=…) has no rule on a sharded model"),
        ({"max_time": 10.0}, "max_time: each rank has its own clock"),
        ({"generation_config": GenerationConfig(max_time=10.0)}, "max_time: each rank has its own clock"),
    ]:
        for text in threaded.run(lambda rank, options=options: generated_by(rank, ids, **options)):
            assert text.startswith(message)
    with caplog.at_level(logging.WARNING, "cuboid"):
        for tokens in threaded.run(lambda rank: generated_by(rank.train(), ids, use_cache=True)):
            assert torch.equal(tokens, generated_by(model, ids))
    assert [record.getMessage() for record in caplog.records] == [
        "generate(use_cache=True): there is none in training mode; every step runs all tokens"
    ]
    for text in threaded.run(lambda rank: generated_by(rank.train(), ids, past_key_values=DynamicCache())):
        assert text.startswith("past_key_values has no rule for this LlamaForCausalLM on a mesh: there is none in")


@pytest.mark.sample(1, ci=2)
@pytest.mark.parametrize("architecture", sorted(COMPARED))
def test_every_type_that_has_a_cache_has_plain_transformers_logits(architecture):
    """A prompt that crosses windows, with padding on the left, in models with all kinds of layers that a type has."""
    model = SmallModel(architecture)._model().double().eval()
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module.config, "_experts_implementation"):
            module.config._experts_implementation = "eager"
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    limits = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    batch = {name: x.clamp(max=58) for name, x in prompts().items()}
    with KeepFloat64():
        expected = model.generate(**batch, **limits)
    threaded = Threaded(model, "1x2x2", mesh_verdict(type(model), model.config))
    for output in threaded.run(lambda on_rank: on_rank.generate(**batch, **limits)):
        assert torch.equal(output.sequences, expected.sequences)
        assert isinstance(output.past_key_values, RankCache)
        for logits, wanted in zip(output.logits, expected.logits, strict=True):
            torch.testing.assert_close(logits, wanted, rtol=1e-9, atol=1e-9)


def sent_of_a_step(model, ids):
    """Messages of one more token, and the bytes of the largest one."""
    counter, counts = cuboid.mesh_of(model).comm_counter, []
    for new in (3, 4):
        counter.reset()
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        counts.append(Counter())
        for _, _, counted in counter._collectives:
            counts[-1] += counted
    more = counts[1] - counts[0]
    return more.total(), max(nbytes for _, nbytes in more)


@pytest.mark.parametrize(
    ("architecture", "mesh", "rows", "of_a_layer", "others"),
    [
        # After o and down, with the embedding, the logits, and the check of the micro-batch.
        ("llama", "1x2x1", 1, 2, 3),
        # After q, k and v, before o, after gate and up, before down; the logits, the check. Norms' statistics travel
        # with what follows them.
        ("llama", "1x1x2", 1, 4, 2),
        ("gpt2", "1x1x2", 1, 4, 2),
        # After each product, as with the embedding and the logits; the check. All ranks have the only row.
        ("llama", "2x1x1", 1, 4, 3),
        # Before each product too. With the embedding; the head and the logits, each twice.
        ("llama", "2x1x1", 2, 8, 6),
        # After each product, and before o and down. The logits are gathered over `sequence`.
        ("llama", "2x2x2", 1, 6, 4),
        ("gpt2", "2x2x2", 1, 6, 5),
    ],
)
def test_a_step_sends_a_few_short_messages_and_no_weight(architecture, mesh, rows, of_a_layer, others):
    ids = prompts(rows)["input_ids"].clamp(min=1)
    for count, largest in Threaded(whole_model(architecture), mesh).run(lambda rank: sent_of_a_step(rank, ids)):
        assert count == 2 * of_a_layer + others
        # From four ranks 96 features of the token, and of the weight and bias of the norm in front, and its statistics.
        assert largest <= 4 * 3 * (96 + 2) * 8


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_statistics_of_norms_travel_in_16_bits(architecture):
    model = whole_model(architecture)
    rounded = copy.deepcopy(model).bfloat16()
    options = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    plain = rounded.generate(**prompts(), **options).logits[1]
    expected = copy.deepcopy(rounded).double().generate(**prompts(), **options).logits[1]
    for output in Threaded(rounded, "1x1x2").run(lambda rank: rank.generate(**prompts(), **options)):
        assert (output.logits[1] - expected).norm() < 2 * (plain - expected).norm()


def other_weights(model):
    """An elementwise change, which is the same for a shard as for the whole."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            changed = parameter.sign() * parameter.abs().sqrt()
            # Of a tensor itself, by ``data``, and another tensor in its place.
            if number % 3 == 0:
                parameter.copy_(changed)
            elif number % 3 == 1:
                parameter.data.copy_(changed)
            else:
                parameter.data = changed


class ChangesNorms(LogitsProcessor):
    """Changes the norms while tokens are generated."""

    def __init__(self, model):
        self.norms = [x for name, x in model.named_parameters() if "norm" in name]

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == PROMPT + 3:
            for number, parameter in enumerate(self.norms):
                # By ``data``, nothing counts the change.
                values = parameter.data if number % 2 else parameter
                values.mul_(torch.linspace(-1, 2, parameter.numel()).sum() / parameter.numel() + 1)
        return scores


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", ["1x2x1", "2x1x2"])
def test_weights_that_change_between_calls_and_in_one(mesh):
    model, batch = whole_model("llama"), prompts()
    threaded = Threaded(model, mesh)
    limits = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "output_logits": True}

    def logits(either):
        runs = [{}, {"logits_processor": LogitsProcessorList([ChangesNorms(either)])}, {}]
        outputs = []
        for options in runs:
            outputs.append(either.generate(**batch, **limits, **options, return_dict_in_generate=True).logits)
            other_weights(either)
        return torch.stack([torch.stack(output) for output in outputs])

    with KeepFloat64():
        expected = logits(model)
    assert len(expected.flatten(1).unique(dim=0)) == 3
    for rank_logits in threaded.run(logits):
        torch.testing.assert_close(rank_logits, expected, rtol=1e-9, atol=1e-9)


def two_turns(model, make_cache):
    """What a conversation has after a second prompt, with a cache of the script's own."""
    cache, ids = make_cache(model), prompts(2)["input_ids"].clamp(min=1)
    for new in (0, 3):
        ids = torch.cat([ids, torch.full((2, new), 5)], 1)
        mask = torch.ones_like(ids)
        limits = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
        ids = model.generate(ids, attention_mask=mask, past_key_values=cache, **limits)
    return ids, cache.get_seq_length()


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("has_config", [False, True])
def test_a_cache_of_the_scripts_own_is_filled_and_goes_on(has_config):
    model = whole_model("gemma2")

    def make_cache(either):
        return DynamicCache(config=either.config) if has_config else DynamicCache()

    with KeepFloat64():
        tokens, length = two_turns(model, make_cache)
    for rank_tokens, rank_length in Threaded(model, "2x2x1").run(lambda rank: two_turns(rank, make_cache)):
        assert torch.equal(rank_tokens, tokens)
        assert rank_length == length == tokens.shape[1] - 1


def test_assistants_and_prompts_in_chunks():
    model, batch = whole_model("llama"), {"input_ids": prompts(1)["input_ids"].clamp(min=1)}
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    limits = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    threaded = Threaded(model, "1x2x1")
    for options in ({"assistant_model": assistant}, {"prefill_chunk_size": 4}):
        with KeepFloat64():
            expected = model.generate(**batch, **limits, **options)
        # Ranks are threads, so that each needs an assistant of its own.
        for tokens in threaded.run(
            lambda rank, options=options: rank.generate(**batch, **limits, **copy.deepcopy(options))
        ):
            assert torch.equal(tokens, expected)


def test_log_probabilities_are_those_of_training():
    model, batch = whole_model("qwen3"), prompts()
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    threaded = Threaded(model, "2x2x1")

    def both(rank):
        output = rank.generate(**batch, **options)
        mask = torch.cat([batch["attention_mask"], torch.ones(3, NEW, dtype=torch.int64)], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        trained = rank.train()(input_ids=output.sequences, attention_mask=mask, position_ids=positions, use_cache=False)
        generated = torch.stack(output.logits, 1).log_softmax(-1)
        return generated, trained.logits[:, PROMPT - 1 : -1].log_softmax(-1).detach()

    for generated, trained in threaded.run(both):
        torch.testing.assert_close(generated, trained, rtol=1e-9, atol=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_encoder_decoders_run_whole_in_each_step(name):
    model = SmallModel(name)._model().double().eval()
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    threaded, batch = Threaded(model, "1x2x2", mesh_verdict(type(model), model.config)), prompts(2)
    for options in ({}, {"num_beams": 2}):
        limits = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **options}
        with KeepFloat64():
            expected = model.generate(**batch, **limits)
        for tokens in threaded.run(lambda rank, limits=limits: rank.generate(**batch, **limits)):
            assert torch.equal(tokens, expected)


class Listener(BaseStreamer):
    """Keeps the tokens that it is given."""

    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        pass


def sampled(start, mesh):
    """Sampled and streamed tokens, with scores; ranks of a mesh have other seeds."""
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64).eval()
    if mesh is not None:
        model = cuboid.shard(model, {"tensor_parallel": mesh_section(mesh)})
        torch.manual_seed(3 + cuboid.mesh_of(model).rank)
    else:
        torch.manual_seed(3)
    listener, ids = Listener(), prompts(1)["input_ids"].clamp(min=1)
    options = {"do_sample": True, "top_k": 20, "max_new_tokens": NEW, "min_new_tokens": NEW}
    with precision(keep_float64=True):
        output = model.generate(ids, **options, streamer=listener, return_dict_in_generate=True, output_scores=True)
    return output.sequences, listener.tokens, torch.stack(output.scores)


def test_sampled_tokens_are_plain_transformers_with_the_first_ranks_seed(pool, tmp_path):
    whole_model("llama").save_pretrained(tmp_path)
    sequences, streamed, scores = sampled(tmp_path, None)
    for tokens, heard, rank_scores in pool.run(2, sampled, tmp_path, "1x1x2", timeout_s=TIMEOUT_S):
        assert torch.equal(tokens, sequences)
        assert heard == streamed == sequences[0].tolist()
        torch.testing.assert_close(rank_scores, scores, rtol=1e-9, atol=1e-9)
