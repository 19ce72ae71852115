"""Write the tables of docs/planner.md, and all rows into docs/data: predictions beside what others have measured."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from functools import cache
from itertools import combinations

import numpy as np

from cuboid.planner.cost.layout import Layout
from cuboid.planner.cost.memory import USABLE, fullest
from cuboid.planner.description.cluster import GPUS, Cluster, Gpu
from cuboid.planner.description.model import ModelDescription
from cuboid.planner.estimate import Estimate, estimate
from generators.choosing import MODELS
from generators.marked import comma_separated, table
from generators.planner_fit import FITS, left_out, log_errors, rows_of
from generators.planner_rows import GIB, TABLES, Row, described, read

#: Tables whose rows are listed; vtrain_single has too many.
_LISTED = ("simumax", "kwai", "korthikanti", "vtrain_multi", "seq1f1b", "torchtitan", "qwen_lora")
_TARGETS = {"simumax": "5 / 12", "kwai": "5 / 12", "vtrain_multi": "8", "vtrain_single": "8", "korthikanti": "8"}


@cache
def rows(name: str) -> tuple[Row, ...]:
    """Of a table."""
    return tuple(TABLES[name]())


@cache
def errors(name: str) -> tuple[float, ...]:
    """Relative errors of a table's times."""
    return tuple(np.expm1(log_errors(_timed(name), {})))


def _timed(name: str) -> list[Row]:
    return [row for row in rows(name) if row.measured_s is not None]


def _percent(value: float) -> str:
    return f"{value:+.1%}".replace("-", "−")


def _size(values: Sequence[float]) -> tuple[str, str]:
    sizes = np.abs(values)
    return f"{np.median(sizes):.1%}", f"{sizes.max():.1%}"


@cache
def _left_out() -> dict[str, list[float]]:
    """By table, errors of rows that were left out."""
    by_table = defaultdict(list)
    for gpu, (_, names) in FITS.items():
        gpu_rows = rows_of(gpu)
        for row, error in zip(gpu_rows, left_out(gpu_rows, names), strict=True):
            by_table[row.table].append(float(error))
    return by_table


def times() -> str:
    """Table of the errors of times, by table."""
    lines = []
    for name in (*_LISTED, "vtrain_single"):
        deviations = errors(name)
        # No constant is fitted to the tables that have none there.
        unseen = _left_out().get(name, deviations)
        lines.append([name, str(len(deviations)), *_size(deviations), *_size(unseen), _TARGETS.get(name, "–")])
    header = ["table", "rows", "median", "worst", "median, left out", "worst, left out", "wanted, %"]
    return table(header, lines, "lrrrrrr")


def every_time() -> str:
    """All predicted times, as a file."""
    lines = []
    for name in _LISTED:
        for row, error in zip(_timed(name), errors(name), strict=True):
            assert row.measured_s is not None
            predicted = row.measured_s * (1 + error)
            lines.append([name, row.name, f"{row.measured_s:.3f}", f"{predicted:.3f}", f"{error:+.1%}"])
    return comma_separated(["table", "row", "measured, s", "predicted, s", "error"], lines)


def single() -> str:
    """Table of the errors of vtrain_single, by tensor parallelism."""
    groups = defaultdict(list)
    for row, error in zip(_timed("vtrain_single"), errors("vtrain_single"), strict=True):
        groups[row.layout.mesh.sequence].append(error)
    lines = [[str(ranks), str(len(deviations)), *_size(deviations)] for ranks, deviations in sorted(groups.items())]
    return table(["tensor parallel", "rows", "median", "worst"], lines, "r" * 4)


@cache
def _memory() -> tuple[tuple[str, Row, float], ...]:
    """Table, row and predicted bytes of all measured memory."""
    predictions = []
    for name in ("simumax", "kwai_memory", "seq1f1b_memory", "torchtitan", "qwen_lora"):
        seen = set()
        for row in rows("seq1f1b" if name == "seq1f1b_memory" else name):
            if row.table != name or (row.measured_bytes is None and not row.out_of_memory):
                continue
            predicted = fullest(row.cost()).total
            key = row.measured_bytes, round(predicted)
            # Memory doesn't depend on the number of micro-batches.
            if name != "simumax" or key not in seen:
                predictions.append((name, row, predicted))
            seen.add(key)
    return tuple(predictions)


def _fits(row: Row, predicted: float) -> bool:
    return predicted <= USABLE * row.cluster.gpu.memory_bytes


def memory() -> str:
    """Table of the errors of memory, by table, and whether it said right what fits."""
    groups: dict[str, list[tuple[Row, float]]] = defaultdict(list)
    for name, row, predicted in _memory():
        groups[name].append((row, predicted))
    lines = []
    for name, predictions in groups.items():
        ran = [(row, predicted) for row, predicted in predictions if row.measured_bytes is not None]
        deviations = [predicted / row.measured_bytes - 1 for row, predicted in ran if row.measured_bytes]
        worst = max(deviations, key=abs)
        right = sum(_fits(row, predicted) != row.out_of_memory for row, predicted in predictions)
        median = f"{np.median(np.abs(deviations)):.1%}"
        lines.append([name, str(len(deviations)), median, _percent(worst), f"{right} of {len(predictions)}"])
    return table(["table", "rows", "median", "worst", "whether it fits: right"], lines, "lrrrr")


def all_memory() -> str:
    """All predicted memory, as a file."""
    lines = []
    for name, row, predicted in _memory():
        measured = "out of memory" if row.measured_bytes is None else f"{row.measured_bytes / GIB:.1f}"
        error = "" if row.measured_bytes is None else f"{predicted / row.measured_bytes - 1:+.1%}"
        fits = "yes" if _fits(row, predicted) else "no"
        lines.append([name, row.name, measured, f"{predicted / GIB:.1f}", error, fits])
    return comma_separated(["table", "row", "measured, GiB", "predicted, GiB", "error", "fits"], lines)


def scaling() -> str:
    """Table of MLPerf's series: each row from each two others of its series."""
    series = defaultdict(dict)
    for row in rows("mlperf"):
        series[row.table][row.measured_s] = row
    lines = []
    for name, by_time in series.items():
        points = [(time, row.cost().step_time().pipeline_s, row) for time, row in by_time.items()]
        for first, second in combinations(points, 2):
            slope = (first[0] - second[0]) / (first[1] - second[1])
            for measured, pipeline_s, row in points:
                if row not in (first[2], second[2]):
                    predicted = first[0] + slope * (pipeline_s - first[1])
                    used = f"{first[2].layout.micro_batches} and {second[2].layout.micro_batches}"
                    error = f"{predicted / measured - 1:+.2%}".replace("-", "−")
                    to = str(row.layout.micro_batches)
                    series_name = name.removeprefix("mlperf ")
                    lines.append([series_name, used, to, f"{measured:.2f}", f"{predicted:.2f}", error])
    header = ["series", "from micro-batches", "to", "measured, s", "predicted, s", "error"]
    return table(header, lines, "llrrrr")


def constants() -> str:
    """Table of the GPUs' constants."""
    lines = []
    for gpu in GPUS.values():
        shares = (gpu.matmul_efficiency, gpu.attention_efficiency, gpu.memory_efficiency, gpu.link_efficiency,
                  gpu.network_efficiency)  # fmt: skip
        rates = [gpu.peak_flops / 1e12, gpu.memory_bytes_per_s / 1e9, gpu.link_bytes_per_s / 1e9]
        cells = [gpu.name, *(f"{rate:.0f}" for rate in rates), f"{gpu.network_bytes_per_s / 1e9:.1f}"]
        cells += [f"{share:.2f}" for share in shares]
        lines.append([*cells, f"{gpu.kernel_s * 1e6:.1f}", f"{gpu.step_s * 1e3:.0f}"])
    header = ["GPU", "TFLOP/s", "memory, GB/s", "link", "network", "of products", "attention", "memory", "link",
              "network", "kernel, µs", "step, ms"]  # fmt: skip
    return table(header, lines, "l" + "r" * 11)


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False) -> ModelDescription:
    return described(
        {
            "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            "tie_word_embeddings": tied,
        }
    )  # fmt: skip


#: By the names of docs/data/long_context_hf_rivals.csv.
_RIVALS = {
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32),
    "Qwen3-30B-A3B": described(MODELS["Qwen3 30B-A3B"]),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64),
}


def _predicted(one: Estimate) -> list[str]:
    return [f"{one.time.total_s:.0f}", f"{one.memory_bytes / 1e9:.1f}"]


def rivals() -> str:
    """Table of the fastest mesh of eight GPUs for one long sequence, beside what others have measured."""
    lines = []
    for row in read("long_context_hf_rivals.csv"):
        if row["model"] not in _RIVALS:
            continue
        model, length, gpus = _RIVALS[row["model"]], int(row["seq_tokens"]), int(row["gpus"])
        cluster = Cluster(GPUS["H100-80GB"], 1, gpus)
        meshes = [mesh for mesh in model.limits.fitting(gpus) if mesh.batch == 1]
        layouts = [Layout(mesh, checkpointing="attention", on_host=True) for mesh in meshes]
        best = min((estimate(model, layout, cluster, length) for layout in layouts), key=lambda plan: plan.time.total_s)
        alone = estimate(model, replace(best.layout, checkpointing="layers", on_host=False), cluster, length)
        node = f"{best.host_bytes * gpus / 1e9:.0f}"
        lines.append([row["model"], row["step_s"], row["peak_gb"], str(best.layout.mesh), *_predicted(alone),
                      *_predicted(best), node, f"{best.limit_bytes / 1e9:.1f}"])  # fmt: skip
    header = [
        "model",
        "TRL, s",
        "GB",
        "our mesh",
        "on the device, s",
        "GB",
        "on the host, s",
        "GB",
        "host, GB a node",
        "usable",
    ]
    return table(header, lines, "lrrlrrrrrr")


def profile_keys() -> str:
    """Table of the keys of a GPU in a profile, from the docstring of what they are read into."""
    meanings = {}
    for names, text in re.findall(r"^ {8}(\w[\w, ]*): ((?:.|\n {12})*)", Gpu.__doc__ or "", flags=re.MULTILINE):
        meanings |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    rows = [
        [f"`gpu.{field.name}`", "needed" if field.default is MISSING else f"{field.default:g}", meanings[field.name]]
        for field in fields(Gpu)
    ]
    return table(["key", "default", "meaning"], rows, "lrl")


def parts() -> dict[str, dict[str, str]]:
    """All tables of the page."""
    return {
        "planner.md": {
            "times": times(),
            "memory": memory(),
            "scaling": scaling(),
            "single": single(),
            "constants": constants(),
            "profile keys": profile_keys(),
            "rivals": rivals(),
        }
    }


def files() -> dict[str, str]:
    """All rows behind the tables of errors."""
    return {"data/planner_times.csv": every_time(), "data/planner_memory.csv": all_memory()}
