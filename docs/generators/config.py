"""Write the tables of keys in docs/config.md and docs/colossalai.md from the schemas that keys are checked with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from cuboid.config.schema import CuboidConfig
from cuboid.integrations.colossalai.plugin_config import BoosterConfig
from generators.marked import table


def parts() -> dict[str, dict[str, str]]:
    """Tables of all keys."""
    return {"config.md": {"keys": _table(CuboidConfig)}, "colossalai.md": {"keys": _table(BoosterConfig)}}


def _table(keys: type[BaseModel]) -> str:
    schema = keys.model_json_schema()
    return table(["key", "type", "default", "meaning"], list(_rows(schema, schema["$defs"], prefix="")))


def _rows(section: dict[str, Any], definitions: dict[str, Any], prefix: str) -> Iterator[list[str]]:
    """One row for each key, and below it those of the object that it may hold."""
    for name, schema in section["properties"].items():
        nested = next((definitions[member] for member in map(_reference, _members(schema)) if member), None)
        # A section that can be nothing but an object is shown by its keys.
        if not (nested is not None and len(_members(schema)) == 1):
            default = "required" if name in section.get("required", ()) else _value(schema.get("default"))
            yield [f"`{prefix}{name}`", _kind(schema), default, schema["description"]]
        if nested is not None:
            yield from _rows(nested, definitions, f"{prefix}{name}.")


def _members(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a union, without null."""
    return [member for member in schema.get("anyOf", [schema]) if member.get("type") != "null"]


def _reference(schema: dict[str, Any]) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _kind(schema: dict[str, Any]) -> str:
    return " or ".join(_kind_of_member(member) for member in _members(schema))


def _kind_of_member(member: dict[str, Any]) -> str:
    if _reference(member):
        return "object"
    if "const" in member:
        return _value(member["const"])
    if "enum" in member:
        return " or ".join(map(_value, member["enum"]))
    if member["type"] == "array":
        return f"[{_kind_of_member(member['items'])}, …]"
    least = f" ≥ {member['minimum']}" if "minimum" in member else ""
    return f"{member['type']}{least}"


def _value(value: Any) -> str:
    return "–" if value is None else f"`{json.dumps(value)}`"
