"""Symbolic links in a checkpoint: one that leads out of it would have other files of the user's read, and copied."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cuboid.errors import CheckpointError


def reject_outward_links(folder: Path, *, within: Path | None = None) -> None:
    """Check that no symbolic link below a checkpoint's folder leads out of it. The folder itself may be a link.

    Files of the Hugging Face Hub's cache may lead to its ``blobs``: ``snapshots/REVISION/NAME`` to ``blobs/HASH``.

    Args:
        folder: the checkpoint.
        within: a folder around it that links may lead into as well, such as that of all checkpoints of a run.

    Raises:
        CheckpointError: names the first link that does, and where it leads.
    """
    outward = next(_outward_links(folder, within), None)
    if outward is not None:
        raise CheckpointError(
            f"{outward}: is a link that leads out of the checkpoint, to {os.path.realpath(outward)}, and isn't "
            "followed; if that file belongs to the checkpoint, put it there in place of the link"
        )


def leads_outward(path: Path) -> bool:
    """Whether a file of a checkpoint's folder is a link that leads out of that folder, as above."""
    return not _is_inside(os.path.realpath(path), _roots(path.parent, None))


def _outward_links(folder: Path, within: Path | None) -> Iterator[Path]:
    roots, waiting = _roots(folder, within), [os.fspath(folder)] if folder.is_dir() else []
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                if entry.is_symlink():
                    # All at once: links to links, and targets with ``..``.
                    if not _is_inside(os.path.realpath(entry.path), roots):
                        yield Path(entry.path)
                elif entry.is_dir() and os.access(entry.path, os.R_OK | os.X_OK):
                    waiting.append(entry.path)


def _roots(folder: Path, within: Path | None) -> list[Path]:
    """Where links may lead to; of ``blobs``, to files directly in it."""
    root = Path(os.path.realpath(folder))
    roots = [root, *([] if within is None else [Path(os.path.realpath(within))])]
    roots += [place.parent.parent / "blobs" for place in (root, *root.parents) if place.parent.name == "snapshots"]
    return roots


def _is_inside(target: str, roots: list[Path]) -> bool:
    return any(Path(target).is_relative_to(root) for root in roots)
