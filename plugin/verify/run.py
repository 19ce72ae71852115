"""Run a plan on both sides and compare."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from transformers import AutoModelForCausalLM

from cuboid.compatibility import check_framework_config
from cuboid.config import PipelineConfig, parse_config, require_config, split_config
from cuboid.config_file import ConfigSource, load_config
from cuboid.errors import CuboidError
from cuboid.topology import Topology
from cuboid.verify.compare import KINDS, Kind, compare
from cuboid.verify.plan import Plan
from cuboid.verify.reference import run_reference
from cuboid.verify.report import Pass, PassReport, Report
from cuboid.verify.sharded import run_core, run_engine
from cuboid.verify.storage import read, read_parts
from cuboid.verify.workers import WorkerError, WorkerPool

#: Sections of a user's DeepSpeed config that change what the engine computes or keeps. All else (schedules, monitors,
#: checkpoints, logging) stays out of a comparison.
_ENGINE_KEYS = (
    "tensor_parallel",
    "pipeline",
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
            AdamW's numbers from it, and computes in float32, or in bfloat16 where the plan does.
        passes: ``"core"`` is Cuboid under torch's own optimizer; ``"engine"`` is ``deepspeed.initialize``.
        tolerance: the largest error that passes, in place of :func:`default_tolerance`.
        pool: processes to use for the core pass; by default a pool of its own. The engine needs fresh ones.
        timeout_s: for each run of each side.

    Raises:
        CuboidError: the config, or the model on that mesh, isn't possible.
        WorkerError: a process failed in another way.
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
    ours, rest = require_config(loaded)
    if ours.pipeline is not None:
        loaded["pipeline"]["trace"] = False
        plan = _for_pipeline(plan)
    world_size = ours.ranks * plan.data_parallel
    check_framework_config(ours, rest, world_size)
    with _pool(pool, world_size) as workers:
        return Report([_run(name, plan, loaded, workers, world_size, tolerance, timeout_s) for name in passes])


def _for_pipeline(plan: Plan) -> Plan:
    """The plan without what pipelines refuse."""
    if plan.mean_over != "tokens":
        raise CuboidError(f"mean_over is {plan.mean_over!r}, but a pipeline's loss is the mean over tokens")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plan.model_config())
    # Under eager attention, padding on the left sees all positions alike, later ones too.
    return dataclasses.replace(plan, left_padding=plan.left_padding and model.config._attn_implementation != "eager")


def default_tolerance(plan: Plan) -> float:
    """The largest relative error that rounding explains.

    Float64 throughout leaves 1e-9; where Hugging Face's own casts to float32 are kept, 1e-6. See docs/verify.md for
    what is measured.
    """
    if plan.dtype == "float64":
        return 1e-9 if plan.keep_float64 else 1e-6
    return {"float32": 1e-5, "bfloat16": 1e-1}[plan.dtype]


def engine_plan_of(plan: Plan, config: Mapping[str, Any]) -> Plan:
    """The plan of the engine pass: DeepSpeed's precision and mean, and the config's clipping and AdamW."""
    parameters = (config.get("optimizer") or {}).get("params") or {}
    given = {
        "learning_rate": parameters.get("lr"),
        "betas": parameters.get("betas"),
        "weight_decay": parameters.get("weight_decay"),
        "clipping": config.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT),
    }
    # The HF Trainer fills in "auto"; here the plan does.
    known = {name: value for name, value in given.items() if value is not None and value != "auto"}
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
    """What of a user's config the engine is given, and the plan's own numbers."""
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
    with _directories() as (reference, sharded), _pool(pool if name == "core" else None, world_size) as ranks:
        pool.run(1, run_reference, plan, str(reference), timeout_s=timeout_s)
        mesh = ranks.run(world_size, job, plan, settings, str(sharded), timeout_s=timeout_s)[0]
        pipeline = parse_config(config).pipeline
        topology = Topology(mesh, world_size, 1 if pipeline is None else pipeline.stages)
        return judge(name, plan, topology, reference, sharded, tolerance=tolerance, pipeline=pipeline)


def judge(
    name: Pass,
    plan: Plan,
    topology: Topology,
    reference: Path,
    sharded: Path,
    *,
    tolerance: float | None = None,
    pipeline: PipelineConfig | None = None,
) -> PassReport:
    """Compare what the two sides wrote.

    Args:
        name, plan: the pass, and what both sides ran.
        topology: of the ranks that wrote ``sharded``.
        reference, sharded: directories that the jobs were given.
        tolerance: the largest error that passes, in place of :func:`default_tolerance`.
        pipeline: what the stages and segments were, if there were any.
    """
    theirs, ours = read(reference), read(sharded)
    largest = default_tolerance(plan) if tolerance is None else tolerance
    if name == "core":
        ours.activations = read_parts(sharded, topology, plan.sequence_length)
        probed = plan.micro_batches(0, 0, vocabulary=theirs.logits["logits"].shape[-1])[0]
        padding = probed["attention_mask"] == 0 if "attention_mask" in probed else None
        # A pipeline never has the logits in one place.
        core_kinds = tuple(kind for kind in KINDS if kind != "logits" or pipeline is None)
        checks = compare(theirs, ours, largest, kinds=core_kinds, padding=padding)
    else:
        kinds: tuple[Kind, ...] = ("loss", "norm", "weight") if ours.norms else ("loss", "weight")
        checks = compare(theirs, ours, largest, kinds=kinds)
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


@contextlib.contextmanager
def _pool(given: WorkerPool | None, size: int) -> Iterator[WorkerPool]:
    if given is not None:
        yield given
        return
    with WorkerPool(size) as own:
        yield own


@contextlib.contextmanager
def _directories() -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory(prefix="cuboid-") as root:
        reference, sharded = Path(root, "reference"), Path(root, "cuboid")
        reference.mkdir()
        sharded.mkdir()
        yield reference, sharded
