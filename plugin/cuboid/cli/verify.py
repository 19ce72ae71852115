"""``cuboid verify``: compare a sharded model with plain transformers. Starts its own processes; needs no launcher."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from cuboid.cli.limits import (
    LARGEST_VOCABULARY,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_PROCESSES,
    TrustRemoteCode,
    chunk_count,
    finite,
)
from cuboid.cli.paths import check_outputs
from cuboid.models.architectures.small_model_names import ARCHITECTURES, Dtype, Rope


def verify(
    model: Annotated[Path | None, typer.Option(help="Hugging Face checkpoint, a folder.")] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            help="A small random model instead, of a model type of transformers such as gpt_oss, bert or t5, or of a "
            "class such as BertForTokenClassification.",
        ),
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(help="With --model: PEFT's folder of a LoRA adapter, which is trained, with the model frozen."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="DeepSpeed config with a tensor_parallel or pipeline section; JSON or YAML.")
    ] = None,
    mesh: Annotated[str | None, typer.Option(help="BATCHxSEQUENCExHIDDEN, instead of the config's.")] = None,
    stages: Annotated[int | None, typer.Option(help="Stages of a pipeline, instead of the config's.", min=1)] = None,
    segments: Annotated[
        int | None, typer.Option(help="Segments of each sequence, instead of the config's.", min=1)
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="Schedule of the pipeline, instead of the config's.")] = None,
    chunks: Annotated[
        str | None,
        typer.Option(help="Stages on each rank of the pipeline, or auto; instead of the config's."),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(help='Where sequences are cut, instead of the config\'s: "flops", "even", or lengths: 16,12,4.'),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of weights and arithmetic in the core pass.")] = "float64",
    batch: Annotated[
        int | None,
        typer.Option(
            help="Rows of a micro-batch, as a mesh is given it. Default: 4, or 2 for each rank of its batch axis."
        ),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            "--seq-len",
            "--sequence-length",
            help="Tokens of a row, with all thresholds of the model as they are. Default: lengths up to 31 that cross "
            "them, after they were made small enough; or all of given lengths.",
        ),
    ] = None,
    varying: Annotated[bool, typer.Option(help="Make three micro-batches out of four shorter.")] = False,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 2,
    data_parallel: Annotated[int, typer.Option(help="Replicas of the mesh or pipeline.")] = 1,
    accumulate: Annotated[int, typer.Option(help="Micro-batches of a replica and step.")] = 2,
    masking: Annotated[bool, typer.Option(help="Pad rows on either side and mask some labels.")] = True,
    packed: Annotated[
        bool, typer.Option(help="Several sequences in a row, by position ids that restart, instead of padding.")
    ] = False,
    checkpointing: Annotated[bool, typer.Option(help="Recompute activations in backward.")] = False,
    casts: Annotated[bool, typer.Option(help="With float64: keep the model's own casts to float32.")] = False,
    engine: Annotated[bool, typer.Option(help="Compare the whole DeepSpeed engine too.")] = True,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative error that passes.", min=0, callback=finite)
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            help=f"With --arch: decoder layers, exactly so many of {', '.join(ARCHITECTURES)}, of other types at least "
            "so many, and one of each kind. Default: 2, or one for each stage.",
            min=1,
            max=MOST_LAYERS,
        ),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(
            help="With --arch: query heads. This and the following options raise an error where the type's config has "
            "no such setting. Default: 8 or more, or 4 where layers can't be chosen exactly.",
            min=1,
            max=MOST_HEADS,
        ),
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="With --arch: key and value heads.", min=1, max=MOST_HEADS)
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(help="With --arch: number of tokens. Default: 131, or 61.", min=2, max=LARGEST_VOCABULARY),
    ] = None,
    tied: Annotated[
        bool | None, typer.Option(help="With --arch: tie the embeddings. Default: the architecture's.")
    ] = None,
    bias: Annotated[bool | None, typer.Option("--bias", help="With --arch: biases where they are optional.")] = None,
    sliding_window: Annotated[
        int | None,
        typer.Option(help="With --arch: attention window, where the architecture may have one.", min=1),
    ] = None,
    rope: Annotated[Rope | None, typer.Option(help="With --arch: scaled rotary embeddings.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the result there, as JSON.")] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds that a run of one side may take.", min=1, callback=finite)
    ] = 600.0,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Compare a model on a mesh, in a pipeline, or both, with plain transformers.

    The model may be for causal or masked language modelling, of two sequences, of images, with a head for classes or
    answers, or without a head, as its config says. Runs the same batches through both and compares loss, every
    gradient, its norm, and the weights after some optimizer steps. Exits with status 1 if a difference exceeds its
    tolerance.
    """
    from rich.console import Console

    from cuboid.config.schema import parse_config
    from cuboid.library_warnings import quiet
    from cuboid.models.certification.default_models import unknown_name
    from cuboid.verify import Plan, SmallModel
    from cuboid.verify import verify as compare

    if (model is None) == (arch is None):
        raise typer.BadParameter("give either --model PATH or --arch NAME")
    if adapter is not None and model is None:
        raise typer.BadParameter("--adapter goes with --model PATH, the model that it is for")
    reason = None if arch is None or arch in ARCHITECTURES else unknown_name(arch)
    if reason is not None:
        raise typer.BadParameter(reason, param_hint="'--arch'")
    check_outputs(json, inputs=(model, config))
    quiet()
    settings = _settings(config, mesh, _pipeline(stages, segments, partition, schedule, chunks))
    parsed = parse_config(settings)
    if parsed.ranks * data_parallel > MOST_PROCESSES:
        raise typer.BadParameter(
            f"mesh × stages × --data-parallel takes {parsed.ranks * data_parallel} processes, which all start here; "
            f"{MOST_PROCESSES} at most"
        )
    section = parsed.tensor_parallel
    # The axes of an "auto" mesh aren't known yet, but its batch axis divides the number of ranks.
    rows = section.mesh_size if section.mesh == "auto" else section.mesh.batch
    options: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "layers": layers or max(2, parsed.parts)}
    options |= {"vocabulary": vocabulary, "tied": tied, "bias": bias, "sliding_window": sliding_window, "rope": rope}
    if arch in ARCHITECTURES:
        options |= {"router_loss": 0.1}  # ignored by models without routers
    small = SmallModel.fitting(arch, section.mesh_size, **options) if arch else None
    console = Console()
    with _checkpoint(model, small) as path, console.status("running both sides"):
        plan = Plan(
            checkpoint=path,
            dtype=dtype,
            keep_float64=dtype == "float64" and not casts,
            batch=max(2 * rows, 4) if batch is None else batch,
            sequence_length=sequence_length,
            varying=varying,
            steps=steps,
            data_parallel=data_parallel,
            accumulate=accumulate,
            masking=masking,
            packed=packed,
            checkpointing=checkpointing,
            trust_remote_code=trust_remote_code,
            adapter=None if adapter is None else str(adapter),
        )
        report = compare(
            plan,
            settings,
            passes=("core", "engine") if engine else ("core",),
            tolerance=tolerance,
            timeout_s=timeout_s,
        )
    report.print(console)
    if json is not None:
        report.write(json)
    raise typer.Exit(0 if report.passed else 1)


def _settings(config: Path | None, mesh: str | None, pipeline: dict[str, Any]) -> dict[str, Any]:
    """The config, with the mesh and pipeline of the command line, if any."""
    from cuboid.config.config_file import load_config
    from cuboid.distributed.topology import MeshShape

    if config is None and mesh is None and not pipeline:
        raise typer.BadParameter("give --config PATH, --mesh BATCHxSEQUENCExHIDDEN, --stages NUMBER, or several")
    settings: dict[str, Any] = {"zero_optimization": {"stage": 1}} if config is None else load_config(config)
    if mesh is not None:
        shape = MeshShape.parse(mesh)
        axes = {"batch": shape.batch, "sequence": shape.sequence, "hidden": shape.hidden}
        settings["tensor_parallel"] = {"mode": "3d_tensor", "mesh": axes}
    if pipeline:
        settings["pipeline"] = {**settings.get("pipeline", {}), "engine": "seq1f1b", **pipeline}
    return settings


def _pipeline(
    stages: int | None, segments: int | None, partition: str | None, schedule: str | None, chunks: str | None
) -> dict[str, Any]:
    """The keys of the pipeline section that are given on the command line."""
    section: dict[str, Any] = {"stages": stages, "segments": segments, "partition": partition}
    section |= {"schedule": schedule, "chunks": chunk_count(chunks)}
    if partition is not None and partition[:1].isdecimal():
        lengths = partition.split(",")
        if not all(length.strip().isdecimal() for length in lengths):
            raise typer.BadParameter(
                f'--partition {partition!r} is neither "flops", "even" nor lengths such as 16,12,4'
            )
        section["partition"] = [int(length) for length in lengths]
        section["segments"] = segments or len(lengths)
    return {key: value for key, value in section.items() if value is not None}


@contextlib.contextmanager
def _checkpoint(model: Path | None, small: Any) -> Iterator[str]:
    if model is not None:
        from cuboid.weights.model_folder import check_model_folder

        check_model_folder(model)
        yield str(model)
        return
    with tempfile.TemporaryDirectory(prefix="cuboid-") as directory:
        small.write(directory)
        yield directory
