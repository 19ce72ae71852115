"""``cuboid bench``: step time, tokens/s, MFU, bytes by axis and peak memory of a user's model and config.

Started by a launcher, on every rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cuboid.cli.limits import TrustRemoteCode


def bench(
    model: Annotated[Path, typer.Option(help="Hugging Face checkpoint.")],
    config: Annotated[Path, typer.Option(help="DeepSpeed config with an optimizer.")],
    sequence_length: Annotated[int, typer.Option("--sequence-length", "--seq-len", help="Tokens of a sequence.")] = 512,
    steps: Annotated[int, typer.Option(help="Optimizer steps to measure.")] = 10,
    warmup: Annotated[int, typer.Option(help="Steps before them.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Write the result there, as JSON.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    local_rank: Annotated[int, typer.Option("--local_rank", "--local-rank", hidden=True)] = 0,
) -> None:
    """Measure training steps of a model with a config, on random tokens.

    Prints the time of a step, tokens/s, the share of what the devices could do where their peak is known, bytes that a
    rank sends by mesh axis beside the closed formula's, and the peak of memory.
    """
    from rich.console import Console

    from cuboid.failures.launched_world import World, set_cuda_defaults
    from cuboid.library_warnings import quiet
    from cuboid.train.bench.measure import BenchOptions, run

    set_cuda_defaults()
    del local_rank  # some launchers append it; LOCAL_RANK is read instead
    world = World.from_environment()
    quiet(speaks=world.is_first)
    report = run(BenchOptions(model, config, sequence_length, steps, warmup, json, trust_remote_code), world)
    if world.is_first:
        report.print(Console())
    world.disconnect()
