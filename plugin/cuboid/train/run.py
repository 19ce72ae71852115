"""``cuboid train`` from end to end: load sharded, train, evaluate, save, report. Every rank runs it."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import cuboid
from cuboid import CuboidError, UnsupportedModelError
from cuboid.checkpoint.format.folder import sweep
from cuboid.checkpoint.run_lock import RunLock, held
from cuboid.data.batches import Share
from cuboid.data.tokens import TOKENS, check_size, remove_leftovers
from cuboid.data.training_data import TrainingData, training_data
from cuboid.failures.interrupts import Interrupts, StopCause
from cuboid.failures.launched_world import World, gather
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.integrations.callbacks.interrupt import InterruptCallback
from cuboid.integrations.callbacks.loss_guard import LossGuardCallback
from cuboid.integrations.callbacks.metrics import MetricsCallback
from cuboid.integrations.callbacks.progress import RunProgressCallback
from cuboid.integrations.callbacks.utilization import step_flops
from cuboid.integrations.run_report.figures import make_report
from cuboid.integrations.run_report.schema import CURVE, REPORT, TrainReport
from cuboid.models.sharded.sharded_model import sharding_of
from cuboid.models.stages.stage_model import StageModel
from cuboid.planner.description.meta_model import meta_model
from cuboid.train.checkpoints import RunCheckpoints
from cuboid.train.job import TrainJob, TrainOptions, check_options, plan
from cuboid.train.run_folder import BLOCKS, CHECKPOINTS, MODEL, WRITING
from cuboid.train.trainer import EVALUATED, RunTrainer, training_arguments

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
                # Before any rank of this run writes there.
                remove_leftovers(options.out / TOKENS)
                sweep(options.out / CHECKPOINTS)
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
    data = training_data(
        options.data,
        mixed=options.mixed,
        evaluated=options.eval_data,
        sequence_length=options.sequence_length,
        heldout_blocks=options.heldout_blocks,
        global_batch=global_batch,
        seed=options.seed,
        tokenizer=job.tokenizer,
        vocabulary=job.vocabulary,
        out=options.out,
        world=world,
    )
    if job.resumed is not None:
        job.resumed.reject_differences(data_fingerprint=data.fingerprint)
    _check_counts(model, data)
    if world.is_first:
        options.out.mkdir(parents=True, exist_ok=True)
        # If this run fails, an earlier one's report must not be taken for its own.
        (options.out / REPORT).unlink(missing_ok=True)
    trainer, checkpoints, say = _trainer(job, model, data, share, device, started, lock, interrupts)
    # The ranks of a mesh need the same seed (its dropout layers derive different masks from it); replicas and stages
    # need different ones. The trainer has set another one when it was made.
    torch.manual_seed(options.seed + mesh.coordinate.pipe * mesh.topology.data + mesh.coordinate.data)
    trainer.train()
    engine = trainer.model_wrapped
    if interrupts.stop is not None and not checkpoints.is_finished:
        is_written = engine.wait_for_checkpoint()
        return Stopped(interrupts.stop, checkpoints.step, job.steps, checkpoints.latest if is_written else None)
    interrupts.defer(lambda: say("saving the result; Ctrl-C once more ends it at once"))
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
        train_losses=checkpoints.losses,
        heldout=checkpoints.heldout,
        tokens_per_step=global_batch * options.sequence_length,
        times=checkpoints.times,
        wall_s=checkpoints.wall_s,
        sent_bytes=checkpoints.sent_bytes,
        trainer_args=job.trainer_args,
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


class RunProgress(RunProgressCallback):
    """Names the held-out loss."""

    def evaluation_text(self, step: int, losses: Mapping[str, float]) -> str:
        """The line of an evaluation."""
        (_, loss), *others = losses.items()
        more = "".join(f", {name.removeprefix(EVALUATED).removesuffix('_loss')} {other:.4f}" for name, other in others)
        return f"held-out loss after {step} steps: {loss:.4f}{more}"


def _say_hosts(mesh: cuboid.Mesh, progress: RunProgressCallback) -> None:
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


def _trainer(
    job: TrainJob,
    model: PreTrainedModel,
    data: TrainingData,
    share: Share,
    device: torch.device,
    started: float,
    lock: RunLock | None,
    interrupts: Interrupts,
) -> tuple[RunTrainer, RunCheckpoints, Callable[[str], None]]:
    """The trainer of a run and its record, and what prints a line; collective."""
    options, global_batch, mesh = job.options, job.global_batch(share.replicas), cuboid.mesh_of(model)
    tokens = global_batch * options.sequence_length
    progress = RunProgress(options.log_every_s, tokens_per_step=tokens, shown=mesh.rank == 0)
    metrics = MetricsCallback(
        tokens_per_step=tokens,
        step_flops=functools.partial(_step_flops, job, share.replicas),
        prefix=EVALUATED,
        say=progress.say,
    )
    guard = LossGuardCallback(options.on_bad_loss, spike=options.loss_spike, say=progress.say)
    interrupt = InterruptCallback(options.max_time_s, exits=False, saves=False, interrupts=interrupts, say=progress.say)
    checkpoints = RunCheckpoints(
        job, data, global_batch, started, lock, progress=progress, metrics=metrics, guard=guard, interrupt=interrupt
    )
    _say_hosts(mesh, progress)
    trainer = RunTrainer(
        model,
        training_arguments(job, device, use_cache=bool(getattr(model.config, "use_cache", False))),
        data,
        share,
        run=checkpoints,
        interrupt=interrupt,
        guard=guard,
        others=[metrics, progress],
    )
    return trainer, checkpoints, progress.say


def _step_flops(job: TrainJob, replicas: int) -> float | None:
    """FLOPs of a step, without recomputation; None if the model's operations aren't known."""
    try:
        model = meta_model(job.model_config)
    except UnsupportedModelError:
        return None
    return step_flops(model, job.options.sequence_length, job.global_batch(replicas))
