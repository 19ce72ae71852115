"""Which code a record is about, and whether that code is still the present one.

A record keeps globs of the source files whose behaviour it measures, and a fingerprint of their syntax trees without
docstrings: comments, formatting, moved files and the version of Python change nothing.
"""

from __future__ import annotations

import ast
import datetime
import functools
import hashlib
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: How a remark ends.
HAS_CHANGED = ": the code that it measures has changed since.**"

_CUBOID = "plugin/cuboid"
#: What sharded layers do, without the planner's formulas beside it in tables: tests compare these with counters.
MESHES = tuple(f"{_CUBOID}/{name}/**/*.py" for name in ("distributed", "tensor3d", "models/sharded", "models/kinds"))
LOSS = (f"{_CUBOID}/models/cross_entropy/**/*.py",)
#: The schedules and what runs them.
SCHEDULES = tuple(f"{_CUBOID}/{name}/**/*.py" for name in ("seq1f1b/schedule", "seq1f1b/runtime", "distributed"))
SEQ1F1B = (*SCHEDULES, f"{_CUBOID}/seq1f1b/attention/**/*.py")
#: Stages and segments of Hugging Face's models.
STAGES = tuple(
    f"{_CUBOID}/models/{name}/**/*.py"
    for name in ("attention", "batch", "cross_entropy", "kinds", "pipeline", "routers", "stages")
)
#: A training step under DeepSpeed.
ENGINE = (
    f"{_CUBOID}/integrations/deepspeed/**/*.py",
    f"{_CUBOID}/optim/**/*.py",
    f"{_CUBOID}/failures/rank_agreement.py",
)
LOADING = (f"{_CUBOID}/weights/**/*.py",)
#: Has no part in any benchmark: their models have rules for all blocks and complete weights, their ranks are processes.
NOT_MEASURED = (
    f"{_CUBOID}/tensor3d/layers/whole_block.py",
    f"{_CUBOID}/distributed/thread_ranks.py",
    f"{_CUBOID}/weights/from_scratch.py",
    f"{_CUBOID}/weights/new_weights.py",
)


def stamp(sources: Sequence[str], root: Path = ROOT) -> dict[str, Any]:
    """What a record keeps of its sources: globs, their fingerprint now, the commit if there is one, and the date."""
    return {
        "sources": list(sources),
        "fingerprint": fingerprint(sources, root),
        "commit": _commit(root),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def remark(result: dict[str, Any], root: Path = ROOT) -> str | None:
    """That the code has changed since a result was measured, in a sentence that later changes don't change; or None."""
    measures = result["measures"]
    if measures["fingerprint"] == fingerprint(measures["sources"], root):
        return None
    commit = f" (commit {measures['commit']})" if measures["commit"] else ""
    return f"**Measured on {measures['date']}{commit}{HAS_CHANGED}"


def fingerprint(sources: Iterable[str], root: Path = ROOT) -> str:
    """Of all measured files that the globs match, as hexadecimal text; a glob that matches none counts too."""
    digests = []
    left_out = {root / path for path in NOT_MEASURED}
    for glob in sources:
        paths = sorted(set(root.glob(glob)) - left_out)
        digests += [_digest(path, path.stat().st_mtime_ns) for path in paths] or [f"nothing at {glob}"]
    # In an order that doesn't depend on where a file is.
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()[:16]


@functools.cache
def _digest(path: Path, _: int) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return hashlib.sha256(repr(_shape(tree)).encode()).hexdigest()


def _shape(node: Any) -> Any:
    """A syntax tree as tuples, without places, docstrings, and fields that say nothing: those differ by version."""
    if isinstance(node, list):
        return [_shape(child) for child in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        has_docstring = ast.get_docstring(node, clean=False) is not None
        fields["body"] = node.body[1:] if has_docstring else node.body
    told = [(name, _shape(value)) for name, value in sorted(fields.items()) if value not in (None, [])]
    return type(node).__name__, told


def _commit(root: Path) -> str | None:
    """Of the working tree, with a mark where the code isn't quite that; None outside of a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        return subprocess.check_output(command, cwd=root, stderr=subprocess.DEVNULL, text=True, timeout=10).strip()
    except (OSError, subprocess.SubprocessError):
        return None
