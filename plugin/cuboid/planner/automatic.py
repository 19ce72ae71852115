"""Resolve ``"auto"`` for the mesh, the segments and the placement of stages while a model is being loaded."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from cuboid.config.schema import CuboidConfig, LoraSection
from cuboid.distributed.axis_collectives import padded_length
from cuboid.distributed.mesh import Mesh, current_rank
from cuboid.distributed.topology import MeshShape, divisors
from cuboid.errors import ConfigError, MeshError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.batch.length_cases import check_length, longest_sequence
from cuboid.models.certification.mesh_certificates import mesh_verdict
from cuboid.models.pipeline.schedule_choice import settle_schedule
from cuboid.models.pipeline.sequence_cut import Cutter
from cuboid.models.pipeline.staging_plan import assumed_length_of, halves_for
from cuboid.models.sharded.sharded_model import learned_positions
from cuboid.models.stages.model_costs import sizes_of
from cuboid.planner.cost.layout import CheckpointingMode, Layout
from cuboid.planner.cost.step import StepCost
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.description.meta_model import meta_model
from cuboid.planner.description.model import ModelDescription
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.description.seen import seen_cluster
from cuboid.planner.description.trunk import LaterAdapters, PlannedAdapters, Trunk
from cuboid.planner.estimate import Estimate, best_segments, cuboid_software, segment_counts, with_pipeline
from cuboid.planner.ranking import best_of
from cuboid.planner.search import checkpointing_section, reason
from cuboid.requirements import check_version

_logger = logging.getLogger(__name__)

#: Rows of a micro-batch and tokens of a sequence that are assumed if the config doesn't set them: weights are loaded
#: before there is data.
_ASSUMED_ROWS, _ASSUMED_LENGTH = 8, 4096


def planned_trunk(lora: LoraSection | None, *, four_bits: bool = False) -> Trunk | None:
    """How a model is trained, by a config's ``lora``; None if all of it is.

    ``four_bits``: whether its linear layers are in 4 bits, whatever the section says.

    Raises:
        ImportError: PEFT is missing, or its version isn't supported.
    """
    if lora is None:
        return Trunk(LaterAdapters(), four_bits=True) if four_bits else None
    check_version("peft")
    # PEFT takes seconds to import, which ranks that don't use it save.
    from cuboid.planner.description.planned_lora import PlannedLora

    return Trunk(PlannedLora(lora.r, lora.target_modules), four_bits or lora.load_in_4bit)


@dataclass(frozen=True)
class ExpectedStep:
    """The step that ``"mesh": "auto"`` was decided for."""

    model: ModelDescription
    layout: Layout
    cluster: Cluster
    length: int

    def check_adapter(self, config: PretrainedConfig, adapter: PlannedAdapters) -> None:
        """Check that the mesh fits an adapter that is put on the model; rank 0 logs if it was chosen for another.

        Args:
            config: of the whole model.
            adapter: as PEFT will make it.

        Raises:
            ConfigError: a step takes more memory with it than there is.
        """
        trunk = self.model.trunk
        if trunk is None:
            self._warn(
                f'"mesh": "auto" was decided for training all parameters, and the model gets {adapter}; write its r '
                'and target_modules into the config, as "lora": {"r": …, "target_modules": …}'
            )
            return
        if isinstance(trunk.adapters, LaterAdapters) or str(trunk.adapters) == str(adapter):
            return
        differs = f'"mesh": "auto" was decided for {trunk.adapters} (lora in the config), and the model gets {adapter}'
        try:
            described = describe_modules(meta_model(config), self.model.verdict, trunk=replace(trunk, adapters=adapter))
        except (ConfigError, UnsupportedModelError) as error:
            self._warn(f"{differs}, which can't be counted: {error}")
            return
        if (described.layers, described.extra_factors) == (self.model.layers, self.model.extra_factors):
            # The same layers by other names, such as all linear ones by their own.
            return
        cost = StepCost(described, self.layout, self.cluster, self.length, cuboid_software(self.layout))
        estimate = Estimate.of(cost)
        if not estimate.fits_counted:
            needed = max(estimate.memory_bytes, estimate.counted_bytes or 0.0)
            raise ConfigError(
                f"{differs}: {self.layout.mesh} would need {needed / 2**30:.1f} of "
                f"{estimate.limit_bytes / 2**30:.1f} GiB a GPU; write this adapter's r and target_modules into lora, "
                "and the mesh is chosen for it"
            )
        self._warn(f"{differs}; it fits, but another mesh may be faster")

    @staticmethod
    def _warn(message: str) -> None:
        if current_rank() == 0:
            _logger.warning("%s", message)


@dataclass(frozen=True)
class MeshChoice:
    """The mesh of a config; if it is chosen, with the step that is expected of it."""

    mesh: MeshShape
    expected: ExpectedStep | None = None


def choose_mesh(
    model: PreTrainedModel,
    config: CuboidConfig,
    cls: type[PreTrainedModel] | None = None,
    *,
    world_size: int | None = None,
    four_bits: bool = False,
) -> MeshChoice:
    """For the mesh ``"auto"``, return the one with the fastest step that fits; rank 0 logs why.

    Each rank decides by itself; ranks that see the same GPUs decide alike. Connecting the mesh checks that they did.

    Args:
        model: the full model, on any device, meta included.
        config: Cuboid's config.
        cls: the architecture's class, if the model's own class was derived from it.
        world_size: total number of ranks; by default those of the config's ``cluster``, or of one replica.
        four_bits: whether the model's linear layers are stored in 4 bits, and it is frozen.

    Raises:
        UnsupportedModelError: the model can't be on a mesh.
        MeshError: no mesh of an allowed size divides both the model and the micro-batch.
        ConfigError: no mesh fits in memory, or there is no profile of the GPUs.
    """
    settings = config.tensor_parallel
    if settings.size == 1:
        return MeshChoice(MeshShape())
    cluster = _cluster(config, world_size)
    verdict, trunk = mesh_verdict(cls or type(model), model.config), planned_trunk(config.lora, four_bits=four_bits)
    described = describe_modules(model, verdict, trunk=trunk)
    length = _length(model, config)
    layouts = list(_layouts(described, config, cluster.gpus, length))
    if not layouts:
        if described.limits.no_mesh:
            raise UnsupportedModelError(described.limits.no_mesh)
        raise MeshError(_nothing_divides(type(model).__name__, config, cluster))
    estimates = _fastest(described, layouts, cluster, length, _mode(config))
    _log(estimates, config, length)
    best = estimates[0]
    return MeshChoice(best.layout.mesh, ExpectedStep(described, best.layout, cluster, best.cost.length))


@dataclass(frozen=True)
class SegmentChoice:
    """Chooses the number of segments of a pipeline once the first sequences, and so their length, are known.

    The layout's own segments are ignored.
    """

    model: ModelDescription
    layout: Layout
    cluster: Cluster

    def __call__(self, length: int, rows: int, micro_batches: int, *, recomputes: bool) -> int:
        """Return the number of segments with the fastest step; rank 0 logs it.

        ``length`` is S, a multiple of what the mesh needs; a micro-batch has ``rows``, a step ``micro_batches``.
        """
        # Where the config keeps attention, checkpointing that the script enables keeps it too.
        enabled: CheckpointingMode = "attention" if self.layout.checkpointing == "attention" else "layers"
        checkpointing = enabled if recomputes else "none"
        layout = replace(self.layout, micro_batch=rows, micro_batches=micro_batches, checkpointing=checkpointing)
        count = best_segments(self.model, layout, self.cluster, length)
        if current_rank() == 0:
            _logger.warning(
                '"segments": "auto" is %d for %d micro-batches of %d rows of %d tokens on %s',
                count, micro_batches, rows, length, self.cluster,
            )  # fmt: skip
        return count


def segment_choice(
    model: PreTrainedModel,
    config: CuboidConfig,
    mesh: Mesh,
    cls: type[PreTrainedModel] | None = None,
    *,
    four_bits: bool = False,
) -> SegmentChoice | None:
    """The rule that decides ``"segments": "auto"`` for a model before it is cut; None if the config gives a number.

    For the arguments see :func:`choose_mesh`.
    """
    pipeline, topology = config.pipeline, mesh.topology
    if pipeline is None or pipeline.segments != "auto":
        return None
    # Ranks without others on their mesh have the model's own modules, and need no verdict.
    verdict = mesh_verdict(cls or type(model), model.config) if mesh.shape.size > 1 else MeshVerdict()
    described = describe_modules(model, verdict, trunk=planned_trunk(config.lora, four_bits=four_bits))
    zero = config.framework.zero_stage or 0
    layout = Layout(
        mesh.shape, topology.pipe, replicas=topology.data, zero_stage=zero,
        weight_gather=config.tensor_parallel.weight_gather, gradient_sync=config.tensor_parallel.gradient_sync,
        checkpointing=_mode(config) or "none", on_host=config.keeps_on_host,
        gradient_bytes=config.framework.gradient_bytes(is_pipeline=True),
        compiled=config.tensor_parallel.compile, fp8_min_dimension=config.tensor_parallel.fp8_min_dimension,
    )  # fmt: skip
    layout = with_pipeline(layout, pipeline, described, assumed_length_of(config))
    return SegmentChoice(described, layout, _cluster(config, topology.world_size))


def settle_stages(
    model: PreTrainedModel,
    config: CuboidConfig,
    shape: MeshShape,
    cls: type[PreTrainedModel] | None = None,
    *,
    world_size: int | None = None,
    four_bits: bool = False,
) -> CuboidConfig:
    """Resolve the schedule with the placement of the stages, and their layers, which the config leaves open.

    ``"schedule": "auto"`` with chunks and ``"stage_balance": "schedule"`` do; rank 0 logs what was chosen. Each rank
    decides by itself; ranks that read the same config decide alike. Connecting the mesh checks that they did.

    Args:
        model: the full model, on any device, meta included.
        config: Cuboid's config.
        shape: shape of the mesh.
        cls: the architecture's class, if the model's own class was derived from it.
        world_size: total number of ranks; by default those of one replica.
        four_bits: whether the model's linear layers are stored in 4 bits, and it is frozen.

    Raises:
        ConfigError: no schedule stays within the memory limit, or the layers can't be divided into that many stages.
    """
    pipeline = config.pipeline
    assert pipeline is not None, "without stages, nothing is open"
    mesh = Mesh(shape, pipe=pipeline.stages, rank=0, world_size=world_size or shape.size * pipeline.stages)
    rows, micro_batches = config.framework.per_replica(mesh.topology.data)
    length = _length(model, config)

    def segments(padded: int, steps: int) -> int:
        choice = segment_choice(model, config, mesh, cls, four_bits=four_bits)
        assert choice is not None
        layout = replace(choice.layout, micro_batch=rows or _ASSUMED_ROWS, micro_batches=steps)
        return best_segments(choice.model, layout, choice.cluster, padded)

    halves = halves_for(pipeline, model, cls)
    sizes = replace(sizes_of(model, halves), is_frozen=four_bits or config.lora is not None)
    lengths = Cutter(pipeline, sizes, mesh, segments).lengths(length, micro_batches)
    recomputes = _mode(config) is not None
    settled, compared = settle_schedule(
        *(pipeline, sizes, lengths, micro_batches),
        recomputes=recomputes,
        halves=lambda: halves,
        assumed_length=assumed_length_of(config),
    )
    if current_rank() == 0 and settled.stage_balance != pipeline.stage_balance:
        _logger.warning(
            '"stage_balance": "schedule" is %s, for %d micro-batches of %d tokens in %d segments%s',
            list(settled.stage_balance), micro_batches, length, len(lengths), _assumed(config),
        )  # fmt: skip
    if current_rank() == 0 and not pipeline.is_placed:
        _logger.warning(
            '"schedule": "auto" is, for %d micro-batches of %d tokens in %d segments%s, %s', micro_batches,
            length, len(lengths), _assumed(config), compared,
        )  # fmt: skip
    return config.with_pipeline(settled)


def _assumed(config: CuboidConfig) -> str:
    """A remark for the log that the sequence length is assumed; "" if the config sets it."""
    return "" if config.sequence_length else " (assumed; sequence_length in the config says another)"


def _cluster(config: CuboidConfig, world_size: int | None) -> Cluster:
    """The cluster that the config names, or else the one that this process detects."""
    if config.cluster is None:
        return seen_cluster(config.ranks if world_size is None else world_size)
    named = Cluster.parse(config.cluster)
    if world_size is not None and named.gpus != world_size:
        raise ConfigError(f"cluster {config.cluster!r} has {named.gpus} GPUs, but the world has {world_size} ranks")
    return named


def _length(model: PreTrainedModel, config: CuboidConfig) -> int:
    pipeline = config.pipeline
    if pipeline is not None and isinstance(pipeline.partition, tuple):
        return sum(pipeline.partition)
    # Only learned positions are a hard limit: rotary embeddings extend beyond theirs, and the first forward warns.
    check_length(config.sequence_length or 0, learned_positions(model), "sequence_length")
    return config.sequence_length or min(_ASSUMED_LENGTH, longest_sequence(model.config) or _ASSUMED_LENGTH)


def _layouts(
    model: ModelDescription,
    config: CuboidConfig,
    world_size: int,
    length: int,
) -> Iterator[Layout]:
    """All layouts over all ranks that agree with what the config sets."""
    settings, pipeline = config.tensor_parallel, config.pipeline
    sizes = [settings.mesh_size] if settings.is_sized else divisors(world_size // config.stages)
    for size in sizes:
        replicas = world_size // (config.stages * size)
        rows, steps = _rows(config, replicas)
        for mesh in model.limits.fitting(size) if rows else ():
            if rows % mesh.batch:
                continue
            layout = Layout(
                mesh, config.stages, rows, steps, replicas, zero_stage=config.framework.zero_stage or 0,
                weight_gather=settings.weight_gather, gradient_sync=settings.gradient_sync,
                on_host=config.keeps_on_host,
                gradient_bytes=config.framework.gradient_bytes(is_pipeline=pipeline is not None),
                compiled=settings.compile, fp8_min_dimension=settings.fp8_min_dimension,
            )  # fmt: skip
            if pipeline is None:
                yield layout
                continue
            segments = pipeline.segments
            layout = with_pipeline(layout, pipeline, model, assumed_length_of(config)).without_chunks
            for count in segment_counts(layout, length) if segments == "auto" else (segments,):
                yield replace(layout, segments=count)


def _rows(config: CuboidConfig, replicas: int) -> tuple[int, int]:
    """Rows of a micro-batch and micro-batches of a step, for one replica; 0 rows if the batch doesn't divide evenly."""
    numbers = config.framework
    rows, steps = numbers.per_replica(replicas)
    if config.tensor_parallel.is_sized:
        return rows or (0 if numbers.batch else _ASSUMED_ROWS), steps
    return (rows if rows is not None and rows * steps * replicas == numbers.batch else 0), steps


def _mode(config: CuboidConfig) -> CheckpointingMode | None:
    """What the config's own checkpointing recomputes; None if it is left to the script."""
    section = config.activation_checkpointing
    return None if section is None or section.mode == "none" else section.mode


def _fastest(
    model: ModelDescription, layouts: list[Layout], cluster: Cluster, length: int, mode: CheckpointingMode | None
) -> tuple[Estimate, ...]:
    """The fastest layouts with the config's checkpointing.

    If the config has none, those without, or, if none fits without, with any.
    """
    known: dict[Any, Any] = {}
    what = f"{model.name} with {length} tokens on {cluster}"

    def costs(checkpointing: CheckpointingMode, *, on_host: bool = False) -> Iterator[StepCost]:
        for layout in layouts:
            one = replace(layout, checkpointing=checkpointing, on_host=layout.on_host or on_host)
            # Sequences are padded to a multiple of this, and every segment has at least one multiple.
            padded = padded_length(length, math.lcm(layout.mesh.sequence, layout.mesh.hidden))
            padded = max(padded, layout.segments * math.lcm(layout.mesh.sequence, layout.mesh.hidden))
            yield StepCost(model, one, cluster, padded, cuboid_software(one), known=known)

    def sets() -> Iterator[Iterator[StepCost]]:
        if mode is not None:
            yield costs(mode)
            return
        yield costs("none")
        yield itertools.chain(costs("attention"), costs("layers"))
        yield itertools.chain(costs("attention", on_host=True), costs("layers", on_host=True))

    return best_of(sets(), what).best


def _nothing_divides(name: str, config: CuboidConfig, cluster: Cluster) -> str:
    numbers, settings = config.framework, config.tensor_parallel
    if settings.is_sized:
        return (
            f"no mesh of tensor_parallel.size = {settings.mesh_size} ranks fits {name} and "
            f"train_micro_batch_size_per_gpu = {numbers.micro_batch}; a multiple of {settings.mesh_size} rows always "
            "does"
        )
    return (
        f"no mesh divides {name}, the {cluster.gpus} ranks of {cluster} and train_batch_size = {numbers.batch} rows in "
        f"{numbers.accumulation or 1} gradient_accumulation_steps; try a batch with more divisors, or name the mesh"
    )


def _said(layout: Layout) -> str:
    section = json.dumps(checkpointing_section(layout))
    return f', with "activation_checkpointing": {section}, without which nothing fits'


def _log(estimates: tuple[Estimate, ...], config: CuboidConfig, length: int) -> None:
    """Log on rank 0 which mesh was chosen, and why."""
    if current_rank() != 0:
        return
    best = estimates[0]
    runners_up = "; ".join(f"{estimate.layout.mesh} with {estimate.layout.replicas} replicas: {reason(estimate, best)}"
                       for estimate in estimates[1:3])  # fmt: skip
    _logger.warning(
        '"mesh": "auto" is %s with %d replicas, for micro-batches of %d rows of %d tokens%s on %s: %.3g s a step, %.1f '
        "GiB a rank%s%s%s%s",
        best.layout.mesh, best.layout.replicas, best.layout.micro_batch, length, _assumed(config), best.cost.cluster,
        best.time.total_s, best.memory_bytes / 2**30,
        f", for {best.cost.model.trunk}" if best.cost.model.trunk else "",
        _said(best.layout) if _mode(config) is None and best.layout.recomputes else "",
        f". Behind it: {runners_up}" if runners_up else "",
        f". Not counted: {uncounted}" if (uncounted := best.uncounted) else "",
    )  # fmt: skip
