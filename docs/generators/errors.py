"""The errors that the package raises, as they are worded where they are raised; read from its source."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "plugin" / "cuboid"
#: What stands for a part of a message that is only known when it is raised.
_HOLE = "…"


@dataclass(frozen=True, order=True)
class Message:
    """One error.

    Args:
        area: the package that raises it.
        error: its class.
        text: its message, with a dot for each value.
    """

    area: str
    error: str
    text: str


def messages() -> list[Message]:
    """All of them, once each."""
    classes = _classes()
    return sorted(
        {
            Message(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), node.func.id, text)
            for path in PACKAGE.rglob("*.py")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes and node.args
            for text in _texts(node.args[0])
            # Of a message that another function words, nothing is left here.
            if len(text.replace(_HOLE, "").split()) > 3
        }
    )


def listed() -> str:
    """All of them as Markdown, by area and class."""
    by_area: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for message in messages():
        by_area[message.area][message.error].append(message.text)
    lines = []
    for area, by_error in by_area.items():
        lines += [f"## {area}", ""]
        for error, texts in by_error.items():
            lines += [f"`{error}`:", "", *(f"* {_escaped(text)}" for text in texts), ""]
    return "\n".join(lines)


def _classes() -> set[str]:
    module = ast.parse((PACKAGE / "errors.py").read_text(encoding="utf-8"))
    return {node.name for node in module.body if isinstance(node, ast.ClassDef)}


def _texts(node: ast.expr) -> list[str]:
    """The wordings of a message: several, where a condition chooses."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            return ["".join(part.value if isinstance(part, ast.Constant) else _HOLE for part in values)]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return [first + second for first in _texts(left) for second in _texts(right)]
        case ast.IfExp(body=body, orelse=orelse):
            return [*_texts(body), *_texts(orelse)]
        case _:
            return [_HOLE]


def _escaped(text: str) -> str:
    """On one line, without what Markdown would read as marks."""
    return re.sub(r"([\\`*_\[\]<>#|{}$])", r"\\\1", " ".join(text.split()))
