"""Inputs and outputs of models in a plan's steps, for all kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.kinds.registry import kind_of
from cuboid.models.kinds.sequence_to_sequence import target_case
from cuboid.verify.plan import Plan, tokens_of

#: Names of models' outputs besides the loss.
_OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")


def micro_batches(plan: Plan, model: Any, step: int, replica: int) -> list[MicroBatch]:
    """A replica's micro-batches of a step, for a model's kind; floating-point targets are in the plan's dtype."""
    kind, tokens = kind_of(type(model), model.config), tokens_of(model)

    def made(index: int) -> MicroBatch:
        def rows_of(case: Case, stream: int) -> MicroBatch:
            return plan.micro_batch(index, case, *tokens, stream)

        batch = kind.micro_batch(plan.case(index), model, rows_of, plan.generator(index, stream=1))
        return {name: x.to(plan.torch_dtype) if x.is_floating_point() else x for name, x in batch.items()}

    return [made(index) for index in plan.indices(step, replica)]


def token_share(plan: Plan, model: Any, step: int, batch: Mapping[str, torch.Tensor]) -> float:
    """A micro-batch's share of the step's labels, or rows, over all replicas."""
    every = [
        micro_batch
        for replica in range(plan.data_parallel)
        for micro_batch in micro_batches(plan, model, step, replica)
    ]
    kind = kind_of(type(model), model.config)

    def items(of: Mapping[str, torch.Tensor]) -> int:
        # As a pipeline counts them: labels of models that shift theirs are never counted here.
        return int(kind.items(kind.for_stages(dict(of), shifts=False)))

    return items(batch) / sum(map(items, every))


def options_of(model: Any) -> dict[str, Any]:
    """Keyword arguments of the model's forward besides the micro-batch."""
    return kind_of(type(model), model.config).options_of(model)


def run_forward(model: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's outputs for a micro-batch without its targets, by name."""
    kind, device = kind_of(type(model), model.config), next(model.parameters()).device
    inputs = kind.inputs_of(model, {name: x.to(device) for name, x in batch.items()})
    output = model(**inputs, **kind.options_of(model))
    return {name: x for name in _OUTPUTS if (x := getattr(output, name, None)) is not None}


def paddings(plan: Plan) -> list[torch.Tensor]:
    """Masks of the probed micro-batch's padding, bool ``[B, S]``: of its target, if it has one, and of its ids."""
    case = plan.case(0)
    masks = [length_case.attention_mask(plan.batch) for length_case in (target_case(case), case)]
    return [mask == 0 for mask in masks if mask is not None]
