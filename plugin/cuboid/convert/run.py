"""``cuboid convert``: from any kind of checkpoint to a Hugging Face folder or to per-rank files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cuboid.checkpoint.format.bounded_files import read_object
from cuboid.config.schema import MAX_FILE_BYTES, CuboidConfig
from cuboid.convert.formats.block_tensors import BlockTensors
from cuboid.convert.formats.loaded_dtypes import dtypes_when_loaded
from cuboid.convert.per_rank.plan import RankPlan, plan_ranks
from cuboid.convert.per_rank.target import write_document, write_rank_files
from cuboid.convert.sources import CheckpointKind, Source, open_source
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
from cuboid.errors import CheckpointError, UnsupportedModelError
from cuboid.weights.model_folder import check_exists


@dataclass(frozen=True)
class ConvertOptions:
    """The arguments of a conversion.

    Args:
        source: the checkpoint.
        target: the new folder.
        dtype: the dtype to cast floating-point tensors to, those excepted that transformers keeps in another one when
            it loads the model in this dtype; None to keep theirs.
        max_shard_bytes: maximum size of a file of a Hugging Face folder.
        config: write per-rank files for its mesh and pipeline instead of a Hugging Face folder.
        world_size: with ``config``: number of ranks of the job that will load the files.
        model: folder or ``config.json`` of the model, if the checkpoint has none.
        master: take the fp32 master weights from a checkpoint of cuboid.
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
    """Convert a checkpoint, with one block of a tensor in memory at a time. The target appears once it is complete.

    Raises:
        CheckpointError: the source is damaged or of an unknown kind, the target exists or can't be written, or a value
            is out of the dtype's range.
        ConfigError, MeshError, UnsupportedModelError: no per-rank files can be made for the config.
    """
    # Checked before the source is read, because verifying its checksums may take minutes.
    if options.model is not None:
        check_exists(options.model)
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
        tensors = source.tensors
        if options.dtype is not None:
            tensors = tensors.cast(dtypes_when_loaded(source.auxiliary_files, tensors.specs, options.dtype))
        dtypes = ", ".join(sorted({str(spec.dtype).removeprefix("torch.") for spec in tensors.specs.values()}))
        size = f"{len(tensors.specs)} tensors in {dtypes}, {size_text(tensors.nbytes)}"
        source_lines = [
            f"{source.checkpoint.folder}: {source.checkpoint.kind.value}, {size}",
            f"checked: {source.checked}",
        ]
        plan = None
        if options.config is not None:
            plan = plan_ranks(source.auxiliary_files, tensors.specs, options.config, options.world_size)
        _write(options, source, tensors, plan, source_lines, say)


def _write(
    options: ConvertOptions,
    source: Source,
    tensors: BlockTensors,
    plan: RankPlan | None,
    source_lines: Sequence[str],
    say: Callable[[str], Any],
) -> None:
    """Write the target. The lines about the source are printed first, once all checks have passed."""
    if plan is None:
        total_bytes = tensors.nbytes
    else:
        total_bytes = sum(tensor.spec.nbytes * len(tensor.stages) for tensor in plan.tensors.values())
    with new_folder(options.target, total_bytes) as folder:
        for line in source_lines:
            say(line)
        with progress(total_bytes, "converting", hidden=options.quiet) as advance:
            if plan is None:
                files = len(write_weights(folder, tensors, options.max_shard_bytes, advance))
            else:
                document = write_rank_files(folder, tensors, plan, advance)
                files = len(document.files)
        skipped = copy_auxiliary_files(source.auxiliary_files, folder, _config_dtype(source, tensors, options))
        if plan is not None:
            write_document(folder, document)
    for name in plan.unused if plan is not None else ():
        say(f"left out: tensor {name}, which the model doesn't use")
    # The Trainer puts config.json beside DeepSpeed's folder, which is the source and so wasn't left out.
    skipped = [name for name in skipped if name != f"{source.checkpoint.folder.name}/"]
    if skipped:
        say(f"left out: {', '.join(skipped)}")
    kind = "Hugging Face checkpoint" if plan is None else f"per-rank files for {plan.describe()}"
    say(f"{options.target}: {kind}, {size_text(total_bytes)} in {files} file{'s' if files > 1 else ''}")


def _config_dtype(source: Source, tensors: BlockTensors, options: ConvertOptions) -> torch.dtype | None:
    """The dtype to write into ``config.json``; None to keep the one in it, because the dtype doesn't change."""
    if options.dtype is not None:
        # Even if most of the tensors' bytes are of those that stay in float32.
        return options.dtype
    if not options.master and source.checkpoint.kind is not CheckpointKind.DEEPSPEED:
        return None
    floating = [spec for spec in tensors.specs.values() if spec.dtype.is_floating_point]
    return max(floating, key=lambda spec: spec.nbytes).dtype if floating else None


def _check_quantization(source: Source, options: ConvertOptions) -> None:
    path = source.auxiliary_files if source.auxiliary_files.is_file() else source.auxiliary_files / CONFIG
    section = read_object(path, numbers_only=False).get("quantization_config")
    if not section:
        return
    in_4_bits = isinstance(section, dict) and section.get("load_in_4bit")
    lacks_scales = in_4_bits and not any(".quant_state." in name for name in source.tensors.specs)
    if lacks_scales or source.checkpoint.kind is CheckpointKind.DEEPSPEED:
        raise CheckpointError(
            f"{path}: has a quantization_config, and the weights of {source.checkpoint.folder} aren't quantized, which "
            "would be read as if they were; give --model the folder of the model before it was quantized"
        )
    if options.config is not None:
        raise UnsupportedModelError(
            f"{path}: has a quantization_config, and there are no per-rank files of quantized weights, whose blocks "
            "and scales are those of whole tensors. Load the checkpoint itself, of which each rank reads its part; or "
            "convert the model before it was quantized, and give quantization_config to from_pretrained"
        )
    if options.dtype is not None:
        raise CheckpointError(
            f"{path}: the weights are quantized, and --dtype would cast their scales and not them; leave it out"
        )
