"""The short training run of a :class:`~cuboid.verify.plan.Plan`, and its outcome."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from cuboid.models.architectures.transformers_names import checkpoint_activations
from cuboid.models.kinds.registry import kind_of
from cuboid.models.routers.router_loss import exact_router_loss
from cuboid.models.sharded.sharded_model import ShardedModel
from cuboid.verify.plan import Plan, tokens_of
from cuboid.verify.task_inputs import micro_batches, token_share

Tensors = dict[str, torch.Tensor]
#: Adam's first moment, in the optimizer's state.
MOMENT = "exp_avg"


@dataclass
class RunOutcome:
    """The values that one side computed.

    Args:
        losses: of each step, the mean that the plan asks for.
        norms: global gradient norm of each step, before clipping.
        activations: full outputs ``[B, S, hidden]`` of modules, in forward order, in evaluation mode before the first
            step.
        logits: ``[B, S, V]`` of the same forward, or a model's other outputs, by name.
        gradients: of each step, before clipping.
        own_checks: by kind, what is checked on the sharded side alone: errors by name, and the largest that passes.
        moments: Adam's first moments after the last step.
        weights: after the last step, as the side's checkpoint has them.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    activations: Tensors = field(default_factory=dict)
    logits: Tensors = field(default_factory=dict)
    gradients: list[Tensors] = field(default_factory=list)
    own_checks: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    moments: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)


class RunSide(Protocol):
    """The operations that differ between the two sides: running micro-batches, and sums over ranks."""

    def backward(self, model: Any, plan: Plan, step: int) -> float:
        """Compute the gradients of this process's replicas in a step; returns the loss over all replicas."""

    def sum_over_replicas(self, tensor: torch.Tensor) -> None:
        """Sum in place over the processes that run other replicas."""

    def sum_over_model(self, tensor: torch.Tensor) -> None:
        """Sum in place over the processes that have other parts of the model."""

    def counted(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters that this process contributes to a sum over the model."""

    def gradients(self, model: nn.Module) -> Tensors:
        """Full gradients by Hugging Face name, on the process that writes the outcome."""


def train(model: Any, plan: Plan, side: RunSide, *, moments: bool = False) -> RunOutcome:
    """Run the plan's optimizer steps; with ``moments``, also return Adam's first moments."""
    outcome = RunOutcome()
    prepare(model, plan)
    optimizer = adamw(model, plan)
    for step in range(plan.steps):
        outcome.losses.append(side.backward(model, plan, step))
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        for parameter in parameters:
            side.sum_over_replicas(parameter.grad)
        outcome.norms.append(_norm(model, side))
        outcome.gradients.append(side.gradients(model))
        _clip(parameters, outcome.norms[-1], plan.clipping)
        optimizer.step()
        optimizer.zero_grad()
    if moments:
        named = model.named_parameters(remove_duplicate=False)
        outcome.moments = {name: optimizer.state[p][MOMENT].cpu() for name, p in named if p in optimizer.state}
    return outcome


def prepare(model: Any, plan: Plan) -> None:
    """Put a model into training mode, with activation checkpointing if the plan or the config has it."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            # Some heads have a fixed dropout probability, which isn't in the config.
            module.p = 0.0
    # The config may ask for it too; whatever enables it, recomputations need the plan's contexts.
    section = model.cuboid.state.checkpointing if isinstance(model, ShardedModel) else None
    if plan.checkpointing or (section is not None and section.mode != "none"):
        checkpoint_activations(model, {"use_reentrant": False, "context_fn": plan.recompute_contexts})


def adamw(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """The plan's optimizer, which steps one parameter at a time (no ``foreach``)."""
    return torch.optim.AdamW(
        parameter_groups(model, plan),
        lr=plan.learning_rate,
        betas=plan.betas,
        eps=plan.epsilon,
        foreach=False,
    )


def parameter_groups(model: nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """Parameter groups with weight decay (matrices) and without (norms and biases), of what is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    vectors = [parameter for parameter in trained if parameter.dim() < 2]
    others = [parameter for parameter in trained if parameter.dim() >= 2]
    decays = ((others, plan.weight_decay), (vectors, 0.0))
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in decays if parameters]


def run_replicas(model: Any, plan: Plan, step: int, replicas: Iterable[int]) -> torch.Tensor:
    """Run forward and backward of some replicas' micro-batches, one after the other.

    Returns:
        Their contribution to the step's loss, a float64 scalar tensor.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    kind = kind_of(type(model), model.config)
    options = kind.options_of(model)
    counts_items = plan.counts_items and plan.mean_over == "tokens" and kind.is_causal
    share = 1.0 / (plan.data_parallel * plan.accumulate)
    if counts_items:
        options["num_items_in_batch"] = torch.tensor(plan.label_tokens(step, *tokens_of(model)), device=device)
        share = 1.0
    for replica in replicas:
        for inputs in micro_batches(plan, model, step, replica):
            if plan.mean_over == "tokens" and not counts_items:
                share = token_share(plan, model, step, inputs)
            batch = {name: x.to(device) for name, x in inputs.items()}
            output = model(**batch, **options)
            loss = kind.probe_loss(output, batch) * share
            routers = exact_router_loss(model, output, batch.get("attention_mask"))
            if routers is not None:
                # Replace transformers' router loss by the exact mean over micro-batches: it computes the loss in
                # float32, and sums over micro-batches when it gets num_items_in_batch.
                router_loss = share * model.router_aux_loss_coef * output.aux_loss
                loss = loss + routers / (plan.data_parallel * plan.accumulate) - router_loss
            loss.backward()
            total += loss.detach()
    return total


def _norm(model: nn.Module, side: RunSide) -> float:
    squares = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for parameter in side.counted(model):
        if parameter.grad is not None:
            squares += parameter.grad.double().square().sum()
    side.sum_over_model(squares)
    return squares.sqrt().item()


def _clip(parameters: list[nn.Parameter], norm: float, largest: float) -> None:
    if 0 < largest < norm:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad *= largest / (norm + 1e-6)
