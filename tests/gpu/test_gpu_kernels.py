"""Attention kernels, and the norm of whole rows, against float64."""

import math

import pytest
import torch

from cuboid.seq1f1b.attention.kernels import ChunkedMath, CpuFlash, CudaEfficient, CudaFlash, choose_kernel
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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 31, 127, 2048])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_kernels_are_right(device, dtype, head_dim, group, length, causal, figure):
    length = min(length, 127) if device.type == "cpu" else length
    query, key, value, grad = tensors(device, dtype, head_dim, group, length)
    kernel = choose_kernel(query, key, value)
    wanted = CpuFlash if device.type == "cpu" else CudaEfficient if dtype == torch.float32 else CudaFlash
    assert isinstance(kernel, wanted)
    expand = 1 if kernel.knows_groups else group
    keys = [x.repeat_interleave(expand, dim=1) for x in (key, value)]
    options = {"causal": causal, "scale": head_dim**-0.5}
    out, lse = kernel.forward(query, *keys, **options)
    dq, dk, dv = kernel.backward(grad, query, *keys, out, lse, **options)
    found = [out, dq, *(x.unflatten(1, (-1, expand)).sum(2) for x in (dk, dv))]
    out_exact, exact_gradients = exact(query, key, value, grad, causal=causal)
    for mine, theirs in zip(found, (out_exact, *exact_gradients), strict=True):
        error = (mine.double() - theirs).abs().max() / theirs.abs().max().clamp(min=1e-2)
        assert error < TOLERANCES[dtype]
    if length > 1000 and causal and group == 4:
        figure("Attention kernels", f"{str(dtype)[6:]}, head dim {head_dim}", "kernel", type(kernel).__name__)
        figure("Attention kernels", f"{str(dtype)[6:]}, head dim {head_dim}", "largest error", f"{error.item():.1e}")


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
    found = [y.detach(), *torch.autograd.grad(y, (x, weight), gradient)]
    wide = [each.detach().double().requires_grad_() for each in (x, weight)]
    exact = wide[0] * torch.rsqrt(wide[0].pow(2).mean(-1, keepdim=True) + 1e-6) * wide[1]
    wanted = [exact.detach(), *torch.autograd.grad(exact, wide, gradient.double())]
    errors = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted, strict=True)]
    assert max(errors) < NORM_TOLERANCES[dtype], errors
    figure("Norm of whole rows", f"{str(dtype)[6:]}, {hidden} features", "largest error", f"{max(errors):.1e}")
