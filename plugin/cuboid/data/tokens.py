"""Tokenize text into two flat streams on disk, which every rank maps into memory."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from cuboid.data.conversations import encode_conversation
from cuboid.data.corpus import Corpus
from cuboid.data.rows import Conversation, Document
from cuboid.errors import CuboidError

Split = Literal["train", "heldout"]
Stream = npt.NDArray[np.int32]

#: Folder of the tokens in that of a run.
TOKENS = "tokens"
_META = "tokens.json"
#: Parts of a Rust tokenizer's description that decide the ids of a text.
_RULES = ("added_tokens", "normalizer", "pre_tokenizer", "model")
#: Names of files that aren't whole yet, or never will be since their process was killed.
_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.((train|heldout)\.npy|tokens\.json)")
#: Longer documents (in characters) are tokenized in pieces of full lines, to bound memory.
_PIECE = 1 << 20


class TokensMeta(BaseModel):
    """The contents of ``tokens.json``, which describes the two streams beside it.

    Attributes:
        source: origin of the text.
        tokenizer_sha256: see :func:`fingerprint`.
        data_sha256: hash of both streams.
        largest_id: the largest token id in either stream.
        has_unlearned: whether the streams have tokens of which the loss takes no account, such as a user's messages.
        train: number of tokens to train on.
        heldout: number of tokens for evaluation only.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    tokenizer_sha256: str
    data_sha256: str
    largest_id: int
    has_unlearned: bool = False
    train: int
    heldout: int


@dataclass(frozen=True)
class TokenFolder:
    """A folder with ``train.npy`` and ``heldout.npy`` (int32 ``[tokens]``) and ``tokens.json``.

    A token that isn't to be learned, as what a user says to an assistant, stands there as ``~id``, which is negative.
    """

    folder: Path
    meta: TokensMeta

    @staticmethod
    def is_store(folder: Path) -> bool:
        """Whether a folder has tokens rather than text."""
        return (folder / _META).is_file()

    @classmethod
    def open(cls, folder: Path) -> TokenFolder:
        """Read the description of streams that :func:`tokenize` wrote.

        Raises:
            CuboidError: a file is missing or malformed.
        """
        try:
            meta = TokensMeta.model_validate_json((folder / _META).read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise CuboidError(f"{folder / _META} can't be read ({error}); run `cuboid prepare` again") from error
        for split in ("train", "heldout"):
            if not (folder / f"{split}.npy").is_file():
                raise CuboidError(f"{folder / split}.npy is missing; run `cuboid prepare` again")
        return cls(folder, meta)

    def stream(self, split: Split) -> Stream:
        """A stream as a memory map.

        Raises:
            CuboidError: the file isn't what the description says, as after a `cuboid prepare` that was interrupted
                while it replaced an older corpus.
        """
        path = self.folder / f"{split}.npy"
        expected = self.meta.train if split == "train" else self.meta.heldout
        try:
            stream: Stream = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise CuboidError(f"{path} can't be read ({error}); run `cuboid prepare` again") from error
        if stream.dtype != np.int32 or stream.shape != (expected,):
            raise CuboidError(
                f"{path} has {stream.dtype} of shape {list(stream.shape)}, but {_META} says int32 of shape "
                f"[{expected}]; run `cuboid prepare` again"
            )
        return stream


def tokenize(
    corpus: Corpus, tokenizer: Any, folder: Path, check: Callable[[TokensMeta], None] | None = None
) -> TokenFolder:
    """Write the token streams of a corpus; texts end with the end-of-text token, if there is one.

    Files are replaced atomically, so that several processes may write the same corpus at once.

    Args:
        corpus: the text.
        tokenizer: a Hugging Face tokenizer.
        folder: created if missing.
        check: called before anything is written; raises if the streams can't be used.
    """
    streams: dict[Split, Stream] = {
        "train": _encode(corpus.train, tokenizer),
        "heldout": _encode(corpus.heldout, tokenizer),
    }
    meta = _describe(corpus.source, tokenizer, streams)
    for split, stream in streams.items():
        if len(stream) and not (stream >= 0).any():
            raise CuboidError(
                f"{corpus.source}: the {split} part has nothing to learn: no message of its conversations is an "
                "assistant's"
            )
    if check is not None:
        check(meta)
    folder.mkdir(parents=True, exist_ok=True)
    # The description last: a folder without it doesn't count as tokens.
    for split, stream in streams.items():
        with _replacing(folder / f"{split}.npy") as file:
            np.save(file, stream, allow_pickle=False)
    with _replacing(folder / _META) as file:
        file.write((meta.model_dump_json(indent=2, exclude_defaults=True) + "\n").encode())
    return TokenFolder(folder, meta)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left unfinished in a folder of tokens and those in it; errors are ignored.

    Files that a process is writing stay, except where the file system has locks for one host alone: call it where no
    other run writes.
    """
    with contextlib.suppress(OSError):
        for path in folder.rglob(".*"):
            if _PARTIAL.fullmatch(path.name):
                with contextlib.suppress(OSError), open(path, "rb+") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of another one when it is whole."""
    partial = path.with_name(f".{uuid4().hex}.{path.name}")
    try:
        with _locked(partial) as file:
            yield file
            file.flush()
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _locked(path: Path) -> BinaryIO:
    """A new file, which is locked for as long as it is open, so that :func:`remove_leftovers` leaves it alone."""
    while True:
        file = open(path, "wb")  # noqa: SIM115  the caller closes it
        # Some network file systems have no locks; there, leftovers stay.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        # It may have been removed before it was locked.
        if path.exists():
            return file
        file.close()


def _describe(source: str, tokenizer: Any, streams: dict[Split, Stream]) -> TokensMeta:
    digest = hashlib.sha256()
    for stream in streams.values():
        digest.update(len(stream).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(stream, dtype="<i4").data)
    return TokensMeta(
        source=source,
        tokenizer_sha256=fingerprint(tokenizer),
        data_sha256=digest.hexdigest(),
        largest_id=max(int(ids_of(stream).max(initial=0)) for stream in streams.values()),
        has_unlearned=any(bool((stream < 0).any()) for stream in streams.values()),
        train=len(streams["train"]),
        heldout=len(streams["heldout"]),
    )


def ids_of(stream: Stream) -> Stream:
    """The ids of all tokens of a stream, learned or not."""
    return np.where(stream < 0, ~stream, stream)


def fingerprint(tokenizer: Any) -> str:
    """A hash of everything in a tokenizer that decides the ids of a text, as far as it can be read.

    Of a tokenizer without the Rust library behind it, that is the vocabulary only.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    rust = getattr(tokenizer, "backend_tokenizer", None)
    # Truncation and padding are set by calls, and the others act on ids that are there already.
    rules = {} if rust is None else {key: part for key, part in json.loads(rust.to_str()).items() if key in _RULES}
    described = repr([vocabulary, tokenizer.eos_token_id, json.dumps(rules, sort_keys=True)])
    return hashlib.sha256(described.encode()).hexdigest()


def check_tokens(meta: TokensMeta, tokenizer: Any, vocabulary: int) -> None:
    """Check that tokens are from the model's tokenizer, and within its embedding.

    Raises:
        CuboidError: they aren't.
    """
    if meta.tokenizer_sha256 != fingerprint(tokenizer):
        raise CuboidError(
            "the data was tokenized with another tokenizer than the model's (its vocabulary, merges, normalizer or "
            "pre-tokenizer differs), or by an older version of Cuboid, which recorded the vocabulary only; run `cuboid "
            "prepare` again with this --model, or give the text itself as --data"
        )
    if meta.largest_id >= vocabulary:
        raise CuboidError(
            f"the data holds token {meta.largest_id}, but the model's vocabulary has {vocabulary} entries "
            f"(0 to {vocabulary - 1})"
        )


def check_size(meta: TokensMeta, sequence_length: int, global_batch: int) -> None:
    """Check that there is enough data for one optimizer step and one held-out block.

    Raises:
        CuboidError: there isn't; the message has the number of tokens that are needed.
    """
    for split, tokens, blocks in (("train", meta.train, global_batch), ("held-out", meta.heldout, 1)):
        if tokens // sequence_length < blocks:
            raise CuboidError(
                f"the {split} part of the data has {tokens} tokens; {blocks} blocks of {sequence_length} "
                f"tokens need {blocks * sequence_length}. Give more text, or a smaller --sequence-length "
                "or batch"
            )


def check_named_size(
    meta: TokensMeta, option: str, name: str, sequence_length: int, *, is_trained: bool = True
) -> None:
    """Check that a text to evaluate has a block, and if it is trained on, that it has one to train on, too.

    Raises:
        CuboidError: it hasn't.
    """
    parts = [(meta.train, "to train on"), (meta.heldout, "held out")] if is_trained else [(meta.heldout, "in all")]
    for tokens, part in parts:
        if tokens < sequence_length:
            raise CuboidError(
                f"{option} {name} has {tokens} tokens {part}, fewer than a block of {sequence_length}; give more text, "
                "or a smaller --sequence-length"
            )


def _encode(documents: Sequence[Document], tokenizer: Any) -> Stream:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts: list[Stream] = []
    for document in documents:
        if isinstance(document, Conversation):
            ids, is_learned = encode_conversation(document, tokenizer)
            parts.append(np.where(is_learned, ids, ~ids))
            continue
        pieces = tokenizer(list(_pieces(document)), add_special_tokens=False, verbose=False)["input_ids"]
        parts.extend(np.asarray(ids, dtype=np.int32) for ids in (*pieces, end))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def _pieces(document: str) -> Iterator[str]:
    start = 0
    while len(document) - start > _PIECE:
        newline = document.rfind("\n", start, start + _PIECE)
        stop = newline + 1 if newline > start else start + _PIECE
        yield document[start:stop]
        start = stop
    yield document[start:]
