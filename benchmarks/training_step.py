"""A whole training step of a small Llama: Cuboid beside DeepSpeed AutoTP, Transformers' tp_plan and FSDP2 on 8 ranks.

python benchmarks/training_step.py [--network loopback|shaped] [--dtype float32|bfloat16] [--contestants KEY …] …
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# DeepSpeed looks for this when it is imported.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import clip_grad_norm_ as deepspeed_clip_grad_norm_
from deepspeed.utils import groups
from harness import freshness, links, llama, tables
from harness.case import Case
from harness.llama import AUTO, Llama
from harness.rounds import Record, check_equal
from harness.tables import MB, Column, Row, Table, known, ranged
from network.networks import open_network
from network.ranks import forked_ranks
from network.rate import Link, measure
from network.serving import Contestant
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from transformers import LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import cuboid
from cuboid.config.schema import suggestion
from cuboid.distributed.topology import MeshShape, Topology
from cuboid.errors import CuboidError
from cuboid.models.certification.float64 import precision
from cuboid.planner.cost.layout import Layout
from cuboid_patches.deepspeed import SHARED_MEMORY_BUILD

#: All contestants' processes; the global batch has a row for each, so that every layout can share it out.
RANKS = 8
#: What a user would write; a step's time doesn't depend on it.
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
#: Below the first gradient's norm, so that clipping has something to do.
CLIP = 0.1
#: Ends the key of a mesh whose gathered weights are kept for the step.
_KEPT = "-kept"


# --- who there is ---


@dataclass(frozen=True)
class Entry:
    """One contestant."""

    key: str  # what the command line and the records call it
    name: str  # for people
    family: str  # whose layouts it is one of: "cuboid", "autotp", "tp_plan" or "fsdp2"
    mesh: str = ""  # Cuboid's, or ``"auto"``
    tensor_parallel: int = 1  # ranks that share a layer (AutoTP, ``tp_plan``); the others are replicas of them
    split_head: bool = False  # whether AutoTP splits the LM head by vocabulary and computes the loss so
    reshard: bool = True  # whether Cuboid or FSDP2 frees a layer's weights between its forward and its backward
    stages: int = 1  # of Cuboid's pipeline, whose micro-batches have a row for each rank of the mesh's `batch` axis
    segments: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Cuboid's ``weight_gather``; in a pipeline that keeps weights, gradients are reduced once a step too."""
        once = {"gradient_sync": "step"} if self.stages > 1 else {}
        return {"weight_gather": "layer"} if self.reshard else {"weight_gather": "step", **once}

    def shape(self, workload: Llama, model: LlamaForCausalLM) -> MeshShape:
        return workload.shape(self.mesh, RANKS, model, self.options["weight_gather"])

    def layout(self, workload: Llama, model: LlamaForCausalLM) -> Layout:
        """For the planner."""
        mesh, zero_stage = self.shape(workload, model), int(workload.dtype == "bfloat16")
        replicas = RANKS // (mesh.size * self.stages)
        rows = workload.batch // replicas
        micro_batch = rows if self.stages == 1 else mesh.batch
        return Layout(
            mesh, self.stages, micro_batch, rows // micro_batch, replicas, self.segments, zero_stage=zero_stage,
            **self.options,
        )  # fmt: skip


def _autotp(size: int, *, split_head: bool) -> Entry:
    replicas = RANKS // size
    layout = f"TP {size}" + (f" × DP {replicas}" if replicas > 1 else "")
    head = ", head split" if split_head else ""
    key = f"autotp-{size}" + ("-head" if split_head else "")
    return Entry(key, f"DeepSpeed AutoTP, {layout}{head}", "autotp", tensor_parallel=size, split_head=split_head)


_PEERS = [
    *(_autotp(size, split_head=split_head) for size in (8, 4, 2) for split_head in (False, True)),
    Entry("tp-plan", "Transformers tp_plan, TP 8", "tp_plan", tensor_parallel=RANKS),
    Entry("fsdp2", "FSDP2, weights freed", "fsdp2"),
    Entry("fsdp2-keep", "FSDP2, weights kept", "fsdp2", reshard=False),
]
_MESHES = ["1x8x1", "1x4x2", "2x2x2", "8x1x1", f"8x1x1{_KEPT}", AUTO, f"{AUTO}{_KEPT}"]
DEFAULT = [f"cuboid-{mesh}" for mesh in _MESHES] + [entry.key for entry in _PEERS]
AUTO_KEY = f"cuboid-{AUTO}"
_CUBOID = re.compile(r"cuboid-(.+?)(?:-p(\d+)k(\d+))?(-kept)?")


def find(keys: Sequence[str], workload: Llama, model: LlamaForCausalLM) -> list[Entry]:
    """The contestants of these names; ``"auto"`` and the mesh that it chooses are one. A smaller mesh has replicas;
    ``-p2k4`` after it stands for two stages with four segments, ``-kept`` for weights that are gathered once a step."""
    peers = {entry.key: entry for entry in _PEERS}
    chosen: dict[object, Entry] = {}
    for key in keys:
        if key in peers:
            chosen[key] = peers[key]
            continue
        match = _CUBOID.fullmatch(key)
        if match is None:
            raise CuboidError(f"there is no contestant {key}; {suggestion(key, DEFAULT)}")
        mesh, stages, segments, reshard = match[1], int(match[2] or 1), int(match[3] or 1), match[4] is None
        entry = Entry(key, "", "cuboid", mesh=mesh, reshard=reshard, stages=stages, segments=segments)
        shape = entry.shape(workload, model)
        if RANKS % (shape.size * stages):
            raise CuboidError(f"contestant {key}: mesh {shape} has {shape.size} ranks, which don't divide {RANKS}")
        layout = entry.layout(workload, model)
        name = f"Cuboid, {shape}" + (f" × {stages} stages of {segments} segments" if stages > 1 else "")
        name += f" × DP {layout.replicas}" if layout.replicas > 1 else ""
        kept = ", weights kept" + (", gradients reduced once" if stages > 1 else "")
        name += ("" if reshard else kept) + (" (auto)" if mesh == AUTO else "")
        if mesh == AUTO or layout not in chosen:
            chosen[layout] = dataclasses.replace(entry, name=name)
    return list(chosen.values())


# --- what each does on a rank ---


class FirstSteps(NamedTuple):
    """What a contestant computes at first, on one rank."""

    losses: tuple[float, float]  # of the rank's rows, before and after a step
    gradient_norm: float  # of the first step, before clipping


class _Training(Contestant):
    #: Whether the gradient norm is wanted even where that takes more work.
    _tells_norm = False

    def first(self) -> FirstSteps:
        """Two steps, which also connect process groups."""
        self._tells_norm = True
        (first, norm), (second, _) = self.step(), self.step()
        self._tells_norm = False
        return FirstSteps((first.item(), second.item()), float(norm))

    def step(self) -> tuple[torch.Tensor, Any]:
        """Forward, backward, clipping and AdamW: the mean loss of the rank's rows before the step, and the norm of the
        whole gradient before clipping, which a framework may keep to itself."""
        raise NotImplementedError

    def figures(self) -> Row:
        """Bytes that this rank sent by the framework's own counter, if it counts."""
        return {"sent_bytes": 0}


class _Engine(_Training):
    """A model under DeepSpeed; this rank's part of the global batch is one of as many as there are replicas."""

    def __init__(
        self, workload: Llama, model: LlamaForCausalLM, section: Row, replicas: int, replica: int, **more: Any
    ) -> None:
        self._rows = workload.tokens().chunk(replicas)[replica]
        self._groups = _own_groups()
        # ZeRO is off in float32, where it would only add work: no contestant has optimizer state that it could save by
        # splitting among many replicas. In bfloat16 it is stage 1, without which DeepSpeed 0.19.8 tells a wrong norm
        # under any tensor parallelism.
        low_precision = workload.dtype == "bfloat16"
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": len(self._rows),
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": 1 if low_precision else 0},
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
            "steps_per_print": 10**9,
            "tensor_parallel": section,
            **({"bf16": {"enabled": True}} if low_precision else {}),
            **more,
        }
        copied = copy.deepcopy(model)
        with self._in_own_groups():
            self.engine, *_ = deepspeed.initialize(
                model=copied, model_parameters=list(copied.parameters()), config=config
            )

    def step(self) -> tuple[torch.Tensor, Any]:
        with self._in_own_groups():
            loss = self.engine(input_ids=self._rows, labels=self._rows).loss
            self.engine.backward(loss)
            norm = self._norm_before_step() if self._tells_norm else None
            self.engine.step()
            kept = self.engine.get_global_grad_norm()
        return loss.detach(), norm if kept is None else kept

    def _norm_before_step(self) -> float | None:
        """Where the engine won't tell it afterwards."""
        return None

    @contextlib.contextmanager
    def _in_own_groups(self) -> Iterator[None]:
        """Inside, DeepSpeed has this engine's process groups, and what it adds to them is kept.

        It keeps groups in global variables, and takes those of an earlier engine for a later one. So each engine gets
        variables of its own; in the benchmark's own processes alone.
        """
        before = _own_groups()
        vars(groups).update(self._groups)
        try:
            yield
        finally:
            self._groups = _own_groups()
            vars(groups).update(before)


def _own_groups() -> dict[str, Any]:
    """All that DeepSpeed's functions declare ``global``: names in capitals, and three others. Dicts as copies."""
    copies = {}
    for name, value in vars(groups).items():
        private = name.startswith("_") and not name.startswith("__") and name.isupper()
        if private or name in {"mpu", "mesh_device", "expert_tensor_parallel_world_size"}:
            copies[name] = dict(value) if isinstance(value, dict) else value
    return copies


class MeshStep(_Engine):
    """Cuboid on a mesh, whose ranks are all given the whole batch, or what is their replica's of it."""

    def __init__(self, entry: Entry, workload: Llama, model: LlamaForCausalLM) -> None:
        layout, more = entry.layout(workload, model), {}
        if layout.stages > 1:
            sizes = {"train_micro_batch_size_per_gpu": layout.micro_batch}
            sizes["gradient_accumulation_steps"] = layout.micro_batches
            pipeline = {"engine": "seq1f1b", "stages": layout.stages, "segments": layout.segments}
            more = {**sizes, "pipeline": pipeline}
        replica = Topology(layout.mesh, RANKS, layout.stages).coordinate(dist.get_rank()).data
        section = workload.section(entry.mesh, RANKS, **entry.options)
        super().__init__(workload, model, section, layout.replicas, replica, **more)
        self._micro_batches = self._rows.split(layout.micro_batch) if layout.stages > 1 else ()
        self._counter = cuboid.mesh_of(self.engine).comm_counter

    def step(self) -> tuple[torch.Tensor, Any]:
        if not self._micro_batches:
            return super().step()
        with self._in_own_groups():
            loss = self.engine.train_batch(iter({"input_ids": rows, "labels": rows} for rows in self._micro_batches))
            return loss.detach(), self.engine.get_global_grad_norm()

    def begin(self) -> None:
        self._counter.reset()

    def figures(self) -> dict[str, Any]:
        """Without the gradient norm's sum, which DeepSpeed sends."""
        return {"sent_bytes": sum(self._counter.snapshot().values())}


class AutoTpStep(_Engine):
    """DeepSpeed's AutoTP: replicas of tensor-parallel ranks, which are neighbours and are given the same rows."""

    def __init__(self, entry: Entry, workload: Llama, model: LlamaForCausalLM) -> None:
        section: dict[str, Any] = {"autotp_size": entry.tensor_parallel}
        if entry.split_head:
            section["vocab_parallel_lm_head"] = True
        replica, replicas = dist.get_rank() // entry.tensor_parallel, RANKS // entry.tensor_parallel
        super().__init__(workload, model, section, replicas, replica)

    def _norm_before_step(self) -> float | None:
        if self.engine.zero_optimization_stage() > 0:
            return None
        # Without ZeRO it clips by this function, and forgets what that returns.
        parameters, mpu = self.engine.module.parameters(), self.engine.mpu
        return float(deepspeed_clip_grad_norm_(parameters, max_norm=float("inf"), mpu=mpu))


class TpPlanStep(_Training):
    """``from_pretrained(tp_plan="auto")``, of a checkpoint: layers split among all ranks as DTensors, embedding and
    norms whole on each. Every rank computes the loss of the whole batch. bfloat16 is autocast, as the HF ``Trainer``
    has it."""

    def __init__(self, workload: Llama, folder: Path) -> None:
        plan = DistributedConfig(tp_plan="auto")
        self._model = LlamaForCausalLM.from_pretrained(folder, distributed_config=plan, dtype=torch.float32).train()
        self._rows, self._low_precision = workload.tokens(), workload.dtype == "bfloat16"
        parameters = list(self._model.parameters())
        # Neither the optimizer nor clipping takes both kinds in one group.
        split = [p for p in parameters if isinstance(p, DTensor)]
        plain = [p for p in parameters if not isinstance(p, DTensor)]
        self._parameters = [split, plain]
        self._optimizer = torch.optim.AdamW([{"params": group} for group in self._parameters], **ADAMW)

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._low_precision):
            loss = self._model(input_ids=self._rows, labels=self._rows).loss
        loss.backward()
        gradients = [[p.grad for p in group if p.grad is not None] for group in self._parameters]
        norm = torch.linalg.vector_norm(torch.stack([_whole(get_total_norm(group)) for group in gradients]))
        for group in self._parameters:
            clip_grads_with_norm_(group, CLIP, norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach(), norm


class FullyShardedStep(_Training):
    """FSDP2: each layer, and what is left of the model, a unit of its own; each rank has its own row. bfloat16 is its
    mixed-precision policy; gradients are summed in bfloat16, too, which sends least."""

    def __init__(self, entry: Entry, workload: Llama, model: LlamaForCausalLM) -> None:
        self._model = copy.deepcopy(model)
        options: Row = {"mesh": init_device_mesh("cpu", (RANKS,)), "reshard_after_forward": entry.reshard}
        if workload.dtype == "bfloat16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in self._model.model.layers:
            fully_shard(layer, **options)
        fully_shard(self._model, **options)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **ADAMW)
        self._rows = workload.tokens().chunk(RANKS)[dist.get_rank()]

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self._model(input_ids=self._rows, labels=self._rows).loss
        loss.backward()
        norm = _whole(clip_grad_norm_(self._model.parameters(), CLIP))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach(), norm


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def build(entry: Entry, workload: Llama, model: LlamaForCausalLM, folder: Path) -> _Training:
    """Set up a contestant from the whole model in float32, or its checkpoint in a folder. All ranks must call."""
    if entry.family == "tp_plan":
        return TpPlanStep(workload, folder)
    classes = {"cuboid": MeshStep, "autotp": AutoTpStep, "fsdp2": FullyShardedStep}
    return classes[entry.family](entry, workload, model)


# --- the case ---

WORKLOAD = Llama()
QUICK = Llama(length=32, hidden=64, intermediate=176, layers=2, vocabulary=256)
#: How far losses and the gradient norm may be from one process in float64, relatively. A norm is a sum of millions of
#: squares, which frameworks add up in float32.
AGREEMENT = {"float32": (1e-5, 5e-5), "bfloat16": (0.02, 0.02)}
#: Whom the automatic mesh is compared with, at the best of each one's layouts.
PEERS = {"autotp": "DeepSpeed AutoTP", "tp_plan": "Transformers tp_plan", "fsdp2": "FSDP2"}
_DTYPES = ["float32", "bfloat16"]


class TrainingStep(Case):
    """Losses and gradient norms are compared with one process in float64 before anything is timed."""

    name = "training_step"
    sources = freshness.MESHES + freshness.LOSS + freshness.ENGINE
    networks = ("loopback", "shaped")
    workload, quick_workload, contestants = WORKLOAD, QUICK, DEFAULT
    #: At which the links should take three times as long as two cores do, even for the one that sends least: 100 MB in
    #: float32, beside 5.5 s of computing on one core. What it came to is in the results.
    rate_mbit = 80.0
    dtype = "float32"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        mixed = f"bfloat16 is mixed precision (default {self.dtype})"
        parser.add_argument("--dtype", choices=_DTYPES, default=self.dtype, help=mixed)
        default = f"default: {' '.join(self.contestants)}"
        parser.add_argument("--contestants", nargs="+", metavar="KEY", default=self.contestants, help=default)

    def measure(self, args: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        SHARED_MEMORY_BUILD.skip()  # it takes half a minute
        workload = dataclasses.replace(self.quick_workload if args.quick else self.workload, dtype=args.dtype)
        model = workload.model()
        entries = find(args.contestants, workload, model)
        reference = compute_reference(workload, model)
        sizes = {**workload.numbers(), "model": "LlamaForCausalLM", "clip": CLIP, "adamw": ADAMW}
        result.update(workload=sizes, ranks=RANKS, reference=reference._asdict())
        with open_network(args.network, RANKS) as network, tempfile.TemporaryDirectory(prefix="cuboid-") as folder:
            model.save_pretrained(folder)
            make = partial(build, workload=workload, model=model, folder=Path(folder))
            with forked_ranks(network, lambda _: Link(network, make)) as ranks:
                records = [check(entry, ranks.call("prepare", entry), reference, args.dtype) for entry in entries]
                for record in records:
                    record.facts |= self.facts_of(record.entry, workload, model, args)

                def write_rows() -> None:
                    result["rows"] = [_row(record, records, args.rate_mbit) for record in records]
                    write()

                measure(ranks, records, args, result, write_rows)

    def facts_of(self, entry: Entry, workload: Llama, model: LlamaForCausalLM, args: argparse.Namespace) -> Row:
        """What is known of a contestant without measuring it."""
        del args
        return {"shape": str(entry.shape(workload, model)) if entry.family == "cuboid" else None}

    def setting(self, result: Row) -> list[str]:
        sizes = result["workload"]
        return [f"Model: {llama.described(sizes)}; {llama.batch(sizes)}.", f"Links: {links.links(result)}."]

    def remarks(self, result: Row) -> list[str]:
        rows = result["rows"]
        said = [f"The automatic mesh is **{_compared(one)}**." for one in comparisons(rows)]
        said += self.busy(result) + links.processor_counts(rows, "name")
        return said + links.shared_cores(result)

    def tables(self, result: Row) -> list[Table]:
        rows = result["rows"]
        auto = next((row for row in rows if row["key"] == AUTO_KEY), {"ratios": {}, "ratios_bytes": {}})
        columns = [
            Column("contestant", lambda row: row["name"], "l"),
            Column("step, s", lambda row: ranged(row["step_s"])),
            Column("`auto` is × as fast", lambda row: ranged(auto["ratios"].get(row["key"]), none="1")),
            Column("CPU, s", lambda row: f"{row['computing_s']:.1f}", on_page=False),
        ]
        if result["rate_mbit"] is not None:
            columns += [
                Column("MB sent", lambda row: f"{row['sent_bytes'] / MB:.1f}"),
                Column("by bytes", lambda row: known(auto["ratios_bytes"].get(row["key"]), ".2f", none="1")),
                *(dataclasses.replace(column, on_page=False) for column in links.LIMITS),
            ]
        return [Table([*columns, Column("error", tables.error, on_page=False)], rows, file="")]

    def record_name(self, result: Row) -> str:
        return f"{self.name}_{result['network']}_{result['workload']['dtype']}"


def compute_reference(workload: Llama, model: LlamaForCausalLM) -> FirstSteps:
    """A whole training step of plain Hugging Face in float64, in this process."""
    exact, rows = copy.deepcopy(model).double(), workload.tokens()
    optimizer = torch.optim.AdamW(exact.parameters(), **ADAMW)
    with precision(keep_float64=True):
        first = exact(input_ids=rows, labels=rows).loss
        first.backward()
        norm = torch.nn.utils.clip_grad_norm_(exact.parameters(), CLIP)
        optimizer.step()
        with torch.no_grad():
            second = exact(input_ids=rows, labels=rows).loss
    return FirstSteps((first.item(), second.item()), norm.item())


def check(entry: Entry, told: Sequence[FirstSteps], reference: FirstSteps, dtype: str) -> Record:
    """Compare what all ranks tell with the reference; the mean of their losses is that of the batch."""
    of_loss, of_norm = AGREEMENT[dtype]
    losses = [statistics.fmean(rank.losses[number] for rank in told) for number in range(2)]
    names = ("first loss", "loss after a step")
    actual, expected = (dict(zip(names, values, strict=True)) for values in (losses, reference.losses))
    norms = {f"gradient norm on rank {number}": rank.gradient_norm for number, rank in enumerate(told)}
    plain = "plain Hugging Face in float64"
    worst = max(
        check_equal(entry.name, actual, plain, expected, of_loss),
        check_equal(entry.name, norms, plain, dict.fromkeys(norms, reference.gradient_norm), of_norm),
    )
    return Record(entry, entry.name, worst, {"losses": losses, "gradient_norm": told[0].gradient_norm})


def _row(record: Record, records: list[Record], rate_mbit: float | None) -> Row:
    others = {other.entry.key: other for other in records if other is not record}
    numbers, sent = record.numbers(others.items()), _sent_bytes(record)
    by_others = {key: _sent_bytes(other) for key, other in others.items()}
    return {
        **dataclasses.asdict(record.entry),
        **record.facts,
        "error": record.error,
        "sent_bytes": sent,
        **record.samples[-1].figures,
        **links.link_numbers(sent, rate_mbit, numbers["floor_s"]),
        **numbers,
        "ratios_bytes": {key: theirs / sent for key, theirs in by_others.items() if None not in (theirs, sent)},
    }


def _sent_bytes(record: Record) -> float | None:
    """What a rank sends in a step: by the interfaces, on loopback by Cuboid's counter; None for others there."""
    last = record.samples[-1].figures
    return last["interface_bytes"] or last["counted_bytes"] or None


def comparisons(rows: Sequence[Row]) -> list[Row]:
    """The automatic mesh beside each peer's fastest layout, and beside AutoTP on all ranks: whom and what it is
    compared ``against``, and ``ratio`` (times as fast, of paired rounds) and ``bytes`` (times as much sent)."""
    auto = next((row for row in rows if row["key"] == AUTO_KEY), None)
    if auto is None:
        return []
    compared = [{"against": row["key"], "what": row["name"]} for row in rows if row["key"] == f"autotp-{RANKS}"]
    for family, name in PEERS.items():
        layouts = [row for row in rows if row["family"] == family]
        if layouts:
            best = min(layouts, key=lambda row: row["step_s"]["median"])
            what = f"{name} at its best ({best['name']})" if len(layouts) > 1 else best["name"]
            compared.append({"against": best["key"], "what": what})
    ratios, sent = auto["ratios"], auto["ratios_bytes"]
    return [{**one, "ratio": ratios[one["against"]], "bytes": sent.get(one["against"])} for one in compared]


def _compared(one: Row) -> str:
    sent = "" if one["bytes"] is None else f" (which sends {one['bytes']:.2f} times as much)"
    return f"{ranged(one['ratio'])} times as fast as {one['what']}{sent}"


CASE = TrainingStep()

if __name__ == "__main__":
    sys.exit(CASE.main())
