"""Measure training steps of a user's model with random tokens. Every rank runs it."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import AutoModelForCausalLM, PreTrainedModel

import cuboid
from cuboid import CuboidError, load_config
from cuboid.checkpoint.format.bounded_files import check_output_file
from cuboid.config.schema import TensorParallelConfig, require_config
from cuboid.failures.launched_world import World, gather
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.integrations.callbacks import memory_use
from cuboid.integrations.callbacks.utilization import peak_flops, step_flops
from cuboid.integrations.deepspeed.training_step import train_step
from cuboid.models.architectures.refusals import check_unquantized
from cuboid.models.batch.length_cases import check_length, longest_sequence
from cuboid.planner.comm_formula import layer_bytes
from cuboid.planner.description.modules import check_countable, describe_modules
from cuboid.planner.end_memory import end_sent_bytes
from cuboid.planner.model_formulas import block_sizes, end_sizes, model_kept_bytes
from cuboid.train.bench.report import BenchReport
from cuboid.train.settings import at_least, check_config, count, weights_dtype
from cuboid.weights.model_folder import check_model_folder, model_config


@dataclass(frozen=True)
class BenchOptions:
    """The arguments of a measurement.

    Attributes:
        model: a Hugging Face checkpoint.
        config: a DeepSpeed config with an optimizer.
        sequence_length: tokens of each sequence.
        steps: optimizer steps to measure.
        warmup: steps before them, in which process groups, buffers and optimizer states are created.
        report: path of the result as JSON, if any.
        trust_remote_code: whether code that comes with the model may be run.
    """

    model: Path
    config: Path
    sequence_length: int
    steps: int = 10
    warmup: int = 3
    report: Path | None = None
    trust_remote_code: bool = False


def run(options: BenchOptions, world: World) -> BenchReport:
    """Measure on all ranks of the launcher's world. Collective.

    Raises:
        CuboidError: on every rank; before weights are read, if the cause can be found by then.
    """
    return run_on_all_ranks(lambda: _run(options, world), what="cuboid bench")


def _run(options: BenchOptions, world: World) -> BenchReport:
    at_least(options.steps, "--steps", 1)
    at_least(options.warmup, "--warmup", 0)
    at_least(options.sequence_length, "--sequence-length", 2)
    if options.report is not None and world.is_first:
        check_output_file(options.report)
    check_model_folder(options.model)
    config = load_config(options.config)
    check_config(config, is_complete=False)
    trusted = options.trust_remote_code
    settings = model_config(options.model, trust_remote_code=trusted)
    check_unquantized(settings, str(options.model))
    check_length(options.sequence_length, longest_sequence(settings), "--sequence-length")
    cuboid_config, _ = require_config(config)
    rows = count(config, "train_micro_batch_size_per_gpu", None)
    accumulation = count(config, "gradient_accumulation_steps", 1)
    dtype = weights_dtype(config)
    load_options = {"auto_class": AutoModelForCausalLM, "dtype": dtype, "trust_remote_code": trusted}
    model = cuboid.from_pretrained(str(options.model), config, **load_options)
    mesh = cuboid.mesh_of(model)
    with torch.device("meta"):
        # The full model, for the formulas: the sharded one has this rank's shapes only.
        full_model: PreTrainedModel = AutoModelForCausalLM.from_config(settings, trust_remote_code=trusted)
    device = world.connect()
    engine, *_ = deepspeed.initialize(model=model.train(), config=copy.deepcopy(config))
    batches = _batches(options, rows, full_model.config.get_text_config().vocab_size, mesh.coordinate.data, device)
    for _ in range(options.warmup):
        train_step(engine, batches)
    counted = "" if memory_use.reset_peak() else ", since its start"
    mesh.comm_counter.reset()
    times = [_timed(lambda: train_step(engine, batches)) for _ in range(options.steps)]
    figures = gather((times, mesh.comm_counter.snapshot(), memory_use.peak_bytes()), world)
    formula, formula_kept_bytes = None, None
    if cuboid_config.pipeline is None:
        section, length = cuboid_config.tensor_parallel, options.sequence_length
        formula, formula_kept_bytes = _formulas(full_model, mesh, section, rows, length, accumulation, dtype)
    report = BenchReport(
        layout=_layout(mesh),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else get_accelerator().device_name(),
        tokens=rows * accumulation * mesh.topology.data * options.sequence_length,
        step_s=tuple(max(of_ranks) for of_ranks in zip(*(times for times, _, _ in figures), strict=True)),
        flops=step_flops(full_model, options.sequence_length, rows * accumulation * mesh.topology.data),
        peak_flops=peak_flops(device, dtype),
        ranks=world.size,
        sent_bytes=_most_sent([sent for _, sent, _ in figures], options.steps),
        formula_bytes=formula,
        memory=memory_use.kind() + counted,
        peak_bytes=max(peak for _, _, peak in figures),
        formula_kept_bytes=formula_kept_bytes,
    )
    if options.report is not None and world.is_first:
        report.write(options.report)
    return report


def _batches(
    options: BenchOptions, rows: int, vocabulary: int, replica: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches ``[rows, sequence_length]`` of random tokens, the same on all ranks of a replica."""
    generator = torch.Generator().manual_seed(replica)
    while True:
        ids = torch.randint(vocabulary, (rows, options.sequence_length), generator=generator).to(device)
        yield {"input_ids": ids, "labels": ids}


def _timed(step: Callable[[], object]) -> float:
    accelerator = get_accelerator()
    accelerator.synchronize()
    dist.barrier()
    started = time.perf_counter()
    step()
    accelerator.synchronize()
    return time.perf_counter() - started


def _most_sent(sent: list[dict[str, int]], steps: int) -> dict[str, int]:
    """Bytes per step, by axes; for each of them, those of the rank that sends the most."""
    most: Counter[str] = Counter()
    for of_rank in sent:
        most |= Counter(of_rank)
    return {axes: total // steps for axes, total in sorted(most.items())}


def _layout(mesh: cuboid.Mesh) -> str:
    stages, replicas = mesh.topology.pipe, mesh.topology.data
    cut = f"mesh {mesh.shape}" + (f", {stages} stages" if stages > 1 else "")
    cut += f" of {len(mesh.placement) // stages} chunks" if len(mesh.placement) > stages else ""
    return cut + (f", {replicas} replicas" if replicas > 1 else "")


def _formulas(
    full_model: PreTrainedModel,
    mesh: cuboid.Mesh,
    section: TensorParallelConfig,
    rows: int,
    length: int,
    accumulation: int,
    dtype: torch.dtype,
) -> tuple[dict[str, int], int | None]:
    """By formula: bytes that a rank sends over the mesh per step, and those saved for backward per micro-batch."""
    size, described = dtype.itemsize, describe_modules(full_model)
    layer = layer_bytes(
        block_sizes(described, mesh.shape), mesh.shape, rows, length, element_bytes=size,
        weight_gather=section.weight_gather, fp8_min_dimension=section.fp8_min_dimension,
    )  # fmt: skip
    sent = Counter(end_sent_bytes(end_sizes(described), mesh.shape, rows, length, element_bytes=size))
    for axes, of_layer in layer.items():
        sent[axes] += full_model.config.num_hidden_layers * of_layer
    step = {axes: accumulation * total for axes, total in sorted(sent.items())}
    try:
        check_countable(full_model)
        by_keeper = model_kept_bytes(described, mesh.shape, mesh.coordinate, rows, length, element_bytes=size)
    except CuboidError:
        return step, None
    return step, sum(by_keeper.values())
