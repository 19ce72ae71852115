"""A trainer's own ``compute_loss`` on a pipeline: given what the last stage computed, it reports, and it is checked.

Or the pipeline trains what it returns: see :class:`PipelineModel`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from transformers.utils import ModelOutput

from cuboid.errors import CuboidError
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.local_batch import IGNORE_INDEX
from cuboid.models.cross_entropy.incomplete_output import MissingOutputError
from cuboid.models.kinds.label_heads import RowClassifier
from cuboid.models.pipeline.given_loss import GivenLoss
from cuboid.models.pipeline.training_pipeline import Pipeline
from cuboid.models.sharded.sharded_model import unwrap


class _Output(ModelOutput):
    """The output of a micro-batch that went through a pipeline, which names what it has not."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._missing(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) and key not in self.keys():
            raise self._missing(key)
        return super().__getitem__(key)

    def _missing(self, name: str) -> MissingOutputError:
        known = ", ".join(field.name for field in fields(cast(Any, self)))
        return MissingOutputError(
            f"{name}: a pipeline frees the logits of each segment once it has the loss, so that compute_loss is given "
            f"{known} {self._of}; compute with those, or on a mesh without stages"
        )


@dataclass
class TokenOutput(_Output):
    """The output of a micro-batch that went through a pipeline: values of its label tokens in place of logits.

    Args:
        loss: mean of the negative log-probabilities, or their sum over ``num_items_in_batch``; a scalar.
        log_probs: ``[B, S - 1]``, with ``shift_labels`` ``[B, S]``: log-probability of the label that each position
            predicts; 0 where there is none.
        entropy: of the distribution over the vocabulary, of the same shape; 0 where there is no label.
        is_top1: whether no token is more probable than the label; of the same shape.
        label_mask: whether there is a label; of the same shape.
        mean_logits: mean of the logits over the vocabulary; of the same shape, 0 where there is no label.
        log_sum_sq_probs: logarithm of the sum of the squared probabilities, likewise.
    """

    _of = "of the label tokens"

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None


@dataclass
class ScoreOutput(_Output):
    """The output of a micro-batch whose rows a head labels: its outputs ``[B, outputs]``, whole."""

    _of = "of each row"

    logits: torch.Tensor | None = None


class TokenModel:
    """Stands for the model in a trainer's ``compute_loss``: a call returns what the pipeline computed.

    Args:
        model: whose attributes this has.
        values: ``[5, B, S]`` in the order of ``TOKEN_VALUES``, of the micro-batch that ``compute_loss`` gets.
    """

    def __init__(self, model: Any, values: torch.Tensor) -> None:
        self._model = model
        log_probs, entropy, *self._others = values.unbind()
        #: A leaf, by which the loss is differentiated.
        self.log_probs = log_probs.clone().requires_grad_()
        #: Another leaf, to tell whether the loss depends on it: nothing would train that part.
        self.entropy = entropy.clone().requires_grad_()

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
        log_probs, entropy, is_top1, mean_logits, squares = (
            # Their sums have no derivative where there is no label.
            x[:, : mask.shape[1]].masked_fill(~mask, 0)
            for x in (self.log_probs, self.entropy, *self._others)
        )
        items = arguments.get("num_items_in_batch")
        count = mask.sum().clamp(min=1) if items is None else items
        return TokenOutput(-log_probs.sum() / count, log_probs, entropy, is_top1.bool(), mask, mean_logits, squares)


class PipelineModel:
    """Stands for a model in stages in a ``compute_loss`` whose loss a pipeline trains: a call is a forward of it.

    Each call is collective over all ranks, which must make the same ones. The call with gradients, of which there is
    one, returns leaves.

    Args:
        model: whose attributes this has; the stages, perhaps in an engine or an adapter.
        pipeline: of these stages.
        trainer: name of the trainer's class.
    """

    def __init__(self, model: Any, pipeline: Pipeline, trainer: str) -> None:
        self._model, self._pipeline, self._trainer = model, pipeline, trainer
        self._stage: Any = unwrap(model)
        #: The micro-batch of the call with gradients, and what stood for the model there.
        self.batch: MicroBatch | None = None
        self._leaves: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        # Scripts ask whether the model is an adapter's.
        return type(self._model)

    def __call__(self, **arguments: Any) -> TokenOutput | ScoreOutput:
        """The output for a micro-batch's arguments, as the model takes them."""
        batch = self._micro_batch(arguments)
        values = self._evaluate(batch)
        trains = torch.is_grad_enabled()
        if trains and self.batch is not None:
            raise CuboidError(
                f"{self._trainer}.compute_loss calls the model twice with gradients, and a pipeline trains one forward "
                "of each micro-batch; call it inside torch.no_grad() where nothing is differentiated"
            )
        if isinstance(self._stage.cuboid.kind, RowClassifier):
            scores = values.clone().requires_grad_(trains)
            output: TokenOutput | ScoreOutput = ScoreOutput(scores)
            leaves = [scores]
        else:
            tokens = TokenModel(self._model, values)
            output, leaves = tokens(**arguments), [tokens.log_probs, tokens.entropy]
        if trains:
            self.batch, self._leaves = batch, leaves
        return output

    def given(self, loss: Any) -> tuple[MicroBatch, GivenLoss]:
        """The micro-batch to train, and the loss that ``compute_loss`` returned for it, with its derivatives."""
        if self.batch is None:
            raise CuboidError(f"{self._trainer}.compute_loss returned a loss without calling the model with gradients")
        leaf = self._leaves[0]
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise CuboidError(f"{self._trainer}.compute_loss returned a loss that doesn't depend on the model's output")
        gradient, *unused = torch.autograd.grad(loss, self._leaves, allow_unused=True)
        if any(x is not None and bool(x.any()) for x in unused):
            raise CuboidError(
                f"{self._trainer}.compute_loss depends on the entropy, and a pipeline trains functions of log_probs; "
                "detach it to report it, or train this loss on a mesh without stages"
            )
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        return self.batch, GivenLoss(loss.detach(), leaf.detach(), gradient)

    def _micro_batch(self, arguments: dict[str, Any]) -> MicroBatch:
        known, parameters = self._pipeline.limits.names, inspect.signature(self._stage.cuboid.base.forward).parameters
        batch = {name: x for name, x in arguments.items() if name in known and x is not None}
        for name, x in arguments.items():
            # What the model's forward doesn't name, it ignores, too.
            named = (name in parameters or name == "output_router_logits") and name not in ("use_cache", "return_dict")
            if name not in known and named and x is not None and x is not False:
                raise CuboidError(
                    f"{self._trainer}.compute_loss gives the model {name}, which has no rule in a pipeline"
                )
        kind = self._stage.cuboid.kind
        if isinstance(kind, RowClassifier):
            rows = len(batch["input_ids"])
            # The pipeline's micro-batches have labels; these are ignored.
            shape = (rows,) if kind.classes is not None or kind.outputs == 1 else (rows, kind.outputs)
            batch["labels"] = torch.zeros(shape, dtype=torch.float32 if kind.classes is None else torch.int64)
        return batch

    def _evaluate(self, batch: MicroBatch) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        self._pipeline.observe_outputs = seen.extend
        try:
            self._pipeline.evaluate(iter([batch]), 1)
        finally:
            self._pipeline.observe_outputs = None
        return seen[0]


def mean_of(losses: Sequence[GivenLoss]) -> torch.Tensor:
    """The mean of the micro-batches' losses, a scalar."""
    return torch.stack([one.loss for one in losses]).mean()


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
    gradient = unused = None
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        gradient, unused = torch.autograd.grad(loss, (model.log_probs, model.entropy), allow_unused=True)
    expected = -mask.to(model.log_probs.dtype) * scale
    depends = unused is not None and bool(unused.any())
    if gradient is None or depends or not torch.allclose(gradient, expected, rtol=1e-3, atol=0):
        raise CuboidError(
            f"{trainer}.compute_loss isn't the model's own loss, the mean of the label tokens' negative "
            "log-probabilities, which a pipeline computes on the last stage and in pieces; use another loss on a mesh "
            "without stages"
        )
