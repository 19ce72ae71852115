"""Attention behind Hugging Face's interfaces: heads are local, so the model's own kernel runs; masks see the whole
sequence although the residual stream is split.

Each known implementation ``name`` has a twin ``cuboid_name``. Registering them is :mod:`cuboid.patches`'s business.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cuboid.errors import UnsupportedModelError
from cuboid.mesh import Mesh
from cuboid.tensor3d.dropout import own_random_numbers

PREFIX = "cuboid_"
_RECORD = "cuboid_attention"
IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


@dataclass(frozen=True)
class Lengths:
    """Positions of the unsplit sequence: as given, and as padded for the mesh."""

    real: int
    padded: int


#: Of the forward that is running. Masks are made from an embedding that holds only this rank's part of the sequence,
#: and get no other argument that knows.
_lengths: ContextVar[Lengths] = ContextVar("cuboid_lengths")


@contextmanager
def whole_sequence(lengths: Lengths) -> Iterator[None]:
    """Masks made inside are for the whole sequence."""
    token = _lengths.set(lengths)
    try:
        yield
    finally:
        _lengths.reset(token)


@dataclass
class AttentionRecord:
    """What a twin needs to know of the module that calls it, and whether it was called."""

    mesh: Mesh
    calls: int = 0


def use_sharded_attention(config: PretrainedConfig, modules: list[nn.Module], mesh: Mesh) -> None:
    """Point a model's config at the twin of its attention implementation, which :func:`check_attention` found."""
    for module in modules:
        setattr(module, _RECORD, AttentionRecord(mesh))
    config._attn_implementation = PREFIX + config._attn_implementation


def check_attention(config: PretrainedConfig) -> None:
    """Make sure that a model's attention implementation has a twin.

    Raises:
        UnsupportedModelError: it has none.
    """
    name = config._attn_implementation
    if name not in IMPLEMENTATIONS:
        raise UnsupportedModelError(
            f"attn_implementation {name!r} has no rule; choose one of {', '.join(IMPLEMENTATIONS)}"
        )
    if name == "eager" and getattr(config, "reorder_and_upcast_attn", False):
        raise UnsupportedModelError('reorder_and_upcast_attn with attn_implementation "eager" has no rule; use "sdpa"')


def attention_twin(name: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The attention function registered as ``cuboid_<name>``."""

    def attend(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kernel = _eager_of(module) if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        record = _record(module)
        record.calls += 1
        if not kwargs.get("dropout"):
            return kernel(module, query, *args, **kwargs)
        with own_random_numbers(record.mesh, query.device):
            return kernel(module, query, *args, **kwargs)

    return attend


def mask_twin(name: str) -> Callable[..., Any]:
    """The mask function registered as ``cuboid_<name>``."""

    def make_mask(*args: Any, **kwargs: Any) -> Any:
        lengths = _lengths.get()
        sizes = {"q_length": lengths.padded, "kv_length": lengths.padded}
        mask = ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **{**kwargs, **sizes})
        if isinstance(mask, torch.Tensor) and mask.is_floating_point():
            # A position that may see nothing, as in padding on the left, sees everything alike under an additive
            # mask; but never what was added here.
            mask[..., lengths.real :] = -torch.inf
        return mask

    return make_mask


def _record(module: nn.Module) -> AttentionRecord:
    record = getattr(module, _RECORD)
    assert isinstance(record, AttentionRecord)
    return record


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """The eager attention function of the file that defines an attention module."""
    return sys.modules[type(module).__module__].eager_attention_forward


def check_attention_ran(modules: dict[str, nn.Module]) -> None:
    """Make sure that attention went through the interface; some architectures bypass it.

    Raises:
        UnsupportedModelError: a module computed attention elsewhere.
    """
    bypassed = [name for name, module in modules.items() if not _record(module).calls]
    if bypassed:
        raise UnsupportedModelError(f"{bypassed[0]} computed attention without Hugging Face's attention interface")
