"""Where a checkpoint comes from: the chain of checkpoints that were loaded on the way to it, oldest first."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from cuboid.checkpoint.format.manifest import MANIFEST, Manifest
from cuboid.checkpoint.format.state_file import STATE, read_state
from cuboid.errors import CheckpointError

#: A key of the client state that says which data a run saw.
DATA_FINGERPRINT = "data_fingerprint"


class Ancestor(BaseModel):
    """A checkpoint that a run started or resumed from.

    Attributes:
        path: where it was, or the name that it was loaded by.
        id: its own; None for a checkpoint that isn't of ours.
        step: optimizer steps that it was written after.
        created: when, in UTC.
        config_sha256: of the config that its run had.
        data_fingerprint: of the data that its run saw, if it said so.
        layout: how the ranks held the model.
        versions: of the packages that wrote it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    id: str | None = None
    step: int | None = None
    created: str | None = None
    config_sha256: str | None = None
    data_fingerprint: str | None = None
    layout: dict[str, Any] | None = None
    versions: dict[str, str] | None = None


def new_identity() -> dict[str, str]:
    """What tells a checkpoint from all others, for its document."""
    return {"id": uuid.uuid4().hex, "created": datetime.now(UTC).isoformat(timespec="seconds")}


def first_ancestors(source: str) -> list[Ancestor]:
    """The chain of a model that was loaded from ``source``: a folder, perhaps one of our checkpoints, or a name."""
    folder = Path(source)
    if source and (folder / MANIFEST).is_file() and (folder / STATE).is_file():
        return lineage_behind(folder, read_state(folder, Manifest.read(folder)))
    return [Ancestor(path=source)] if source else []


def lineage_behind(path: Path, document: Mapping[str, Any]) -> list[Ancestor]:
    """The chain of a run that resumed from a checkpoint: the checkpoint's own, and it.

    Args:
        path: of the checkpoint.
        document: what its ``state.json`` says.

    Raises:
        CheckpointError: the document isn't what a checkpoint says of itself.
    """
    try:
        # A config may come from YAML, which has dates.
        config = json.dumps(document["config"], sort_keys=True, default=str)
        fingerprint = document["client"].get(DATA_FINGERPRINT)
        own = Ancestor(
            path=str(path.absolute()),
            id=document["id"],
            step=document["steps"]["optimizer"],
            created=document["created"],
            config_sha256=hashlib.sha256(config.encode()).hexdigest(),
            data_fingerprint=None if fingerprint is None else str(fingerprint),
            layout=document["layout"],
            versions=document["versions"],
        )
        return [*map(Ancestor.model_validate, document["lineage"]), own]
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise CheckpointError(f"{path / STATE}: doesn't say where the checkpoint comes from: {error!r}") from error
