"""Token streams to micro-batches: pure functions of the seed, the step and the replica."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from cuboid.train.data.tokens import Stream

#: Label of a position that doesn't count in the loss, as everywhere in Hugging Face.
IGNORED = -100


@dataclass(frozen=True)
class Blocks:
    """A stream ``[tokens]`` cut into blocks of ``sequence_length``; what remains at its end is left out."""

    stream: Stream
    sequence_length: int

    def __len__(self) -> int:
        return len(self.stream) // self.sequence_length

    def take(self, indices: list[int]) -> Tensor:
        """The blocks of the given numbers, int64 ``[len(indices), sequence_length]``."""
        length = self.sequence_length
        rows = [np.asarray(self.stream[index * length : (index + 1) * length]) for index in indices]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


@dataclass(frozen=True)
class Share:
    """Which part of each global batch a data-parallel replica of the mesh is given.

    Attributes:
        replica: number of the replica; all ranks of a mesh have the same one.
        replicas: number of replicas.
        micro_batch: sequences of one micro-batch of one replica.
    """

    replica: int
    replicas: int
    micro_batch: int


@dataclass(frozen=True)
class Shuffle:
    """The order of training: each epoch visits every block once, in an order drawn from the seed.

    The ``n``-th micro-batch is a function of ``n`` alone, so a run can resume from any step.
    """

    blocks: int
    seed: int

    def indices(self, micro_step: int, share: Share) -> list[int]:
        """Numbers of the blocks in a replica's ``micro_step``-th micro-batch, counted from 0."""
        first = (micro_step * share.replicas + share.replica) * share.micro_batch
        return [self._block(position) for position in range(first, first + share.micro_batch)]

    def _block(self, position: int) -> int:
        epoch, offset = divmod(position, self.blocks)
        return int(_permutation(self.blocks, self.seed, epoch)[offset])


@lru_cache(maxsize=2)  # an epoch's, and its neighbour's where a micro-batch spans two
def _permutation(blocks: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(blocks)


@dataclass(frozen=True)
class HeldoutBatch:
    """One micro-batch for evaluation.

    Attributes:
        input_ids: int64 ``[micro_batch, sequence_length]``.
        labels: the same, with :data:`IGNORED` in rows that only fill the batch up.
        tokens: predictions that count in the loss. The first token of a block is never predicted.
    """

    input_ids: Tensor
    labels: Tensor
    tokens: int


def heldout_blocks(blocks: Blocks, limit: int) -> Tensor:
    """At most ``limit`` blocks at even distances over the stream, int64 ``[blocks, sequence_length]``."""
    count = min(limit, len(blocks))
    return blocks.take([index * len(blocks) // count for index in range(count)])


def heldout_batches(blocks: Tensor, share: Share) -> Iterator[HeldoutBatch]:
    """A replica's share of the held-out blocks, each in exactly one replica's batch.

    A mesh takes whole micro-batches only, and the replicas of a pipeline equally many: ignored rows fill the batches
    up, and whole batches of them a share that is shorter than the first replica's.
    """
    mine = blocks[share.replica :: share.replicas]
    longest = -(-len(blocks) // share.replicas)
    for first in range(0, longest, share.micro_batch):
        rows = mine[first : first + share.micro_batch]
        filler = blocks[:1].expand(share.micro_batch - len(rows), -1)
        input_ids = torch.cat([rows, filler])
        labels = input_ids.clone()
        labels[len(rows) :] = IGNORED
        yield HeldoutBatch(input_ids, labels, len(rows) * (rows.shape[1] - 1))
