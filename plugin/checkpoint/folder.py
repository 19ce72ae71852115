"""The folder of a checkpoint: made under another name, complete or not there at all, and found again after a crash."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path

from cuboid.checkpoint.manifest import MANIFEST, Manifest
from cuboid.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

LATEST = "latest"
INCOMPLETE = ".incomplete"
#: A checkpoint that gives way to a new one of the same tag, between two renames.
REPLACED = ".replaced"
_SUFFIXES = (INCOMPLETE, REPLACED)


def begin(root: Path, tag: str) -> Path:
    """Make a fresh folder for a checkpoint in the making.

    Raises:
        ConfigError: the tag isn't a plain file name.
        OSError: from the file system.
    """
    plain = tag not in ("", ".", "..", LATEST) and "/" not in tag and "\0" not in tag and tag == tag.strip()
    if not plain or tag.endswith(_SUFFIXES):
        raise ConfigError(
            f"tag {tag!r} can't be the name of a checkpoint: it has to be a plain file name, other than {LATEST!r}, "
            f"and not end in {' or '.join(_SUFFIXES)}"
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
    folder, final = root / f"{tag}{INCOMPLETE}", root / tag
    for name in manifest.files:
        _sync(folder / name)
    manifest.write(folder)
    for inner in {folder, *(path for path in folder.rglob("*") if path.is_dir())}:
        _sync(inner)
    old = root / f"{tag}{REPLACED}"
    if final.exists():
        if old.exists():
            shutil.rmtree(old)
        final.rename(old)
    folder.rename(final)
    _sync(root)
    if old.exists():
        shutil.rmtree(old)
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
    _sync(root)


def abandon(root: Path, tag: str) -> None:
    """Remove the folder of :func:`begin`, so far as that works."""
    shutil.rmtree(root / f"{tag}{INCOMPLETE}", ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what crashes have left: folders in the making, and replaced ones whose successor is there."""
    for path in root.glob(f"*{INCOMPLETE}"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    for path in root.glob(f"*{REPLACED}"):
        if _is_complete(root / path.name.removesuffix(REPLACED)):
            shutil.rmtree(path, ignore_errors=True)


def complete(root: Path) -> list[Path]:
    """The checkpoints in a folder, by step and then by age; replaced ones only where their successor is missing."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        tag = path.name.removesuffix(REPLACED)
        superseded = path.name.endswith(REPLACED) and _is_complete(root / tag)
        if _is_complete(path) and not path.name.endswith(INCOMPLETE) and not superseded:
            with contextlib.suppress(CheckpointError):
                found.append((Manifest.read(path).step, path.stat().st_mtime, path))
    return [path for _, _, path in sorted(found)]


def resolve(root: Path, tag: str | None = None) -> Path:
    """Find a checkpoint.

    Args:
        root: folder of checkpoints, or a checkpoint.
        tag: which one; None for the one that ``latest`` names, or the newest complete one after a crash.

    Raises:
        CheckpointError: there is none; says what there is.
    """
    if tag is None and (root / MANIFEST).is_file():
        return root
    latest = root / LATEST
    wanted = tag
    if tag is None and latest.is_file():
        wanted = latest.read_text(encoding="utf-8").strip()
    for name in () if wanted is None else (wanted, f"{wanted}{REPLACED}"):
        if _is_complete(root / name):
            return root / name
    found = complete(root)
    if tag is None and found:
        logger.warning("%s: names no complete checkpoint; going on from %s", latest, found[-1])
        return found[-1]
    raise CheckpointError(_nothing(root, wanted, found))


def prune(root: Path, keep_last: int) -> None:
    """Remove the oldest checkpoints but ``keep_last``, never the one that ``latest`` names.

    Raises:
        OSError: from the file system.
    """
    latest = root / LATEST
    named = latest.read_text(encoding="utf-8").strip() if latest.is_file() else None
    for path in complete(root)[:-keep_last]:
        if path.name != named:
            # No longer a checkpoint before it loses its first file.
            doomed = path.rename(root / f"{path.name}{INCOMPLETE}")
            shutil.rmtree(doomed)


def _is_complete(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _nothing(root: Path, wanted: str | None, found: list[Path]) -> str:
    where = root if wanted is None else root / wanted
    if not root.is_dir():
        return f"{root}: is not a folder, so there is no checkpoint to load"
    if any(where.glob("*mp_rank_*_model_states.pt")) or (where / "zero").is_dir():
        return f"{where}: is a checkpoint of DeepSpeed's own, made of pickles; turn it into one with `cuboid convert`"
    started = [path.name for path in sorted(root.glob(f"*{INCOMPLETE}")) if path.is_dir()]
    parts = []
    if found:
        parts.append(f"complete ones there: {', '.join(path.name for path in found)}")
    if started:
        parts.append(f"begun but never finished: {', '.join(started)}")
    return f"{where}: is not a checkpoint ({'; '.join(parts) or 'the folder has none'})"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
