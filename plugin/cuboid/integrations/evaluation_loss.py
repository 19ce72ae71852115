"""The loss of an evaluation by the Trainer: the mean over all labels, on any layout and in batches of any size."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from cuboid.integrations.loss_mean import LossMean
from cuboid.models.batch.local_batch import IGNORE_INDEX
from cuboid.models.cross_entropy.loss_function import own_loss_of
from cuboid.models.sharded.sharded_model import ShardedModel, unwrap
from cuboid.models.stages.stage_model import StageModel

_LABELS = ("labels", "shift_labels")


class EvaluationLoss:
    """Counts each label once. In a mean of batches, the labels of a short batch would have more weight.

    Args:
        model: sharded, perhaps in an adapter.
        accelerator: the Trainer's, which has dealt the rows out to the replicas.
        skips_non_finite: whether batches count for nothing whose loss isn't a finite number.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator, *, skips_non_finite: bool) -> None:
        inner: Any = unwrap(model)
        self._kind = inner.cuboid.kind
        self._shifts = inner.staging.plan.shifts_labels if isinstance(inner, StageModel) else self._kind.is_causal
        self._accelerator, self._skips_non_finite = accelerator, skips_non_finite
        self._mean = LossMean(accelerator.device)

    @staticmethod
    def is_known_of(model: nn.Module) -> bool:
        """Whether a model's loss is known to be a mean over labels that are classes: of tokens, or of whole rows."""
        inner: Any = unwrap(model)
        if not isinstance(inner, ShardedModel):
            return False
        kind = inner.cuboid.kind
        has_classes = kind.is_language_model or kind.classes is not None
        return has_classes and own_loss_of(inner, kind.ordinary_loss) is None

    def counted_once(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A batch with no labels in the rows that fill it up, which other batches have already."""
        labels, progress = _labels(inputs), self._accelerator.gradient_state
        if not labels or not progress.end_of_dataloader or progress.remainder <= 0:
            return inputs
        # As accelerate's gather_for_metrics has it: the first ``remainder`` of the rows of all replicas' last batches,
        # one batch after the other, are no fillers.
        rows = len(next(iter(labels.values())))
        count = max(progress.remainder - self._accelerator.process_index * rows, 0)
        if self._accelerator.num_processes == 1 or count >= rows:
            return inputs
        is_filler = torch.arange(rows) >= count
        masks = {name: is_filler.to(x.device).view(-1, *[1] * (x.dim() - 1)) for name, x in labels.items()}
        return {**inputs, **{name: x.masked_fill(masks[name], IGNORE_INDEX) for name, x in labels.items()}}

    def add(self, inputs: dict[str, Any], loss: Tensor) -> None:
        """Add this replica's loss of a batch, the mean over its labels; in a pipeline, over all replicas' labels."""
        if not _labels(inputs):
            return
        items = self._kind.items(self._kind.for_stages(dict(inputs), shifts=self._shifts)).to(loss.device)
        self._mean.add(loss, torch.where(loss.isfinite(), items, 0) if self._skips_non_finite else items)

    def over_ranks(self) -> float:
        """The mean over all batches and replicas; NaN if there were no labels. Collective."""
        mean, _ = self._mean.over_ranks()
        return mean


def _labels(inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {name: inputs[name] for name in _LABELS if isinstance(inputs.get(name), Tensor)}
