"""The load balancing loss of routers whose layers are on several stages, and whose tokens come in several segments.

The loss of a micro-batch is ``coefficient · E · Σ_e f_e · p_e``: f_e is how often expert e was chosen, p_e the sum of
its probabilities, both over all tokens and layers, and both divided by the number of these. The loss is a product, so
it isn't the sum of losses of parts. But both factors are sums, and the gradient for p_e is a multiple of the total f_e.
So each unit sends its running sums along with the hidden state, the last stage has the totals before any unit of the
micro-batch runs backward, and they return with the gradients: ``2 · E`` numbers a message.

Routers are found by tracing the model's own ``router_logits``. The certification verifies that this is the model's own
loss.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cuboid.distributed.axis_collectives import all_reduce, padded_length
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.tensor_flow import Flow

#: Attributes of a model: the loss's factor, and the number of experts that a token is sent to.
_COEFFICIENT, _TOP_K = "router_aux_loss_coef", "num_experts_per_tok"
#: The sums in front of a hidden state are padded to so many bytes, so that the hidden state stays aligned for kernels.
_ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class RouterLoss:
    """The loss that a model adds to its own with ``output_router_logits``.

    Its factor and the number of experts of a token are attributes of the model, which may change: :class:`RouterSums`.

    Args:
        experts: E, number of experts of each router.
        routers: names of the modules that return router logits ``[tokens, E]``, each with their index in the returned
            tuple; None if the module returns nothing else.
    """

    experts: int
    routers: Mapping[str, int | None]

    @classmethod
    def on_meta(cls, model: PreTrainedModel, base: str, layers: str) -> RouterLoss:
        """Find the routers of a whole model on the meta device.

        Args:
            model: without ``output_router_logits`` in its config.
            base: name of the module that runs the layers.
            layers: name of their list.

        Raises:
            UnsupportedModelError: the model's loss isn't known; the message names the reason.
        """
        # The attributes from which the model's own code computes the loss.
        missing = [name for name in (_COEFFICIENT, _TOP_K, "num_experts") if not hasattr(model, name)]
        if missing:
            raise _unknown(model, f"the model has no {missing[0]}")
        experts: Any = model.num_experts
        return cls(experts, _follow(model, base, layers, experts))


def _unknown(model: PreTrainedModel, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"a pipeline can't compute the loss that config.output_router_logits adds to that of {type(model).__name__}: "
        f"{reason}; set it to false"
    )


def _follow(model: PreTrainedModel, base: str, layers: str, experts: int) -> dict[str, int | None]:
    origins: dict[int, tuple[str, int | None]] = {}
    kept: list[Any] = []

    def note(name: str, output: Any) -> None:
        for place, one in enumerate(output) if isinstance(output, tuple | list) else [(None, output)]:
            if isinstance(one, torch.Tensor):
                # Hooks of inner modules run first, so the innermost module that returned the tensor is kept.
                origins.setdefault(id(one), (name, place))
                # Keep the tensor alive, so that no other gets its id.
                kept.append(one)

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: note(name, output))
        for name, module in model.named_modules()
        if name.startswith(f"{layers}.")
    ]
    ids = torch.zeros((1, 8), dtype=torch.int64, device="meta")
    try:
        with Flow(), torch.no_grad(), torch.device("meta"):
            output = model.get_submodule(base)(input_ids=ids, output_router_logits=True)
    except Exception as error:
        raise _unknown(model, f"its base model doesn't run with it: {type(error).__name__}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    logits = getattr(output, "router_logits", None)
    if not isinstance(logits, tuple) or not logits:
        raise _unknown(model, "its base model returns no router_logits")
    if any(one is None or one.shape != (ids.numel(), experts) or id(one) not in origins for one in logits):
        raise _unknown(model, f"not all of its router_logits are what a module returns, [tokens, {experts}]")
    return dict(origins[id(one)] for one in logits)


def load_balancing(router_logits: Sequence[torch.Tensor], top_k: int, mask: torch.Tensor | None) -> torch.Tensor:
    """``E · Σ_e f_e · p_e`` of whole router logits, in their dtype; transformers' own code computes it in float32.

    Args:
        router_logits: ``[B · S, E]`` of each layer.
        top_k: number of experts that a token is sent to.
        mask: ``[B, S]``, 0 for padding.
    """
    probabilities = torch.cat(list(router_logits)).softmax(dim=-1)
    weights = probabilities.new_ones(len(probabilities), 1)
    if mask is not None:
        weights = mask.reshape(-1, 1).repeat(len(router_logits), 1).to(probabilities.dtype)
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(top_k).indices, 1.0)
    means = [(weights * x).sum(dim=0) / weights.sum() for x in (chosen, probabilities)]
    loss: torch.Tensor = probabilities.shape[1] * (means[0] * means[1]).sum()
    return loss


def exact_router_loss(model: Any, output: Any, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The router loss of a whole model, as :func:`load_balancing` computes it.

    None if the model adds no router loss, or another one (JetMoE's coefficient has another name).
    """
    coefficient = getattr(model, _COEFFICIENT, None)
    if coefficient is None or getattr(output, "aux_loss", None) is None:
        return None
    loss: torch.Tensor = coefficient * load_balancing(output.router_logits, getattr(model, _TOP_K), mask)
    return loss


class RouterSums:
    """The routers' sums ``[2, E]`` of one step on one stage: counts of chosen experts, and sums of probabilities.

    Args:
        loss: the model's router loss.
        model: its attributes say the loss's factor and the number of experts that a token is sent to, as transformers
            looks them up at each forward.
        mesh: this rank's mesh.
        dtype: dtype of hidden states.
        scale: multiplies each micro-batch's loss, besides the coefficient.
        training: whether units will run backward.
    """

    def __init__(
        self, loss: RouterLoss, model: nn.Module, mesh: Mesh, dtype: torch.dtype, scale: float, *, training: bool
    ) -> None:
        self._loss, self._mesh, self._training = loss, mesh, training
        self._scale = scale * float(getattr(model, _COEFFICIENT))
        self._top_k: int = getattr(model, _TOP_K)
        self._dtype = torch.promote_types(torch.float32, dtype)
        #: On the last stage: the sums of each micro-batch.
        self._totals: dict[int, torch.Tensor] = {}
        size = 2 * loss.experts * self._dtype.itemsize
        #: Number of elements in front of the hidden state in a message, in the hidden state's dtype.
        self.extra = padded_length(size, _ALIGNMENT_BYTES) // dtype.itemsize

    def pack(self, hidden: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Pack ``[2, E]`` sums and a hidden state, or its gradient, of any shape into one flat tensor."""
        packed = hidden.new_empty(self.extra + hidden.numel())
        packed[: self.extra].view(self._dtype)[: sums.numel()].copy_(sums.flatten())
        packed[self.extra :].view(hidden.shape).copy_(hidden)
        return packed

    def unpack(self, packed: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The inverse of :meth:`pack`: the hidden state and the sums, both views of ``packed``."""
        sums = packed[: self.extra].view(self._dtype)[: 2 * self._loss.experts].view(2, -1)
        return packed[self.extra :].view(shape), sums

    def none(self, device: torch.device) -> torch.Tensor:
        """``[2, E]`` zeros: the sums before any unit."""
        return torch.zeros((2, self._loss.experts), dtype=self._dtype, device=device)

    def routers_in(
        self, model: nn.Module, first: int, stop: int, layers: str, absent: Iterable[str] = ()
    ) -> list[tuple[nn.Module, int | None]]:
        """The routers of the layers [first, stop), with the index of the logits in what they return.

        Those in ``absent`` modules are on another stage.
        """
        names, others = tuple(f"{layers}.{index}." for index in range(first, stop)), tuple(f"{x}." for x in absent)
        routers = [
            (name, place)
            for name, place in self._loss.routers.items()
            if name.startswith(names) and not f"{name}.".startswith(others)
        ]
        return [(model.get_submodule(name), place) for name, place in routers]

    @contextmanager
    def collecting(self, routers: Sequence[tuple[nn.Module, int | None]]) -> Iterator[list[torch.Tensor]]:
        """In the ``with`` block, the list collects the logits of each router that runs."""
        logits: list[torch.Tensor] = []

        def collect(place: int | None, router: nn.Module, _: Any, output: Any) -> None:
            logits.append(self._logits_of(router, output if place is None else output[place]))

        hooks = [router.register_forward_hook(functools.partial(collect, place)) for router, place in routers]
        try:
            yield logits
        finally:
            for hook in hooks:
                hook.remove()

    def _logits_of(self, router: nn.Module, logits: torch.Tensor) -> torch.Tensor:
        is_trained = self._training and any(weight.requires_grad for weight in router.parameters())
        if is_trained and not logits.requires_grad:
            raise CuboidError(
                "router logits have no gradient, for which config.output_router_logits is: activation checkpointing "
                'with "use_reentrant": true keeps none; use gradient_checkpointing_enable({"use_reentrant": false})'
            )
        return logits

    def of(self, logits: list[torch.Tensor], weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over the rank's tokens and layers how often each expert was chosen, and its probabilities.

        Returns:
            Two tensors ``[E]``; only the second one is differentiable.

        Raises:
            UnsupportedModelError: the routers see other tokens than the rank's own.
        """
        weights = weights.to(self._dtype)
        chosen, probable = self.none(weights.device).unbind()
        for one in logits:
            if one.shape != (len(weights), self._loss.experts):
                raise UnsupportedModelError(
                    f"a rank doesn't know of which tokens router logits {list(one.shape)} are, where it has "
                    f"{len(weights)}; set output_router_logits to false, or use a mesh of one rank"
                )
            probabilities = one.softmax(dim=-1)
            experts = probabilities.detach().topk(self._top_k, dim=-1).indices
            counted = weights[:, None].expand(experts.shape).flatten()
            chosen = chosen.scatter_add(0, experts.flatten(), counted)
            probable = probable + (probabilities.to(self._dtype) * weights[:, None]).sum(dim=0)
        return chosen, probable

    def add(self, micro_batch: int, sums: torch.Tensor) -> None:
        """On the last stage: add a unit's sums over all stages to those of its micro-batch."""
        total = self._totals.get(micro_batch)
        self._totals[micro_batch] = sums if total is None else total + sums

    def finish(self, micro_batch: int) -> torch.Tensor:
        """On the last stage, after all units of a micro-batch: its scaled loss. Collective over the mesh."""
        total = self._totals[micro_batch]
        for axis in ("sequence", "batch"):
            total = all_reduce(total, self._mesh.along(axis))
        self._totals[micro_batch] = total
        chosen, probable = total
        return self._factor(chosen) * (chosen @ probable)

    def gradient(self, sums: torch.Tensor) -> torch.Tensor:
        """The loss's gradient ``[E]`` for the rank's sum of probabilities, given the sums of the whole micro-batch."""
        chosen = sums[0]
        # Gradients of logits are summed over `hidden`, and each of its ranks computes this one completely.
        return self._factor(chosen) / self._mesh.size("hidden") * chosen

    def _factor(self, chosen: torch.Tensor) -> torch.Tensor:
        tokens = chosen.sum() / self._top_k
        return self._scale * self._loss.experts / tokens.clamp(min=1).square()

    def whole(self, micro_batch: int) -> torch.Tensor:
        """On the last stage: the sums of a micro-batch, after :meth:`finish`."""
        return self._totals[micro_batch]


class AddGradient(torch.autograd.Function):
    """Identity on a hidden state, whose backward also sends the gradient in a list to ``probable`` ``[E]``."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, probable: torch.Tensor, gradient: list[torch.Tensor]) -> torch.Tensor:
        ctx.gradient = gradient
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return hidden, ctx.gradient.pop(), None
