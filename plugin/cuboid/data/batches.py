"""Micro-batches of token streams, as pure functions of the seed, the step and the replica."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from cuboid.data.tokens import Stream

#: Label of a position that doesn't count in the loss, as everywhere in Hugging Face.
IGNORED = -100
#: Blocks in which each text of a mixture has its share.
_PERIOD = 1024
#: The most that the shares of a mixture's other texts may add up to.
LARGEST_SHARE = Fraction(99, 100)
#: Seeds of the run are smaller.
_SEED_OF_NEXT = 2**64


@dataclass(frozen=True)
class Blocks:
    """A stream ``[tokens]`` as blocks of ``sequence_length``, without the remainder at its end."""

    stream: Stream
    sequence_length: int

    def __len__(self) -> int:
        return len(self.stream) // self.sequence_length

    def take(self, indices: list[int]) -> Tensor:
        """The blocks of the given numbers, int64 ``[len(indices), sequence_length]``, in the form of the stream."""
        return torch.from_numpy(np.stack([self.row(index) for index in indices]).astype(np.int64))

    def row(self, index: int) -> Stream:
        """One block ``[sequence_length]``."""
        length = self.sequence_length
        return np.asarray(self.stream[index * length : (index + 1) * length])


def micro_batch(rows: Tensor) -> dict[str, Tensor]:
    """Blocks ``[rows, sequence_length]`` as a model takes them; what isn't to be learned has no label."""
    is_learned = rows >= 0
    return {"input_ids": torch.where(is_learned, rows, ~rows), "labels": rows.masked_fill(~is_learned, IGNORED)}


def label_count(labels: Tensor) -> int:
    """Number of predictions that count in the loss. The first token of a block is never predicted."""
    return int((labels[:, 1:] != IGNORED).sum())


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

    def positions(self, micro_step: int) -> range:
        """The blocks of this replica's ``micro_step``-th micro-batch, counted over the whole run, both from 0."""
        first = (micro_step * self.replicas + self.replica) * self.micro_batch
        return range(first, first + self.micro_batch)


@dataclass(frozen=True)
class Shuffle:
    """The order of training: each epoch visits every block once, in an order that depends on the seed.

    The ``n``-th micro-batch is a function of ``n`` alone, so that a run can resume from any step.
    """

    blocks: int
    seed: int

    def indices(self, micro_step: int, share: Share) -> list[int]:
        """Numbers of the blocks in a replica's ``micro_step``-th micro-batch, counted from 0."""
        return [self.at(position) for position in share.positions(micro_step)]

    def at(self, position: int) -> int:
        """Number of the block that is visited after ``position`` others."""
        epoch, offset = divmod(position, self.blocks)
        return int(_permutation(self.blocks, self.seed, epoch)[offset])


@lru_cache(maxsize=16)  # two of each text, because a micro-batch may span two epochs
def _permutation(blocks: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(blocks)


@dataclass(frozen=True)
class Mixture:
    """Several texts to train on, each of which has its share of the blocks, for as many epochs of it as that takes.

    As in :class:`Shuffle`, the ``n``-th micro-batch is a function of ``n`` alone. Of a thousand blocks in a row, each
    text has its share to within one block; their order depends on the seed.
    """

    texts: tuple[Blocks, ...]
    #: Of all texts but the first, which has the rest.
    shares: tuple[Fraction, ...]
    seed: int

    def rows(self, micro_step: int, share: Share) -> Tensor:
        """A replica's ``micro_step``-th micro-batch, int64 ``[micro_batch, sequence_length]``."""
        blocks = [self.block(position) for position in share.positions(micro_step)]
        return torch.from_numpy(np.stack([self.texts[text].row(index) for text, index in blocks]).astype(np.int64))

    @property
    def blocks(self) -> int:
        """Blocks of all texts."""
        return sum(map(len, self.texts))

    def block(self, position: int) -> tuple[int, int]:
        """Numbers of the text, and of the block in it, that is trained on after ``position`` others."""
        text, before = self._text_at(position) if self.shares else (0, position)
        # Texts of equal length have orders of their own.
        return text, Shuffle(len(self.texts[text]), self.seed + text * _SEED_OF_NEXT).at(before)

    def _text_at(self, position: int) -> tuple[int, int]:
        """The number of the text at a position, and how many blocks of it come before."""
        period, offset = divmod(position, _PERIOD)
        order = _order(self.shares, self.seed, period)
        text = int(order[offset])
        earlier = _counts(self.shares, period * _PERIOD)[text]
        return text, earlier + int((order[:offset] == text).sum())


def _counts(shares: tuple[Fraction, ...], blocks: int) -> list[int]:
    """How many of the first ``blocks`` blocks each text has, the first one what is left."""
    others = [blocks * share.numerator // share.denominator for share in shares]
    return [blocks - sum(others), *others]


@lru_cache(maxsize=2)
def _order(shares: tuple[Fraction, ...], seed: int, period: int) -> np.ndarray:
    """The number of the text of each block of a period."""
    ends = [_counts(shares, blocks) for blocks in (period * _PERIOD, (period + 1) * _PERIOD)]
    texts = np.repeat(np.arange(len(shares) + 1), np.subtract(ends[1], ends[0]))
    return np.random.default_rng([seed, period, _SEED_OF_NEXT]).permutation(texts)


@dataclass(frozen=True)
class HeldoutBatch:
    """One micro-batch for evaluation.

    Attributes:
        input_ids: int64 ``[micro_batch, sequence_length]``.
        labels: the same, with :data:`IGNORED` where nothing is to be learned, and in rows that are fillers.
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
        batch = micro_batch(torch.cat([rows, filler]))
        batch["labels"][len(rows) :] = IGNORED
        yield HeldoutBatch(batch["input_ids"], batch["labels"], label_count(batch["labels"]))
