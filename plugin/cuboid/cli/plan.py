"""``cuboid plan``: the fastest layout of a model on a cluster that fits, as a config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from cuboid.cli.adapters import ALL_LINEAR, LoadIn4bit, LoraR, LoraTargetModules, lora_of
from cuboid.cli.limits import TrustRemoteCode
from cuboid.cli.paths import check_outputs


def plan(
    model: Annotated[Path, typer.Option(help="Hugging Face checkpoint, or its config.json.")],
    cluster: Annotated[str, typer.Option(help="Nodes x GPUs x kind, such as 8x8xH100-80GB, or a profile's .json.")],
    sequence_length: Annotated[
        int, typer.Option("--seq-len", "--sequence-length", help="Tokens of a sequence.", min=1)
    ],
    global_batch: Annotated[int, typer.Option(help="Sequences of an optimizer step, on all GPUs together.", min=1)],
    goal: Annotated[
        Literal["fastest", "smallest", "fewest"],
        typer.Option(
            help="Objective: the shortest step, the least memory per GPU, or the shortest step on the fewest GPUs."
        ),
    ] = "fastest",
    compiled: Annotated[
        bool, typer.Option("--compile", help='Plan with compiled layers: "compile": true in the config.')
    ] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help="Plan with products in fp8, on an H100 or later.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the best layout's DeepSpeed config there.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the ten best there, as JSON.")] = None,
    explain: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="Compare two layouts term by term instead, such as 1x8x1 and 2x2x1,stages=2,segments=4,rows=2. "
            "Further keys: zero, checkpointing (none, layers, attention), kept and optimizer (device, host), gather "
            "(layer, step), sync (unit, step), schedule and chunks.",
        ),
    ] = None,
    lora_r: LoraR = None,
    lora_target_modules: LoraTargetModules = ALL_LINEAR,
    load_in_4bit: LoadIn4bit = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Search meshes, stages, segments, schedules, micro-batches, replicas, ZeRO stage and checkpointing.

    Prints the ten best that fit, with the reason why each loses to the first. Nothing is allocated; no GPU is needed.
    """
    from rich.console import Console

    from cuboid.checkpoint.format.bounded_files import write_json
    from cuboid.config.compatibility import check_framework_config
    from cuboid.config.schema import require_config
    from cuboid.models.batch.length_cases import check_length
    from cuboid.planner.automatic import planned_trunk
    from cuboid.planner.description.cluster import Cluster
    from cuboid.planner.description.meta_model import describe
    from cuboid.planner.estimate import estimate
    from cuboid.planner.report import print_comparison, print_estimate, print_plan
    from cuboid.planner.search import LEARNING_RATE, config_of, parse_layout, search
    from cuboid.weights.model_folder import model_config

    if explain is not None and (out or json):
        raise typer.BadParameter("--explain prints a comparison, and writes neither --out nor --json; leave them out")
    check_outputs(out, json, inputs=(model, cluster))
    lora = lora_of(lora_r, lora_target_modules, load_in_4bit=load_in_4bit)
    trunk = planned_trunk(lora)
    console = Console()
    # Without a terminal, rich assumes 80 columns, and rows are longer.
    wide = console if console.is_terminal else Console(width=140)
    settings = model_config(model, trust_remote_code=trust_remote_code)
    described, machines = describe(settings, trunk=trunk), Cluster.parse(cluster)
    check_length(sequence_length, described.most_positions, "--seq-len")
    if explain is not None:
        pair = [
            estimate(described, layout, machines, sequence_length)
            for layout in (parse_layout(text, machines, global_batch, compiled=compiled, fp8=fp8) for text in explain)
        ]
        print_comparison(pair[0], pair[1], console)
        return
    result = search(described, machines, sequence_length, global_batch, goal=goal, compiled=compiled, fp8=fp8)
    print_plan(result, wide)
    for reason in described.limits.refused(machines.gpus):
        console.print(f"Left out was what training rejects: {reason}", highlight=False)
    best = result.best[0]
    print_estimate(best, console)
    config = config_of(best.layout)
    if lora is not None:
        config["lora"] = lora.model_dump(mode="json", exclude_unset=True)
    # Check that Cuboid itself accepts the config before it is written.
    check_framework_config(*require_config(config), best.cost.cluster.gpus, is_complete=True)
    if out is not None:
        write_json(out, config)
        console.print(f"{out} is its config; set your own learning rate, {LEARNING_RATE} stands there")
    if json is not None:
        write_json(json, {"best": [candidate.as_dict() for candidate in result.best], "config": config})
