"""The job from end to end: load sharded, train, hold out, save, report. Every rank runs it."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import deepspeed
import numpy as np
import torch

import cuboid
from cuboid import CuboidError
from cuboid.train import memory
from cuboid.train.batches import Blocks, Share, Shuffle, heldout_blocks
from cuboid.train.corpus import read_corpus
from cuboid.train.driver import Driver, MicroBatchDriver, PipelineDriver
from cuboid.train.figures import own_parameters, pipeline_figures, rank_figures
from cuboid.train.job import Job, TrainOptions, check_size, check_tokens, plan
from cuboid.train.loop import History, Loop
from cuboid.train.progress import TrainProgress
from cuboid.train.report import (
    BLOCKS,
    CURVE,
    MODEL,
    REPORT,
    Losses,
    MeshSizes,
    Report,
    Speed,
    versions,
)
from cuboid.train.tokens import Tokens, tokenize
from cuboid.train.world import World, agree, gather


def run(options: TrainOptions, world: World) -> Report:
    """Train on all ranks of the launcher's world and leave model, curve and report in ``options.out``.

    Collective.

    Raises:
        CuboidError: the user's to mend. Raised on every rank, and before the process group wherever it can be
            known then.
    """
    started = time.perf_counter()
    job = plan(options)
    model = cuboid.from_pretrained(str(options.model), job.config, dtype=job.dtype)
    share = _share(job, cuboid.mesh_of(model))
    if job.tokens is not None:
        check_size(job.tokens.meta, options.sequence_length, job.global_batch(share.replicas))
    device = world.connect()
    tokens = job.tokens or _tokenize(job, share, world, device)
    _clear(options.out, world)
    torch.manual_seed(_dropout_seed(options.seed, cuboid.mesh_of(model)))
    engine, *_ = deepspeed.initialize(model=model, config=copy.deepcopy(job.config))
    loop = _loop(job, engine, tokens, share, device)
    with TrainProgress(job.steps, shown=world.is_first) as progress:
        history = loop.run(job.steps, options.evaluations, progress)
    cuboid.save_pretrained(engine, str(options.out / MODEL))
    report = _report(job, loop, history, tokens, world, device, started)
    if world.is_first:
        from cuboid.train.curve import draw  # the other ranks have no use for matplotlib, which takes a second

        job.tokenizer.save_pretrained(options.out / MODEL)
        np.save(options.out / BLOCKS, loop.heldout.numpy(), allow_pickle=False)
        draw(report, options.out / CURVE)
        report.write(options.out)
    return report


def _dropout_seed(seed: int, mesh: cuboid.Mesh) -> int:
    """Alike within a mesh, which divides the masks itself; another one for each replica and each stage."""
    return seed + mesh.coordinate.pipe * mesh.topology.data + mesh.coordinate.data


def _share(job: Job, mesh: cuboid.Mesh) -> Share:
    return Share(mesh.coordinate.data, mesh.topology.data, job.micro_batch)


def _tokenize(job: Job, share: Share, world: World, device: torch.device) -> Tokens:
    """Tokenize the text once on each machine; the other ranks wait and map the same files."""
    failure: CuboidError | None = None
    folder = job.options.out / "tokens"
    if world.local_rank == 0:
        try:
            tokens = tokenize(read_corpus(job.options.data), job.tokenizer, folder)
            check_tokens(tokens.meta, job.tokenizer, job.vocabulary)
            check_size(tokens.meta, job.options.sequence_length, job.global_batch(share.replicas))
        except CuboidError as error:
            failure = error
        except OSError as error:
            failure = CuboidError(f"--out {str(job.options.out)!r} can't be written: {error}")
    agree(failure, world, device)
    return Tokens.open(folder)


def _clear(out: Path, world: World) -> None:
    # A report that an earlier run left there must not be taken for this one's, should this one fail.
    if world.is_first:
        out.mkdir(parents=True, exist_ok=True)
        (out / REPORT).unlink(missing_ok=True)


def _loop(job: Job, engine: object, tokens: Tokens, share: Share, device: torch.device) -> Loop:
    length = job.options.sequence_length
    blocks = Blocks(tokens.stream("train"), length)
    heldout = heldout_blocks(Blocks(tokens.stream("heldout"), length), job.options.heldout_blocks)
    shuffle = Shuffle(len(blocks), job.options.seed)
    driver: Driver = MicroBatchDriver(engine, device)
    if job.has_pipeline:
        driver = PipelineDriver(engine, device, job.accumulation)
    return Loop(engine, driver, blocks, heldout, shuffle, share, job.accumulation)


def _report(
    job: Job, loop: Loop, history: History, tokens: Tokens, world: World, device: torch.device, started: float
) -> Report:
    mesh = cuboid.mesh_of(loop.engine)
    shape, options = mesh.shape, job.options
    return Report(
        model=str(options.model),
        data=tokens.meta.source,
        device=str(device),
        dtype=str(job.dtype).removeprefix("torch."),
        world_size=world.size,
        mesh=MeshSizes(
            batch=shape.batch, sequence=shape.sequence, hidden=shape.hidden, data_parallel=loop.share.replicas
        ),
        pipeline=pipeline_figures(job, loop.engine) if job.has_pipeline else None,
        steps=job.steps,
        seed=options.seed,
        sequence_length=options.sequence_length,
        micro_batch=job.micro_batch,
        gradient_accumulation=job.accumulation,
        losses=Losses(
            first=history.losses[0],
            last=history.losses[-1],
            heldout_first=history.heldout[0].loss,
            heldout_last=history.heldout[-1].loss,
        ),
        speed=Speed(
            tokens=loop.tokens_per_step * job.steps,
            tokens_per_s=loop.tokens_per_step / history.mean_step_s,
            step_s=history.mean_step_s,
            wall_s=time.perf_counter() - started,
        ),
        parameters=sum(gather(own_parameters(loop.engine), world)) // loop.share.replicas,
        memory_kind=memory.kind(),
        ranks=gather(rank_figures(loop.engine, history.sent_bytes), world),
        train_losses=history.losses,
        heldout_losses=history.heldout,
        config=job.config,
        versions=versions(),
    )
