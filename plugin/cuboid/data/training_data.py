"""What a run trains on and evaluates: its texts are tokenized, checked against the model, and cut into blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from cuboid import CuboidError
from cuboid.data.batches import Blocks, Mixture
from cuboid.data.batches import heldout_blocks as heldout_blocks_of
from cuboid.data.corpus import Corpus, all_held_out, read_corpus
from cuboid.data.tokens import TOKENS, TokenFolder, TokensMeta, check_named_size, check_size, check_tokens, tokenize
from cuboid.failures.launched_world import World, run_at_length


@dataclass(frozen=True)
class TrainingData:
    """The texts of a run, of which each rank reads its share."""

    #: Origin of the first text, for the report.
    source: str
    #: Hash of the tokens to train on, and of the shares of several texts.
    fingerprint: str
    #: Whether some of the tokens to train on aren't to be learned.
    has_unlearned: bool
    mixture: Mixture
    #: int64 ``[blocks, sequence_length]`` in the form of the streams; and by name, those of other texts to evaluate.
    heldout: Tensor
    evaluated: Mapping[str, Tensor]


def training_data(
    data: Path,
    *,
    mixed: Sequence[tuple[str, Path, Fraction]],
    evaluated: Sequence[tuple[str, Path]],
    sequence_length: int,
    heldout_blocks: int,
    global_batch: int,
    seed: int,
    tokenizer: Any,
    vocabulary: int,
    out: Path,
    world: World,
) -> TrainingData:
    """Open the tokens of all texts, or make them; collective.

    Args:
        data: the first text, or its tokens.
        mixed: names of other texts to train on, their paths, and their shares of the blocks.
        evaluated: names of texts that are evaluated only, and their paths.
        sequence_length: tokens of a block.
        heldout_blocks: of each text, at most.
        global_batch: sequences of one optimizer step, over all ranks.
        seed: of the blocks' order.
        tokenizer, vocabulary: of the model.
        out: the run's folder, for tokens that are made.
        world: the ranks.

    Raises:
        CuboidError: a text can't be read, is too short, or has tokens that the model doesn't know.
    """
    opener = _Opener(tokenizer, vocabulary, out, world)
    check_first = partial(check_size, sequence_length=sequence_length, global_batch=global_batch)
    check_mixed = partial(check_named_size, option="--mix", sequence_length=sequence_length)
    check_evaluated = partial(check_named_size, option="--eval", sequence_length=sequence_length, is_trained=False)
    first = opener.open(data, "", read_corpus, check_first)
    others = [opener.open(path, name, read_corpus, partial(check_mixed, name=name)) for name, path, _ in mixed]
    evaluated_alone = {
        name: opener.open(path, name, lambda path: all_held_out(read_corpus(path)), partial(check_evaluated, name=name))
        for name, path in evaluated
    }
    trained, shares = [first, *others], tuple(share for _, _, share in mixed)
    fingerprint = first.meta.data_sha256
    if others:
        parts = [(folder.meta.data_sha256, str(share)) for folder, share in zip(trained, (0, *shares), strict=True)]
        fingerprint = hashlib.sha256(repr(parts).encode()).hexdigest()
    # The held-out parts of all texts to train on are evaluated too.
    named = {**dict(zip((name for name, _, _ in mixed), others, strict=True)), **evaluated_alone}
    heldout, *of_others = (
        heldout_blocks_of(Blocks(folder.stream("heldout"), sequence_length), heldout_blocks)
        for folder in (first, *named.values())
    )
    return TrainingData(
        source=first.meta.source,
        fingerprint=fingerprint,
        has_unlearned=any(folder.meta.has_unlearned for folder in trained),
        mixture=Mixture(tuple(Blocks(folder.stream("train"), sequence_length) for folder in trained), shares, seed),
        heldout=heldout,
        evaluated=dict(zip(named, of_others, strict=True)),
    )


@dataclass(frozen=True)
class _Opener:
    """Opens tokens, and tokenizes texts into the run's folder."""

    tokenizer: Any
    vocabulary: int
    out: Path
    world: World

    def open(
        self, path: Path, name: str, read: Callable[[Path], Corpus], check: Callable[[TokensMeta], None]
    ) -> TokenFolder:
        """The tokens at a path, or those of the text there; collective.

        A text is tokenized once per machine, into a folder of this name. Its other ranks wait, and memory-map the same
        files.
        """

        def check_all(meta: TokensMeta) -> None:
            check_tokens(meta, self.tokenizer, self.vocabulary)
            check(meta)

        if TokenFolder.is_store(path):
            tokens = TokenFolder.open(path)
            check_all(tokens.meta)
            return tokens
        folder = self.out / TOKENS / name

        def write() -> None:
            corpus = read(path)
            try:
                tokenize(corpus, self.tokenizer, folder, check_all)
            except OSError as error:
                raise CuboidError(f"--out {str(self.out)!r} can't be written: {error}") from error

        # One rank per machine, since the machines may not share a file system.
        run_at_length(write if self.world.local_rank == 0 else None, self.world, what="tokenizing the data")
        return TokenFolder.open(folder)
