"""``cuboid train`` from end to end: load sharded, train, evaluate, save, report. Every rank runs it."""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Callable, Mapping
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
from cuboid.failures.interrupts import STOPPING, Interrupts, StopCause
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.integrations.callbacks.loss_guard import LossGuardCallback
from cuboid.integrations.callbacks.metrics_file import METRICS, MetricsFile
from cuboid.integrations.callbacks.utilization import peak_of_all_ranks, step_flops
from cuboid.integrations.deepspeed.engine import CuboidEngine
from cuboid.planner.description.meta_model import meta_model
from cuboid.train.checkpoints import RunCheckpoints
from cuboid.train.data.batches import Blocks, Share, Shuffle, heldout_blocks
from cuboid.train.data.corpus import Corpus, all_held_out, read_corpus
from cuboid.train.data.tokens import TOKENS, TokenFolder, TokensMeta, tokenize
from cuboid.train.figures import make_report
from cuboid.train.job import (
    TrainJob,
    TrainOptions,
    check_evaluated_size,
    check_options,
    check_size,
    check_tokens,
    plan,
)
from cuboid.train.loop import History, Loop, RunLength
from cuboid.train.process import World, gather, run_at_length
from cuboid.train.reporting.progress import TrainProgress
from cuboid.train.reporting.report import BLOCKS, CHECKPOINTS, CURVE, MODEL, REPORT, WRITING, TrainReport

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
    tokens = job.tokens or _tokenize(job, share, world)
    evaluated = {name: _evaluated_tokens(job, name, path, world) for name, path in options.eval_data}
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
        loop = _loop(job, engine, interrupts, tokens, evaluated, share, device, metrics)
        _say_hosts(mesh, progress)
        guard = LossGuardCallback(options.on_bad_loss, spike=options.loss_spike, say=progress.say)
        guard.watch(engine)
        checkpoints, history = RunCheckpoints(
            engine=engine,
            job=job,
            data=tokens.meta,
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
    report = make_report(checkpoints, loop, history, world, device)
    if world.is_first:
        # Imported here, because matplotlib takes a second and only rank 0 needs it.
        from cuboid.train.reporting.curve import draw

        job.tokenizer.save_pretrained(options.out / MODEL)
        np.save(options.out / BLOCKS, loop.heldout.numpy(), allow_pickle=False)
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


def _tokenize(job: TrainJob, share: Share, world: World) -> TokenFolder:
    """Tokenize the text to train on."""

    def check(meta: TokensMeta) -> None:
        check_tokens(meta, job.tokenizer, job.vocabulary)
        check_size(meta, job.options.sequence_length, job.global_batch(share.replicas))
        if job.resumed is not None:
            job.resumed.reject_differences(data_fingerprint=meta.data_sha256)

    return _tokenize_into(job.options.out / TOKENS, lambda: read_corpus(job.options.data), check, job, world)


def _evaluated_tokens(job: TrainJob, name: str, path: Path, world: World) -> TokenFolder:
    """The tokens of a text to evaluate, all of which are held out; collective."""

    def check(meta: TokensMeta) -> None:
        check_tokens(meta, job.tokenizer, job.vocabulary)
        check_evaluated_size(meta, name, job.options.sequence_length)

    if TokenFolder.is_store(path):
        folder = TokenFolder.open(path)
        check(folder.meta)
        return folder
    return _tokenize_into(job.options.out / TOKENS / name, lambda: all_held_out(read_corpus(path)), check, job, world)


def _tokenize_into(
    folder: Path, read: Callable[[], Corpus], check: Callable[[TokensMeta], None], job: TrainJob, world: World
) -> TokenFolder:
    """Tokenize a text once per machine; its other ranks wait, and memory-map the same files."""

    def write() -> None:
        corpus = read()
        try:
            tokenize(corpus, job.tokenizer, folder, check)
        except OSError as error:
            raise CuboidError(f"--out {str(job.options.out)!r} can't be written: {error}") from error

    # One rank per machine, since the machines may not share a file system.
    run_at_length(write if world.local_rank == 0 else None, world, what="tokenizing the data")
    return TokenFolder.open(folder)


def _loop(
    job: TrainJob,
    engine: CuboidEngine,
    interrupts: Interrupts,
    tokens: TokenFolder,
    evaluated: Mapping[str, TokenFolder],
    share: Share,
    device: torch.device,
    metrics: MetricsFile,
) -> Loop:
    length = job.options.sequence_length
    blocks = Blocks(tokens.stream("train"), length)
    heldout, *others = (
        heldout_blocks(Blocks(folder.stream("heldout"), length), job.options.heldout_blocks)
        for folder in (tokens, *evaluated.values())
    )
    shuffle = Shuffle(len(blocks), job.options.seed)
    peak = peak_of_all_ranks(device, job.dtype) if metrics.is_written else None
    return Loop(
        engine=engine,
        interrupts=interrupts,
        blocks=blocks,
        heldout=heldout,
        evaluated=dict(zip(evaluated, others, strict=True)),
        shuffle=shuffle,
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
