"""Measure the constants of the GPUs that a job runs on, for the profile that ``--cluster`` takes.

Each constant is solved for in the formula that uses it: :mod:`cuboid.planner.cost.kernels` and
:mod:`cuboid.planner.cost.communication`. All ranks measure at the same time, as they compute in training; the
slowest counts.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from cuboid.distributed.collectives import gather_into
from cuboid.distributed.topology import divisors
from cuboid.errors import CuboidError
from cuboid.planner.cost.communication import ring_steps
from cuboid.planner.cost.kernels import ATTENTION_BACKWARD
from cuboid.planner.description.cluster import Gpu
from cuboid.planner.description.seen import known_device, unknown_device
from cuboid.seq1f1b.schedule.unit_costs import seen_keys

#: Rows, inputs and outputs of products: of few tokens to many, on small weights and large ones.
_PRODUCTS = tuple((rows, size, size) for size in (1024, 4096, 8192) for rows in (64, 512, 4096))
#: Attention that is measured: numbers of tokens, heads, and features of a head.
_TOKENS, _HEADS, _HEAD_DIM = (1024, 4096, 16384), 8, 128
#: Elements of elementwise kernels: one dominated by its launch, and one that fits into no cache.
_SMALL, _LARGE = 1024, 2**26
#: Bytes of a rank's input of an all-gather: one dominated by latency, and two that take time on a link.
_GATHERED = (1024, 2**20, 2**24)
_ELEMENT = 2

T = TypeVar("T")
Measured = dict[str, list[dict[str, float | str]]]


class Profiler:
    """Measures one rank; every rank of the world makes the same calls, in the same order.

    All of it takes roughly ``seconds``; large sizes that would take too long are left out.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device = device
        #: Budget of one measurement; there are about forty.
        self._share_s = seconds / 40
        self.measured: Measured = {"products": [], "attention": [], "elementwise": [], "all_gather": []}

    def profile(self) -> dict[str, Any]:
        """Measure a profile, as :func:`~cuboid.planner.description.cluster.read_profile` reads it. Collective.

        Raises:
            CuboidError: nodes have different numbers of ranks.
        """
        nodes = _nodes()
        known = known_device(self._device)
        gpu = self._links(self._kernels(known or unknown_device(self._device), is_known=known is not None), nodes)
        return {
            "nodes": len(nodes),
            "gpus_per_node": len(nodes[0]),
            "gpu": asdict(gpu),
            "measured": self.measured,
        }

    # --- kernels --------------------------------------------------------------------------------------------------

    def _kernels(self, gpu: Gpu, *, is_known: bool) -> Gpu:
        """Set what kernels reach, as fractions of the data sheet's rates; without one, measured rates are the peaks."""
        kernel_s = self._elementwise(_SMALL)
        memory = 3 * _LARGE * _ELEMENT / max(self._elementwise(_LARGE) - kernel_s, 1e-9)
        sheet = gpu.memory_bytes_per_s if is_known else memory
        gpu = replace(gpu, kernel_s=kernel_s, memory_bytes_per_s=sheet, memory_efficiency=memory / sheet)
        # Only the largest size: what makes smaller ones slower has terms of its own in the formulas.
        products = self._series(_PRODUCTS, prod, partial(self._product, gpu))[-1]
        attention = self._series(_TOKENS, lambda tokens: tokens**2, partial(self._attention, gpu))[-1]
        peak = gpu.peak_flops if is_known else products
        return replace(gpu, peak_flops=peak, matmul_efficiency=products / peak, attention_efficiency=attention / peak)

    def _series(
        self, sizes: Iterable[T], work: Callable[[T], float], rate: Callable[[T], tuple[float, float]]
    ) -> list[float]:
        """Operations a second, from little work to much, within the budget. ``rate`` returns these and the seconds."""
        rates: list[float] = []
        known_s = known_work = 0.0
        for size in sorted(sizes, key=work):
            # All ranks stop at the same size, since they all have the slowest rank's times.
            if known_work and known_s / known_work * work(size) > 10 * self._share_s:
                break
            flops, known_s = rate(size)
            known_work = work(size)
            rates.append(flops)
        return rates

    def _elementwise(self, elements: int) -> float:
        x, y = (torch.ones(elements, dtype=torch.bfloat16, device=self._device) for _ in range(2))
        seconds = self._time(lambda: x.add_(y))
        self.measured["elementwise"].append({"elements": elements, "seconds": seconds})
        return seconds

    def _product(self, gpu: Gpu, size: tuple[int, int, int]) -> tuple[float, float]:
        rows, inputs, outputs = size
        x, weight = self._random(rows, inputs), self._random(outputs, inputs)
        seconds = self._time(lambda: x @ weight.t())
        self.measured["products"].append({"rows": rows, "inputs": inputs, "outputs": outputs, "seconds": seconds})
        # What Kernels.matmul_s adds to the time of the operations.
        moved = _ELEMENT * (rows * inputs + inputs * outputs + rows * outputs)
        multiplied_s = seconds - moved / gpu.memory_bytes_per_s - gpu.kernel_s
        return 2 * prod(size) / max(multiplied_s, 0.1 * seconds), seconds

    def _attention(self, gpu: Gpu, tokens: int) -> tuple[float, float]:
        """Operations a second and seconds of causal attention, forward and backward together."""
        query, key, value = (self._random(1, _HEADS, tokens, _HEAD_DIM).requires_grad_() for _ in range(3))
        gradient = self._random(1, _HEADS, tokens, _HEAD_DIM)

        def both() -> None:
            scaled_dot_product_attention(query, key, value, is_causal=True).backward(gradient)

        seconds = self._time(both)
        sizes = {"tokens": tokens, "heads": _HEADS, "head_dim": _HEAD_DIM}
        self.measured["attention"].append({**sizes, "seconds": seconds})
        forward_flops = 2 * _HEADS * seen_keys(0, tokens) * 2 * _HEAD_DIM
        multiplied_s = max(seconds - 2 * gpu.kernel_s, 0.1 * seconds)
        return (1 + ATTENTION_BACKWARD) * forward_flops / multiplied_s, seconds

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32, device=self._device).to(torch.bfloat16)

    # --- links ----------------------------------------------------------------------------------------------------

    def _links(self, gpu: Gpu, nodes: list[list[int]]) -> Gpu:
        """Set rate and latency of the links inside a node and between nodes, as far as there are several ranks."""
        for size in divisors(len(nodes[0]))[1:]:
            groups = [ranks[first : first + size] for ranks in nodes for first in range(0, len(ranks), size)]
            rate, latency_s = self._gathers(groups, "node")
            # The largest group comes last and overwrites the others.
            gpu = replace(gpu, link_bytes_per_s=rate, link_efficiency=1.0, link_latency_s=latency_s)
        if len(nodes) > 1:
            # One group for each local rank, all at the same time, so that each gets its share of its node's cards.
            rate, latency_s = self._gathers([list(place) for place in zip(*nodes, strict=True)], "network")
            gpu = replace(gpu, network_bytes_per_s=rate, network_efficiency=1.0, network_latency_s=latency_s)
        return gpu

    def _gathers(self, ranks: list[list[int]], link: str) -> tuple[float, float]:
        """All-gather in each group of ``ranks``: bytes a second that a rank sends, and seconds of each ring step."""
        group, _ = dist.new_subgroups_by_enumeration(ranks)
        assert group is not None
        size, times = group.size(), []
        for nbytes in _GATHERED:
            x = torch.zeros(nbytes // _ELEMENT, dtype=torch.bfloat16, device=self._device)
            out = x.new_empty(size * x.numel())
            seconds = self._time(partial(gather_into, out, x, group), together=True)
            times.append(seconds)
            self.measured["all_gather"].append({"link": link, "ranks": size, "bytes": nbytes, "seconds": seconds})
        sent = (size - 1) * (_GATHERED[-1] - _GATHERED[0])
        return sent / max(times[-1] - times[0], 1e-9), times[0] / ring_steps(size)

    # --- time -----------------------------------------------------------------------------------------------------

    def _time(self, action: Callable[[], object], *, together: bool = False) -> float:
        """Seconds of one call on the slowest rank: the mean of calls in a row, or of collectives the median.

        Each call of a collective (``together``) is timed from a barrier.
        """
        self._once(action)
        count = max(1, min(50, int(self._share_s / max(self._slowest(self._once(action)), 1e-6))))
        if not together:
            # Without synchronizing in between, as kernels are launched in training.
            return self._slowest(self._once(lambda: [action() for _ in range(count)])) / count
        samples = []
        for _ in range(min(count, 10)):
            dist.barrier()
            samples.append(self._once(action))
        return self._slowest(statistics.median(samples))

    def _once(self, action: Callable[[], object]) -> float:
        self._synchronize()
        started = time.perf_counter()
        action()
        self._synchronize()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _slowest(self, seconds: float) -> float:
        worst = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)


def _nodes() -> list[list[int]]:
    """World ranks of each node. Collective."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    if len({len(ranks) for ranks in nodes.values()}) > 1:
        counts = ", ".join(f"{len(ranks)} on {name}" for name, ranks in nodes.items())
        raise CuboidError(f"a profile is of nodes with equal numbers of ranks, and there are {counts}")
    return list(nodes.values())
