"""The figure of a comparison: scores against cost, starting at the checkpoint, in the budget's unit and in others.

Source: the panels of BroRL (arXiv 2510.01180), Figures 1 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D

from brorl.arrays import FloatArray
from brorl.comparison.results import START, ComparisonResults
from brorl.comparison.scores import Comparison, score_at, scores_at
from brorl.cost import UNITS, Unit
from brorl.reporting.figure import (
    COLORS,
    INK,
    ResultFigure,
    axis_label,
    cost_axis,
    draw_curve,
    draw_start,
    label_ends,
    ordered_color,
    style,
)


def arm_colors(comparison: Comparison) -> dict[str, str]:
    """Return a color for each arm: contrasting colors for two arms, a ramp for arms ordered by N, else any colors."""
    arms = comparison.arms
    if len(arms) == 2:
        return {arms[0].name: COLORS[1], arms[1].name: COLORS[0]}
    if not comparison.ordered_by_rollouts:
        return {arm.name: COLORS[i % len(COLORS)] for i, arm in enumerate(arms)}
    ascending = sorted(arms, key=lambda arm: arm.num_rollouts)
    return {arm.name: ordered_color(i / (len(arms) - 1)) for i, arm in enumerate(ascending)}


def _key_handles(results: ComparisonResults) -> list[Line2D]:
    """Return legend entries that explain the arms' letters."""
    colors = arm_colors(results.comparison)
    return [
        Line2D([], [], linestyle="none", marker="s", markersize=6, color=colors[letter], label=f"{letter}: {name}")
        for letter, name in results.key.items()
    ]


def make_figure(results: ComparisonResults, title: str) -> ResultFigure:
    """Make the figure of a comparison."""
    heights = 4.4, 2.7
    figure = ResultFigure(figsize=(11, 0.75 + sum(heights) + 0.21 * len(results.key)), layout="constrained")
    figure.suptitle(fill(title, 112), fontsize=11.5, color=INK, x=0.01, ha="left")
    scores, other_units = figure.subfigures(2, 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_scores(scores, results)
    _draw_other_units(other_units, results)
    if results.key:
        handles = _key_handles(results)
        figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=9, labelcolor=INK)
    return figure


def _curves(comparison: Comparison, unit: Unit, k: int = 1) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Return each arm's mean costs and the pass@k of its runs, beginning with the start.

    A run that ended early keeps its last score, drawn at the evaluation point in the comparison's unit, and at the
    run's actual cost in other units.
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
    """Draw pass@1 and pass@k at the largest k against cost in the budget's unit."""
    comparison = results.comparison
    axes = part.subplots(1, len(results.end_ks), squeeze=False)[0]
    several = max(len(arm.runs) for arm in comparison.arms) > 1
    spread = f"mean of {results.seeds_text}, band: their range" if several else "one seed"
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

    Arms on the same line in the last panel differ only in how far they got.
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
    """Draw pass@k at the largest k against pass@1, ignoring cost, with one line per arm that begins at the start."""
    comparison = results.comparison
    k = results.ks[-1]
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
    """Draw each arm's line with a band over its runs; on a cost axis, a diamond marks the start of a phase."""
    colors = arm_colors(comparison)
    for arm in comparison.arms:
        (cost_M, score_MS), color = curves[arm.name], colors[arm.name]
        mean_M, band = score_MS.mean(1), (score_MS.min(1), score_MS.max(1))
        draw_curve(axis, cost_M, mean_M, color=color, label=arm.name, band=band, small=small, markevery=slice(1, None))
        for begin in arm.phase_begins(unit).values() if unit else ():
            height = float(np.interp(begin, cost_M, mean_M))
            axis.plot(begin, height, "D", markersize=7, color=color, markerfacecolor="white", zorder=6)
    axis.add_line(
        Line2D(cost_M[:1], mean_M[:1], color=INK, marker="o", markersize=4 if small else 6,
               markerfacecolor="white", linestyle="none", label="start", clip_on=False, zorder=5)
    )  # fmt: skip
    style(axis)
