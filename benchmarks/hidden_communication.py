"""How much of a layer's communication is hidden behind its computing, where both would take the same time.

python benchmarks/hidden_communication.py [--network loopback|shaped] …
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import freshness, links, llama, tables
from harness.case import Case
from harness.rounds import Record, Sample, count_disturbed, run_rounds, spread, undisturbed, undisturbed_rounds
from harness.tables import MB, Column, Row, Table, known, percent, ranged
from harness.watch import Watch, pin
from layer_meshes import AGREEMENT, LayerWorkload, ShardedLayers, check_error, compute_reference, distinct, mesh_name
from network.networks import Loopback, open_network
from network.ranks import Ranks, forked_ranks
from network.rate import Link, set_rate, timed_step, traffic
from network.serving import Contestant, Step

# Registers the backend whose collectives return at once.
from torch.testing._internal.distributed import fake_pg  # noqa: F401

from cuboid.distributed.async_result import AsyncResult
from cuboid.distributed.axis_collectives import all_gather, all_reduce, reduce_scatter
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import Axis
from cuboid.errors import CuboidError

#: What is measured of a mesh.
KINDS = ("step", "computing", "communication")
RANKS, MESHES = 2, ["2x1x1", "1x2x1", "1x1x2"]
#: So large because a processor that carries messages besides computing is slowed down by that: the more a rank computes
#: for each byte, the less.
WORKLOAD = LayerWorkload(batch=8, length=512, hidden=2048, intermediate=5504, heads=16)
QUICK = LayerWorkload(batch=8, length=64, hidden=128, intermediate=192, heads=8)
#: Steps without communication that the rate is found by.
_COMPUTING_STEPS = 5
#: What links of one machine can be relied on to hold, and what they hold on a busy one too.
_MOST_MBIT, _QUICK_MOST_MBIT = 1200.0, 50.0
_ELEMENT_BYTES = 4
_COLLECTIVES = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}


# --- on a rank ---


class Call(NamedTuple):
    """One collective of a step; ``whole_bytes`` is of the tensor that isn't split."""

    operation: str
    axes: tuple[Axis, ...]
    whole_bytes: int

    def inputs(self, mesh: Mesh) -> torch.Tensor:
        """Zeros of the size that a rank gives to the collective."""
        elements, ranks = self.whole_bytes // _ELEMENT_BYTES, mesh.size(*self.axes)
        if self.operation == "reduce_scatter":
            return torch.zeros(ranks, elements // ranks)
        return torch.zeros(elements // ranks if self.operation == "all_gather" else elements)


class _Recorded(Counter[tuple[str, int]]):
    """Stands for what an :class:`AxisGroup` counts with, and notes each collective in the order of all groups."""

    def __init__(self, axes: tuple[Axis, ...], calls: list[Call]) -> None:
        super().__init__()
        self._axes, self._calls = axes, calls

    def __setitem__(self, key: tuple[str, int], count: int) -> None:
        super().__setitem__(key, count)
        self._calls.append(Call(key[0], self._axes, key[1]))


class Replay(Contestant):
    """The collectives of a step, one after another, and nothing of what it computes."""

    def __init__(self, mesh: Mesh, calls: Sequence[Call]) -> None:
        self._mesh, self._calls = mesh, calls
        self._buffers = {call: call.inputs(mesh) for call in calls}

    def begin(self) -> None:
        self._mesh.comm_counter.reset()

    def step(self) -> None:
        for call in self._calls:
            _COLLECTIVES[call.operation](self._buffers[call], self._mesh.along(*call.axes))

    def figures(self) -> dict[str, Any]:
        return {"sent_bytes": sum(self._mesh.comm_counter.snapshot().values())}


class HiddenRank(Link):
    """What a rank keeps, by mesh and kind: the layers, the layers without communication, communication without them."""

    def __init__(self, network: Loopback, build: Callable[[str], ShardedLayers]) -> None:
        super().__init__(network, build)
        if network.ranks <= (os.cpu_count() or 1):
            pin(dist.get_rank())
        # What a collective that does nothing leaves in a buffer may be numbers that take many times as long.
        torch.set_flush_denormal(True)
        self._waits_s: list[float] = []
        _time_waiting(self._waits_s)

    def prepare(self, mesh: Hashable) -> tuple[str, float]:
        """Shard the model twice, and record what a step of it communicates; the mesh, and how far it is from float64.
        Refused where nothing is left out, or repeated other than recorded. Collective."""
        full, alone = self._build(mesh), self._build(mesh)
        full.step()
        # The first step may do things once.
        full.begin()
        calls = _record(full.mesh, full.step)
        error = full.error()
        _silence(alone.mesh)
        alone.step()
        if alone.error() <= AGREEMENT:
            raise CuboidError(f"mesh {mesh}: without communication everything is as with it, so nothing was left out")
        replay = Replay(full.mesh, calls)
        sent = []
        for contestant in (full, replay):
            contestant.begin()
            contestant.step()
            sent.append(full.mesh.comm_counter.snapshot())
        if sent[0] != sent[1]:
            raise CuboidError(f"mesh {mesh}: a step's collectives were recorded, but repeating them sends other bytes")
        self.kept.update(
            {(mesh, kind): contestant for kind, contestant in zip(KINDS, (full, alone, replay), strict=True)}
        )
        return str(full.mesh.shape), error

    def step(self, entry: Hashable, start_s: float) -> Step:
        """As every rank's, with how long it waited for messages among the figures."""
        self._waits_s.clear()
        step = super().step(entry, start_s)
        step.figures["waited_s"] = sum(self._waits_s)
        return step


def _record(mesh: Mesh, step: Callable[[], None]) -> list[Call]:
    """The collectives of a step, in their order."""
    calls: list[Call] = []
    counted = {along: along.counted for along in mesh._along.values()}
    for along in counted:
        along.counted = _Recorded(along.axes, calls)
    step()
    for along, before in counted.items():
        along.counted = before
    return calls


def _time_waiting(waits_s: list[float]) -> None:
    """From now on, add to a list how long each wait of this process for a message takes."""
    wait = AsyncResult.wait

    def timed(pending: AsyncResult[object]) -> object:
        start_s = time.perf_counter()
        for work in pending._works:
            if work is not None:
                work.wait()
        # What is left to do on this side is computing.
        waits_s.append(time.perf_counter() - start_s)
        pending._works = ()
        return wait(pending)

    AsyncResult.wait = timed


def _silence(mesh: Mesh) -> None:
    """From now on let the mesh's collectives return at once, with anything in their outputs. Collective."""
    silent: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
    for group in mesh._groups.values():
        if group not in silent:
            ranks = dist.get_process_group_ranks(group)
            silent[group] = dist.new_group(ranks, backend="fake", use_local_synchronization=True)
    mesh._groups = {names: silent[group] for names, group in mesh._groups.items()}
    for along in mesh._along.values():
        along.connect(mesh._groups)


# --- the case ---


class HiddenCommunication(Case):
    """Each mesh's step is compared with float64. On links, their rate is such that what a step sends takes as long as
    what it computes. Two ranks, a core each: where ranks share cores, one computes while another waits, which isn't
    overlap."""

    name = "hidden_communication"
    sources = freshness.MESHES
    networks = ("loopback", "shaped")
    unit = "rounds"
    cores = "{cores} cores for {ranks} ranks"

    def measure(self, args: argparse.Namespace, result: Row, write: Callable[[], None]) -> None:
        workload = QUICK if args.quick else WORKLOAD
        model = workload.model()
        meshes = distinct(MESHES, RANKS, workload, model)
        result.update(workload=workload.numbers(), ranks=RANKS)
        build = partial(ShardedLayers, workload, model, compute_reference(workload, model))
        watch, cores = Watch(args.limit), min(RANKS, os.cpu_count() or 1)
        with (
            open_network(args.network, RANKS) as network,
            forked_ranks(network, lambda _: HiddenRank(network, build)) as ranks,
        ):
            for mesh, shape in meshes.items():
                name, error = check_error(ranks.call("prepare", mesh))
                trio = [Record((mesh, kind), name, error) for kind in KINDS]
                sent = workload.formula_bytes(shape, model)
                rates = _measure_mesh(ranks, trio, sent, args, watch)
                row = {"mesh": mesh, "shape": name, "error": error, "formula_bytes": sent, **rates}
                last = {key: trio[0].samples[-1].figures[key] for key in ("counted_bytes", "interface_bytes")}
                result["rows"].append({**row, **links.interface_numbers(last), **_times(trio, cores)})
                write()

    def setting(self, result: Row) -> list[str]:
        return [f"Model: {llama.described(result['workload'])}, layers alone; {llama.batch(result['workload'])}."]

    def remarks(self, result: Row) -> list[str]:
        said = self.busy(result)
        if result["network"] == "loopback":
            said.append("On loopback communication is work of the cores that compute: little can be hidden.")
        return said + links.interface_doubts(result["rows"])

    def tables(self, result: Row) -> list[Table]:
        columns = [
            Column("mesh", mesh_name, "l"),
            Column("Mbit/s", lambda row: known(row["rate_mbit"], ".0f", none="no limit")),
            *(Column(f"{kind}, s", lambda row, kind=kind: ranged(row["seconds"][kind])) for kind in KINDS),
            *(Column(key, lambda row, key=key: percent(row[key], bold=True)) for key in ("exposed", "waited")),
            Column("÷ perfect", lambda row: ranged(row["to_perfect"])),
            Column("÷ none", lambda row: ranged(row["to_none"])),
            Column("÷ possible", lambda row: ranged(row["to_possible"])),
            Column("MB sent", lambda row: f"{row['counted_bytes'] / MB:.1f}"),
            Column("error", tables.error),
        ]
        return [Table(columns, result["rows"])]


def _figures(record: Record, steps: Sequence[Step]) -> Row:
    return {**traffic(record, steps), "waited_s": max(step.figures["waited_s"] for step in steps)}


def _measure_mesh(ranks: Ranks, trio: list[Record], sent_bytes: int, args: argparse.Namespace, watch: Watch) -> Row:
    """Find the rate at which what is sent takes as long as what is computed, set it, and have the rounds."""
    step = partial(timed_step, ranks, watch, figures=_figures)
    wanted = rate = measured = None
    if args.network == "shaped":
        run_rounds([trio[1]], _COMPUTING_STEPS, watch, step, floor=True)
        # Noise only adds to the shortest step.
        wanted = sent_bytes * 8 / min(sample.step_s for sample in undisturbed(trio[1].floor)) / 1e6
        rate = min(wanted, _QUICK_MOST_MBIT if args.quick else _MOST_MBIT)
        measured = set_rate(ranks, rate)
    run_rounds(trio, args.repeats, watch, step)
    ranks.call("set_rate", None)
    return {"wanted_mbit": wanted, "rate_mbit": rate, "measured_mbit": measured}


def _times(trio: list[Record], cores: int) -> Row:
    """Times, and what they make round by round; over the rounds in which all three were undisturbed.

    With T, C and M for a step, its computing and its communication, ``exposed`` is (T - C) / M, and ``waited`` the part
    of M in which a rank's computing stood still for messages; what else is exposed are cores that carry messages where
    they could compute. The other ratios say how many times as long as it could the step takes: with perfect overlap,
    max(C, M); with none, C + M; and with what overlap is possible where the cores that compute carry the messages too,
    which makes the processor time of both, a core's share of it, a third thing that no step is shorter than.
    """
    rounds = undisturbed_rounds(trio)
    columns = dict(zip(KINDS, zip(*rounds, strict=True), strict=True))

    def over_rounds(value: Callable[[Sample, Sample, Sample], float]) -> Row:
        return spread([value(*samples) for samples in rounds])

    return {
        "seconds": {kind: spread([sample.step_s for sample in column]) for kind, column in columns.items()},
        "exposed": over_rounds(lambda t, c, m: (t.step_s - c.step_s) / m.step_s),
        "waited": over_rounds(lambda t, _, m: t.figures["waited_s"] / m.step_s),
        "to_perfect": over_rounds(lambda t, c, m: t.step_s / max(c.step_s, m.step_s)),
        "to_none": over_rounds(lambda t, c, m: t.step_s / (c.step_s + m.step_s)),
        "to_possible": over_rounds(
            lambda t, c, m: t.step_s / max(c.step_s, m.step_s, (c.computing_s + m.computing_s) / cores)
        ),
        **count_disturbed(trio),
        "samples": {
            kind: [sample.numbers() for sample in record.samples] for kind, record in zip(KINDS, trio, strict=True)
        },
    }


CASE = HiddenCommunication()

if __name__ == "__main__":
    sys.exit(CASE.main())
