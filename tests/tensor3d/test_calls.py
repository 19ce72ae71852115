"""What a step costs the host: Python calls of ours, and how deep a layer's product lies."""

import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.verify import SmallModel

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


@pytest.mark.parametrize(("axes", "most"), [((1, 2, 2), 1000), ((2, 2, 2), 1800), ((1, 1, 1), 300)], ids=str)
def test_a_step_of_two_layers_makes_few_calls(pool, checkpoint, axes, most):
    ranks = axes[0] * axes[1] * axes[2]
    for calls in pool.run(ranks, calls_of_a_step, checkpoint(SmallModel("llama", layers=2)), axes):
        assert calls.total() <= most, calls.most_common(8)


def frames_to_products(path):
    """Our frames between torch's call of a hook or a module and each product of a forward."""
    model = sharded(path, (1, 2, 2))
    found = []
    product = torch.mm

    def spy(*args, **kwargs):
        frames, frame = [], sys._getframe(1)
        while "tensor3d" in frame.f_code.co_filename or "autograd/function.py" in frame.f_code.co_filename:
            if frame.f_code.co_filename.startswith(PACKAGE):
                frames.append(frame.f_code.co_filename)
            frame = frame.f_back
        found.append(frames)
        return product(*args, **kwargs)

    torch.mm = spy
    try:
        model.base_model(input_ids=IDS)
    finally:
        torch.mm = product
    return found


def test_a_product_is_five_frames_in_three_files_away_from_its_layer(pool, checkpoint):
    # Heads for every rank, so that no key or value has to be selected.
    for found in pool.run(4, frames_to_products, checkpoint(SmallModel("llama", layers=2, kv_heads=4))):
        # q, k, v, gate, up and down once for each rank along an axis, o and down once for each of those along another.
        assert len(found) >= 2 * 2 * 5
        assert max(map(len, found)) <= 5
        assert max(len(set(frames)) for frames in found) <= 3
