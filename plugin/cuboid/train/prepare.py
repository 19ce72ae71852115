"""``cuboid prepare``: tokenize the text and, if needed, write a new tokenizer and model. Runs in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuboid import CuboidError
from cuboid.checkpoint.format.bounded_files import check_output
from cuboid.checkpoint.run_lock import held
from cuboid.data.corpus import read_corpus
from cuboid.data.initial_model import check_replaceable_model, train_tokenizer, write_llama
from cuboid.data.tokenizer_files import load_tokenizer, tokenizer_in
from cuboid.data.tokens import TOKENS, TokenFolder, remove_leftovers, tokenize
from cuboid.train.resume import reject_other_run

#: Folder of the new model in that of a run.
START = "start"

#: A byte-level vocabulary has all 256 bytes and the end-of-text token.
_LEAST_VOCABULARY = 257


def prepare(
    out: Path,
    *,
    model: Path | None,
    tokenizer_folder: Path | None = None,
    data: Path | None,
    vocabulary: int,
    seed: int,
    say: Callable[[str], None],
    trust_remote_code: bool = False,
) -> TokenFolder:
    """Tokenize ``data`` into ``out/tokens``. Without a given tokenizer, write a new one and a model to ``out/start``.

    Args:
        out: the run's folder; created if missing.
        model: the user's checkpoint, whose tokenizer is used; None to train one and write a small Llama.
        tokenizer_folder: folder of a tokenizer, if there is no model yet.
        data: text file or folder; None for the Python standard library's own sources.
        vocabulary: entries of a new tokenizer and of a new model's embedding.
        seed: of a new model's weights.
        say: called with each line of output.
        trust_remote_code: whether code that comes with the tokenizer may be run.

    Raises:
        CuboidError: a file is missing or unusable, ``out`` can't be written, or has a run that finished or could be
            resumed.
    """
    if vocabulary < _LEAST_VOCABULARY:
        raise CuboidError(
            f"--vocabulary is {vocabulary}; it must be at least {_LEAST_VOCABULARY}: every byte, and one more"
        )
    if model is not None and tokenizer_folder is not None:
        raise CuboidError("give --model or --tokenizer: a model has its own tokenizer")
    with held(out, "cuboid prepare", say):
        reject_other_run(out)
        remove_leftovers(out / TOKENS)
        for name in (START, TOKENS):
            if os.path.lexists(out / name):
                check_output(out / name)
        if model is None and tokenizer_folder is None:
            check_replaceable_model(out / START)
        tokenizer = None if model is None else load_tokenizer(model, trust_remote_code=trust_remote_code)
        if tokenizer_folder is not None:
            tokenizer = tokenizer_in(tokenizer_folder, trust_remote_code=trust_remote_code)
        return _prepare(out, tokenizer=tokenizer, data=data, vocabulary=vocabulary, seed=seed, say=say)


def _prepare(
    out: Path, *, tokenizer: Any, data: Path | None, vocabulary: int, seed: int, say: Callable[[str], None]
) -> TokenFolder:
    corpus = read_corpus(data)
    texts = [document for document in (*corpus.train, *corpus.heldout) if isinstance(document, str)]
    size = f"{sum(map(len, texts)) / 1e6:.1f} M characters" if texts else "conversations"
    say(f"data: {corpus.source}, {size}; {len(corpus.train)} documents to train on, {len(corpus.heldout)} held out")
    try:
        if tokenizer is None:
            texts = [document for document in corpus.train if isinstance(document, str)]
            if len(texts) < len(corpus.train):
                raise CuboidError(
                    f"{corpus.source} has conversations, which a new tokenizer has no chat template for; name one that "
                    "has, by --model or --tokenizer"
                )
            tokenizer = train_tokenizer(texts, vocabulary)
            parameters = write_llama(out / START, vocabulary, tokenizer, seed)
            say(f"model: a new Llama of {parameters / 1e6:.1f} M parameters in {out / START}")
        tokens = tokenize(corpus, tokenizer, out / TOKENS)
        # `cuboid train --arch-config` reads it from here, since a new model comes without a tokenizer.
        tokenizer.save_pretrained(out / TOKENS)
    except (OSError, UnicodeEncodeError) as error:  # tokenizers write to paths in UTF-8 alone
        raise CuboidError(f"--out {str(out)!r} can't be written: {error}") from error
    say(f"tokens: {tokens.meta.train:,} to train on, {tokens.meta.heldout:,} held out, in {out / TOKENS}")
    return tokens
