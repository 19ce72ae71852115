"""The start of the ranks: a bounded wait for all of them before they make a process group.

``torch.distributed`` doesn't report which ranks it waits for. So the ranks first meet in the store at
MASTER_ADDR:MASTER_PORT, which shows who is missing, and where a rank that fails before there is a group reports it.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from cuboid.distributed.host_identity import host_identity
from cuboid.errors import CuboidError, PeerLostError, RankError
from cuboid.failures.bounded_store import BoundedStore, StoreTimeoutError, answers_within, pauses

#: How long a rank that failed early waits for the others, which may still be loading, to read its report.
_LINGER_S = 10.0
#: How long rank 0, if it failed early and hosts the store, waits for others that failed to leave the store.
_LEAVE_S = 5.0
_DEFAULT_TIMEOUT_MINUTES = 10


@dataclass(frozen=True)
class Launch:
    """This process's rank and the address where the ranks meet, from the launcher's environment variables."""

    rank: int
    size: int
    address: str
    port: int

    @classmethod
    def from_environment(cls) -> Launch | None:
        """From RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; None unless all are set and there are several ranks."""
        numbers = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
        address = os.environ.get("MASTER_ADDR", "")
        if not address or not all(number.isdigit() for number in numbers) or int(numbers[1]) < 2:
            return None
        rank, size, port = map(int, numbers)
        return cls(rank, size, address, port)

    @property
    def hosts_store(self) -> bool:
        """Whether this process hosts the store: rank 0 does, unless the launcher (torchrun) hosts one."""
        return self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def open_store(self, timeout_s: float) -> BoundedStore:
        """Connect to the store at which the ranks meet, which the process group will use too.

        Raises:
            PeerLostError: rank 0 didn't open it in time.
            dist.DistNetworkError: this is rank 0, and it can't.
            StoreTimeoutError: its host accepted the connection, and didn't answer.
        """
        if not self.hosts_store and not self._answers(timeout_s):
            raise self.missing([0], timeout_s)

        def connect() -> Store:
            store = TCPStore(
                self.address,
                self.port,
                is_master=self.hosts_store,
                timeout=timedelta(seconds=max(timeout_s, 1.0)),
                wait_for_workers=False,
                multi_tenant=True,
            )
            return PrefixStore("cuboid/start", store)

        return BoundedStore(connect, max(timeout_s, 1.0), self.size)

    def kept_store(self) -> BoundedStore:
        """The store, connected once and kept until the process group is made.

        Whoever meets in it may come to it again, or still be in it when rank 0, which hosts it, has left.

        Raises:
            PeerLostError: rank 0 didn't open it in time.
            dist.DistError: as :meth:`open_store` raises them.
        """
        return _kept_store(self)

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Raise the failures of the store as errors that say what to look at: a CuboidError or a PeerLostError."""
        try:
            yield
        except dist.DistError as error:
            at = f"{self.address}:{self.port}"
            if self.hosts_store:
                raise CuboidError(
                    f"the ranks can't meet at {at} (MASTER_ADDR:MASTER_PORT): {error}. If another job has the port, "
                    "give the launcher another one, for example deepspeed --master_port 29501"
                ) from error
            how = "didn't answer" if isinstance(error, StoreTimeoutError) else "went away"
            raise PeerLostError(
                f"the store at {at} {how} while the ranks were starting; see the messages of rank 0: {error}"
            ).arising_on(0) from error

    def _answers(self, timeout_s: float) -> bool:
        deadline, retries = time.monotonic() + timeout_s, pauses(self.size)
        while True:
            try:
                remaining_s = deadline - time.monotonic()
                socket.create_connection((self.address, self.port), timeout=max(remaining_s, 1.0)).close()
            except OSError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(next(retries))
            else:
                return True

    def missing(self, ranks: list[int], timeout_s: float) -> PeerLostError:
        """The error to raise if ``ranks`` didn't come within ``timeout_s``."""
        listed = ", ".join(map(str, ranks))
        return PeerLostError(
            f"rank {listed} of {self.size} didn't come to {self.address}:{self.port} (MASTER_ADDR:MASTER_PORT) within "
            f"{timeout_s:g} s; see its own messages. DEEPSPEED_TIMEOUT, in minutes, sets how long the ranks wait for "
            "one another"
        ).arising_on(ranks[0])


def bound_device(device: torch.device, world_size: int) -> torch.device | None:
    """The ``device_id`` for ``init_process_group``: as DeepSpeed sets it, so that groups are always made alike.

    NCCL then connects all ranks at once and splits every further group off that communicator. gloo doesn't use it,
    and a single rank doesn't need it.
    """
    return device if device.type == "cuda" and world_size > 1 else None


def timeout_of_environment() -> float:
    """Seconds that ranks wait for one another: DeepSpeed's own variable, DEEPSPEED_TIMEOUT, in minutes."""
    text = os.environ.get("DEEPSPEED_TIMEOUT", "")
    return 60.0 * (int(text) if text.isdigit() and int(text) > 0 else _DEFAULT_TIMEOUT_MINUTES)


def await_all_ranks(launch: Launch | None = None, timeout_s: float | None = None) -> BoundedStore | None:
    """Wait until all ranks are about to make the process group. Every rank calls this before it makes the group.

    ``launch`` and ``timeout_s`` are by default those of the environment.

    Returns:
        The store, to keep alive until the process group is made; None if the environment has no address to meet at.

    Raises:
        PeerLostError: some rank didn't come; the message names it.
        RankError: some rank reported an early failure; with its message.
        CuboidError: the store can't be opened at MASTER_PORT, or is that of ranks that torchrun has ended.
    """
    launch = launch or Launch.from_environment()
    if launch is None:
        return None
    timeout_s = timeout_of_environment() if timeout_s is None else timeout_s
    deadline = time.monotonic() + timeout_s
    with launch.translated_errors():
        store = launch.open_store(timeout_s)
        _reject_earlier_attempt(store, launch)
        store.set(f"at/{launch.rank}", _this_process())
        store.enter("here", str(launch.rank))
        store.add("arrived", 1)
        polls = store.pauses(requests=2)
        while store.add("arrived", 0) < launch.size:
            raise_reported(store)
            if time.monotonic() > deadline:
                present = set(store.lines("here"))
                absent = [rank for rank in range(launch.size) if str(rank) not in present]
                raise launch.missing(absent or [launch.rank], timeout_s)
            time.sleep(next(polls))
    # All ranks have come, so that nobody needs the store of before; that of the caller keeps it up for a while.
    _kept_store.cache_clear()
    return store


@functools.cache
def _kept_store(launch: Launch) -> BoundedStore:
    return launch.open_store(timeout_of_environment())


def _reject_earlier_attempt(store: BoundedStore, launch: Launch) -> None:
    """Raise an error if another process was this rank before, with the same store.

    That is so where torchrun starts ranks again: process groups would read the addresses of ended processes.
    """
    at = f"at/{launch.rank}"
    if store.check(at) and store.get(at).decode() != _this_process():
        raise CuboidError(
            "the launcher has started the ranks again beside the store of those before, whose addresses torch's "
            "process groups would take for their own: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, so that "
            "each attempt has a store of its own"
        )


def _this_process() -> str:
    return f"{host_identity('pid')} {os.getpid()}"


def raise_reported(store: BoundedStore) -> None:
    """Raise the failure that a rank has reported before there was a process group, if one has."""
    if store.check("failure"):
        rank, text = json.loads(store.get("failure"))
        store.add("raising", 1)
        store.add("told", 1)
        error = RankError(text).arising_on(rank)
        # So does every rank that comes here.
        error.shared = True
        raise error


def report_early_failure(text: str) -> bool:
    """Report to the other ranks why this one won't make a process group, if they come to it soon; never raises.

    Returns as soon as all of them have read the report, or have failed themselves.

    Returns:
        Whether every other rank raises this failure too: it has read the report, or has failed with the same text.
        False if that can't be known, as when rank 0 hasn't opened the store yet.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return True
    launch = Launch.from_environment()
    if launch is None:
        return False
    deadline = time.monotonic() + _LINGER_S
    try:
        with answers_within(_LINGER_S + _LEAVE_S):
            store = launch.open_store(_LINGER_S)
            _, first = json.loads(store.compare_set("failure", "", json.dumps([launch.rank, text])))
            store.add("failing", 1)
            # A script may try again and fail again; each rank is counted once.
            if store.add(f"failed/{launch.rank}", 1) == 1:
                store.add("raising", int(first == text))
                store.add("told", 1)
            polls = store.pauses()
            while store.add("told", 0) < launch.size and time.monotonic() < deadline:
                time.sleep(next(polls))
            is_everywhere = first == text and store.add("raising", 0) == launch.size
            _leave(store, launch)
    except (dist.DistError, CuboidError, ValueError):
        # No port, or no other rank there: each rank then reports only its own error.
        return False
    return is_everywhere


def _leave(store: BoundedStore, launch: Launch) -> None:
    """End the use of the store after a failure: it may end with rank 0, which lets the others leave first."""
    left = store.add("left", 1)
    deadline, polls = time.monotonic() + _LEAVE_S, pauses(1)
    while launch.hosts_store and left < store.add("failing", 0) and time.monotonic() < deadline:
        time.sleep(next(polls))
        left = store.add("left", 0)
