"""What the allocator keeps after many steps of sequences of many lengths, and what chunks of the loss take."""

import math
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from transformers.modeling_outputs import BaseModelOutputWithPast

from cuboid.models.cross_entropy.chunked import ChunkedCrossEntropy
from cuboid.models.cross_entropy.lm_head import Head
from cuboid.optim import piecewise_step
from gpu.test_gpu_stage import SIZES, model_of, pipeline_of


def steps_of_many_lengths(device, count):
    """Bytes that are reserved and not allocated after some steps, and the losses."""
    device = torch.device(device)
    model = model_of(SIZES, device, torch.float32)
    pipeline = pipeline_of(model, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(count):
        length = 128 + 37 * (step % 13)
        ids = torch.arange(2 * length, device=device).view(2, length) * 7 % 512
        losses.append(float(pipeline.train(iter([{"input_ids": ids, "labels": ids}] * 2), 2)))
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cpu":
        return 0, losses
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated(), losses


def test_steps_of_many_lengths_leave_little_unused(alone, device, figure):
    count = 50 if device.type == "cuda" else 4
    ((unused, losses),) = alone.run(1, steps_of_many_lengths, str(device), count, timeout_s=80)
    assert losses[-1] < losses[0]
    figure("Allocator after 50 steps of 13 lengths", "reserved, not allocated", "MiB", f"{unused / 2**20:.0f}")
    assert unused < 2 * 2**30


VOCABULARY, HIDDEN, TOKENS = 128_000, 4096, 8192


def head_with_loss(device, chunk_tokens, sizes):
    """Seconds of the loss and its gradients with a head, the loss, and peak bytes beside what it was given."""
    device = torch.device(device)
    vocabulary, hidden, tokens = sizes
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        states = torch.randn(1, tokens, hidden, dtype=dtype)
        labels = torch.arange(tokens).view(1, -1) % vocabulary
    head = Head(model, SimpleNamespace(base="model", output=BaseModelOutputWithPast))
    chunk_bytes = None if chunk_tokens is None else 4 * vocabulary * chunk_tokens
    loss = ChunkedCrossEntropy(head, labels, 1 / tokens, vocabulary, chunk_bytes=chunk_bytes)

    def step():
        with head.unsharded() as unsharded:
            value, _ = loss.value_and_gradients(states.detach().requires_grad_(), unsharded)
            for param in unsharded:
                param.gradient()
        return float(value)

    step()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    value = step()
    seconds = time.perf_counter() - start
    return seconds, value, torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0


@pytest.mark.parametrize("chunk_tokens", [None, 128, 512, 2048, 8192])
def test_time_and_memory_of_a_head_in_chunks(alone, device, chunk_tokens, figure):
    sizes = (VOCABULARY, HIDDEN, TOKENS) if device.type == "cuda" else (1000, 64, 8192)
    ((seconds, loss, peak_bytes),) = alone.run(1, head_with_loss, str(device), chunk_tokens, sizes, timeout_s=80)
    # Of states that know nothing of the labels.
    assert loss == pytest.approx(math.log(sizes[0]), rel=0.15)
    table = f"The loss of {TOKENS} tokens behind a head of {VOCABULARY:,} × {HIDDEN}, bf16, forward and backward"
    row = "as chosen" if chunk_tokens is None else f"{chunk_tokens} tokens a chunk"
    figure(table, row, "ms", f"{seconds * 1e3:.1f}")
    figure(table, row, "peak GiB", f"{peak_bytes / 2**30:.1f}")


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["foreach", "fused"])
def test_adam_in_pieces_has_the_bits_of_a_whole_step(device, options):
    stepped = []
    for count in (1 << 30, 1 << 16):
        generator = torch.Generator(device).manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(1_000_003, generator=generator, device=device))
        optimizer = torch.optim.AdamW([parameter], **options)
        with mock.patch.object(piecewise_step, "PIECE", count):
            assert piecewise_step.PiecewiseStep.of(optimizer) is not None
            for _ in range(3):
                parameter.grad = torch.randn(parameter.shape, generator=generator, device=device)
                optimizer.step()
        stepped.append(parameter.detach())
    assert torch.equal(*stepped)
