"""The launcher's environment, the process group and the device of this process."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from cuboid.errors import CuboidError
from cuboid.failures.rank_agreement import end_together, run_on_all_ranks
from cuboid.failures.startup import Launch, await_all_ranks, bound_device, timeout_of_environment

T = TypeVar("T")

#: How long a meeting waits for an action that may take longer than the timeout of the process group.
_MEETING_S = 5.0
#: Default values of environment variables for CUDA.
_CUDA_DEFAULTS = {
    # Load all kernels at the start. Lazy loading synchronises the device at each kernel's first launch.
    "CUDA_MODULE_LOADING": "EAGER",
    # Expandable segments don't fragment, so the allocator seldom has to free cached memory, which synchronises the
    # device too.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
#: Older names of a variable; if one of them is set, so is the variable.
_ALIASES = {"PYTORCH_ALLOC_CONF": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")}


def set_cuda_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set environment variables that suit ranks on GPUs. Call it before CUDA is first used, or it has no effect.

    Variables that are already set, under any of their names, keep their values.
    """
    for name, value in _CUDA_DEFAULTS.items():
        if not any(known in environment for known in (name, *_ALIASES.get(name, ()))):
            environment[name] = value


@dataclass(frozen=True)
class World:
    """The launcher's environment variables. Without a launcher: a world of one."""

    rank: int
    size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> World:
        """Read RANK, WORLD_SIZE and LOCAL_RANK.

        Raises:
            CuboidError: only some of the launcher's variables are there, or they aren't numbers.
        """
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            return cls(0, 1, 0)
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            value = os.environ.get(name, "")
            if not value.isdigit():
                raise CuboidError(
                    f"the environment variable {name} is {value!r}, not a number; start the ranks with "
                    "deepspeed, torchrun or accelerate launch"
                )
            numbers[name] = int(value)
        return cls(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"])

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes the files."""
        return self.rank == 0

    def connect(self) -> torch.device:
        """Start the process group (unless there is one) on the accelerator that DeepSpeed uses.

        Returns:
            The device of this rank.
        """
        accelerator = get_accelerator()
        if accelerator.device_name() != "cpu":
            accelerator.set_device(self.local_rank)
        if not dist.is_initialized():
            backend = accelerator.communication_backend_name()
            if self.size == 1 and "MASTER_ADDR" not in os.environ:
                os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires it
                dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
            else:
                self._rendezvous(backend, torch.device(accelerator.current_device_name()))
        return torch.device(accelerator.current_device_name())

    def _rendezvous(self, backend: str, device: torch.device) -> None:
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if not address or not port.isdigit():
            raise CuboidError(
                f"the environment variables MASTER_ADDR and MASTER_PORT are {address!r} and {port!r}, but have to say "
                "where the ranks meet; start them with deepspeed, torchrun or accelerate launch"
            )
        store = await_all_ranks(Launch(self.rank, self.size, address, int(port)))
        dist.init_process_group(
            backend,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout_of_environment()),
            device_id=bound_device(device, self.size),
        )
        del store  # not earlier: rank 0's store serves the other ranks until the process group has its own

    def disconnect(self) -> None:
        """Destroy the process group; call it when all ranks have finished."""
        end_together()
        dist.destroy_process_group()


def run_at_length(action: Callable[[], None] | None, world: World, *, what: str) -> None:
    """Run an action on some ranks, however long it takes; if it fails on any, raise on all. Collective.

    With :func:`run_on_all_ranks`, the others would give up after the timeout of the process group. Here the ranks meet
    again and again, in a thread beside the action, so that only a rank that ended or hangs is missed.

    Args:
        action: what to do; None on ranks that only wait. It stays on this thread, so that Ctrl-C interrupts it.
        world: the ranks.
        what: name of the action in messages, the same on all ranks.

    Raises:
        CuboidError: as :func:`run_on_all_ranks`.
    """
    action_ended: Future[None] = Future()

    def has_ended() -> bool:
        if not wait([action_ended], _MEETING_S).done:
            return False
        action_ended.result()
        return True

    def meet() -> None:
        while not all(gather(run_on_all_ranks(has_ended, what=what), world)):
            pass

    if action is None:
        action_ended.set_result(None)
        meet()
        return
    with ThreadPoolExecutor(1, "cuboid meetings") as threads:
        meetings = threads.submit(meet)
        try:
            action()
        except BaseException as error:
            action_ended.set_exception(error)
        else:
            action_ended.set_result(None)
        meetings.result()


def gather(item: T, world: World) -> list[T]:
    """Gather one small object from each rank, in rank order; collective."""
    items: list[Any] = [None] * world.size
    dist.all_gather_object(items, item)
    return items
