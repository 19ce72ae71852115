"""The short training run of a :class:`~cuboid.verify.plan.Plan`, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from cuboid.verify.plan import Plan, tokens_of

Tensors = dict[str, torch.Tensor]
#: What Adam calls its mean of gradients.
MOMENT = "exp_avg"


@dataclass
class Outcome:
    """What one side computed.

    Args:
        losses: of each step, the mean that the plan asks for.
        norms: global gradient norm of each step, before clipping.
        activations: whole outputs ``[B, S, hidden]`` of modules, in forward order, in evaluation, before any step.
        logits: ``[B, S, V]`` of the same forward.
        gradients: of each step, before clipping.
        dropout: by module, how alike the ranks' masks are, and how alike chance may make them.
        moments: Adam's mean of gradients after the last step, after clipping.
        weights: after the last step, as :meth:`Side.save` writes them.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    activations: Tensors = field(default_factory=dict)
    logits: Tensors = field(default_factory=dict)
    gradients: list[Tensors] = field(default_factory=list)
    dropout: dict[str, tuple[float, float]] = field(default_factory=dict)
    moments: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)


class Side(Protocol):
    """What the two sides do differently: running micro-batches, and adding up over ranks."""

    def backward(self, model: Any, plan: Plan, step: int) -> float:
        """Gradients of a step, of the replicas that this process belongs to; the loss of all replicas."""

    def sum_over_replicas(self, tensor: torch.Tensor) -> None:
        """Add up, in place, over processes that ran other replicas' micro-batches."""

    def sum_over_model(self, tensor: torch.Tensor) -> None:
        """Add up, in place, over processes that hold other parts of the model."""

    def counted(self, model: nn.Module) -> list[nn.Parameter]:
        """Parameters that are this process's to count in a sum over the model."""

    def gradients(self, model: nn.Module) -> Tensors:
        """Whole gradients by Hugging Face name, on the process that reports."""


def train(model: Any, plan: Plan, side: Side, *, moments: bool = False) -> Outcome:
    """Run the plan's optimizer steps. ``moments`` says whether Adam's are wanted."""
    outcome = Outcome()
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
    """Put a model into training, as the plan has it."""
    model.train()
    if plan.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": plan.recompute_contexts})


def adamw(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """The plan's optimizer, in its plainest form."""
    return torch.optim.AdamW(
        parameter_groups(model, plan),
        lr=plan.learning_rate,
        betas=plan.betas,
        eps=plan.epsilon,
        foreach=False,
    )


def parameter_groups(model: nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """For an optimizer: what decays, and norms and biases, which don't."""
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    decays = ((others, plan.weight_decay), (vectors, 0.0))
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in decays if parameters]


def run_replicas(model: Any, plan: Plan, step: int, replicas: Iterable[int]) -> torch.Tensor:
    """Forward and backward of some replicas' micro-batches, one after the other.

    Returns:
        Their share of the step's loss, a float64 tensor of no dims.
    """
    tokens, device = tokens_of(model), next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    options: dict[str, Any] = {"use_cache": False}
    share = 1.0
    if plan.mean_over == "tokens":
        options["num_items_in_batch"] = torch.tensor(plan.label_tokens(step, *tokens), device=device)
    else:
        share /= plan.data_parallel * plan.accumulate
    for replica in replicas:
        for batch in plan.micro_batches(step, replica, *tokens):
            loss = model(**{name: x.to(device) for name, x in batch.items()}, **options).loss * share
            loss.backward()
            total += loss.detach()
    return total


def _norm(model: nn.Module, side: Side) -> float:
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
