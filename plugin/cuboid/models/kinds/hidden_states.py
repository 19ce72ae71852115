"""Models without a head, from whose hidden states users compute a loss of their own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModel

from cuboid.models.attention.forward_context import forward_context
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.cross_entropy.incomplete_output import without
from cuboid.models.kinds.forward import FOR_HEAD, begin_cache, pop_tuple, sharded_batch, whole_extras, whole_for_head
from cuboid.models.kinds.model_kind import ModelKind
from cuboid.models.kinds.probe_rows import RowsOf
from cuboid.models.kinds.sharding import Sharding
from cuboid.tensor3d.layers.whole_block import LateSplit


class HiddenStates(ModelKind):
    """A model that returns hidden states of tokens."""

    name = "hidden"
    words = "hidden states, without a head"
    endings = ("Model",)
    auto_class = AutoModel
    targets = ()

    def forward(self, model: Any, base_forward: Any, arguments: dict[str, Any]) -> Any:
        """See :meth:`ModelKind.forward`."""
        self.check(arguments)
        return forward_of_base(model, base_forward, arguments)

    def _head_choices(self, has_own_loss: bool) -> list[dict[str, Any]]:  # noqa: ARG002
        return [{}]

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:  # noqa: ARG002
        """See :meth:`ModelKind.micro_batch`."""
        return {name: x for name, x in rows_of(case, 0).items() if name != "labels"}

    def probe_loss(self, output: Any, batch: MicroBatch) -> torch.Tensor:
        """See :meth:`ModelKind.probe_loss`: a function of all outputs that leaves out padding."""
        hidden = output.last_hidden_state
        if "attention_mask" in batch:
            hidden = hidden * batch["attention_mask"].unsqueeze(-1)
        pooled = getattr(output, "pooler_output", None)
        parts = [hidden] if pooled is None else [hidden, pooled]
        return torch.stack([(part * _weights(part)).mean() for part in parts]).sum()


def forward_of_base(model: Any, base_forward: Any, arguments: dict[str, Any]) -> Any:
    """Forward of a base model that isn't called by a language model: ``[B, S, H]`` hidden states, whole on every rank.

    They stay split if a sharded head follows.
    """
    sharding: Sharding = model.cuboid
    as_tuple = pop_tuple(model, arguments)
    uses_cache = arguments.get("use_cache")
    if uses_cache or arguments.get("past_key_values") is not None:
        begin_cache(model, arguments)
    if uses_cache is None:
        uses_cache = getattr(model.config, "use_cache", False)
    with sharded_batch(model, arguments) as batch:
        output = base_forward(**sharding.kind.local_arguments(model, batch), return_dict=True)
    if isinstance(sharding.late, LateSplit):
        # The base model's hook does the same, but runs only after this function.
        output = sharding.late.end(model, None, output)
    whole_for_head(sharding, output, batch)
    whole_extras(model, output, batch, known=(*FOR_HEAD, "past_key_values"))
    # An encoder returns no cache, whatever its config says; and a head around the base model passes on what it has.
    if uses_cache and batch.cache is None and "WithPast" in type(output).__name__ and forward_context().head is None:
        output = without(output, ("past_key_values",))
    return output.to_tuple() if as_tuple else output


def _weights(x: torch.Tensor) -> torch.Tensor:
    """Weights in the shape of ``x`` that differ from one element to the next."""
    return torch.arange(x.numel(), dtype=x.dtype, device=x.device).cos().view_as(x)
