"""Read a model's files once for all replicas that see the same files: one of them reads, the others receive.

The ranks at one place of the mesh and the pipeline, one in each replica, load the same values; ranks at different
places read different ones. So the ranks of a place compare what files they see. Those that see the same ones, on a file
system that their hosts share or on one host, are a group of gloo, over which the first of them broadcasts what it has
read. Where each host has copies of its own, one rank of each host reads.

This takes place before there is a process group too, because models are loaded before the engine is made: the ranks
then meet in the launcher's store.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor

from cuboid.checkpoint.format.tensor_file import TensorSpec, file_identity, read_specs
from cuboid.distributed.mesh import Mesh, current_rank, current_world_size, group_timeout
from cuboid.errors import PeerLostError
from cuboid.failures.bounded_store import BoundedStore
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.failures.rank_failure import described
from cuboid.failures.startup import Launch, raise_reported, timeout_of_environment

T = TypeVar("T")

_WHAT = "reading of the model's files"
#: Bytes of one broadcast, each of which has the timeout of the process group.
_MESSAGE_BYTES = 256 << 20


def load_once(model: Any, mesh: Mesh, files: Sequence[str], read: Callable[[dict[str, Any] | None], T]) -> T:
    """Load a model's files with ``read``, or make room with it and receive the values from a rank that reads them.

    Args:
        model: whose state dict ``read`` fills.
        mesh: of the model.
        files: safetensors files, the same on all ranks except for their folder.
        read: loads the files if it is given None, else these stand-ins for their tensors.

    Raises:
        PeerLostError: the rank that reads failed or ended.
    """
    meeting = _LoadMeeting.open(mesh)
    if meeting is None:
        return read(None)
    readers = meeting.find_readers(files)
    if readers is None:
        loaded = read(None)
    else:
        loaded = readers.send(model, read) if readers.is_first else readers.receive(model, files, read)
    meeting.leave()
    return loaded


class _LoadMeeting:
    """The ranks that load a model, in a store: that of the process group or, before there is one, of the launcher."""

    def __init__(self, mesh: Mesh, store: BoundedStore, launch: Launch | None, timeout_s: float) -> None:
        self._mesh, self._store, self._launch, self._timeout_s = mesh, store, launch, timeout_s
        # Ranks that torchrun has started again may have the store of those before.
        attempt = f"reads/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._place = f"{attempt}/{store.add(f'{attempt}/loads/{mesh.rank}', 1)}"
        self._deadline = time.monotonic() + timeout_s

    @classmethod
    def open(cls, mesh: Mesh) -> _LoadMeeting | None:
        """Open the meeting; None if there are no replicas, or no store.

        Raises:
            CuboidError: the store can't be opened.
        """
        # A plan may be of another world than this process's: those of probes, conversion and threads.
        is_real = (mesh.rank, mesh.topology.world_size) == (current_rank(), current_world_size())
        if len(mesh.stage_ranks[0]) == 1 or mesh.in_threads or not is_real:
            return None
        if dist.is_initialized():
            # The others may have failed before they come here, or never come.
            run_on_all_ranks(lambda: None, mesh, what=_WHAT)
            timeout = group_timeout() or timedelta(seconds=timeout_of_environment())
            default = PrefixStore("cuboid", _get_default_store())
            store = BoundedStore(lambda: default, timeout.total_seconds(), mesh.topology.world_size)
            return cls(mesh, store, None, timeout.total_seconds())
        launch = Launch.from_environment()
        if launch is None:
            return None
        with launch.translated_errors():
            return cls(mesh, launch.kept_store(), launch, timeout_of_environment())

    def find_readers(self, files: Sequence[str]) -> _Readers | None:
        """Find the ranks that load the same as this one from the same files; None if there are no others.

        Raises:
            PeerLostError: one of them didn't come in time.
        """
        with self._translated_errors():
            rank = self._mesh.rank
            column = next(ranks for ranks in self._mesh.stage_ranks if rank in ranks)
            files_seen = [(Path(file).name, file_identity(file)) for file in files]
            seen_here, key = hashlib.sha256(repr(files_seen).encode()).hexdigest(), f"{self._place}/sees/{column[0]}"
            self._enter(key, seen_here)
            seen = self._await(key, column)
        ranks = [peer for peer in column if seen[peer] == seen[rank]]
        if len(ranks) == 1:
            return None
        place, index = f"{self._place}/{ranks[0]}", ranks.index(rank)
        return _Readers(lambda: self._store.connect(place, index, len(ranks), self._timeout_s), ranks, rank)

    def leave(self) -> None:
        """End the meeting. The rank that hosts the launcher's store may end soon, so it waits for the others to leave.

        Raises:
            PeerLostError: one of them didn't leave in time.
        """
        if self._launch is None:
            return
        with self._translated_errors():
            self._enter(f"{self._place}/left", "")
            if self._launch.hosts_store:
                self._await(f"{self._place}/left", range(self._launch.size))

    def _enter(self, key: str, text: str) -> None:
        self._store.enter(key, f"{self._mesh.rank} {text}")
        self._store.add(f"{key}/entered", 1)

    def _await(self, key: str, ranks: Sequence[int]) -> dict[int, str]:
        """Wait until these ranks have entered a text, and return the texts."""
        polls = self._store.pauses(requests=2)
        while self._store.add(f"{key}/entered", 0) < len(ranks):
            if self._launch is not None:
                raise_reported(self._store)
            if time.monotonic() > self._deadline:
                break
            time.sleep(next(polls))
        texts = {int(rank): text for rank, text in (line.split(" ", 1) for line in self._store.lines(key))}
        missing = [rank for rank in ranks if rank not in texts]
        if missing:
            raise PeerLostError(
                f"rank {missing[0]} didn't come to the {_WHAT}, or to its end, within {self._timeout_s:g} s; see its "
                "own messages. All ranks load the model together. DEEPSPEED_TIMEOUT, in minutes, sets how long they "
                "wait for one another"
            ).arising_on(missing[0])
        return texts

    def _translated_errors(self) -> AbstractContextManager[None]:
        return nullcontext() if self._launch is None else self._launch.translated_errors()


class _Readers:
    """The ranks of one place that see the same files, joined by a group of gloo, which ``connect`` makes."""

    def __init__(self, connect: Callable[[], Any], ranks: list[int], rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self.is_first = rank == ranks[0]
        with self._translated_errors():
            self._group = connect()

    def send(self, model: Any, read: Callable[[None], T]) -> T:
        """Read the files, and send what was read; the others learn of a failure too."""
        try:
            loaded = read(None)
        except Exception as error:
            self._tell(described(error))
            raise
        self._tell("")
        for values in _values(model):
            for part in values.split(_MESSAGE_BYTES):
                self._broadcast(part)
        return loaded

    def receive(self, model: Any, files: Sequence[str], read: Callable[[dict[str, Any]], T]) -> T:
        """Make room for the tensors of the files, and receive their values."""
        loaded = read({name: _Unread(spec) for file in files for name, spec in read_specs(file).items()})
        length = torch.zeros(1, dtype=torch.int64)
        self._broadcast(length)
        failure = torch.empty(int(length), dtype=torch.uint8)
        self._broadcast(failure)
        if failure.numel():
            text = bytes(failure.tolist()).decode()
            raise PeerLostError(
                f"rank {self._ranks[0]}, which reads the model's files for rank {self._rank} too, failed: {text}"
            ).arising_on(self._ranks[0])
        for values in _values(model):
            for part in values.split(_MESSAGE_BYTES):
                self._broadcast(part)
        return loaded

    def _tell(self, failure: str) -> None:
        text = torch.frombuffer(bytearray(failure.encode()), dtype=torch.uint8) if failure else torch.empty(0)
        self._broadcast(torch.tensor([text.numel()]))
        self._broadcast(text.to(torch.uint8))

    def _broadcast(self, values: torch.Tensor) -> None:
        """Broadcast from the first rank; into ``values`` on the others."""
        if values.numel():
            with self._translated_errors():
                self._group.broadcast(values, 0).wait()

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            others = [rank for rank in self._ranks if rank != self._rank]
            raise PeerLostError(
                f"rank {', '.join(map(str, others)) if self.is_first else self._ranks[0]} went away or didn't answer "
                f"in time while rank {self._rank} waited for it in the {_WHAT}; see its own messages ({error})"
            ) from error


class _Unread:
    """What transformers takes for a slice of a file (``safe_open(…).get_slice``): zeros where the file has values."""

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec

    def get_shape(self) -> list[int]:
        """Sizes of the whole tensor."""
        return list(self._spec.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        shape = torch.empty(self._spec.shape, device="meta")[index].shape
        # Zeros, not uninitialized memory: transformers compares tied weights before the values are there.
        return torch.zeros(shape, dtype=self._spec.dtype, device="cpu")


def _values(model: Any) -> Iterator[torch.Tensor]:
    """The bytes of each tensor that was loaded, ``[bytes]``, in the same order on all ranks of a place."""
    for tensor in model.state_dict(keep_vars=True).values():
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        # What the files don't have is still on the meta device.
        if not local.is_meta and local.numel():
            assert local.is_contiguous(), "a loaded tensor is a copy of its part of the file"
            yield local.view(-1).view(torch.uint8)
