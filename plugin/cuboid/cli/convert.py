"""``cuboid convert``: convert between kinds of checkpoints, on the CPU, for models of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def convert(
    source: Annotated[Path | None, typer.Argument(metavar="SRC", help="Checkpoint, or a folder of them.")] = None,
    target: Annotated[Path | None, typer.Argument(metavar="DST", help="New folder.")] = None,
    input_folder: Annotated[
        Path | None, typer.Option("--input_folder", "--input-folder", help="SRC, as DeepSpeed's tools call it.")
    ] = None,
    output_folder: Annotated[
        Path | None, typer.Option("--output_folder", "--output-folder", help="DST, as DeepSpeed's tools call it.")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(
            help="Dtype of all floating-point tensors. Default: unchanged; float32 for DeepSpeed's fp32 weights."
        ),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest size of a weights file, such as 500MB.")] = "5GB",
    config: Annotated[
        Path | None,
        typer.Option(help="Write per-rank files for the mesh and pipeline of this config; JSON or YAML."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="With --config: ranks of the job. Default: those of one replica.", min=1)
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Hugging Face folder or config.json of the model, where SRC has none."),
    ] = None,
    master: Annotated[
        bool, typer.Option("--master", help="Use the optimizer's fp32 weights of a Cuboid checkpoint.")
    ] = False,
    trust_pickle: Annotated[
        bool,
        typer.Option("--trust-pickle", help="Load pickles; only tensors and plain values are accepted."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Convert a checkpoint into a Hugging Face folder, or with --config into one file for each rank.

    SRC is a Hugging Face folder, a checkpoint of cuboid, per-rank files, or what DeepSpeed writes: ZeRO 0 to 3,
    universal, pipeline layers. A block of a tensor is in memory at a time. DST appears when it is whole.
    """
    import torch

    from cuboid.config.schema import parse_config
    from cuboid.convert.run import ConvertOptions
    from cuboid.convert.run import convert as run
    from cuboid.library_warnings import quiet as silence

    silence()
    if world_size is not None and config is None:
        raise typer.BadParameter("--world-size goes with --config, which says what the ranks are")
    options = ConvertOptions(
        source=_one(source, input_folder, "SRC", "--input_folder"),
        target=_one(target, output_folder, "DST", "--output_folder"),
        dtype=None if dtype is None else getattr(torch, dtype),
        max_shard_bytes=_bytes(max_shard_size),
        config=None if config is None else parse_config(config),
        world_size=world_size,
        model=model,
        master=master,
        trust_pickle=trust_pickle,
        quiet=quiet,
    )
    run(options, (lambda _: None) if quiet else typer.echo)


def _one(argument: Path | None, option: Path | None, name: str, option_name: str) -> Path:
    """A folder that is given either as an argument or as an option, not as both."""
    folders = [path for path in (argument, option) if path is not None]
    if len(folders) != 1:
        raise typer.BadParameter(f"give {name}{' once' if folders else ''}, as an argument or as {option_name}")
    return folders[0]


def _bytes(size: str) -> int:
    """Parse a size such as ``5GB``, in decimal units as Hugging Face does."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    number, unit = size.strip()[:-2], size.strip()[-2:].upper()
    try:
        count = int(float(number) * units[unit])
    except (KeyError, ValueError, OverflowError):  # no unit, no number, or an infinite one
        count = 0
    if count < 1:
        raise typer.BadParameter(f"--max-shard-size {size!r} is no size such as 500MB or 5GB (KB, MB, GB, TB)")
    return count
