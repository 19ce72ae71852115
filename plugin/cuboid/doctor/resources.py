"""What this host has for ranks: shared memory, disk, limits of processes."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cuboid.doctor.finding import Finding, note, problem, right, within

_SHARED = Path("/dev/shm")
_FILE_SYSTEM_S = 20.0
_GIB = 1 << 30
#: Docker gives 64 MiB, where NCCL's buffers and data loaders' batches end in bus errors.
_LEAST_SHARED, _LEAST_SHARED_FREE = _GIB // 2, _GIB // 4
_LEAST_DISK, _LEAST_FILES = _GIB, 1000
#: gloo has a connection to each other rank in each group.
_LEAST_OPEN, _BETTER_OPEN = 1024, 4096


def shared_memory() -> Iterator[Finding]:
    """Whether /dev/shm is there and large enough."""
    check = "shared memory"
    try:
        space = within(_FILE_SYSTEM_S, lambda: os.statvfs(_SHARED))
    except (OSError, TimeoutError):
        yield problem(check, f"{_SHARED} is not there", f"mount a tmpfs there: mount -t tmpfs -o size=8g shm {_SHARED}")
        return
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    text = f"{_SHARED}: {free / _GIB:.2f} of {size / _GIB:.2f} GiB free"
    if size < _LEAST_SHARED:
        yield problem(check, f"{text}, too few", "docker run --shm-size=8g (or --ipc=host); else a larger tmpfs")
    elif free < _LEAST_SHARED_FREE:
        yield problem(check, f"{text}, too few", f"see `ls -l {_SHARED}`: remove what killed processes have left")
    else:
        yield right(check, text)


def disk(folder: Path, needed: int = 0) -> Iterator[Finding]:
    """Whether files can be written to a folder, or where it will be, and whether there is room for ``needed`` bytes."""
    try:
        place, space, may_write = within(_FILE_SYSTEM_S, lambda: _space(folder))
    except TimeoutError:
        yield problem("disk", f"{folder}: its file system doesn't answer", "look at its server, and at `mount`")
        return
    except OSError as error:
        yield problem("disk", f"{folder}: can't be reached: {error.strerror}", "choose another folder")
        return
    free = space.f_bavail * space.f_frsize
    text = f"{folder}: {free / _GIB:.1f} GiB free"
    if not place.is_dir():
        yield problem("disk", f"{folder}: {place} is a file", "choose another folder, or move the file away")
    elif space.f_flag & os.ST_RDONLY or not may_write:
        reason = "is read-only" if space.f_flag & os.ST_RDONLY else "may not be written by this user"
        yield problem("disk", f"{folder}: {place} {reason}", "choose another folder")
    elif free < max(needed, _LEAST_DISK):
        why = f", but the newest checkpoint there takes {needed / _GIB:.1f}" if needed > _LEAST_DISK else ""
        yield problem("disk", text + why, "remove files, or choose a folder on another disk")
    elif space.f_files and space.f_favail < _LEAST_FILES:
        yield problem("disk", f"{folder}: room for {space.f_favail} more files", "remove files (`df -i` shows them)")
    else:
        yield right("disk", text)


def _space(folder: Path) -> tuple[Path, os.statvfs_result, bool]:
    """The folder itself or the nearest that exists, its file system, and whether it may be written."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place, os.statvfs(place), os.access(place, os.W_OK | os.X_OK)


def temporary_folder() -> Iterator[Finding]:
    """Whether there is a folder for temporary files, with room."""
    try:
        folder = Path(within(_FILE_SYSTEM_S, tempfile.gettempdir))
    except (OSError, TimeoutError) as error:
        yield problem("disk", f"no folder for temporary files: {error}", "set TMPDIR to a folder with room")
    else:
        yield from disk(folder)


def limits() -> Iterator[Finding]:
    """Whether the limits of this shell's processes are high enough."""
    open_files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    cure = f"ulimit -n {most if most != resource.RLIM_INFINITY else 65536} before the launcher"
    if open_files != resource.RLIM_INFINITY and open_files < _LEAST_OPEN:
        if most != resource.RLIM_INFINITY and most < _LEAST_OPEN:
            cure = "raise nofile in /etc/security/limits.conf, or LimitNOFILE of the service"
        yield problem("limits", f"{open_files} open files", cure)
    elif open_files != resource.RLIM_INFINITY and open_files < _BETTER_OPEN:
        yield note("limits", f"{open_files} open files, few for many ranks", cure)
    else:
        yield right("limits", f"{_shown(open_files)} open files")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and _has_infiniband():
        cure = "ulimit -l unlimited; docker run --ulimit memlock=-1"
        yield problem("limits", f"{locked:,} bytes of locked memory, too few for InfiniBand's buffers", cure)
    else:
        yield right("limits", f"{_shown(locked)} bytes of locked memory")
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if size != resource.RLIM_INFINITY:
        text = f"files end at {size:,} bytes: a checkpoint's may be larger"
        yield problem("limits", text, "ulimit -f unlimited")


def _has_infiniband() -> bool:
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
