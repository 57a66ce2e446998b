"""The frontier as a figure: which number of rollouts is best at which budget.

In: a comparison of more than two arms. Out: a PNG with a column for pass@1, best@k (coverage) and worst@k (sharpening):
above, each arm's score at every budget and the best of them; below, which N is best there and how surely, with the
sigmoid where the data carry one. Arms that are not matched at a mark are crossed out there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import NullLocator

from brorl.comparison.arms import Arm, Comparison
from brorl.comparison.curves import GREY, INK, PALE, arm_colours, key_handles, label_ends, log_cost_axis, style
from brorl.comparison.findings import Findings, findings, ordered_by_number, start_scores, tied
from brorl.comparison.frontier import Frontier, FrontierPoint
from brorl.comparison.frontier_text import sweep_answer
from brorl.comparison.tables import measure_name
from brorl.cost import short_amount

_LARGEST_BUBBLE = 330.0  # area in square points of a share of 1
_LEAST_SHARE = 0.02  # of resamples, for a bubble to be drawn


def draw_frontier(comparison: Comparison, path: Path) -> None:
    """Draw the frontier of a sweep as a PNG.

    Raises:
        ValueError: If there are fewer than three arms, or runs that were not evaluated at a mark.
    """
    make_frontier_figure(comparison).savefig(path, dpi=130, facecolor="white")


def make_frontier_figure(comparison: Comparison) -> Figure:
    """Make the figure of the frontier."""
    found = findings(comparison)
    if not found.frontiers:
        raise ValueError(f"a frontier needs at least three arms, not {len(comparison.arms)}")
    columns = len(found.frontiers)
    width = max(1.0 + 4.15 * columns, 8.5)
    figure = Figure(figsize=(width, 7.9 + 0.2 * max(0, len(found.key) - 2)), layout="constrained")
    FigureCanvasAgg(figure)
    words = sweep_answer(found.frontiers[0], found)
    figure.suptitle(fill(words, round(10.6 * width)), fontsize=12.5, color=INK, x=0.012, ha="left")
    axes = figure.subplots(2, columns, sharex="col", squeeze=False, height_ratios=[1.25, 1])
    for index, line in enumerate(found.frontiers):
        _draw_scores(axes[0, index], line, found)
        _draw_best(axes[1, index], line, found, first=index == 0)
    figure.legend(
        handles=_legend(found), loc="outside lower left", ncols=2, frameon=False, fontsize=9.5, labelcolor=INK,
        handletextpad=0.5, columnspacing=1.6,
    )  # fmt: skip
    return figure


def _draw_scores(axis: Axes, line: Frontier, found: Findings) -> None:
    """Draw every arm's score against the budget, the best of each budget, and its interval."""
    comparison = found.comparison
    colours = arm_colours(comparison.arms)
    points = {(p.mark, p.arm): p for p in line.points}
    best = [points[b.mark, b.arm] for b in line.best]
    marks = [p.mark for p in best]
    axis.fill_between(
        marks, [p.score.low for p in best], [p.score.high for p in best], color=PALE, alpha=0.42, linewidth=0, zorder=1
    )
    axis.plot(marks, [p.score.value for p in best], color="#b3b8c1", linewidth=9, alpha=0.75, zorder=2,
              solid_capstyle="round", solid_joinstyle="round", gid="frontier")  # fmt: skip
    for arm in comparison.arms:
        of_arm = [points[mark, arm.name] for mark in comparison.marks]
        _draw_arm(axis, of_arm, colours[arm.name], adaptive=arm.num_rollouts is None)
    for b, point in zip(line.best, best, strict=True):
        if tied(b):
            continue
        axis.plot(
            b.mark, point.score.value, "o", markersize=8.5, markeredgewidth=1.8, markeredgecolor=colours[b.arm],
            markerfacecolor=colours[b.arm] if b.lead_shown else "white", zorder=5,
        )  # fmt: skip
    start = float(start_scores(comparison, line.measure, line.k).mean())
    lowest = start <= min(p.score.value for p in line.points)
    axis.axhline(start, color=GREY, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
    axis.annotate(
        f"start {start:.3f}", (1, start), xycoords=("axes fraction", "data"), xytext=(-2, -10 if lowest else 3),
        textcoords="offset points", fontsize=8.5, color=GREY, ha="right",
        zorder=6, path_effects=[withStroke(linewidth=3, foreground="white")],
    )  # fmt: skip
    style(axis)
    log_cost_axis(axis, comparison.unit, comparison.marks)
    axis.set_xlabel("")
    axis.tick_params(labelbottom=False)
    axis.set_title(_title(line), fontsize=11, color=INK, loc="left")
    seen = [start, *(p.score.value for p in line.points), *(end for p in best for end in (p.score.low, p.score.high))]
    pad = 0.07 * (max(seen) - min(seen)) or 0.05
    axis.set_ylim(min(seen) - pad, max(seen) + pad)
    last = {arm.name: points[comparison.marks[-1], arm.name].score.value for arm in comparison.arms}
    label_ends(axis, comparison.marks[-1], {name: (value, name) for name, value in last.items()}, colours)


def _draw_arm(axis: Axes, points: Sequence[FrontierPoint], colour: str, *, adaptive: bool) -> None:
    """Draw an arm's line through the marks at which it is compared, and crosses where it is not."""
    compared = [p.score.value if p.why_left_out is None else np.nan for p in points]
    axis.plot(
        [p.mark for p in points], compared, color=colour, linewidth=1.7, marker="o", markersize=3.5, zorder=4,
        linestyle="--" if adaptive else "-", label=points[0].arm,
    )  # fmt: skip
    left_out = [p for p in points if p.why_left_out is not None]
    if left_out:
        axis.plot(
            [p.mark for p in left_out], [p.score.value for p in left_out], "x", color=colour, markersize=6, zorder=4
        )


def _draw_best(axis: Axes, line: Frontier, found: Findings, *, first: bool) -> None:
    """Draw how often each arm is best at each budget, which is best, and the sigmoid."""
    comparison = found.comparison
    colours = arm_colours(comparison.arms)
    places, names = rows_of(comparison.arms)
    compared = {b.mark for b in line.best}
    for point in line.points:
        if point.mark in compared and point.best_share is not None and point.best_share >= _LEAST_SHARE:
            axis.scatter(
                point.mark, places[point.arm], s=_LARGEST_BUBBLE * point.best_share, color=colours[point.arm],
                alpha=0.85, linewidth=0, zorder=3,
            )  # fmt: skip
    axis.plot(
        [b.mark for b in line.best], [np.nan if tied(b) else places[b.arm] for b in line.best],
        color="#b3b8c1", linewidth=5, alpha=0.6, zorder=2, solid_capstyle="round", solid_joinstyle="round", gid="best",
    )  # fmt: skip
    log_cost_axis(axis, comparison.unit, comparison.marks)
    _draw_sigmoid(axis, line, found)
    axis.set_yticks(list(places.values()), [names[arm] for arm in places])
    axis.yaxis.set_minor_locator(NullLocator())
    low, high = min(places.values()), max(places.values())
    axis.set_ylim(low - 0.13 * (high - low), high + 0.13 * (high - low))
    style(axis)
    if first:
        axis.set_ylabel(
            "best N (log scale)" if ordered_by_number(comparison.arms) else "best arm", fontsize=10, color=INK
        )


def _draw_sigmoid(axis: Axes, line: Frontier, found: Findings) -> None:
    """Draw the fitted rise of the best N, or say why there is none."""
    comparison = found.comparison
    if not ordered_by_number(comparison.arms):
        return
    if line.sigmoid is None:
        axis.set_title(fill(f"no sigmoid: {line.why_no_sigmoid}", 52), fontsize=8.5, color=GREY, loc="left")
        return
    budget_X = np.geomspace(comparison.marks[0], comparison.marks[-1], 200)
    axis.plot(
        budget_X, [log2(line.sigmoid.num_rollouts_at(budget)) for budget in budget_X], color=INK, linewidth=1.6,
        zorder=4, gid="sigmoid",
    )  # fmt: skip
    middle = line.sigmoid.midpoint
    axis.axvspan(middle.low, middle.high, color=PALE, alpha=0.5, linewidth=0, zorder=0)
    low, value, high = (short_amount(v, comparison.unit) for v in (middle.low, middle.value, middle.high))
    axis.set_title(f"sigmoid: halfway up at {value} [{low}, {high}]", fontsize=9, color=INK, loc="left")


def rows_of(arms: Sequence[Arm]) -> tuple[dict[str, float], dict[str, str]]:
    """Return each arm's height in the lower panel, and what its tick says: log2 of N, or a row each.

    Adaptive arms stand above all others, apart from them. Where arms do not all have different N, each has a row.
    """
    if not ordered_by_number(arms):
        return {arm.name: float(i) for i, arm in enumerate(arms)}, {arm.name: arm.name for arm in arms}
    top = max(log2(arm.num_rollouts) for arm in arms if arm.num_rollouts is not None)
    places, words = {}, {}
    for arm in arms:
        if arm.num_rollouts is not None:
            places[arm.name], words[arm.name] = log2(arm.num_rollouts), f"{arm.num_rollouts:,}"
        else:
            places[arm.name], words[arm.name] = top + 1.5, arm.name
    return places, words


def _title(line: Frontier) -> str:
    name = measure_name(line)
    if line.k == 1:
        return name
    if line.measure == "best@k":
        return f"{name}: coverage (one of {line.k} correct)"
    return f"{name}: sharpness (all {line.k} correct)"


def _legend(found: Findings) -> list[Line2D]:
    """Explain the marks."""
    dot: dict[str, Any] = {"linestyle": "none", "marker": "o", "color": INK}
    handles = [
        Line2D([], [], color="#b3b8c1", linewidth=7, alpha=0.75, label="best at each budget (band: its 95% interval)"),
        Line2D([], [], **dot, markersize=8, label="its lead over the second is shown (95%)"),
        Line2D(
            [], [], **dot, markersize=8, markerfacecolor="white", markeredgewidth=1.8, label="its lead is not shown"
        ),
        Line2D([], [], **dot, markersize=11, alpha=0.85, label="below: area = share of resamples in which it is best"),
    ]
    if any(point.why_left_out for line in found.frontiers for point in line.points):
        handles.append(
            Line2D([], [], color=INK, marker="x", linestyle="none", label="not compared: overshot the budget")
        )
    if not found.key:
        return handles
    keys = key_handles(found)
    rows = max(len(handles), len(keys))  # a column each
    return [column[i] if i < len(column) else _nothing() for column in (handles, keys) for i in range(rows)]


def _nothing() -> Line2D:
    return Line2D([], [], linestyle="none", label=" ")
