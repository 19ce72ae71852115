"""What models draw in training by code of their own: dropouts that aren't modules, and layers dropped at random."""

import random

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration, OPTConfig, OPTForCausalLM

import cuboid
from cuboid.errors import CuboidError
from cuboid.models.sharded.random_code import libraries_drawn_from

VOCABULARY = 67
BART = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    **{"max_position_embeddings": 64, "dropout": 0.5, "attention_dropout": 0.0, "activation_dropout": 0.0},
}
OPT = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_hidden_layers": 6},
    **{"num_attention_heads": 4, "max_position_embeddings": 64, "dropout": 0.0},
}


def built(cls, config):
    torch.manual_seed(0)
    return cls._from_config(config, dtype=torch.float64).train()


def on_mesh(cls, config, axes):
    return cuboid.shard(built(cls, config), {"tensor_parallel": {"mode": "3d_tensor", "mesh": axes}})


def micro_batch():
    ids = torch.randint(4, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


class RecordedDropout:
    """In place of ``nn.functional.dropout``: keeps the masks that it draws, or applies given ones."""

    def __init__(self, replayed=None):
        self.plain, self.masks, self.replayed = nn.functional.dropout, [], replayed and list(replayed)

    def __enter__(self):
        nn.functional.dropout = self
        return self

    def __exit__(self, *_):
        nn.functional.dropout = self.plain

    def __call__(self, x, p=0.5, training=True, inplace=False):
        if not p or not training:
            return x
        if self.replayed is None:
            self.masks.append(self.plain(torch.ones_like(x), p, training))
        else:
            self.masks.append(self.replayed.pop(0))
        return x * self.masks[-1]


def bart_masks(axes, seeds_differ, checkpointing=False):
    """Masks, loss and gradients of one step."""
    rank = torch.distributed.get_rank()
    model = on_mesh(BartForConditionalGeneration, BartConfig(**BART), axes)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # The recorder below is put in place of torch's function.
    model.cuboid.state.made.code = None
    torch.manual_seed(7 + (rank if seeds_differ else 0))
    with RecordedDropout() as dropout:
        loss = model(**micro_batch()).loss
        count = len(dropout.masks)
        loss.backward()
    return dropout.masks, count, loss.item(), cuboid.full_gradients(model)


def put_together(parts, dim):
    """Whole masks. What all ranks have whole must be the same on all of them, and parts independent."""
    wholes = []
    for masks in zip(*parts, strict=True):
        if dim != 0 and masks[0].shape[-1] == BART["d_model"] and masks[0].shape[1] == 16:
            assert torch.equal(*masks)
            wholes.append(masks[0])
        else:
            assert (masks[0] == masks[1]).double().mean().item() == pytest.approx(0.5, abs=0.08)
            wholes.append(torch.cat(masks, dim))
    return wholes


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("axis", "dim", "checkpointing"), [("batch", 0, False), ("sequence", 1, True)])
def test_masks_of_functional_dropout_make_one_mask_with_the_gradients_of_the_plain_model(
    pool, axis, dim, checkpointing
):
    results = pool.run(2, bart_masks, {axis: 2}, False, checkpointing)
    (first, count, loss, gradients), (second, *_) = results
    # Recomputation draws the masks of the forward again.
    for masks in (first, second) if checkpointing else ():
        again = [mask for mask in masks[count:] if any(torch.equal(mask, one) for one in masks[:count])]
        assert len(masks) > count
        assert len(again) == len(masks) - count
    wholes = put_together((first[:count], second[:count]), dim)
    plain = built(BartForConditionalGeneration, BartConfig(**BART))
    with RecordedDropout(wholes):
        expected = plain(**micro_batch()).loss
        expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-10)


def seeds_that_differ(axes):
    rank = torch.distributed.get_rank()
    model = on_mesh(BartForConditionalGeneration, BartConfig(**BART), axes)
    torch.manual_seed(7 + rank)
    try:
        model(**micro_batch())
    except CuboidError as error:
        return str(error)
    return None


def test_seeds_that_differ_are_refused_only_where_ranks_must_draw_alike(pool):
    assert pool.run(2, seeds_that_differ, {"batch": 2}) == [None, None]
    # Encoder's and decoder's embeddings are whole on both.
    for text in pool.run(2, seeds_that_differ, {"hidden": 2}):
        assert "rank 0's seed is 7 and rank 1's 8" in text


def opt_losses(axes, seeds_differ, layerdrop=0.5):
    rank = torch.distributed.get_rank()
    model = on_mesh(OPTForCausalLM, OPTConfig(**OPT, layerdrop=layerdrop), axes)
    torch.manual_seed(7 + (rank if seeds_differ else 0))
    losses = []
    for _ in range(3):
        loss = model(**micro_batch(), use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    return losses


def test_layers_are_dropped_alike_on_all_ranks_whatever_their_seeds(pool):
    plain = built(OPTForCausalLM, OPTConfig(**OPT, layerdrop=0.5))
    torch.manual_seed(7)
    expected = [plain(**micro_batch(), use_cache=False).loss.item() for _ in range(3)]
    assert len(set(expected)) > 1
    for losses in pool.run(2, opt_losses, {"sequence": 2}, False):
        assert losses == pytest.approx(expected, rel=1e-6)
    first, second = pool.run(2, opt_losses, {"batch": 2}, True)
    assert first == second
    assert len(set(first)) > 1


def test_seeds_that_differ_are_no_error_if_nothing_is_dropped(pool):
    first, second = pool.run(2, opt_losses, {"sequence": 2}, True, 0.0)
    assert first == second


# --- byte code -------------------------------------------------------------------------------------------------------


def scaled_noise(x):
    return x + torch.empty_like(x).normal_()


class Draws(nn.Module):
    """Draws in a function that it calls in a method."""

    def forward(self, x):
        return self.noisy(x)

    def noisy(self, x):
        return [scaled_noise(part) for part in x]


class DrawsOnTheHost(nn.Module):
    """Draws from Python's generator and numpy's."""

    def forward(self, x):
        return x if random.random() < 0.5 else x * np.random.uniform()


class CallsModules(nn.Module):
    """Has modules that draw, and draws nothing itself."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x).sum()


@pytest.mark.parametrize(
    ("cls", "libraries"),
    [
        (Draws, {"torch"}),
        (DrawsOnTheHost, {"random", "numpy"}),
        (CallsModules, set()),
        (nn.Dropout2d, {"torch"}),
        (nn.Linear, set()),
        (transformers.models.llama.modeling_llama.LlamaDecoderLayer, set()),
        (transformers.models.llama.modeling_llama.LlamaAttention, set()),
        (transformers.models.bart.modeling_bart.BartDecoderLayer, {"torch"}),
        (transformers.models.bloom.modeling_bloom.BloomMLP, {"torch"}),
        (transformers.models.beit.modeling_beit.BeitDropPath, {"torch"}),
        (transformers.models.wav2vec2.modeling_wav2vec2.Wav2Vec2Model, {"numpy"}),
    ],
)
def test_modules_that_draw_are_found_in_their_byte_code(cls, libraries):
    assert libraries_drawn_from(cls) == libraries
