"""One error message for a job of many ranks."""

from __future__ import annotations

import functools
import os
import sys
import time
from traceback import walk_tb
from types import FrameType
from typing import Any

from torch.distributed import distributed_c10d

from cuboid.errors import CuboidError, RankError
from cuboid.failures.exit_messages import place_in_script, tell_launcher
from cuboid.failures.rank_agreement import lost_rank_error, report_before_group
from cuboid_patches.base import Patch

#: How long a rank waits if another rank has the original error, so that the launcher doesn't end the job before that
#: one is printed.
_GRACE_S = 3.0


def _excepthook(original: Any) -> Any:
    @functools.wraps(original)
    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        frames = [*reversed(list(walk_tb(traceback)))]
        collective = _collective_in(frames)
        if collective is not None and "RANK" in os.environ:
            error = lost_rank_error(error, f"{collective}{place_in_script(frames)}")
            kind = type(error)
        if not issubclass(kind, CuboidError) or "RANK" not in os.environ:
            original(kind, error, traceback)
            return
        if isinstance(error, CuboidError) and error.rank is None and not error.shared:
            # It may have been raised outside of what the ranks do together, on this rank only.
            report_before_group(error, "the script")
        place = place_in_script(frames)
        tell_launcher(f"{kind.__name__}: {error}{place}")
        rank, origin = os.environ["RANK"], getattr(error, "rank", None)
        if issubclass(kind, RankError) and error.__cause__ is not None and rank == str(0 if origin is None else origin):
            # Not a user's mistake, so print the traceback.
            original(kind, error, traceback)
        elif origin is None and rank != "0":
            # All ranks raise the same error, and rank 0 prints it.
            time.sleep(_GRACE_S)
        elif origin is None or str(origin) == rank:
            where = "" if origin is None else f"rank {rank}: "
            print(f"cuboid: {where}{kind.__name__}: {error}{place}", file=sys.stderr, flush=True)
        else:
            # Another rank failed first; wait until it has printed its own message.
            time.sleep(_GRACE_S)
            print(f"cuboid: rank {rank}, for rank {origin}: {kind.__name__}: {error}", file=sys.stderr, flush=True)

    return hook


def _collective_in(frames: list[tuple[FrameType, int]]) -> str | None:
    """The function of torch's that a script has called, if it is a collective; frames are from the innermost."""
    names = [frame.f_code.co_name for frame, _ in frames if frame.f_code.co_filename == distributed_c10d.__file__]
    return f"torch.distributed.{names[-1]}" if names else None


PATCHES = [
    Patch(
        target="sys:excepthook",
        package="cuboid",
        reason="print a user's mistake once, on rank 0, without the tracebacks of all ranks",
        parameters=(),
        replace=_excepthook,
    )
]
