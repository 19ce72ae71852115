"""Estimates and plans as tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cuboid.planner.cost.step import StepCost
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.estimate import Estimate, remedies
from cuboid.planner.ranking import SearchResult
from cuboid.planner.search import reason, terms
from cuboid.seq1f1b.schedule.timeline_picture import check_picture, format_bytes, save_picture

_GIB = 2**30


def print_estimate(estimate: Estimate, console: Any) -> None:
    """Print time by kind, memory by kind and stage, and what to change if it doesn't fit."""
    from rich.table import Table

    layout, cost, model = estimate.layout, estimate.cost, estimate.cost.model
    console.print(f"{model.name}, {model.parameters / 1e9:.2f}B parameters, {cost.length} tokens, on {cost.cluster}")
    if model.trunk is not None:
        console.print(f"{model.trunk}: {model.trained_parameters / 1e6:,.1f}M parameters are trained", highlight=False)
    console.print(f"{layout}")
    if estimate.uncounted:
        console.print(f"Not counted: {estimate.uncounted}.")
    table = Table(title="a step", title_justify="left")
    table.add_column("kind")
    table.add_column("seconds", justify="right")
    table.add_column("of the step", justify="right")
    for name, seconds in terms(estimate).items():
        table.add_row(name, f"{seconds:.4f}", f"{seconds / estimate.time.total_s:.1%}")
    table.add_row("all", f"{estimate.time.total_s:.4f}", "", style="bold")
    console.print(table)
    console.print(f"{estimate.tokens_per_s:,.0f} tokens/s, MFU {estimate.mfu:.1%}", highlight=False)
    if layout.stages > 1:
        bubble = f"{estimate.time.bubble:.1%} of the time from the first forward to the last backward"
        console.print(f"bubble: {bubble}, without what comes after it in the step", highlight=False)
    console.print(_memory_table(estimate))
    if estimate.bytes_by_axis:
        sent = ", ".join(f"{axis} {format_bytes(count)}" for axis, count in estimate.bytes_by_axis.items())
        console.print(f"sent by a rank in a step inside of layers: {sent}", highlight=False)
    if estimate.host_bytes:
        console.print(_host(estimate), highlight=False)
    console.print(_verdict(estimate), highlight=False)


def _memory_table(estimate: Estimate) -> Any:
    from rich.table import Table

    # A table of all stages may be too wide: show the first, the middle, the last and the fullest one.
    stages = estimate.stages
    fullest = max(range(len(stages)), key=lambda stage: stages[stage].total)
    shown = sorted({0, len(stages) // 2, len(stages) - 1, fullest})
    table = Table(title="memory of a rank, GiB", title_justify="left")
    table.add_column("kind")
    for stage in shown:
        table.add_column(f"stage {stage}", justify="right")
    for kind in stages[0].by_kind():
        sizes = [stages[stage].by_kind()[kind] for stage in shown]
        if any(sizes):
            table.add_row(kind.replace("_", " "), *(f"{size / _GIB:.2f}" for size in sizes))
    table.add_row("all", *(f"{stages[stage].total / _GIB:.2f}" for stage in shown), style="bold")
    return table


def _host(estimate: Estimate) -> str:
    cluster = estimate.cost.cluster
    node = estimate.host_bytes * cluster.gpus_per_node
    at = f"at {cluster.gpu.host_rate / 1e9:.0f} GB/s each way"
    if not estimate.layout.moves:
        return f"in host memory of a node: {format_bytes(round(node))}"
    alone = Estimate.of(StepCost(
        estimate.cost.model, replace(estimate.layout, on_host=False), cluster, estimate.cost.length,
        estimate.cost.software,
    ))  # fmt: skip
    waits_s = estimate.time.total_s - alone.time.total_s
    hidden = "computing hides the copies" if waits_s < 1e-3 * alone.time.total_s else f"the step waits {waits_s:.3f} s"
    return f"in host memory of a node: {format_bytes(round(node))}; {at}, {hidden}"


def _verdict(estimate: Estimate) -> str:
    if estimate.host_bytes > estimate.host_limit_bytes:
        return (
            f"It does not fit: a rank has {estimate.host_bytes / _GIB:.1f} GiB in host memory, and "
            f"can have {estimate.host_limit_bytes / _GIB:.1f}."
        )
    spare = estimate.limit_bytes - estimate.memory_bytes
    limit = f"{estimate.limit_bytes / _GIB:.1f} GiB that tensors can have of {estimate.cost.cluster.gpu.name}"
    if spare >= 0:
        return f"It fits: {spare / _GIB:.1f} GiB are left of the {limit}.{_counted(estimate)}"
    lines = [f"It does not fit: {-spare / _GIB:.1f} GiB more than the {limit}."]
    for name, changed in remedies(estimate)[:4]:
        lines.append(
            f"  with {name} it does: {changed.memory_bytes / _GIB:.1f} GiB, a step of {changed.time.total_s:.3f} s"
        )
    if len(lines) == 1:
        lines.append("  No single change makes it fit; `cuboid plan` looks for another layout.")
    return "\n".join(lines)


def _counted(estimate: Estimate) -> str:
    """What a count of all that is alive in a layer says of a layout that fits."""
    counted = estimate.counted_bytes
    if counted is None:
        return ""
    takes = f"all that is alive while a layer runs, counted in its own code, it takes {counted / _GIB:.1f} GiB"
    return f"\nWith {takes}." if counted <= estimate.limit_bytes else f"\nWarning: with {takes}, which is more."


def print_profile(cluster: Cluster, console: Any) -> None:
    """Print the constants of a cluster's GPUs."""
    from rich.table import Table

    gpu = cluster.gpu
    table = Table(title=f"{cluster}, {gpu.memory_bytes / _GIB:.1f} GiB a GPU", title_justify="left")
    table.add_column("rate")
    for name in ("of", "reached", "share"):
        table.add_column(name, justify="right")
    rates = (
        ("matrix products, TFLOP/s", gpu.peak_flops / 1e12, gpu.matmul_efficiency),
        ("attention, TFLOP/s", gpu.peak_flops / 1e12, gpu.attention_efficiency),
        ("memory, GB/s", gpu.memory_bytes_per_s / 1e9, gpu.memory_efficiency),
        ("inside a node, GB/s", gpu.link_bytes_per_s / 1e9, gpu.link_efficiency),
        ("between nodes, GB/s", gpu.network_bytes_per_s / 1e9, gpu.network_efficiency),
    )
    for name, sheet, share in rates:
        table.add_row(name, f"{sheet:.4g}", f"{sheet * share:.4g}", f"{share:.0%}")
    console.print(table)
    latencies = [f"{1e6 * seconds:.1f} µs" for seconds in (gpu.kernel_s, gpu.link_latency_s, gpu.network_latency_s)]
    console.print(
        f"a kernel takes {latencies[0]}, a step of a ring {latencies[1]} in a node and {latencies[2]} between nodes",
        highlight=False,
    )


def print_plan(plan: SearchResult, console: Any) -> None:
    """Print the best layouts, with the reason why each loses to the first."""
    from rich.table import Table

    best = plan.best[0]
    table = Table(title=f"the best of {plan.considered:,} layouts", title_justify="left")
    for name in ("", "layout", "step, s", "tokens/s", "MFU", "GiB", "against the first"):
        # On a narrow terminal words wrap, so that no figure is cut off.
        words = name in ("layout", "against the first")
        table.add_column(name, justify="left" if words else "right", no_wrap=not words)
    for number, estimate in enumerate(plan.best, 1):
        table.add_row(
            str(number),
            str(estimate.layout),
            f"{estimate.time.total_s:.3f}",
            f"{estimate.tokens_per_s:,.0f}",
            f"{estimate.mfu:.1%}",
            f"{estimate.memory_bytes / _GIB:.1f}",
            reason(estimate, best),
        )
    console.print(table)
    if plan.refused:
        counted = "with all that is alive while a layer runs, counted in its own code, not"
        console.print(f"Before the first came {plan.refused} that fit by formulas, but {counted}.", highlight=False)


def print_comparison(first: Estimate, second: Estimate, console: Any) -> None:
    """Print two layouts side by side, term by term."""
    from rich.table import Table

    table = Table(title=f"A: {first.layout}\nB: {second.layout}", title_justify="left")
    for name in ("", "A", "B", "B − A"):
        table.add_column(name, justify="left" if not name else "right")
    for (name, first_value), second_value in zip(terms(first).items(), terms(second).values(), strict=True):
        table.add_row(f"{name}, s", f"{first_value:.4f}", f"{second_value:.4f}", f"{second_value - first_value:+.4f}")
    a, b = first.time.total_s, second.time.total_s
    table.add_row("step, s", f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}", style="bold")
    memories = [max(estimate.stages, key=lambda stage: stage.total).by_kind() for estimate in (first, second)]
    for kind in memories[0]:
        first_value, second_value = (memory[kind] / _GIB for memory in memories)
        if first_value or second_value:
            table.add_row(
                f"{kind.replace('_', ' ')}, GiB",
                f"{first_value:.2f}",
                f"{second_value:.2f}",
                f"{second_value - first_value:+.2f}",
            )
    first_value, second_value = first.memory_bytes / _GIB, second.memory_bytes / _GIB
    table.add_row(
        "memory, GiB", f"{first_value:.2f}", f"{second_value:.2f}", f"{second_value - first_value:+.2f}", style="bold"
    )
    for name, one in (("A", first), ("B", second)):
        if not one.fits:
            table.add_row(f"{name} does not fit: {one.limit_bytes / _GIB:.1f} GiB can be used", "", "", "")
    console.print(table)


#: Distinguishable with any colour vision.
_COLOURS = (
    "#5B9BD5",
    "#E8893B",
    "#8CBF6A",
    "#C3DEF5",
    "#F7C08F",
    "#9E86C8",
    "#7F7F7F",
    "#D9C54A",
    "#C97B7B",
    "#444444",
)


def draw_estimate(estimate: Estimate, path: Path) -> None:
    """Draw memory by stage and kind beside the limit, and the step by kind, as .png, .svg or .pdf."""
    check_picture(path)
    # matplotlib takes a second to import, which only drawing should cost.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[max(2, min(len(estimate.stages), 12)), 2])
    names = [str(stage) for stage in range(len(estimate.stages))]
    kinds = {kind: [stage.by_kind()[kind] / _GIB for stage in estimate.stages] for kind in estimate.stages[0].by_kind()}
    _stack(left, names, kinds)
    left.axhline(estimate.limit_bytes / _GIB, color="#1A1A1A", linestyle="--", linewidth=1)
    left.set(title="memory of a rank, GiB; dashed: what tensors can have", xlabel="stage")
    _stack(right, ["step"], {name: [seconds] for name, seconds in terms(estimate).items()})
    right.set(title=f"a step, s: {estimate.tokens_per_s:,.0f} tokens/s")
    figure.suptitle(f"{estimate.cost.model.name} on {estimate.cost.cluster}: {estimate.layout}", fontsize="medium")
    save_picture(figure, path)


def _stack(axes: Any, names: Sequence[str], kinds: dict[str, list[float]]) -> None:
    bottom = [0.0] * len(names)
    for colour, (kind, sizes) in zip(_COLOURS, kinds.items(), strict=False):
        if any(sizes):
            axes.bar(names, sizes, bottom=bottom, color=colour, label=kind.replace("_", " "), width=0.7)
            bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
