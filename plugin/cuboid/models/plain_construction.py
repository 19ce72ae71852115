"""Where a model is made to be looked at, and must be made as transformers makes it whatever a scope or loader says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from transformers import PreTrainedModel

_plain: ContextVar[bool] = ContextVar("cuboid_plain_construction", default=False)
#: While transformers loads a model, it has put a function that does nothing in its place.
_tie_weights = PreTrainedModel.tie_weights


@contextmanager
def plain_construction(*, ties: bool = True) -> Iterator[None]:
    """Inside, ``from_config`` makes whole models.

    Args:
        ties: whether their weights are tied as their config says, also while transformers loads another one.
    """
    token, present = _plain.set(True), PreTrainedModel.tie_weights
    if ties:
        PreTrainedModel.tie_weights = _tie_weights
    try:
        yield
    finally:
        PreTrainedModel.tie_weights = present
        _plain.reset(token)


def is_plain_construction() -> bool:
    """Whether this thread is inside :func:`plain_construction`."""
    return _plain.get()
