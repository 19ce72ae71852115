"""Thousands of steps with evaluations and checkpoints: memory, descriptors, threads and objects stay as they are."""

import gc
from collections import Counter
from statistics import mean

import psutil
import pytest
import torch

from cuboid.verify import SmallModel
from fresh_ranks import endings_of
from training import make_engine, settings

SMALL = SmallModel("llama", heads=4, kv_heads=2, layers=2)
RANKS = 4
#: How much the mean of the last third of the samples may lie above that of the first third, after the warm-up.
# The allocator takes 4 MiB at once, now and then.
GROWTH_BYTES, GROWTH_OBJECTS = 8 << 20, 300


def _sample():
    gc.collect()
    process, objects = psutil.Process(), gc.get_objects()
    return {
        "rss_bytes": process.memory_info().rss,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "objects": len(objects),
        "tensors": sum(issubclass(type(x), torch.Tensor) for x in objects),
        "kinds": Counter(type(x).__name__ for x in objects),
    }


def soak(path, root, steps, every):
    """Train so many steps on two stages of 1×1×2 ranks; evaluate, save and take a sample after each ``every``."""
    config = settings("1x1x2", stages=2, keep_last=2)
    config.update(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1)
    engine = make_engine(path, config)
    generator = torch.Generator().manual_seed(3)
    batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 131, (4, 2, 16), generator=generator)]
    losses, samples = [], []
    for step in range(1, steps + 1):
        loss = engine.train_batch(iter([batches[step % len(batches)]]))
        if step % every == 0:
            losses.append(float(loss))
            engine.eval_batch(iter(batches[:1]), num_micro_batches=1)
            engine.save_checkpoint(root)
            samples.append(_sample())
    return losses, samples


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "every", "warm"), [(60, 10, 2), (3000, 100, 6)])
def test_nothing_grows_over_many_steps_with_evaluations_and_checkpoints(checkpoint, tmp_path, steps, every, warm):
    root = tmp_path / "checkpoints"
    endings = endings_of(RANKS, soak, checkpoint(SMALL), str(root), steps, every, timeout_s=60 + steps * 0.6)
    assert all(ending is not None and ending.kind is None for ending in endings), endings
    assert len(list(root.glob("global_step*"))) == 2
    for rank, ending in enumerate(endings):
        losses, samples = ending.text
        assert losses == endings[0].text[0]
        assert losses[-1] < losses[0]
        samples = samples[warm:]
        third = max(len(samples) // 3, 1)
        first, last = samples[:third], samples[-third:]
        figures = {key: (mean(s[key] for s in first), mean(s[key] for s in last)) for key in first[0] if key != "kinds"}
        print(f"rank {rank} in {ending.after_s:.0f} s: {figures}")
        grown = (last[-1]["kinds"] - first[0]["kinds"]).most_common(8)
        assert figures["descriptors"][1] <= figures["descriptors"][0], figures
        assert figures["threads"][1] <= figures["threads"][0], figures
        assert figures["tensors"][1] <= figures["tensors"][0], grown
        assert figures["objects"][1] - figures["objects"][0] < GROWTH_OBJECTS, grown
        assert figures["rss_bytes"][1] - figures["rss_bytes"][0] < GROWTH_BYTES, figures
