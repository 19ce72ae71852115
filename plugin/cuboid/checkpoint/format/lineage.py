"""A checkpoint's provenance: the chain of checkpoints from which its run and the earlier runs were loaded."""

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

#: Key of the client state under which a script stores a fingerprint of its training data.
DATA_FINGERPRINT = "data_fingerprint"


class Ancestor(BaseModel):
    """A checkpoint that a run started or resumed from.

    Attributes:
        path: its folder at that time, or the name of the model that was loaded.
        id: unique id; None for a checkpoint that Cuboid didn't write.
        step: optimizer steps at the time it was written.
        created: time in UTC.
        config_sha256: hash of its run's config.
        data_fingerprint: fingerprint of its run's training data, if the script provided one.
        layout: mesh and stages of its run.
        versions: versions of the packages that wrote it.
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
    """The unique id and creation time of a new checkpoint, for its ``state.json``."""
    return {"id": uuid.uuid4().hex, "created": datetime.now(UTC).isoformat(timespec="seconds")}


def first_ancestors(source: str) -> list[Ancestor]:
    """The lineage of a run whose model was loaded from ``source``: a model's name or folder, or a checkpoint."""
    folder = Path(source)
    if source and (folder / MANIFEST).is_file() and (folder / STATE).is_file():
        return lineage_behind(folder, read_state(folder, Manifest.read(folder)))
    return [Ancestor(path=source)] if source else []


def lineage_behind(path: Path, document: Mapping[str, Any]) -> list[Ancestor]:
    """The lineage of a run that resumed from a checkpoint: the checkpoint's lineage and the checkpoint, oldest first.

    Args:
        path: the checkpoint's folder.
        document: contents of its ``state.json``.

    Raises:
        CheckpointError: the document lacks a key or is malformed.
    """
    try:
        # ``default=str`` for dates, which a config from YAML may have.
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
