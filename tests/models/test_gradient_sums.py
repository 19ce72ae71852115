"""Gradients in bf16 of many units, micro-batches or chunks are no worse than those of plain training in bf16."""

import contextlib
from types import SimpleNamespace

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

import cuboid
from cuboid.models.cross_entropy.chunked import ChunkedCrossEntropy, chunked_loss
from cuboid.models.cross_entropy.lm_head import Head
from cuboid.models.pipeline.training_pipeline import Pipeline
from cuboid.optim.grad_buffer import GradientBuffer, float32_sums, gradient_of

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MICRO_BATCHES, SEGMENTS, LENGTH = 4, 16, 512


def model_of(dtype):
    """The same weights, which bf16 can have, in any dtype."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(dtype).train()


def batches():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SIZES["vocab_size"], (MICRO_BATCHES, 1, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def plain(dtype):
    model = model_of(dtype)
    for batch in batches():
        (model(**batch, use_cache=False).loss / MICRO_BATCHES).backward()
    return gradients_of(model)


def in_segments(*, sums):
    config = {"engine": "seq1f1b", "stages": 1, "segments": SEGMENTS, "certification": "verified"}
    model = cuboid.shard(model_of(torch.bfloat16), {"pipeline": config})
    pipeline = Pipeline(model, sums=sums)
    # The second step adds to the first one's gradients, as a script's own accumulation would.
    for half in (batches()[:2], batches()[2:]):
        pipeline.train(iter(half), len(half), gradient_scale=0.5)
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters())
    return gradients_of(model)


def gradients_of(model):
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


def error(gradients, exact):
    """Of all gradients together, in relation to their norm."""
    squares = sum((gradients[name] - gradient).pow(2).sum() for name, gradient in exact.items())
    return (squares / sum(gradient.pow(2).sum() for gradient in exact.values())).sqrt().item()


def test_a_pipeline_adds_up_its_units_gradients_in_float32():
    exact = plain(torch.float64)
    of_plain, with_sums, without = (
        error(gradients, exact)
        for gradients in (plain(torch.bfloat16), in_segments(sums=True), in_segments(sums=False))
    )
    # 64 units round 64 times, plain training 4 times.
    assert with_sums < 1.05 * of_plain
    assert without > 1.25 * of_plain


def test_a_sum_begins_with_what_grad_was_and_ends_in_it():
    weight, wide, frozen = (
        nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.bfloat16, *[torch.float32] * 2)
    )
    frozen.requires_grad_(False)
    weight.grad = torch.full((3,), 256.0, dtype=torch.bfloat16)
    seen = []
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    with float32_sums([weight, wide, frozen]):
        for _ in range(4):
            (weight.float() + wide).sum().backward()
        assert weight.grad is None
    # In bf16, 256 + 1 is 256.
    assert torch.equal(weight.grad, torch.full((3,), 260.0, dtype=torch.bfloat16))
    assert torch.equal(wide.grad, torch.full((3,), 4.0))
    assert torch.equal(torch.stack(seen), torch.ones(4, 3, dtype=torch.bfloat16))
    with contextlib.suppress(ZeroDivisionError), float32_sums([weight]):
        (weight.sum() / 0.5).backward()
        raise ZeroDivisionError
    assert torch.equal(weight.grad, torch.full((3,), 262.0, dtype=torch.bfloat16))
    (weight.sum() * 2).backward()
    assert torch.equal(weight.grad, torch.full((3,), 264.0, dtype=torch.bfloat16))


class NoGradient(torch.autograd.Function):
    """Of a parameter, as a product whose gradient is reduced by a later backward."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, _):
        return None


def test_a_backward_may_have_no_gradient_for_a_parameter():
    for sums in (float32_sums, lambda weights: contextlib.nullcontext(GradientBuffer(weights, torch.float32))):
        weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        with sums([weight]):
            NoGradient.apply(weight).sum().backward()
            (2 * weight).sum().backward()
        assert torch.equal(gradient_of(weight).float(), torch.full((3,), 2.0))


def head_gradients(dtype, chunk_tokens):
    """Those of a head's weight and of its input, for a loss in chunks."""
    model = model_of(dtype)
    head = Head(model, SimpleNamespace(base="model", output=BaseModelOutputWithPast))
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, 2048, SIZES["hidden_size"], generator=generator).bfloat16().to(dtype)
    labels = torch.randint(0, SIZES["vocab_size"], hidden.shape[:2], generator=generator)
    options = {"scale": 1 / 2048, "vocabulary": SIZES["vocab_size"]}
    chunk_bytes = 4 * SIZES["vocab_size"] * chunk_tokens
    chunks = list(ChunkedCrossEntropy(head, labels, chunk_bytes=chunk_bytes, **options)._chunks(hidden))
    assert len(chunks) == 2048 // chunk_tokens
    _, gradient = chunked_loss(head, hidden, labels, chunk_bytes=chunk_bytes, **options)
    return {"weight": model.lm_head.weight.grad.double(), "input": gradient.double()}


def test_a_head_in_many_chunks_rounds_each_product_and_their_sum_once():
    exact = head_gradients(torch.float64, 2048)
    of_one, of_many = (error(head_gradients(torch.bfloat16, tokens), exact) for tokens in (2048, 32))
    # Two roundings of like size in place of one. A sum of 64 terms in bf16 would have 64.
    assert of_many < 1.05 * 2**0.5 * of_one
