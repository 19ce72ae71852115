"""``cuboid train``: train a Hugging Face checkpoint on stages and a mesh. Started by a launcher, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    model: Annotated[Path, typer.Option(help="Hugging Face checkpoint with its tokenizer.")],
    data: Annotated[Path, typer.Option(help="Text file, folder of text files, or tokens from `cuboid prepare`.")],
    config: Annotated[
        Path, typer.Option(help="DeepSpeed config with a tensor_parallel or pipeline section; JSON or YAML.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for model, report.json and loss.png; made if need be.")],
    steps: Annotated[
        int | None,
        typer.Option(help="Optimizer steps; stretches the learning-rate schedule. Default: the schedule's length."),
    ] = None,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a block.")] = 512,
    heldout_blocks: Annotated[int, typer.Option(help="Blocks of the held-out loss, at most.")] = 32,
    evaluations: Annotated[int, typer.Option(help="How many times to take the held-out loss.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the order of the data, and of dropout.")] = 0,
    local_rank: Annotated[int, typer.Option("--local_rank", "--local-rank", hidden=True)] = 0,
) -> None:
    """Load a checkpoint sharded over stages and mesh, train it, and save it as plain transformers opens it.

    Start it with a launcher: `deepspeed --module cuboid.cli train …`, `torchrun -m cuboid.cli train …` or
    `accelerate launch -m cuboid.cli train …`.
    """
    from cuboid.train.job import TrainOptions
    from cuboid.train.quiet import quiet
    from cuboid.train.run import run
    from cuboid.train.world import World

    del local_rank  # some launchers append it; LOCAL_RANK says the same
    world = World.from_environment()
    quiet()
    report = run(
        TrainOptions(
            model=model,
            data=data,
            config=config,
            out=out,
            steps=steps,
            sequence_length=sequence_length,
            heldout_blocks=heldout_blocks,
            evaluations=evaluations,
            seed=seed,
        ),
        world,
    )
    world.disconnect()
    if world.is_first:
        losses = report.losses
        typer.echo(
            f"loss {losses.first:.3f} -> {losses.last:.3f}, held-out {losses.heldout_last:.4f}; "
            f"{report.speed.tokens_per_s:,.0f} tokens/s; model, report and curve in {out}"
        )
        if report.pipeline is not None and report.pipeline.trace is not None:
            trace = report.pipeline.trace
            typer.echo(
                f"schedule of step {trace.step}: bubble {trace.measured_bubble:.1%} measured, "
                f"{trace.simulated_bubble:.1%} simulated; drawn in {trace.picture}"
            )
