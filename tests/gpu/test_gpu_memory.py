"""What the allocator keeps after many steps of sequences of many lengths."""

import torch

from gpu.test_gpu_stage import SIZES, model_of, pipeline_of


def steps_of_many_lengths(device, count):
    """Bytes that are reserved and not allocated after some steps, and the losses."""
    device = torch.device(device)
    model = model_of(SIZES, device, torch.float32)
    pipeline = pipeline_of(model, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(count):
        length = 128 + 37 * (step % 13)
        ids = torch.arange(2 * length, device=device).view(2, length) * 7 % 512
        losses.append(float(pipeline.train(iter([{"input_ids": ids, "labels": ids}] * 2), 2)))
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cpu":
        return 0, losses
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated(), losses


def test_steps_of_many_lengths_leave_little_unused(alone, device, figure):
    count = 50 if device.type == "cuda" else 4
    ((unused, losses),) = alone.run(1, steps_of_many_lengths, str(device), count, timeout_s=300)
    assert losses[-1] < losses[0]
    figure("Allocator after 50 steps of 13 lengths", "reserved, not allocated", "MiB", f"{unused / 2**20:.0f}")
    assert unused < 2 * 2**30
