"""A checkpoint that is written by several calls, such as ColossalAI's ``save_model`` and ``save_optimizer``.

A call whose document has the same ``id`` as the existing checkpoint adds to it: the parts that the call doesn't write
are carried over into the new checkpoint, which then replaces the old one atomically, as any other does.
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

#: Keys of ``state.json`` that only one of the calls knows.
_CARRIED_KEYS = ("optimizer", "scheduler", "scheduler_class")


@dataclass(frozen=True)
class CarriedOver:
    """What a new checkpoint has from the one that it replaces.

    Attributes:
        records: of the files.
        document: keys of ``state.json``.
    """

    records: dict[str, FileRecord] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)

    def added_to(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """A new document with the keys that it lacks itself."""
        return {**document, **{key: value for key, value in self.document.items() if document.get(key) is None}}


def carry_over(old: Path, folder: Path, contents: Contents) -> CarriedOver:
    """Put the files of the same state that aren't written this time into the new checkpoint's folder.

    Args:
        old: the checkpoint that is going to be replaced; it may not exist.
        folder: of the new checkpoint.
        contents: that are going to be written.

    Raises:
        OSError: from the file system.
    """
    try:
        manifest = Manifest.read(old)
        document = read_state(old, manifest)
    except CheckpointError:
        # There is none, or a damaged one, whose id can't be trusted.
        return CarriedOver()
    if document.get("id") != contents.document.get("id"):
        return CarriedOver()
    # A part is the optimizer's folder or, with the empty name, the weights and what lies beside them.
    rewritten = {family.folder.partition("/")[0] for family in contents.families}
    records = {}
    for name, record in manifest.files.items():
        part = OPTIMIZER if name.startswith(f"{OPTIMIZER}/") else ""
        if part in rewritten or name in (STATE, TENSORS):
            continue
        records[name] = record
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            # A hard link is enough, because files of a checkpoint are never modified.
            os.link(old / name, folder / name)
        except OSError:
            shutil.copyfile(old / name, folder / name)
    return CarriedOver(records, {key: document[key] for key in _CARRIED_KEYS if document.get(key) is not None})
