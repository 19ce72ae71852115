"""What Cuboid costs where it splits nothing: a training step on a mesh of 1×1×1, beside the same step without it.

python benchmarks/overhead.py [--engines plain deepspeed] …
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from harness import freshness, llama
from harness.case import Case
from harness.llama import Llama
from harness.rounds import Record, Sample, check_equal, count_disturbed, run_rounds, spread, undisturbed_rounds
from harness.tables import Column, Row, Table, percent, ranged
from harness.watch import Watch, pin

import cuboid
from cuboid.errors import CuboidError
from cuboid_patches.deepspeed import SHARED_MEMORY_BUILD

_LEARNING_RATE = 1e-4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PEERS = {"plain": "Hugging Face", "deepspeed": "DeepSpeed"}
#: How far two losses, and the gradients' difference as a part of the gradients, may be apart.
AGREEMENT = {"float32": 1e-5, "bfloat16": 2e-2}
WORKLOAD = Llama()
QUICK = Llama(batch=2, length=64, hidden=64, intermediate=96, heads=4, layers=2, vocabulary=128)


class Training:
    """Forward, backward and AdamW of the workload's batch; under Cuboid where there is a section of a config for it."""

    def __init__(self, workload: Llama, engine: str, dtype: str, section: Row) -> None:
        self._ids, model = workload.tokens(), workload.model()
        if engine == "plain":
            self._model = model.to(DTYPES[dtype])
            if section:
                self._model = cuboid.shard(model, {**section, "train_micro_batch_size_per_gpu": workload.batch})
            self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=_LEARNING_RATE)
            self._backward, self._update = torch.Tensor.backward, self._update_plain
            return
        SHARED_MEMORY_BUILD.skip()  # it takes half a minute, and one process has nobody to share with
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": workload.batch,
            "optimizer": {"type": "AdamW", "params": {"lr": _LEARNING_RATE, "torch_adam": True}},
            "gradient_clipping": 0.0,  # it would clip at 1 by default
            "steps_per_print": 10**9,
            **section,
        }
        if dtype == "bfloat16":
            config |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
        self._model, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        self._backward, self._update = self._model.backward, self._model.step
        # ZeRO wraps the optimizer that changes the weights.
        self._optimizer = self._model.optimizer
        while not isinstance(self._optimizer, torch.optim.Optimizer) or hasattr(self._optimizer, "optimizer"):
            self._optimizer = self._optimizer.optimizer

    def _update_plain(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step(self) -> torch.Tensor:
        """Forward, backward and AdamW; the loss."""
        loss: torch.Tensor = self._model(input_ids=self._ids, labels=self._ids, use_cache=False).loss
        self._backward(loss)
        self._update()
        return loss.detach()

    def first(self) -> tuple[float, torch.Tensor]:
        """The loss, and what the optimizer is given, end to end in float64; and a second step, to warm up."""
        noted: list[torch.Tensor] = []

        def note(*_: object) -> None:
            for group in self._optimizer.param_groups:
                noted.extend(p.grad.double().flatten() for p in group["params"] if p.grad is not None)

        hook = self._optimizer.register_step_pre_hook(note)
        loss = self.step().item()
        hook.remove()
        self.step()
        return loss, torch.cat(noted)

    def sample(self, watch: Watch) -> Sample:
        """A step, timed."""
        # What one training leaves to be collected, the other one mustn't pay for.
        gc.collect()
        watch.start()
        start_s, computing_s = time.perf_counter(), time.process_time()
        self.step()
        computing_s = time.process_time() - computing_s
        return Sample(time.perf_counter() - start_s, computing_s, watch.share())


class Overhead(Case):
    """Both trainings are in one process; losses and all gradients of their first steps must agree."""

    name = "overhead"
    sources = freshness.MESHES + freshness.LOSS + freshness.ENGINE
    repeats = 20
    unit = "rounds"
    cores = "one core of {cores}"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--engines", nargs="+", choices=list(PEERS), default=list(PEERS))

    def measure(self, args: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        workload, core = QUICK if args.quick else WORKLOAD, pin(0)
        result.update(workload=workload.numbers(), core=core)
        # A world of one, in which Cuboid makes no group. DeepSpeed wants it, and whoever launches to have said so.
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            watch = Watch(args.limit, core)
            for dtype, engine in product(DTYPES, args.engines):
                result["rows"].append(_compare(engine, dtype, workload, args.repeats, watch))
                write()
        finally:
            dist.destroy_process_group()

    def setting(self, result: Row) -> list[str]:
        sizes = result["workload"]
        return [f"Model: {llama.described(sizes)}; {sizes['batch']} rows of {sizes['length']} tokens."]

    def tables(self, result: Row) -> list[Table]:
        columns = [
            Column("training", lambda row: row["name"], "l"),
            Column("dtype", lambda row: row["dtype"], "l"),
            Column("without, s", lambda row: ranged(row["plain_s"], 3)),
            Column("with, s", lambda row: ranged(row["cuboid_s"], 3)),
            Column("overhead", lambda row: percent(row["ratio"], "+.1%", base=1, bold=True)),
            Column("by processor time", lambda row: percent(row["ratio_processor"], "+.1%", base=1)),
            Column("losses differ", lambda row: f"{row['loss_difference']:.0e}"),
            Column("gradients differ", lambda row: f"{row['gradient_difference']:.0e}"),
        ]
        return [Table(columns, result["rows"])]


def _compare(engine: str, dtype: str, workload: Llama, repeats: int, watch: Watch) -> Row:
    """A row of two trainings, without Cuboid and with it."""
    name = f"{PEERS[engine]} with Cuboid"
    ours = {"tensor_parallel": workload.section("1x1x1", 1)}
    both = {key: Training(workload, engine, dtype, section) for key, section in (("plain", {}), ("cuboid", ours))}
    loss, gradients = differences(
        f"{name}, {dtype}", *(training.first() for training in both.values()), AGREEMENT[dtype]
    )
    records = [Record(key, key) for key in both]
    run_rounds(records, repeats, watch, lambda record: both[record.entry].sample(watch))
    both.clear()
    gc.collect()
    rounds = undisturbed_rounds(records)
    return {
        "name": name,
        "dtype": dtype,
        "loss_difference": loss,
        "gradient_difference": gradients,
        "plain_s": spread([plain.step_s for plain, _ in rounds]),
        "cuboid_s": spread([ours.step_s for _, ours in rounds]),
        "ratio": spread([ours.step_s / plain.step_s for plain, ours in rounds]),
        "ratio_processor": spread([ours.computing_s / plain.computing_s for plain, ours in rounds]),
        **count_disturbed(records),
        "samples": {record.entry: [sample.numbers() for sample in record.samples] for record in records},
    }


def differences(
    name: str, plain: tuple[float, torch.Tensor], ours: tuple[float, torch.Tensor], allowed: float
) -> tuple[float, float]:
    """Relative ones of losses and of gradients, norm of the difference by norm; refused where they are too large."""
    loss = check_equal(name, {"loss": ours[0]}, "the same without it", {"loss": plain[0]}, allowed)
    if plain[1].shape != ours[1].shape:
        raise CuboidError(f"{name}: {ours[1].numel()} elements have gradients, but {plain[1].numel()} without it")
    gradients = ((ours[1] - plain[1]).norm() / plain[1].norm()).item()
    if not gradients <= allowed:
        raise CuboidError(f"{name}: gradients are {gradients:.1e} away from those without it: they differ")
    return loss, gradients


CASE = Overhead()

if __name__ == "__main__":
    sys.exit(CASE.main())
