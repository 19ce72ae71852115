"""What adapters' layers on a mesh have in common, whatever they are around."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from cuboid.errors import UnsupportedModelError
from cuboid.tensor3d.sharding.sharded_param import ShardedModule


@dataclass(frozen=True)
class RowAdapters:
    """The adapters of a micro-batch's rows.

    Attributes:
        names: of all rows' adapters, each once, in an order that is the same on all ranks.
        masks: by these, which of the rank's rows have them, ``[B/b, 1, 1]``.
    """

    names: tuple[str, ...]
    masks: Mapping[str, torch.Tensor]

    def masked(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[B/b, …, …]``, with zeros in rows without an adapter.

        Raises:
            UnsupportedModelError: its rows aren't the micro-batch's.
        """
        mask = self.masks[name]
        if x.dim() != mask.dim() or len(x) != len(mask):
            raise UnsupportedModelError(
                "adapter_names: a layer with an adapter isn't given the rows of the micro-batch, but tokens of several "
                "(as shared experts are); leave it out of the adapters' target_modules"
            )
        return x * mask


_rows: ContextVar[RowAdapters | None] = ContextVar("cuboid_row_adapters", default=None)


def row_adapters() -> RowAdapters | None:
    """The adapters of the rows of the forward that runs; None where all rows have the active ones."""
    # Graphs can't look up context variables; models with compiled layers have no rows of their own.
    return None if torch.compiler.is_compiling() else _rows.get()


@contextmanager
def rows_with(adapters: RowAdapters) -> Iterator[None]:
    """In the ``with`` block, rows have these adapters."""
    token = _rows.set(adapters)
    try:
        yield
    finally:
        _rows.reset(token)


class AdaptedLayer:
    """Mixed into a layer of PEFT.

    Attributes:
        tied_to: the name of another module that has the base layer's weight, too; None if the weight isn't tied.
    """

    tied_to: str | None = None
    disable_adapters: Any
    merged: Any
    unmerge: Any

    def is_plain(self, arguments: dict[str, Any]) -> bool:
        """Whether a forward with these keywords computes what the base layer does.

        Raises:
            UnsupportedModelError: ``adapter_names`` gives rows different adapters.
        """
        if arguments.pop("adapter_names", None) is not None:
            raise UnsupportedModelError("adapter_names: give them to the model of PEFT, not to one of its layers")
        if self.disable_adapters and self.merged:
            self.unmerge()
        return bool(self.disable_adapters or self.merged)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """What ``convert_to_lora`` asks first.

        Raises:
            UnsupportedModelError: always, since a rank would decompose a part of the update.
        """
        raise UnsupportedModelError(
            f"convert_to_lora decomposes whole updates of {adapter_name!r}, of which a rank of a sharded model has "
            "parts; save the adapter, and call it on a plain model with that"
        )

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As PEFT's method.

        Raises:
            UnsupportedModelError: the weight is tied, or stored in 4 bits.
        """
        check_mergeable(self)
        if self.tied_to is not None:
            raise UnsupportedModelError(
                f"this adapter's layer shares its weight with {self.tied_to} (config.tie_word_embeddings), whose "
                "output would change too if it was merged; keep the adapter unmerged, or train it on a checkpoint that "
                "was saved with tie_word_embeddings=False"
            )
        parent: Any = super()
        parent.merge(safe_merge, adapter_names)


def check_mergeable(layer: Any) -> None:
    """Check that an adapter can be merged into its layer's weight.

    Raises:
        UnsupportedModelError: it is stored in 4 bits.
    """
    base = layer.get_base_layer()
    params = base.sharded_params.values() if isinstance(base, ShardedModule) else ()
    if any(param.four_bits is not None for param in params):
        raise UnsupportedModelError(
            "this adapter's layer has a weight of 4 bits (quantization_config), which would be rounded again: save the "
            "adapter, load the checkpoint without quantization_config, and merge it there"
        )


def check_finite(update: torch.Tensor, adapter: str) -> None:
    """Check what an adapter is about to put into a weight, as PEFT does with ``safe_merge``.

    Raises:
        ValueError: some of it isn't a finite number; PEFT's own message.
    """
    if not torch.isfinite(update).all():
        raise ValueError(f"NaNs detected in the merged weights. The adapter {adapter} seems to be broken")
