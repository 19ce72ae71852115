"""Random numbers of a pipeline's stages, whose ranks have generators in step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cuboid.distributed.mesh import Mesh


@contextmanager
def random_numbers_of_stages(mesh: Mesh, device: torch.device) -> Iterator[None]:
    """Inside, the stages' ranks draw different random numbers, the ranks of one stage the same.

    Users seed all ranks alike. Without this, layers on different stages would drop the same elements. Afterwards all
    generators are in step again, however many numbers each stage has drawn: the host's has advanced by one.
    """
    if mesh.topology.pipe == 1:
        yield
        return
    seed = int(torch.randint(2**62, (), device="cpu")) + mesh.coordinate.pipe
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.default_generator.manual_seed(seed)
        if devices:
            module = torch.get_device_module(device)
            # `manual_seed` seeds the current device.
            with module.device(device):
                module.manual_seed(seed)
        yield
