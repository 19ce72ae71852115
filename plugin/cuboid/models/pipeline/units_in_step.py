"""What surrounds each computation of a pipeline's step: measurements, and copies between device and host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from cuboid.seq1f1b.runtime.executor import Observer
from cuboid.seq1f1b.runtime.host_store import HostStore
from cuboid.seq1f1b.runtime.profiler import UnitProfiler
from cuboid.seq1f1b.schedule.actions import Action, Op, Program
from cuboid.seq1f1b.schedule.units_on_host import fetched_before, unit_of, units_on_host


def observer_of(
    program: Program,
    tokens: Callable[[Action], int],
    store: HostStore | None,
    profiler: UnitProfiler | None,
) -> Observer:
    """What the interpreter calls with each computation of a step in training.

    Args:
        program: of this rank.
        tokens: of a unit.
        store: where the model keeps units; None if they stay on the device.
        profiler: measures the step; None if none does.
    """
    measure = (lambda _: nullcontext()) if profiler is None else profiler.observe
    if store is None:
        return measure
    store.begin_units()
    on_host, fetched = units_on_host(program, tokens), fetched_before(program)

    @contextmanager
    def observe(action: Action) -> Iterator[None]:
        unit = unit_of(action)
        keeps = action.op is Op.FORWARD and unit in on_host
        with measure(action), store.unit(unit, keeps=keeps):
            if action in fetched:
                store.fetch_unit(fetched[action])
            yield

    return observe
