"""The figure of a comparison: scores against cost from the checkpoint on, and the same in other units.

Source: the panels of BroRL (arXiv 2510.01180), Figures 1 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MultipleLocator
from scipy.optimize import isotonic_regression

from brorl.arrays import FloatArray
from brorl.comparison.results import START, ComparisonResults
from brorl.comparison.scores import Comparison, score_at, scores_at
from brorl.cost import UNIT_WORDS, UNITS, Unit, short_amount
from brorl.reporting.figure import BLUE, GREY, INK, ORANGE, ResultFigure, style

COLORS = (BLUE, ORANGE, "#2e8b6a", "#b3382c", "#7b5ea7", "#8a6d3b", "#5b626d", "#c2508f", "#3aa0c8")
# The ramp runs from light to dark and from warm to cold, so color blindness and gray printing keep its order.
_RAMP = LinearSegmentedColormap.from_list("rollouts", ["#d3901c", "#cf5a3c", "#9a3f77", "#4c489c", "#142f57"])


def arm_colors(comparison: Comparison) -> dict[str, str]:
    """Return a color for each arm: for two arms distant colors, for arms ordered by N a ramp, else any."""
    arms = comparison.arms
    if len(arms) == 2:
        return {arms[0].name: ORANGE, arms[1].name: BLUE}
    if not comparison.ordered_by_rollouts:
        return {arm.name: COLORS[i % len(COLORS)] for i, arm in enumerate(arms)}
    ascending = sorted(arms, key=lambda arm: arm.num_rollouts)
    return {arm.name: to_hex(_RAMP(i / (len(arms) - 1))) for i, arm in enumerate(ascending)}


def key_handles(results: ComparisonResults) -> list[Line2D]:
    """Return the entries of a legend that explains the letters of arms."""
    colors = arm_colors(results.comparison)
    return [
        Line2D([], [], linestyle="none", marker="s", markersize=6, color=colors[letter], label=f"{letter}: {name}")
        for letter, name in results.key.items()
    ]


def draw_start(axis: Axes, start: float, *, below: bool, fontsize: float) -> None:
    """Draw the score of the start as a dotted line, with its value below or above the line."""
    axis.axhline(start, color=GREY, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
    axis.annotate(
        f"start {start:.3f}", (1, start), xycoords=("axes fraction", "data"), xytext=(-2, -10 if below else 3),
        textcoords="offset points", fontsize=fontsize, color=GREY, ha="right", zorder=6,
        path_effects=[withStroke(linewidth=3, foreground="white")],
    )  # fmt: skip


def label_ends(axis: Axes, end: float, labels: Mapping[str, tuple[float, str]], colors: Mapping[str, str]) -> None:
    """Write the labels of the arms at the ends of their lines without overlap; the limits must be set before."""
    low, high = axis.get_ylim()
    order = sorted(labels, key=lambda name: labels[name][0])
    height_A = apart(np.array([(labels[name][0] - low) / (high - low) for name in order]), 0.062)
    for name, label_y in zip(order, height_A, strict=True):
        value, text = labels[name]
        axis.annotate(
            text, xy=(end, value), xytext=(1.02, label_y), textcoords="axes fraction", color=colors[name], fontsize=9.5,
            va="center", annotation_clip=False,
        )  # fmt: skip


def apart(height_A: FloatArray, gap: float) -> FloatArray:
    """Move rising heights apart, within 0 and 1, with the least sum of squared moves.

    Neighbors are then at least `gap` apart: [0.5, 0.5] with gap 0.1 gives [0.45, 0.55]. Gaps are smaller if there are
    too many heights.
    """
    last = len(height_A) - 1
    shift_A = min(gap, 1 / max(last, 1)) * np.arange(len(height_A))
    rising_A = isotonic_regression(height_A - shift_A).x
    moved_A: FloatArray = np.clip(rising_A, 0, max(0, 1 - shift_A[-1])) + shift_A
    return moved_A


def cost_axis(axis: Axes, unit: Unit, *, max_ticks: int = 5) -> None:
    """Label an axis of costs that starts at 0."""
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value, unit)))
    axis.set_xlim(left=0)
    if unit == "seconds":
        axis.xaxis.set_major_locator(MultipleLocator(tick_seconds(axis.get_xlim()[1] / max_ticks)))
    else:
        axis.locator_params(axis="x", nbins=max_ticks)
    axis.set_xlabel(axis_label(unit), fontsize=9, color=INK)


def tick_seconds(least: float) -> float:
    """Return the smallest round distance between ticks, in seconds, that is at least `least`."""
    numbers = [(unit, number) for unit in (0.01, 1, 60, 3600) for number in (1, 2, 5, 10, 20, 30)]
    return next((unit * number for unit, number in numbers if unit * number >= least), 86_400 * ceil(least / 86_400))


def tick_text(value: float, unit: Unit) -> str:
    """Return an amount in the short form of a tick label: 0, 40 s, 2.5M."""
    return "0" if value == 0 else short_amount(value, unit)


def axis_label(unit: Unit) -> str:
    """Return the label of an axis of costs."""
    return "training time, without evaluations" if unit == "seconds" else f"{UNIT_WORDS[unit]} of training"


def make_figure(results: ComparisonResults, title: str) -> ResultFigure:
    """Make the figure of a comparison."""
    heights = 4.4, 2.7
    figure = ResultFigure(figsize=(11, 0.75 + sum(heights) + 0.21 * len(results.key)), layout="constrained")
    figure.suptitle(fill(title, 112), fontsize=11.5, color=INK, x=0.01, ha="left")
    scores, other_units = figure.subfigures(2, 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_scores(scores, results)
    _draw_other_units(other_units, results)
    if results.key:
        handles = key_handles(results)
        figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=9, labelcolor=INK)
    return figure


def _curves(comparison: Comparison, unit: Unit, k: int = 1) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Return the pass@k of each arm's runs against their mean cost, from the start on.

    A run that ended early keeps its last score. In the comparison's unit that score is drawn at the evaluation point;
    in the other units it is drawn at the run's real cost.
    """
    curves = {}
    for arm in comparison.arms:
        costs, scores = [], []
        for point in (0.0, *comparison.eval_points):
            scores.append(scores_at(comparison, arm, point, k).mean(1))
            spent = [score_at(run, comparison.unit, point).cost.of(unit) for run in arm.runs]
            costs.append(float(np.mean(np.maximum(spent, point) if unit == comparison.unit else spent)))
        curves[arm.name] = np.array(costs), np.stack(scores)
    return curves


def _draw_scores(part: SubFigure, results: ComparisonResults) -> None:
    """Draw pass@1 and pass@k of the largest k against the unit of the budget."""
    comparison = results.comparison
    axes = part.subplots(1, len(results.end_ks), squeeze=False)[0]
    several = max(len(arm.runs) for arm in comparison.arms) > 1
    spread = f"mean of {results.seeds_text}, band: all of them" if several else "one seed"
    for axis, k in zip(axes, results.end_ks, strict=True):
        curves = _curves(comparison, comparison.unit, k)
        _draw_lines(axis, comparison, comparison.unit, curves)
        axis.set_title(f"pass@{k} on held-out prompts ({spread})", fontsize=10, color=INK, loc="left")
        cost_axis(axis, comparison.unit)
        axis.margins(y=0.12)
        axis.set_ylim(axis.get_ylim())
        start = results.scores.pass_at[START][k].value
        lowest = min(score_MS.mean(1)[1:].min() for _, score_MS in curves.values())
        draw_start(axis, start, below=start <= lowest, fontsize=8)
        ends = {name: float(score_MS[-1].mean()) for name, (_, score_MS) in curves.items()}
        labels = {name: (end, f"{name}  {end:.3f}") for name, end in ends.items()}
        label_ends(axis, axis.get_xlim()[1], labels, arm_colors(comparison))


def _draw_other_units(part: SubFigure, results: ComparisonResults) -> None:
    """Draw pass@1 against the units in which the arms are not matched, and coverage against pass@1.

    If arms share one line in the last panel, they differ only in how far they have come.
    """
    comparison = results.comparison
    units: list[Unit] = [unit for unit in UNITS if unit != comparison.unit]
    trade = results.ks[-1] > 1
    grid = part.add_gridspec(1, len(units) + trade)
    first = part.add_subplot(grid[0])
    axes = [first, *(part.add_subplot(grid[i], sharey=first) for i in range(1, len(units)))]
    for axis, unit in zip(axes, units, strict=True):
        _draw_lines(axis, comparison, unit, _curves(comparison, unit), small=True)
        cost_axis(axis, unit, max_ticks=4)
        axis.margins(y=0.1)
        axis.tick_params(labelleft=axis is first)
    first.set_ylabel("pass@1", fontsize=9, color=INK)
    labels = [axis_label(unit).removesuffix(" of training").removesuffix(", without evaluations") for unit in units]
    title = f"The same runs in other units of cost: {', '.join(labels)}"
    if trade:
        _draw_trade(part.add_subplot(grid[-1]), results)
        title += "; and coverage against pass@1"
    part.suptitle(title, fontsize=10, color=INK, x=0.01, ha="left")


def _draw_trade(axis: Axes, results: ComparisonResults) -> None:
    """Draw pass@k of the largest k against pass@1, without cost: a line for every arm, from the start on."""
    comparison, k = results.comparison, results.ks[-1]
    by_1, by_k = (_curves(comparison, comparison.unit, i) for i in (1, k))
    curves = {name: (by_1[name][1].mean(1), score_MS.mean(1, keepdims=True)) for name, (_, score_MS) in by_k.items()}
    _draw_lines(axis, comparison, None, curves, small=True)
    axis.set_xlabel("pass@1", fontsize=9, color=INK)
    axis.set_ylabel(f"pass@{k}", fontsize=9, color=INK)


def _draw_lines(
    axis: Axes,
    comparison: Comparison,
    unit: Unit | None,
    curves: Mapping[str, tuple[FloatArray, FloatArray]],
    *,
    small: bool = False,
) -> None:
    """Draw a line with a band over runs for every arm; on an axis of costs, a diamond marks the begin of a phase."""
    colors = arm_colors(comparison)
    for arm in comparison.arms:
        (cost_M, score_MS), color = curves[arm.name], colors[arm.name]
        low_M, high_M, mean_M = score_MS.min(1), score_MS.max(1), score_MS.mean(1)
        if (high_M > low_M).any():
            axis.fill_between(cost_M, low_M, high_M, color=color, alpha=0.16, linewidth=0)
        axis.plot(
            cost_M, mean_M, color=color, linewidth=1.6 if small else 2.2, marker="o",
            markersize=3 if small else 4.5, markevery=slice(1, None), label=arm.name,
        )  # fmt: skip
        for begin in arm.phase_begins(unit).values() if unit else ():
            height = float(np.interp(begin, cost_M, mean_M))
            axis.plot(begin, height, "D", markersize=7, color=color, markerfacecolor="white", zorder=6)
    axis.add_line(
        Line2D(cost_M[:1], mean_M[:1], color=INK, marker="o", markersize=4 if small else 6,
               markerfacecolor="white", linestyle="none", label="start", clip_on=False, zorder=5)
    )  # fmt: skip
    style(axis)
