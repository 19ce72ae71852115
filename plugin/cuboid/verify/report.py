"""The result of a verification, as tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cuboid.checkpoint.format.bounded_files import write_text
from cuboid.config.schema import PipelineConfig
from cuboid.distributed.topology import MeshShape
from cuboid.verify.compare import FACTOR, OWN, Check, ComparedKind, first_difference
from cuboid.verify.plan import Plan

#: One comparison of a whole run: Cuboid's core under torch's optimizer, or the whole DeepSpeed engine.
Pass = Literal["core", "engine"]
#: Pipeline keys that don't affect results, so aren't reported.
_NO_RESULT = {"engine", "trace", "trace_step"}
_PARAMETER_KINDS: tuple[ComparedKind, ...] = ("gradient", "scale", "moment", "weight")
_TITLES: dict[Pass, str] = {"core": "Cuboid's core", "engine": "the DeepSpeed engine"}


@dataclass(frozen=True)
class PassReport:
    """The result of one pass.

    Args:
        name: which pass.
        plan: the run that both sides made.
        mesh: of one replica, or of each of its stages.
        tolerance: the largest error that passes, unless a check has a larger one of its own; None if each check has its
            own, see :mod:`cuboid.verify.noise`.
        losses, norms: of each step; plain transformers' first, then Cuboid's.
        checks: see :func:`cuboid.verify.compare.compare`.
        pipeline: its config, if there is one.
    """

    name: Pass
    plan: Plan
    mesh: MeshShape
    tolerance: float | None
    losses: tuple[list[float], list[float]]
    norms: tuple[list[float], list[float]]
    checks: list[Check]
    pipeline: PipelineConfig | None = None

    @property
    def passed(self) -> bool:
        """Whether every check is within tolerance."""
        return all(check.passed for check in self.checks)

    @property
    def first_difference(self) -> str | None:
        """Where the two sides begin to differ, or None."""
        return first_difference(self.checks)

    def worst(self, kind: ComparedKind) -> Check | None:
        """The worst check of a kind, if there is any."""
        return max((check for check in self.checks if check.kind == kind), key=_badness, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, in which an error that isn't finite is ``null``."""
        return {
            "pass": self.name,
            "passed": self.passed,
            "first_difference": self.first_difference,
            "dtype": self.plan.dtype,
            "mesh": {"batch": self.mesh.batch, "sequence": self.mesh.sequence, "hidden": self.mesh.hidden},
            "pipeline": None if self.pipeline is None else self.pipeline.model_dump(exclude=_NO_RESULT),
            "adapter": self.plan.adapter,
            "data_parallel": self.plan.data_parallel,
            "accumulate": self.plan.accumulate,
            "micro_batches": [dataclasses.asdict(case) for case in self.plan.cases_run()],
            "tolerance": self.tolerance,
            "losses": {"transformers": self.losses[0], "cuboid": self.losses[1]},
            "gradient_norms": {"transformers": self.norms[0], "cuboid": self.norms[1]},
            "checks": [
                {
                    "kind": check.kind,
                    "name": check.name,
                    "error": check.error if math.isfinite(check.error) else None,
                    "step": check.step,
                    "tolerance": check.tolerance if math.isfinite(check.tolerance) else None,
                    "magnitude": check.magnitude if math.isfinite(check.magnitude) else None,
                    "passed": check.passed,
                }
                for check in self.checks
            ],
        }


@dataclass(frozen=True)
class Report:
    """The results of all passes."""

    passes: list[PassReport]

    @property
    def passed(self) -> bool:
        """Whether every pass passed."""
        return all(report.passed for report in self.passes)

    def write(self, path: str | Path) -> None:
        """Write JSON."""
        content = {"passed": self.passed, "passes": [report.as_dict() for report in self.passes]}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(path), json.dumps(content, indent=2, allow_nan=False) + "\n")

    def print(self, console: Console) -> None:
        """Print the tables of all passes, and whether they passed."""
        for report in self.passes:
            _print_pass(report, console)


def _print_pass(report: PassReport, console: Console) -> None:
    plan = report.plan
    largest = f"{report.tolerance:.0e}" if report.tolerance is not None else f"{FACTOR:.0f} times plain {plan.dtype}'s"
    layout = f"mesh {report.mesh}"
    if report.pipeline is not None:
        schedule = f"{report.pipeline.segments} segments ({report.pipeline.schedule})"
        chunks = f" × {report.pipeline.chunks} chunks" if report.pipeline.chunks != 1 else ""
        layout = f"{report.pipeline.stages} stages{chunks} of {layout}, {schedule}"
    console.print(
        f"[bold]{_TITLES[report.name]}[/]: {plan.dtype}, {layout}, data parallel {plan.data_parallel}, "
        f"accumulate {plan.accumulate}; errors up to {largest} pass"
    )
    console.print("micro-batches: " + escape("; ".join(f"{c.name} ({c.length})" for c in plan.cases_run())))
    if plan.adapter is not None:
        console.print(escape(f"with the adapter in {plan.adapter}; all other weights are frozen"))
    for kind, reason in plan.left_out:
        console.print(escape(f"left out: {kind}, with which the architecture isn't right: {reason}"))
    if report.tolerance is not None and (
        loosened := [c for c in report.checks if c.kind not in OWN and c.tolerance > report.tolerance]
    ):
        console.print(
            f"{len(loosened)} checks pass up to {FACTOR:.0f} times plain {plan.dtype}'s own distance from float64: "
            "this model amplifies rounding"
        )
    for table in (_steps(report), _outputs(report), _parameters(report), _own(report)):
        if table.row_count:
            console.print(table)
    if report.passed:
        console.print(f"[green]✓[/] all {len(report.checks)} checks pass\n")
    else:
        failures = sum(not check.passed for check in report.checks)
        console.print(f"[red]✗[/] {failures} of {len(report.checks)} checks fail")
        console.print(f"[red]✗[/] {escape(report.first_difference or '')}\n")


def _steps(report: PassReport) -> Table:
    table = _table("", "loss", "Cuboid's", "error", "norm", "error")
    losses, norms = (_by_name(report, kind) for kind in ("loss", "norm"))
    for index, name in enumerate(losses):
        pair = (f"{report.losses[0][index]:.9f}", f"{report.losses[1][index]:.9f}")
        table.add_row(name, *pair, _error(losses[name]), f"{report.norms[0][index]:.6g}", _error(norms.get(name)))
    return table


def _outputs(report: PassReport) -> Table:
    table = _table("output of", "error")
    for check in report.checks:
        if check.kind in ("activation", "logits"):
            table.add_row(escape(check.name), _error(check))
    return table


def _own(report: PassReport) -> Table:
    """The checks of Cuboid alone, with the words that docs/verify.md has for them."""
    table = _table("of itself", "error")
    for check in report.checks:
        if check.kind in OWN:
            table.add_row(f"{check.kind}: {escape(check.name)}", _error(check))
    return table


def _parameters(report: PassReport) -> Table:
    kinds = [kind for kind in _PARAMETER_KINDS if any(check.kind == kind for check in report.checks)]
    columns = [_by_name(report, kind) for kind in kinds]
    table = _table("parameter", *kinds)
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(escape(name), *(_error(column.get(name)) for column in columns))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table()
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _by_name(report: PassReport, kind: ComparedKind) -> dict[str, Check]:
    """The worst check over all steps, by name."""
    worst: dict[str, Check] = {}
    for check in report.checks:
        if check.kind == kind and (check.name not in worst or _badness(check) > _badness(worst[check.name])):
            worst[check.name] = check
    return worst


def _badness(check: Check) -> tuple[bool, float]:
    """Sort key: failed checks first, then by the error relative to the check's own tolerance."""
    return not check.passed, check.error / check.tolerance if check.tolerance else check.error


def _error(check: Check | None) -> str:
    if check is None:
        return "–"
    return f"{check.error:.1e}" if check.passed else f"[bold red]{check.error:.1e} ✗[/]"
