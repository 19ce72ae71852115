"""Calibrate the constants of a GPU on measured rows, and say how well a row is predicted that the fit has not seen.

python -c "from generators.planner_fit import main; main()" in docs/ prints what belongs into
cuboid/planner/description/cluster.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from generators.planner_rows import TABLES, Row

#: How far from its start a constant may go, as a factor: they have a meaning.
_LIMIT = 4.0
_MOST_EFFICIENT = 0.95
#: Residuals above this count by their size rather than by their square.
_OUTLIER = 0.05
#: Standard deviation, of the logarithm, that a constant is taken to have before any row is seen.
_PRIOR = 0.3


@dataclass(frozen=True)
class Fit:
    """Constants and how well they do.

    Args:
        constants: by name.
        errors: relative, of each row.
        left_out: likewise, of each row with the constants that all others give.
    """

    constants: dict[str, float]
    errors: np.ndarray
    left_out: np.ndarray


def calibrate(rows: Sequence[Row], start: dict[str, float], *, iterations: int = 12) -> Fit:
    """Fit constants to the rows' times.

    The logarithms of the errors are made small, by Gauss and Newton's method with weights for outliers. Leaving a row
    out changes the constants by one more such step from those of all rows.

    Args:
        rows: measurements of one kind of GPU.
        start: the constants to fit, with plausible values.
        iterations: of the method.
    """
    names = list(start)
    prior = np.log(np.array([start[name] for name in names]))
    # An efficiency is a part of what the data sheet says.
    most = np.array([np.log(_MOST_EFFICIENT) if name.endswith("efficiency") else np.inf for name in names])
    now = prior.copy()
    for _ in range(iterations):
        residual, slope = _linearized(rows, names, now)
        now = now + _step(residual, slope, now - prior)
        now = np.clip(now, prior - np.log(_LIMIT), np.minimum(prior + np.log(_LIMIT), most))
    residual, slope = _linearized(rows, names, now)
    left_out = np.empty(len(rows))
    for index in range(len(rows)):
        others = np.arange(len(rows)) != index
        change = _step(residual[others], slope[others], now - prior)
        left_out[index] = residual[index] + slope[index] @ change
    constants = {name: float(np.exp(value)) for name, value in zip(names, now, strict=True)}
    return Fit(constants, np.expm1(residual), np.expm1(left_out))


def left_out(rows: Sequence[Row], names: Sequence[str]) -> np.ndarray:
    """Relative errors of rows, each with the constants that the shipped ones become when it is left out.

    Args:
        rows: measurements of one kind of GPU.
        names: of the constants.
    """
    gpu = rows[0].cluster.gpu
    now = np.log([getattr(gpu, name) for name in names])
    residual, slope = _linearized(rows, list(names), now)
    errors = np.empty(len(rows))
    of_all = _step(residual, slope, np.zeros(len(names)))
    for index in range(len(rows)):
        others = np.arange(len(rows)) != index
        # What the other rows alone would change, less what all of them would.
        change = _step(residual[others], slope[others], np.zeros(len(names))) - of_all
        errors[index] = np.expm1(residual[index] + slope[index] @ change)
    return errors


def log_errors(rows: Sequence[Row], constants: dict[str, float]) -> np.ndarray:
    """Logarithms of predicted over measured times."""
    predicted = [row.cost(constants).step_time().total_s for row in rows]
    return np.log(predicted) - np.log([row.measured_s for row in rows if row.measured_s is not None])


def _linearized(rows: Sequence[Row], names: list[str], now: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    constants = dict(zip(names, np.exp(now), strict=True))
    residual = log_errors(rows, constants)
    nudge = 1e-3
    columns = [
        (log_errors(rows, {**constants, name: constants[name] * np.exp(nudge)}) - residual) / nudge for name in names
    ]
    return residual, np.stack(columns, axis=1)


def _step(residual: np.ndarray, slope: np.ndarray, off: np.ndarray) -> np.ndarray:
    weight = np.minimum(1, _OUTLIER / np.maximum(np.abs(residual), 1e-9))
    keep = (_OUTLIER / _PRIOR) ** 2
    matrix = slope.T @ (weight[:, None] * slope) + keep * np.eye(slope.shape[1])
    return np.linalg.solve(matrix, -(slope.T @ (weight * residual) + keep * off))


#: Where each fit begins.
_START = {
    "matmul_efficiency": 0.75, "attention_efficiency": 0.45, "memory_efficiency": 0.65, "kernel_s": 4e-6,
    "link_efficiency": 0.75, "network_efficiency": 0.7, "step_s": 0.005,
}  # fmt: skip
#: Which constants the tables of a GPU can tell apart, by the tables. Of the 1,440 rows of vtrain_single 40 are enough.
FITS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "A100": (("vtrain_single", "vtrain_multi", "korthikanti", "seq1f1b"), tuple(_START)),
    "H800": (("kwai",), tuple(name for name in _START if name not in ("kernel_s", "step_s"))),
    "B200": (("simumax",), tuple(name for name in _START if name != "network_efficiency")),
    "H100-96GB": (("torchtitan",), tuple(name for name in _START if name not in ("kernel_s", "step_s"))),
}


def rows_of(gpu: str) -> list[Row]:
    """The rows with times that a GPU's constants are fitted to."""
    fitted = []
    for table in FITS[gpu][0]:
        rows = [row for row in TABLES[table]() if row.measured_s is not None]
        fitted += rows[::36] if table == "vtrain_single" else rows
    return fitted


def main() -> None:
    """Fit the constants of every GPU, and print them with the errors that they leave."""
    for gpu, (_, names) in FITS.items():
        fit = calibrate(rows_of(gpu), {name: _START[name] for name in names})
        print(gpu, {name: float(f"{value:.2g}") for name, value in fit.constants.items()})
        for what, errors in (("fitted", fit.errors), ("left out", fit.left_out)):
            print(f"  {what}: median {np.median(np.abs(errors)):.1%}, worst {np.abs(errors).max():.1%}")
