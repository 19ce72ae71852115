"""Where a model is made to be looked at, and must be made as transformers makes it whatever a scope says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_plain: ContextVar[bool] = ContextVar("cuboid_plain_construction", default=False)


@contextmanager
def plain_construction() -> Iterator[None]:
    """Inside, ``from_config`` makes whole models."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def is_plain_construction() -> bool:
    """Whether this thread is inside of :func:`plain_construction`."""
    return _plain.get()
