"""What Cuboid costs where it splits nothing: a training step on a mesh of 1×1×1, beside the same step without it.

python benchmarks/overhead.py [--dtypes float32 bfloat16] [--engines plain deepspeed] [--profile] …
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from harness import freshness, pictures
from harness.case import Case, chosen
from harness.llama import Llama
from harness.rounds import Record, Sample, run_rounds, spread, undisturbed_rounds
from harness.tables import Column, Row, Table, percent, ranged
from harness.watch import Watch, pin
from torch.profiler import ProfilerActivity, profile

import cuboid
from cuboid.errors import CuboidError
from cuboid_patches.deepspeed import SHARED_MEMORY_BUILD

_LEARNING_RATE = 1e-4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: How far two losses, and the gradients' difference as a part of the gradients, may be apart.
AGREEMENT = {"float32": 1e-5, "bfloat16": 2e-2}
WORKLOAD = Llama()
#: In a few seconds, to see whether everything works. The times say nothing.
QUICK = Llama(batch=2, length=64, hidden=64, intermediate=96, heads=4, layers=2, vocabulary=128)
#: Steps that are profiled together, and operators that are told of.
_PROFILED_STEPS, _OPERATORS = 3, 12
#: In a profile, what isn't any operator's: Python, mostly.
OUTSIDE = "outside of operators"


@dataclasses.dataclass(frozen=True)
class Entry:
    """Which training takes part.

    Args:
        engine: "plain" for PyTorch's own optimizer, or "deepspeed".
        has_cuboid: on a mesh of 1×1×1, or not at all.
        dtype: of :data:`DTYPES`.
    """

    engine: str
    has_cuboid: bool
    dtype: str

    @property
    def name(self) -> str:
        """As it stands in tables."""
        peer = {"plain": "Hugging Face", "deepspeed": "DeepSpeed"}[self.engine]
        return f"{peer} with Cuboid" if self.has_cuboid else peer


class Training:
    """One training: forward, backward and AdamW of the workload's batch."""

    def __init__(self, entry: Entry, workload: Llama) -> None:
        self._ids = workload.tokens()
        section = {"tensor_parallel": workload.section("1x1x1", 1)} if entry.has_cuboid else {}
        model: Any = workload.model()
        if entry.engine == "plain":
            model = model.to(DTYPES[entry.dtype])
            if entry.has_cuboid:
                model = cuboid.shard(model, {**section, "train_micro_batch_size_per_gpu": workload.batch})
            self._optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
            self._model, self._backward, self._update = model, torch.Tensor.backward, self._update_plain
            return
        SHARED_MEMORY_BUILD.skip()  # it takes half a minute, and one process has nobody to share with
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": workload.batch,
            "optimizer": {"type": "AdamW", "params": {"lr": _LEARNING_RATE, "torch_adam": True}},
            "gradient_clipping": 0.0,  # it would clip at 1 by default
            "steps_per_print": 10**9,
            **section,
        }
        if entry.dtype == "bfloat16":
            config |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        # ZeRO wraps the optimizer that changes the weights.
        optimizer = engine.optimizer
        while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        self._model, self._backward, self._update, self._optimizer = engine, engine.backward, engine.step, optimizer

    def step(self) -> torch.Tensor:
        """Forward, backward and AdamW; the loss."""
        loss: torch.Tensor = self._model(input_ids=self._ids, labels=self._ids, use_cache=False).loss
        self._backward(loss)
        self._update()
        return loss.detach()

    def _update_plain(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def first(self) -> tuple[float, torch.Tensor]:
        """The loss, and what the optimizer is given, end to end in float64."""
        noted: list[torch.Tensor] = []

        def note(*_: object) -> None:
            for group in self._optimizer.param_groups:
                noted.extend(p.grad.double().flatten() for p in group["params"] if p.grad is not None)

        hook = self._optimizer.register_step_pre_hook(note)
        loss = self.step().item()
        hook.remove()
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

    def profile(self) -> dict[str, tuple[float, float]]:
        """Seconds of a step in each operator, without those that it calls, and its calls; and what is left."""
        start_s = time.perf_counter()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(_PROFILED_STEPS):
                self.step()
            whole_s = (time.perf_counter() - start_s) / _PROFILED_STEPS
        shares = {
            event.key: (event.self_cpu_time_total / 1e6 / _PROFILED_STEPS, event.count / _PROFILED_STEPS)
            for event in profiler.key_averages()
        }
        return {**shares, OUTSIDE: (whole_s - sum(seconds for seconds, _ in shares.values()), 1)}


class Overhead(Case):
    """One process on one core, without any network. Both trainings are of the same small Llama in the same process, and
    each has a step in every round; losses and all gradients of their first steps must agree.
    """

    name = part = "overhead"
    picture = "How much longer a step takes with Cuboid on a mesh of 1×1×1"
    sources = freshness.MESHES + freshness.LOSS + freshness.ENGINE
    repeats = 20
    unit = "rounds"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
        parser.add_argument("--engines", nargs="+", choices=["plain", "deepspeed"], default=["plain", "deepspeed"])
        parser.add_argument("--profile", action="store_true", help="say which operators take the difference")

    def measure(self, given: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        workload, core = QUICK if given.quick else WORKLOAD, pin(0)
        result.update(workload={**workload.numbers(), "model": "LlamaForCausalLM"}, core=core)
        # Or the profiler writes of each start and stop.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        # A world of one, in which Cuboid makes no group. DeepSpeed wants it, and whoever launches to have said so.
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        try:
            watch = Watch(given.limit, core)
            pairs = [Entry(engine, True, dtype) for dtype in given.dtypes for engine in given.engines]
            for ours in chosen(given, pairs, lambda entry: f"{entry.name}, {entry.dtype}"):
                pair = [dataclasses.replace(ours, has_cuboid=False), ours]
                result["rows"].append(_compare(pair, workload, given, watch))
                write()
        finally:
            dist.destroy_process_group()

    def facts(self, result: Row) -> list[str]:
        return [self.machine(result, "one core of {}"), model_fact(result["workload"]) + ".", self.command(result)]

    def remarks(self, result: Row) -> list[str]:
        return self.busy(result) + (
            ["Processes can't be kept on a core here, so all of the machine was watched."]
            if result["core"] is None
            else []
        )

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
        by_operator = [
            Column("operator", lambda each: f"`{each['operator']}`", "l"),
            *(
                Column(f"{title}, ms", lambda each, key=key: f"{each[key]['seconds'] * 1e3:.1f}")
                for title, key in (("without", "plain"), ("with", "cuboid"))
            ),
            Column("more", lambda each: f"{(each['cuboid']['seconds'] - each['plain']['seconds']) * 1e3:+.1f}"),
            Column("calls without", lambda each: f"{each['plain']['calls']:.0f}"),
            Column("calls with", lambda each: f"{each['cuboid']['calls']:.0f}"),
        ]
        return [
            Table(columns, result["rows"]),
            *(
                Table(by_operator, row["profile"], f"{row['name']}, {row['dtype']}, what differs most by the profiler")
                for row in result["rows"]
                if row["profile"]
            ),
        ]

    def draw(self, result: Row, folder: Path) -> list[Path]:
        """Bars of the overhead, with quartiles."""
        rows, path = result["rows"], folder / "overhead.png"
        figure, ((axes,),) = pictures.panels(8, 1.2 + 0.5 * len(rows))
        for place, row in enumerate(rows):
            more = {key: (row["ratio"][key] - 1) * 100 for key in ("low", "median", "high")}
            colour = {"float32": pictures.BLUE, "bfloat16": pictures.CYAN}[row["dtype"]]
            pictures.bar(axes, place, more, colour, height=0.6)
        axes.axvline(0, color="black", linewidth=0.8)
        names = [f"{row['name']}, {row['dtype']}" for row in rows]
        pictures.finish(axes, names, "overhead of a training step with Cuboid on 1×1×1, %")
        pictures.save(figure, path)
        return [path]


def model_fact(sizes: Row) -> str:
    """A workload of a record in words, without a full stop."""
    return (
        f"Model: {sizes['model']}, {sizes['layers']} layers, hidden {sizes['hidden']}, MLP {sizes['intermediate']}, "
        f"{sizes['heads']} heads, vocabulary {sizes['vocabulary']}; {sizes['batch']} rows of {sizes['length']} tokens"
    )


def _compare(entries: list[Entry], workload: Llama, given: argparse.Namespace, watch: Watch) -> Row:
    """A row of two trainings, without Cuboid and with it.

    Raises:
        CuboidError: they don't compute the same.
    """
    built = {entry: Training(entry, workload) for entry in entries}
    first = [training.first() for training in built.values()]
    names = f"{entries[0].name} and {entries[1].name}, {entries[0].dtype}"
    loss, gradients = differences(names, *first, AGREEMENT[entries[0].dtype])
    losses = [loss for loss, _ in first]
    del first
    for training in built.values():
        training.step()
    records = [Record(entry, entry.name) for entry in entries]
    run_rounds(records, given.repeats, watch, lambda record: built[record.entry].sample(watch))
    rounds = undisturbed_rounds(records)
    profiles = [training.profile() if given.profile else {} for training in built.values()]
    built.clear()
    gc.collect()
    return {
        "name": entries[1].name,
        "dtype": entries[1].dtype,
        "loss": dict(zip(("plain", "cuboid"), losses, strict=True)),
        "loss_difference": loss,
        "gradient_difference": gradients,
        "plain_s": spread([plain.step_s for plain, _ in rounds]),
        "cuboid_s": spread([ours.step_s for _, ours in rounds]),
        "ratio": spread([ours.step_s / plain.step_s for plain, ours in rounds]),
        "ratio_processor": spread([ours.computing_s / plain.computing_s for plain, ours in rounds]),
        "undisturbed": sum(
            plain.is_quiet and ours.is_quiet
            for plain, ours in zip(*(record.samples for record in records), strict=True)
        ),
        "rejected": sum(record.rejected for record in records),
        "samples": {
            key: [sample.numbers() for sample in record.samples]
            for key, record in zip(("plain", "cuboid"), records, strict=True)
        },
        "profile": largest_differences(*profiles),
    }


def differences(
    names: str, plain: tuple[float, torch.Tensor], ours: tuple[float, torch.Tensor], allowed: float
) -> tuple[float, float]:
    """Relative ones of losses and of gradients, norm of the difference by norm.

    Raises:
        CuboidError: they are larger than is allowed.
    """
    if plain[1].shape != ours[1].shape:
        counts = f"{plain[1].numel()} and {ours[1].numel()} elements"
        raise CuboidError(f"{names}: {counts} have gradients: they don't train the same")
    loss = abs(ours[0] - plain[0]) / abs(plain[0])
    gradients = ((ours[1] - plain[1]).norm() / plain[1].norm()).item()
    for what, difference in (("losses", loss), ("gradients", gradients)):
        if not difference <= allowed:
            raise CuboidError(f"{names}: {what} are {difference:.1e} apart, more than {allowed:.0e}: they differ")
    return loss, gradients


def largest_differences(plain: dict[str, tuple[float, float]], ours: dict[str, tuple[float, float]]) -> list[Row]:
    """Operators whose time differs most, without Cuboid and with it, as rows."""
    none = (0.0, 0)
    names = sorted({**plain, **ours}, key=lambda name: -abs(ours.get(name, none)[0] - plain.get(name, none)[0]))
    return [
        {
            "operator": name,
            **{
                key: dict(zip(("seconds", "calls"), own.get(name, none), strict=True))
                for key, own in (("plain", plain), ("cuboid", ours))
            },
        }
        for name in names[:_OPERATORS]
    ]


CASE = Overhead()

if __name__ == "__main__":
    sys.exit(CASE.main())
