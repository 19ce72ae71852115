"""Micro-batches of token streams, as pure functions of the seed, the step and the replica."""

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
    """A stream ``[tokens]`` as blocks of ``sequence_length``, without the remainder at its end."""

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
    """A data-parallel replica's part of each global batch.

    Attributes:
        replica: number of the replica; the same on all ranks of a mesh.
        replicas: number of replicas.
        micro_batch: sequences of one micro-batch of one replica.
    """

    replica: int
    replicas: int
    micro_batch: int


@dataclass(frozen=True)
class Shuffle:
    """The order of training: each epoch visits every block once, in an order that depends on the seed.

    The ``n``-th micro-batch is a function of ``n`` alone, so that a run can resume from any step.
    """

    blocks: int
    seed: int

    def indices(self, micro_step: int, share: Share) -> list[int]:
        """Numbers of the blocks in a replica's ``micro_step``-th micro-batch, counted from 0."""
        first = (micro_step * share.replicas + share.replica) * share.micro_batch
        numbers = []
        for position in range(first, first + share.micro_batch):
            epoch, offset = divmod(position, self.blocks)
            numbers.append(int(_permutation(self.blocks, self.seed, epoch)[offset]))
        return numbers


@lru_cache(maxsize=2)  # two, because a micro-batch may span two epochs
def _permutation(blocks: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(blocks)


@dataclass(frozen=True)
class HeldoutBatch:
    """One micro-batch for evaluation.

    Attributes:
        input_ids: int64 ``[micro_batch, sequence_length]``.
        labels: the same, with :data:`IGNORED` in rows that are fillers.
        tokens: number of predictions that count in the loss. The first token of a block is never predicted.
    """

    input_ids: Tensor
    labels: Tensor
    tokens: int


def heldout_blocks(blocks: Blocks, limit: int) -> Tensor:
    """At most ``limit`` blocks, evenly spaced over the stream, int64 ``[blocks, sequence_length]``."""
    count = min(limit, len(blocks))
    return blocks.take([index * len(blocks) // count for index in range(count)])


def heldout_batches(blocks: Tensor, share: Share) -> Iterator[HeldoutBatch]:
    """A replica's share of the held-out blocks; each block is in exactly one replica's share.

    A mesh needs full micro-batches, and a pipeline the same number on every replica. So batches are filled up with
    ignored rows, and shares with batches of only such rows.
    """
    own_blocks = blocks[share.replica :: share.replicas]
    longest = -(-len(blocks) // share.replicas)
    for first in range(0, longest, share.micro_batch):
        rows = own_blocks[first : first + share.micro_batch]
        filler = blocks[:1].expand(share.micro_batch - len(rows), -1)
        input_ids = torch.cat([rows, filler])
        labels = input_ids.clone()
        labels[len(rows) :] = IGNORED
        yield HeldoutBatch(input_ids, labels, len(rows) * (rows.shape[1] - 1))
