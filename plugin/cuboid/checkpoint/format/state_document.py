"""What ``state.json`` says: the parts that resuming a run needs, validated before any is used, and the provenance.

The provenance (lineage) is the chain of checkpoints from which a run and the earlier runs were loaded.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cuboid.checkpoint.format.bounded_files import is_plain_name
from cuboid.checkpoint.format.manifest import MANIFEST, Manifest, not_understood
from cuboid.checkpoint.format.state_file import STATE, read_state
from cuboid.errors import CheckpointError

#: Key of the client state under which a script stores a fingerprint of its training data.
DATA_FINGERPRINT = "data_fingerprint"
#: State words of the Mersenne Twister of Python and NumPy, without its position.
_WORDS = 624


class _StateSection(BaseModel):
    # Other versions may write further keys.
    model_config = ConfigDict(extra="ignore", strict=True, arbitrary_types_allowed=True)


class _Steps(_StateSection):
    optimizer: int = Field(ge=0)
    samples: int = Field(ge=0)
    skipped: int = Field(ge=0)


class _Optimizer(_StateSection):
    kind: str = Field(alias="class")
    quantities: list[str]
    numbers: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]

    @field_validator("quantities")
    @classmethod
    def _check_quantities(cls, names: list[str]) -> list[str]:
        for name in names:
            if not is_plain_name(name):
                raise ValueError(f"{name!r} isn't the name of a quantity's folder")
        return names

    @field_validator("numbers")
    @classmethod
    def _check_numbers(cls, numbers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for of_parameter in numbers.values():
            for key, value in of_parameter.items():
                single = isinstance(value, torch.Tensor) and value.dim() == 0
                if not isinstance(key, str) or not (single or isinstance(value, bool | int | float | None)):
                    raise ValueError(f"{key} is a {type(value).__name__}, not a number")
        return numbers

    @field_validator("groups")
    @classmethod
    def _check_groups(cls, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for group in groups:
            names = group.get("parameters")
            if "params" in group or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError("a group doesn't name its parameters")
        return groups


class _States(_StateSection):
    python: tuple[int, Any, float | None]
    numpy: tuple[str, Any, int, int, float]
    torch: Any

    @field_validator("python")
    @classmethod
    def _check_python_state(cls, state: tuple[int, Any, float | None]) -> tuple[int, Any, float | None]:
        _check_words(state[1], _WORDS + 1)
        if not 1 <= int(state[1][-1]) <= _WORDS:
            raise ValueError("its position is outside of its words")
        return state

    @field_validator("numpy")
    @classmethod
    def _check_numpy_state(cls, state: tuple[str, Any, int, int, float]) -> tuple[str, Any, int, int, float]:
        # ``np.random.set_state`` doesn't check the position, and would then read outside the words.
        _check_words(state[1], _WORDS)
        if state[0] != "MT19937" or not 0 <= state[2] <= _WORDS or state[3] not in (0, 1):
            raise ValueError("it isn't of NumPy's global generator")
        return state

    @field_validator("torch")
    @classmethod
    def _check_torch_state(cls, state: Any) -> Any:
        current = torch.get_rng_state()
        if not isinstance(state, torch.Tensor) or state.dtype != current.dtype or state.shape != current.shape:
            raise ValueError("it isn't of torch's generator")
        return state


def _check_words(words: Any, count: int) -> None:
    if not isinstance(words, np.ndarray) or words.dtype != np.uint32 or words.shape != (count,):
        raise ValueError(f"it has no {count} words")


class _Random(_StateSection):
    pipe: int = Field(ge=0)
    data: int = Field(ge=0)
    mesh: int = Field(ge=0)
    state: _States


class _Document(_StateSection):
    steps: _Steps
    random: list[_Random] = Field(min_length=1)
    client: dict[Any, Any]
    scheduler: dict[Any, Any] | None
    scheduler_groups: list[list[str]] | None = None
    optimizer: _Optimizer | None = None
    loss_scale: dict[str, int | float] | None = None


def check_document(document: dict[str, Any], path: Path) -> None:
    """Check that a ``state.json`` has everything that resuming uses, in the right type; ``path`` is for messages.

    Raises:
        CheckpointError: names the first key that isn't.
    """
    try:
        _Document.model_validate(document)
    except ValidationError as error:
        raise not_understood(path / STATE, error) from None
    # Resuming looks up a state by place, so each combination of pipe, data and mesh must occur exactly once.
    places = {(entry["pipe"], entry["data"], entry["mesh"]) for entry in document["random"]}
    ends = [max(place[axis] for place in places) + 1 for axis in range(3)]
    if len(places) != len(document["random"]) or len(places) != ends[0] * ends[1] * ends[2]:
        raise CheckpointError(f"{path / STATE}: doesn't have one random state for each place of its ranks")


# --- provenance ----------------------------------------------------------------------------------------------------


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

    Raises:
        CheckpointError: the document lacks a key or is malformed.
    """
    try:
        # ``default=str`` for dates, which a config from YAML may have.
        config = json.dumps(document["config"], sort_keys=True, default=str)
        fingerprint = document["client"].get(DATA_FINGERPRINT)
        ancestor = Ancestor(
            path=str(path.absolute()),
            id=document["id"],
            step=document["steps"]["optimizer"],
            created=document["created"],
            config_sha256=hashlib.sha256(config.encode()).hexdigest(),
            data_fingerprint=None if fingerprint is None else str(fingerprint),
            layout=document["layout"],
            versions=document["versions"],
        )
        return [*map(Ancestor.model_validate, document["lineage"]), ancestor]
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise CheckpointError(f"{path / STATE}: doesn't say where the checkpoint comes from: {error!r}") from error
