"""What a module's source binds to its names, read from its compiled code, which is there without parsing the source."""

from __future__ import annotations

import ast
import dis
import hashlib
import importlib.util
import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_LOADS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF"})
_ENDS = frozenset({"STORE_SUBSCR", "STORE_ATTR", "POP_TOP"})
#: What a table of functions or classes, and arguments, may be written with, to be evaluated again.
_PLAIN = (ast.Dict, ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.List, ast.UnaryOp, ast.USub, ast.Load)


class _UnknownSource:
    """A value that its expression doesn't tell without running code."""


UNKNOWN = _UnknownSource()


@dataclass(frozen=True)
class Header:
    """What a function's source says around its body; :data:`UNKNOWN` for values that only running it would tell.

    Args:
        defaults: of its last positional parameters.
        keyword_defaults: of keyword-only parameters.
        decorators: names, and what they are called with.
    """

    defaults: tuple[Any, ...]
    keyword_defaults: Mapping[str, Any]
    decorators: list[tuple[str, tuple[Any, ...], Mapping[str, Any]]]


@dataclass
class Statement:
    """A statement that binds a name.

    Args:
        names: all names in it: decorators, bases, functions that are called.
        codes: of the function or class that it makes.
        constants: values in it.
        imported: module and name, if it is an import.
        lines: its first and last line.
    """

    names: set[str] = field(default_factory=set)
    codes: list[CodeType] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    imported: tuple[str, str | None] | None = None
    lines: tuple[int, int] = (sys.maxsize, 0)

    @property
    def is_constant(self) -> bool:
        """Whether it binds a literal."""
        return len(self.constants) == 1 and not self.names and not self.codes and self.imported is None


class ModuleSource:
    """The source of an imported module."""

    def __init__(self, module: ModuleType, code: CodeType, file: Path) -> None:
        self.module, self._code, self._file = module, code, file
        self._statements: dict[str, Mapping[str, list[Statement]]] = {}
        self._headers: dict[CodeType, Header | None] = {}

    @cached_property
    def digest(self) -> str:
        """Digest of the file."""
        return hashlib.sha256(self._file.read_bytes()).hexdigest()[:16]

    @cached_property
    def codes(self) -> Mapping[str, list[CodeType]]:
        """All functions and class bodies by their qualified names, of which there may be several definitions."""
        codes: dict[str, list[CodeType]] = {}
        for code in _inside(self._code):
            codes.setdefault(code.co_qualname, []).append(code)
        return codes

    def has(self, code: CodeType) -> bool:
        """Whether a code object is one of this file."""
        return code in self.codes.get(code.co_qualname, ())

    def statements(self, name: str, scope: str = "") -> list[Statement]:
        """The statements that bind a name in the module, or in the body of one of its classes."""
        if scope not in self._statements:
            statements: dict[str, list[Statement]] = {}
            for code in self.codes.get(scope, ()) if scope else (self._code,):
                for bound, statement in _statements(code, self.module.__package__ or ""):
                    statements.setdefault(bound, []).append(statement)
            self._statements[scope] = statements
        return self._statements[scope].get(name, [])

    def literals(self, code: CodeType) -> list[Any]:
        """The literals in the statement that makes a function; its defaults are one of them, if they are literals."""
        scope = code.co_qualname.rpartition(".")[0]
        if scope.endswith("<locals>"):
            return []
        made = (statement for statement in self.statements(code.co_name, scope) if code in statement.codes)
        return next((statement.constants for statement in made), [])

    def header(self, code: CodeType) -> Header | None:
        """The defaults and decorators of a function as the source has them; None if they can't be read."""
        if code not in self._headers:
            self._headers[code] = self._header(code)
        return self._headers[code]

    def _header(self, code: CodeType) -> Header | None:
        last = max((end for part in (code, *_inside(code)) for _, end, *_ in part.co_positions() if end), default=0)
        text = "".join(linecache.getlines(str(self._file))[code.co_firstlineno - 1 : last])
        try:
            # Lines of strings may be indented less than the function.
            (node,) = ast.parse(f"if True:\n{text}" if text[:1].isspace() else text).body
        except (SyntaxError, ValueError):
            return None
        node = node.body[0] if isinstance(node, ast.If) else node
        if not isinstance(node, ast.FunctionDef):
            return None
        arguments = node.args
        keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        return Header(
            tuple(map(self._evaluated, arguments.defaults)),
            {name.arg: self._evaluated(value) for name, value in keywords if value is not None},
            [self._decorator(decorator) for decorator in node.decorator_list],
        )

    def _decorator(self, node: ast.expr) -> tuple[str, tuple[Any, ...], Mapping[str, Any]]:
        called = node.func if isinstance(node, ast.Call) else node
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        if not isinstance(node, ast.Call):
            return name, (), {}
        keywords = {str(keyword.arg): self._evaluated(keyword.value) for keyword in node.keywords}
        return name, tuple(map(self._evaluated, node.args)), keywords

    def _evaluated(self, node: ast.expr) -> Any:
        if not all(isinstance(part, _PLAIN) for part in ast.walk(node)):
            return UNKNOWN
        try:
            return eval(compile(ast.Expression(node), str(self._file), "eval"), vars(self.module))
        except Exception:
            return UNKNOWN

    def table(self, name: str, scope: str = "") -> Mapping[Any, Any] | None:
        """The dict that a name is bound to, made again as the source has it; None if it isn't written out there."""
        statement = next(reversed(self.statements(name, scope)), None)
        value = None if statement is None else _value_of(self._file, statement)
        if isinstance(value, ast.Call) and len(value.args) == 1 and isinstance(value.args[0], ast.Name):
            return self.table(value.args[0].id)
        made = self._evaluated(value) if isinstance(value, ast.Dict) else None
        return made if isinstance(made, dict) else None


@cache
def source_of(name: str) -> ModuleSource | None:
    """The source of an imported module; None if it has no file."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    get_code = getattr(getattr(spec, "loader", None), "get_code", None)
    if module is None or spec is None or get_code is None or not isinstance(spec.origin, str):
        return None
    try:
        code = get_code(name)
    except (ImportError, OSError, SyntaxError):
        return None
    return ModuleSource(module, code, Path(spec.origin)) if code is not None else None


def _inside(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield constant
            yield from _inside(constant)


def _statements(code: CodeType, package: str) -> Iterator[tuple[str, Statement]]:
    """The statements of a module or of a class body that bind names, in order."""
    current, origin = Statement(), None
    for step in dis.get_instructions(code):
        line, last = (step.positions.lineno, step.positions.end_lineno) if step.positions else (None, None)
        if line is not None and last is not None:
            current.lines = min(current.lines[0], line), max(current.lines[1], last)
        if step.opname in _LOADS:
            current.names.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            level, listed = current.constants[-2:]
            name = importlib.util.resolve_name("." * level + step.argval, package) if level else step.argval
            origin, current = (name, bool(listed)), Statement()
        elif step.opname == "IMPORT_FROM":
            current.imported = (step.argval, None)
        elif inspect.iscode(step.argval):
            current.codes.append(step.argval)
        elif step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            current.constants.append(step.argval)
        elif step.opname in ("STORE_NAME", "STORE_GLOBAL"):
            if origin is not None:
                asked = current.imported[0] if current.imported and origin[1] else None
                current.imported = (origin[0], asked)
            yield step.argval, current
            # After `from x import a, b`, which binds more names, comes a POP_TOP.
            origin, current = (origin if origin and origin[1] else None), Statement()
        elif step.opname in _ENDS and not (origin is not None and not origin[1]):
            # `import a.b as c` pops `a` before it stores.
            origin, current = None, Statement()


def _value_of(file: Path, statement: Statement) -> ast.expr | None:
    first, last = statement.lines
    text = textwrap.dedent("".join(linecache.getlines(str(file))[first - 1 : last]))
    try:
        (node,) = ast.parse(text).body
    except (SyntaxError, ValueError):
        return None
    return node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
