"""Finds the modules of a model whose own code draws random numbers, by reading the byte code of their forwards.

``nn.Dropout`` modules are replaced when a model is sharded, but most architectures also call ``nn.functional.dropout``,
``torch.rand`` or numpy in code of their own. A run wouldn't find them all: they are behind probabilities and other
conditions. Byte code has all of them, whatever the config; source may be missing, or be another than what runs.
"""

from __future__ import annotations

import dis
import random
import types
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
from torch import nn

from cuboid.models.batch.generator_check import Library
from cuboid.tensor3d.layers.random_draws import RANDOM_FUNCTIONS

#: Packages whose functions aren't followed. They draw only in functions that are known by name.
_KNOWN = ("torch", "cuboid", "numpy", "builtins", "functools", "contextlib", "inspect", "logging", "warnings")
#: Names of tensors' methods that draw.
_METHODS = frozenset({"bernoulli", "multinomial", *(name for name in RANDOM_FUNCTIONS if name.endswith("_"))})
#: What modules call in place of attention's interface, which has seeds of its own, if none is registered.
_FALLBACK = "eager_attention_forward"
#: What a chain of names stands for if that isn't known before the code runs.
_UNKNOWN = object()


def libraries_drawn_from(cls: type[nn.Module]) -> frozenset[Library]:
    """The libraries from whose generators a module's forward may draw, except in its submodules' code."""
    libraries: set[Library] = set()
    seen: set[types.FunctionType] = set()
    # Of torch's own modules, only dropouts and the like draw, in their forward itself.
    pending = [vars(base).get("forward") for base in cls.__mro__ if base is cls or not _is_known(base)]
    while pending:
        called = pending.pop()
        if isinstance(called, staticmethod | classmethod | types.MethodType):
            called = called.__func__
        elif isinstance(called, property):
            called = called.fget
        elif isinstance(called, cached_property | partial):
            called = called.func
        # Functions that a decorator made share their code, but not what is in their cells.
        if not isinstance(called, types.FunctionType) or called in seen:
            continue
        seen.add(called)
        contents = {}
        for name, cell in zip(called.__code__.co_freevars, called.__closure__ or (), strict=True):
            with suppress(ValueError):  # empty
                contents[name] = cell.cell_contents
        # A decorator's function calls the one that it was given, which is in a cell.
        pending += contents.values()
        codes = [called.__code__]
        for code in codes:
            self_name = code.co_varnames[0] if code.co_argcount else None
            for chain in _chains(code):
                drawn, named = _follow(chain, cls, self_name, called.__globals__, contents)
                libraries |= drawn
                pending += named
            # Functions inside the function.
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(libraries)


def _is_known(x: Any) -> bool:
    return (getattr(x, "__module__", None) or "").partition(".")[0] in _KNOWN


def _follow(
    chain: tuple[str, ...], cls: type, self_name: str | None, names: Mapping[str, Any], cells: Mapping[str, Any]
) -> tuple[set[Library], list[Any]]:
    """Follow ``a.b.c``, whose first name has a prefix that tells where it is looked up, in a method of ``cls``.

    Returns:
        The libraries that it draws from, and what else it may call.
    """
    (scope, _, first), attributes = chain[0].partition(":"), chain[1:]
    libraries: set[Library] = set()
    called: list[Any] = []
    x: Any = _UNKNOWN
    if first == _FALLBACK:
        return libraries, called
    if scope == "global":
        x = names.get(first, _UNKNOWN)
    elif scope == "cell":
        x = cells.get(first, _UNKNOWN)
    elif scope == "local" and first == self_name and attributes:
        # ``self.dropout`` may be a submodule, a number or a method.
        called += [next((vars(base)[attributes[0]] for base in cls.__mro__ if attributes[0] in vars(base)), None)]
        if len(attributes) == 1:
            return libraries, called
    for attribute in attributes:
        if x is not _UNKNOWN and not isinstance(x, types.ModuleType | type):
            x = _UNKNOWN
        if x is _UNKNOWN:
            if attribute in _METHODS:
                libraries.add("torch")
            continue
        x = getattr(x, attribute, _UNKNOWN)
    owner, is_random = getattr(x, "__self__", None), getattr(x, "__name__", None) in RANDOM_FUNCTIONS
    if owner is random._inst:  # type: ignore[attr-defined]
        libraries.add("random")
    elif owner is np.random.mtrand._rand:
        libraries.add("numpy")
    elif callable(x) and _is_known(x):
        if is_random:
            libraries.add("torch")
    elif is_random and owner is not None:
        # Functions of C, such as ``torch.rand``, have no module.
        libraries.add("torch")
    else:
        called.append(x)
    return libraries, called


# Byte code can't change, unlike what its names stand for; each load would read that of the same functions.
@cache
def _chains(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Every ``a.b.c`` of a function, as names; the first has where it is looked up before it."""
    chains: list[tuple[str, ...]] = []
    chain: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        name, operation = instruction.argval, instruction.opname
        if operation in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*(chain or ("result:",)), name)
            continue
        if chain:
            chains.append(chain)
        chain = ()
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = (f"global:{name}",)
        elif operation in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            chain = (f"cell:{name}",)
        elif operation.startswith("LOAD_FAST"):
            # Some versions of Python load two variables at once, of which the last may have attributes.
            chain = (f"local:{name[-1] if isinstance(name, tuple) else name}",)
    return tuple(dict.fromkeys([*chains, chain] if chain else chains))
