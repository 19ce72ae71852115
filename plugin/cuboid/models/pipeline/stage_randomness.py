"""Random numbers of a pipeline's stages, by a seed that the first rank of a replica draws for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cuboid.distributed.mesh import Mesh


def draw_seed(mesh: Mesh) -> int:
    """A seed for a step, of the host's generator. Where the first rank of a replica draws for others, they take its."""
    return int(torch.randint(2**62, (), device="cpu")) if len(mesh.copy_ranks) > 1 else 0


@contextmanager
def random_numbers_of_stages(mesh: Mesh, device: torch.device, seed: int) -> Iterator[None]:
    """Inside, the stages' ranks draw different random numbers, the ranks of one stage the same.

    Users seed all ranks alike. Without this, layers on different stages would drop the same elements; and ranks of one
    stage, of which one has read data that is drawn or shuffled, others. Afterwards all generators are as before.
    """
    if len(mesh.copy_ranks) == 1:
        yield
        return
    seed += mesh.coordinate.pipe
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.default_generator.manual_seed(seed)
        if devices:
            module = torch.get_device_module(device)
            # `manual_seed` seeds the current device.
            with module.device(device):
                module.manual_seed(seed)
        yield
