"""What a check says, and how it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class State(StrEnum):
    """How a finding is to be taken. Only problems make the command fail."""

    RIGHT = "right"
    #: It may be meant so, or matters to some runs alone.
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: what was looked at, in a word or two.
        state: how it is.
        text: what was seen.
        cure: what to do; "" where nothing has to be done.
    """

    check: str
    state: State
    text: str
    cure: str = ""


def right(check: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(check, State.RIGHT, text)


def note(check: str, text: str, cure: str = "") -> Finding:
    """Something that a user should know."""
    return Finding(check, State.NOTE, text, cure)


def problem(check: str, text: str, cure: str) -> Finding:
    """Something that will make a run fail."""
    return Finding(check, State.PROBLEM, text, cure)


def within(seconds: float, action: Callable[[], T]) -> T:
    """The result of an action that may wait for a network or a file system.

    Raises:
        TimeoutError: it didn't end in time; its thread is left alone, and doesn't keep the process from ending.
        Exception: its own.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(action())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="cuboid doctor", daemon=True).start()
    return answer.result(seconds)
