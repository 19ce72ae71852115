"""Read the text to train on, and choose which of it is held out."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NoReturn

from cuboid.data.rows import Document, has_rows, read_rows
from cuboid.errors import CuboidError

#: Share of the files (or, for a single file, of its lines) that is held out.
HELDOUT_SHARE = 0.04
#: Folders under the standard library's path that aren't its sources, are its tests, or have long texts in strings.
_NOT_SOURCES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """Texts or conversations, in a fixed order: those to train on, and those for evaluation only."""

    #: Their origin, for the report.
    source: str
    train: tuple[Document, ...]
    heldout: tuple[Document, ...]


def read_corpus(path: Path | None) -> Corpus:
    """Read a text file, every text file of a folder, or (None) the Python standard library's own sources.

    A folder is split by file; of a single file, the last lines are held out. Of files with rows (JSON lines, Parquet),
    alone or in a folder without others, each row is a document, and the last rows of each file are held out.

    Raises:
        CuboidError: the path doesn't exist, or has too little UTF-8 text to hold anything out.
    """
    if path is not None and _is_file(path):
        return _split_rows(path, [path]) if has_rows(path) else _split_text(str(path), _read_text(path) or "")
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    files = python_sources(root) if path is None else text_files(root)
    if files and all(map(has_rows, files)):
        return _split_rows(root, files)
    documents = {file: text for file in files if (text := _read_text(file))}
    _check_count(root, len(documents))
    train, heldout = split_files(list(documents), root)
    source = "Python standard library" if path is None else str(path)
    return Corpus(source, tuple(documents[file] for file in train), tuple(documents[file] for file in heldout))


def all_held_out(corpus: Corpus) -> Corpus:
    """The same text, none of which is trained on."""
    return Corpus(corpus.source, (), (*corpus.train, *corpus.heldout))


def check_corpus(path: Path) -> None:
    """Check what can be checked of a text file, or a folder of them, without reading it.

    Raises:
        CuboidError: it doesn't exist, is empty, or has too few files.
    """
    if not _is_file(path):
        # Two are enough to know; there may be millions.
        files = list(islice((file for file in _texts_under(path) if file.stat().st_size), 2))
        if not all(map(has_rows, files)) or not files:
            _check_count(path, len(files))
    elif not path.stat().st_size:
        raise CuboidError(f"data {str(path)!r} is empty")


def python_sources(root: Path) -> list[Path]:
    """Python files under ``root``, sorted, without installed packages and tests."""
    return [
        file
        for file in sorted(root.rglob("*.py"))
        if not _NOT_SOURCES.intersection(file.relative_to(root).parts) and file.is_file()
    ]


def text_files(root: Path) -> list[Path]:
    """Files under ``root``, sorted, except hidden ones and those in hidden folders.

    Raises:
        CuboidError: no such file or folder.
    """
    return sorted(_texts_under(root))


def _texts_under(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        problem = "is neither a file nor a folder" if root.exists() else "does not exist"
        raise CuboidError(f"data {str(root)!r} {problem}; name a text file or a folder of text files")
    # Not pathlib's search, which passes over folders that it can't read.
    for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (file for file in files if file.is_file())


def _raise_unreadable(error: OSError) -> NoReturn:
    raise CuboidError(f"--data: {error.filename} can't be read: {error.strerror}") from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # a name that is too long, or a folder that can't be searched
        raise CuboidError(f"--data {str(path)!r} can't be read: {error.strerror}") from None


def _check_count(root: Path, count: int) -> None:
    if count < 2:
        raise CuboidError(
            f"data {str(root)!r} holds {count} text files (UTF-8, not hidden, not empty); at least 2 are needed, one "
            "to train on and one to hold out. A single text file can be named itself"
        )


def split_files(files: Sequence[Path], root: Path, share: float = HELDOUT_SHARE) -> tuple[list[Path], list[Path]]:
    """Divide files into (train, held-out), both in the given order, with at least one file each.

    Files are ordered by a hash of their relative names, so that the split is the same on every machine and changes
    little when files are added or removed.
    """
    count = min(max(1, round(len(files) * share)), len(files) - 1)
    by_hash = sorted(files, key=lambda file: hashlib.sha256(file.relative_to(root).as_posix().encode()).digest())
    heldout = set(by_hash[:count])
    return [file for file in files if file not in heldout], [file for file in files if file in heldout]


def _split_text(source: str, text: str) -> Corpus:
    lines = text.splitlines(keepends=True)
    cut = _cut(lines, f"data {source!r}", "lines of UTF-8 text")
    return Corpus(source, ("".join(lines[:cut]),), ("".join(lines[cut:]),))


def _split_rows(source: Path, files: Sequence[Path]) -> Corpus:
    train: list[Document] = []
    heldout: list[Document] = []
    for file in files:
        rows = list(read_rows(file))
        cut = _cut(rows, f"data {str(file)!r}", "rows")
        train += rows[:cut]
        heldout += rows[cut:]
    return Corpus(str(source), tuple(train), tuple(heldout))


def _cut(items: Sequence[object], source: str, name: str) -> int:
    """Where the held-out part of a file's lines or rows begins."""
    if len(items) < 2:
        raise CuboidError(
            f"{source} has {len(items)} {name}; at least 2 are needed, one to train on and one to hold out"
        )
    return len(items) - min(max(1, round(len(items) * HELDOUT_SHARE)), len(items) - 1)


def _read_text(file: Path) -> str | None:
    """The file's text, or None if it isn't UTF-8 text; a file that can't be read is an error."""
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise CuboidError(f"--data: {file} can't be read: {error.strerror or error}") from error
    return None if "\0" in text else text
