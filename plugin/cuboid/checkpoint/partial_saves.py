"""A checkpoint that is written by several calls: weights, optimizer and schedule of one and the same state.

A call whose document has the ``id`` of the checkpoint at its place adds to it: what the checkpoint has besides is taken
over into the new one, which then replaces it like any other, at once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuboid.checkpoint.contents import OPTIMIZER, Contents
from cuboid.checkpoint.format.manifest import FileRecord, Manifest
from cuboid.checkpoint.format.state_file import STATE, TENSORS, read_state
from cuboid.errors import CheckpointError

#: Of an earlier call's document, where the new one doesn't have them itself.
_KEPT = ("optimizer", "scheduler", "scheduler_class")


@dataclass(frozen=True)
class TakenOver:
    """What a checkpoint had besides.

    Attributes:
        records: of the files that the new one has too.
        document: of what is known only to the calls that wrote these parts.
    """

    records: dict[str, FileRecord] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)


def take_over(old: Path, folder: Path, contents: Contents) -> TakenOver:
    """Take the other parts of the same state into a checkpoint in the making.

    Args:
        old: what the checkpoint is going to replace, if there is one.
        folder: where it is in the making.
        contents: that are going to be written.

    Raises:
        OSError: from the file system.
    """
    try:
        manifest = Manifest.read(old)
        document = read_state(old, manifest)
    except CheckpointError:
        # None, or a damaged one, of which nobody knows what it was.
        return TakenOver()
    if document.get("id") != contents.document.get("id"):
        return TakenOver()
    rewritten = {family.folder.partition("/")[0] for family in contents.families}
    records = {
        name: record
        for name, record in manifest.files.items()
        if name not in (STATE, TENSORS) and _part_of(name) not in rewritten
    }
    for name in records:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _link(old / name, folder / name)
    return TakenOver(records, {key: document[key] for key in _KEPT if document.get(key) is not None})


def add_kept(document: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """A document with what an earlier call knew."""
    return {**document, **{key: value for key, value in kept.items() if document.get(key) is None}}


def _part_of(name: str) -> str:
    return OPTIMIZER if name.startswith(f"{OPTIMIZER}/") else ""


def _link(source: Path, target: Path) -> None:
    # Files of a checkpoint are never written again, so that two names for one will do.
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
