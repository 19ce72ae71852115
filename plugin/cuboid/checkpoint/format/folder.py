"""The folder of a checkpoint: made under another name, complete or not there at all, and found again after a crash.

In a folder of checkpoints, names that end in ``.incomplete`` or ``.replaced`` are taken for what crashes left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from cuboid.checkpoint.format.bounded_files import is_plain_name, read_bytes
from cuboid.checkpoint.format.manifest import MANIFEST, Manifest, check_contents, check_sizes
from cuboid.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

LATEST = "latest"
INCOMPLETE = ".incomplete"
#: A checkpoint that gives way to a new one of the same tag, between two renames.
REPLACED = ".replaced"
_SUFFIXES = (INCOMPLETE, REPLACED)
_LONGEST_NAME = 4096


def begin(root: Path, tag: str) -> Path:
    """Make a fresh folder for a checkpoint in the making.

    Raises:
        ConfigError: the tag isn't a plain file name.
        CheckpointError: something else than a checkpoint has that name.
        OSError: from the file system.
    """
    plain = tag not in ("", ".", "..", LATEST) and "/" not in tag and "\0" not in tag and tag == tag.strip()
    if not plain or tag.endswith(_SUFFIXES):
        raise ConfigError(
            f"tag {tag!r} can't be the name of a checkpoint: it has to be a plain file name, other than {LATEST!r}, "
            f"and not end in {' or '.join(_SUFFIXES)}"
        )
    final = root / tag
    if final.exists() and not _is_complete(final) and not _is_empty(final):
        raise CheckpointError(
            f"{final}: is there and isn't a checkpoint of Cuboid's (it has no {MANIFEST}), so it isn't replaced; save "
            "under another tag, or move it away"
        )
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"{tag}{INCOMPLETE}"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


def commit(root: Path, tag: str, manifest: Manifest) -> Path:
    """Turn the folder of :func:`begin` into a checkpoint, in the place of one of the same tag.

    Every file is on the disk when it gets its name; a crash leaves the old one or the new one.

    Raises:
        OSError: from the file system.
    """
    folder, final, old = root / f"{tag}{INCOMPLETE}", root / tag, root / f"{tag}{REPLACED}"
    for name in manifest.files:
        sync(folder / name)
    manifest.write(folder)
    for inner in {folder, *(path for path in folder.rglob("*") if path.is_dir())}:
        sync(inner)
    if final.exists():
        if old.exists():
            _discard(old)
        final.rename(old)
    folder.rename(final)
    sync(root)
    if old.exists():
        # The new one is there; what can't be removed now is swept up later.
        with contextlib.suppress(OSError):
            _discard(old)
    return final


def point_latest(root: Path, tag: str) -> None:
    """Let ``latest`` name a checkpoint, at once.

    Raises:
        OSError: from the file system.
    """
    scratch = root / f"{LATEST}{INCOMPLETE}"
    with open(scratch, "w", encoding="utf-8") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(root / LATEST)
    sync(root)


def abandon(root: Path, tag: str) -> None:
    """Remove the folder of :func:`begin`, so far as that works."""
    shutil.rmtree(root / f"{tag}{INCOMPLETE}", ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what crashes have left, so far as that works.

    These are folders in the making, and replaced ones whose successor is there.
    """
    with contextlib.suppress(OSError):
        (root / f"{LATEST}{INCOMPLETE}").unlink()
    for path in _folders(root, INCOMPLETE):
        shutil.rmtree(path, ignore_errors=True)
    for path in _folders(root, REPLACED):
        if _is_complete(root / path.name.removesuffix(REPLACED)):
            with contextlib.suppress(OSError):
                _discard(path)


def complete(root: Path) -> list[Path]:
    """The checkpoints in a folder, by step and then by age; replaced ones only where their successor is missing."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        superseded = path.name.endswith(REPLACED) and _is_complete(root / path.name.removesuffix(REPLACED))
        if _is_complete(path) and not superseded:
            with contextlib.suppress(CheckpointError):
                found.append((Manifest.read(path).step, (path / MANIFEST).stat().st_mtime_ns, path))
    return [path for _, _, path in sorted(found)]


def others_beside(path: Path) -> list[Path]:
    """The other checkpoints in the folder that a checkpoint is in, the newest first."""
    with contextlib.suppress(OSError):
        return [other for other in reversed(complete(path.parent)) if other != path]
    return []


def is_intact(path: Path, names: Callable[[Manifest], Iterable[str]]) -> bool:
    """Whether a checkpoint's files are there, and the named ones hold what was written."""
    try:
        manifest = Manifest.read(path)
        check_sizes(path, manifest)
        check_contents(path, manifest, names(manifest))
    except (CheckpointError, OSError):
        return False
    return True


def resolve(root: Path, tag: str | None = None) -> Path:
    """Find a checkpoint.

    Args:
        root: folder of checkpoints, or a checkpoint.
        tag: which one; None for the one that ``latest`` names, or the newest complete one after a crash.

    Raises:
        CheckpointError: there is none; says what there is.
    """
    if tag is None and _is_complete(root):
        return root
    wanted = _named(root) if tag is None else tag
    if wanted:
        if _is_complete(root / wanted):
            return root / wanted
        replaced = root / f"{wanted}{REPLACED}"
        if _is_complete(replaced):
            logger.warning("%s: was being replaced when its writer ended; resuming from the one before", replaced)
            return replaced
    found = complete(root)
    if tag is None and found:
        logger.warning("%s: names no complete checkpoint; resuming from %s", root / LATEST, found[-1])
        return found[-1]
    raise CheckpointError(_nothing(root, wanted, found))


def prune(root: Path, keep_last: int) -> None:
    """Remove the oldest checkpoints but ``keep_last`` (at least 1), never the one that ``latest`` names.

    Raises:
        OSError: from the file system.
    """
    assert keep_last >= 1, "the newest checkpoint is never pruned"
    latest = _named(root)
    for path in complete(root)[:-keep_last]:
        if path.name.removesuffix(REPLACED) != latest:
            # No longer a checkpoint before it loses its first file.
            doomed = root / f"{path.name}{INCOMPLETE}"
            shutil.rmtree(doomed, ignore_errors=True)
            shutil.rmtree(path.rename(doomed))


def _is_complete(path: Path) -> bool:
    return (path / MANIFEST).is_file() and not path.name.endswith(INCOMPLETE)


def _is_empty(path: Path) -> bool:
    # Some scripts make the folder before they save into it.
    return path.is_dir() and not any(path.iterdir())


def _named(root: Path) -> str | None:
    """What ``latest`` names; something that can be no checkpoint's name as what isn't there."""
    return named_in(root / LATEST) if os.path.lexists(root / LATEST) else None


def named_in(path: Path) -> str:
    """The name in a file that names a folder beside it; empty where it holds none."""
    try:
        name = read_bytes(path, _LONGEST_NAME).decode(errors="replace").strip()
    except CheckpointError as error:
        logger.warning("%s", error)
        return ""
    return name if is_plain_name(name) else ""


def _folders(root: Path, suffix: str) -> list[Path]:
    return [path for path in root.glob(f"*{suffix}") if path.is_dir() and not path.is_symlink()]


def _discard(path: Path) -> None:
    """Remove a checkpoint, which is no longer one from the first moment on."""
    (path / MANIFEST).unlink(missing_ok=True)
    sync(path)
    shutil.rmtree(path)


def _nothing(root: Path, wanted: str | None, found: list[Path]) -> str:
    where = root / wanted if wanted else root
    if not root.is_dir():
        return f"{root}: is not a folder, so there is no checkpoint to load"
    foreign = next((path for path in (where, *sorted(root.iterdir())) if _is_pickled(path)), None)
    if foreign is not None and not found:
        return f"{foreign}: is a checkpoint of DeepSpeed's own, made of pickles; turn it into one with `cuboid convert`"
    if (where / "config.json").is_file():
        return (
            f"{where}: is a model without optimizer state and {MANIFEST}: train on from its weights alone, with "
            "load_module_only=True (DeepSpeed), load_model (ColossalAI), or as the model to start from"
        )
    started = [path.name for path in sorted(_folders(root, INCOMPLETE))]
    parts = []
    if found:
        parts.append(f"complete ones there: {', '.join(path.name for path in found)}")
    if started:
        parts.append(f"begun but never finished: {', '.join(started)}")
    return f"{where}: is not a checkpoint ({'; '.join(parts) or 'the folder has none'})"


def _is_pickled(path: Path) -> bool:
    """Whether a folder is one of DeepSpeed's checkpoints."""
    return path.is_dir() and (any(path.glob("*mp_rank_*_model_states.pt")) or (path / "zero").is_dir())


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
