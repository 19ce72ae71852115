"""Colossal-AI's legacy 3-D layers on a CPU: what they need, and nothing else of theirs is touched.

Written for colossalai 0.5.0, whose legacy package was made for one GPU for each process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    # It decorates its functions with torch.cuda.amp's deprecated names, which warn at import.
    warnings.simplefilter("ignore")
    from colossalai.context import Config
    from colossalai.legacy.communication import collective
    from colossalai.legacy.context import ParallelMode, add_seed
    from colossalai.legacy.context.random import _helper
    from colossalai.legacy.context.random.seed_manager import SeedManager
    from colossalai.legacy.core import global_context

_SEED = 1024


class _CpuSeedManager(SeedManager):
    """The seed manager with the CPU's random state: colossalai 0.5.0's always goes by ``torch.cuda``'s."""

    def set_mode(self, parallel_mode: ParallelMode) -> None:
        """As its parent's."""
        if self.current_mode:
            self._seed_states[self.current_mode] = torch.get_rng_state()
        self._current_mode: ParallelMode | None = parallel_mode
        torch.set_rng_state(self._seed_states[parallel_mode])

    def add_seed(self, parallel_mode: ParallelMode, seed: int, overwrite: bool = False) -> None:
        """As its parent's."""
        assert overwrite or parallel_mode not in self._seed_states, f"the seed for {parallel_mode} has been added"
        before = torch.get_rng_state()
        torch.manual_seed(seed)
        self._seed_states[parallel_mode] = torch.get_rng_state()
        self._seeds[parallel_mode] = seed
        torch.set_rng_state(before)


def launch(depth: int) -> None:
    """As ``colossalai.legacy.launch`` with 3-D tensor parallelism over depth³ ranks, in the world that exists.

    That function in 0.5.0 makes the world itself, at ``tcp://[host]:port``, which Python from 3.11.4 on takes for IPv6
    only; and it adds seeds only where there is CUDA, though the layers can't be built without. So its steps are taken
    one by one here, but for the first. All ranks must call, once in a process.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    global_context.verbose = False
    global_context.load_config(Config({"parallel": {"tensor": {"mode": "3d", "size": depth**3}}}))
    global_context._register_dist(rank, size, dist.GroupMember.WORLD, None, list(range(size)), ParallelMode.GLOBAL)
    global_context.add_global_rank(ParallelMode.GLOBAL, rank)
    global_context.init_parallel_groups()
    _helper._SEED_MANAGER = _CpuSeedManager()
    # The seeds and the mode that `ParallelContext.set_seed` sets with CUDA.
    add_seed(ParallelMode.DATA, _SEED)
    add_seed(ParallelMode.TENSOR, _SEED + global_context.get_local_rank(ParallelMode.TENSOR))
    _helper.set_mode(ParallelMode.DATA)


def place_in(mode: ParallelMode) -> tuple[int, int]:
    """This rank's index in its group of a mode, and the group's size."""
    return global_context.get_local_rank(mode), global_context.get_world_size(mode)


class _Exchange:
    """A reduce-scatter under way, as an exchange whose parts are added at the end."""

    def __init__(self, out: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._out, self._pieces = out, torch.empty_like(whole)
        self._work = dist.all_to_all_single(self._pieces.view(-1), whole.view(-1), group=group, async_op=True)

    def wait(self) -> None:
        """Until ``out`` is complete."""
        self._work.wait()
        torch.sum(self._pieces.view(-1, *self._out.shape), 0, out=self._out)


def _reduce_scatter(
    out: torch.Tensor, whole: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> _Exchange | None:
    assert op is None or op == dist.ReduceOp.SUM, "the layers add"
    exchange = _Exchange(out, whole, group)
    if async_op:
        return exchange
    exchange.wait()
    return None


@contextmanager
def exchanging() -> Iterator[None]:
    """Inside, its reduce-scatters are exchanges and sums, as ours are over gloo.

    gloo's own reduce-scatter sends twice the bytes. With NCCL there is no such thing, so this shows how much of a
    difference in time is due to gloo and to nothing in the layers.
    """
    before = collective._reduce_scatter_func
    collective._reduce_scatter_func = _reduce_scatter
    try:
        yield
    finally:
        collective._reduce_scatter_func = before
