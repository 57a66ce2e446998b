"""The figure of the frontier of a sweep: the best arm at each budget.

`frontier.png` has a column for pass@1, pass@k (coverage) and worst@k (sharpness): above, each arm's score at every
budget and the best of them; below, the best N at each budget. A cross is an arm that is not matched. The title is the
answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from brorl.comparison.arms import Comparison, start_scores
from brorl.comparison.axes import INK, PALE, arm_colors, draw_start, key_handles, label_ends, log_cost_axis, style
from brorl.comparison.frontier import BestArm, Frontier, FrontierPoint
from brorl.comparison.results import ComparisonResults
from brorl.comparison.text import answer_of

_BAND = "#b3b8c1"


def make_frontier_figure(results: ComparisonResults) -> Figure:
    """Make the figure of the frontier of a sweep.

    Raises:
        ValueError: If there are fewer than three arms.
    """
    if not results.frontiers:
        raise ValueError(f"a frontier needs at least three arms, got {len(results.names)}")
    columns = len(results.frontiers)
    width = max(1.0 + 4.15 * columns, 8.5)
    figure = Figure(figsize=(width, 7.9 + 0.2 * max(0, len(results.key) - 2)), layout="constrained")
    figure.suptitle(fill(answer_of(results), round(10.6 * width)), fontsize=12.5, color=INK, x=0.012, ha="left")
    axes = figure.subplots(2, columns, sharex="col", squeeze=False, height_ratios=[1.25, 1])
    for index, frontier in enumerate(results.frontiers):
        _draw_frontier(axes[0, index], frontier, results)
        _draw_best(axes[1, index], frontier, results, first=index == 0)
    figure.legend(
        handles=_legend(results), loc="outside lower left", ncols=2, frameon=False, fontsize=9.5, labelcolor=INK,
        handletextpad=0.5, columnspacing=1.6,
    )  # fmt: skip
    return figure


def _draw_frontier(axis: Axes, frontier: Frontier, results: ComparisonResults) -> None:
    """Draw every arm's score against the budget, the best of each budget, and its interval."""
    comparison = results.comparison
    colors = arm_colors(comparison)
    best = [frontier.at(b.eval_point)[b.arm].score for b in frontier.best]
    points = [b.eval_point for b in frontier.best]
    low, high = [score.low for score in best], [score.high for score in best]
    axis.fill_between(points, low, high, color=PALE, alpha=0.42, linewidth=0, zorder=1)
    axis.plot(points, [score.value for score in best], color=_BAND, linewidth=9, alpha=0.75, zorder=2,
              solid_capstyle="round", solid_joinstyle="round", gid="frontier")  # fmt: skip
    for arm in comparison.arms:
        of_arm = [point for point in frontier.points if point.arm == arm.name]
        _draw_arm(axis, of_arm, colors[arm.name])
    _draw_dots(axis, [(b, score.value) for b, score in zip(frontier.best, best, strict=True)], colors)
    start = float(start_scores(comparison, frontier.measure).mean())
    draw_start(axis, start, below=start <= min(p.score.value for p in frontier.points), fontsize=8.5)
    style(axis)
    log_cost_axis(axis, comparison.unit, comparison.eval_points)
    axis.set_xlabel("")
    axis.tick_params(labelbottom=False)
    axis.set_title(_title(frontier), fontsize=11, color=INK, loc="left")
    seen = [start, *(p.score.value for p in frontier.points), *low, *high]
    pad = 0.07 * (max(seen) - min(seen)) or 0.05
    axis.set_ylim(min(seen) - pad, max(seen) + pad)
    labels = {name: (point.score.value, name) for name, point in frontier.at(results.budget).items()}
    label_ends(axis, results.budget, labels, colors)


def _draw_arm(axis: Axes, points: Sequence[FrontierPoint], color: str) -> None:
    """Draw an arm's line through the evaluation points at which it is compared, and crosses where it is not."""
    compared = [p.score.value if p.matched else np.nan for p in points]
    axis.plot(
        [p.eval_point for p in points], compared, color=color, linewidth=1.7, marker="o", markersize=3.5, zorder=4,
        label=points[0].arm,
    )  # fmt: skip
    if any(np.isnan(compared)):
        left_out = [(p.eval_point, p.score.value) for p in points if not p.matched]
        axis.plot(*zip(*left_out, strict=True), "x", color=color, markersize=6, zorder=4)


def _draw_best(axis: Axes, frontier: Frontier, results: ComparisonResults, *, first: bool) -> None:
    """Draw the best arm at each budget, its dot filled where its lead is shown."""
    comparison = results.comparison
    row_of, names = rows_of(comparison)
    axis.plot(
        [b.eval_point for b in frontier.best], [np.nan if b.is_tied else row_of[b.arm] for b in frontier.best],
        color=_BAND, linewidth=5, alpha=0.6, zorder=2, solid_capstyle="round", solid_joinstyle="round", gid="best",
    )  # fmt: skip
    _draw_dots(axis, [(b, row_of[b.arm]) for b in frontier.best], arm_colors(comparison))
    log_cost_axis(axis, comparison.unit, comparison.eval_points)
    axis.set_yticks(list(row_of.values()), [names[arm] for arm in row_of])
    axis.yaxis.set_minor_locator(NullLocator())
    low, high = min(row_of.values()), max(row_of.values())
    axis.set_ylim(low - 0.13 * (high - low), high + 0.13 * (high - low))
    style(axis)
    if first:
        axis.set_ylabel("best N (log scale)" if comparison.ordered_by_rollouts else "best arm", fontsize=10, color=INK)


def _draw_dots(axis: Axes, best: Sequence[tuple[BestArm, float]], colors: Mapping[str, str]) -> None:
    for b, height in best:
        if not b.is_tied:
            axis.plot(
                b.eval_point, height, "o", markersize=8.5, markeredgewidth=1.8, markeredgecolor=colors[b.arm],
                markerfacecolor=colors[b.arm] if b.lead_shown else "white", zorder=5,
            )  # fmt: skip


def rows_of(comparison: Comparison) -> tuple[dict[str, float], dict[str, str]]:
    """Return the height of each arm in the lower panel, and the text of its tick: log2 of N, or one row per arm."""
    arms = comparison.arms
    if not comparison.ordered_by_rollouts:
        return {arm.name: float(i) for i, arm in enumerate(arms)}, {arm.name: arm.name for arm in arms}
    return {arm.name: log2(arm.num_rollouts) for arm in arms}, {arm.name: f"{arm.num_rollouts:,}" for arm in arms}


def _title(frontier: Frontier) -> str:
    measure = frontier.measure
    if measure.k == 1:
        return measure.name
    if measure.worst:
        return f"{measure.name}: sharpness (all {measure.k} correct)"
    return f"{measure.name}: coverage (one of {measure.k} correct)"


def _legend(results: ComparisonResults) -> list[Line2D]:
    """Return the legend of bands, dots, crosses and letters."""
    dot: dict[str, Any] = {"linestyle": "none", "marker": "o", "color": INK}
    handles = [
        Line2D([], [], color=_BAND, linewidth=7, alpha=0.75, label="best at each budget (band: its 95% interval)"),
        Line2D([], [], **dot, markersize=8, label="its lead over the second is shown (95%)"),
        Line2D(
            [], [], **dot, markersize=8, markerfacecolor="white", markeredgewidth=1.8, label="its lead is not shown"
        ),
    ]
    if not all(point.matched for frontier in results.frontiers for point in frontier.points):
        handles.append(
            Line2D([], [], color=INK, marker="x", linestyle="none", label="not compared: overshot the budget")
        )
    if not results.key:
        return handles
    keys = key_handles(results)
    empty = Line2D([], [], linestyle="none", label=" ")
    rows = max(len(handles), len(keys))  # a column each
    return [column[i] if i < len(column) else empty for column in (handles, keys) for i in range(rows)]
