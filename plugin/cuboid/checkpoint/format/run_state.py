"""Validate the parts of ``state.json`` that resuming a run needs, before any of them is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cuboid.checkpoint.format.bounded_files import is_plain_name
from cuboid.checkpoint.format.manifest import not_understood
from cuboid.checkpoint.format.state_file import STATE
from cuboid.errors import CheckpointError

#: State words of the Mersenne Twister of Python and NumPy, without its position.
_WORDS = 624


class _Part(BaseModel):
    # Other versions may write further keys.
    model_config = ConfigDict(extra="ignore", strict=True, arbitrary_types_allowed=True)


class _Steps(_Part):
    optimizer: int = Field(ge=0)
    samples: int = Field(ge=0)
    skipped: int = Field(ge=0)


class _Optimizer(_Part):
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
        for own in numbers.values():
            for key, value in own.items():
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


class _States(_Part):
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
        own = torch.get_rng_state()
        if not isinstance(state, torch.Tensor) or state.dtype != own.dtype or state.shape != own.shape:
            raise ValueError("it isn't of torch's generator")
        return state


def _check_words(words: Any, count: int) -> None:
    if not isinstance(words, np.ndarray) or words.dtype != np.uint32 or words.shape != (count,):
        raise ValueError(f"it has no {count} words")


class _Random(_Part):
    pipe: int = Field(ge=0)
    data: int = Field(ge=0)
    mesh: int = Field(ge=0)
    state: _States


class _Document(_Part):
    steps: _Steps
    random: list[_Random] = Field(min_length=1)
    client: dict[Any, Any]
    scheduler: dict[Any, Any] | None
    scheduler_groups: list[list[str]] | None = None
    optimizer: _Optimizer | None = None
    loss_scale: dict[str, int | float] | None = None


def check_document(document: dict[str, Any], path: Path) -> None:
    """Check that everything that resuming uses is present and of the right type.

    Args:
        document: contents of ``state.json``.
        path: the checkpoint's folder, for messages.

    Raises:
        CheckpointError: names the first key that isn't.
    """
    try:
        _Document.model_validate(document)
    except ValidationError as error:
        raise not_understood(path / STATE, error) from None
    # Resuming looks up a state by place, so each combination of pipe, data and mesh must occur exactly once.
    places = {(each["pipe"], each["data"], each["mesh"]) for each in document["random"]}
    ends = [max(place[axis] for place in places) + 1 for axis in range(3)]
    if len(places) != len(document["random"]) or len(places) != ends[0] * ends[1] * ends[2]:
        raise CheckpointError(f"{path / STATE}: doesn't have one random state for each place of its ranks")
