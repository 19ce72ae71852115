"""One error message for a job of many ranks."""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

from cuboid.errors import CuboidError
from cuboid.patches.base import Patch

#: How long the other ranks wait before they leave, so that no launcher ends the job before rank 0 has spoken.
_GRACE_S = 3.0


def _excepthook(original: Any) -> Any:
    @functools.wraps(original)
    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if not issubclass(kind, CuboidError) or "RANK" not in os.environ:
            original(kind, error, traceback)
        elif os.environ["RANK"] == "0":
            print(f"cuboid: {kind.__name__}: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(_GRACE_S)

    return hook


PATCHES = [
    Patch(
        target="sys:excepthook",
        package="cuboid",
        versions=">=0.1",
        reason="print a user's mistake once, on rank 0, without the tracebacks of all ranks",
        parameters=(),
        replace=_excepthook,
    )
]
