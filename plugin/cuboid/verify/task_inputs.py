"""Inputs and outputs of models in a plan's steps, for all tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cuboid.models.architectures.supported_tasks import runs_own_head, task_of
from cuboid.models.architectures.transformers_names import decoder_ids
from cuboid.models.batch.local_batch import IGNORE_INDEX
from cuboid.models.batch.targets import TARGETS, Targets
from cuboid.models.certification.task_batches import target_case, with_answers, with_target
from cuboid.verify.plan import Plan, tokens_of

#: Names of models' outputs besides the loss.
_OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")


def micro_batches(plan: Plan, model: Any, step: int, replica: int) -> list[dict[str, torch.Tensor]]:
    """:meth:`Plan.micro_batches` with the targets of the model's task; floating-point ones are in the plan's dtype."""
    targets, tokens = Targets.of(type(model), model.config), tokens_of(model)
    batches = plan.micro_batches(step, replica, *tokens)
    if targets.task == "causal":
        return batches
    found = []
    for index, batch in zip(plan.indices(step, replica), batches, strict=True):
        if targets.task == "seq2seq":
            target = plan.micro_batch(index, target_case(plan.case(index)), *tokens, stream=1)
            found.append(with_target(batch, target, model))
            continue
        batch = with_answers(batch, targets, plan.generator(index, stream=1))
        found.append({n: x.to(plan.torch_dtype) if x.is_floating_point() else x for n, x in batch.items()})
    return found


def token_share(plan: Plan, model: Any, step: int, batch: Mapping[str, torch.Tensor]) -> float:
    """A micro-batch's share of the step's labels, or rows, over all replicas."""
    every = [each for replica in range(plan.data_parallel) for each in micro_batches(plan, model, step, replica)]
    targets = Targets.of(type(model), model.config)
    if runs_own_head(targets.task):
        own, total = (sum(int(targets.items(each)) for each in some) for some in ([batch], every))
    else:
        own, total = (sum(int((each["labels"] != IGNORE_INDEX).sum()) for each in some) for some in ([batch], every))
    return own / total


def options_of(model: Any) -> dict[str, Any]:
    """Keyword arguments of the model's forward besides the micro-batch."""
    has_cache = task_of(type(model)) == "causal" or hasattr(model.config, "use_cache")
    return {"use_cache": False} if has_cache else {}


def run_forward(model: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's outputs for a micro-batch without its targets, by name."""
    device = next(model.parameters()).device
    inputs = {name: x.to(device) for name, x in batch.items() if name not in TARGETS}
    if task_of(type(model)) == "seq2seq" and "decoder_input_ids" not in inputs:
        labels = batch["labels"].to(device)
        ids = decoder_ids(model, labels)
        inputs["decoder_input_ids"] = labels.clamp(min=0) if ids is None else ids
    output = model(**inputs, **options_of(model))
    return {name: x for name in _OUTPUTS if (x := getattr(output, name, None)) is not None}


def paddings(plan: Plan) -> list[torch.Tensor]:
    """Masks of the probed micro-batch's padding, bool ``[B, S]``: of its target, if it has one, and of its ids."""
    case = plan.case(0)
    masks = [each.attention_mask(plan.batch) for each in (target_case(case), case)]
    return [mask == 0 for mask in masks if mask is not None]
