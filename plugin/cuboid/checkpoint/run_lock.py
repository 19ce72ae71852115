"""A run's folder belongs to one run at a time: a file in it names the process that writes there.

A lock of the operating system alone (``flock``) wouldn't do: some network file systems keep it on one host, and a child
of a killed process would keep it held. So the file names host, process and start. On the same host, that tells whether
the process still runs. On another one only a sign of life does: the process touches the file every few seconds, and a
file that isn't touched for a while is taken over. Whoever was taken for dead and isn't finds another's name in the file
before it writes a checkpoint, and stops.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Self
from uuid import uuid4

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from cuboid.checkpoint.format.bounded_files import check_output, open_regular
from cuboid.distributed.host_identity import host_identity
from cuboid.errors import CheckpointError, CuboidError

#: Name of the file. Hidden, so that it isn't taken for text where the folder is in that of the data.
LOCK = ".run.lock"
#: Interval at which its owner touches it, and how long another host's is watched: some network file systems show
#: changes only after seconds.
_BEAT_S, _WATCH_S, _LOOK_S = 5.0, 45.0, 1.0
#: How long to wait for another process that is about to take, or release, the lock.
_TURN_S = 20.0
#: More characters than the file has.
_LONGEST = 65536
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Holder(BaseModel):
    """The process that a lock names.

    Attributes:
        id: drawn anew for each lock.
        command: what it runs.
        host: name of its host.
        processes: identity of the process table that its process id is in.
        pid: its process id.
        started: when the process began, as :func:`_start_of` gives it.
        since: when it took the lock, for messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    command: str
    host: str
    processes: str
    pid: int
    started: float
    since: str

    @classmethod
    def here(cls, command: str) -> Self:
        """This process."""
        return cls(
            id=uuid4().hex,
            command=command,
            host=os.uname().nodename,
            processes=_process_table(),
            pid=os.getpid(),
            started=_start_of(os.getpid()),
            since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        )

    def has_ended(self) -> bool | None:
        """Whether the process has ended; None if it is in a process table that can't be seen from here."""
        if self.processes != _process_table():
            return None
        try:
            # The process id may be another process's by now.
            return _start_of(self.pid) != self.started or psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        return f"`{self.command}`, process {self.pid} on host {self.host}, begun {self.since}"


class RunLock:
    """The lock on a run's folder, once it is this process's, which the file names as ``holder``."""

    def __init__(self, path: Path, holder: Holder) -> None:
        self._path, self._holder = path, holder
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="cuboid run lock", daemon=True).start()

    def check(self) -> None:
        """Check that the folder still belongs to this process; call it before something there is replaced.

        Raises:
            CuboidError: another run has taken it over.
        """
        with contextlib.suppress(OSError):
            holder = _read(self._path)
            if holder is not None and holder.id != self._holder.id:
                raise CuboidError(
                    f"{self._path.parent} was taken over by another run, {holder}, while this one gave no sign of "
                    "life; it writes nothing more there"
                )

    def release(self) -> None:
        """Remove the file, if it still names this process."""
        self._released.set()
        with contextlib.suppress(OSError), _turn(self._path):
            holder = _read(self._path)
            if holder is None or holder.id == self._holder.id:
                self._path.unlink()

    def _beat(self) -> None:
        while not self._released.wait(_BEAT_S):
            with contextlib.suppress(OSError, CuboidError):
                self.check()
                os.utime(self._path)


@contextmanager
def held(out: Path, command: str, say: Callable[[str], object]) -> Iterator[RunLock]:
    """Inside, a run's folder is this process's; it is created if missing.

    Args:
        out: the folder.
        command: what this process runs, for the messages of others.
        say: called with a line if it takes a while to know whether another run goes on.

    Raises:
        CuboidError: another run writes there.
        CheckpointError: the folder can't be written.
    """
    new_folders = [folder for folder in (out, *out.parents) if not folder.exists()]
    check_output(out)
    lock = _take(out / LOCK, Holder.here(command), say)
    try:
        yield lock
    finally:
        lock.release()
        # A run that fails before it has written anything leaves no folder; others than empty ones stay.
        with contextlib.suppress(OSError):
            for folder in new_folders:
                folder.rmdir()


def state_of_lock(path: Path, say: Callable[[str], object]) -> tuple[Holder | None, bool]:
    """The process that a lock names, if there is a lock, and whether the next run would take it over. Changes nothing.

    Raises:
        CuboidError: another file is there.
    """
    holder = _read(path)
    if holder is None:
        return None, True
    ended = holder.has_ended()
    if ended is None:
        say(_watching(path, holder))
        ended = not _gives_sign_of_life(path, holder)
    return holder, ended


def _watching(path: Path, holder: Holder) -> str:
    return f"{path} names {holder}; watching for {_WATCH_S:.0f} s whether it still runs"


def _take(path: Path, holder: Holder, say: Callable[[str], object]) -> RunLock:
    silent: Holder | None = None
    while True:
        with _turn(path):
            present = _read(path)
            ended = present is None or present == silent or present.has_ended()
            if ended:
                path.write_text(holder.model_dump_json(indent=1) + "\n", encoding="utf-8")
                return RunLock(path, holder)
        assert present is not None
        if ended is None:
            say(_watching(path, present))
        if ended is not None or _gives_sign_of_life(path, present):
            raise CuboidError(
                f"{str(path.parent)!r} is in use by another run: {present}. Wait until it has ended, or give this one "
                "another folder"
            )
        silent = present


def _gives_sign_of_life(path: Path, holder: Holder) -> bool:
    """Watch another host's lock; returns at once when it is touched. False too if it is released meanwhile."""
    first, deadline = _touched(path), time.monotonic() + _WATCH_S
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        if _read(path) != holder:
            return False
        if _touched(path) != first:
            return True
    return False


def _touched(path: Path) -> int:
    try:
        # Opened, because network file systems ask the server then.
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return 0


def _read(path: Path) -> Holder | None:
    """The process that a lock names; None if there is none, or it was never finished. Another file is an error."""
    try:
        with open(open_regular(path), encoding="utf-8", errors="replace") as file:
            text = file.read(_LONGEST)
        return Holder.model_validate_json(text) if text else None
    except FileNotFoundError:
        return None
    except CheckpointError as error:
        raise CuboidError(f"{error}, where a run's lock has to be; move it away") from None
    except ValidationError:
        raise CuboidError(f"{path}: isn't the lock of a run of Cuboid's; move it away") from None


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Inside, no other process of this host takes or releases the lock; the file is there, empty if it is new."""
    deadline = time.monotonic() + _TURN_S
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno == errno.EISDIR:
                _read(path)
            raise CuboidError(f"{path}: can't be written: {error.strerror}") from None
        try:
            is_ours = _lock(descriptor)
            # Whoever held it may have removed the file.
            if is_ours and path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                yield
                return
        finally:
            os.close(descriptor)
        if time.monotonic() > deadline:
            raise CuboidError(f"{path}: another process is changing it, for {_TURN_S:.0f} s now")
        time.sleep(0.02)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network file systems have no such locks; there, only a moment is unprotected.
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _start_of(pid: int) -> float:
    """When a process began: Linux's own count of ticks since the boot, which no change of the clock moves."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return float(stat.rpartition(")")[2].split()[19])
    except FileNotFoundError:
        # Not Linux, or there is no such process; this raises then.
        return psutil.Process(pid).create_time()


def _process_table() -> str:
    boot = _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else ""
    return f"{host_identity('pid')} {boot}"
