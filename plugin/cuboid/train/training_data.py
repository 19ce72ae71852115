"""What a run trains on and evaluates: its texts are tokenized, checked against the model, and cut into blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from cuboid import CuboidError
from cuboid.data.batches import Blocks, Mixture, heldout_blocks
from cuboid.data.corpus import Corpus, all_held_out, read_corpus
from cuboid.data.tokens import TOKENS, TokenFolder, TokensMeta, check_named_size, check_size, check_tokens, tokenize
from cuboid.failures.launched_world import World, run_at_length
from cuboid.train.job import TrainJob


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


def training_data(job: TrainJob, global_batch: int, world: World) -> TrainingData:
    """Open the tokens of all texts, or make them; collective.

    Raises:
        CuboidError: a text can't be read, is too short, or has tokens that the model doesn't know; or a run is to be
            resumed that had others.
    """
    options, length = job.options, job.options.sequence_length
    opener = _Opener(job, world)
    check_first = partial(check_size, sequence_length=length, global_batch=global_batch)
    check_mixed = partial(check_named_size, option="--mix", sequence_length=length)
    check_evaluated = partial(check_named_size, option="--eval", sequence_length=length, is_trained=False)
    first = opener.open(options.data, "", read_corpus, check_first)
    mixed = [opener.open(path, name, read_corpus, partial(check_mixed, name=name)) for name, path, _ in options.mixed]
    others = {
        name: opener.open(path, name, lambda path: all_held_out(read_corpus(path)), partial(check_evaluated, name=name))
        for name, path in options.eval_data
    }
    trained, shares = [first, *mixed], tuple(share for _, _, share in options.mixed)
    fingerprint = first.meta.data_sha256
    if mixed:
        parts = [(folder.meta.data_sha256, str(share)) for folder, share in zip(trained, (0, *shares), strict=True)]
        fingerprint = hashlib.sha256(repr(parts).encode()).hexdigest()
    if job.resumed is not None:
        job.resumed.reject_differences(data_fingerprint=fingerprint)
    # The held-out parts of all texts to train on are evaluated too.
    evaluated = {**dict(zip((name for name, _, _ in options.mixed), mixed, strict=True)), **others}
    heldout, *named = (
        heldout_blocks(Blocks(folder.stream("heldout"), length), options.heldout_blocks)
        for folder in (first, *evaluated.values())
    )
    return TrainingData(
        source=first.meta.source,
        fingerprint=fingerprint,
        has_unlearned=any(folder.meta.has_unlearned for folder in trained),
        mixture=Mixture(tuple(Blocks(folder.stream("train"), length) for folder in trained), shares, options.seed),
        heldout=heldout,
        evaluated=dict(zip(evaluated, named, strict=True)),
    )


@dataclass(frozen=True)
class _Opener:
    """Opens tokens, and tokenizes texts into the run's folder."""

    job: TrainJob
    world: World

    def open(
        self, path: Path, name: str, read: Callable[[Path], Corpus], check: Callable[[TokensMeta], None]
    ) -> TokenFolder:
        """The tokens at a path, or those of the text there; collective.

        A text is tokenized once per machine, into a folder of this name. Its other ranks wait, and memory-map the same
        files.
        """

        def check_all(meta: TokensMeta) -> None:
            check_tokens(meta, self.job.tokenizer, self.job.vocabulary)
            check(meta)

        if TokenFolder.is_store(path):
            tokens = TokenFolder.open(path)
            check_all(tokens.meta)
            return tokens
        out = self.job.options.out
        folder = out / TOKENS / name

        def write() -> None:
            corpus = read(path)
            try:
                tokenize(corpus, self.job.tokenizer, folder, check_all)
            except OSError as error:
                raise CuboidError(f"--out {str(out)!r} can't be written: {error}") from error

        # One rank per machine, since the machines may not share a file system.
        run_at_length(write if self.world.local_rank == 0 else None, self.world, what="tokenizing the data")
        return TokenFolder.open(folder)
