"""A loss that nobody wants the logits of: the same numbers from a chunk of logits at a time, and what that takes."""

import contextlib
import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from three_d.sides import Meter

import cuboid
from comparing import mesh_section
from conftest import TIMEOUT_S
from cuboid.distributed.topology import MeshShape
from cuboid.models.certification.float64 import KeepFloat64, precision
from cuboid.models.cross_entropy.chunked import ChunkedCrossEntropy
from cuboid.verify import SmallModel

ROWS, LENGTH = 6, 13
#: A few positions of the small vocabularies below, so that every forward takes several chunks.
FEW_BYTES = 4 * 1024
LLAMA = SmallModel("llama", heads=12, kv_heads=6, head_dim=4, vocabulary=131)
TIED = SmallModel("llama", heads=12, kv_heads=6, head_dim=4, vocabulary=131, tied=True)
GPT2 = SmallModel("gpt2", heads=12, kv_heads=12, head_dim=4, vocabulary=131)
ALONE = None


def built(small, mesh, *, dtype=torch.float64, head_bias=False, chunk_bytes=FEW_BYTES, **keys):
    torch.manual_seed(small.seed)
    config = small.config()
    config.update({name: 0.0 for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop") if hasattr(config, name)})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if head_bias:
        model.lm_head = nn.Linear(small.hidden, small.vocabulary, dtype=dtype)
    if mesh is not ALONE:
        cuboid.shard(model, {"tensor_parallel": {**mesh_section(mesh), **keys}})
        model.cuboid.state.chunk_bytes = chunk_bytes
    return model


def batch(small, seed=1, rows=ROWS, length=LENGTH):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, small.vocabulary, (rows, length), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    labels[0] = -100
    return {"input_ids": ids, "labels": labels}


def gradients_of(model):
    if isinstance(getattr(model, "cuboid", None), cuboid.models.kinds.sharding.Sharding):
        return cuboid.full_gradients(model)
    # Tied parameters have two names, in a sharded model too.
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def taken(model):
    """The gradients, on rank 0, and none left behind."""
    gradients = {name: gradient.clone() for name, gradient in gradients_of(model).items()}
    model.zero_grad()
    return gradients


def on_ranks(threads, mesh, job, *arguments):
    """What rank 0 returned."""
    ranks = 1 if mesh is ALONE else MeshShape.parse(mesh).size
    return threads.run(ranks, job, *arguments)[0]


def assert_same(actual, expected, way, tolerance=1e-12):
    """Within a share of each tensor's largest element."""
    assert actual.keys() == expected.keys()
    for name, one in expected.items():
        error = (actual[name] - one).abs().max() / one.abs().max()
        assert error <= tolerance, f"{way}, {name}: {error:.1e}"


# --- numbers -----------------------------------------------------------------------------------------------------


def numbers(small, mesh, head_bias):
    """Losses and gradients of one model in many ways."""
    model, micro_batch = built(small, mesh, head_bias=head_bias), batch(small)
    shifted = nn.functional.pad(micro_batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    ways = {
        "mean": micro_batch,
        "items": {**micro_batch, "num_items_in_batch": torch.tensor(29)},
        "number of items": {**micro_batch, "num_items_in_batch": 29},
        "shifted": {**micro_batch, "shift_labels": shifted.flip(0)},
        "other ignored": {
            **micro_batch,
            "labels": micro_batch["labels"].masked_fill(micro_batch["labels"] == -100, 7),
            "ignore_index": 7,
        },
        "padded": {**micro_batch, "attention_mask": (torch.arange(LENGTH) < 9).long().expand(ROWS, -1)},
    }
    by_way = {}
    with precision(keep_float64=True):
        for name, arguments in ways.items():
            output = model(**arguments, use_cache=False)
            assert mesh is ALONE or getattr(output, "logits", None) is None
            # As DeepSpeed scales it.
            (output.loss * 1024).backward()
            by_way[name] = {"loss": output.loss.detach(), **taken(model)}
        for seed in (2, 3):
            (model(**batch(small, seed), use_cache=False).loss / 2).backward()
        by_way["accumulated"] = taken(model)
        recompute = {"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(), KeepFloat64())}
        model.gradient_checkpointing_enable(recompute)
        model(**micro_batch, use_cache=False).loss.backward()
        by_way["recomputed layers"] = taken(model)
        with torch.no_grad():
            by_way["without gradients"] = {"loss": model(**micro_batch, use_cache=False).loss}
    return by_way


@pytest.fixture(scope="module")
def alone(threads):
    """What plain transformers computes, once for each model."""
    kept = {}

    def of(small, head_bias=False):
        if (small, head_bias) not in kept:
            kept[small, head_bias] = on_ranks(threads, ALONE, numbers, small, ALONE, head_bias)
        return kept[small, head_bias]

    return of


@pytest.mark.sample(1, ci=2)
@pytest.mark.parametrize("mesh", ["1x1x1", "1x2x3", "3x1x2", "2x2x1"])
@pytest.mark.parametrize("small", [LLAMA, TIED, GPT2], ids=["llama", "llama-tied", "gpt2"])
def test_loss_and_every_gradient_are_those_of_the_model_alone(threads, alone, small, mesh):
    by_way = on_ranks(threads, mesh, numbers, small, mesh, False)
    for name, expected in alone(small).items():
        assert_same(by_way[name], expected, name)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", ["1x1x2", "1x2x3", "3x1x2", "2x2x1"])
def test_a_head_with_a_bias(threads, alone, mesh):
    by_way = on_ranks(threads, mesh, numbers, LLAMA, mesh, True)
    for name, expected in alone(LLAMA, True).items():
        assert "lm_head.bias" in expected or name == "without gradients"
        assert_same(by_way[name], expected, name)


def without_labels(mesh):
    model, micro_batch = built(LLAMA, mesh), batch(LLAMA)
    loss = model(**{**micro_batch, "labels": torch.full_like(micro_batch["labels"], -100)}, use_cache=False).loss
    loss.backward()
    return loss.item(), taken(model)


@pytest.mark.parametrize("mesh", [ALONE, "1x2x1"])
def test_a_batch_without_any_label_has_no_loss_and_changes_nothing(threads, mesh):
    loss, gradients = on_ranks(threads, mesh, without_labels, mesh)
    assert math.isnan(loss)
    assert not any(gradient.any() for gradient in gradients.values())


# --- an ordinary scalar ------------------------------------------------------------------------------------------


def backward_in_ways(mesh):
    model, micro_batch = built(LLAMA, mesh), batch(LLAMA)

    def loss():
        return model(**micro_batch, use_cache=False).loss

    loss().backward()
    by_way = {"once": taken(model)}
    kept = loss()
    kept.backward(retain_graph=True)
    first = taken(model)
    (kept * 3).backward()
    by_way["again, thrice as much"] = {name: gradient / 3 for name, gradient in taken(model).items()}
    by_way["with the graph kept"] = first
    with pytest.raises(RuntimeError, match="second time"):
        kept.backward()
    model.zero_grad()
    checkpoint(loss, use_reentrant=False).backward()
    by_way["all of it recomputed"] = taken(model)
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss(), list(named.values()))
    for parameter, gradient in zip(named.values(), gradients, strict=True):
        parameter.grad = gradient
    by_way["without grad"] = taken(model)
    return by_way


def test_backward_may_come_twice_or_through_a_recomputation(threads):
    by_way = on_ranks(threads, "1x2x2", backward_in_ways, "1x2x2")
    expected = by_way.pop("once")
    for way, gradients in by_way.items():
        assert_same(gradients, expected, way, 1e-6)


def frozen(mesh, what):
    model = built(LLAMA, mesh)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("lm_head") != (what == "head"))
    with precision(keep_float64=True):
        model(**batch(LLAMA), use_cache=False).loss.backward()
    return taken(model)


@pytest.mark.parametrize("what", ["head", "base"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_gets_its_own(threads, what):
    expected, actual = (on_ranks(threads, mesh, frozen, mesh, what) for mesh in (ALONE, "2x1x2"))
    assert ("lm_head.weight" in actual) == (what == "base")
    assert_same(actual, expected, what)


def hook_calls(small, mesh):
    model = built(small, mesh)
    calls = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(cuboid.local_hook(lambda _, name=name: calls.append(name)))
    bases = []
    model.model.register_forward_hook(
        cuboid.local_hook(lambda _, __, output: bases.append(output.last_hidden_state.shape[1]))
    )
    model(**batch(small), use_cache=False).loss.backward()
    return calls, [name for name, _ in model.named_parameters()], bases


@pytest.mark.parametrize("small", [LLAMA, TIED], ids=["untied", "tied"])
def test_each_parameter_accumulates_once(threads, small):
    for calls, names, bases in threads.run(2, hook_calls, small, "1x2x1"):
        assert sorted(calls) == sorted(names)
        assert bases == [7], "hooks on the base model see it run once, on all of the rank's positions"


# --- low precision -----------------------------------------------------------------------------------------------


def scaled_gradients(mesh, dtype, autocast, scale, gather_logits, chunk_bytes):
    """Of a scaled loss, in float64 and without the scale, and the loss."""
    model = built(LLAMA, mesh, dtype=dtype, gather_logits=gather_logits, chunk_bytes=chunk_bytes)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        loss = model(**batch(LLAMA, length=64), use_cache=False).loss
    (loss * scale).backward()
    dtypes = {parameter.grad.dtype for parameter in model.parameters()}
    return loss.item(), dtypes, {name: gradient.double() / scale for name, gradient in taken(model).items()}


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize(
    ("dtype", "autocast", "scale"),
    [
        (torch.bfloat16, None, 1.0),
        (torch.bfloat16, None, 2.0**12),
        (torch.float32, torch.bfloat16, 1.0),
        (torch.float16, None, 2.0**12),
        (torch.float32, torch.float16, 2.0**12),
    ],
    ids=["bf16", "bf16-scaled", "autocast-bf16", "fp16-scaled", "autocast-fp16-scaled"],
)
def test_chunks_lose_nothing_in_low_precision(threads, dtype, autocast, scale):
    """Against float64, no worse than logits that were whole."""
    _, _, exact = on_ranks(threads, "1x2x1", scaled_gradients, "1x2x1", torch.float64, None, 1.0, True, FEW_BYTES)
    gathered, chunks = (
        on_ranks(threads, "1x2x1", scaled_gradients, "1x2x1", dtype, autocast, scale, gathers, FEW_BYTES)
        for gathers in (True, False)
    )
    assert chunks[0] == pytest.approx(gathered[0], rel=1e-5)
    assert chunks[1] == gathered[1] == {dtype}

    def error(results, name):
        return (results[2][name] - exact[name]).norm() / exact[name].norm()

    for name in exact:
        assert error(chunks, name) <= 1.3 * error(gathered, name), name


def underflowing(mesh):
    model = built(LLAMA, mesh, dtype=torch.float16)
    loss = model(**batch(LLAMA), num_items_in_batch=10**6, use_cache=False).loss
    (loss * 2**16).backward()
    return model.lm_head.weight.grad.abs().max().item()


def test_what_scales_a_float16_loss_keeps_its_gradients_from_underflow(threads):
    # One over a million is beyond float16 before it is scaled.
    assert all(largest > 0 for largest in threads.run(2, underflowing, "2x1x1"))


# --- what it takes -----------------------------------------------------------------------------------------------

BROAD = SmallModel("llama", heads=4, kv_heads=2, head_dim=4, layers=1, vocabulary=24_000)
BROAD_ROWS, BROAD_LENGTH, CHUNK_BYTES = 4, 128, 512 * 1024


def peak_bytes(mesh, mode, with_gradients):
    """The most that is alive at a time, and how much of logits there would be; weights aren't counted."""
    model = built(BROAD, mesh, dtype=torch.float32, chunk_bytes=CHUNK_BYTES, gather_logits=False)
    if mode == "eval":
        model.eval()
    micro_batch = batch(BROAD, rows=BROAD_ROWS, length=BROAD_LENGTH)
    model(**batch(BROAD, rows=BROAD_ROWS, length=4))
    with torch.set_grad_enabled(with_gradients), Meter(model.parameters()) as meter:
        loss = model(**micro_batch, use_cache=False).loss
        if with_gradients:
            loss.backward()
    head_bytes = BROAD.vocabulary * BROAD.hidden * 4
    return meter.peak_bytes, head_bytes


@pytest.mark.sample(1, ci=3)
@pytest.mark.parametrize("mesh", ["1x1x1", "1x2x1", "1x1x2", "2x1x1"])
@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_no_more_than_a_few_chunks_of_logits_are_alive(pool, mesh, mode, with_gradients):
    ranks = MeshShape.parse(mesh).size
    logits_bytes = 4 * BROAD_ROWS * BROAD_LENGTH * BROAD.vocabulary / ranks
    for peak, head_bytes in pool.run(ranks, peak_bytes, mesh, mode, with_gradients, timeout_s=TIMEOUT_S):
        # The logits, their softmax and copies of both; the head's block and gradients of it, and all other activations.
        assert peak < 4 * CHUNK_BYTES + (5 if with_gradients else 1.5) * head_bytes + 2**20
        assert peak < logits_bytes / 3


def traffic(mesh, chunk_bytes, with_gradients):
    """Bytes sent over `batch`, where weights are gathered and their gradients reduced."""
    model = built(LLAMA, mesh, chunk_bytes=chunk_bytes, gather_logits=False)
    model(**batch(LLAMA), use_cache=False)
    counter = cuboid.mesh_of(model).comm_counter
    counter.reset()
    with torch.set_grad_enabled(with_gradients):
        loss = model(**batch(LLAMA), use_cache=False).loss
        if with_gradients:
            loss.backward()
    return counter.snapshot()["batch"]


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("mesh", ["3x1x2", "2x2x1"])
def test_chunks_send_nothing_more_over_batch(threads, mesh, with_gradients):
    ranks = MeshShape.parse(mesh).size
    many, one = (threads.run(ranks, traffic, mesh, size, with_gradients) for size in (1, 10**9))
    assert many == one


def own_loss(mesh, chunk_bytes):
    """A loss function of one's own, put in place of ours."""
    model = built(LLAMA, mesh, chunk_bytes=chunk_bytes)
    ours = model.loss_function
    sizes = []

    def doubled(logits, labels, **keys):
        sizes.append(logits.shape[1])
        return 2 * ours(logits, labels, **keys)

    model.loss_function = doubled
    loss = model(**batch(LLAMA), use_cache=False).loss
    model.loss_function = ours
    return loss.item() / model(**batch(LLAMA), use_cache=False).loss.item(), sizes, model.loss_function is ours


def test_a_loss_function_of_ones_own_is_given_all_logits(threads):
    for ratio, sizes, is_back in threads.run(2, own_loss, "1x2x1", FEW_BYTES):
        assert ratio == pytest.approx(2)
        assert sizes == [13]
        assert is_back


# --- the model's own forward -------------------------------------------------------------------------------------


class Capped(transformers.LlamaForCausalLM):
    """Caps its logits and weighs its loss, as models do in forwards of their own."""

    def forward(self, input_ids=None, labels=None, inputs_embeds=None, attention_mask=None, position_ids=None, **keys):
        hidden = self.model(
            input_ids, attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds, **keys
        ).last_hidden_state
        logits = 2 * torch.tanh(self.lm_head(hidden) / 2)
        loss = None
        if labels is not None:
            loss = 0.25 * self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class Careless(Capped):
    """Makes a loss without ``self.loss_function``."""

    def forward(self, input_ids=None, labels=None, inputs_embeds=None, **keys):
        output = super().forward(input_ids, inputs_embeds=inputs_embeds, **keys)
        return CausalLMOutputWithPast(loss=output.logits.square().mean(), logits=output.logits)


class Reading(Capped):
    """A head that computes with the embedding."""

    def forward(self, *args, **keys):
        output = super().forward(*args, **keys)
        output.logits = output.logits + self.model.embed_tokens.weight.sum()
        return output


def of_class(cls, mesh, chunk_bytes=FEW_BYTES):
    torch.manual_seed(0)
    model = cls(LLAMA.config()).double().train()
    if mesh is not ALONE:
        try:
            cuboid.shard(model, {"tensor_parallel": mesh_section(mesh)})
        except cuboid.UnsupportedModelError as error:
            return str(error)
        model.cuboid.state.chunk_bytes = chunk_bytes
    with precision(keep_float64=True):
        loss = model(**batch(LLAMA)).loss
        loss.backward()
    return {"loss": loss.detach(), **taken(model)}


def test_caps_and_weights_are_the_models_own(threads):
    assert_same(
        on_ranks(threads, "1x2x3", of_class, Capped, "1x2x3"), on_ranks(threads, ALONE, of_class, Capped, ALONE), ""
    )


@pytest.mark.parametrize("mesh", ["1x2x3", "2x1x1"])
def test_a_forward_with_a_loss_of_its_own_gets_whole_logits(threads, mesh):
    wanted = on_ranks(threads, ALONE, of_class, Careless, ALONE)
    assert_same(on_ranks(threads, mesh, of_class, Careless, mesh), wanted, "")


def test_a_head_that_reads_the_base_model_is_rejected(threads):
    assert "computes with a parameter of its base model" in on_ranks(threads, "1x1x1", of_class, Reading, "1x1x1")


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "chunks"), [("cpu", 32), ("meta", 2)])
def test_chunks_on_an_accelerator_have_two_thousand_tokens(device, chunks):
    # Each chunk reads and writes the head's whole gradient: 1 GB with these sizes.
    hidden = torch.empty(1, 4096, 4096, device=device)
    labels = torch.empty(1, 4096, dtype=torch.int64, device=device)
    loss = ChunkedCrossEntropy(None, labels, 1.0, 128 * 1024)
    assert len(list(loss._chunks(hidden))) == chunks
    few = dataclasses.replace(loss, chunk_bytes=64 * 2**20)
    assert len(list(few._chunks(hidden))) == 32
