"""Attention of segments: the kernels, the store, and unmodified models run segment by segment."""

import contextlib
import copy
from collections import Counter
from unittest import mock

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from attending import SCALE, KernelCalls, cuts_of, in_segments, largest_error, random_heads, whole
from cuboid.errors import UnsupportedModelError
from cuboid.models.attention import interface
from cuboid.models.attention.forward_context import Unit, UnitSlot
from cuboid.models.attention.kept_attention import keep_attention
from cuboid.models.attention.segments import (
    check_segments,
    prepare_masks,
    record_of,
    use_segment_attention,
)
from cuboid.models.certification.float64 import precision
from cuboid.seq1f1b.attention import chunked_attention, segment_operators
from cuboid.seq1f1b.attention.chunked_attention import KeptCall, attend_segment, prefix
from cuboid.seq1f1b.attention.kernels import ChunkedMath, CpuFlash, CudaCudnn, choose_kernel, dense_as
from cuboid.seq1f1b.attention.kv_cache import KVCache, KVCachePool

# --- kernels and store -------------------------------------------------------------------------------------------


def attend_generally(query, key, value, store, layer, start, scale):
    keys, values = prefix(key, value, store, layer, start)
    mask = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool).tril(start)
    return torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, enable_gqa=True, scale=scale
    )


def free_bytes(pool):
    """Total size of a pool's free buffers."""
    return sum(buffer.nbytes for buffers in pool._free.values() for buffer in buffers)


@pytest.mark.parametrize("attend", [attend_segment, attend_generally])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    heads=st.sampled_from([(8, 2), (8, 1), (8, 8), (1, 1)]),
    dims=st.sampled_from([(8, 8), (8, 4), (4, 6)]),
    rows=st.integers(1, 3),
)
def test_segments_are_the_whole_sequence(attend, lengths, heads, dims, rows):
    inputs, grad = random_heads(sum(lengths), *heads, *dims, rows)
    pool = KVCachePool()
    store = KVCache(sum(lengths), pool)
    assert largest_error(in_segments(inputs, grad, lengths, store, attend), whole(inputs, grad)) < 1e-12
    assert store.held_bytes == 0
    assert free_bytes(pool) > 0


class OneCall:
    """A kernel whose causal pattern ends at the last key, as that of flash attention on GPUs, by plain products."""

    knows_groups = ends_at_last_key = True

    def __init__(self):
        self.pairs = []

    def forward(self, query, key, value, *, causal, scale):
        assert causal
        self.pairs.append((query.shape[2], key.shape[2]))
        scores, (_, value) = self._scores(query, key, value, scale)
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    def backward(self, grad, query, key, value, out, lse, *, causal, scale):
        assert causal
        self.pairs.append((query.shape[2], key.shape[2]))
        scores, (wide_key, wide_value) = self._scores(query, key, value, scale)
        shares = (scores - lse.unsqueeze(-1)).exp()
        ds = scale * shares * (grad @ wide_value.mT - (grad * out).sum(-1, keepdim=True))
        dk, dv = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in (ds.mT @ query, shares.mT @ grad))
        return ds @ wide_key, dk, dv

    def _scores(self, query, key, value, scale):
        queries, keys = query.shape[2], key.shape[2]
        wide = [x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value)]
        hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
        return (scale * query @ wide[0].mT).masked_fill(hidden, -torch.inf), wide


def attend_by_operator(query, key, value, store, _, start, scale):
    """As compiled layers do."""
    out, _ = segment_operators.ATTEND(query, key, value, segment_operators.place_of(store, 0, start), 0, scale)
    return out.transpose(1, 2)


@pytest.mark.parametrize("attend", [attend_segment, attend_by_operator])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_a_kernel_that_sees_the_past_is_called_once_for_a_segment(attend, kv_heads, monkeypatch):
    kernel = OneCall()
    for module in (chunked_attention, segment_operators):
        monkeypatch.setattr(module, "choose_kernel", lambda *_, **__: kernel)
    lengths = [5, 4, 1, 3]
    inputs, grad = random_heads(13, 4, kv_heads, 8, 6, 2)
    store = KVCache(13, KVCachePool())
    assert largest_error(in_segments(inputs, grad, lengths, store, attend), whole(inputs, grad)) < 1e-12
    assert store.held_bytes == 0
    forward = [(5, 5), (4, 9), (1, 10), (3, 13)]
    assert kernel.pairs == [*forward, *reversed(forward)]
    segments = []
    for start, stop in ((0, 9), (9, 13)):
        segment = [x[:, :, start:stop].detach().requires_grad_() for x in inputs]
        segments.append((segment, attend(*segment, store, "layer", start, SCALE)))
    last, out = segments[-1]
    for gradient in torch.autograd.grad(out, last, grad[:, :, 9:]):
        assert gradient.untyped_storage().nbytes() == gradient.nbytes


@pytest.mark.parametrize("transposed", range(3))
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_features_of_a_head_may_have_any_stride(kv_heads, transposed):
    lengths = [5, 4]
    inputs, grad = random_heads(sum(lengths), 4, kv_heads, 8, 8, 2)
    inputs[transposed] = inputs[transposed].mT.contiguous().mT
    assert inputs[transposed].stride(-1) != 1
    actual = in_segments(inputs, grad, lengths, KVCache(sum(lengths), KVCachePool()))
    assert largest_error(actual, whole(inputs, grad)) < 1e-12


def test_a_segment_that_nobody_asks_of_passes_on_what_later_ones_send():
    lengths = [5, 4, 3]
    inputs, grad = random_heads(12, 4, 2, 8, 8, 2)
    grad[:, :, :9] = 0  # labels in the last segment only
    result = in_segments(inputs, grad, lengths, KVCache(12, KVCachePool()))
    assert largest_error(result, whole(inputs, grad)) < 1e-12
    assert result[1][1][:, :, :5].abs().max() > 0


def test_a_window_adds_to_what_it_reaches():
    window, lengths = 3, [4, 1, 6]
    (query, key, value), grad = random_heads(11, 4, 4, 8, 8, 2)

    def windowed(q, k, v, store, layer, start, scale):
        first = max(0, start - window + 1)
        keys, values = prefix(k, v, store, layer, start, first)
        return torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=visible[start : start + q.shape[2], first : start + q.shape[2]], scale=scale
        )

    visible = torch.ones(11, 11, dtype=torch.bool).tril().triu(1 - window)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=visible, scale=SCALE)
    expected = out.detach(), torch.autograd.grad(out, leaves, grad)
    result = in_segments((query, key, value), grad, lengths, KVCache(11, KVCachePool()), windowed)
    assert largest_error(result, expected) < 1e-12


def test_gradients_of_a_segment_do_not_keep_those_of_the_past():
    store, (_, key, value) = KVCache(9, KVCachePool()), random_heads(9, 4, 2, 8, 8, 2)[0]
    for start, stop in ((0, 5), (5, 9)):
        parts = [x[:, :, start:stop].detach().requires_grad_() for x in (key, value)]
        keys, values = prefix(*parts, store, 0, start)
    # The last segment's, to which no later one has added.
    for gradient in torch.autograd.grad((keys, values), parts, (key, value)):
        assert gradient.untyped_storage().nbytes() == gradient.nbytes


@pytest.mark.parametrize("causal", [True, False])
def test_math_is_what_flash_is(causal, monkeypatch):
    monkeypatch.setattr(ChunkedMath, "_SCORES", 100)  # three queries at a time
    (query, key, value), grad = random_heads(7, 2, 2, 8, 8, 2)
    if not causal:
        key, value = torch.cat([key, key.flip(2)], dim=2), torch.cat([value, value.flip(2)], dim=2)
    flash, math = CpuFlash(), ChunkedMath()
    options = {"causal": causal, "scale": SCALE}
    results = []
    for kernel in (flash, math):
        out, lse = kernel.forward(query, key, value, **options)
        results.append((out, lse, *kernel.backward(grad, query, key, value, out, lse, **options)))
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() < 1e-12


@pytest.mark.parametrize("knows_groups", [True, False])
def test_only_kernels_that_know_groups_are_given_them(knows_groups, monkeypatch):
    seen = set()

    def forward(self, query, key, value, **options):
        seen.add(query.shape[1] // key.shape[1])
        return original(self, query, key, value, **options)

    original = CpuFlash.forward
    monkeypatch.setattr(CpuFlash, "forward", forward)
    monkeypatch.setattr(CpuFlash, "knows_groups", knows_groups)
    inputs, grad = random_heads(12, 8, 2, 8, 8, 2)
    result = in_segments(inputs, grad, [5, 4, 3], KVCache(12, KVCachePool()))
    assert largest_error(result, whole(inputs, grad)) < 1e-12
    assert seen == {4 if knows_groups else 1}


def test_a_device_without_a_fused_kernel_is_warned_of():
    query = torch.empty(1, 4, 6, 512, dtype=torch.float64, device="meta")
    with pytest.warns(UserWarning, match="float64 with a head dim of 512 has no fused kernel on meta"):
        assert isinstance(choose_kernel(query, query[:, :2], query[:, :2]), ChunkedMath)


@pytest.mark.parametrize(
    ("generation", "queries", "past", "length", "pays"),
    [
        (9, 64, 0, 1024, True),
        (10, 64, 128, 1024, True),
        # Ampere and Ada, and consumers' Blackwell.
        (8, 64, 0, 1024, False),
        (12, 64, 0, 1024, False),
        # Lengths that may never come again: for little work, making plans takes longer.
        (9, 64, 0, 1000, False),
        (9, 2**13, 0, 2**13 + 1, True),
        (9, 2**12, 2**13, 2**14 + 1, True),
    ],
)
def test_where_cudnn_pays(generation, queries, past, length, pays, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 0))
    query = torch.empty(1, 32, queries, 128, dtype=torch.bfloat16, device="meta")
    assert CudaCudnn.pays(query, past, length) == pays


def test_tensors_are_laid_out_as_the_query():
    query = torch.empty(2, 5, 4, 8).transpose(1, 2)
    x = torch.randn(2, 4, 5, 6)
    alike = dense_as(x, query)
    assert torch.equal(alike, x)
    assert alike.stride() == torch.empty(2, 5, 4, 6).transpose(1, 2).stride()
    assert dense_as(alike, query) is alike
    # A slice of the heads of a fused projection, as a query can be.
    assert dense_as(x[:, :2], query[:, :2]).stride() == torch.empty(2, 5, 2, 6).transpose(1, 2).stride()


def error_in_bfloat16(gradients):
    lengths = [16] * 32
    inputs, grad = random_heads(512, 2, 1, 16, 16, 1, dtype=torch.bfloat16)
    expected = whole([x.double() for x in inputs], grad.double())
    _, grads = in_segments(inputs, grad, lengths, KVCache(512, KVCachePool(), gradients))
    assert all(x.dtype == torch.bfloat16 for x in grads)
    return sum((mine.double() - theirs).square().mean().item() for mine, theirs in zip(grads, expected[1], strict=True))


def test_gradients_added_up_in_float32_are_closer():
    assert error_in_bfloat16("fp32") < 0.8 * error_in_bfloat16("parameter")


def test_half_the_gradient_memory_on_request():
    held = {}
    for gradients in ("fp32", "parameter"):
        key = torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16)
        store = KVCache(8, KVCachePool(), gradients)
        store.write(0, 0, key, key)
        without = store.held_bytes
        store.add_gradients(0, 0, key, key)
        held[gradients] = store.held_bytes - without
    assert held["fp32"] == 2 * held["parameter"] > 0


def test_the_next_micro_batch_allocates_nothing(monkeypatch):
    inputs, grad = random_heads(12, 4, 2, 8, 4, 2)
    pool = KVCachePool()
    expected = whole(inputs, grad)
    in_segments(inputs, grad, [5, 4, 3], KVCache(12, pool))
    waiting = free_bytes(pool)

    def refuse(*args, **kwargs):
        raise AssertionError("allocated")

    for _ in range(2):
        store = KVCache(12, pool)
        monkeypatch.setattr("cuboid.seq1f1b.attention.kv_cache.torch.empty", refuse)
        result = in_segments(inputs, grad, [5, 4, 3], store)
        monkeypatch.undo()
        assert largest_error(result, expected) < 1e-12
        assert free_bytes(pool) == waiting


def test_the_pool_does_not_collect_lengths():
    pool = KVCachePool()
    inputs, grad = random_heads(20, 2, 2, 8, 8, 1)
    kept = []
    for length in (20, 8, 13, 20, 9):
        parts = [x[:, :, :length] for x in inputs]
        in_segments(parts, grad[:, :, :length], [length - 3, 3], KVCache(length, pool))
        kept.append(free_bytes(pool))
    assert max(kept) == kept[0] == kept[3]
    assert kept[4] < kept[0] * 9 / 20 + 1


def test_evaluation_gives_its_buffers_back_on_request():
    inputs, _ = random_heads(8, 2, 2, 8, 8, 1)
    pool = KVCachePool()
    store = KVCache(8, pool)
    with torch.no_grad():
        attend_segment(*(x[:, :, :4] for x in inputs), store, 0, 0, SCALE)
    held = store.held_bytes
    store.free()
    store.free()
    assert (store.held_bytes, free_bytes(pool)) == (0, held)


def test_a_recompute_leaves_the_store_as_it_was():
    inputs, _ = random_heads(8, 2, 2, 8, 8, 1)
    store = KVCache(8, KVCachePool())
    for start in (0, 4, 0):
        attend_segment(*(x[:, :, start : start + 4] for x in inputs), store, 0, start, SCALE)
    keys, values = store.read(0, 0, 8)
    assert torch.equal(keys, inputs[1])
    assert torch.equal(values, inputs[2])


class NothingSquare(TorchDispatchMode):
    """Fails on any tensor as large as the scores of one head of a segment and its whole prefix."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                assert x.numel() < self.limit, (func, x.shape)
        return result


def test_no_mask_and_no_scores_on_the_fast_path():
    # So long that [L, S] is larger than all that has to be there: [B, Hq, L, D] and [B, Hkv, S, D].
    inputs, grad = random_heads(1024, 4, 1, 8, 8, 1, dtype=torch.float32)
    with NothingSquare(256 * 1024):
        in_segments(inputs, grad, [256] * 4, KVCache(1024, KVCachePool()))


def test_frozen_keys_cost_no_gradients(monkeypatch):
    inputs, _ = random_heads(8, 2, 2, 8, 8, 1)
    store = KVCache(8, KVCachePool())
    outs = []
    for start in (0, 4):
        query, key, value = (x[:, :, start : start + 4] for x in inputs)
        outs.append(attend_segment(query.requires_grad_(), key, value, store, 0, start, SCALE))
    without = store.held_bytes
    outs[1].sum().backward()
    assert store.held_bytes == without


# --- unmodified models -------------------------------------------------------------------------------------------

LENGTH, LENGTHS = 24, (9, 1, 8, 6)
COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {**COMMON, "num_key_value_heads": 2, "intermediate_size": 48}
GEMMA = {**GROUPED, "head_dim": 8, "num_hidden_layers": 3, "sliding_window": 7}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=8),
    "gemma2": lambda: transformers.Gemma2Config(**GEMMA, attn_logit_softcapping=5.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **GEMMA, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "gpt2": lambda: transformers.GPT2Config(**COMMON, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**COMMON, intermediate_size=48),
    "opt": lambda: transformers.OPTConfig(**COMMON, ffn_dim=48, dropout=0.0),
    "mixtral": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4, sliding_window=None),
    "gpt_oss": lambda: transformers.GptOssConfig(**GROUPED, head_dim=8, sliding_window=7, num_local_experts=4),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**GROUPED, "num_key_value_heads": 4},
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12,
        first_k_dense_replace=1, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
}  # fmt: skip
LAYERS = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers", "opt": "model.decoder.layers"}


def segmented_model(model, name):
    return Segmented(model, LAYERS.get(name, "model.layers"))


def built(name, implementation, dtype=torch.float64):
    torch.manual_seed(0)
    # The grouped kernels for experts know no float64.
    model = AutoModelForCausalLM.from_config(
        CONFIGS[name](), attn_implementation=implementation, experts_implementation="eager", dtype=dtype
    )
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.train()


def summed_loss(logits, labels):
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


@contextlib.contextmanager
def counting(calls):
    """In the ``with`` block, count each module's calls of attention functions, of whole sequences too."""
    attend = interface._attend

    def counted(name, kernel, record, module, call):
        calls[module] += 1
        return attend(name, kernel, record, module, call)

    with mock.patch.object(interface, "_attend", counted):
        yield


class Segmented:
    """A plain model that runs segment by segment, as one stage of a pipeline would."""

    def __init__(self, model, layers):
        self.model, self.slot, self.pool = copy.deepcopy(model), UnitSlot(), KVCachePool()
        self.layers = {str(index): layer for index, layer in enumerate(self.model.get_submodule(layers))}
        self.calls = Counter()
        use_segment_attention(self.model.config, self.layers, self.slot)

    def run(self, ids, labels, lengths, attention_mask=None, position_ids=None):
        length = ids.shape[1]
        mask, packed = prepare_masks(attention_mask, position_ids, length, labels)
        positions = torch.arange(length).unsqueeze(0) if position_ids is None else position_ids
        store = KVCache(length, self.pool)
        units, losses = [], []
        for start, stop in cuts_of(lengths):
            unit = Unit(store, start, stop, length, mask, packed)
            with self.slot.running(unit), counting(self.calls):
                logits = self.model(
                    input_ids=ids[:, start:stop], position_ids=positions[:, start:stop], use_cache=False
                ).logits
            units.append(unit)
            losses.append(summed_loss(logits, labels[:, start:stop]))
        for unit, loss in reversed(list(zip(units, losses, strict=True))):
            with self.slot.running(unit), counting(self.calls):
                loss.backward()
        assert store.held_bytes == 0
        assert all(self.calls_of(layer) for layer in self.layers.values())
        return sum(loss.item() for loss in losses), gradients_of(self.model)

    def calls_of(self, layer):
        return sum(self.calls[module] for module in layer.modules())


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def reference(model, ids, labels, **arguments):
    model = copy.deepcopy(model)
    loss = summed_loss(model(input_ids=ids, use_cache=False, **arguments).logits, labels)
    loss.backward()
    return loss.item(), gradients_of(model)


def assert_equal_runs(result, expected, tolerance=1e-9):
    (loss, grads), (loss_expected, grads_expected) = result, expected
    assert loss == pytest.approx(loss_expected, rel=tolerance)
    assert grads.keys() == grads_expected.keys()
    for name, theirs in grads_expected.items():
        assert (grads[name] - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1e-3), name


def batch(rows=3, length=LENGTH):
    ids = torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    return ids, labels


def padding(side, rows=3, length=LENGTH):
    mask = torch.ones(rows, length, dtype=torch.long)
    for row, missing in enumerate([0, 3, 11]):
        mask[row, : missing if side == "left" else 0] = 0
        mask[row, length - missing if side == "right" else length :] = 0
    return mask


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


IMPLEMENTATIONS = [
    ("llama", "sdpa"),
    ("llama", "eager"),
    ("qwen3", "sdpa"),
    ("mistral", "sdpa"),
    ("mistral", "eager"),
    ("gemma2", "eager"),
    ("gemma3", "sdpa"),
    ("gemma3", "eager"),
    ("gpt2", "sdpa"),
    ("gpt2", "eager"),
    ("gpt_neox", "sdpa"),
    ("opt", "sdpa"),
    ("mixtral", "sdpa"),
    ("gpt_oss", "eager"),
    ("deepseek_v3", "sdpa"),
]


@pytest.mark.sample(8, ci="others")
@pytest.mark.parametrize("lengths", [LENGTHS, (24,)], ids=str)
@pytest.mark.parametrize(("name", "implementation"), IMPLEMENTATIONS)
def test_models_in_segments(name, implementation, lengths):
    ids, labels = batch()
    model = built(name, implementation)
    with precision(keep_float64=True):
        assert_equal_runs(segmented_model(model, name).run(ids, labels, lengths), reference(model, ids, labels))


def checkpoint_in_float64(layer):
    """Autograd leaves the mode that is active around it, and checkpoints call the layer again from there."""
    original = layer._gradient_checkpointing_func

    def checkpointed(function, *args):
        def float64_function(*inner):
            with precision(keep_float64=True):
                return function(*inner)

        return original(float64_function, *args)

    layer._gradient_checkpointing_func = checkpointed


@pytest.mark.sample(10)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(("name", "implementation"), IMPLEMENTATIONS)
def test_models_with_activation_checkpointing(name, implementation, use_reentrant):
    ids, labels = batch()
    model = built(name, implementation)
    with precision(keep_float64=True):
        expected = reference(model, ids, labels)
        segmented = segmented_model(model, name)
        segmented.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        for layer in segmented.layers.values():
            checkpoint_in_float64(layer)
        assert_equal_runs(segmented.run(ids, labels, LENGTHS), expected)
    assert all(segmented.calls_of(layer) == 2 * len(LENGTHS) for layer in segmented.layers.values())


@pytest.mark.sample(10)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("name", "implementation"), IMPLEMENTATIONS)
def test_models_with_padding(name, implementation, side):
    ids, labels = batch()
    model, mask = built(name, implementation), padding(side)
    # Left padding's last position predicts the first token, as it does with Hugging Face's collators.
    targets = torch.nn.functional.pad(mask[:, 1:], (0, 1)) > 0
    labels = labels.masked_fill(~targets, -100)
    positions = positions_of(mask)
    segmented = segmented_model(model, name)
    with precision(keep_float64=True):
        if side == "left" and implementation == "eager":
            with pytest.raises(UnsupportedModelError, match="pad on the right"):
                segmented.run(ids, labels, LENGTHS, mask, positions)
            return
        expected = reference(model, ids, labels, attention_mask=mask, position_ids=positions)
        assert_equal_runs(segmented.run(ids, labels, LENGTHS, mask, positions), expected)


def test_labels_on_padding_keep_its_mask():
    ids, labels = batch()
    model, mask = built("llama", "sdpa"), padding("right")
    with precision(keep_float64=True):
        expected = reference(model, ids, labels, attention_mask=mask)
        assert_equal_runs(segmented_model(model, "llama").run(ids, labels, LENGTHS, mask), expected)


def packed_positions(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])


@pytest.mark.parametrize(("name", "implementation"), IMPLEMENTATIONS)
def test_models_with_packed_sequences(name, implementation):
    ids, labels = batch()
    # Two sequences that begin within segments, two that begin with one, one that fills its row.
    positions = torch.stack([packed_positions(4, 7, 13), packed_positions(9, 9, 6), packed_positions(24)])
    model = built(name, implementation)
    with precision(keep_float64=True):
        if name in ("opt", "gpt_oss"):
            with pytest.raises(UnsupportedModelError, match="run into one another"):
                segmented_model(model, name).run(ids, labels, LENGTHS, position_ids=positions)
            return
        expected = reference(model, ids, labels, position_ids=positions)
        assert_equal_runs(segmented_model(model, name).run(ids, labels, LENGTHS, position_ids=positions), expected)


def run_checkpointed(model, name, mode, rows):
    """Loss and gradients with nothing, layers' inputs or attention too kept, and calls of attention's kernels."""
    ids, labels, mask, positions = rows
    segmented = segmented_model(model, name)
    if mode != "none":
        kept = {"context_fn": keep_attention} if mode == "attention" else {}
        segmented.model.gradient_checkpointing_enable({"use_reentrant": False, **kept})
        for layer in segmented.layers.values():
            checkpoint_in_float64(layer)
    with precision(keep_float64=True), KernelCalls() as calls:
        return segmented.run(ids, labels, LENGTHS, mask, positions), calls


@pytest.mark.sample(3, ci=9)
@pytest.mark.parametrize("rows", ["plain", "padded", "packed"])
@pytest.mark.parametrize(("name", "implementation"), IMPLEMENTATIONS)
def test_kept_attention_has_the_bits_of_recomputed_attention(name, implementation, rows):
    ids, labels = batch()
    mask = positions = None
    if rows == "padded":
        if implementation == "eager" and name not in ("llama", "gpt2"):
            return  # padding beyond a window sees nothing, which is refused
        mask = padding("right")
        labels = labels.masked_fill(mask == 0, 3)  # so that the padding's own mask is needed
    if rows == "packed":
        if name in ("opt", "gpt_oss"):
            return  # refused, see above
        positions = torch.stack([packed_positions(4, 7, 13), packed_positions(9, 9, 6), packed_positions(24)])
    model, micro_batch = built(name, implementation), (ids, labels, mask, positions)
    runs = {mode: run_checkpointed(model, name, mode, micro_batch) for mode in ("none", "layers", "attention")}
    (loss, gradients), once = runs["attention"]
    (loss_again, gradients_again), twice = runs["layers"]
    assert loss == loss_again
    for parameter, gradient in gradients_again.items():
        assert torch.equal(gradients[parameter], gradient), parameter
    never = runs["none"][1]
    assert (once.fused, twice.fused) == (never.fused, 2 * never.fused)
    # Without a fused kernel, probabilities are computed again, as those do in their backward; the output isn't.
    is_fused = implementation != "eager" and (name != "deepseek_v3" or rows == "plain")
    outputs = model.config.num_hidden_layers * len(LENGTHS)
    assert once.products == (never.products if is_fused else twice.products - outputs)


def test_an_output_that_is_changed_in_place_cannot_be_kept():
    (query, key, value), _ = random_heads(8, 4, 2, 8, 8, 1)
    store, kept = KVCache(8, KVCachePool()), KeptCall()
    with torch.no_grad():
        out = attend_segment(query, key, value, store, 0, 0, SCALE, kept)
    assert kept.output.nbytes == out.nbytes + out[..., 0].nbytes
    assert torch.equal(attend_segment(query, key, value, store, 0, 0, SCALE, kept), out)
    out.mul_(2)
    with pytest.raises(UnsupportedModelError, match=r"in place.*layers"):
        attend_segment(query, key, value, store, 0, 0, SCALE, kept)


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_attn_implementation": "flex_attention"}, "flex_attention"),
        ({"is_causal": False}, "see later ones"),
        ({"index_topk": 4}, "index"),
    ],
)
def test_configs_that_need_whole_sequences(change, message):
    config = transformers.LlamaConfig(**GROUPED, attn_implementation="sdpa")
    check_segments(config, 4)
    for name, value in change.items():
        setattr(config, name, value)
    check_segments(config, 1)
    for segments in (2, "auto"):
        with pytest.raises(UnsupportedModelError, match=message):
            check_segments(config, segments)


def run_briefly(model, layers):
    with precision(keep_float64=True):
        return Segmented(model, layers).run(*batch(), LENGTHS)


def test_attention_outside_the_interface_needs_whole_sequences():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        transformers.GPTJConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=61, rotary_dim=4), dtype=torch.float64
    )
    with pytest.raises(UnsupportedModelError, match="without Hugging Face's attention interface"):
        run_briefly(model, "transformer.h")


def test_each_attention_of_one_module_has_keys_of_its_own():
    """Also where both go through the fused kernels, which the probe of DiffLlama covers."""
    store = KVCache(8, KVCachePool())
    (_, key, value), _ = random_heads(4, 4, 2, 8, 8, 1)
    store.write(("module", 0), 0, key, value)
    store.write(("module", 1), 0, 2 * key, value)
    store.write(("module", 0), 4, key, value)
    assert torch.equal(store.read(("module", 0), 0, 4)[0], key)
    assert torch.equal(store.read(("module", 1), 0, 4)[0], 2 * key)
    with pytest.raises(UnsupportedModelError, match="from position 4 on as it didn't in the segments before"):
        store.write(("module", 2), 4, key, value)


def test_convolutions_need_whole_sequences():
    model = built("llama", "sdpa")
    model.model.layers[1].mlp.conv = torch.nn.Conv1d(4, 4, 3)
    with pytest.raises(UnsupportedModelError, match="mixes neighbouring positions"):
        run_briefly(model, "model.layers")


def called(**changes):
    """One call of the attention function, for the second segment of a layer."""
    model = built("llama", "sdpa")
    segmented = segmented_model(model, "llama")
    module = segmented.layers["0"].self_attn
    (query, key, value), _ = random_heads(4, 4, 2, 8, 8, 1)
    arguments = {"query": query, "key": key, "value": value, "attention_mask": None, **changes}
    store = KVCache(8, segmented.pool)
    store.write((record_of(module).number, 0), 0, key, value)
    with segmented.slot.running(Unit(store, 4, 8, 8)):
        return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"](module, **arguments)[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_causal": False}, "see later ones"),
        ({"position_bias": torch.zeros(1, 4, 4, 4)}, "position_bias"),
        ({"attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)}, "cut its mask to 4 keys"),
        ({"key": torch.zeros(1, 2, 9, 8, dtype=torch.float64)}, "4 queries and 9 keys"),
    ],
)
def test_calls_that_are_no_causal_self_attention(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        called(**changes)


def test_an_unknown_argument_goes_to_the_models_kernel_under_a_causal_mask():
    assert (called(something=1.0) - called()).abs().max() < 1e-12
    dropped = called(dropout=0.5)
    assert dropped.shape == called().shape
    assert (dropped - called()).abs().max() > 1e-3
