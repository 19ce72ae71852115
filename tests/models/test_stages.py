"""Hugging Face models cut into pipeline stages: what is refused, and that the stages together are the whole model."""

import copy
import functools
import itertools
import weakref
from dataclasses import dataclass

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

import cuboid
from cuboid import Mesh, MeshShape
from cuboid.config.schema import PipelineConfig
from cuboid.errors import ConfigError, UnsupportedModelError
from cuboid.models.batch.local_batch import IGNORE_INDEX
from cuboid.models.certification.float64 import precision
from cuboid.models.cross_entropy.chunked import chunked_loss
from cuboid.models.cross_entropy.lm_head import Head
from cuboid.models.pipeline.staging_plan import plan_staging
from cuboid.models.stages.model_costs import model_sizes
from cuboid.models.stages.stage_cut import StageLayout, cut_stages, draw_outline, plan_stages, shared_parameters
from cuboid.tensor3d.layers.vocab_cross_entropy import shifted

VOCABULARY, LAYERS, BATCH, LENGTH = 67, 4, 2, 11
COMMON = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
NO_DROPOUT = ("dropout", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
#: By model type, what differs from LLAMA_LIKE; None takes a size out of it.
ARCHITECTURES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "final_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 5, "sliding_window_pattern": 2},
    "gpt2": {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64},
    "gpt_neox": {"tie_word_embeddings": True},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "mixtral": {"num_local_experts": 4},
    "falcon": {"head_dim": None},
    "phi": {},
    "stablelm": {},
    "bloom": {"n_layer": LAYERS, "n_head": 4},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 5},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "olmo2": {},
    "starcoder2": {},
    "glm4": {},
}


def config_of(architecture):
    sizes = {} if architecture == "gpt2" else LLAMA_LIKE
    options = {**COMMON, **sizes, **ARCHITECTURES[architecture]}
    config = transformers.AutoConfig.for_model(
        architecture, **{k: v for k, v in options.items() if k != "head_dim" or v}
    )
    for name in NO_DROPOUT:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    # The grouped kernel has no float64.
    config._experts_implementation = "eager"
    return config


def built(architecture):
    """A float64 model whose norms and biases aren't ones and zeros, and its outline."""
    torch.manual_seed(0)
    config = config_of(architecture)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model, draw_outline(type(model), config)


def batch():
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = shifted(ids, IGNORE_INDEX)
    labels[0, :3] = IGNORE_INDEX
    return ids, labels, torch.arange(LENGTH)[None]


@dataclass
class Outcome:
    hidden: torch.Tensor
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def run_whole(model, outline):
    ids, labels, _ = batch()
    seen = []
    base = model.get_submodule(outline.base)
    hook = base.register_forward_hook(lambda _, __, output: seen.append(output[0]))
    logits = model(input_ids=ids, use_cache=False).logits
    hook.remove()
    scale = 1 / int((labels != IGNORE_INDEX).sum())
    losses = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    (losses * scale).backward()
    return Outcome(seen[0].detach(), (losses * scale).detach(), gradients_of(model))


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def cut_copies(model, outline, counts):
    stages = []
    for stage in range(len(counts)):
        part = copy.deepcopy(model)
        cuts = StageLayout(counts, tuple(range(len(counts)))).cuts(stage)
        (chunk,) = cut_stages(part, outline, cuts)
        stages.append((part, cuts, chunk))
    return stages


def loss_of(model, outline, hidden, labels, scale, **options):
    return chunked_loss(Head(model, outline), hidden, labels, scale=scale, vocabulary=VOCABULARY, **options)


def run_stages(stages, outline, *, chunk_bytes=3 * BATCH * VOCABULARY * 4):
    """Whole sequences from stage to stage and back, with the loss in chunks of three positions."""
    ids, labels, positions = batch()
    received, sent = [], []
    for model, _, chunk in stages:
        leaf = sent[-1].detach().requires_grad_() if sent else None
        received.append(leaf)
        inputs = {"ids": ids} if leaf is None else {"hidden": leaf}
        sent.append(chunk.run(model, position_ids=positions, **inputs))
    scale = 1 / int((labels != IGNORE_INDEX).sum())
    loss, gradient = loss_of(stages[-1][0], outline, sent[-1], labels, scale, chunk_bytes=chunk_bytes)
    for leaf, output in zip(reversed(received), reversed(sent), strict=True):
        torch.autograd.backward(output, gradient)
        gradient = None if leaf is None else leaf.grad
    gradients = {}
    for model, _, _ in stages:
        for name, part in gradients_of(model).items():
            gradients[name] = gradients.get(name, 0) + part
    return Outcome(sent[-1].detach(), loss, gradients)


def assert_equal(cut, expected, tolerance):
    torch.testing.assert_close(cut.hidden, expected.hidden, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cut.loss, expected.loss, rtol=tolerance, atol=0, check_dtype=False)
    assert cut.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(cut.gradients[name], gradient, rtol=tolerance, atol=tolerance, msg=name)


# --- stages together are the model -------------------------------------------------------------------------------


@pytest.mark.sample(3, ci=3)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_stages_in_a_chain_compute_what_the_whole_model_computes(architecture):
    model, outline = built(architecture)
    with precision(keep_float64=True):
        expected = run_whole(model, outline)
        for counts in [(4,), (1, 3), (1, 2, 1)]:
            stages = cut_copies(model, outline, counts)
            for part, _, _ in stages:
                part.zero_grad()
            assert_equal(run_stages(stages, outline), expected, 1e-11)


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "opt"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(architecture, reentrant):
    model, outline = built(architecture)
    expected = run_whole(model, outline)
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    # Without the mode that keeps float64, which a recomputation in backward would be outside of.
    assert_equal(run_stages(cut_copies(model, outline, (2, 1, 1)), outline), expected, 1e-6)


@pytest.mark.sample(6)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_parameter_is_on_one_stage_but_for_tied_ones(architecture):
    model, outline = built(architecture)
    parameters = dict(model.named_parameters())
    stages = cut_copies(model, outline, (1, 2, 1))
    unsharded = [set(dict(part.named_parameters())) for part, _, _ in stages]
    shared = [shared_parameters(part, outline, cuts) for part, cuts, _ in stages]
    assert unsharded[0] | unsharded[1] | unsharded[2] == set(parameters)
    assert unsharded[0] & unsharded[1] == unsharded[1] & unsharded[2] == set()
    assert unsharded[0] & unsharded[2] == set(shared[0]) == set(shared[2])
    assert not shared[1]
    assert bool(shared[0]) == bool(outline.tied)
    for (part, _, _), names in zip(stages, shared, strict=True):
        assert all(part.get_parameter(name) is parameter for name, parameter in names.items())
        part.tie_weights()
    if outline.tied:
        last = stages[2][0]
        assert last.get_output_embeddings().weight is last.get_input_embeddings().weight


def test_absent_layers_cost_no_memory_and_the_input_is_freed():
    model, outline = built("llama")
    middle, _, chunk = cut_copies(model, outline, (1, 2, 1))[1]
    hidden = torch.randn(BATCH, LENGTH, 32, dtype=torch.float64)
    held = weakref.ref(hidden)
    chunk.run(middle, hidden=hidden, position_ids=batch()[2])
    del hidden
    assert held() is None
    assert not any(True for index in (0, 3) for _ in middle.model.layers[index].parameters())


def test_layers_keep_their_kind_of_attention():
    model, outline = built("gemma3_text")
    stages = cut_copies(model, outline, (1, 3))
    kinds = [layer.self_attn.layer_idx for layer in stages[1][0].model.layers[1:]]
    assert kinds == [1, 2, 3]
    windows = [layer.self_attn.sliding_window for layer in stages[1][0].model.layers[1:]]
    assert windows == [layer.self_attn.sliding_window for layer in model.model.layers[1:]]
    assert None in windows
    assert 5 in windows


# --- the head ----------------------------------------------------------------------------------------------------


def test_no_more_than_a_chunk_of_logits_exists(monkeypatch):
    model, outline = built("gemma2")
    sizes = []

    original = Head.logits

    def watched(self, hidden):
        logits = original(self, hidden)
        sizes.append(4 * logits.numel())
        return logits

    monkeypatch.setattr(Head, "logits", watched)
    hidden, labels = torch.randn(BATCH, LENGTH, 32, dtype=torch.float64), batch()[1]
    for limit in (1, BATCH * VOCABULARY * 4, 5 * BATCH * VOCABULARY * 4 + 3, 10**9):
        sizes.clear()
        loss_of(model, outline, hidden, labels, 1.0, chunk_bytes=limit)
        assert max(sizes) <= max(limit, BATCH * VOCABULARY * 4)
        assert sum(sizes) == BATCH * LENGTH * VOCABULARY * 4
    assert len(sizes) == 1


def test_positions_without_labels_give_zeros():
    model, outline = built("llama")
    hidden = torch.randn(BATCH, LENGTH, 32, dtype=torch.float64)
    labels = torch.full((BATCH, LENGTH), IGNORE_INDEX)
    loss, gradient = loss_of(model, outline, hidden, labels, 0.5)
    assert loss == 0
    assert not gradient.any()
    assert not model.lm_head.weight.grad.any()


def test_without_gradients_there_is_the_loss_only():
    model, outline = built("llama")
    hidden, labels = torch.randn(BATCH, LENGTH, 32, dtype=torch.float64), batch()[1]
    with torch.no_grad():
        loss, gradient = loss_of(model, outline, hidden, labels, torch.tensor(0.5), chunk_bytes=1)
    assert gradient is None
    assert model.lm_head.weight.grad is None
    torch.testing.assert_close(loss, loss_of(model, outline, hidden, labels, 0.5)[0])


def test_bfloat16_losses_are_added_up_in_float32():
    model, outline = built("llama")
    model = model.bfloat16()
    hidden, labels = torch.randn(BATCH, LENGTH, 32, dtype=torch.bfloat16), batch()[1]
    loss, gradient = loss_of(model, outline, hidden, labels, 1.0, chunk_bytes=1)
    assert (loss.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)


# --- refusals ----------------------------------------------------------------------------------------------------


def refusal(architecture, cls=None, **options):
    config = transformers.AutoConfig.for_model(architecture, **options)
    classes = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    with pytest.raises(UnsupportedModelError) as error:
        draw_outline(getattr(transformers, cls or classes[architecture]), config)
    return str(error.value)


def test_models_that_a_pipeline_cannot_cut_are_refused_with_the_reason():
    assert "encoder-decoder" in refusal("t5", "T5ForConditionalGeneration")
    assert "is_decoder=False" in refusal("bert")
    assert "no logits" in refusal("llama", "LlamaModel", **LLAMA_LIKE)
    assert "share a parameter" in refusal("zamba")
    assert "depends on the token ids" in refusal("gemma4_text")
    assert "belongs to ZayaModel itself" in refusal("zaya")
    assert "computes from the token ids" in refusal("roberta", is_decoder=True)
    assert "writes into the embeddings" in refusal("ctrl")
    assert "config.layerdrop" in refusal("opt", layerdrop=0.1)
    assert "config.decoder_layerdrop" in refusal("bart", decoder_layerdrop=0.1)
    assert "the model has no router_aux_loss_coef" in refusal("deepseek_v3", output_router_logits=True)
    assert "returns no router_logits" in refusal("doge", output_router_logits=True)


class DropsLayers(transformers.OPTForCausalLM):
    """Drops layers by a probability that no config has."""

    def __init__(self, config):
        super().__init__(config)
        self.model.decoder.layerdrop = 0.01


def test_layers_dropped_by_any_name_are_refused(monkeypatch):
    monkeypatch.setattr(transformers, "DropsLayers", DropsLayers, raising=False)
    assert "OPTDecoder drops whole layers at random in training" in refusal("opt", "DropsLayers")
    state = torch.get_rng_state()
    draw_outline(transformers.OPTForCausalLM, transformers.OPTConfig(dropout=0.1))
    assert torch.equal(torch.get_rng_state(), state)


def test_an_outline_leaves_the_config_as_it_was():
    config = config_of("llama")
    before = copy.deepcopy(config.to_dict()), config._attn_implementation
    draw_outline(transformers.LlamaForCausalLM, config)
    assert (config.to_dict(), config._attn_implementation) == before


def planned(counts_or_name, stages, architecture="llama"):
    config = config_of(architecture)
    outline = draw_outline(AutoModelForCausalLM._model_mapping[type(config)], config)
    sizes = functools.partial(model_sizes, config)
    pipeline = PipelineConfig(engine="seq1f1b", stages=stages, stage_balance=counts_or_name)
    return plan_stages(outline.count, sizes, pipeline)


def test_numbers_of_layers():
    assert planned("layers", 1) == (4,)
    assert planned("layers", 3) == (2, 1, 1)
    assert planned((1, 3), 2) == (1, 3)
    for stages, balance in itertools.product((1, 2, 4), ("layers", "flops")):
        counts = planned(balance, stages)
        assert (len(counts), sum(counts)) == (stages, LAYERS)
        assert min(counts) >= 1
    with pytest.raises(ConfigError, match=r"pipeline\.stages is 5, but the model has 4 layers"):
        planned("layers", 5)
    with pytest.raises(ConfigError, match=r"pipeline\.stage_balance is .*sum 4"):
        planned((2, 3), 2)


def test_a_head_that_the_other_stages_wait_for_is_told(caplog):
    def told(vocabulary, **pipeline):
        caplog.clear()
        config = config_of("llama")
        config.vocab_size, config._attn_implementation = vocabulary, "sdpa"
        settings = {"stages": 2, "segments": 1, **pipeline}
        parsed, _ = cuboid.split_config({"pipeline": {"engine": "seq1f1b", **settings}})
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
        plan_staging(model, parsed, Mesh(MeshShape(), pipe=2, rank=0, world_size=2))
        return caplog.text

    assert told(131) == ""
    assert " % of its stage; the costliest stage takes " in told(100_000)
    assert told(100_000, stage_balance="layers") == ""
