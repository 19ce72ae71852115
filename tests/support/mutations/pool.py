"""A pool of processes that make a mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cuboid.verify import WorkerPool
from cuboid.verify.sharded import run_core, run_engine
from mutations import BY_NAME

SHARDED = (run_core, run_engine)


@dataclass
class MutatedPool(WorkerPool):
    """A pool whose processes make a mistake in everything that runs on shards. ``mutation`` is its name, if any."""

    mutation: str = ""

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0) -> list:
        """As always, but for the sharded side."""
        if self.mutation and function in SHARDED:
            function, arguments = run_mutated, (self.mutation, function, *arguments)
        return super().run(world_size, function, *arguments, timeout_s=timeout_s)


def run_mutated(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """In a worker process: the job, with a mistake."""
    with BY_NAME[name].mutate():
        return function(*arguments)
