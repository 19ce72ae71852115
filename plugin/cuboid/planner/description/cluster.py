"""The machines: GPUs, the links between them, and how many there are."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cuboid.checkpoint.format.bounded_files import read_object
from cuboid.errors import CheckpointError, ConfigError

_GB = 10**9


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU with its links, by its data sheet and by few calibrated constants.

    Args:
        name: such as "H100-80GB".
        memory_bytes: of the device.
        peak_flops: dense matrix products in 16-bit floats, by the data sheet.
        memory_bytes_per_s: of the device's memory, by the data sheet.
        link_bytes_per_s: between GPUs of a node, each way, by the data sheet.
        network_bytes_per_s: of a GPU's share of its node's network cards, each way.
        host_bytes_per_s: between GPU and host memory, each way, by the data sheet.
        host_memory_bytes: a GPU's share of its node's memory.
        host_memory_bytes_per_s: its share of that memory's rate, as an optimizer on the CPU reaches it.
        matmul_efficiency: part of the peak that a large product reaches in training; small ones reach less, by the
            bytes that they move and the time of a kernel.
        attention_efficiency: part of the peak that attention reaches, forward and backward together.
        memory_efficiency: part of the memory's rate that elementwise kernels reach.
        link_efficiency, network_efficiency: part of a link's rate that collectives reach.
        host_efficiency: part of the host link's rate that copies of pinned memory reach.
        link_latency_s, network_latency_s: of each step of a collective.
        link_overlap: part of the computing beside a message within a node that hides it; 0 where the cores that compute
            move the message too.
        eager_traffic: memory traffic of a layer's elementwise kernels as Hugging Face's code launches them, relative to
            compiled or fused ones.
        fp8_speed: speed of products in 8 bits with a scale for each row, the scaling included, relative to 16 bits; 1
            where there are none.
        kernel_s: of each kernel beyond its work.
        step_s: of each optimizer step, whatever its size.
    """

    name: str
    memory_bytes: int
    peak_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    matmul_efficiency: float = 0.7
    attention_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.75
    network_efficiency: float = 0.75
    host_bytes_per_s: float = 32e9
    host_efficiency: float = 0.7
    host_memory_bytes: float = 250e9
    host_memory_bytes_per_s: float = 30e9
    link_latency_s: float = 4e-6
    network_latency_s: float = 12e-6
    kernel_s: float = 4e-6
    step_s: float = 0.01
    link_overlap: float = 1.0
    eager_traffic: float = 2.0
    fp8_speed: float = 1.0

    @property
    def host_rate(self) -> float:
        """Bytes a second between GPU and host memory."""
        return self.host_bytes_per_s * self.host_efficiency


def _gpu(name: str, memory_gib: float, tflops: float, memory: float, link: float, network: float, **more: float) -> Gpu:
    """Rates in 10⁹ bytes a second. Memory is what a process can see, which is less than in the name."""
    return Gpu(name, round(memory_gib * 2**30), tflops * 1e12, memory * _GB, link * _GB, network * _GB, **more)


# Calibrated by docs/generators/planner_fit.py on the measured tables in docs/data (see docs/planner.md): one set of
# constants for all tables of a kind of GPU. V100 has no measurements there and takes the A100's constants. The H800's
# were then adjusted, within the range that the rows allow, to improve its worst row. The H100-80GB and H200 have the
# H800's chip and take its constants, but for attention: the H800's rows ran FlashAttention-2, and torch has cuDNN's
# kernel, whose share `cuboid profile` measured on an H200. The H100-96GB of the tables runs at 500 W. The traffic of
# eager kernels and the speed in 8 bits are one H100's (docs/gpu.md), also for GPUs on which nothing was measured.
_A100 = {
    "matmul_efficiency": 0.94, "attention_efficiency": 0.5, "memory_efficiency": 0.61, "link_efficiency": 0.64,
    "network_efficiency": 0.66, "kernel_s": 13e-6, "step_s": 0.012,
}  # fmt: skip
_H800 = {
    "matmul_efficiency": 0.79, "attention_efficiency": 0.28, "memory_efficiency": 0.75, "link_efficiency": 0.8,
    "network_efficiency": 0.75,
}  # fmt: skip
#: PCIe 5, where the others have PCIe 4; and the link between Grace and Blackwell.
_PCIE5, _C2C = {"host_bytes_per_s": 64e9}, {"host_bytes_per_s": 450e9}
_FP8 = {"fp8_speed": 1.5}
_HOPPER = {**_H800, **_PCIE5, **_FP8, "attention_efficiency": 0.54}
_H100_500W = {
    "matmul_efficiency": 0.52, "attention_efficiency": 0.34, "memory_efficiency": 0.45, "link_efficiency": 0.95,
    "network_efficiency": 0.7,
}  # fmt: skip
_B200 = {
    "matmul_efficiency": 0.53, "attention_efficiency": 0.355, "memory_efficiency": 0.48, "link_efficiency": 0.56,
    "kernel_s": 4.4e-6, "step_s": 0.005,
}  # fmt: skip

#: Known kinds of GPU, by name.
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            _gpu("V100-16GB", 15.77, 125, 900, 150, 12.5, **_A100),
            _gpu("V100-32GB", 31.74, 125, 900, 150, 12.5, **_A100),
            _gpu("A100-40GB", 39.39, 312, 1555, 300, 25, **_A100),
            _gpu("A100-80GB", 79.15, 312, 2039, 300, 25, **_A100),
            _gpu("H100-80GB", 79.11, 989.5, 3350, 450, 50, **_HOPPER),
            _gpu("H100-96GB", 95.0, 989.5, 2400, 450, 50, **_H100_500W, **_PCIE5, **_FP8),
            _gpu("H200-141GB", 139.8, 989.5, 4800, 450, 50, **_HOPPER),
            _gpu("H800-80GB", 79.11, 989.5, 3350, 200, 12.5, **_H800, **_PCIE5, **_FP8),
            _gpu("B200-180GB", 178.4, 2250, 8000, 900, 50, **_B200, **_PCIE5, **_FP8),
            _gpu("GB200-186GB", 184.0, 2500, 8000, 900, 50, **_B200, **_C2C, **_FP8),
        )
    }
)


#: One server core for each rank, in bfloat16, with gloo on loopback between ranks. Calibrated on
#: benchmarks/measured/training_step_loopback_bfloat16.json and layouts_loopback_bfloat16.json.
CPU = _gpu(
    "CPU", 16, 0.39, 10, 1, 1, matmul_efficiency=0.64, attention_efficiency=0.32, link_efficiency=0.9,
    network_efficiency=0.9, link_latency_s=1e-4, network_latency_s=1e-4, kernel_s=6e-5, link_overlap=0.0,
    eager_traffic=1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs.

    Args:
        gpu: kind of all GPUs.
        nodes: number of nodes.
        gpus_per_node: GPUs of each node, which are linked directly.
    """

    gpu: Gpu
    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        """Number of GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.gpus_per_node}x{self.gpu.name}"

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read ``"8x8xH100-80GB"`` (nodes × GPUs × kind), ``"8xH100"`` (one node), or the path of a profile.

        Raises:
            ConfigError: it is none of these, or the kind is unknown; the message lists the known ones.
        """
        if text.endswith(".json"):
            return read_profile(Path(text))
        match = re.fullmatch(r"(?:(\d+)[x×])?(\d+)[x×]([A-Za-z].*)", text.strip())
        if match is None:
            raise ConfigError(
                f"cluster {text!r} is not of the form NODESxGPUSxKIND, such as 8x8xH100-80GB, nor a profile, whose "
                "name ends in .json"
            )
        nodes, gpus = int(match[1] or 1), int(match[2])
        if nodes < 1 or gpus < 1 or nodes * gpus > 2**20:
            raise ConfigError(f"cluster {text!r} has {nodes * gpus} GPUs; it needs 1 to {2**20} in all")
        return cls(_find_gpu(match[3], text), nodes, gpus)


def _find_gpu(name: str, cluster: str) -> Gpu:
    """Find a GPU by its full name or the part before "-": H100 is the first entry of that kind."""
    wanted = name.upper()
    for known, gpu in GPUS.items():
        if known == wanted or known.split("-")[0] == wanted:
            return gpu
    raise ConfigError(
        f"cluster {cluster!r}: no profile of a GPU {name!r}; there are {', '.join(GPUS)}. Describe another one in a "
        "JSON profile"
    )


def read_profile(path: Path) -> Cluster:
    """Read a cluster from a profile: ``{"nodes": 1, "gpus_per_node": 8, "gpu": {…}}``, or one with ``"gpu": "H100"``.

    Args:
        path: the JSON file. Keys of ``"gpu"`` are those of :class:`Gpu`; with ``"like"``, the name of a known one,
            only those that differ. ``"measured"`` has the raw measurements of `cuboid profile`, and is ignored.

    Raises:
        ConfigError: it can't be read, or a key or value isn't one of a profile.
    """
    try:
        profile = read_object(path)
    except CheckpointError as error:
        raise ConfigError(f"cluster profile {error}") from None
    unknown = profile.keys() - {"nodes", "gpus_per_node", "gpu", "measured"}
    if unknown or "gpu" not in profile:
        raise ConfigError(
            f"cluster profile {path} needs the keys nodes, gpus_per_node and gpu"
            + (f", and has {', '.join(sorted(unknown))}" if unknown else "")
        )
    counts = [profile.get(name, 1) for name in ("nodes", "gpus_per_node")]
    if not all(type(count) is int and 1 <= count <= 2**20 for count in counts):
        raise ConfigError(f"cluster profile {path}: nodes and gpus_per_node are {counts}; both are counts")
    gpu = profile["gpu"]
    return Cluster(_find_gpu(gpu, str(path)) if isinstance(gpu, str) else _read_gpu(gpu, path), *counts)


def _read_gpu(entry: Any, path: Path) -> Gpu:
    fields = {field.name: field for field in dataclasses.fields(Gpu)}
    values = dict(entry) if isinstance(entry, dict) else {}
    base = dataclasses.asdict(_find_gpu(str(values.pop("like")), str(path))) if "like" in values else {}
    unknown = sorted(values.keys() - fields.keys())
    if unknown:
        raise ConfigError(f"cluster profile {path}: gpu has no {', '.join(unknown)}; it has {', '.join(fields)}")
    for name, value in values.items():
        if name == "link_overlap":
            good, wanted = _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"
        elif name == "name":
            good, wanted = isinstance(value, str), "a name"
        else:
            good, wanted = _is_number(value) and value > 0, "a number above zero"
        if not good:
            raise ConfigError(f"cluster profile {path}: gpu.{name} is {value!r}, not {wanted}")
    base.update(values)
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in base]
    if missing:
        raise ConfigError(f'cluster profile {path}: gpu lacks {", ".join(missing)}; or give "like": "H100-80GB"')
    return Gpu(**base)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
