"""``cuboid train`` from end to end: load sharded, train, evaluate, save, report. Every rank runs it."""

from __future__ import annotations

import copy
import functools
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import cuboid
from cuboid import CuboidError, UnsupportedModelError
from cuboid.checkpoint.run_lock import RunLock, held
from cuboid.data.batches import Share
from cuboid.data.tokens import TOKENS, check_size, remove_leftovers
from cuboid.failures.interrupts import STOPPING, Interrupts, StopCause
from cuboid.failures.launched_world import World, gather
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.integrations.callbacks.loss_guard import LossGuardCallback
from cuboid.integrations.callbacks.metrics_file import METRICS, MetricsFile
from cuboid.integrations.callbacks.progress import TrainProgress
from cuboid.integrations.callbacks.utilization import peak_of_all_ranks, step_flops
from cuboid.integrations.deepspeed.engine import CuboidEngine
from cuboid.integrations.run_report.figures import make_report
from cuboid.integrations.run_report.schema import CURVE, REPORT, TrainReport
from cuboid.models.sharded.sharded_model import sharding_of
from cuboid.models.stages.stage_model import StageModel
from cuboid.planner.description.meta_model import meta_model
from cuboid.train.checkpoints import RunCheckpoints
from cuboid.train.job import TrainJob, TrainOptions, check_options, plan
from cuboid.train.loop import History, Loop, RunLength
from cuboid.train.run_folder import BLOCKS, CHECKPOINTS, MODEL, WRITING
from cuboid.train.training_data import TrainingData, training_data

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stopped:
    """A run that was stopped by a signal or the end of its time, after ``step`` of its optimizer ``steps``."""

    by: StopCause
    step: int
    steps: int
    #: To resume from; None if there was nothing to save, or it could not be written.
    checkpoint: Path | None


def run(options: TrainOptions, world: World, interrupts: Interrupts) -> TrainReport | Stopped:
    """Train on all ranks of the launcher's world; model, curve and report go to ``options.out``. Collective.

    If the ranks are asked to stop, they write a checkpoint there instead.

    Raises:
        CuboidError: on every rank; before the process group is created, if the cause can be found by then.
    """

    def locked() -> TrainReport | Stopped:
        check_options(options)
        with ExitStack() as stack:
            # Before it is decided what to resume, so that nobody writes there from then on.
            lock = stack.enter_context(held(options.out, "cuboid train", logger.warning)) if world.is_first else None
            if lock is not None:
                # Before any rank of this run may write tokens.
                remove_leftovers(options.out / TOKENS)
            return _run(options, world, interrupts, lock)

    return run_on_all_ranks(locked, what="cuboid train")


def _run(options: TrainOptions, world: World, interrupts: Interrupts, lock: RunLock | None) -> TrainReport | Stopped:
    started = time.perf_counter()
    job = plan(options)
    model = _model(job)
    mesh = cuboid.mesh_of(model)
    share = Share(mesh.coordinate.data, mesh.topology.data, job.micro_batch)
    global_batch = job.global_batch(share.replicas)
    if job.resumed is not None:
        job.resumed.reject_differences(global_batch=global_batch)
    if job.tokens is not None:
        check_size(job.tokens.meta, options.sequence_length, global_batch)
    device = world.connect()
    _check_resumed_alike(job, world)
    data = training_data(job, global_batch, world)
    _check_counts(model, data)
    if world.is_first:
        options.out.mkdir(parents=True, exist_ok=True)
        # If this run fails, an earlier one's report must not be taken for its own.
        (options.out / REPORT).unlink(missing_ok=True)
    # The ranks of a mesh need the same seed (its dropout layers derive different masks from it); replicas and stages
    # need different ones.
    torch.manual_seed(options.seed + mesh.coordinate.pipe * mesh.topology.data + mesh.coordinate.data)
    engine, *_ = deepspeed.initialize(model=model, config=copy.deepcopy(job.config))
    done = 0 if job.resumed is None else job.resumed.state.step
    with TrainProgress(job.steps, world.is_first, options.log_every_s, done) as progress:
        metrics = MetricsFile(options.out / METRICS, progress.say, mesh, is_written=world.is_first)
        loop = _loop(job, engine, interrupts, data, share, device, metrics)
        _say_hosts(mesh, progress)
        guard = LossGuardCallback(options.on_bad_loss, spike=options.loss_spike, say=progress.say)
        guard.watch(engine)
        checkpoints, history = RunCheckpoints(
            engine=engine,
            job=job,
            data=data,
            global_batch=global_batch,
            started=started,
            progress=progress,
            metrics=metrics,
            lock=lock,
            guard=guard,
        ).begin()
        if world.is_first and options.max_time_s is not None:
            interrupts.is_late = functools.partial(history.times.is_late, options.max_time_s)
        interrupts.defer(lambda: progress.say(STOPPING))
        run_length = RunLength(job.steps, options.evaluations, options.save_every or 0, checkpoints.save)
        loop.run(run_length, history, progress)
        if interrupts.stop is not None and not run_length.is_reached(history):
            return _stop(interrupts.stop, checkpoints, history)
        interrupts.defer(lambda: progress.say("saving the result; Ctrl-C once more ends it at once"))
        engine.wait_for_checkpoint()
    checkpoints.check_lock()
    if world.is_first:
        (options.out / WRITING).touch()
    cuboid.save_pretrained(engine, str(options.out / MODEL))
    report = make_report(
        engine,
        model=str(options.architecture),
        data=data.source,
        config=job.config,
        steps=job.steps,
        resumed_after=checkpoints.resumed_after,
        seed=options.seed,
        sequence_length=options.sequence_length,
        train_losses=history.losses,
        heldout=history.heldout,
        tokens_per_step=loop.tokens_per_step,
        times=history.times,
        wall_s=checkpoints.wall_s,
        sent_bytes=history.sent_bytes,
    )
    if world.is_first:
        # Imported here, because matplotlib takes a second and only rank 0 needs it.
        from cuboid.integrations.run_report.curve import draw

        job.tokenizer.save_pretrained(options.out / MODEL)
        np.save(options.out / BLOCKS, data.heldout.numpy(), allow_pickle=False)
        draw(report, options.out / CURVE)
        report.write(options.out)
        (options.out / WRITING).unlink()
    return report


def _say_hosts(mesh: cuboid.Mesh, progress: TrainProgress) -> None:
    """Say on which axes bytes leave the hosts, if there are several."""
    count = len(set(mesh.nodes))
    if count > 1:
        crossing, staying = mesh.topology.axes_between(mesh.nodes)
        inside = f"; {', '.join(staying)} stay inside" if staying else ""
        progress.say(f"{count} hosts: {', '.join(crossing)} cross them{inside}")


def _check_resumed_alike(job: TrainJob, world: World) -> None:
    """Raise an error unless all ranks found the same checkpoint to resume from, or none; collective."""
    checkpoints = gather(None if job.resumed is None else job.resumed.path.name, world)
    other_rank = next((rank for rank, name in enumerate(checkpoints) if name != checkpoints[0]), None)
    if other_rank is not None:
        first_name, other_name = (name or "no checkpoint" for name in (checkpoints[0], checkpoints[other_rank]))
        raise CuboidError(
            f"rank 0 finds {first_name} to resume from in {job.options.out / CHECKPOINTS}, and rank {other_rank} finds "
            f"{other_name}: --out has to be on a file system that all hosts share"
        )


def _model(job: TrainJob) -> PreTrainedModel:
    """Load the checkpoint, or initialize a new model from the seed, with the same weights on every layout."""
    options = {"auto_class": AutoModelForCausalLM, "dtype": job.dtype}
    options["trust_remote_code"] = job.options.trust_remote_code
    if job.options.model is not None:
        return cuboid.from_pretrained(str(job.options.model), job.config, **options)
    torch.manual_seed(job.options.seed)
    return cuboid.from_config(job.model_config, job.config, **options)


def _stop(by: StopCause, checkpoints: RunCheckpoints, history: History) -> Stopped:
    """Write a checkpoint, unless the run was resumed from one of this step; collective."""
    resumed = checkpoints.job.resumed
    checkpoint = None if resumed is None else resumed.path
    if history.step > (0 if resumed is None else resumed.state.step):
        checkpoint = checkpoints.save(history)
        if not checkpoints.engine.wait_for_checkpoint():
            checkpoint = None
    return Stopped(by, history.step, checkpoints.job.steps, checkpoint)


def _check_counts(model: PreTrainedModel, data: TrainingData) -> None:
    """Check that every label can count alike.

    Raises:
        CuboidError: there may be more of them in one micro-batch than in another, and the model only has means of each.
    """
    sharding = sharding_of(model)
    if data.has_unlearned and not isinstance(model, StageModel) and not sharding.verdict.counts_items:
        raise CuboidError(
            f"{data.source} has tokens that aren't to be learned, so that micro-batches have more labels or fewer, and "
            f"the loss of {type(model).__name__} is the mean over each micro-batch's; train it in a pipeline, which "
            "counts all labels alike (pipeline.engine seq1f1b, also with stages 1)"
        )


def _loop(
    job: TrainJob,
    engine: CuboidEngine,
    interrupts: Interrupts,
    data: TrainingData,
    share: Share,
    device: torch.device,
    metrics: MetricsFile,
) -> Loop:
    peak = peak_of_all_ranks(device, job.dtype) if metrics.is_written else None
    return Loop(
        engine=engine,
        interrupts=interrupts,
        data=data,
        share=share,
        accumulation=job.accumulation,
        metrics=metrics,
        # Describing the model takes a while, and only an MFU needs it.
        step_flops=None if peak is None else _step_flops(job, share.replicas),
        peak_flops=peak,
    )


def _step_flops(job: TrainJob, replicas: int) -> float | None:
    """FLOPs of a step, without recomputation; None if the model's operations aren't known."""
    try:
        model = meta_model(job.model_config)
    except UnsupportedModelError:
        return None
    return step_flops(model, job.options.sequence_length, job.global_batch(replicas))
