"""Predict the time and memory of a step on a cluster, before anything is allocated."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from cuboid.config.schema import CuboidConfig, PipelineConfig
from cuboid.errors import ConfigError
from cuboid.models.batch.length_cases import check_length
from cuboid.models.pipeline.schedule_choice import settle_schedule
from cuboid.models.pipeline.staging_plan import assumed_length_of
from cuboid.models.stages.stage_cut import ASSUMED_LENGTH, plan_stages
from cuboid.planner.comm_formula import layer_bytes, recomputed_bytes, stage_layer_bytes
from cuboid.planner.cost.layout import CUBOID, CheckpointingMode, Layout, Software
from cuboid.planner.cost.memory import Memory, counted_bytes, stage_memory, uncounted, usable_bytes
from cuboid.planner.cost.step import StepCost, StepTime
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.description.halves import halves_of, sizes_with_halves
from cuboid.planner.description.model import ModelDescription
from cuboid.planner.model_formulas import block_sizes
from cuboid.seq1f1b.schedule.choice import NAMES
from cuboid.seq1f1b.schedule.partition import check_lengths, even_cut

#: Numbers of segments that are tried.
SEGMENTS = (1, 2, 4, 8, 16, 32, 64)
#: More segments than these are only tried for the bubble of a few micro-batches: up to so many units of a stage in a
#: step, of so many tokens. On an H100, 16 segments of 8,192 tokens took no longer than one of all; 16 of 2,048 did.
MANY, _MOST_UNITS, _LEAST_TOKENS_OF_MANY = 16, 128, 4096
#: Fewest tokens of a segment, for each of the mesh's pieces of a sequence; shorter segments are never fast.
_LEAST_TOKENS = 64
#: How much longer than the fastest a step may take under the fixed schedule for its segments to be tried with the
#: layout's own. In 140 pipelines of Llama 3 8B the fastest number was always among these.
_NEAR = 1.1
#: The host's time for a layer's forward on a mesh, collectives included: measured beside an H200, where it was 2.2 to
#: 3.6 ms on meshes of 8 and 64 ranks.
_MESH_HOST_S = 2.8e-3
#: Part of the host's memory that may be pinned; the rest is the system's, the data's and the frameworks'.
_PINNABLE = 0.8
#: Part of a GPU's usable memory: layouts that take less by formulas fit. The highest count was 1.6 times the formulas'.
_SAFE = 0.5


@dataclass(frozen=True)
class Estimate:
    """The predicted step of a layout: its time by kind, and the memory of a rank of each stage by kind."""

    cost: StepCost
    time: StepTime
    stages: tuple[Memory, ...]

    @classmethod
    def of(cls, cost: StepCost) -> Estimate:
        """Compute the estimate of a step."""
        return cls(cost, cost.step_time(), tuple(stage_memory(cost)))

    @property
    def layout(self) -> Layout:
        """The layout of the step."""
        return self.cost.layout

    @property
    def memory_bytes(self) -> float:
        """Peak memory of the fullest rank, in bytes."""
        return max(stage.total for stage in self.stages)

    @cached_property
    def counted_bytes(self) -> float | None:
        """:attr:`memory_bytes`, with what is alive while a layer runs counted by running it, which takes seconds.

        None where it can't be run without values.
        """
        return counted_bytes(self.cost)

    @property
    def limit_bytes(self) -> float:
        """Bytes of a GPU's memory that tensors can use."""
        return usable_bytes(self.cost.cluster)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has enough memory, and its node."""
        return self.memory_bytes <= self.limit_bytes and self.host_bytes <= self.host_limit_bytes

    @cached_property
    def fits_counted(self) -> bool:
        """Whether it also fits by :attr:`counted_bytes`, if these can be counted.

        They aren't if the formulas' bytes are so few that no count was ever above the limit.
        """
        if not self.fits or self.memory_bytes <= _SAFE * self.limit_bytes:
            return self.fits
        return self.counted_bytes is None or self.counted_bytes <= self.limit_bytes

    @property
    def host_bytes(self) -> float:
        """Host memory of what a rank has there, on average over the ranks of a node."""
        return sum(stage.on_host for stage in self.stages) / len(self.stages)

    @property
    def host_limit_bytes(self) -> float:
        """A rank's share of what its node can pin."""
        return _PINNABLE * self.cost.cluster.gpu.host_memory_bytes

    @property
    def uncounted(self) -> str:
        """What the estimate leaves out, in words; "" if nothing."""
        return uncounted(self.cost)

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all ranks together."""
        return self.layout.rows * self.cost.length / self.time.total_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model's operations, without recomputation, relative to the data sheet's peak."""
        peak = self.cost.cluster.gpu.peak_flops * self.layout.ranks
        return self.cost.model.step_flops(self.layout.rows, self.cost.length) / (peak * self.time.total_s)

    @cached_property
    def bytes_by_axis(self) -> dict[str, int]:
        """Bytes that a rank of the stage with the most layers sends in a step inside its layers, by mesh axis.

        Nothing for a frozen model with adapters, of which there is no such count.
        """
        cost, layout = self.cost, self.layout
        if cost.model.is_frozen:
            return {}
        most = max(
            sum(count for count, owner in zip(cost.stage_layers, layout.rank_of, strict=True) if owner == rank)
            for rank in range(layout.stages)
        )
        layers = math.ceil(most)  # A half sends no more than a layer.
        sizes, mesh, rows = block_sizes(cost.model, layout.mesh), layout.mesh, layout.micro_batch
        gather, units = layout.weight_gather, cost.lengths * layout.micro_batches
        fp8 = layout.fp8_min_dimension
        sent = Counter[str]()
        if layout.stages > 1:
            sent.update(
                stage_layer_bytes(
                    sizes, mesh, rows, units, weight_gather=gather, gradient_sync=layout.gradient_sync,
                    splits=cost.splits, fp8_min_dimension=fp8,
                )
            )  # fmt: skip
        for length in units:
            if layout.stages == 1:
                sent.update(layer_bytes(sizes, mesh, rows, length, weight_gather=gather, fp8_min_dimension=fp8))
            if layout.recomputes:
                sent.update(
                    recomputed_bytes(
                        sizes, mesh, rows, length, weight_gather=gather, fp8_min_dimension=fp8,
                        compiled=layout.compiled,
                    )
                )  # fmt: skip
        return {axis: count * layers for axis, count in sorted(sent.items())}

    def _model_as_dict(self) -> dict[str, Any]:
        model = self.cost.model
        described: dict[str, Any] = {"type": model.name, "parameters": model.parameters}
        if model.trunk is not None:
            described |= {"trained": str(model.trunk), "trained_parameters": model.trained_parameters}
        return described

    def as_dict(self) -> dict[str, Any]:
        """The estimate as values that JSON can represent."""
        layout = self.layout
        return {
            "model": self._model_as_dict(),
            "cluster": str(self.cost.cluster),
            "sequence_length": self.cost.length,
            "layout": {**asdict(layout), "mesh": asdict(layout.mesh), "stage_layers": list(self.cost.stage_layers),
                       "segment_lengths": list(self.cost.lengths), "ranks": layout.ranks},
            "uncounted": self.uncounted,
            "fits": self.fits,
            "memory_bytes": round(self.memory_bytes),
            "memory_limit_bytes": round(self.limit_bytes),
            "host_bytes": round(self.host_bytes),
            "memory_by_stage": [{kind: round(size) for kind, size in stage.by_kind().items()} for stage in self.stages],
            "step_s": self.time.total_s,
            "time": asdict(self.time),
            "bubble": self.time.bubble,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "sent_bytes_by_axis": self.bytes_by_axis,
        }  # fmt: skip


def estimate(
    model: ModelDescription,
    layout: Layout,
    cluster: Cluster,
    length: int,
    software: Software | None = None,
    *,
    known: dict[Any, Any] | None = None,
) -> Estimate:
    """Predict a step.

    Args:
        model: what is trained.
        layout: uses all of the cluster's GPUs.
        cluster: the machines.
        length: S, tokens of a sequence.
        software: the framework that runs it; None for Cuboid under DeepSpeed.
        known: cache of layer times, to be shared by estimates of the same model, cluster and length.

    Raises:
        MeshError: the mesh can't cut the model.
        UnsupportedModelError: the model isn't right in such a layout.
        ConfigError: the layout doesn't fit the cluster, or the sequence is longer than the model's.
    """
    _check(model, layout, cluster, length)
    return Estimate.of(StepCost(model, layout, cluster, length, software or cuboid_software(layout), known=known))


def cuboid_software(layout: Layout) -> Software:
    """Cuboid's behaviour under DeepSpeed in a layout.

    In a pipeline, whose units all add to the gradients, these are accumulated in float32 unless the config says
    otherwise. On a mesh, collectives add to the host's work. Compiled layers have fused kernels.
    """
    software = replace(CUBOID, host_s=_MESH_HOST_S) if layout.mesh.size > 1 else CUBOID
    if layout.compiled:
        software = replace(software, is_eager=False)
    is_pipeline = layout.stages > 1 or layout.segments > 1
    return replace(software, gradient_bytes=layout.gradient_bytes or (4 if is_pipeline else 2))


def _check(model: ModelDescription, layout: Layout, cluster: Cluster, length: int) -> None:
    if layout.ranks != cluster.gpus:
        raise ConfigError(f"the layout has {layout.ranks} ranks, but the cluster {cluster} has {cluster.gpus} GPUs")
    if layout.parts > len(model.layers):
        chunks = f" with {layout.chunks} chunks on each" if layout.parts > layout.stages else ""
        raise ConfigError(
            f"pipeline.stages is {layout.stages}{chunks}, but {model.name} has {len(model.layers)} layers, and each "
            f"{'chunk' if chunks else 'stage'} needs at least one"
        )
    if layout.schedule == "1f1b" and layout.segments > 1:
        raise ConfigError(
            f'the schedule "1f1b" has whole sequences, and the layout {layout.segments} segments; use "seq1f1b"'
        )
    if layout.micro_batch % layout.mesh.batch:
        raise ConfigError(
            f"train_micro_batch_size_per_gpu is {layout.micro_batch}, which mesh.batch = {layout.mesh.batch} doesn't "
            f"divide; use a multiple of {layout.mesh.batch}"
        )
    granule = math.lcm(layout.mesh.sequence, layout.mesh.hidden)
    grain = layout.segments * granule
    if length < grain or length % granule:
        raise ConfigError(
            f"{length} tokens can't be cut into {layout.segments} segments that the mesh's axes sequence = "
            f"{layout.mesh.sequence} and hidden = {layout.mesh.hidden} share; use a multiple of {granule}, "
            f"at least {grain}"
        )
    check_length(length, model.positions or None, "the sequence length")
    model.limits.check(model.name, layout.mesh, layout.stages, layout.segments)
    if layout.fp8_min_dimension is not None:
        check_fp8(model, cluster)
    for key, is_set in (("compile", layout.compiled), ("fp8", layout.fp8_min_dimension is not None)):
        if is_set and model.four_bits:
            raise ConfigError(f"tensor_parallel.{key} has no rule for weights of 4 bits; leave one of the two out")


def check_fp8(model: ModelDescription, cluster: Cluster) -> None:
    """Check that a model's layers can multiply in fp8 on a cluster.

    Raises:
        ConfigError: its GPUs have no such products, or the model has experts.
    """
    if cluster.gpu.fp8_speed <= 1:
        raise ConfigError(
            f"{cluster.gpu.name}: this GPU has no products in fp8 with a scale for each row, or none that are faster "
            "(gpu.fp8_speed); leave fp8 out, or take an H100 or a later one"
        )
    if any(layer.experts is not None for layer in model.kinds):
        raise ConfigError(
            f"the products of a mixture's experts have no form in fp8, and {model.name} has experts; leave fp8 out"
        )


def segment_counts(layout: Layout, length: int) -> list[int]:
    """Numbers of segments to try for a layout and sequences of ``length`` tokens."""
    if layout.stages == 1 or layout.schedule == "1f1b":
        return [1]
    grain = _LEAST_TOKENS * math.lcm(layout.mesh.sequence, layout.mesh.hidden)
    most = min(_MOST_UNITS // layout.micro_batches, length // _LEAST_TOKENS_OF_MANY)
    return [count for count in SEGMENTS if count == 1 or (length >= count * grain and count <= max(most, MANY))]


def best_segments(model: ModelDescription, layout: Layout, cluster: Cluster, length: int) -> int:
    """The number of segments with the fastest step that fits; if none fits, the one that needs the least memory.

    Generating a schedule takes up to a few seconds. So all numbers are first ranked with the fixed schedule of one
    stage on each rank, and the layout's own is made for those alone that are about as fast with that; and for others as
    long as none fits. The layout's own segments are ignored. ``length`` is S, a multiple of what the mesh needs.
    """
    known: dict[Any, Any] = {}

    def of(one: Layout, segments: int) -> Estimate:
        cut = replace(one, segments=segments)
        return Estimate.of(StepCost(model, cut, cluster, length, cuboid_software(cut), known=known))

    fixed = layout.without_chunks
    ranked = sorted((of(fixed, count) for count in segment_counts(fixed, length)), key=_fitting_first)
    if fixed == layout:
        return ranked[0].layout.segments
    scheduled: list[Estimate] = []
    for candidate in ranked:
        is_near = candidate.time.total_s <= _NEAR * ranked[0].time.total_s
        if is_near or not any(estimate.fits for estimate in scheduled):
            scheduled.append(of(layout, candidate.layout.segments))
    return min(scheduled, key=_fitting_first).layout.segments


def _fitting_first(candidate: Estimate) -> tuple[bool, float]:
    """To sort estimates: those that fit by their time, then others by their memory."""
    return not candidate.fits, candidate.time.total_s if candidate.fits else candidate.memory_bytes


def layout_of_config(
    config: CuboidConfig,
    framework_config: Mapping[str, Any],
    model: ModelDescription,
    cluster: Cluster,
    length: int,
    *,
    checkpointing: bool = False,
) -> Layout:
    """The layout that a config describes, on all GPUs of a cluster.

    Args:
        config, framework_config: as returned by :func:`cuboid.config.schema.require_config`.
        model, cluster, length: the model, the machines, and tokens of a sequence.
        checkpointing: whether the script enables the model's gradient checkpointing, where the config leaves it to it.

    Raises:
        ConfigError: the config leaves a needed size open, sets something that has no estimate, or doesn't fit the
            cluster.
    """
    mesh = config.tensor_parallel.mesh
    if mesh == "auto":
        raise ConfigError(
            'tensor_parallel.mesh is "auto"; `cuboid estimate` needs its sizes, and `cuboid plan` finds some'
        )
    zero = framework_config.get("zero_optimization") or {}
    offloads = [key for key in ("offload_optimizer", "offload_param") if zero.get(key)]
    if offloads and (config.pipeline is not None or offloads != ["offload_optimizer"]):
        raise ConfigError(f"zero_optimization.{offloads[-1]} has no estimate; leave it out")
    optimizer_on_host = bool(offloads) and zero["offload_optimizer"].get("device") not in (None, "none")
    if not any((framework_config.get(name) or {}).get("enabled") for name in ("bf16", "fp16")):
        raise ConfigError(
            "the config trains in float32 (it enables neither bf16 nor fp16), of which the planner knows no rates of "
            'GPUs. To estimate its layout in 16 bits, add "bf16": {"enabled": true}'
        )
    if cluster.gpus % config.ranks:
        raise ConfigError(
            f"the config has {config.ranks} ranks for each replica of the model, which the {cluster.gpus} GPUs of "
            f"{cluster} aren't a multiple of"
        )
    replicas = cluster.gpus // config.ranks
    rows, count = config.framework.per_replica(replicas)
    if not rows:
        raise ConfigError(
            "the planner needs train_micro_batch_size_per_gpu as a number, or a train_batch_size that "
            f"gradient_accumulation_steps = {count} × {replicas} replicas divide"
        )
    layout = Layout(
        mesh.shape,
        config.stages,
        rows,
        count,
        replicas,
        zero_stage=int(zero.get("stage", 0)),
        checkpointing=_checkpointing(config, by_script=checkpointing),
        on_host=config.keeps_on_host,
        optimizer_on_host=optimizer_on_host,
        gradient_bytes=config.framework.gradient_bytes(is_pipeline=config.pipeline is not None),
        weight_gather=config.tensor_parallel.weight_gather,
        gradient_sync=config.tensor_parallel.gradient_sync,
        compiled=config.tensor_parallel.compile,
        fp8_min_dimension=config.tensor_parallel.fp8_min_dimension,
    )
    if config.tensor_parallel.gather_logits is True:
        raise ConfigError('tensor_parallel.gather_logits is true: whole logits have no estimate; write "auto"')
    pipeline = config.pipeline
    if pipeline is None:
        return layout
    # Stages are placed before a script can enable anything.
    recomputes = _checkpointing(config, by_script=False) != "none"
    return _with_segments(
        *(layout, pipeline, model, cluster, length),
        recomputes=recomputes,
        assumed_length=assumed_length_of(config),
    )


def _checkpointing(config: CuboidConfig, *, by_script: bool) -> CheckpointingMode:
    """What is recomputed, by the config and its script."""
    mode: CheckpointingMode = "none"
    if config.activation_checkpointing is not None:
        mode = config.activation_checkpointing.mode
    return "layers" if by_script and mode == "none" else mode


def _with_segments(
    layout: Layout,
    pipeline: PipelineConfig,
    model: ModelDescription,
    cluster: Cluster,
    length: int,
    *,
    recomputes: bool,
    assumed_length: int,
) -> Layout:
    """Apply the config's pipeline section to a layout; ``recomputes``: whether the config checkpoints activations."""
    if pipeline.schedule not in NAMES:
        raise ConfigError(f"pipeline.schedule {pipeline.schedule!r} is none of {', '.join(NAMES)}")
    if pipeline.partition == "measured":
        raise ConfigError('pipeline.partition "measured" cuts by the times of real steps; estimate it as "flops"')
    multiple = math.lcm(layout.mesh.sequence, layout.mesh.hidden)
    layout = with_pipeline(layout, pipeline, model, assumed_length)
    segments = pipeline.segments
    if segments == "auto":
        segments = best_segments(model, layout, cluster, length)
    layout = replace(layout, segments=segments)
    if isinstance(pipeline.partition, tuple):
        check_lengths(pipeline.partition, length=length, segments=segments, multiple=multiple)
        layout = replace(layout, lengths=pipeline.partition)
    elif pipeline.partition == "even":
        layout = replace(layout, lengths=even_cut(length, segments, multiple))
    if pipeline.is_settled:
        return layout
    # Schedule and stages are chosen by simulating steps, which depend on where the sequence is cut.
    lengths = StepCost(model, layout, cluster, length).lengths
    sizes = sizes_with_halves(model) if pipeline.may_cut_layers else model.sizes
    settled, _ = settle_schedule(
        *(pipeline, sizes, lengths, layout.micro_batches),
        recomputes=recomputes,
        halves=functools.partial(halves_of, model),
        assumed_length=assumed_length,
    )
    return with_pipeline(layout, settled, model, assumed_length)


def with_pipeline(
    layout: Layout, pipeline: PipelineConfig, model: ModelDescription, assumed_length: int = ASSUMED_LENGTH
) -> Layout:
    """Apply a config's stage balance, schedule, memory limit and precision of key/value gradients to a layout.

    Until it is known where the chunks are, the layout has one stage on each rank, and stages that a search of steps
    will move are as it starts with. ``assumed_length`` is the length for which training weighs halves of layers.
    """
    pipeline = pipeline.with_balanced_stages
    if not pipeline.is_placed:
        pipeline = pipeline.without_chunks
    assert pipeline.chunks != "auto"
    balance: tuple[float, ...] = ()
    if pipeline.may_cut_layers:
        halves = functools.partial(halves_of, model)
        sizes = functools.partial(sizes_with_halves, model)
        balance = plan_stages(len(model.layers), sizes, pipeline, halves, length=assumed_length)
    elif isinstance(pipeline.stage_balance, tuple):
        balance = _checked_balance(pipeline.stage_balance, model)
    elif pipeline.stage_balance == "layers":
        balance = even_cut(len(model.layers), pipeline.parts)
    return replace(
        layout,
        schedule=pipeline.schedule,
        chunks=pipeline.chunks,
        memory_limit=pipeline.memory_limit,
        spreads_head=pipeline.spreads_head,
        stage_layers=balance,
        key_value_gradient_bytes=2 if pipeline.kv_gradients == "parameter" else 4,
    )


def _checked_balance(balance: tuple[float, ...], model: ModelDescription) -> tuple[float, ...]:
    if sum(balance) != len(model.layers):
        raise ConfigError(
            f"pipeline.stage_balance {list(balance)} adds up to {sum(balance)}, but {model.name} has "
            f"{len(model.layers)} layers"
        )
    return balance


def remedies(base: Estimate) -> list[tuple[str, Estimate]]:
    """Single changes that make a layout fit which doesn't, the fastest first."""
    layout = base.layout
    changes: list[tuple[str, Layout]] = []
    modes: list[CheckpointingMode] = []
    if layout.checkpointing in ("none", "attention"):
        modes = ["layers"] if layout.checkpointing == "attention" else ["attention", "layers"]
    changes += [
        (f'"activation_checkpointing": {{"mode": "{mode}"}}', replace(layout, checkpointing=mode)) for mode in modes
    ]
    if layout.weight_gather == "step":
        changes.append(('"weight_gather": "layer"', replace(layout, weight_gather="layer")))
    if layout.gradient_sync == "step":
        changes.append(('"gradient_sync": "unit"', replace(layout, gradient_sync="unit")))
    if layout.zero_stage == 0 and layout.replicas > 1:
        changes.append(("ZeRO stage 1", replace(layout, zero_stage=1)))
    if layout.zero_stage == 1 and layout.replicas > 1 and layout.stages == 1:
        changes.append(("ZeRO stage 2", replace(layout, zero_stage=2)))
    if layout.stages > 1:
        changes += [(f"{k} segments", replace(layout, segments=k)) for k in (2, 4, 8, 16) if k > layout.segments]
    rows = layout.micro_batch // 2
    if layout.micro_batch % 2 == 0 and rows % layout.mesh.batch == 0:
        smaller = replace(layout, micro_batch=rows, micro_batches=2 * layout.micro_batches)
        changes.append((f"micro-batches of {rows} rows, twice as many", smaller))
    if layout.checkpointing == "none" and layout.stages > 1 and layout.segments < 8:
        changed = replace(layout, checkpointing="layers", segments=8)
        changes.append(('"activation_checkpointing": {"mode": "layers"} and 8 segments', changed))
    modes = [layout.checkpointing] if layout.recomputes else ["attention", "layers"]
    moved = [
        (
            f'"activation_checkpointing": {{"mode": "{mode}", "cpu_checkpointing": true}}',
            replace(layout, checkpointing=mode, on_host=True),
        )
        for mode in modes
    ]
    if layout.stages == 1 and layout.zero_stage and not layout.optimizer_on_host:
        name = '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}'
        moved.append((name, replace(layout, optimizer_on_host=True)))
        moved += [(f"{name} and {also}", replace(one, optimizer_on_host=True)) for also, one in moved[:-1]]
    return _that_fit(base, changes) or _that_fit(base, moved)


def _that_fit(base: Estimate, changes: list[tuple[str, Layout]]) -> list[tuple[str, Estimate]]:
    tried = []
    for name, changed in changes:
        try:
            # Given lengths may be for another number of segments.
            changed = replace(changed, lengths=())
            tried.append((name, estimate(base.cost.model, changed, base.cost.cluster, base.cost.length)))
        except ConfigError:
            continue
    return sorted(((n, remedy) for n, remedy in tried if remedy.fits), key=lambda pair: pair[1].time.total_s)
