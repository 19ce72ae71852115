"""An optimizer step of either engine of Cuboid's: a mesh's, or a pipeline's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from cuboid.integrations.deepspeed.engine import CuboidEngine
from cuboid.integrations.deepspeed.pipeline_engine import CuboidPipelineEngine
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


def _placed(batch: MicroBatch, engine: CuboidEngine) -> MicroBatch:
    return {name: x.to(engine.device) for name, x in batch.items()}
