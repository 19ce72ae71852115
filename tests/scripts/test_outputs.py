"""What scripts do with a forward's outputs: caches, gradients of hidden states, losses given to ``torch.autograd``."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
)

from cuboid import local_hook
from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.cross_entropy.incomplete_output import MissingOutputError
from threaded import Threaded

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": 0}
IDS = torch.randint(3, 61, (3, 11), generator=torch.Generator().manual_seed(1))
MESHES = ["1x2x1", "2x1x1", "1x1x2"]


def built(auto=AutoModelForCausalLM, architecture="llama", **options):
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, **options}
    model = auto.from_config(AutoConfig.for_model(architecture, **sizes), dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


def agree(model, mesh, step):
    """A step gives on each rank what it gives in plain transformers."""
    with KeepFloat64():
        expected = step(copy.deepcopy(model))
    for got in Threaded(model, mesh).run(step):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


# --- parts of a model that are called by themselves -----------------------------------------------------------------

PARTS = {
    "embed_tokens": lambda model, _: model.model.embed_tokens(IDS),
    "lm_head": lambda model, hidden: model.lm_head(hidden),
    "norm": lambda model, hidden: model.model.norm(hidden),
    "q_proj": lambda model, hidden: model.model.layers[0].self_attn.q_proj(hidden),
    "mlp": lambda model, hidden: model.model.layers[0].mlp(hidden),
    "layer": lambda model, hidden: model.model.layers[1](
        hidden, position_embeddings=model.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
    ),
}


def called_by_themselves(model):
    """What parts of a model say to whole hidden states, and to some of the shape of a rank's part."""
    said = {}
    for name, call in PARTS.items():
        for width in (32, 16):
            hidden = torch.ones(2, 8, width, dtype=torch.float64)
            with pytest.raises(UnsupportedModelError, match="of a sharded model was called by itself") as error:
                call(model, hidden)
            said[name, width] = str(error.value)
    seen = []
    model.model.norm.register_forward_hook(local_hook(lambda norm, args, output: seen.append(norm.forward(*args))))
    model(input_ids=IDS)
    assert len(seen) == 1
    return said


@pytest.mark.parametrize("mesh", MESHES)
def test_a_part_that_is_called_by_itself_raises_an_error(mesh):
    for said in Threaded(built(), mesh).run(called_by_themselves):
        assert said["norm", 32].startswith("a ShardedRMSNorm of a sharded model was called by itself")
        assert said["q_proj", 16].startswith("a ShardedLinear of")


@pytest.mark.parametrize(
    ("auto", "architecture", "options", "call"),
    [
        (AutoModelForSequenceClassification, "llama", {"num_labels": 3}, lambda model, hidden: model.score(hidden)),
        (
            AutoModelForCausalLM,
            "bloom",
            {"n_layer": 2},
            lambda model, x: model.transformer.h[0].mlp(x, x),
        ),
        (AutoModelForCausalLM, "qwen3", {"head_dim": 8}, lambda model, x: model.model.layers[0].self_attn.q_norm(x)),
        (AutoModelForCausalLM, "gpt2", {"n_positions": 16}, lambda model, hidden: model.transformer.h[0].ln_1(hidden)),
    ],
    ids=["label head", "whole block", "norm of heads", "layer norm"],
)
def test_other_kinds_of_parts_do_too(auto, architecture, options, call):
    def step(model):
        with pytest.raises(UnsupportedModelError, match="of a sharded model was called by itself"):
            call(model, torch.ones(2, 8, 32, dtype=torch.float64))

    Threaded(built(auto, architecture, **options), "1x2x1").run(step)


# --- caches ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def decoded_by_hand(model, cache=None, masked=False):
    """Logits of four steps, as scripts without ``generate`` make them."""
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    ids, steps = IDS, []
    for _ in range(4):
        masks = {"attention_mask": mask} if masked else {}
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, **masks)
        cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        steps.append(output.logits[:, -1])
    return torch.stack(steps)


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize("mesh", [*MESHES, "2x2x2"])
def test_a_loop_of_ones_own_decodes_with_a_cache(mesh):
    model = built()
    agree(model, mesh, decoded_by_hand)
    agree(model, mesh, lambda rank: decoded_by_hand(rank, DynamicCache(config=rank.config), masked=True))


@torch.no_grad()
def continued_twice(model):
    """A loss of what follows, a copy of the cache for another continuation, and ``generate`` from it."""
    cache = model(input_ids=IDS[:, :6], use_cache=True).past_key_values
    other = copy.deepcopy(cache)
    labelled = model(input_ids=IDS[:, 6:], labels=IDS[:, 6:], past_key_values=cache)
    logits = model(input_ids=IDS[:, 7:], past_key_values=copy.deepcopy(other)).logits
    ids = model.generate(IDS, past_key_values=other, max_new_tokens=3, do_sample=False)
    return labelled.loss, labelled.logits, logits, ids.double()


def test_a_cache_of_a_forward_is_reused():
    mesh = "2x2x1"
    agree(built(), mesh, continued_twice)
    base = built(AutoModel)

    @torch.no_grad()
    def states(model):
        cache = model(input_ids=IDS[:, :6], use_cache=True).past_key_values
        return model(input_ids=IDS[:, 6:], past_key_values=cache).last_hidden_state

    agree(base, mesh, states)


def bart(mesh):
    config = BartConfig(
        vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    verdict = MeshVerdict(inputs="only ids", splits_late=True)
    return Threaded(BartForConditionalGeneration(config).double(), mesh, verdict)


def test_a_cache_that_was_not_kept_is_an_error_where_it_is_read():
    def read(model):
        more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
        for labels in ({}, {"labels": IDS}):
            for training in (True, False):
                output = model.train(training)(input_ids=IDS, **({} if labels else more), **labels)
                assert getattr(output, "past_key_values", None) is None
                assert "past_key_values" not in output
                with pytest.raises(MissingOutputError, match=r"past_key_values: .*use_cache=True makes one"):
                    output.past_key_values  # noqa: B018
                with pytest.raises(MissingOutputError, match="past_key_values: "):
                    output["past_key_values"]
        # Nothing is missing if none was wanted.
        assert model(input_ids=IDS, use_cache=False, **more).past_key_values is None

    Threaded(built(), "1x2x1").run(read)
    bart("1x2x1").run(read)
    base = Threaded(built(AutoModel), "1x2x1")
    with pytest.raises(MissingOutputError):
        base.run(lambda model: model(input_ids=IDS).past_key_values)
    # A head around it passes on what the base model has returned.
    labelled = Threaded(built(AutoModelForSequenceClassification, num_labels=3), "1x2x1")
    labelled.run(lambda model: model(input_ids=IDS).logits)


@pytest.mark.parametrize(
    ("context", "training", "cache", "said"),
    [
        (torch.enable_grad, False, None, "use_cache=True .*it has no gradients; call the model under torch.no_grad"),
        (torch.no_grad, True, None, "use_cache=True has no rule .* in training mode.*use_cache=False"),
        (torch.no_grad, False, "filled", "a DynamicCache with other tokens in it"),
    ],
)
def test_a_forward_without_a_cache_says_why(context, training, cache, said):
    model = built()
    filled = None if cache is None else model(input_ids=IDS).past_key_values

    def step(rank):
        with context():
            rank.train(training)(input_ids=IDS, use_cache=True, past_key_values=filled)

    with pytest.raises(UnsupportedModelError, match=said):
        Threaded(model, "1x2x1").run(step)


# --- gradients of hidden states --------------------------------------------------------------------------------------


def retained(states, loss):
    states.retain_grad()


GRADIENTS = {
    "retain_grad": retained,
    "a hook": lambda states, _: states.register_hook(lambda gradient: gradient * 2),
    "grad": lambda states, loss: torch.autograd.grad(loss + states.square().mean(), states),
    "inputs": lambda states, loss: loss.backward(inputs=[states]),
}


@pytest.mark.parametrize("way", GRADIENTS)
def test_a_gradient_from_which_later_layers_would_be_missing_is_refused(way):
    def step(model):
        output = model(input_ids=IDS, labels=IDS, output_hidden_states=True)
        GRADIENTS[way](output.hidden_states[1], output.loss)

    with pytest.raises(UnsupportedModelError, match=r"the gradient of an output's hidden_states: .*cuboid.local_hook"):
        Threaded(built(), "1x1x2").run(step)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_of_what_a_script_goes_on_from_are_whole(mesh):
    def step(model):
        logits = model(input_ids=IDS).logits
        hidden = model.base_model(input_ids=IDS).last_hidden_state
        hidden.retain_grad()
        (gradient,) = torch.autograd.grad(logits.square().mean(), logits, retain_graph=True)
        (logits.square().mean() + hidden.pow(3).mean()).backward()
        return gradient, hidden.grad

    agree(built(), mesh, step)


# --- torch.autograd itself -------------------------------------------------------------------------------------------


def penalty(model):
    return model(input_ids=IDS, labels=IDS).loss + sum(x.square().sum() for x in model.parameters())


PENALIZED = {
    "backward": lambda model: torch.autograd.backward(penalty(model)),
    "backward of several": lambda model: torch.autograd.backward([model(input_ids=IDS).logits.mean(), penalty(model)]),
    "grad": lambda model: torch.autograd.grad(penalty(model), list(model.parameters())),
}


@pytest.mark.parametrize("way", PENALIZED)
def test_a_penalty_of_shards_is_refused_however_it_is_differentiated(way):
    with pytest.raises(UnsupportedModelError, match=r"the loss is computed from .*cuboid.sum_over_shards"):
        Threaded(built(), "1x2x1").run(PENALIZED[way])


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_of_ones_own_are_differentiated_by_torchs_functions(mesh):
    def by_grad(model):
        output = model(input_ids=IDS, output_hidden_states=True)
        losses = output.logits.square().mean(), output.hidden_states[1].pow(3).mean()
        first = torch.autograd.grad(losses[0], list(model.parameters()), retain_graph=True)
        torch.autograd.backward(list(losses), [torch.tensor(0.5).double(), torch.tensor(2.0).double()])
        for parameter, gradient in zip(model.parameters(), first, strict=True):
            parameter.grad += gradient
        return nn.utils.get_total_norm([x.grad for x in model.parameters()])

    agree(built(), mesh, by_grad)
