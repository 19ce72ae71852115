"""``cuboid profile``: measure the machine for the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cuboid.cli.limits import finite
from cuboid.cli.paths import check_outputs


def profile(
    out: Annotated[Path, typer.Option(help="Write the profile there; a name that ends in .json.")],
    seconds: Annotated[float, typer.Option(help="Roughly how long it may take.", min=0.5, callback=finite)] = 60,
    local_rank: Annotated[int, typer.Option("--local_rank", "--local-rank", hidden=True)] = 0,
) -> None:
    """Measure matrix products, attention, memory and links, and write a profile that --cluster takes.

    One process measures a GPU; started by torchrun or deepspeed on every GPU, it measures the links too.
    """
    from rich.console import Console

    from cuboid.checkpoint.format.bounded_files import write_json
    from cuboid.failures.launched_world import World
    from cuboid.failures.rank_agreement import run_on_all_ranks
    from cuboid.library_warnings import quiet
    from cuboid.planner.description.cluster import Cluster
    from cuboid.planner.profile import Profiler
    from cuboid.planner.report import print_profile

    del local_rank  # some launchers append it; LOCAL_RANK is read instead
    if out.suffix != ".json":
        raise typer.BadParameter(f"--out {out}: --cluster knows a profile by a name that ends in .json")
    world = World.from_environment()
    quiet(speaks=world.is_first)
    if world.is_first:
        check_outputs(out)
    device = world.connect()
    measurements = run_on_all_ranks(Profiler(device, seconds).profile, what="cuboid profile")
    if world.is_first:
        write_json(out, measurements)
        # Read back from the file, so that this prints what --cluster will use.
        print_profile(Cluster.parse(str(out)), Console())
    world.disconnect()
