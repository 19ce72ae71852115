"""``cuboid convert``: from any kind of checkpoint to another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cuboid.checkpoint.format.bounded_files import read_object
from cuboid.config.schema import MAX_FILE_BYTES, CuboidConfig
from cuboid.convert.formats.block_tensors import Tensors
from cuboid.convert.per_rank.plan import RankPlan, plan_ranks
from cuboid.convert.per_rank.target import write_document, write_rank_files
from cuboid.convert.sources import Kind, Source, open_source
from cuboid.convert.target import (
    CONFIG,
    check_free,
    check_output_of,
    copy_auxiliary_files,
    new_folder,
    progress,
    size_text,
    write_weights,
)
from cuboid.errors import CheckpointError


@dataclass(frozen=True)
class ConvertOptions:
    """What is to become of a checkpoint.

    Args:
        source: the checkpoint.
        target: the new folder.
        dtype: of all floating tensors; None for what they are.
        max_shard_bytes: of a file of a Hugging Face folder.
        config: makes per-rank files for its mesh and pipeline instead of a Hugging Face folder.
        world_size: with ``config``: ranks of the job to come.
        model: folder or ``config.json`` of the model, where the checkpoint has none.
        master: take a checkpoint of cuboid's fp32 weights.
        trust_pickle: whether pickles may be loaded.
        quiet: no progress bars.
    """

    source: Path
    target: Path
    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_FILE_BYTES
    config: CuboidConfig | None = None
    world_size: int | None = None
    model: Path | None = None
    master: bool = False
    trust_pickle: bool = False
    quiet: bool = False


def convert(options: ConvertOptions, say: Callable[[str], Any]) -> None:
    """Convert, with a block of a tensor in memory at a time. The target appears when it is whole.

    Args:
        options: what to do.
        say: is given each line that the user should read.

    Raises:
        CheckpointError: the source is damaged or unknown, the target exists or can't be written, or a number is too
            large for the dtype.
        ConfigError, MeshError, UnsupportedModelError: per-rank files for such a config aren't possible.
    """
    check_free(options.target)
    check_output_of(options.target)
    with ExitStack() as stack:
        source = open_source(
            options.source,
            stack,
            model=options.model,
            dtype=options.dtype,
            master=options.master,
            trusted=options.trust_pickle,
            checking=functools.partial(progress, what="checking", hidden=options.quiet),
        )
        _check_quantization(source, options)
        tensors = source.tensors.cast(options.dtype)
        say(f"{source.found.folder}: {source.found.kind.value}, {_size(tensors)}")
        say(f"checked: {source.checked}")
        plan = None
        if options.config is not None:
            plan = plan_ranks(source.auxiliary_files, tensors.specs, options.config, options.world_size)
        _write(options, source, tensors, plan, say)


def _write(
    options: ConvertOptions, source: Source, tensors: Tensors, plan: RankPlan | None, say: Callable[[str], Any]
) -> None:
    if plan is None:
        total_bytes = tensors.nbytes
    else:
        total_bytes = sum(tensor.spec.nbytes * len(tensor.stages) for tensor in plan.tensors.values())
    with new_folder(options.target, total_bytes) as folder:
        with progress(total_bytes, "converting", hidden=options.quiet) as advance:
            if plan is None:
                files = len(write_weights(folder, tensors, options.max_shard_bytes, advance))
            else:
                document = write_rank_files(folder, tensors, plan, advance)
                files = len(document.files)
        left = copy_auxiliary_files(source.auxiliary_files, folder, _dtype_told(source, tensors, options))
        if plan is not None:
            write_document(folder, document)
    for name in plan.unused if plan is not None else ():
        say(f"left out: tensor {name}, which the model has no use for")
    # A Trainer keeps DeepSpeed's folder beside config.json.
    left = [name for name in left if name != f"{source.found.folder.name}/"]
    if left:
        say(f"left out: {', '.join(left)}")
    kind = "Hugging Face checkpoint" if plan is None else f"per-rank files for {plan.describe()}"
    say(f"{options.target}: {kind}, {size_text(total_bytes)} in {files} file{'s' if files > 1 else ''}")


def _dtype_told(source: Source, tensors: Tensors, options: ConvertOptions) -> torch.dtype | None:
    """What ``config.json`` is to say: only where the weights aren't what it says already."""
    if options.dtype is None and not options.master and source.found.kind is not Kind.DEEPSPEED:
        return None
    floating = [spec for spec in tensors.specs.values() if spec.dtype.is_floating_point]
    return max(floating, key=lambda spec: spec.nbytes).dtype if floating else None


def _check_quantization(source: Source, options: ConvertOptions) -> None:
    auxiliary_files = source.auxiliary_files
    config = read_object(auxiliary_files if auxiliary_files.is_file() else auxiliary_files / CONFIG, numbers_only=False)
    if options.dtype is not None and config.get("quantization_config"):
        raise CheckpointError(
            f"{auxiliary_files}: the weights are quantized, and --dtype would cast their scales and not them; "
            "leave it out"
        )


def _size(tensors: Tensors) -> str:
    dtypes = sorted({str(spec.dtype).removeprefix("torch.") for spec in tensors.specs.values()})
    return f"{len(tensors.specs)} tensors in {', '.join(dtypes)}, {size_text(tensors.nbytes)}"
