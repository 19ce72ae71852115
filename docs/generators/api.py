"""Write docs/api.md from the docstrings of what ``cuboid`` exports, read from its source without importing it."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from generators.marked import table

PACKAGE = Path(__file__).parents[2] / "plugin" / "cuboid"
PATCHES = PACKAGE.parents[1] / "patches"
#: What the package exports, in the order of use.
GROUPS = {
    "A sharded model": (
        *("from_pretrained", "from_config", "shard", "scope", "save_pretrained", "full_state_dict", "full_gradients"),
        *("mesh_of", "local_hook"),
    ),
    "Training": ("CuboidTrainer", "Pipeline", "CuboidPlugin", "prepare_optimizer", "sum_over_shards"),
    "Callbacks of the Trainer": (
        "InterruptCallback",
        "MetricsCallback",
        "LossGuardCallback",
        "ReportCallback",
        "RunLockCallback",
        "RunProgressCallback",
    ),
    "Config": ("load_config", "split_config", "parse_config", "CuboidConfig"),
    "Mesh": ("MeshShape", "Topology", "Mesh"),
    "Errors": (
        *("CuboidError", "ConfigError", "MeshError", "UnsupportedModelError", "OptimizerError"),
        "CheckpointError",
    ),
    "Patches": ("register", "unregister"),
}
#: Where bound methods are defined that are exported as functions.
METHODS = dict.fromkeys(("register", "unregister"), PATCHES / "cuboid_patches" / "registration.py")
#: Those methods and properties of a class that a script uses; a framework calls the others.
USED = {
    "Pipeline": ("train", "evaluate", "segment_lengths", "add_shared_gradients"),
    "CuboidPlugin": ("execute_pipeline", "prepare_dataloader", "enable_lora", "wait_for_checkpoint"),
    "MeshShape": ("size", "parse", "of_size"),
    "Topology": ("coordinate", "rank", "groups"),
    "Mesh": ("size", "index", "connect", "data_parallel_group", "model_parallel_group"),
}
#: Sections of a docstring, and those whose entries are shown as a list.
_SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")
_LISTS = _SECTIONS[:3]
_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_ENTRY = re.compile(r"^(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): (.*)", re.DOTALL)


def parts() -> dict[str, dict[str, str]]:
    """The whole reference.

    Raises:
        ValueError: the package exports something that no group has, or a group has what isn't exported.
    """
    exported = _exported()
    grouped = [name for names in GROUPS.values() for name in names]
    if sorted(grouped) != sorted(exported):
        raise ValueError(f"the groups of {__name__} and cuboid.__all__ differ in {set(grouped) ^ set(exported)}")
    definitions = {name: _definition(exported[name], name) for name in grouped}
    rows = [[f"[`cuboid.{name}`](#cuboid{name.lower()})", _summary(node)] for name, node in definitions.items()]
    lines = [table(["name", "what it is"], rows), ""]
    for title, names in GROUPS.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += _shown(definitions[name], f"cuboid.{name}", level=3)
    return {"api.md": {"names": "\n".join(lines)}}


def _exported() -> dict[str, Path]:
    """The file of each exported name."""
    module = _parsed(PACKAGE / "__init__.py")
    places = {
        alias.name: node.module or ""
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names = next(
        ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return {name: _file(places[name]) for name in names}


def _file(module: str) -> Path:
    root = PATCHES if module.startswith("cuboid_patches") else PACKAGE.parent
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _definition(path: Path, name: str) -> ast.FunctionDef | ast.ClassDef:
    path = METHODS.get(name, path)
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    raise ValueError(f"{path} doesn't define {name}")


def _summary(definition: ast.FunctionDef | ast.ClassDef) -> str:
    """The first paragraph of the docstring, in one line."""
    return " ".join("\n".join(_text((ast.get_docstring(definition) or "").partition("\n\n")[0])).split())


def _shown(definition: ast.FunctionDef | ast.ClassDef, title: str, level: int) -> list[str]:
    """A heading, the signature, the docstring, and the methods of a class that scripts use."""
    lines = [f"{'#' * level} `{title}`", ""]
    signature = _signature(definition)
    if signature is not None:
        lines += ["```text", signature, "```", ""]
    lines += _text(ast.get_docstring(definition) or "")
    methods = {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}
    for name in USED.get(definition.name, ()):
        lines += _shown(methods[name], f"{definition.name}.{name}", level + 1)
    return lines


def _signature(definition: ast.FunctionDef | ast.ClassDef) -> str | None:
    """As it is called; None for a property, and for a class without a constructor of its own."""
    returns = ""
    if isinstance(definition, ast.ClassDef):
        methods = {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}
        is_dataclass = any(ast.unparse(decorator).startswith("dataclass") for decorator in definition.decorator_list)
        fields = [ast.unparse(node) for node in definition.body if is_dataclass and isinstance(node, ast.AnnAssign)]
        if "__init__" not in methods and not fields:
            return None
        arguments = _arguments(methods["__init__"].args) if "__init__" in methods else fields
    else:
        if any(ast.unparse(decorator) in ("property", "cached_property") for decorator in definition.decorator_list):
            return None
        arguments = _arguments(definition.args)
        returns = f" -> {ast.unparse(definition.returns)}" if definition.returns else ""
    line = f"{definition.name}({', '.join(arguments)}){returns}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{definition.name}(", *(f"    {argument}," for argument in arguments), f"){returns}"])


def _arguments(arguments: ast.arguments) -> list[str]:
    """Each argument with its type and default, without ``self``."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    texts = [_argument(*pair) for pair in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        texts.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg or arguments.kwonlyargs:
        texts.append(f"*{_argument(arguments.vararg) if arguments.vararg else ''}")
    texts += [_argument(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        texts.append(f"**{_argument(arguments.kwarg)}")
    return texts[1:] if texts and texts[0] in ("self", "cls") else texts


def _argument(argument: ast.arg, default: ast.expr | None = None) -> str:
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")


def _text(docstring: str) -> Iterator[str]:
    """The lines of a docstring in Markdown."""
    for block in _ROLE.sub(r"`\1`", docstring).replace("``", "`").split("\n\n"):
        head, _, rest = block.partition("\n")
        section = head.removesuffix(":")
        if section not in _SECTIONS or section == head:
            yield from (*block.splitlines(), "")
            continue
        content = textwrap.dedent(rest)
        entries = re.split(r"\n(?! )", content) if section in _LISTS else [content]
        yield from (f"{section}:", "", *(f"* {_entry(entry)}" for entry in entries), "")


def _entry(entry: str) -> str:
    words = " ".join(entry.split())
    entry_of_name = _ENTRY.match(words)
    return f"`{entry_of_name[1]}`: {entry_of_name[2]}" if entry_of_name else words
