"""What a rank reports of its failure, and the error that the other ranks raise for it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

import torch.distributed as dist

from cuboid.errors import CheckpointError, CuboidError, PeerLostError, RankError

#: Words of the backends' messages for a peer that doesn't answer.
_LOST = re.compile(
    r"closed by (remote )?peer|reset by peer|broken pipe|remote process (has )?(exited|terminated)|socket closed"
    r"|timed out (waiting|after)|wait timeout|operation timeout|application timeout|connection timed out"
    r"|no route to host|(network|host) is (down|unreachable)|ncclRemoteError|NCCL communicator was aborted",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankFailure:
    """What a rank reports to the others: where it arose, the exception's class by name, and its message."""

    rank: int
    kind: str
    text: str
    #: Whether all ranks failed by themselves, with the same message.
    alike: bool = False
    #: Whether all ranks raise it by themselves.
    everywhere: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int, what: str) -> RankFailure:
        """Describe an exception that was raised in the action ``what``; on ``rank``, unless it names another one."""
        if isinstance(error, CuboidError):
            origin = rank if error.rank is None else error.rank
            return cls(origin, type(error).__name__, str(error), everywhere=error.shared)
        if isinstance(error, OSError):
            return cls(rank, CheckpointError.__name__, _words_of(error))
        if is_lost(error):
            return cls(rank, PeerLostError.__name__, f"{what}: lost the connection to another rank: {error}")
        happened = f"was stopped by {described(error)}" if not isinstance(error, Exception) else described(error)
        return cls(rank, RankError.__name__, f"{what}: {happened}")

    def error(self) -> CuboidError:
        """The error to raise for it, on a rank where nothing else went wrong."""
        error = _class_named(self.kind)(self.text)
        error.shared = self.everywhere
        return error if self.alike else error.arising_on(self.rank)

    def encode(self) -> str:
        """As text, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> RankFailure | None:
        """The inverse of :meth:`encode`; None for the outcome that all ranks succeeded."""
        return None if text == b"ok" else cls(**json.loads(text))


def is_lost(error: BaseException) -> bool:
    """Whether an exception means that another rank doesn't answer, by its class or a backend's message."""
    if isinstance(error, PeerLostError | dist.DistNetworkError):
        return True
    return (
        isinstance(error, RuntimeError) and not isinstance(error, CuboidError) and _LOST.search(str(error)) is not None
    )


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _words_of(error: OSError) -> str:
    if error.filename is None or error.strerror is None:
        return str(error) or type(error).__name__
    return f"{error.filename}: {error.strerror}"


def _class_named(name: str) -> type[CuboidError]:
    """The error class of that name, if it is constructed from a message alone; else the base class."""
    waiting: list[type[CuboidError]] = [CuboidError]
    while waiting:
        error_class = waiting.pop()
        if error_class.__name__ == name and error_class.__init__ is CuboidError.__init__:
            return error_class
        waiting += error_class.__subclasses__()
    return CuboidError
