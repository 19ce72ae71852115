"""What LiveActivations counts, against what is known to be saved."""

import pytest
import torch
from torch import nn

from cuboid.seq1f1b.attention.chunked_attention import attend_segment, prefix
from cuboid.seq1f1b.attention.kv_cache import KVCache
from cuboid.seq1f1b.runtime.memory import LiveActivations, MeteredPool

ROWS, WIDTH = 4, 8
X_BYTES = ROWS * WIDTH * 4


def test_counts_what_graphs_save_and_forgets_it_with_them():
    layer = nn.Linear(WIDTH, WIDTH)
    with LiveActivations(layer.parameters()) as live:
        first = layer(torch.randn(ROWS, WIDTH)).tanh()
        # The input for the weight's gradient, and the output of tanh for its own. The weight isn't counted.
        assert live.live_bytes == 2 * X_BYTES
        second = layer(torch.randn(ROWS, WIDTH)).tanh()
        assert live.live_bytes == live.peak_bytes == 4 * X_BYTES
        first.sum().backward()
        assert live.live_bytes == 2 * X_BYTES
        second.sum().backward()
    assert live.live_bytes == 0
    assert live.peak_bytes == 4 * X_BYTES


def test_views_of_one_storage_count_once():
    x = torch.randn(ROWS, WIDTH, requires_grad=True) * 1
    with LiveActivations(()) as live:
        product = x[:2] * x[2:]
        assert live.live_bytes == X_BYTES
        del product
    assert live.live_bytes == 0


def test_a_graph_that_is_dropped_without_backward_is_forgotten():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with LiveActivations(()) as live:
        y = x.exp()  # saves its own output
        assert live.live_bytes == X_BYTES
        del y
        assert live.live_bytes == 0


def test_gradients_are_what_they_are_without():
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.LayerNorm(WIDTH))
    x = torch.randn(ROWS, WIDTH)
    layer(x).square().sum().backward()
    expected = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad(set_to_none=True)
    with LiveActivations(layer.parameters()):
        layer(x).square().sum().backward()
    for parameter, grad in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=0)


@pytest.fixture
def heads():
    return [torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3)]


def test_stores_count_while_in_use(heads):
    pool = MeteredPool()
    store = KVCache(6, pool)
    with LiveActivations((), pool) as live:
        out = attend_segment(*heads, store, "layer", 0, 1.0)
        saved_bytes = live.live_bytes - store.held_bytes
        # Query, output and log-sum-exp; keys and values are in the store.
        assert saved_bytes == 4 * (2 * 3 * 4 + 2 * 3 * 4 + 2 * 3)
        assert store.held_bytes == 2 * 4 * (2 * 6 * 4)
        out.sum().backward()
        store.free()
        del out
    assert live.live_bytes == 0
    assert pool.used_bytes == 0


def test_gradients_of_keys_and_values_that_backward_adds_up_count_for_the_peak(heads):
    query, key, value = (x.bfloat16() for x in heads)
    pool = MeteredPool()
    store = KVCache(6, pool, "fp32")
    with LiveActivations((), pool) as live:
        outs = [attend_segment(query, key, value, store, "layer", start, 1.0) for start in (0, 3)]
        after_forward = live.live_bytes
        assert live.peak_bytes == after_forward
        outs[1].backward(torch.ones_like(outs[1]), retain_graph=True)
        # For each key and value a gradient in twice as many bytes.
        assert live.peak_bytes == live.live_bytes == after_forward + 2 * store.held_bytes // 3
    taken = pool.take(torch.Size((1, 2, 9, 4)), torch.float32, torch.device("cpu"))
    assert live.peak_bytes == after_forward + 2 * store.held_bytes // 3, "only inside the context"
    pool.give(taken)


def test_buffers_of_stores_that_graphs_save_count_once(heads):
    query, key, value = heads
    pool = MeteredPool()
    store = KVCache(6, pool)
    with LiveActivations((), pool) as live:
        keys, values = prefix(key, value, store, "layer", 0)
        out = query * keys * values
        products = query * keys
        # `query` and `query * keys` are saved beside the store.
        assert live.live_bytes == store.held_bytes + query.nbytes + products.nbytes
        del out, products
