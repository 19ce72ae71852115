"""Attention kernels, and the norm of whole rows, against float64."""

import math
import time
import warnings

import pytest
import torch

from attending import in_segments, random_heads, whole
from cuboid.seq1f1b.attention.chunked_attention import attend, attend_backward
from cuboid.seq1f1b.attention.kernels import ChunkedMath, CpuFlash, CudaCudnn, CudaEfficient, CudaFlash, choose_kernel
from cuboid.seq1f1b.attention.kv_cache import KVCache, KVCachePool
from cuboid.tensor3d.layers.norm import has_fused_kernel

#: Largest error of a gradient in relation to its largest element.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-4}
HEADS = 8


def tensors(device, dtype, head_dim, group, length):
    """Strided as in a model, and keys and values as in a store that has room for more."""
    generator = torch.Generator(device).manual_seed(0)

    def made(heads, room):
        x = torch.randn(1, room, heads, head_dim, generator=generator, device=device, dtype=torch.float64)
        return x.transpose(1, 2).to(dtype)

    kv_heads = HEADS // group
    key, value = (made(kv_heads, 2 * length).contiguous()[:, :, :length] for _ in range(2))
    return made(HEADS, length), key, value, made(HEADS, length)


def exact(query, key, value, grad, *, causal):
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    group = query.shape[1] // key.shape[1]
    wide = [leaves[0], *(x.repeat_interleave(group, dim=1) for x in leaves[1:])]
    out, _ = ChunkedMath().forward(*(x.detach() for x in wide), causal=causal, scale=query.shape[-1] ** -0.5)
    scores = wide[0] @ wide[1].mT * query.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    result = scores.softmax(-1) @ wide[2]
    torch.testing.assert_close(result.detach(), out)
    return result.detach(), torch.autograd.grad(result, leaves, grad.double())


def wanted_kernels(device, dtype, head_dim, length):
    """The kernels that are used for such tensors, the first choice first."""
    if device.type == "cpu":
        return [CpuFlash]
    if dtype == torch.float32:
        return [CudaEfficient]
    generation = torch.cuda.get_device_capability()[0]
    has_cudnn = generation in (9, 10) and head_dim <= (256 if generation == 9 else 128) and length > 1
    return [*[CudaCudnn] * has_cudnn, CudaFlash]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 31, 127, 2048])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_kernels_are_right(device, dtype, head_dim, group, length, causal, figure):
    length = min(length, 127) if device.type == "cpu" else length
    query, key, value, grad = tensors(device, dtype, head_dim, group, length)
    kernels = wanted_kernels(device, dtype, head_dim, length)
    assert isinstance(choose_kernel(query, key, value), kernels[0])
    options = {"causal": causal, "scale": head_dim**-0.5}
    out_exact, exact_gradients = exact(query, key, value, grad, causal=causal)
    # With a single key, the gradients of query and key are differences, of terms larger than 1, that should be zero.
    floor = 1.0 if length == 1 else 1e-2
    for kernel in (kind() for kind in kernels):
        expand = 1 if kernel.knows_groups else group
        keys = [x.repeat_interleave(expand, dim=1) for x in (key, value)]
        out, lse = kernel.forward(query, *keys, **options)
        dq, dk, dv = kernel.backward(grad, query, *keys, out, lse, **options)
        actual = [out, dq, *(x.unflatten(1, (-1, expand)).sum(2) for x in (dk, dv))]
        for mine, theirs in zip(actual, (out_exact, *exact_gradients), strict=True):
            error = (mine.double() - theirs).abs().max() / theirs.abs().max().clamp(min=floor)
            assert error < TOLERANCES[dtype], type(kernel)
        if length > 1000 and causal and group == 4:
            row = f"{str(dtype)[6:]}, head dim {head_dim}, {type(kernel).__name__}"
            figure("Attention kernels", row, "largest error", f"{error.item():.1e}")


#: Of a model's layers: query heads, key heads, head dim of queries and keys, of values.
LAYERS = {"grouped": (8, 2, 64, 64), "alike": (4, 4, 128, 128), "latent": (4, 4, 192, 128)}


@pytest.mark.parametrize("lengths", [(77, 64, 58), (100, 1, 99), (1, 64), (2048, 1024, 1024)], ids=str)
@pytest.mark.parametrize("layer", list(LAYERS))
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_attention_of_segments_is_that_of_the_whole(device, dtype, layer, lengths):
    heads, kv_heads, head_dim, value_dim = LAYERS[layer]
    lengths = tuple(min(length, 100) for length in lengths) if device.type == "cpu" else lengths
    inputs, grad = random_heads(sum(lengths), heads, kv_heads, head_dim, value_dim, 2, dtype=dtype)
    inputs, grad = [x.to(device) for x in inputs], grad.to(device)
    scale = head_dim**-0.5
    out, gradients = in_segments(inputs, grad, lengths, KVCache(sum(lengths), KVCachePool()), scale=scale)
    whole_out, whole_gradients = whole([x.double() for x in inputs], grad.double(), scale)
    for mine, theirs in zip((out, *gradients), (whole_out, *whole_gradients), strict=True):
        assert (mine.double() - theirs).abs().max() / theirs.abs().max() < TOLERANCES[dtype]


#: Query heads, key heads and head dim of an 8B Llama.
LARGE = (32, 8, 128)


def in_one_call(query, past):
    """Flash attention as it is chosen for a segment with a past, which it must be called once for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel = choose_kernel(query, query, query, past=past, length=199)
    assert isinstance(kernel, CudaFlash)
    assert kernel.ends_at_last_key
    return kernel


def milliseconds_of(kernel, inputs, past, repeats):
    """The least time of a segment's attention, forward and backward, and its gradients."""
    query, key, value = inputs
    scale, queries = query.shape[-1] ** -0.5, query.shape[2]
    store = KVCache(past + queries, KVCachePool())
    before = torch.zeros_like(key[:, :, :1]).expand(-1, -1, past, -1)
    store.write("layer", 0, before, before)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        store.write("layer", past, key, value)
        out, lse = attend(kernel, query, key, value, store, "layer", past, scale)
        gradients = attend_backward(kernel, out, query, out, lse, store, "layer", past, scale, needs_past=True)
        if query.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times), gradients


@pytest.mark.parametrize("queries", [256, 512, 1024, 2048, 4096])
def test_time_of_a_segment_with_a_past(device, queries, figure):
    is_small = device.type == "cpu"
    (heads, kv_heads, features), queries = ((4, 2, 16), queries // 64) if is_small else (LARGE, queries)
    inputs, _ = random_heads(queries, heads, kv_heads, features, features, 1)
    inputs, past = [x.to(device, torch.bfloat16) for x in inputs], 3 * queries
    contestants = {"as chosen": choose_kernel(*inputs, past=past, length=past + queries)}
    if not is_small:
        contestants["cuDNN, twice"] = CudaCudnn()
        contestants["flash attention, twice"] = CudaFlash()
        contestants["flash attention, once"] = in_one_call(inputs[0], past)
    expected = None
    for name, kernel in contestants.items():
        milliseconds, gradients = milliseconds_of(kernel, inputs, past, 3 if is_small else 20)
        row = f"{queries} queries, {past} keys before"
        figure("Attention of a segment, forward and backward, ms", row, name, f"{milliseconds:.3f}")
        expected = expected or gradients
        for mine, theirs in zip(gradients, expected, strict=True):
            assert (mine - theirs).abs().max() < TOLERANCES[torch.bfloat16] * theirs.abs().max(), name


@pytest.mark.gpus(1)
@pytest.mark.parametrize("features", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_flash_attention_is_called_once_for_a_segment_and_its_past(device, dtype, features):
    in_one_call(torch.zeros(1, 8, 64, features, dtype=dtype, device=device), past=64)


#: Of sums over many rows too, such as the gradient of a norm's weight.
NORM_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}


@pytest.mark.parametrize("dtype", list(NORM_TOLERANCES), ids=str)
@pytest.mark.parametrize("hidden", [256, 4096, 5120])
def test_the_norm_of_whole_rows_is_right(device, dtype, hidden, figure):
    generator = torch.Generator(device).manual_seed(0)

    def made(*shape):
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float64).to(dtype).requires_grad_()

    x, weight = made(4, 512, hidden), made(hidden)
    gradient = made(4, 512, hidden).detach()
    assert has_fused_kernel(x, weight) == (device.type == "cuda")
    y = torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)
    actual = [y.detach(), *torch.autograd.grad(y, (x, weight), gradient)]
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    exact = wide[0] * torch.rsqrt(wide[0].pow(2).mean(-1, keepdim=True) + 1e-6) * wide[1]
    wanted = [exact.detach(), *torch.autograd.grad(exact, wide, gradient.double())]
    errors = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(actual, wanted, strict=True)]
    assert max(errors) < NORM_TOLERANCES[dtype], errors
    figure("Norm of whole rows", f"{str(dtype)[6:]}, {hidden} features", "largest error", f"{max(errors):.1e}")
