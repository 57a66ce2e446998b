"""A cluster plan as a figure: seconds, useful fraction, and the phases of a step against the number of GPUs.

In: a plan. Out: a PNG.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from brorl.planning.cluster.capacity import Mode
from brorl.planning.cluster.cluster_plan import MODES, ClusterPlan
from brorl.planning.cluster.scaling import PAYING
from brorl.planning.cluster.unit_costs import Case

_COLORS: dict[Mode, str] = {"sync": "#1f5fa8", "async": "#d9822b"}
_GREY = "#8a8f98"
_ENDS: tuple[Case, Case] = ("best", "worst")


def draw_cluster_plan(plan: ClusterPlan, path: Path) -> None:
    """Draw the plan as a PNG of three panels."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)
    _draw_seconds(axes[0], plan)
    _draw_useful(axes[1], plan)
    _draw_gain(axes[2], plan)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel(f"number of {plan.cluster.gpu.name}s")
        _log_axis(axis, plan)
    work = plan.job.work
    figure.suptitle(
        f"{plan.name}, {plan.job.engine} engine: {work.prompts} prompts x {work.rollouts} rollouts x "
        f"{work.lengths.mean:,.0f} tokens (computed from published and assumed unit costs; no GPU was measured)",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def _draw_seconds(axis: Axes, plan: ClusterPlan) -> None:
    if any(plan.scaling.values()):
        axis.set_yscale("log")
    for mode in MODES:
        rows = plan.scaling[mode]
        numbers = [row.num_gpus for row in rows]
        best, worst = ([row.capacity.total(case) for row in rows] for case in _ENDS)
        axis.fill_between(numbers, best, worst, color=_COLORS[mode], alpha=0.15)
        axis.plot(numbers, [row.result.seconds for row in rows], "-o", color=_COLORS[mode], label=mode, markersize=4)
    rows = plan.scaling["sync"] or plan.scaling["async"]
    if rows:
        first = rows[0]
        ideal = [first.result.seconds * first.num_gpus / row.num_gpus for row in rows]
        axis.plot([row.num_gpus for row in rows], ideal, "--", color=_GREY, linewidth=1, label="ideal")
    axis.set_title("Seconds of a step\n(simulated; bands: assumed ranges, without waiting)", fontsize=10)
    axis.legend(frameon=False)


def _draw_useful(axis: Axes, plan: ClusterPlan) -> None:
    for mode in MODES:
        rows = plan.scaling[mode]
        fractions = [row.useful_fraction for row in rows]
        axis.plot([row.num_gpus for row in rows], fractions, "-o", color=_COLORS[mode], label=mode, markersize=4)
    axis.set_ylim(0, 1.05)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_title("Useful fraction of the GPUs", fontsize=10)
    axis.legend(frameon=False)


def _draw_gain(axis: Axes, plan: ClusterPlan) -> None:
    for mode in MODES:
        gains = [(row.num_gpus, row.gain) for row in plan.scaling[mode] if row.gain is not None]
        numbers, values = [number for number, _ in gains], [gain for _, gain in gains]
        axis.plot(numbers, values, "-o", color=_COLORS[mode], label=mode, markersize=4)
    axis.axhline(PAYING, color=_GREY, linewidth=1, linestyle="--")
    axis.set_ylim(0.9, 2.4)
    axis.set_title(f"Times faster than half as many GPUs\n(dashed: a doubling pays above {PAYING})", fontsize=10)
    axis.legend(frameon=False)


def _log_axis(axis: Axes, plan: ClusterPlan) -> None:
    numbers = sorted({row.num_gpus for rows in plan.scaling.values() for row in rows})
    if numbers:
        axis.set_xscale("log", base=2)
        axis.set_xticks(numbers, [str(n) for n in numbers], fontsize=8)
        axis.set_xlim(numbers[0] / 1.3, numbers[-1] * 1.3)
    axis.xaxis.set_minor_locator(NullLocator())
