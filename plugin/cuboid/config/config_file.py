"""Reading a config as the framework reads it, without believing anything of it yet.

DeepSpeed takes a dict, the path of an HJSON file (JSON with comments, trailing commas and the like), or the text of
one in base64; accelerate takes JSON text too. All of these are read here, and YAML files. Nothing of a config that has
no key of Cuboid's is judged or changed here: see :func:`cuboid.config.schema.own_config`.
"""

from __future__ import annotations

import base64
import binascii
import copy
import math
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import hjson
import yaml

from cuboid.errors import ConfigError

ConfigSource = str | Path | Mapping[str, Any]

#: What no config comes near to, and what would take long, or much memory, to look at.
_MOST_BYTES = 4 * 2**20
_MOST_VALUES = 100_000
_MOST_LEVELS = 50

#: As accelerate fills it in.
_NEVER_PRINTED = (("steps_per_print",), math.inf)


def load_config(source: ConfigSource) -> dict[str, Any]:
    """Read a config from a JSON, HJSON or YAML file, or from such JSON in base64, or copy it from a mapping.

    Raises:
        ConfigError: no such file, or not a mapping, or something in it that no config can have.
    """
    return checked_copy(read_config(source))


def read_config(source: ConfigSource) -> Mapping[str, Any]:
    """As :func:`load_config`, before a look at the values; a mapping is given back as it is.

    Raises:
        ConfigError: it can't be read, or it isn't a mapping.
    """
    if isinstance(source, Mapping):
        return source
    name, text = config_text(source)
    try:
        loaded = yaml.load(text, _Loader) if _is_yaml(source) else _load_hjson(text)
    except (yaml.YAMLError, hjson.HjsonDecodeError, _DuplicateError) as error:
        raise ConfigError(f"config {name} can't be read: {' '.join(str(error).split())}") from None
    except (ValueError, RecursionError, OverflowError) as error:
        # A number of thousands of digits, a date that is none, brackets in brackets in brackets.
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"config {name} can't be read: {reason}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"config {name} holds {_kind(loaded)}, not a mapping of keys")
    return loaded


def config_text(source: ConfigSource) -> tuple[str, str]:
    """A name for messages, and the text that a file or a string has.

    Raises:
        ConfigError: there is no such file, and the string is no config; or it isn't text.
    """
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"a config is the path of a .json or .yaml file, or a dict, not {_kind(source)}")
    path = os.fspath(source)
    if os.path.isfile(path):
        return repr(path), _text_of_file(path)
    if os.path.exists(path):
        raise ConfigError(f"config {path!r} is not a file; name a .json or .yaml file")
    if path.lstrip().startswith("{"):
        return _shortened(path), path
    try:
        return _shortened(path), base64.urlsafe_b64decode(path).decode("utf-8")
    except (binascii.Error, ValueError):
        raise ConfigError(
            f"config {_shortened(path)} does not exist (a path to a .json or .yaml file, the text of one in base64, "
            "or a dict)"
        ) from None


def checked_copy(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config that is a tree of moderate size, of finite numbers, with keys that are strings.

    Raises:
        ConfigError: it is something else; the key is named.
    """
    _check_values(config)
    return copy.deepcopy(dict(config))


def is_auto(value: object) -> bool:
    """Whether the value is the placeholder that the HF Trainer and accelerate fill in."""
    return isinstance(value, str) and value == "auto"


def _is_yaml(source: ConfigSource) -> bool:
    return str(source).endswith((".yaml", ".yml"))


def _text_of_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"config {path!r} can't be read: {error.strerror}") from error
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"config {path!r} is longer than {_MOST_BYTES:,} bytes; is it a config?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"config {path!r} can't be read: it isn't UTF-8 text ({error.reason})") from None


def _shortened(text: str) -> str:
    return repr(text) if len(text) < 200 else f"{text[:80]!r}…"


def _kind(value: object) -> str:
    return {"NoneType": "nothing"}.get(type(value).__name__, f"a {type(value).__name__}")


class _DuplicateError(ValueError):
    """A key is there twice."""


def _unique(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    pairs = list(pairs)
    twice = [str(key) for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise _DuplicateError(f"{', '.join(twice)} is there more than once in a section; keep one")
    return dict(pairs)


def _load_hjson(text: str) -> Any:
    return hjson.loads(text, object_pairs_hook=_unique)


class _Loader(yaml.SafeLoader):
    """YAML, without keys that are there twice, of which the last would win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        written = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        _unique((key, None) for key in written if key != "<<")
        return super().construct_mapping(node, deep)


def _check_values(config: Mapping[str, Any]) -> None:
    """Look at every value, and through every alias of a YAML file as often as it is used."""
    seen = 0
    rest: list[tuple[tuple[str, ...], Any]] = [((), config)]
    while rest:
        keys, value = rest.pop()
        seen += 1
        if seen > _MOST_VALUES or len(keys) > _MOST_LEVELS:
            what = f"{_MOST_VALUES:,} values" if seen > _MOST_VALUES else f"{_MOST_LEVELS} levels"
            raise ConfigError(f"the config has more than {what}, below {keys[0]}; is an alias or a section repeated?")
        if isinstance(value, Mapping):
            _check_keys(keys, value)
            rest += [((*keys, str(key)), item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            rest += [((*keys, str(index)), item) for index, item in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value) and (keys, value) != _NEVER_PRINTED:
            raise ConfigError(f"{'.'.join(keys)} is {value}; no key takes a number that isn't finite")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{'.'.join(keys)} is a number of {value.bit_length()} bits; no key takes more than 64")


def _check_keys(keys: tuple[str, ...], section: Mapping[Any, Any]) -> None:
    for key in section:
        if not isinstance(key, str):
            raise ConfigError(f"{'.'.join((*keys, str(key)))}: keys are strings, not {_kind(key)}; put it in quotes")
