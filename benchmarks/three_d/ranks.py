"""The job of each rank: all cases, one after another."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import torch.distributed as dist
from quiet import pin

from three_d.cases import Case
from three_d.measuring import Figures, compare

#: b, s and h of the mesh, and Colossal-AI's depth.
DEPTH = 2
RANKS = DEPTH**3


def run_cases(cases: tuple[Case, ...], repeats: int, limit_s: float, folder: Path) -> list[list[Figures]]:
    """For each case the figures of this rank, contestant by contestant."""
    core = pin(dist.get_rank())
    logging.getLogger("colossalai").setLevel(logging.ERROR)
    # Here, so that the process which only collects the numbers needn't import Colossal-AI, which takes seconds.
    from three_d.ours import build_ours, cube
    from three_d.peer import launch
    from three_d.peer_layers import build_peer

    launch(DEPTH)
    build = [
        functools.partial(build_peer, key="colossalai_3d"),
        functools.partial(build_peer, key="colossalai_3d_exchange", exchange=True),
        functools.partial(build_ours, key="cuboid", shape=cube(DEPTH)),
        functools.partial(build_ours, key="cuboid_auto"),
    ]
    return [compare(case, build, core, repeats, limit_s, folder) for case in cases]
