"""What a step costs the host: Python calls of ours, matrix products, and how deep a layer's product lies."""

import sys
import threading
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.verify import SmallModel
from launching import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from harness.freshness import NOT_MEASURED

PACKAGE = str(Path(cuboid.__file__).parent)
IDS = torch.arange(4 * 12).view(4, 12) % 131


def sharded(path, axes):
    mesh = dict(zip(("batch", "sequence", "hidden"), axes, strict=True))
    section = {"tensor_parallel": {"mode": "3d_tensor", "mesh": mesh}}
    return cuboid.shard(AutoModelForCausalLM.from_pretrained(path), section).train()


def calls_of_a_step(path, axes):
    """Calls by file in the third step, as ``sys.setprofile`` sees them: comprehensions and generators too."""
    model = sharded(path, axes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    calls = Counter()

    def step():
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[Path(frame.f_code.co_filename).relative_to(PACKAGE)] += 1

    step()
    step()
    threading.setprofile(count)
    sys.setprofile(count)
    step()
    sys.setprofile(None)
    threading.setprofile(None)
    return calls


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("axes", "most"), [((1, 2, 2), 1000), ((2, 2, 2), 1800), ((1, 1, 1), 300)], ids=str)
def test_a_step_of_two_layers_makes_few_calls(pool, checkpoint, axes, most):
    ranks = axes[0] * axes[1] * axes[2]
    for calls in pool.run(ranks, calls_of_a_step, checkpoint(SmallModel("llama", layers=2)), axes):
        assert calls.total() <= most, calls.most_common(8)
        # Tables of such a step don't get older when these change.
        assert not {Path(path).relative_to("plugin/cuboid") for path in NOT_MEASURED} & calls.keys()


class Products(TorchDispatchMode):
    """Counts matrix products, batched ones as one."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_")
        return func(*args, **(kwargs or {}))


def products_of_a_layer(path, axes, rows):
    """In a layer's forward, and in its backward."""
    model = sharded(path, axes)
    with Products() as forward:
        output = model.base_model(input_ids=IDS[:rows]).last_hidden_state
    with Products() as backward:
        output.sum().backward()
    return forward.count / 2, backward.count / 2


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize(
    ("axes", "rows", "forward", "backward"),
    [
        # One for each of seven weights, and in backward two.
        ((2, 1, 1), 2, 7, 14),
        ((1, 2, 1), 1, 7, 14),
        ((2, 2, 1), 2, 7, 14),
        # Over several ranks of `hidden`, the input of o and down comes in as many pieces, whose products are added up,
        # and so do the gradients of what the five others give.
        ((1, 1, 2), 2, 5 + 2 * 2, 7 + 5 * 2 + 2),
        ((1, 2, 2), 1, 5 + 2 * 2, 7 + 5 * 2 + 2),
        # Of several rows, positions that go to one rank of `sequence` are multiplied together: those of o and down, and
        # the gradients for the inputs of the others.
        ((1, 2, 1), 2, 5 + 2 * 2, 7 + 5 * 2 + 2),
    ],
    ids=str,
)
def test_a_weight_is_multiplied_at_once_where_that_needs_no_copy(pool, checkpoint, axes, rows, forward, backward):
    ranks = axes[0] * axes[1] * axes[2]
    small = SmallModel("llama", layers=2, kv_heads=4)
    for products in pool.run(ranks, products_of_a_layer, checkpoint(small), axes, rows):
        assert products == (forward, backward)


def frames_to_products(path):
    """Our frames between torch's call of a hook or a module and each product of a forward."""
    model = sharded(path, (1, 2, 2))
    # Spies are put in place of torch's functions.
    model.cuboid.state.made.code = None
    frames_by_product = []
    originals = {name: getattr(torch, name) for name in ("mm", "bmm")}

    def spy(product, *args, **kwargs):
        frames, frame = [], sys._getframe(1)
        while "tensor3d" in frame.f_code.co_filename or "autograd/function.py" in frame.f_code.co_filename:
            if frame.f_code.co_filename.startswith(PACKAGE):
                frames.append(frame.f_code.co_filename)
            frame = frame.f_back
        frames_by_product.append(frames)
        return product(*args, **kwargs)

    with ExitStack() as stack:
        for name, product in originals.items():
            stack.enter_context(mock.patch.object(torch, name, partial(spy, product)))
        model.base_model(input_ids=IDS)
    return frames_by_product


def test_a_product_is_five_frames_in_three_files_away_from_its_layer(pool, checkpoint):
    # Heads for every rank, so that no key or value has to be selected.
    for frames_by_product in pool.run(4, frames_to_products, checkpoint(SmallModel("llama", layers=2, kv_heads=4))):
        # q, k, v, gate and up once, o and down once for each rank along `sequence`.
        assert len(frames_by_product) >= 2 * (5 + 2 * 2)
        assert max(map(len, frames_by_product)) <= 5
        assert max(len(set(frames)) for frames in frames_by_product) <= 3
