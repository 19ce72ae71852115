"""Run a plan on both sides and compare."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cuboid.config import ConfigSource, load_config, parse_config
from cuboid.topology import Topology
from cuboid.verify.compare import compare
from cuboid.verify.plan import Plan
from cuboid.verify.reference import run_reference
from cuboid.verify.report import Pass, PassReport, Report
from cuboid.verify.sharded import run_core, run_engine
from cuboid.verify.storage import read, read_parts
from cuboid.verify.workers import WorkerPool

#: Sections of a user's DeepSpeed config that change what the engine computes or keeps. All else (schedules, monitors,
#: checkpoints, logging) stays out of a comparison.
_ENGINE_KEYS = (
    "tensor_parallel",
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
        ConfigError, MeshError, UnsupportedModelError: the config, or the model on that mesh, isn't possible.
        WorkerError: a process failed.
    """
    loaded = load_config(config)
    world_size = parse_config(loaded).tensor_parallel.mesh_size * plan.data_parallel
    reports = []
    with _pool(pool, world_size) as workers:
        if "core" in passes:
            reports.append(_run_core(plan, loaded, workers, world_size, tolerance, timeout_s))
        if "engine" in passes:
            engine_plan = engine_plan_of(plan, loaded)
            reports.append(_run_engine(engine_plan, loaded, workers, world_size, tolerance, timeout_s))
    return Report(reports)


def default_tolerance(plan: Plan) -> float:
    """The largest relative error that rounding explains.

    Float64 throughout leaves 1e-9; where Hugging Face's own casts to float32 are kept, 1e-6.
    """
    if plan.dtype == "float64":
        return 1e-9 if plan.keep_float64 else 1e-6
    return {"float32": 1e-5, "bfloat16": 5e-2}[plan.dtype]


def engine_plan_of(plan: Plan, config: Mapping[str, Any]) -> Plan:
    """The plan of the engine pass: DeepSpeed's precision and mean, and the config's clipping and AdamW."""
    parameters = dict(config.get("optimizer", {}).get("params", {}))
    given = {
        "learning_rate": parameters.get("lr"),
        "betas": tuple(parameters["betas"]) if "betas" in parameters else None,
        "weight_decay": parameters.get("weight_decay"),
        "clipping": config.get("gradient_clipping"),
    }
    return dataclasses.replace(
        plan,
        dtype="bfloat16" if plan.dtype == "bfloat16" else "float32",
        keep_float64=False,
        mean_over="micro_batches",
        **{name: value for name, value in given.items() if value is not None and value != "auto"},
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


def _run_core(
    plan: Plan, config: dict[str, Any], pool: WorkerPool, world_size: int, tolerance: float | None, timeout_s: float
) -> PassReport:
    with _directories() as (reference, sharded):
        pool.run(1, run_reference, plan, str(reference), timeout_s=timeout_s)
        mesh = pool.run(world_size, run_core, plan, config, str(sharded), timeout_s=timeout_s)[0]
        return _compared("core", plan, Topology(mesh, world_size), reference, sharded, tolerance)


def _run_engine(
    plan: Plan, config: dict[str, Any], pool: WorkerPool, world_size: int, tolerance: float | None, timeout_s: float
) -> PassReport:
    settings = engine_config_of(plan, config)
    with _directories() as (reference, sharded), WorkerPool(world_size) as fresh:
        pool.run(1, run_reference, plan, str(reference), timeout_s=timeout_s)
        mesh = fresh.run(world_size, run_engine, plan, settings, str(sharded), timeout_s=timeout_s)[0]
        return _compared("engine", plan, Topology(mesh, world_size), reference, sharded, tolerance)


def _compared(
    name: Pass, plan: Plan, topology: Topology, reference: Path, sharded: Path, tolerance: float | None
) -> PassReport:
    theirs, ours = read(reference), read(sharded)
    padding = None
    if name == "core":
        ours.activations = read_parts(sharded, topology, plan.sequence_length)
        vocabulary = theirs.logits["logits"].shape[-1]
        padding = plan.micro_batches(0, 0, vocabulary)[0]["attention_mask"] == 0
    largest = default_tolerance(plan) if tolerance is None else tolerance
    return PassReport(
        name=name,
        plan=plan,
        mesh=topology.shape,
        tolerance=largest,
        losses=(theirs.losses, ours.losses),
        norms=(theirs.norms, ours.norms),
        checks=compare(theirs, ours, largest, padding),
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
