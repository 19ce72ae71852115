"""Attention of random heads in segments, and of the whole sequence by torch's own kernel."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cuboid.seq1f1b.attention.chunked_attention import attend_segment

#: Of the scores, unless a test says otherwise.
SCALE = 0.4


class KernelCalls(TorchDispatchMode):
    """Counts what attention's forward kernels are made of: torch's fused one, and products of stacked matrices."""

    def __init__(self):
        super().__init__()
        self.fused = self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.fused += name == "_scaled_dot_product_flash_attention_for_cpu"
        self.products += name == "bmm"
        return func(*args, **(kwargs or {}))


def cuts_of(lengths):
    """(start, stop) of each segment."""
    stops = torch.tensor(lengths).cumsum(0).tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


def random_heads(length, heads, kv_heads, head_dim, value_dim, rows, dtype=torch.float64):
    """Query, key, value as a model makes them, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim)]
    tensors = [
        torch.randn(rows, length, count, dim, generator=generator, dtype=torch.float64).transpose(1, 2).to(dtype)
        for count, dim in sizes
    ]
    return tensors[:3], tensors[3]


def whole(inputs, grad, scale=SCALE):
    """Output and gradients of torch's own attention, on the whole sequence."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True, scale=scale)
    return out.detach(), torch.autograd.grad(out, leaves, grad)


def in_segments(inputs, grad, lengths, store, attend=attend_segment, scale=SCALE):
    """The same, forward segment by segment, then backward in reverse order."""
    units = []
    for start, stop in cuts_of(lengths):
        leaves = [x[:, :, start:stop].detach().requires_grad_() for x in inputs]
        units.append((leaves, attend(*leaves, store, "layer", start, scale)))
    for (start, stop), (_, out) in reversed(list(zip(cuts_of(lengths), units, strict=True))):
        out.backward(grad[:, :, start:stop])
    outs = torch.cat([out.detach() for _, out in units], dim=2)
    return outs, [torch.cat([leaves[i].grad for leaves, _ in units], dim=2) for i in range(3)]


def largest_error(result, expected):
    (out, grads), (out_expected, grads_expected) = result, expected
    pairs = [(out, out_expected), *zip(grads, grads_expected, strict=True)]
    return max((mine.double() - theirs.double()).abs().max().item() for mine, theirs in pairs)
