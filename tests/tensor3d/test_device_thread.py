"""Backward in a thread with empty context variables, as CUDA's autograd runs it: recomputation finds all it needs."""

import threading
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.verify import SmallModel

SMALL = SmallModel("llama", layers=2, kv_heads=4)
ROWS, LENGTH = 4, 12
REENTRANT = [False, True]


@contextmanager
def device_thread():
    """Backward runs in a thread of its own, which knows nothing of the one that waits for it."""
    backward = torch.autograd.backward
    threads = []

    def elsewhere(*args, **kwargs):
        failed = []

        def run():
            try:
                backward(*args, **kwargs)
            except BaseException as error:
                failed.append(error)

        if threading.current_thread() in threads:  # a reentrant recomputation's own backward
            backward(*args, **kwargs)
            return
        thread = threading.Thread(target=run)
        threads.append(thread)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    with mock.patch.object(torch.autograd, "backward", elsewhere):
        yield threads


def trained(path, config, reentrant, in_thread):
    """The gradients on rank 0, and how many threads ran a backward."""
    model = cuboid.shard(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).train(), config)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7 % 131
    batch = {"input_ids": ids, "labels": ids}
    with device_thread() if in_thread else nullcontext([]) as threads:
        if "pipeline" in config:
            cuboid.Pipeline(model).train(iter([batch] * 2), 2)
        else:
            model(**batch).loss.backward()
    return cuboid.full_gradients(model), len(threads)


MESH = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 2, "sequence": 2, "hidden": 2}}}
KEPT = {"tensor_parallel": {**MESH["tensor_parallel"], "weight_gather": "step"}}
STAGES = {
    "tensor_parallel": {"mode": "3d_tensor", "mesh": {"sequence": 2}},
    "pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 3, "partition": "even"},
}


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("reentrant", REENTRANT)
@pytest.mark.parametrize("config", [MESH, KEPT, STAGES], ids=["mesh", "kept weights", "stages"])
def test_a_thread_that_knows_nothing_gives_the_same(pool, checkpoint, config, reentrant):
    ranks = 4 if "pipeline" in config else 8
    path = checkpoint(SMALL)
    (wanted, _), *_ = pool.run(ranks, trained, path, config, reentrant, False)
    (gradients, threads), *_ = pool.run(ranks, trained, path, config, reentrant, True)
    assert threads > 0
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-14)
