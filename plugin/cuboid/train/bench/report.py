"""The result of a measurement, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from cuboid.checkpoint.format.bounded_files import write_json


@dataclass(frozen=True)
class BenchReport:
    """The measured steps of one model with one config.

    Attributes:
        layout: mesh, stages and replicas.
        device: of rank 0.
        tokens: tokens of a step, over all replicas.
        step_s: seconds of each measured step on the slowest rank.
        flops: floating-point operations of a step, forward and backward without recomputation, over all ranks; None
            if there is no formula for the model's layers.
        peak_flops: the device's peak FLOP/s in the weights' dtype; None if unknown.
        ranks: world size.
        sent_bytes: bytes that a rank sends in a step, by axes of the mesh or pair of stages; the maximum over ranks.
        formula_bytes: the same for the mesh, by the formula; None if there is no formula, as with a pipeline.
        memory: what ``peak_bytes`` measures.
        peak_bytes: a rank's peak memory; the maximum over ranks.
        formula_kept_bytes: bytes that rank 0 keeps from forward to backward, by the formula; None likewise.
    """

    layout: str
    device: str
    tokens: int
    step_s: tuple[float, ...]
    flops: float | None
    peak_flops: float | None
    ranks: int
    sent_bytes: dict[str, int]
    formula_bytes: dict[str, int] | None
    memory: str
    peak_bytes: int
    formula_kept_bytes: int | None

    @property
    def median_s(self) -> float:
        """The median step time."""
        return median(self.step_s)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the share of all devices' peak (Chowdhery et al., arXiv 2204.02311)."""
        if self.flops is None or self.peak_flops is None:
            return None
        return self.flops / (self.median_s * self.ranks * self.peak_flops)

    def print(self, console: Console) -> None:
        """Print a table."""
        table = Table(title=f"{self.layout} on {self.device}", show_header=False)
        for name, value in self._rows():
            table.add_row(name, value)
        console.print(table)

    def _rows(self) -> list[tuple[str, str]]:
        spread = f"median of {len(self.step_s)}; {min(self.step_s):.3f} to {max(self.step_s):.3f}"
        rows = [
            ("step", f"{self.median_s:.3f} s ({spread})"),
            ("speed", f"{self.tokens / self.median_s:,.0f} tokens/s"),
        ]
        if self.flops is not None:
            rows.append(("computed", f"{self.flops / self.median_s / self.ranks / 1e9:,.1f} GFLOP/s a rank"))
        if self.mfu is not None:
            rows.append(("MFU", f"{self.mfu:.1%}"))
        for axes, count in self.sent_bytes.items():
            expected = None if self.formula_bytes is None else self.formula_bytes.get(axes)
            formula = "" if expected is None else f" (formula {expected:,})"
            rows.append((f"sent over {axes}", f"{count:,} bytes a step and rank{formula}"))
        rows.append(("peak memory", f"{self.peak_bytes / 2**30:.2f} GiB a rank, {self.memory}"))
        if self.formula_kept_bytes is not None:
            rows.append(
                ("kept for backward", f"{self.formula_kept_bytes / 2**20:,.1f} MiB a rank and micro-batch, by formula")
            )
        return rows

    def write(self, path: Path) -> None:
        """Write JSON."""
        content = {
            **asdict(self),
            "median_s": self.median_s,
            "tokens_per_s": self.tokens / self.median_s,
            "mfu": self.mfu,
        }
        write_json(path, content)
