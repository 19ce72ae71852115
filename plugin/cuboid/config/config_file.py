"""Read a config in all forms that the frameworks accept, as untrusted input.

DeepSpeed takes a dict, the path of an HJSON file (JSON with comments, trailing commas and the like), or the text of
one in base64; accelerate takes JSON text too. All of these are read here, and YAML files too. A config without a key of
Cuboid's is neither validated nor changed: see :func:`cuboid.config.schema.own_config`.
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

#: Limits far above any real config, to bound the time and memory for reading one.
_MOST_BYTES = 4 * 2**20
_MOST_VALUES = 100_000
_MOST_LEVELS = 50

#: The only infinite value that is accepted, because accelerate fills it in.
_NEVER_PRINTED = (("steps_per_print",), math.inf)


def load_config(source: ConfigSource) -> dict[str, Any]:
    """Read a config from a JSON, HJSON or YAML file, or from (H)JSON text or base64 of it; or copy it from a mapping.

    Raises:
        ConfigError: there is no such file, it isn't a mapping, or it has a value that no config can have.
    """
    return checked_copy(read_config(source))


def read_config(source: ConfigSource) -> Mapping[str, Any]:
    """Like :func:`load_config`, but without checking the values; a mapping is returned as it is.

    Raises:
        ConfigError: it can't be read, or it isn't a mapping.
    """
    if isinstance(source, Mapping):
        return source
    name, text = config_text(source)
    try:
        is_yaml = str(source).endswith((".yaml", ".yml"))
        loaded = yaml.load(text, _Loader) if is_yaml else hjson.loads(text, object_pairs_hook=_reject_duplicates)
    except (yaml.YAMLError, hjson.HjsonDecodeError, _DuplicateError) as error:
        raise ConfigError(f"config {name} can't be read: {' '.join(str(error).split())}") from None
    except (ValueError, RecursionError, OverflowError) as error:
        # Parsers raise these for a number of thousands of digits, an invalid date, or very deep nesting.
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"config {name} can't be read: {reason}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"config {name} holds {_kind(loaded)}, not a mapping of keys")
    return loaded


def config_text(source: ConfigSource) -> tuple[str, str]:
    """A name for messages, and the config's text: read from a file, given as a string, or decoded from base64.

    Raises:
        ConfigError: there is no such file, and the string isn't a config itself; or it isn't text.
    """
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"a config is the path of a .json or .yaml file, or a dict, not {_kind(source)}")
    path = os.fspath(source)
    # A file is tried first, as DeepSpeed does; base64 last, because most misspelt paths aren't valid base64.
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
    """A deep copy, after checking that sizes are within the limits, numbers are finite and keys are strings.

    Raises:
        ConfigError: names the offending key.
    """
    # An alias in YAML counts as often as it is used, since it could expand exponentially.
    seen = 0
    pending: list[tuple[tuple[str, ...], Any]] = [((), config)]
    while pending:
        keys, value = pending.pop()
        seen += 1
        if seen > _MOST_VALUES or len(keys) > _MOST_LEVELS:
            what = f"{_MOST_VALUES:,} values" if seen > _MOST_VALUES else f"{_MOST_LEVELS} levels"
            raise ConfigError(f"the config has more than {what}, below {keys[0]}; is an alias or a section repeated?")
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    named = ".".join((*keys, str(key)))
                    raise ConfigError(f"{named}: keys are strings, not {_kind(key)}; put it in quotes")
            pending += [((*keys, str(key)), item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            pending += [((*keys, str(index)), item) for index, item in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value) and (keys, value) != _NEVER_PRINTED:
            raise ConfigError(f"{'.'.join(keys)} is {value}; no key takes a number that isn't finite")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{'.'.join(keys)} is a number of {value.bit_length()} bits; no key takes more than 64")
    return copy.deepcopy(dict(config))


def is_auto(value: object) -> bool:
    """Whether the value is ``"auto"``, the placeholder that the HF Trainer and accelerate fill in."""
    return isinstance(value, str) and value == "auto"


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
    """A key occurs twice in a section."""


def _reject_duplicates(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    pairs = list(pairs)
    twice = [str(key) for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise _DuplicateError(f"{', '.join(twice)} is there more than once in a section; keep one")
    return dict(pairs)


class _Loader(yaml.SafeLoader):
    """A safe YAML loader that rejects duplicate keys; PyYAML's own would silently take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        # "<<" merges another mapping, and may occur several times.
        _reject_duplicates((key, None) for key in names if key != "<<")
        return super().construct_mapping(node, deep)
