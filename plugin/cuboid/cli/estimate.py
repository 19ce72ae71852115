"""``cuboid estimate``: time and memory of a step with a config, on a cluster that needn't be there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cuboid.cli.adapters import ALL_LINEAR, LoadIn4bit, LoraR, LoraTargetModules, lora_of
from cuboid.cli.limits import TrustRemoteCode
from cuboid.cli.paths import check_outputs


def estimate(
    model: Annotated[Path, typer.Option(help="Hugging Face checkpoint, or its config.json.")],
    config: Annotated[Path, typer.Option(help="DeepSpeed config; JSON or YAML.")],
    cluster: Annotated[str, typer.Option(help="Nodes x GPUs x kind, such as 8x8xH100-80GB, or a profile's .json.")],
    sequence_length: Annotated[
        int, typer.Option("--seq-len", "--sequence-length", help="Tokens of a sequence.", min=1)
    ],
    checkpointing: Annotated[
        bool, typer.Option(help="Whether the script enables the model's gradient checkpointing.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the result there, as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw it there: .png, .svg or .pdf.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Draw the pipeline's simulated schedule there.")] = None,
    lora_r: LoraR = None,
    lora_target_modules: LoraTargetModules = ALL_LINEAR,
    load_in_4bit: LoadIn4bit = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Predict the time and memory of a training step. Nothing is allocated, and no GPU is needed.

    Prints time by kind, memory by kind and stage, tokens/s and MFU, whether it fits, and if not what would make it fit.
    """
    from rich.console import Console

    from cuboid.checkpoint.format.bounded_files import write_json
    from cuboid.config.compatibility import check_framework_config
    from cuboid.config.schema import require_config
    from cuboid.models.batch.length_cases import check_length
    from cuboid.planner.automatic import planned_trunk
    from cuboid.planner.description.cluster import Cluster
    from cuboid.planner.description.meta_model import describe
    from cuboid.planner.estimate import estimate as predict
    from cuboid.planner.estimate import layout_of_config
    from cuboid.planner.report import draw_estimate, print_estimate
    from cuboid.seq1f1b.schedule.timeline_picture import draw_timeline
    from cuboid.weights.model_folder import model_config

    check_outputs(json, pictures=(picture, timeline), inputs=(model, config, cluster))
    settings = model_config(model, trust_remote_code=trust_remote_code)
    machines = Cluster.parse(cluster)
    cuboid_config, framework_config = require_config(config)
    check_framework_config(cuboid_config, framework_config, machines.gpus, is_complete=True)
    lora = lora_of(lora_r, lora_target_modules, load_in_4bit=load_in_4bit, written=cuboid_config.lora)
    verified = cuboid_config.pipeline is not None and cuboid_config.pipeline.certification == "verified"
    described = describe(settings, verified=verified, trunk=planned_trunk(lora))
    check_length(sequence_length, described.most_positions, "--seq-len")
    layout = layout_of_config(
        cuboid_config, framework_config, described, machines, sequence_length, checkpointing=checkpointing
    )
    if timeline is not None and layout.stages == 1:
        raise typer.BadParameter("--timeline needs a pipeline section with more than one stage")
    prediction = predict(described, layout, machines, sequence_length)
    print_estimate(prediction, Console())
    if json is not None:
        write_json(json, prediction.as_dict())
    if picture is not None:
        draw_estimate(prediction, picture)
    if timeline is not None:
        draw_timeline(prediction.cost.simulated(), timeline, title=str(layout))
