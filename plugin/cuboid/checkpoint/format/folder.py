"""The life cycle of a checkpoint's folder: written under a temporary name, renamed when complete, found after a crash.

A checkpoint is either complete or doesn't exist. In a folder of checkpoints, ``TAG.incomplete`` is one that is being
written (or was, when its job crashed), and ``TAG.replaced`` is the previous ``TAG`` while a new one takes its place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from cuboid.checkpoint.format.bounded_files import is_plain_name, read_bytes
from cuboid.checkpoint.format.manifest import MANIFEST, Manifest, check_contents, check_sizes
from cuboid.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

LATEST = "latest"
INCOMPLETE = ".incomplete"
#: Suffix of a folder that `cuboid convert` is writing. Not that of a save, because a run that saves beside it removes
#: the incomplete folders of its own crashes.
CONVERTING = ".converting"
#: Suffix of the previous checkpoint of a tag, between the two renames that replace it.
REPLACED = ".replaced"
_SUFFIXES = (INCOMPLETE, CONVERTING, REPLACED)
_LONGEST_NAME = 4096


def begin(root: Path, tag: str) -> Path:
    """Create an empty ``TAG.incomplete`` to write a checkpoint into.

    Raises:
        ConfigError: the tag isn't a plain file name.
        CheckpointError: ``TAG`` exists and isn't a checkpoint.
        OSError: from the file system.
    """
    plain = tag not in ("", ".", "..", LATEST) and "/" not in tag and "\0" not in tag and tag == tag.strip()
    if not plain or tag.endswith(_SUFFIXES):
        raise ConfigError(
            f"tag {tag!r} can't be the name of a checkpoint: it has to be a plain file name, other than {LATEST!r}, "
            f"and not end in {', '.join(_SUFFIXES)}"
        )
    check_replaceable(root / tag)
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"{tag}{INCOMPLETE}"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


def check_replaceable(path: Path) -> None:
    """Check that a checkpoint can take this place: nothing is there, or another checkpoint.

    Raises:
        CheckpointError: something else is there.
    """
    # Some scripts create the folder themselves before they save into it.
    is_empty = path.is_dir() and not any(path.iterdir())
    if path.exists() and not _is_complete(path) and not is_empty:
        raise CheckpointError(
            f"{path}: is there and isn't a checkpoint of Cuboid's (it has no {MANIFEST}), so it isn't replaced; save "
            "under another tag, or move it away"
        )


def commit(root: Path, tag: str, manifest: Manifest) -> Path:
    """Publish the folder of :func:`begin` as a checkpoint, replacing one of the same tag.

    Everything is synced to disk before the rename; a crash at any point leaves the old checkpoint or the new one. Files
    that users have put beside those of the old one move to the new one.

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
            _discard_replaced(old)
        final.rename(old)
    folder.rename(final)
    sync(root)
    if old.exists():
        # The new checkpoint is published; if the old one can't be removed now, the next save's ``sweep`` does it.
        with contextlib.suppress(OSError):
            _discard_replaced(old)
    return final


def point_latest(root: Path, tag: str) -> None:
    """Make ``latest`` name a checkpoint, atomically.

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
    """Remove the folder of :func:`begin`; errors are ignored."""
    shutil.rmtree(root / f"{tag}{INCOMPLETE}", ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what earlier crashes left: incomplete folders, and replaced ones whose successor exists.

    Only for a folder that belongs to one run: incomplete folders of others may be being written. Errors are ignored.
    """
    with contextlib.suppress(OSError):
        (root / f"{LATEST}{INCOMPLETE}").unlink()
    for path in _folders(root, INCOMPLETE):
        shutil.rmtree(path, ignore_errors=True)
    for path in _folders(root, REPLACED):
        if _is_complete(root / path.name.removesuffix(REPLACED)):
            with contextlib.suppress(OSError):
                _discard_replaced(path)


def complete(root: Path) -> list[Path]:
    """The complete checkpoints in a folder, by step and then by time; a replaced one only if its successor isn't."""
    return [path for _, _, path in sorted(_complete(root))]


def _complete(root: Path) -> list[tuple[int, int, Path]]:
    """Step, time in ns and path of each complete checkpoint in a folder."""
    checkpoints = []
    for path in root.iterdir() if root.is_dir() else ():
        superseded = path.name.endswith(REPLACED) and _is_complete(root / path.name.removesuffix(REPLACED))
        if _is_complete(path) and not superseded:
            with contextlib.suppress(CheckpointError):
                checkpoints.append((Manifest.read(path).step, (path / MANIFEST).stat().st_mtime_ns, path))
    return checkpoints


def has_any(root: Path) -> bool:
    """Whether a folder has a checkpoint that was finished once, damaged or not."""
    return os.path.lexists(root / LATEST) or (root.is_dir() and any(map(_is_complete, root.iterdir())))


def others_beside(path: Path) -> list[Path]:
    """The other complete checkpoints in a checkpoint's parent folder, newest first."""
    with contextlib.suppress(OSError):
        return [other for other in reversed(complete(path.parent)) if other != path]
    return []


def is_intact(path: Path, names: Callable[[Manifest], Iterable[str]]) -> bool:
    """Whether all files of a checkpoint exist with the right size, and those in ``names`` match their checksums."""
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
        tag: which one; None for the one that ``latest`` names or, if that isn't complete, the newest complete one.

    Raises:
        CheckpointError: there is none; the message lists what the folder has instead.
    """
    if tag is None and _is_complete(root):
        return root
    name = _latest_tag(root) if tag is None else tag
    if name:
        if _is_complete(root / name):
            return root / name
        replaced = root / f"{name}{REPLACED}"
        if _is_complete(replaced):
            logger.warning("%s: was being replaced when its writer ended; resuming from the one before", replaced)
            return replaced
    checkpoints = complete(root)
    if tag is None and checkpoints:
        logger.warning("%s: names no complete checkpoint; resuming from %s", root / LATEST, checkpoints[-1])
        return checkpoints[-1]
    raise CheckpointError(_explain_missing(root, name, checkpoints))


def prune(root: Path, keep_last: int, newest: str, among: Collection[str] | None = None) -> None:
    """Remove checkpoints until ``keep_last`` (at least 1) are left: those that were written last.

    Neither ``newest`` nor the one that ``latest`` names is ever removed. A checkpoint that can't be removed now stays
    as an incomplete folder, with a warning: the new checkpoint is complete all the same.

    Args:
        root: the folder of checkpoints.
        keep_last: number to keep.
        newest: tag of the checkpoint that was just published. Its step may be lower than that of others, after a
            rollback, and file systems' times may be equal.
        among: tags that may be removed; None for all, in a folder that belongs to one run.
    """
    assert keep_last >= 1, "the newest checkpoint is never pruned"
    protected = {newest, _latest_tag(root)}
    tags = [(path.name.removesuffix(REPLACED), path) for _, _, path in sorted(_complete(root), key=lambda one: one[1])]
    candidates = [(tag, path) for tag, path in tags if tag != newest and (among is None or tag in among)]
    for tag, path in candidates[: max(0, len(candidates) - (keep_last - 1))]:
        if tag in protected:
            continue
        doomed = root / f"{path.name}{INCOMPLETE}"
        try:
            shutil.rmtree(doomed, ignore_errors=True)
            # Renamed first, so that a crash during the removal doesn't leave a damaged checkpoint.
            shutil.rmtree(path.rename(doomed))
        except OSError as error:
            logger.warning("%s: can't be removed (checkpoint.keep_last): %s", path, error.strerror or error)


def _is_complete(path: Path) -> bool:
    return (path / MANIFEST).is_file() and not path.name.endswith((INCOMPLETE, CONVERTING))


def _latest_tag(root: Path) -> str | None:
    """The tag in ``latest``: None if there is no such file, empty if it doesn't hold a valid name."""
    return read_pointer(root / LATEST) if os.path.lexists(root / LATEST) else None


def read_pointer(path: Path) -> str:
    """The name in a file such as ``latest`` that points to a folder beside it; empty if it isn't a valid name."""
    try:
        name = read_bytes(path, _LONGEST_NAME).decode(errors="replace").strip()
    except CheckpointError as error:
        logger.warning("%s", error)
        return ""
    return name if is_plain_name(name) else ""


def _folders(root: Path, suffix: str) -> list[Path]:
    return [path for path in root.glob(f"*{suffix}") if path.is_dir() and not path.is_symlink()]


def _discard_replaced(old: Path) -> None:
    """Remove ``TAG.replaced``, after what users have added to it has moved to ``TAG``."""
    _keep_added(old, old.with_name(old.name.removesuffix(REPLACED)))
    _discard(old)


def _keep_added(old: Path, final: Path) -> None:
    """Move files that a checkpoint's manifest doesn't name to the checkpoint that replaces it, if it has none there."""
    try:
        names = {MANIFEST, *Manifest.read(old).files}
    except CheckpointError:
        # Damaged, so that nothing tells which files are the user's.
        return
    added = [path for path in old.rglob("*") if path.is_symlink() or not path.is_dir()]
    for path in added:
        name = path.relative_to(old)
        if name.as_posix() not in names and not os.path.lexists(final / name):
            (final / name).parent.mkdir(parents=True, exist_ok=True)
            path.rename(final / name)


def _discard(path: Path) -> None:
    """Remove a checkpoint, its manifest first, so that a crash doesn't leave what looks like a checkpoint."""
    (path / MANIFEST).unlink(missing_ok=True)
    sync(path)
    shutil.rmtree(path)


def _explain_missing(root: Path, name: str | None, checkpoints: list[Path]) -> str:
    """Why :func:`resolve` found no checkpoint, and what to do about it."""
    where = root / name if name else root
    if not root.is_dir():
        return f"{root}: is not a folder, so there is no checkpoint to load"
    if not checkpoints:
        for path in (where, *sorted(root.iterdir())):
            if path.is_dir() and (any(path.glob("*mp_rank_*_model_states.pt")) or (path / "zero").is_dir()):
                return (
                    f"{path}: is a checkpoint of DeepSpeed's own, made of pickles; turn it into one with "
                    "`cuboid convert`"
                )
    if (where / "config.json").is_file():
        return (
            f"{where}: is a model without optimizer state and {MANIFEST}: train on from its weights alone, with "
            "load_module_only=True (DeepSpeed), load_model (ColossalAI), or as the model to start from"
        )
    started = [path.name for path in sorted(_folders(root, INCOMPLETE))]
    remarks = []
    if checkpoints:
        remarks.append(f"complete ones there: {', '.join(path.name for path in checkpoints)}")
    if started:
        remarks.append(f"begun but never finished: {', '.join(started)}")
    return f"{where}: is not a checkpoint ({'; '.join(remarks) or 'the folder has none'})"


def sync(path: Path) -> None:
    """``fsync`` a file, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
