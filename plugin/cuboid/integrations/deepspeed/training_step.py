"""An optimizer step, and an evaluation, of either engine of Cuboid's: a mesh's, or a pipeline's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor

from cuboid.integrations.deepspeed.engine import CuboidEngine
from cuboid.integrations.deepspeed.pipeline_engine import CuboidPipelineEngine
from cuboid.integrations.loss_mean import LossMean
from cuboid.models.batch.broadcast import MicroBatch


def train_step(engine: CuboidEngine, batches: Iterator[MicroBatch]) -> Tensor:
    """One optimizer step on the next ``gradient_accumulation_steps`` micro-batches of each replica; collective.

    Returns:
        The loss before the step, a scalar tensor: the mean over this replica's micro-batches; in a pipeline, that over
        the label tokens of all replicas.
    """
    if isinstance(engine, CuboidPipelineEngine):
        return engine.train_batch(batches)
    # Models are loaded for evaluation, and none need come before the first step.
    engine.train()
    losses = []
    for batch in islice(batches, engine.gradient_accumulation_steps()):
        loss = engine(**_placed(batch, engine)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


@torch.no_grad()
def evaluate(engine: CuboidEngine, batches: Iterable[tuple[MicroBatch, int]]) -> LossMean:
    """The mean loss over batches, each with the number of its label tokens; of this replica, or a pipeline's all.

    Collective; all replicas must have the same number of batches.
    """
    mean, batches_left = LossMean(engine.device), iter(batches)
    if not isinstance(engine, CuboidPipelineEngine):
        engine.eval()
        for batch, tokens in batches_left:
            mean.add(engine(**_placed(batch, engine)).loss, tokens)
        return mean
    # As many in a call as in a step, which needs no more memory than training.
    while group := list(islice(batches_left, engine.gradient_accumulation_steps())):
        loss = engine.eval_batch(iter([batch for batch, _ in group]), num_micro_batches=len(group))
        # The mean over all replicas' tokens, on each of them: weighted with each replica's own tokens, the sum over
        # replicas is the total.
        mean.add(loss, sum(tokens for _, tokens in group))
    return mean


def _placed(batch: MicroBatch, engine: CuboidEngine) -> MicroBatch:
    return {name: x.to(engine.device) for name, x in batch.items()}
