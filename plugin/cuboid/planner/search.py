"""``cuboid plan``: the fastest layout of a model on a cluster that fits, and why others lose to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

from cuboid.config.compatibility import check_framework_config
from cuboid.config.schema import Fp8Config, PipelineConfig, require_config
from cuboid.distributed.topology import MeshShape, divisors
from cuboid.errors import ConfigError, UnsupportedModelError
from cuboid.models.batch.length_cases import check_length
from cuboid.models.pipeline.schedule_choice import settle_schedule
from cuboid.models.stages.stage_cut import plan_stages
from cuboid.planner.cost.layout import CheckpointingMode, Layout
from cuboid.planner.cost.memory import ends_memory, states_bytes, usable_bytes
from cuboid.planner.cost.step import StepCost, StepTime
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.description.halves import sizes_with_halves
from cuboid.planner.description.model import ModelDescription
from cuboid.planner.estimate import MANY, Estimate, check_fp8, cuboid_software, segment_counts
from cuboid.planner.ranking import Goal, SearchResult, best_of, improved
from cuboid.seq1f1b.schedule.choice import CHUNKED, NAMES, check_chunks, is_generated

#: Numbers of rows for each rank of the `batch` axis that are tried.
_ROWS = (1, 2, 4, 8)
#: Schedules that are tried on the best pipelines, with the number of chunks on each rank: the first two, of which the
#: second keeps less, on all of them; the others on those that these make the fastest.
_FIRST_SCHEDULES = (("zero_bubble-interleaved", 2), ("seq1f1b-interleaved", 2))
_FURTHER_SCHEDULES = (("zero_bubble", 1), ("zero_bubble-interleaved", 4), ("zero_bubble-v", 2))
#: How many pipelines the first two are tried on: of those that are the fastest under a fixed schedule, and in all.
_GOOD_PIPELINES, _PIPELINES = 3, 6
#: How many of the latter may be looked at that don't fit.
_REFUSED_PIPELINES = 20
#: How many the others are tried on, and roughly the fraction of a bubble that they leave.
_FASTEST_PIPELINES, _BUBBLE_LEFT = 2, 0.3
#: On how many pipelines that differ from the fastest by their rows and replicas its schedule is tried: one that is
#: generated, which takes seconds, and one with a closed rule.
_SIMILAR_IF_GENERATED, _SIMILAR = 8, 200
#: The least bubble of the fastest layout, as a fraction of its step, for which other stages are tried.
_BUBBLE_WORTH_STAGES = 0.05
#: The least that other stages must gain, as a fraction of the step, and the actions that are scheduled to find them.
_STAGES_GAIN, _STAGES_ACTIONS = 0.005, 200_000
#: How many layouts with fixed schedules are found, if fewer are wanted, for their pipelines to be tried.
_FOUND = 10
#: What the config's ``activation_checkpointing.mode`` may be.
_CHECKPOINTING: dict[str, CheckpointingMode] = {"none": "none", "layers": "layers", "attention": "attention"}
_ALONE = Layout(MeshShape())
#: The config's own default of ``tensor_parallel.fp8.min_dimension``.
_FP8_MIN_DIMENSION: int = Fp8Config.model_fields["min_dimension"].default
#: A mesh whose sequence × hidden axes span more nodes than these is never fast; except for rows of so many tokens, of
#: which attention is most of the work, which no other axis divides.
_MOST_NODES_OF_MESH, _LONG_ROW, _MOST_NODES_OF_LONG_ROWS = 2, 2**19, 4

#: A placeholder in the config of a plan: the planner doesn't choose the learning rate.
LEARNING_RATE = 3e-4


def search(
    model: ModelDescription,
    cluster: Cluster,
    length: int,
    global_batch: int,
    *,
    goal: Goal = "fastest",
    count: int = 10,
    compiled: bool = False,
    fp8: bool = False,
) -> SearchResult:
    """Search the layouts that use all GPUs of a cluster; for "fewest", of the smallest part of it on which one fits.

    Layouts are sorted by a cheap bound of their cost and estimated in that order, until no other can be among the
    best. Unless the goal is "smallest", schedules that have to be simulated one by one are then tried on the pipelines
    that would be the fastest with a smaller bubble, and on the fastest of all stages with halves of layers, and those
    that ``"stage_balance": "schedule"`` finds.

    Args:
        model: what is trained.
        cluster: the machines.
        length: S, tokens of a sequence.
        global_batch: rows of a step, of all replicas together.
        goal: what is best: the shortest step, the least memory on a GPU, or the shortest step on the fewest GPUs: part
            of one node, or several whole nodes, whose number divides the cluster's.
        count: how many to return.
        compiled, fp8: what all layouts have: compiled layers, and their products in 8 bits.

    Raises:
        ConfigError: no layout divides model, batch and cluster; or none fits, and the message names a small one; or
            sequences are longer than the learned positions; or ``fp8`` isn't possible.
    """
    check_length(length, model.positions or None, "the sequence length")
    if fp8:
        check_fp8(model, cluster)
    if goal == "fewest":
        return _on_fewest(model, cluster, length, global_batch, count, compiled=compiled, fp8=fp8)
    known: dict[Any, Any] = {}

    def cost_of(layout: Layout) -> StepCost:
        return StepCost(model, layout, cluster, length, cuboid_software(layout), known=known)

    like = replace(_ALONE, compiled=compiled, fp8_min_dimension=_FP8_MIN_DIMENSION if fp8 else None)
    costs = [cost_of(layout) for layout in layouts(model, cluster, length, global_batch, like)]
    what = f"{model.name} with {length} tokens and a global batch of {global_batch} on {cluster}"
    try:
        result = best_of(
            _on_device_or_host(costs, cost_of),
            what,
            goal=goal,
            count=count if goal == "smallest" else max(count, _FOUND),
        )
    except ConfigError as error:
        refused = "; ".join(model.limits.refused(cluster.gpus))
        if not refused:
            raise
        raise ConfigError(f"{error}. Left out was what training rejects: {refused}") from None
    if goal == "smallest":
        return result
    more = _with_less_bubble(_pipelines(result.best, costs), model, cost_of, result.best[:count][-1].time)
    best = improved(result.best, more, count)
    similar = _with_same_schedule(best[0].layout, costs, cost_of, best[0].time)
    best = improved(best, similar, count)
    moved = _with_other_stages(best[0], cost_of)
    considered = result.considered + len(more) + len(similar) + len(moved)
    return SearchResult(tuple(improved(best, moved, count)), considered, result.refused)


def _on_device_or_host(
    costs: Sequence[StepCost], cost_of: Callable[[Layout], StepCost]
) -> Iterator[Sequence[StepCost]]:
    """The layouts; if none fits, those with what layers keep, then the optimizer, in host memory."""
    yield costs
    on_host = [cost_of(replace(cost.layout, on_host=True)) for cost in costs if cost.layout.recomputes]
    yield on_host
    # DeepSpeed's ZeRO moves the optimizer, and stages have none.
    movable = [cost.layout for cost in (*costs, *on_host) if cost.layout.stages == 1 and cost.layout.zero_stage]
    yield [cost_of(replace(layout, optimizer_on_host=True)) for layout in movable]


def _with_less_bubble(
    pipelines: Sequence[Layout], model: ModelDescription, cost_of: Callable[[Layout], StepCost], limit: StepTime
) -> list[Estimate]:
    """Estimates of other schedules for some pipelines, of those that may take less time than ``limit``."""

    def estimates(pipeline: Layout, schedules: Sequence[tuple[str, int]]) -> list[Estimate]:
        costs = map(cost_of, _scheduled(pipeline, schedules, model))
        return [Estimate.of(cost) for cost in costs if cost.least_s() < limit.total_s]

    def shortest_s(pipeline: Layout) -> float:
        return min((one.time.total_s for one in of_first[pipeline] if one.fits), default=math.inf)

    of_first = {pipeline: estimates(pipeline, _FIRST_SCHEDULES) for pipeline in pipelines}
    fastest = sorted(pipelines, key=shortest_s)[:_FASTEST_PIPELINES]
    # So many segments made the bubble of a fixed schedule small; one with less of it may be faster with longer units.
    halved = [replace(pipeline, segments=pipeline.segments // 2) for pipeline in fastest if pipeline.segments > MANY]
    more = [estimates(one, _FURTHER_SCHEDULES) for one in fastest]
    more += [estimates(one, (*_FIRST_SCHEDULES, *_FURTHER_SCHEDULES)) for one in halved]
    return [*chain(*of_first.values()), *chain(*more)]


def _pipelines(best: Sequence[Estimate], costs: Sequence[StepCost]) -> list[Layout]:
    """The pipelines that are the fastest under fixed schedules, and that would be with most of their bubble gone.

    Of those that differ in how ranks are divided among `batch` and replicas, and in what doesn't change the order of
    units, there is one.
    """
    chosen: dict[tuple[int, int, int], Layout] = {}
    for estimate in best:
        if estimate.layout.stages > 1 and len(chosen) < _GOOD_PIPELINES:
            chosen.setdefault(_pipeline_of(estimate.layout), estimate.layout)
    limit_s = best[-1].time.total_s
    by_time: list[tuple[float, int, StepCost]] = []
    for number, cost in enumerate(costs):
        if cost.layout.stages > 1 and states_bytes(cost) < usable_bytes(cost.cluster):
            about_s = cost.least_s() - (1 - _BUBBLE_LEFT) * cost.least_bubble_s
            if about_s < limit_s:
                by_time.append((about_s, number, cost))
    refused = 0
    for _, _, cost in sorted(by_time):
        if len(chosen) == _PIPELINES or refused == _REFUSED_PIPELINES:
            break
        # Of the variants of one pipeline, the fastest may keep more than there is memory for.
        if _pipeline_of(cost.layout) not in chosen and ends_memory(cost) <= usable_bytes(cost.cluster):
            if Estimate.of(cost).fits:
                chosen[_pipeline_of(cost.layout)] = cost.layout
            else:
                refused += 1
    return list(chosen.values())


def _pipeline_of(layout: Layout) -> tuple[int, int, int]:
    """What is the same in layouts whose units are ordered alike."""
    return layout.stages, layout.mesh.sequence, layout.mesh.hidden


def _with_same_schedule(
    fastest: Layout, costs: Iterable[StepCost], cost_of: Callable[[Layout], StepCost], limit: StepTime
) -> list[Estimate]:
    """Estimates of the fastest pipeline's schedule, of those that may take less time than ``limit``.

    They divide its ranks among `batch` and replicas in other ways, and its rows and sequences into other units.
    """
    if fastest.schedule == "seq1f1b" and not fastest.spreads_head:
        return []
    segments = {fastest.segments // 2, fastest.segments, fastest.segments * 2}
    like = {name: getattr(fastest, name) for name in ("schedule", "chunks", "spreads_head")}
    by_time: list[tuple[float, int, StepCost]] = []
    for number, layout in enumerate(cost.layout for cost in costs):
        if _pipeline_of(layout) == _pipeline_of(fastest) and layout.segments in segments:
            cost = cost_of(replace(layout, **like))
            least_s = cost.least_s()
            if least_s < limit.total_s and ends_memory(cost) <= usable_bytes(cost.cluster):
                by_time.append((least_s, number, cost))
    most = _SIMILAR_IF_GENERATED if is_generated(fastest.schedule) else _SIMILAR
    return [Estimate.of(cost) for _, _, cost in sorted(by_time)[:most]]


def _scheduled(pipeline: Layout, schedules: Iterable[tuple[str, int]], model: ModelDescription) -> Iterator[Layout]:
    """A pipeline under other schedules, with the head on its last stage, and on all of them if that is possible."""
    stages, pieces = model.limits.stages, pipeline.mesh.sequence
    spreads = stages is not None and not pipeline.moves and stages.can_spread_head(pipeline.stages, pieces)
    for schedule, chunks in schedules:
        if pipeline.stages * chunks <= len(model.layers):
            layout = replace(pipeline, schedule=schedule, chunks=chunks)
            yield layout
            if spreads and layout.may_split:
                yield replace(layout, spreads_head=True)


def _with_other_stages(fastest: Estimate, cost_of: Callable[[Layout], StepCost]) -> list[Estimate]:
    """Estimates of a pipeline with much of a bubble, with stages of halves, and with those that its schedule asks for.

    They name the number of layers of each stage, so that training needs no search.
    """
    layout, model, cost = fastest.layout, fastest.cost.model, fastest.cost
    if layout.stages == 1 or fastest.time.bubble_s < _BUBBLE_WORTH_STAGES * fastest.time.total_s:
        return []
    try:
        sizes = sizes_with_halves(model)
    except (ConfigError, UnsupportedModelError):
        # Described by its sizes alone, or its code can't be probed: stages of whole layers.
        sizes = model.sizes
    pipeline = PipelineConfig(**{**config_of(layout)["pipeline"], "stage_balance": "schedule"})
    length = cost.length
    balanced = plan_stages(len(model.layers), lambda: sizes, pipeline.with_balanced_stages, length=length)
    settled, _ = settle_schedule(
        *(pipeline, sizes, cost.lengths, layout.micro_batches),
        recomputes=layout.recomputes,
        assumed_length=length,
        actions=_STAGES_ACTIONS,
    )
    assert isinstance(settled.stage_balance, tuple)
    costs = [
        cost_of(replace(layout, stage_layers=counts)) for counts in dict.fromkeys((balanced, settled.stage_balance))
    ]
    limit_s = (1 - _STAGES_GAIN) * fastest.time.total_s
    return [estimate for one in costs if (estimate := Estimate.of(one)).time.total_s < limit_s]


def _on_fewest(
    model: ModelDescription,
    cluster: Cluster,
    length: int,
    global_batch: int,
    count: int,
    *,
    compiled: bool,
    fp8: bool,
) -> SearchResult:
    """The fastest layouts on the smallest part of the cluster on which any fits."""
    parts = [replace(cluster, nodes=1, gpus_per_node=gpus) for gpus in divisors(cluster.gpus_per_node)]
    parts += [replace(cluster, nodes=nodes) for nodes in divisors(cluster.nodes) if nodes > 1]
    for part in parts[:-1]:
        try:
            return search(model, part, length, global_batch, count=count, compiled=compiled, fp8=fp8)
        except ConfigError:
            continue
    # The whole cluster: if nothing fits here either, its error is the one to raise.
    return search(model, parts[-1], length, global_batch, count=count, compiled=compiled, fp8=fp8)


def layouts(
    model: ModelDescription, cluster: Cluster, length: int, global_batch: int, like: Layout = _ALONE
) -> Iterator[Layout]:
    """Every layout over all GPUs that divides the model, the batch and the sequence, else as ``like``."""
    for stages in divisors(cluster.gpus):
        # Each stage has at least one layer.
        for size in divisors(cluster.gpus // stages) if stages <= len(model.layers) else ():
            replicas = cluster.gpus // (stages * size)
            if global_batch % replicas:
                continue
            for mesh in MeshShape.of_size(size):
                if _is_worth_it(mesh, cluster, length) and model.limits.reason_against(mesh, stages) is None:
                    base = replace(like, mesh=mesh, stages=stages, replicas=replicas)
                    may_cut = model.limits.reason_against(mesh, stages, segments=2) is None
                    for layout in _variants(base, global_batch // replicas, length):
                        if layout.segments == 1 or may_cut:
                            yield layout


def _is_worth_it(mesh: MeshShape, cluster: Cluster, length: int) -> bool:
    """Whether a mesh cuts the sequence evenly, and its ranks of sequence × hidden are on few nodes."""
    nodes = _MOST_NODES_OF_MESH if length < _LONG_ROW else _MOST_NODES_OF_LONG_ROWS
    is_near = mesh.of("sequence", "hidden") <= nodes * cluster.gpus_per_node
    return is_near and length % math.lcm(mesh.sequence, mesh.hidden) == 0


def _variants(base: Layout, rows_of_replica: int, length: int) -> Iterator[Layout]:
    """All combinations of the other choices for one mesh with its stages and replicas."""
    batch = base.mesh.batch
    zeros = (1, 2) if base.replicas > 1 and base.stages == 1 else (1,)
    # Pairs of weight_gather and gradient_sync: only units of a pipeline can defer the reduction to the end of the step.
    gathers: list[tuple[Literal["layer", "step"], Literal["unit", "step"]]] = [("layer", "unit")]
    if batch > 1:
        gathers += [("step", "unit"), ("step", "step")] if base.stages > 1 else [("step", "unit")]
    for rows in (batch * per_rank for per_rank in _ROWS):
        if rows_of_replica % rows:
            continue
        sized = replace(base, micro_batch=rows, micro_batches=rows_of_replica // rows)
        for segments in segment_counts(sized, length):
            for gather, sync in gathers:
                for zero in zeros:
                    one = replace(
                        sized, segments=segments, weight_gather=gather, gradient_sync=sync, zero_stage=zero
                    )  # fmt: skip
                    yield one
                    yield replace(one, checkpointing="layers")
                    yield replace(one, checkpointing="attention")


# --- reasons ----------------------------------------------------------------------------------------------------


def terms(estimate: Estimate) -> dict[str, float]:
    """Seconds of a step by kind, under the names that tables use."""
    time = estimate.time
    return {
        "computing": time.compute_s,
        "communication": time.exposed_s,
        "bubble": time.bubble_s,
        "gradients of replicas": time.reduce_s,
        "optimizer": time.optimizer_s,
        "constant": time.constant_s,
    }


def reason(estimate: Estimate, best: Estimate) -> str:
    """Why a layout loses to the best one: the terms that cost it most."""
    pairs = zip(terms(estimate).items(), terms(best).values(), strict=True)
    behind = sorted(((seconds - best_seconds, name) for (name, seconds), best_seconds in pairs), reverse=True)
    worst = [(more, name) for more, name in behind if more > 0.002 * best.time.total_s][:2]
    if estimate is best:
        return "the best"
    if not worst:
        return "no slower" if estimate.time.total_s <= best.time.total_s * 1.002 else "a little of everything"
    return ", ".join(f"{more / best.time.total_s:+.1%} {name}" for more, name in worst)


def config_of(layout: Layout) -> dict[str, Any]:
    """A complete config for DeepSpeed with this layout, as :func:`cuboid.config.schema.split_config` accepts it."""
    mesh = layout.mesh
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": layout.zero_stage,
            **({"offload_optimizer": {"device": "cpu"}} if layout.optimizer_on_host else {}),
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
        },
        "tensor_parallel": {
            "mode": "3d_tensor",
            "mesh": {"batch": mesh.batch, "sequence": mesh.sequence, "hidden": mesh.hidden},
            "weight_gather": layout.weight_gather,
            **({"gradient_sync": "step"} if layout.gradient_sync == "step" else {}),
            **({"compile": True} if layout.compiled else {}),
            **({} if layout.fp8_min_dimension is None else {"fp8": fp8_section(layout.fp8_min_dimension)}),
        },
    }
    if layout.gradient_bytes is not None:
        config["data_types"] = {"grad_accum_dtype": "bf16" if layout.gradient_bytes == 2 else "fp32"}
    if layout.recomputes:
        config["activation_checkpointing"] = checkpointing_section(layout)
    if layout.stages > 1:
        config["pipeline"] = {
            "engine": "seq1f1b",
            "stages": layout.stages,
            "segments": layout.segments,
            "partition": "flops",
            **({"chunks": layout.chunks} if layout.chunks > 1 else {}),
            **({"schedule": layout.schedule} if layout.schedule != "seq1f1b" else {}),
            **({"memory_limit": layout.memory_limit} if layout.memory_limit is not None else {}),
            **({"head": "spread"} if layout.spreads_head else {}),
            **({"stage_balance": list(layout.stage_layers)} if layout.stage_layers else {}),
        }
    return config


def fp8_section(least: int) -> dict[str, Any]:
    """The config's ``fp8`` for blocks with at least so many rows and columns."""
    return {"recipe": "rowwise_with_gw_hp", **({} if least == _FP8_MIN_DIMENSION else {"min_dimension": least})}


def checkpointing_section(layout: Layout) -> dict[str, Any]:
    """The config's ``activation_checkpointing`` for a layout that recomputes layers."""
    return {"mode": layout.checkpointing, **({"cpu_checkpointing": True} if layout.moves else {})}


def parse_layout(
    text: str, cluster: Cluster, global_batch: int, *, compiled: bool = False, fp8: bool = False
) -> Layout:
    """Parse a layout as ``--explain`` takes it: a mesh and keys, joined by commas, such as ``2x4x1,stages=4``.

    Args:
        text: the mesh, then any of ``stages`` (default: 1), ``segments`` (1), ``rows`` (one for each rank of `batch`),
            ``zero`` (1), ``checkpointing`` (none, layers, or attention), ``kept`` (device, or host), ``gather`` (layer,
            or step), ``sync`` (unit, or step), ``schedule`` (seq1f1b) and ``chunks`` (2 with a schedule of several
            chunks, else 1).
        cluster, global_batch: determine the numbers of replicas and micro-batches.

    Raises:
        ConfigError: it isn't of that form, doesn't divide the cluster or the batch, or no config accepts it.
    """
    head, *options = (part.strip() for part in text.split(","))
    mesh = MeshShape.parse(head)
    values = {
        "stages": "1",
        "segments": "1",
        "rows": str(mesh.batch),
        "zero": "1",
        "checkpointing": "none",
        "kept": "device",
        "optimizer": "device",
        "gather": "layer",
        "sync": "unit",
        "schedule": "seq1f1b",
        "chunks": "0",  # as the schedule needs
    }
    for part in options:
        key, _, value = part.partition("=")
        if key not in values:
            raise ConfigError(f"layout {text!r}: {key!r} is not one of {', '.join(values)}")
        values[key] = value
    numbers = {}
    for key in ("stages", "segments", "rows", "zero", "chunks"):
        least = 1 if key in ("stages", "segments", "rows") else 0
        if not values[key].isdecimal() or int(values[key]) < least:
            raise ConfigError(f"layout {text!r}: {key}={values[key]!r} is not a number of at least {least}")
        numbers[key] = int(values[key])
    checkpointing, gather, sync = values["checkpointing"], values["gather"], values["sync"]
    if checkpointing not in _CHECKPOINTING or gather not in ("layer", "step") or sync not in ("unit", "step"):
        raise ConfigError(
            f"layout {text!r}: checkpointing is none, layers or attention, gather layer or step, and sync unit or step"
        )
    if values["kept"] not in ("device", "host") or (values["kept"] == "host" and checkpointing == "none"):
        raise ConfigError(f"layout {text!r}: kept is device, or with checkpointing=layers or =attention host")
    if values["optimizer"] not in ("device", "host") or (values["optimizer"] == "host" and numbers["stages"] > 1):
        raise ConfigError(f"layout {text!r}: optimizer is device, or without stages host")
    if sync == "step" and numbers["stages"] == 1:
        raise ConfigError(f"layout {text!r}: sync=step is for a pipeline's units; give it stages, or leave it out")
    if numbers["segments"] > 1 and numbers["stages"] == 1:
        raise ConfigError(f"layout {text!r}: segments are a pipeline's units; give it stages, or leave them out")
    schedule = values["schedule"]
    if schedule not in NAMES or (schedule != "seq1f1b" and numbers["stages"] == 1):
        raise ConfigError(f"layout {text!r}: schedule is one of {', '.join(NAMES)}, of several stages")
    chunks = numbers["chunks"] or (2 if schedule in CHUNKED else 1)
    check_chunks(schedule, chunks)
    ranks = mesh.size * numbers["stages"]
    replicas = cluster.gpus // ranks
    per_step = numbers["rows"] * max(1, replicas)
    if cluster.gpus % ranks or global_batch % per_step:
        raise ConfigError(
            f"layout {text!r}: {ranks} ranks and {numbers['rows']} rows of each replica don't divide {cluster.gpus} "
            f"GPUs and a global batch of {global_batch}"
        )
    layout = Layout(
        mesh, numbers["stages"], numbers["rows"], global_batch // per_step, replicas, numbers["segments"],
        zero_stage=numbers["zero"], checkpointing=_CHECKPOINTING[checkpointing],
        on_host=values["kept"] == "host", optimizer_on_host=values["optimizer"] == "host",
        weight_gather="step" if gather == "step" else "layer",
        gradient_sync="step" if sync == "step" else "unit",
        schedule=schedule, chunks=chunks, compiled=compiled, fp8_min_dimension=_FP8_MIN_DIMENSION if fp8 else None,
    )  # fmt: skip
    # What no config accepts can't be trained, so its time would mislead.
    try:
        check_framework_config(*require_config(config_of(layout)), cluster.gpus, is_complete=True)
    except ConfigError as error:
        raise ConfigError(f"layout {text!r}: {error}") from None
    return layout
