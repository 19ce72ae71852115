"""Detect the cluster that a job runs on, for ``"auto"`` in a config without a ``"cluster"``."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from cuboid.distributed.topology import divisors
from cuboid.errors import ConfigError
from cuboid.planner.description.cluster import CPU, GPUS, Cluster, Gpu

#: Seconds that a message waits for each other rank that shares the core.
_TURN_S = 8e-4
#: Environment variables in which launchers give the number of ranks on this node.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")


def seen_cluster(world_size: int) -> Cluster:
    """Nodes like this one with ``world_size`` ranks in all.

    A launcher tells how many ranks each node has. Without it, nodes have as many as this one's GPUs, or the largest
    smaller number that divides the ranks.

    Raises:
        ConfigError: there is no profile of this node's GPU.
    """
    local = next((int(text) for name in _LOCAL_SIZES if (text := os.environ.get(name, "")).isdigit()), 0)
    if not torch.cuda.is_available():
        per_node = _ranks_of_node(local or world_size, world_size)
        return Cluster(_share_of_cpu(per_node), world_size // per_node, per_node)
    per_node = _ranks_of_node(local or torch.cuda.device_count(), world_size)
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = known_device(device)
    if gpu is None:
        raise ConfigError(
            f'there is no profile of the GPU "{torch.cuda.get_device_name(device)}" that "auto" could be decided by: '
            'measure one with cuboid profile, and name its file as "cluster" in the config'
        )
    return Cluster(gpu, world_size // per_node, per_node)


def _ranks_of_node(most: int, world_size: int) -> int:
    """The largest number of ranks up to ``most`` that all nodes can have."""
    return max(count for count in divisors(world_size) if count <= most)


def known_device(device: torch.device) -> Gpu | None:
    """The built-in profile of a device; None if there is none for its name."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return known_gpu(properties.name, properties.total_memory)


def unknown_device(device: torch.device) -> Gpu:
    """Starting point for a profile of an unknown device: its own name and memory, and an A100's or CPU's constants."""
    if device.type != "cuda":
        return _share_of_cpu(1)
    properties = torch.cuda.get_device_properties(device)
    return replace(GPUS["A100-80GB"], name=properties.name, memory_bytes=properties.total_memory)


def known_gpu(name: str, memory_bytes: int) -> Gpu | None:
    """The profile of a GPU by its name and memory; None if there is none.

    Args:
        name: as the driver reports it, such as "NVIDIA H100 80GB HBM3".
        memory_bytes: memory of the device, which tells apart kinds of the same name.
    """
    kinds = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in name.replace("-", " ").split()]
    if not kinds:
        return None
    nearest = min(kinds, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))
    return replace(nearest, memory_bytes=memory_bytes)


def _share_of_cpu(ranks: int) -> Gpu:
    """A rank's share of this machine's cores, which also move the messages between ranks; memory isn't divided."""
    share = min(1.0, len(os.sched_getaffinity(0)) / ranks)
    waits_s = _TURN_S * (1 / share - 1)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return replace(
        CPU,
        memory_bytes=memory_bytes,
        peak_flops=CPU.peak_flops * share,
        memory_bytes_per_s=CPU.memory_bytes_per_s * share,
        link_bytes_per_s=CPU.link_bytes_per_s * share,
        network_bytes_per_s=CPU.network_bytes_per_s * share,
        link_latency_s=CPU.link_latency_s + waits_s,
        network_latency_s=CPU.network_latency_s + waits_s,
        kernel_s=CPU.kernel_s / share,
    )
