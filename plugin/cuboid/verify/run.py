"""Run a plan on both sides and compare the outcomes."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from transformers import PreTrainedModel

from cuboid.config.compatibility import check_framework_config
from cuboid.config.config_file import ConfigSource, load_config
from cuboid.config.schema import CuboidConfig, PipelineConfig, parse_config, require_config, split_config
from cuboid.distributed.topology import Topology
from cuboid.errors import ConfigError, CuboidError
from cuboid.models.architectures.certificate import LABELLED, BatchKind
from cuboid.models.certification.certificates import certificate_of
from cuboid.models.certification.mesh_certificates import mesh_verdict
from cuboid.models.kinds.registry import check_class, kind_of_class
from cuboid.verify.adapter import check_adapter
from cuboid.verify.compare import KINDS, ComparedKind, allow_rounding, compare, own_checks
from cuboid.verify.noise import compare_noisy
from cuboid.verify.plan import Plan, covering_plan
from cuboid.verify.reference import run_reference
from cuboid.verify.report import Pass, PassReport, Report
from cuboid.verify.sharded import run_core, run_engine
from cuboid.verify.storage import read, read_parts
from cuboid.verify.task_inputs import paddings
from cuboid.verify.training import RunOutcome
from cuboid.verify.workers.pool import WorkerError, WorkerPool
from cuboid.weights.resolve import settle

#: Instead of ``"auto"``: one that is neither the first nor the last.
_SEGMENTS = 3
#: Sections of a user's DeepSpeed config that affect what the engine computes or how it stores state. Others (schedules,
#: monitors, checkpoints, logging) are left out of a comparison.
_ENGINE_KEYS = (
    "deterministic",
    "tensor_parallel",
    "pipeline",
    "lora",
    "zero_optimization",
    "gradient_clipping",
    "prescale_gradients",
    "communication_data_type",
)


def verify(
    plan: Plan,
    config: ConfigSource,
    *,
    passes: Sequence[Pass] = ("core", "engine"),
    tolerance: float | None = None,
    pool: WorkerPool | None = None,
    timeout_s: float = 600.0,
) -> Report:
    """Run the same batches through plain transformers and through Cuboid, in local processes, and compare.

    Args:
        plan: model, batches and optimizer.
        config: a DeepSpeed config (path or dict) with Cuboid's keys. The engine pass also takes ZeRO, clipping and
            AdamW's hyperparameters from it, and computes in float32, or in bfloat16 if the plan does.
        passes: ``"core"`` is Cuboid with torch's own optimizer; ``"engine"`` is ``deepspeed.initialize``.
        tolerance: the largest error that passes, instead of :func:`default_tolerance`, of :func:`allow_rounding` for
            what fails in float32, or, in bfloat16, of the tolerances of :mod:`cuboid.verify.noise`.
        pool: processes for the core pass; by default a new pool. The engine pass always starts new processes.
        timeout_s: for each run of each side.

    Raises:
        CuboidError: the config is invalid, or the model isn't supported with it.
        WorkerError: a process failed for another reason.
    """
    try:
        return _verify(plan, config, passes, tolerance, pool, timeout_s)
    except WorkerError as error:
        if error.explanation is None:
            raise
        raise CuboidError(error.explanation) from error


def _verify(
    plan: Plan,
    config: ConfigSource,
    passes: Sequence[Pass],
    tolerance: float | None,
    pool: WorkerPool | None,
    timeout_s: float,
) -> Report:
    loaded = load_config(config)
    if plan.adapter is None:
        # All parameters are compared.
        loaded.pop("lora", None)
    elif isinstance(loaded.get("lora"), dict):
        # On weights as they are.
        loaded["lora"].pop("load_in_4bit", None)
    ours, rest = require_config(loaded)
    check_adapter(plan)
    if ours.tensor_parallel.fp8 is not None:
        raise ConfigError(
            "tensor_parallel.fp8 rounds what plain transformers doesn't round, so that there is nothing to compare it "
            "with; leave it out, and all else of the config is compared"
        )
    if ours.pipeline is not None:
        loaded["pipeline"]["trace"] = False
        # Skips certification: this comparison is the stronger test, and works for models that can't be certified
        # because they can't be probed without their weights.
        loaded["pipeline"]["certification"] = "verified"
    plan = complete(
        plan, ours.pipeline, has_mesh=not ours.tensor_parallel.is_sized or ours.tensor_parallel.mesh_size > 1
    )
    ours = _with_segments(_with_places(ours, plan, loaded), plan, loaded)
    world_size = ours.ranks * plan.data_parallel
    check_framework_config(ours, rest, world_size)
    with _pool(pool, world_size) as workers:
        return Report([_run(name, plan, loaded, workers, world_size, tolerance, timeout_s) for name in passes])


def _with_segments(config: CuboidConfig, plan: Plan, loaded: dict[str, Any]) -> CuboidConfig:
    """Cut sequences where training may; returned, and set in ``loaded`` too.

    For a plan's short rows, ``"segments": "auto"`` would choose one segment, which tests nothing that cuts.
    """
    if config.pipeline is None or config.pipeline.segments != "auto":
        return config
    model = plan.empty_model()
    verdict = certificate_of(type(model), model.config).verdict
    if verdict is None or verdict.reason_against("segments") is not None:
        return config
    loaded["pipeline"]["segments"] = _SEGMENTS
    return config.with_pipeline(config.pipeline.model_copy(update={"segments": _SEGMENTS}))


def _with_places(config: CuboidConfig, plan: Plan, loaded: dict[str, Any]) -> CuboidConfig:
    """Choose a schedule, and with it the placement of stages, as training would; returned, and set in ``loaded`` too.

    Chosen here, because the plan runs other numbers of rows and micro-batches than the config has.
    """
    if config.pipeline is None or config.pipeline.is_settled:
        return config
    if config.framework.accumulation is None and config.framework.batch is None:
        numbers = config.framework.model_copy(update={"accumulation": plan.accumulate})
        config = config.model_copy(update={"framework": numbers})
    model = plan.empty_model()
    _, config = settle(model, config)
    assert config.pipeline is not None
    settled = config.pipeline
    loaded["pipeline"].update(schedule=settled.schedule, chunks=settled.chunks)
    if isinstance(settled.stage_balance, tuple):
        loaded["pipeline"]["stage_balance"] = list(settled.stage_balance)
    return config


def complete(plan: Plan, pipeline: PipelineConfig | None, *, has_mesh: bool = False) -> Plan:
    """Choose the plan's micro-batches if it leaves them open, and drop inputs that the model doesn't support.

    Kinds of micro-batches that are known to give wrong results with the architecture aren't chosen.

    Raises:
        CuboidError: the plan asks for something that a pipeline doesn't support.
    """
    if pipeline is not None:
        if plan.mean_over != "tokens":
            raise CuboidError(f"mean_over is {plan.mean_over!r}, but a pipeline's loss is the mean over tokens")
        if isinstance(pipeline.partition, tuple) and plan.sequence_length is None:
            plan = dataclasses.replace(plan, sequence_length=sum(pipeline.partition))
    chooses = plan.is_default
    if chooses:
        plan = dataclasses.replace(plan, **covering_plan(plan.stored_config()))
    model = plan.empty_model()
    check_class(type(model), stages=pipeline is not None)
    is_causal = kind_of_class(type(model)).is_causal
    if not is_causal and pipeline is None:
        plan = dataclasses.replace(plan, mean_over="micro_batches")
    if is_causal and pipeline is not None:
        # A loss that doesn't shift labels is one of transformers' older ones, of decoders made to follow an encoder. It
        # takes no num_items_in_batch.
        plan = dataclasses.replace(plan, counts_items=certificate_of(type(model), model.config).shifts_labels)
    if chooses:
        plan = plan.without(_refused(model, pipeline, has_mesh=has_mesh))
    if pipeline is not None and model.config._attn_implementation == "eager":
        # With eager attention, positions of left padding attend to all positions, later ones too. In a pipeline, a
        # segment runs before the keys of later segments exist.
        plan = plan.without_left_padding()
    # Only causal models find the boundaries of packed sequences in position ids.
    takes = inspect.signature(type(model).forward).parameters
    return plan if "position_ids" in takes and is_causal else plan.without_positions()


def _refused(model: PreTrainedModel, pipeline: PipelineConfig | None, *, has_mesh: bool) -> dict[BatchKind, str]:
    """Kinds of micro-batches that are known to give wrong results with the architecture, and why."""
    cls, reasons = type(model), dict[BatchKind, str]()
    if has_mesh:
        reasons |= mesh_verdict(cls, model.config).refused
    if pipeline is not None:
        certificate = certificate_of(cls, model.config)
        for mode in certificate.modes(is_cut=pipeline.segments != 1, is_filled=has_mesh):
            reasons |= {} if certificate.verdict is None else certificate.verdict.refused.get(mode, {})
    # Plain rows are compared in any case, since that is what verification is for; and a plan's padding has no labels.
    return {kind: reason for kind, reason in reasons.items() if kind not in ("whole rows", *LABELLED.values())}


def default_tolerance(plan: Plan) -> float:
    """The largest relative error that rounding can explain, in float64 and float32.

    It is 1e-9 with float64 throughout, and 1e-6 with Hugging Face's own casts to float32. Measurements are in
    docs/verify.md.
    """
    if plan.dtype == "float64":
        return 1e-9 if plan.keep_float64 else 1e-6
    return 1e-5


def engine_plan_of(plan: Plan, config: Mapping[str, Any]) -> Plan:
    """The plan of the engine pass: DeepSpeed's precision and loss mean, and the config's clipping and AdamW."""
    parameters = (config.get("optimizer") or {}).get("params") or {}
    settings = {
        "learning_rate": parameters.get("lr"),
        "betas": parameters.get("betas"),
        "weight_decay": parameters.get("weight_decay"),
        "clipping": config.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT),
    }
    # "auto" is for the Hugging Face Trainer to fill in; here the plan's value counts.
    known = {name: value for name, value in settings.items() if value is not None and value != "auto"}
    if "betas" in known:
        known["betas"] = tuple(known["betas"])
    ours, _ = split_config(config)
    return dataclasses.replace(
        plan,
        dtype="bfloat16" if plan.dtype == "bfloat16" else "float32",
        keep_float64=False,
        mean_over="micro_batches" if ours is None or ours.pipeline is None else "tokens",
        **known,
    )


def engine_config_of(plan: Plan, config: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's config: the relevant sections of the user's, and the plan's own numbers."""
    return {
        **{key: config[key] for key in _ENGINE_KEYS if key in config},
        "train_micro_batch_size_per_gpu": plan.batch,
        "gradient_accumulation_steps": plan.accumulate,
        "bf16": {"enabled": plan.dtype == "bfloat16"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": plan.learning_rate,
                "betas": list(plan.betas),
                "eps": plan.epsilon,
                "weight_decay": plan.weight_decay,
                # The reference's optimizer; DeepSpeed's own Adam would have to be compiled first.
                "torch_adam": True,
            },
        },
        "steps_per_print": 2**31,
    }


def _run(
    name: Pass,
    plan: Plan,
    config: dict[str, Any],
    pool: WorkerPool,
    world_size: int,
    tolerance: float | None,
    timeout_s: float,
) -> PassReport:
    if name == "engine":
        plan = engine_plan_of(plan, config)
        job, settings = run_engine, engine_config_of(plan, config)
    else:
        job, settings = run_core, config
    half = plan.dtype == "bfloat16"
    # DeepSpeed keeps global state about its world, so that the engine pass needs processes of its own.
    with (
        tempfile.TemporaryDirectory(prefix="cuboid-", ignore_cleanup_errors=True) as directory,
        pool.fresh() if name == "engine" else contextlib.nullcontext(pool) as ranks,
    ):
        root = Path(directory)
        plans = {"reference": dataclasses.replace(plan, dtype="float32", rounded=True) if half else plan}
        if half:
            plans["plain"] = plan
        for side, side_plan in plans.items():
            pool.run(1, run_reference, side_plan, _made(root / side), name == "engine", timeout_s=timeout_s)
        mesh = ranks.run(world_size, job, plan, settings, _made(root / "cuboid"), timeout_s=timeout_s)[0]
        pipeline = parse_config(config).pipeline
        topology = Topology(mesh, world_size, 1 if pipeline is None else pipeline.stages)
        report = judge(
            name,
            plan,
            topology,
            root / "reference",
            root / "cuboid",
            plain=root / "plain" if half else None,
            tolerance=tolerance,
            pipeline=pipeline,
        )
        if report.passed or plan.dtype != "float32" or tolerance is not None:
            return report
        # Some models amplify rounding (long recurrences do), so what fails is compared with plain float32's own error.
        exact = dataclasses.replace(plan, dtype="float64", keep_float64=True)
        try:
            pool.run(1, run_reference, exact, _made(root / "exact"), name == "engine", timeout_s=timeout_s)
        except WorkerError as error:
            if error.explanation is None:
                raise
            return report  # it doesn't run in float64
        rounding = compare(
            read(root / "exact"), read(root / "reference"), default_tolerance(plan), padding=paddings(plan)
        )
        return dataclasses.replace(report, checks=allow_rounding(report.checks, rounding))


def judge(
    name: Pass,
    plan: Plan,
    topology: Topology,
    reference: Path,
    sharded: Path,
    *,
    plain: Path | None = None,
    tolerance: float | None = None,
    pipeline: PipelineConfig | None = None,
) -> PassReport:
    """Compare the outcomes that the two sides wrote.

    Args:
        name, plan: the pass, and the run that both sides made.
        topology: of the ranks that wrote ``sharded``.
        reference, sharded: the jobs' directories.
        plain: directory of plain transformers in half precision, if that is the plan's.
        tolerance: the largest error that passes, instead of that for the precision.
        pipeline: its config, if there is one.
    """
    theirs, ours = read(reference), read(sharded)
    padding: list[torch.Tensor] = []
    if name == "core":
        ours.activations = read_parts(sharded, topology, plan.case(0).length)
        padding = paddings(plan)
    kinds = _kinds(name, ours, pipeline)
    largest = tolerance
    if plain is not None and tolerance is None:
        checks = compare_noisy(theirs, read(plain), ours, kinds=kinds, padding=padding)
    else:
        largest = default_tolerance(plan) if tolerance is None else tolerance
        checks = compare(theirs, ours, largest, kinds=kinds, padding=padding)
    checks += own_checks(ours)
    return PassReport(
        name=name,
        plan=plan,
        mesh=topology.shape,
        pipeline=pipeline,
        tolerance=largest,
        losses=(theirs.losses, ours.losses),
        norms=(theirs.norms, ours.norms),
        checks=checks,
    )


def _kinds(name: Pass, ours: RunOutcome, pipeline: PipelineConfig | None) -> list[ComparedKind]:
    """The kinds that a pass compares."""
    if name == "engine":
        # In float32 without ZeRO, there is a norm only if the engine clips.
        return ["loss", "norm", "moment", "weight"] if ours.norms else ["loss", "moment", "weight"]
    # A pipeline computes logits segment by segment, and never returns them.
    left_out = {"moment"} if pipeline is None else {"moment", "logits"}
    return [kind for kind in KINDS if kind not in left_out]


def _made(directory: Path) -> str:
    directory.mkdir()
    return str(directory)


@contextlib.contextmanager
def _pool(pool: WorkerPool | None, size: int) -> Iterator[WorkerPool]:
    if pool is not None:
        yield pool
        return
    with WorkerPool(size) as new_pool:
        yield new_pool
