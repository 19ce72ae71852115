"""The code that a model of a class runs, and whether it is the libraries' own.

A verdict holds for the code that was probed. Scripts and libraries replace functions, methods, classes and entries of
registries, so a class's name doesn't say which code that is. This follows the names from the classes of a small model's
modules through the functions that they call, and notes whatever isn't what its module's source defines.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import copyreg
import enum
import functools
import hashlib
import inspect
import itertools
import json
import logging
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from cuboid.models.certification.module_source import UNKNOWN, ModuleSource, Statement, source_of
from cuboid.models.plain_construction import plain_construction

#: Packages whose code is known by its version, and isn't followed.
_FIXED = frozenset(
    {
        *sys.stdlib_module_names,
        *("numpy", "scipy", "triton", "einops", "torch", "torchvision", "typing_extensions", "huggingface_hub"),
        "pybind11_builtins",
    }
)
_OURS = frozenset({"cuboid", "cuboid_patches"})
#: Code of transformers that loads, saves, initializes and generates, but has no part in a step. Its loader replaces
#: some of it for a while.
_NO_PART_MODULES = (
    *("transformers.initialization", "transformers.generation", "transformers.utils.logging", "torch.nn.init"),
    *("transformers.utils.import_utils", "transformers.utils.auto_docstring", "transformers.utils.doc"),
    *("transformers.core_model_loading", "transformers.conversion_mapping", "transformers.trainer"),
    *("transformers.integrations.deepspeed", "transformers.integrations.fsdp", "transformers.integrations.peft"),
    *("transformers.distributed", "transformers.integrations.tensor_parallel", "transformers.integrations.accelerate"),
    # Of object detection and speech.
    "transformers.loss.loss_",
    *("torch.distributed", "torch._", "torch.compiler", "torch.fx", "torch.cuda", "torch.export", "torch.onnx"),
)
_NO_PART = frozenset(
    {
        *("post_init", "init_weights", "_init_weights", "_initialize_weights", "initialize_weights", "tie_weights"),
        *("from_pretrained", "_from_config", "from_config", "save_pretrained", "generate", "push_to_hub"),
        *("prepare_inputs_for_generation", "resize_token_embeddings", "reset_parameters"),
        # What classes remember of themselves at a first call.
        *("_can_set_attn_implementation_cached_value", "_can_set_experts_implementation_cached_value", "_auto_class"),
    }
)
#: Methods of torch's modules that run without being named.
_CALLED = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl", "__init__", "__getattr__"})
#: Those that all modules are made of; what these call is known by torch's version.
_BASES = frozenset({"torch.nn.modules.module", "torch.nn.modules.container", "torch.nn.modules.lazy"})
#: What ``torch.nn.Module`` has under other names.
_ALIASES = {"__call__": "_wrapped_call_impl", "forward": "_forward_unimplemented"}
#: What decides how a model is split is looked up without being named by its code.
_LOOKED_UP = frozenset({"base_model_tp_plan", "_tp_plan"})
#: Decorators whose wrapper is a function of another name.
_WRAPPERS = {
    "context_decorator": frozenset({"no_grad", "enable_grad", "inference_mode", "autocast"}),
    "get_nonrecursive_disable_wrapper": frozenset({"disable"}),
}
_CONSTANTS = (
    *(int, float, complex, str, bytes, bool, type(None), type(...), torch.dtype, torch.device, torch.Size),
    *(PurePath, re.Pattern, torch.memory_format, enum.Enum),
)
#: Attributes that Python or a metaclass makes.
_MADE = frozenset(
    {
        *("__doc__", "__dict__", "__weakref__", "__module__", "__qualname__", "__annotations__", "__slots__"),
        "__slotnames__",
    }
)
_MOST_OBJECTS = 20_000


class Seen:
    """What a walk saw. Comparing it with the present, in every forward, runs no Python code for each object."""

    def __init__(self) -> None:
        #: Of each name in a module, class or registry: what looks names up there, the name, and its value.
        self._lookups: list[Callable[..., Any]] = []
        self._names: list[Any] = []
        self._values: list[Any] = []
        #: Classes and registries, and how many names they have.
        self._mappings: list[Mapping[Any, Any]] = []
        self._sizes: list[int] = []
        #: Functions, and one after the other what each is made of.
        self._functions: list[FunctionType] = []
        self._parts: list[Any] = []
        #: Cells of closures, with the functions and classes in them.
        self._cells: list[types.CellType] = []
        self._contents: list[Any] = []

    def add_function(self, function: FunctionType) -> None:
        """Note a function, with its code and defaults."""
        self._functions.append(function)
        self._parts += _parts_of(function)
        if (keywords := function.__kwdefaults__) is not None:
            for name, value in keywords.items():
                self.add_name(keywords, name, value, is_library=True)
        contents = _closure(function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if callable(contents.get(name)):
                self._cells.append(cell)
                self._contents.append(contents[name])

    def add_mapping(self, mapping: Mapping[Any, Any], entries: Mapping[Any, Any], *, is_library: bool) -> None:
        """Note entries of a registry, or attributes of a class, and how many it has in all."""
        for name, value in entries.items():
            if name not in _NO_PART:
                self.add_name(mapping, name, value, is_library=is_library)
        self._mappings.append(mapping)
        self._sizes.append(len(mapping))

    def add_name(self, mapping: Mapping[Any, Any], name: Any, value: Any, *, is_library: bool) -> None:
        """Note a name, unless it is a script's constant: scripts count steps in such."""
        if is_library or not isinstance(value, _CONSTANTS):
            # A registry's own `get` may be code of Python.
            self._lookups.append(dict.get.__get__(mapping) if isinstance(mapping, dict) else mapping.get)
            self._names.append(name)
            self._values.append(value)

    def is_current(self) -> bool:
        """Whether all of it is as it was."""
        # Pairs of objects go through `map` from one function of C to the next.
        present = map(operator.call, self._lookups, self._names, itertools.repeat(_ABSENT))
        return (
            all(map(operator.is_, present, self._values))
            and all(map(operator.eq, map(len, self._mappings), self._sizes))
            and all(map(operator.is_, itertools.chain.from_iterable(map(_parts_of, self._functions)), self._parts))
            and all(map(operator.is_, map(operator.attrgetter("cell_contents"), self._cells), self._contents))
        )


_ABSENT = object()
_parts_of = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


@dataclass(frozen=True)
class CodeIdentity:
    """The identity of the code that a model of a class runs.

    Args:
        digest: of all of it.
        files: digests of transformers' files that it is in, by their paths inside the package.
        changes: what isn't as its module's source has it, in words.
        unknown: what can't be identified, such as a tensor in a closure; a verdict on it holds in this process only.
        is_stock: whether all of it is transformers' and torch's own, as installed.
        seen: what it was found from.
        held: all objects whose addresses the digest may contain, so that no others get these.
    """

    digest: str
    files: Mapping[str, str]
    changes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    is_stock: bool = True
    seen: Seen | None = field(default=None, compare=False, repr=False)
    held: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    @property
    def is_current_stock(self) -> bool:
        """Whether it is the libraries' own code, and still as it was; False also if that isn't known."""
        return self.is_stock and self.seen is not None and self.seen.is_current()


@dataclass
class _Last:
    """The identity that was found last for a key."""

    key: Any
    identity: CodeIdentity | None = None


#: For a class, its config's class, and a config as text; and for what a walk starts from and chooses by.
_last, _last_walk = functools.lru_cache(maxsize=32)(_Last), functools.lru_cache(maxsize=32)(_Last)


def code_of(cls: type[PreTrainedModel], config: PretrainedConfig) -> CodeIdentity:
    """The identity of the code that a model of a class runs with a config."""
    last = _last((cls, type(config), json.dumps(config.to_dict(), sort_keys=True, default=str)))
    known: CodeIdentity | None = last.identity
    if known is None or not known.is_current_stock:
        known = last.identity = _walked(cls, config)
    return known


def _walked(cls: type[PreTrainedModel], config: PretrainedConfig) -> CodeIdentity:
    obstacle = ""
    try:
        with plain_construction(), torch.random.fork_rng(devices=[]), torch.device("meta"):
            kinds = tuple(dict.fromkeys(type(module) for module in cls(copy.deepcopy(config)).modules()))
    except Exception as error:
        # The probe's error says why.
        kinds, obstacle = (), f"not made: {type(error).__name__}"
    # Configs that differ in numbers alone have the same code.
    chosen = frozenset(_strings(config.to_dict()))
    last = _last_walk((cls, type(config), kinds, chosen, obstacle))
    known: CodeIdentity | None = last.identity
    if known is None or not known.is_current_stock:
        walk = _Walk(chosen)
        for root in (cls, type(config), *kinds):
            walk.root(root)
        if obstacle:
            walk.parts.add(obstacle)
        walk.finish()
        known = last.identity = walk.identity()
    return known


class _Walk:
    """A walk over the code that names lead to, among them ``chosen``: all strings in the config, by which it chooses
    among entries of registries.
    """

    def __init__(self, chosen: Set[str]) -> None:
        self._chosen = chosen
        self._seen: dict[int, str] = {}
        self._held: list[Any] = []
        self._bound: set[tuple[str, str]] = set()
        self._watched = Seen()
        self._pending: collections.deque[tuple[Any, str]] = collections.deque()
        #: Names in all code so far, and classes of which only what is named has a part.
        self._names: set[str] = set(_LOOKED_UP)
        self._by_name: dict[type, set[str]] = {}
        self.files: dict[str, str] = {}
        self.parts: set[str] = set()
        self.changes: dict[str, None] = {}
        self.unknown: dict[str, Any] = {}
        self.is_foreign = False

    def root(self, cls: type) -> None:
        """Start from a class."""
        self._value(cls, cls.__name__)
        home = sys.modules.get(cls.__module__)
        if _root(cls.__module__) in ("transformers", "torch") and home is not None and "." not in cls.__qualname__:
            self._binding(home, cls.__qualname__, cls)

    def finish(self) -> None:
        """Follow all names."""
        while self._pending or self._follow_names():
            if not self._pending:
                continue
            value, place = self._pending.popleft()
            if len(self._seen) > _MOST_OBJECTS:
                self.unknown["it is too much to follow"] = None
                return
            if isinstance(value, type):
                self._class(value)
            elif isinstance(value, FunctionType):
                self._function(value, place)

    def identity(self) -> CodeIdentity:
        """What the walk found."""
        named = [f"{name} {id(value)}" for name, value in self.unknown.items()]
        files = [f"{name} {digest}" for name, digest in self.files.items()]
        text = "\n".join(sorted([*self.parts, *files, *self.changes, *named]))
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32]
        is_stock = not (self.is_foreign or self.changes or self.unknown)
        for cls, visited in self._by_name.items():
            # Another value of a name that no code uses would give the same identity again.
            used = {name: value for name, value in vars(cls).items() if name in visited}
            self._watched.add_mapping(vars(cls), used, is_library=_root(cls.__module__) in ("transformers", "torch"))
        changes, unknown = tuple(sorted(self.changes)), tuple(sorted(self.unknown))
        return CodeIdentity(digest, self.files, changes, unknown, is_stock, self._watched, tuple(self._held))

    # --- names ---------------------------------------------------------------------------------------------------

    def _follow_names(self) -> bool:
        """Visit the attributes of classes that code names since the last time; whether there were any."""
        more = False
        for cls, done in list(self._by_name.items()):
            called = _CALLED if issubclass(cls, torch.nn.Module) else frozenset()
            for name in ((self._names | called) & vars(cls).keys()) - done:
                done.add(name)
                if name not in _NO_PART:
                    self._attribute(cls, name, vars(cls)[name])
                    more = True
        return more

    def _binding(self, home: ModuleType, name: str, value: Any, names: Set[str] = frozenset()) -> None:
        """A name of a module that some code uses."""
        if isinstance(value, ModuleType):
            self._watched.add_name(vars(home), name, value, is_library=_is_library(home))
            is_imported = _root(home.__name__) != "transformers" or _is_imported(home, name, value)
            if not is_imported:
                self._change(f"{home.__name__}.{name}", value)
            # Other packages' modules that transformers imports are known by their names.
            if _root(home.__name__) != "transformers" or not is_imported or _is_library(value):
                self._module(value, names)
            return
        key = (home.__name__, name)
        if key in self._bound or _has_no_part(home.__name__):
            return
        self._bound.add(key)
        self._watched.add_name(vars(home), name, value, is_library=_is_library(home))
        root, place = _root(home.__name__), f"{home.__name__.removeprefix('transformers.models.')}.{name}"
        if root in ("transformers", "torch"):
            self._library_name(home, name, value, place)
        elif root not in _FIXED and root not in _OURS:
            self.parts.add(f"{place} = {self._value(value, place)}")
        elif value is os.environ:
            self.unknown[place] = value
        elif isinstance(value, (list, *_CONSTANTS)):
            self.parts.add(f"{place} = {self._value(value, place)}")

    def _library_name(self, home: ModuleType, name: str, value: Any, place: str) -> None:
        if _root(home.__name__) == "torch":
            self._torchs_name(name, value, place)
            return
        source = source_of(home.__name__)
        statements = [] if source is None else source.statements(name)
        for origin, there in _origins(statements, value):
            if type(origin) is ModuleType and _is_library(origin):
                self._binding(origin, there, value)
            return
        if statements and all(statement.imported for statement in statements):
            self._change(place, value)
        elif isinstance(value, Mapping) or "_local_mapping" in getattr(value, "__dict__", {}):
            self._registry(home, name, "", value, place)
        elif isinstance(value, type):
            is_own = (value.__module__, value.__qualname__) == (home.__name__, name)
            if not is_own and _is_code(statements, value.__module__):
                self._change(place, value)
            self._value(value, place)
        elif _functions_in(value) or _is_code(statements, ""):
            if not _is_written(value, statements, name, home):
                self._change(place, value)
            self._value(value, place)
        elif isinstance(value, _CONSTANTS):
            if not _is_written_constant(value, statements):
                self._change(place, value)
            self.parts.add(f"{place} = {self._value(value, place)}")

    def _torchs_name(self, name: str, value: Any, place: str) -> None:
        """As :meth:`_library_name`, for torch, whose own code isn't followed."""
        if isinstance(value, type):
            if _root(value.__module__) not in ("torch", *_FIXED):
                self._change(place, value)
            self._value(value, place)
        elif callable(value):
            # Under its own name. `torch.linalg.norm` is `linalg_norm` in C.
            functions, names = _functions_in(value), {name, _ALIASES.get(name)}
            is_torchs = all(map(_is_of_library, functions)) and any(
                function.__name__ in names for function in functions
            )
            if not functions:
                # Neither partial functions nor objects that are called have a name.
                is_torchs = name.replace("_", "") in getattr(value, "__name__", "").replace("_", "")
            if not is_torchs:
                self._change(place, value)
            self._value(value, place)

    def _module(self, module: ModuleType, names: Set[str]) -> None:
        """The attributes of a module that code names."""
        if _has_no_part(module.__name__) or type(module) is not ModuleType:
            return
        content = vars(module)
        for name in names & content.keys():
            value = content[name]
            if isinstance(value, ModuleType) and (value is module or name != value.__name__.rpartition(".")[2]):
                continue
            self._binding(module, name, value, names if not isinstance(value, ModuleType) else names - {name})

    def _registry(self, home: ModuleType, name: str, scope: str, value: Any, place: str) -> None:
        """A table of functions or classes, from which configs choose."""
        source = source_of(home.__name__)
        written = None if source is None else source.table(name, scope)
        entries = _entries(value)
        self._watched.add_mapping(entries, dict(dict.items(entries)), is_library=True)
        if not isinstance(value, dict):
            self._value(type(value), place)
        # Reading some makes instances.
        for key, entry in dict(dict.items(entries)).items():
            inside = f"{place}[{key!r}]"
            if not callable(entry) and not isinstance(entry, (tuple, list, *_CONSTANTS)):
                continue
            is_written = written is not None and key in written
            if is_written and not _same(written[key], entry):  # type: ignore[index]
                self._change(inside, entry)
            elif not is_written and not isinstance(value, dict):
                # A model's module may register its own.
                if key in getattr(value, "_global_mapping", ()) or not _is_library_code(entry):
                    self._change(inside, entry)
            elif not is_written and isinstance(key, str) and key not in self._chosen:
                continue
            for item in entry if isinstance(entry, tuple) else (entry,):
                if callable(item):
                    text = self._value(item, inside)
                    if not is_written:
                        self.parts.add(f"{inside} = {text}")

    # --- code ----------------------------------------------------------------------------------------------------

    def _class(self, cls: type) -> None:
        for base in cls.__mro__:
            root = _root(base.__module__)
            if base in self._by_name or root in (_FIXED - {"torch"}) or _has_no_part(base.__module__):
                continue
            if issubclass(base, type | enum.Enum):
                continue
            done = self._by_name.setdefault(base, set())
            # A class is given this attribute when one of its objects is copied first; later, it would seem changed.
            copyreg._slotnames(base)  # type: ignore[attr-defined]
            is_followed = root not in ("torch", *_OURS, "transformers") or (
                base.__module__.startswith("transformers.models.") and issubclass(base, torch.nn.Module)
            )
            home = sys.modules.get(base.__module__)
            if root == "transformers" and home is not None and "." not in base.__qualname__:
                self._binding(home, base.__qualname__, vars(home).get(base.__qualname__))
            if is_followed:
                for name, value in list(vars(base).items()):
                    done.add(name)
                    if name not in _MADE and name not in _NO_PART:
                        self._attribute(base, name, value)
            if root not in ("transformers", "torch", *_OURS):
                self.is_foreign |= root not in _FIXED
                bases = ", ".join(f"{parent.__module__}.{parent.__qualname__}" for parent in base.__bases__)
                self.parts.add(f"class {base.__module__}.{base.__qualname__}({bases})")

    def _attribute(self, cls: type, name: str, value: Any) -> None:
        place, root = f"{cls.__qualname__}.{name}", _root(cls.__module__)
        if root in _OURS:
            return
        if root not in ("transformers", "torch"):
            self.parts.add(f"{cls.__module__}.{place} = {self._value(value, place)}")
            return
        if root == "torch":
            if _functions_in(value):
                self._torchs_name(name, value, place)
            return
        home, source = sys.modules.get(cls.__module__), source_of(cls.__module__)
        statements = [] if source is None else source.statements(name, cls.__qualname__)
        if isinstance(value, dict) and home is not None:
            self._registry(home, name, cls.__qualname__, value, place)
        elif _functions_in(value) or _is_code(statements, ""):
            if not _is_written(value, statements, name, cls):
                self._change(place, value)
            self._value(value, place)
        elif isinstance(value, _CONSTANTS) and not name.startswith("__"):
            # Decorators of classes add names, but don't hide those of a base.
            hides = not statements and any(name in vars(base) for base in cls.__mro__[1:])
            if hides or not _is_written_constant(value, statements):
                self._change(place, value)
            self.parts.add(f"{cls.__module__}.{place} = {value!r}")

    def _function(self, function: FunctionType, place: str) -> None:
        code, home = _code_of(function), function.__globals__.get("__name__", "")
        root, names = _root(home), _names_in(code)
        self._watched.add_function(function)
        self.is_foreign |= root not in (*_FIXED, *_OURS, "transformers") and not _is_generated(code)
        source = source_of(home) if root in ("transformers", "torch") else None
        if source is not None and source.has(code):
            if root == "transformers":
                self.files[home.removeprefix("transformers.").replace(".", "/")] = source.digest
            if not _has_written_defaults(function, source):
                self._change(f"defaults of {place}", (function.__defaults__, function.__kwdefaults__))
        elif root in ("transformers", "torch") and not _is_generated(code) and (source is None or not source.has(code)):
            self._change(place, function)
        module = sys.modules.get(home)
        if home.startswith("torch.nn.modules.") and home not in _BASES and module is not None:
            for name in names & function.__globals__.keys():
                self._binding(module, name, function.__globals__[name], names)
        if root in _FIXED or root in _OURS or _has_no_part(home) or module is None:
            return
        self._names |= names
        for name in names:
            if name in function.__globals__:
                self._binding(module, name, function.__globals__[name], names)
            elif root != "transformers" and name in sys.modules:
                self._module(sys.modules[name], names)

    # --- identities ----------------------------------------------------------------------------------------------

    def _change(self, place: str, value: Any) -> None:
        self.changes[f"{place} is {_words(value)}"] = None
        self.parts.add(f"{place} is {self._value(value, place)}")

    def _value(self, value: Any, place: str, depth: int = 0) -> str:
        """The identity of a value as text. The code in it will be followed."""
        if isinstance(value, _CONSTANTS):
            return f"{type(value).__name__} {value!r}"
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._held.append(value)
        self._seen[id(value)] = "itself"
        self._seen[id(value)] = text = self._identify(value, place, depth)
        return text

    def _identify(self, value: Any, place: str, depth: int) -> str:
        if isinstance(value, FunctionType):
            return self._identify_function(value, place, depth)
        if isinstance(value, type):
            self._pending.append((value, place))
            return f"class {value.__module__}.{value.__qualname__}"
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType):
            return f"{getattr(value, '__module__', None)}.{value.__qualname__}"
        inner = _inner(value)
        if inner:
            return f"{type(value).__name__}({', '.join(self._value(function, place, depth + 1) for function in inner)})"
        if isinstance(value, functools.partial | functools.partialmethod):
            state: Any = (value.func, value.args, value.keywords)
        elif isinstance(value, MethodType):
            state = (value.__func__, value.__self__)
        elif isinstance(value, Mapping) and isinstance(value, dict | types.MappingProxyType):
            state = [item for pair in value.items() for item in pair]
        elif isinstance(value, list | tuple | collections.deque):
            state = value
        elif isinstance(value, set | frozenset):
            return f"set {sorted(self._value(item, place, depth + 1) for item in value)}"
        elif isinstance(value, logging.Logger | typing.TypeVar) or typing.get_origin(value) is not None:
            return "no code"
        elif _has_plain_state(value):
            state = (type(value), vars(value))
        else:
            self.unknown[f"{place}, a {type(value).__name__}"] = value
            return f"unknown {type(value).__qualname__} {id(value)}"
        if depth > 8:
            self.unknown[f"{place}, which is nested too deeply"] = value
            return "deep"
        return f"{type(value).__name__} [{', '.join(self._value(item, place, depth + 1) for item in state)}]"

    def _identify_function(self, function: FunctionType, place: str, depth: int) -> str:
        self._pending.append((function, place))
        home = function.__globals__.get("__name__", "")
        label = f"{home}.{_code_of(function).co_qualname}"
        is_library = _root(home) in (*_FIXED, *_OURS, "transformers")
        # Libraries' closures hold locks and loggers, too, of which nothing depends.
        inside = {
            name: value
            for name, value in _closure(function).items()
            if name != "__class__" and (not is_library or _is_identifiable(value))
        }
        contexts = (_context_in(value) for value in _closure(function).values())
        inside["contexts"] = tuple(context for context in contexts if context is not None)
        defaults, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
        if is_library:
            defaults = tuple(default if _is_identifiable(default) else None for default in defaults)
            keywords = {name: value for name, value in keywords.items() if _is_identifiable(value)}
        else:
            label += f" {_digest_of(function.__code__)}"
        inside["defaults"] = (defaults, keywords)
        wrapped = vars(function).get("__wrapped__")
        if wrapped is not None:
            inside["wrapped"] = wrapped
        texts = [f"{name}={self._value(content, f'{place}, {name}', depth + 1)}" for name, content in inside.items()]
        return f"function {label} ({', '.join(texts)})"


# --- what is written in sources --------------------------------------------------------------------------------------


def _origins(statements: list[Statement], value: Any) -> Iterator[tuple[ModuleType, str]]:
    """Where a name is imported from, and the name there, if its value is what is found there."""
    for statement in statements:
        if statement.imported is None or statement.imported[1] is None:
            continue
        home, name = sys.modules.get(statement.imported[0]), statement.imported[1]
        if home is None or not _same(getattr(home, name, None), value):
            continue
        # Packages collect names that their modules define.
        if type(home) is not ModuleType or name not in vars(home):
            home = sys.modules.get(getattr(value, "__module__", None) or "", home)
        yield home, name


def _is_imported(home: ModuleType, name: str, value: ModuleType) -> bool:
    """Whether a module is what another one's source imports under a name."""
    source = source_of(home.__name__)
    for statement in [] if source is None else source.statements(name):
        if statement.imported is None:
            return True
        origin, inside = statement.imported
        package = sys.modules.get(origin)
        inner = (getattr(package, inside, None), sys.modules.get(f"{origin}.{inside}")) if inside else ()
        if value in (package, sys.modules.get(_root(origin)), *inner):
            return True
    return source is None or not source.statements(name)


def _is_code(statements: list[Statement], module: str) -> bool:
    """Whether a name is bound to a function or a class by a definition or an import; ``module`` is the value's."""
    return any(statement.codes or statement.imported for statement in statements) or (
        bool(module) and _root(module) not in ("transformers", "torch", "builtins")
    )


def _is_written_constant(value: Any, statements: list[Statement]) -> bool:
    """Whether a value is the literal that the only statement of its name has, if that has one."""
    literals = [statement.constants for statement in statements if statement.is_constant]
    return len(literals) != 1 or len(statements) != 1 or _same(literals[0][0], value)


def _is_written(value: Any, statements: list[Statement], name: str, owner: type | ModuleType) -> bool:
    """Whether a function, wrapped or not, is what one of the statements that bind its name in ``owner``, a class or a
    module, makes with the decorators there.
    """
    functions = _functions_in(value)
    if not functions:
        # A function of C under its own name, or one that torch compiled.
        actual_name = getattr(value, "__name__", None)
        return actual_name == name or any(
            "jit" in statement.names or "script" in statement.names for statement in statements
        )
    if not all(map(_is_of_library, functions)):
        return False
    around = _decorators_of(owner)
    if not statements:
        return all(_comes_from(function, around) or function.__code__.co_name == name for function in functions)
    codes = [function.__code__ for function in functions]
    return any(_makes(statement, functions, codes, around) for statement in statements)


def _makes(statement: Statement, functions: list[FunctionType], codes: list[CodeType], around: Set[str]) -> bool:
    names = statement.names | around
    if not any(code in codes for code in statement.codes):
        # An alias: ``forward = other``, or a call that makes a function.
        return not statement.codes and any(
            _comes_from(function, names) or function.__name__ in statement.names for function in functions
        )
    inner = next((function for function in functions if function.__code__ in statement.codes), None)
    return all(
        function.__code__ in statement.codes
        or _maker(function) is None
        or (_comes_from(function, names) and (inner is None or _is_called_as_written(function, inner)))
        for function in functions
    )


def _has_written_defaults(function: FunctionType, source: ModuleSource) -> bool:
    """Whether a function has the defaults that its source gives it, as far as these can be evaluated."""
    positional, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
    if not keywords and (
        not positional or any(_same(literals, positional) for literals in source.literals(function.__code__))
    ):
        return True
    header = source.header(function.__code__)
    if header is None:
        return True
    return (
        len(header.defaults) == len(positional)
        and all(map(_may_be, header.defaults, positional))
        and header.keyword_defaults.keys() == keywords.keys()
        and all(_may_be(value, keywords[name]) for name, value in header.keyword_defaults.items())
    )


def _may_be(written: Any, value: Any) -> bool:
    return written is UNKNOWN or _same(written, value)


def _is_called_as_written(wrapper: FunctionType, inner: FunctionType) -> bool:
    """Whether a decorator's wrapper holds the arguments that the decorated function's source gives the decorator."""
    maker = _maker(wrapper) or ""
    cells = {name: value for name, value in _closure(wrapper).items() if isinstance(value, _CONSTANTS)}
    contexts = [value for value in _closure(wrapper).values() if _context_in(value) is not None]
    source = source_of(inner.__globals__.get("__name__", ""))
    header = None if source is None or not (cells or contexts) else source.header(inner.__code__)
    decorators = [] if header is None else header.decorators
    if contexts and decorators:
        return all(_context_in(context) in {name for name, *_ in decorators} for context in contexts)
    made = [(args, keys) for name, args, keys in decorators if name == maker]
    takes = wrapper.__globals__.get(maker)
    if not made or not cells or not isinstance(takes, FunctionType):
        return True
    return any(_may_hold(takes, args, keys, cells) for args, keys in made)


def _may_hold(maker: FunctionType, args: tuple[Any, ...], keys: Mapping[str, Any], cells: Mapping[str, Any]) -> bool:
    """Whether a decorator that is called so leaves these values in its wrapper's closure."""
    try:
        bound = inspect.signature(maker).bind_partial(*args, **keys)
    except TypeError:
        return True
    bound.apply_defaults()
    return all(_may_be(bound.arguments.get(name, UNKNOWN), value) for name, value in cells.items())


def _context_in(value: Any) -> str | None:
    """The name of torch's context, such as no_grad, that a decorator's wrapper enters; None if it is none."""
    context = value.__self__ if isinstance(value, MethodType) else value
    kind = type(context)
    return kind.__name__ if _root(kind.__module__) == "torch" and hasattr(kind, "__enter__") else None


def _closure(function: FunctionType) -> dict[str, Any]:
    """What a function's closure holds, by name."""
    contents = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # Empty for a function that calls itself and is being made.
        with contextlib.suppress(ValueError):
            contents[name] = cell.cell_contents
    return contents


def _decorators_of(owner: type | ModuleType) -> set[str]:
    """The names of what may replace the methods of a class while it is made: its decorators and bases."""
    if isinstance(owner, ModuleType):
        return set()
    source = source_of(owner.__module__)
    statements = [] if source is None else source.statements(owner.__qualname__)
    hooks = {f"{base.__qualname__}.__init_subclass__" for base in owner.__mro__ if "__init_subclass__" in vars(base)}
    return hooks.union(*(statement.names for statement in statements))


def _comes_from(function: FunctionType, names: Set[str]) -> bool:
    """Whether one of the decorators with these names puts a function in place of another."""
    home, maker = function.__globals__.get("__name__", ""), _maker(function)
    if _root(home) in _OURS:
        return True
    if maker is None:
        # A default that a decorator gives to a class, from the decorator's own module.
        return _root(home) == "transformers" and not names.isdisjoint(_defined_in(home))
    return (
        maker in names or maker.rpartition(".")[2] in names or not _WRAPPERS.get(maker, frozenset()).isdisjoint(names)
    )


@functools.cache
def _defined_in(home: str) -> frozenset[str]:
    """The names of the functions that a module defines."""
    source = source_of(home)
    return frozenset() if source is None else frozenset(name for name in source.codes if "." not in name)


def _maker(function: FunctionType) -> str | None:
    """The name of the function inside which another was made; None if a module or class defines it."""
    first, _, rest = _code_of(function).co_qualname.partition(".<locals>")
    return first if rest else None


def _code_of(function: FunctionType) -> CodeType:
    """A function's code, with the name that its file gives it.

    From PyTorch 2.15 on, the wrappers of ``torch.no_grad`` and the like are named after it.
    """
    code, home = function.__code__, function.__globals__.get("__name__", "")
    source = source_of(home) if home == "torch.utils._contextlib" else None
    written = () if source is None else itertools.chain.from_iterable(source.codes.values())
    names = ((one, code.replace(co_name=one.co_name, co_qualname=one.co_qualname)) for one in written)
    return next((one for one, renamed in names if one == renamed), code)


def _is_of_library(function: FunctionType) -> bool:
    """Whether a function is code of an installed package that is known by its version, as its file has it."""
    home, code = function.__globals__.get("__name__", ""), _code_of(function)
    if _root(home) in ("transformers", "torch"):
        source = source_of(home)
        return (source is not None and source.has(code)) or _is_generated(code)
    return _root(home) in (*_FIXED, *_OURS) or home.startswith("namedtuple_")


def _is_library_code(value: Any) -> bool:
    """Whether what is called is a function or a class of an installed package, and not one made of it."""
    functions = _functions_in(value)
    return all(map(_is_of_library, functions)) if functions else isinstance(value, type | BuiltinFunctionType)


def _is_generated(code: CodeType) -> bool:
    """Whether a function was made from text, as by dataclasses."""
    return code.co_filename == "<string>"


def _functions_in(value: Any) -> list[FunctionType]:
    """A function and those that it wraps; none if it isn't one of Python."""
    functions: list[FunctionType] = []
    pending, seen = [value], set()
    while pending:
        candidate = pending.pop()
        if id(candidate) in seen:
            continue
        seen.add(id(candidate))
        if isinstance(candidate, FunctionType):
            functions.append(candidate)
            pending += [vars(candidate)["__wrapped__"]] if "__wrapped__" in vars(candidate) else []
            for cell in candidate.__closure__ or ():
                try:
                    pending += [cell.cell_contents] if callable(cell.cell_contents) else []
                except ValueError:
                    continue
        elif not isinstance(candidate, type | ModuleType):
            pending += _inner(candidate)
    return functions


def _inner(value: Any) -> list[Any]:
    """The functions inside a descriptor or wrapper."""
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [accessor for accessor in (value.fget, value.fset, value.fdel) if accessor is not None]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, functools._lru_cache_wrapper):
        return [value.__wrapped__]
    if isinstance(value, functools.partial | MethodType):
        return []
    made = getattr(type(value), "__module__", "")
    if _root(made) == "triton" and isinstance(getattr(value, "fn", None), FunctionType):
        return [value.fn]
    return []


# --- values ----------------------------------------------------------------------------------------------------------


def _entries(value: Any) -> dict[Any, Any]:
    """A registry's entries, where it stores them."""
    return value if isinstance(value, dict) else vars(value).get("_local_mapping", {})


def _same(written: Any, entry: Any) -> bool:
    if isinstance(written, tuple | list) and type(written) is type(entry) and len(written) == len(entry):
        return all(map(_same, written, entry))
    if written is entry:
        return True
    return not callable(written) and type(written) is type(entry) and bool(written == entry)


def _is_identifiable(value: Any) -> bool:
    """Whether a value in a library's function is one that may be replaced, and can be told from others."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_identifiable, value))
    if isinstance(value, functools.partial):
        return _is_identifiable((value.func, *value.args, *value.keywords.values()))
    return isinstance(value, (type, BuiltinFunctionType, *_CONSTANTS)) or bool(_functions_in(value))


def _has_plain_state(value: Any) -> bool:
    """Whether an object is nothing but its class and its attributes."""
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return True
    root = _root(type(value).__module__)
    is_library = root in _FIXED or isinstance(value, torch.nn.Module | os.PathLike)
    return not is_library and hasattr(value, "__dict__") and not isinstance(value, Mapping)


def _words(value: Any) -> str:
    """What stands in a place, for a person."""
    functions = _functions_in(value)
    if functions:
        outer = functions[0]
        return f"{outer.__globals__.get('__name__', '?')}.{outer.__code__.co_qualname}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value) if isinstance(value, _CONSTANTS) else f"a {type(value).__module__}.{type(value).__qualname__}"


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_library(module: ModuleType) -> bool:
    return _root(module.__name__) in ("transformers", "torch")


def _has_no_part(module: str) -> bool:
    return module.startswith(_NO_PART_MODULES) and module != "transformers.loss.loss_utils"


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(item)


@functools.cache
def _names_in(code: CodeType) -> frozenset[str]:
    """All names that a function and those inside it use."""
    inside = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(_names_in, inside))


@functools.cache
def _digest_of(code: CodeType) -> str:
    """Digest of what a function does, the same in all processes."""
    constants = [
        _digest_of(constant)
        if isinstance(constant, CodeType)
        else repr(sorted(map(repr, constant)))
        if isinstance(constant, frozenset)
        else repr(constant)
        for constant in code.co_consts
    ]
    parts = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags, code.co_argcount)
    return hashlib.sha256(repr((parts, code.co_kwonlyargcount, constants)).encode()).hexdigest()[:16]
