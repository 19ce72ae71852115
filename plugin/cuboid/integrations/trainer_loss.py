"""A trainer's own ``compute_loss`` on a pipeline: given what the last stage computed, it reports, and it is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from cuboid.errors import CuboidError
from cuboid.models.batch.local_batch import IGNORE_INDEX


class MissingOutputError(CuboidError, AttributeError, KeyError):
    """A script reads an entry of a model's output that a pipeline doesn't have."""

    # KeyError would show the message's repr.
    __str__ = CuboidError.__str__


@dataclass
class TokenOutput(ModelOutput):
    """The output of a micro-batch that went through a pipeline: values of its label tokens in place of logits.

    Args:
        loss: mean of the negative log-probabilities, or their sum over ``num_items_in_batch``; a scalar.
        log_probs: ``[B, S - 1]``, with ``shift_labels`` ``[B, S]``: log-probability of the label that each position
            predicts; 0 where there is none.
        entropy: of the distribution over the vocabulary, of the same shape; 0 where there is no label.
        is_top1: whether no token is more probable than the label; of the same shape.
        label_mask: whether there is a label; of the same shape.
    """

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _missing(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) and key not in self.keys():
            raise _missing(key)
        return super().__getitem__(key)


def _missing(name: str) -> MissingOutputError:
    known = "loss, log_probs, entropy, is_top1, label_mask"
    return MissingOutputError(
        f"{name}: a pipeline frees the logits of each segment once it has the loss, so that compute_loss is given "
        f"{known} of the label tokens; compute with those, or on a mesh without stages"
    )


class TokenModel:
    """Stands for the model in a trainer's ``compute_loss``: a call returns what the pipeline computed.

    Args:
        model: whose attributes this has.
        values: ``[3, B, S]`` in the order of ``TOKEN_VALUES``, of the micro-batch that ``compute_loss`` gets.
    """

    def __init__(self, model: Any, values: torch.Tensor) -> None:
        self._model = model
        log_probs, self._entropy, self._is_top1 = values.unbind()
        #: A leaf, by which the loss is differentiated.
        self.log_probs = log_probs.clone().requires_grad_()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **arguments: Any) -> TokenOutput:
        """The output for the micro-batch's arguments, as the model takes them."""
        labels, shifted = arguments.get("labels"), arguments.get("shift_labels")
        targets = labels[:, 1:] if shifted is None and labels is not None else shifted
        if targets is None:
            raise CuboidError(
                "compute_loss calls the model without labels, for its logits, which a pipeline frees; pass the labels, "
                "and compute with the output's log_probs"
            )
        mask = targets != IGNORE_INDEX
        log_probs, entropy, is_top1 = (
            # Their sums have no derivative where there is no label.
            x[:, : mask.shape[1]].masked_fill(~mask, 0)
            for x in (self.log_probs, self._entropy, self._is_top1)
        )
        items = arguments.get("num_items_in_batch")
        count = mask.sum().clamp(min=1) if items is None else items
        return TokenOutput(-log_probs.sum() / count, log_probs, entropy, is_top1.bool(), mask)


def check_own_loss(trainer: str, loss: Any, model: TokenModel, mask: torch.Tensor, scale: torch.Tensor | float) -> None:
    """Check that a trainer's loss is the model's own, by its derivative for each token's log-probability.

    Args:
        trainer: name of its class.
        loss: what its ``compute_loss`` returned for a call of ``model``.
        model: that it was given.
        mask: ``[B, S]``: which positions predict a label.
        scale: what the own loss multiplies each token's negative log-probability with.

    Raises:
        CuboidError: it trains something else.
    """
    gradient = None
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss, model.log_probs, allow_unused=True)
    expected = -mask.to(model.log_probs.dtype) * scale
    if gradient is None or not torch.allclose(gradient, expected, rtol=1e-3, atol=0):
        raise CuboidError(
            f"{trainer}.compute_loss isn't the model's own loss, the mean of the label tokens' negative "
            "log-probabilities, which a pipeline computes on the last stage and in pieces; use another loss on a mesh "
            "without stages"
        )
