"""Compare and send values that optimizers and schedules keep for a parameter group, functions included."""

from __future__ import annotations

import functools
import types
from itertools import islice
from typing import Any

import torch

#: How deep values inside of values are described; schedules nest a partial, its function and that one's closure.
_DEPTH = 6
#: How many parts of a value are described: functions may refer to long lists, such as their data.
_PARTS = 16


def described(value: Any, depth: int = _DEPTH) -> str:
    """A text that is the same on all ranks for equal values, and for functions that compute the same.

    Functions are described by their code, defaults and closures; other objects by their class and plain attributes.
    """
    if depth == 0:
        return "…"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    deeper = functools.partial(described, depth=depth - 1)
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{value.detach().flatten()[:_PARTS].tolist()}"
    if isinstance(value, dict):
        return f"{len(value)} of {deeper([*islice(value.items(), _PARTS)])}"
    if isinstance(value, set | frozenset):
        # Sorted, since strings have another order in each process; of many, only their number.
        return f"{len(value)} of {sorted(map(deeper, value)) if len(value) <= _PARTS else []}"
    if isinstance(value, list | tuple):
        return f"{len(value)} of [{', '.join(map(deeper, islice(value, _PARTS)))}]"
    if isinstance(value, functools.partial):
        return f"partial{deeper([value.func, value.args, value.keywords])}"
    if isinstance(value, types.MethodType):
        return f"method{deeper([value.__func__, value.__self__])}"
    if isinstance(value, types.CodeType):
        return f"{value.co_qualname}{value.co_code.hex()}{deeper([value.co_consts, value.co_names])}"
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return f"{value.__module__}{deeper([value.__code__, value.__defaults__, value.__kwdefaults__, cells])}"
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.nn.Module):
        # Each stage's own part of one model.
        return name
    plain = {key: part for key, part in getattr(value, "__dict__", {}).items() if isinstance(part, int | float | str)}
    return f"{name}{plain}"


def is_plain(value: Any) -> bool:
    """Whether a value can be sent to other ranks and mean the same there."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.keys())) and all(map(is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | complex | str | torch.Tensor)
