"""Several DeepSpeed engines with different process groups in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from deepspeed.utils import groups


class OwnGroups:
    """DeepSpeed's process groups for one engine.

    DeepSpeed keeps the groups of a process in global variables of ``deepspeed.utils.groups``, and takes those of an
    earlier engine for a later one where it finds them. So each engine gets variables of its own, put there while it
    works; in the benchmark's own processes alone.
    """

    def __init__(self) -> None:
        self._own = _snapshot()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Inside the ``with`` block DeepSpeed has this engine's groups, and what it adds to them is kept."""
        before = _snapshot()
        _restore(self._own)
        try:
            yield
        finally:
            self._own = _snapshot()
            _restore(before)


def _snapshot() -> dict[str, Any]:
    """The variables by name, those that are mutable as copies."""
    return {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in vars(groups).items()
        if _is_state(name)
    }


def _restore(state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(groups, name, value)


def _is_state(name: str) -> bool:
    """All that its functions declare ``global``: names in capitals, and three others."""
    private = name.startswith("_") and not name.startswith("__") and name.isupper()
    return private or name in {"mpu", "mesh_device", "expert_tensor_parallel_world_size"}
