"""Read rows of texts or conversations, as fine-tuning data comes: JSON lines, or Parquet by ``datasets``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuboid.errors import CuboidError

#: Files whose rows are documents.
ROW_FILES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template, and the tools that it is given; of them, the assistant's are to be learned."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    #: The row, in words.
    place: str


Document = str | Conversation


def has_rows(file: Path) -> bool:
    """Whether a file's rows are documents."""
    return file.suffix in ROW_FILES


def read_rows(file: Path) -> Iterator[Document]:
    """The texts or conversations in a file's rows.

    Raises:
        CuboidError: the file can't be read, or a row has neither ``text`` nor ``messages``.
    """
    rows = _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file)
    for number, row in enumerate(rows, start=1):
        yield _document(row, f"{file}, row {number}")


def _json_rows(file: Path) -> Iterator[Any]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    yield _parsed(line, f"{file}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise CuboidError(f"--data: {file} can't be read: {error}") from error


def _parsed(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CuboidError(f"--data: {place} isn't JSON: {error}") from None


def _parquet_rows(file: Path) -> Iterator[Any]:
    try:
        from datasets import load_dataset  # type: ignore[import-not-found]  # optional, and a second to import
    except ImportError as error:
        raise CuboidError(
            f"--data: {file} is read by the package datasets, which can't be imported ({error}): pip install datasets, "
            "or write the rows as .jsonl"
        ) from error
    try:
        yield from load_dataset("parquet", data_files=str(file), split="train", streaming=True)
    except (OSError, ValueError) as error:  # pyarrow's errors are among these
        raise CuboidError(f"--data: {file} can't be read: {error}") from error


def _document(row: Any, place: str) -> Document:
    if not isinstance(row, Mapping) or ("text" in row) == ("messages" in row):
        names = f"has {', '.join(map(repr, row)) or 'nothing'}" if isinstance(row, Mapping) else "is no object"
        raise CuboidError(
            f'--data: {place} {names}; a row has either "text", or "messages", a list of {{"role": …, "content": …}}'
        )
    if "text" in row:
        if not isinstance(row["text"], str):
            raise CuboidError(f'--data: {place}: "text" is {type(row["text"]).__name__}, not a string')
        return row["text"]
    messages, tools = row["messages"], row.get("tools")
    are_messages = isinstance(messages, list) and all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages
    )
    if not are_messages or not isinstance(tools, list | None):
        raise CuboidError(
            f'--data: {place}: "messages" has to be a list of {{"role": …, "content": …}}, and "tools", if there are '
            "some, a list"
        )
    # Parquet gives each message all keys that any of them has.
    without_nulls = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return Conversation(without_nulls, tools or None, place)
