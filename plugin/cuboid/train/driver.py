"""Two ways to drive an engine: by micro-batches, or, in a pipeline, by whole optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from cuboid.failures.interrupts import Interrupts
from cuboid.train.data.batches import HeldoutBatch
from cuboid.train.process import total


class Driver(Protocol):
    """The loop's interface to an engine. Both calls are collective and return the same number on every rank.

    In the same all-reduce as the loss, the ranks agree on whether to stop.
    """

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        ...

    def train(self, micro_batches: Iterable[Tensor]) -> float:
        """One optimizer step with this replica's micro-batches, int64 ``[micro_batch, sequence_length]`` each.

        Returns the loss before it, over all replicas, in nats per token.
        """
        ...

    def evaluate(self, batches: Iterable[HeldoutBatch]) -> float:
        """Mean loss per predicted token over the batches of all replicas, which must all have the same number."""
        ...


@dataclass(frozen=True)
class MicroBatchDriver:
    """``forward``, ``backward`` and ``step`` for each micro-batch, as with any DeepSpeed engine."""

    engine: Any
    device: torch.device
    interrupts: Interrupts

    def train(self, micro_batches: Iterable[Tensor]) -> float:
        """See :class:`Driver`."""
        # Models are loaded for evaluation, and no evaluation comes before the first step of a resumed run.
        self.engine.train()
        losses = torch.stack([self._step(micro_batch.to(self.device)) for micro_batch in micro_batches])
        return mean(float(losses.mean()), 1.0, self.device, self.interrupts)

    def _step(self, input_ids: Tensor) -> Tensor:
        loss: Tensor = self.engine(input_ids=input_ids, labels=input_ids).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[HeldoutBatch]) -> float:
        """See :class:`Driver`."""
        self.engine.eval()
        loss_sum, tokens = 0.0, 0
        for batch in batches:
            if batch.tokens == 0:
                continue
            output = self.engine(input_ids=batch.input_ids.to(self.device), labels=batch.labels.to(self.device))
            loss_sum += float(output.loss) * batch.tokens
            tokens += batch.tokens
        return mean(loss_sum / max(tokens, 1), tokens, self.device, self.interrupts)


@dataclass(frozen=True)
class PipelineDriver:
    """``train_batch`` and ``eval_batch`` of a pipeline's engine, which take the micro-batches of a whole step."""

    engine: Any
    device: torch.device
    interrupts: Interrupts
    #: Micro-batches of a step; evaluation runs as many per call, so that it needs no more memory.
    accumulation: int

    def train(self, micro_batches: Iterable[Tensor]) -> float:
        """See :class:`Driver`."""
        loss = float(self.engine.train_batch({"input_ids": ids, "labels": ids} for ids in micro_batches))
        # The engine's loss is the mean over all ranks already, so the agreement needs an all-reduce of its own.
        self.interrupts.agree(total(self.interrupts.own(), self.device))
        return loss

    def evaluate(self, batches: Iterable[HeldoutBatch]) -> float:
        """See :class:`Driver`."""
        loss_sum, tokens = 0.0, 0
        batches_left = iter(batches)
        while group := list(islice(batches_left, self.accumulation)):
            feed = ({"input_ids": batch.input_ids, "labels": batch.labels} for batch in group)
            loss = float(self.engine.eval_batch(feed, num_micro_batches=len(group)))
            group_tokens = sum(batch.tokens for batch in group)
            # The loss is the mean over all replicas' tokens, on each of them. Weighted with each replica's own tokens,
            # the sum over replicas in ``mean`` gives the total.
            loss_sum += loss * group_tokens
            tokens += group_tokens
        return mean(loss_sum / max(tokens, 1), tokens, self.device, self.interrupts)


def mean(value: float, weight: float, device: torch.device, interrupts: Interrupts) -> float:
    """Weighted mean of one number per rank, in one all-reduce with the agreement on whether to stop; collective."""
    weighted, weights, *votes = total([value * weight, weight, *interrupts.own()], device)
    interrupts.agree(votes)
    return weighted / weights
