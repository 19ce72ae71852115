"""The user's sections of the framework's config file, validated into one frozen object.

Cuboid's keys live in DeepSpeed's own sections. :func:`split_config` takes them out, checks them, and hands
the rest on untouched. Nothing here allocates or talks to another rank.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import SkipJsonSchema

from cuboid.errors import ConfigError
from cuboid.topology import MeshShape

ConfigSource = str | Path | Mapping[str, Any]

#: Keys that mark a ``tensor_parallel`` section as Cuboid's. Any of them is enough, so that a section whose
#: ``mode`` was forgotten or misspelt is diagnosed instead of being passed on.
_OWN_KEYS = ("mode", "mesh", "size", "gather_logits")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class MeshConfig(_Section):
    """Sizes of the mesh axes. Any sizes will do, not only cubes, so long as they divide the model."""

    batch: int = Field(1, ge=1, description="Ranks that share the batch dim of every activation.")
    sequence: int = Field(1, ge=1, description="Ranks that share the sequence dim of the residual stream.")
    hidden: int = Field(1, ge=1, description="Ranks that share the hidden dim of the residual stream.")

    @property
    def shape(self) -> MeshShape:
        """The same sizes as a :class:`~cuboid.topology.MeshShape`."""
        return MeshShape(self.batch, self.sequence, self.hidden)


class TensorParallelConfig(_Section):
    """The ``tensor_parallel`` section."""

    mode: Literal["3d_tensor"] = Field(description="Selects Cuboid's 3-D tensor parallelism.")
    mesh: MeshConfig | Literal["auto"] = Field(
        description='Axis sizes, or "auto" to take the mesh of `size` ranks that moves the fewest bytes.'
    )
    size: int | None = Field(None, ge=1, description='Ranks of the mesh; needed with, and only with, `"mesh": "auto"`.')
    gather_logits: Literal["auto"] | bool = Field(
        "auto",
        description="Whether the forward returns whole logits `[batch, sequence, vocabulary]` beside a loss. "
        '"auto": in evaluation only. Without labels they are always returned.',
    )
    autotp_size: int | None = Field(
        None,
        description="Written by Cuboid for accelerate and the HF Trainer; if given, it must equal the mesh's size.",
    )

    @model_validator(mode="after")
    def _sizes_agree(self) -> TensorParallelConfig:
        if self.mesh == "auto":
            if self.size is None:
                raise ValueError('"mesh": "auto" needs "size", the number of ranks of the mesh')
        elif self.size is not None and self.size != self.mesh.shape.size:
            raise ValueError(
                f'"size" is {self.size}, but mesh {self.mesh.shape} has {self.mesh_size} ranks; leave "size" out'
            )
        if self.autotp_size not in (None, 0, self.mesh_size):
            raise ValueError(
                f"autotp_size is {self.autotp_size}, but the mesh has {self.mesh_size} ranks; leave autotp_size out"
            )
        return self

    @property
    def mesh_size(self) -> int:
        """Ranks of the mesh, known also where its shape is still ``"auto"``."""
        if self.mesh != "auto":
            return self.mesh.shape.size
        assert self.size is not None
        return self.size


class CuboidConfig(_Section):
    """Everything Cuboid read from a config: one section for each thing that it adds to the framework."""

    tensor_parallel: TensorParallelConfig
    #: Rows of a micro-batch, where the framework's own train_micro_batch_size_per_gpu says; not a key of ours.
    micro_batch: SkipJsonSchema[int | None] = None


def load_config(source: ConfigSource) -> dict[str, Any]:
    """Read a config from a JSON or YAML file, or copy it from a mapping.

    Raises:
        ConfigError: no such file, or not a JSON/YAML mapping.
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"config {str(path)!r} does not exist (a path to a .json or .yaml file, or a dict)")
    text = path.read_text(encoding="utf-8")
    try:
        loaded = yaml.safe_load(text) if path.suffix in (".yaml", ".yml") else json.loads(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config {str(path)!r} can't be read: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"config {str(path)!r} holds a {type(loaded).__name__}, not a mapping of keys")
    return loaded


def split_config(source: ConfigSource) -> tuple[CuboidConfig | None, dict[str, Any]]:
    """Separate Cuboid's keys from the framework's.

    Returns:
        The validated config (None where the file has no key of ours) and the rest, ready for the framework.

    Raises:
        ConfigError: an unknown key, a wrong type, or sizes that contradict each other.
    """
    rest = load_config(source)
    _refuse_pipeline(rest.get("pipeline"))
    section = rest.get("tensor_parallel")
    if not isinstance(section, dict) or not any(key in section for key in _OWN_KEYS):
        return None, rest
    del rest["tensor_parallel"]
    try:
        micro_batch = rest.get("train_micro_batch_size_per_gpu")
        rows = micro_batch if isinstance(micro_batch, int) else None
        return CuboidConfig.model_validate({"tensor_parallel": section, "micro_batch": rows}), rest
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def parse_config(source: ConfigSource | CuboidConfig) -> CuboidConfig:
    """Like :func:`split_config` for callers that need the mode to be on.

    Raises:
        ConfigError: as there, and where the config doesn't switch Cuboid on.
    """
    if isinstance(source, CuboidConfig):
        return source
    config, _ = split_config(source)
    if config is None:
        raise ConfigError(
            'the config has no key of Cuboid\'s; add "tensor_parallel": '
            '{"mode": "3d_tensor", "mesh": {"batch": 1, "sequence": 1, "hidden": 1}}'
        )
    return config


def _refuse_pipeline(section: object) -> None:
    # DeepSpeed takes any key in this section without a word, so an engine that isn't there would be ignored.
    if isinstance(section, dict) and "engine" in section:
        raise ConfigError(
            f"pipeline.engine is {section['engine']!r}: this version has no pipeline engine; leave the key out"
        )


def _explain(error: ValidationError) -> str:
    return "\n".join(_explain_one(item["loc"], item["msg"], item["type"], item.get("input")) for item in error.errors())


def _explain_one(location: tuple[int | str, ...], message: str, kind: str, given: object) -> str:
    # pydantic names the tried member of a union in the location; users know only their own keys.
    keys = [str(part) for part in location if part not in ("MeshConfig", "literal['auto']", "bool")]
    path = ".".join(keys)
    if kind == "extra_forbidden":
        known = sorted(MeshConfig.model_fields) if "mesh" in keys[:-1] else sorted(_public_fields())
        near = difflib.get_close_matches(keys[-1], known, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"known keys: {', '.join(known)}"
        return f"{path} is not a known key; {hint}"
    if kind == "missing":
        return f"{path} is missing"
    return f"{path}: {message.removeprefix('Value error, ')} (given: {given!r})"


def _public_fields() -> list[str]:
    return [name for name in TensorParallelConfig.model_fields if name != "autotp_size"]
