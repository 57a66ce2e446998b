"""The figures of a comparison: scores against cost, and for more than two arms the best arm at each budget.

The title of each PNG is the answer. `comparison.png` shows scores against cost from the checkpoint on, the same in
other units, and by task (at most 24, those with the most prompts). `frontier.png` has a column for pass@1, pass@k
(coverage) and worst@k (sharpness): above, each arm's score at every budget and the best of them; below, the best N at
each budget and how sure that is, with the sigmoid if the data support one. A cross is an arm that is not matched.

Source: the panels of BroRL (arXiv 2510.01180), Figures 1 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, NullLocator
from scipy.optimize import isotonic_regression

from brorl.comparison.arms import Comparison, IntArray, Measure, score_at, scores_at, start_scores
from brorl.comparison.frontier import Frontier, FrontierPoint
from brorl.comparison.results import ComparisonResults, results_of, with_names
from brorl.comparison.text import answer_of
from brorl.cost import UNIT_WORDS, UNITS, Unit, short_amount
from brorl.evaluation.pass_at_k import FloatArray

_INK, _GREY, _PALE, _BAND = "#2b2f36", "#8a8f98", "#d5d8dd", "#b3b8c1"
_BLUE, _ORANGE = "#1f5fa8", "#cc7417"
_ANY = (_BLUE, _ORANGE, "#2e8b6a", "#b3382c", "#7b5ea7", "#8a6d3b", "#5b626d", "#c2508f")
# from light to dark and from warm to cold: the order survives color blindness and gray printing
_RAMP = LinearSegmentedColormap.from_list("rollouts", ["#d3901c", "#cf5a3c", "#9a3f77", "#4c489c", "#142f57"])
_MAX_TASKS, _TASKS_A_ROW = 24, 4
_LARGEST_BUBBLE = 330.0  # area in square points of a fraction of 1
_MIN_FRACTION = 0.02  # of resamples, for a bubble to be drawn


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Draw a comparison as a PNG.

    Raises:
        ValueError: If there are fewer than two arms, or a run was not evaluated at an evaluation point.
    """
    make_figure(comparison).savefig(path, dpi=130, facecolor="white")


def draw_frontier(comparison: Comparison, path: Path) -> None:
    """Draw the frontier of a sweep as a PNG.

    Raises:
        ValueError: If there are fewer than three arms, or a run was not evaluated at an evaluation point.
    """
    make_frontier_figure(comparison).savefig(path, dpi=130, facecolor="white")


def make_figure(comparison: Comparison) -> Figure:
    """Make the figure of a comparison."""
    results = results_of(comparison)
    largest = sorted(comparison.task_names(), key=lambda name: -len(comparison.prompts_of(name)))[:_MAX_TASKS]
    tasks = sorted(largest) if len(largest) > 1 else []
    heights = [4.4, 2.7, *([0.35 + 2.15 * -(-len(tasks) // _TASKS_A_ROW)] if tasks else [])]
    figure = Figure(figsize=(11, 0.75 + sum(heights) + 0.21 * len(results.key)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(fill(answer_of(results), 112), fontsize=11.5, color=_INK, x=0.01, ha="left")
    rows = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_scores(rows[0], results)
    _draw_other_units(rows[1], results)
    if tasks:
        _draw_tasks(rows[2], results, tasks)
    if results.key:
        handles = _key_handles(results)
        figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=9, labelcolor=_INK)
    return figure


def make_frontier_figure(comparison: Comparison) -> Figure:
    """Make the figure of the frontier."""
    results = results_of(comparison)
    if not results.frontiers:
        raise ValueError(f"a frontier needs at least three arms, got {len(comparison.arms)}")
    columns = len(results.frontiers)
    width = max(1.0 + 4.15 * columns, 8.5)
    figure = Figure(figsize=(width, 7.9 + 0.2 * max(0, len(results.key) - 2)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(fill(answer_of(results), round(10.6 * width)), fontsize=12.5, color=_INK, x=0.012, ha="left")
    axes = figure.subplots(2, columns, sharex="col", squeeze=False, height_ratios=[1.25, 1])
    for index, frontier in enumerate(results.frontiers):
        _draw_frontier(axes[0, index], frontier, results)
        _draw_best(axes[1, index], frontier, results, first=index == 0)
    figure.legend(
        handles=_legend(results), loc="outside lower left", ncols=2, frameon=False, fontsize=9.5, labelcolor=_INK,
        handletextpad=0.5, columnspacing=1.6,
    )  # fmt: skip
    return figure


def _curves(
    comparison: Comparison, unit: Unit, k: int = 1, prompts: IntArray | None = None
) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Return the pass@k of each arm's runs against their mean cost, over all prompts or some, from the start on.

    A run that ended early stands at the evaluation point in the comparison's unit, because its last score counts there,
    and at its real cost in the other units.
    """
    curves = {}
    for arm in comparison.arms:
        costs, scores = [], []
        for point in (0.0, *comparison.eval_points):
            score_SP = scores_at(comparison, arm, point, Measure(k))
            scores.append((score_SP if prompts is None else score_SP[:, prompts]).mean(1))
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
        axis.set_title(f"pass@{k} on held-out prompts ({spread})", fontsize=10, color=_INK, loc="left")
        _cost_axis(axis, comparison.unit)
        axis.margins(y=0.12)
        axis.set_ylim(axis.get_ylim())
        start = results.start[k].value
        lowest = min(score_MS.mean(1)[1:].min() for _, score_MS in curves.values())
        _draw_start(axis, start, below=start <= lowest, fontsize=8)
        ends = {name: float(score_MS[-1].mean()) for name, (_, score_MS) in curves.items()}
        labels = {name: (end, f"{name}  {end:.3f}") for name, end in ends.items()}
        _label_ends(axis, axis.get_xlim()[1], labels, comparison)


def _draw_other_units(part: SubFigure, results: ComparisonResults) -> None:
    """Draw pass@1 against the units that the budget does not count, in which the arms are not matched.

    Next to them, coverage against pass@1: arms on one line differ only in how far they have come.
    """
    comparison = results.comparison
    units: list[Unit] = [unit for unit in UNITS if unit != comparison.unit]
    trade = results.ks[-1] > 1
    grid = part.add_gridspec(1, len(units) + trade)
    first = part.add_subplot(grid[0])
    axes = [first, *(part.add_subplot(grid[i], sharey=first) for i in range(1, len(units)))]
    for axis, unit in zip(axes, units, strict=True):
        _draw_lines(axis, comparison, unit, _curves(comparison, unit), small=True)
        _cost_axis(axis, unit, max_ticks=4)
        axis.margins(y=0.1)
        axis.tick_params(labelleft=axis is first)
    first.set_ylabel("pass@1", fontsize=9, color=_INK)
    labels = [_axis_label(unit).removesuffix(" of training").removesuffix(", without evaluations") for unit in units]
    title = f"The same runs in other units of cost: {', '.join(labels)}"
    if trade:
        _draw_trade(part.add_subplot(grid[-1]), results)
        title += "; and coverage against pass@1"
    part.suptitle(title, fontsize=10, color=_INK, x=0.01, ha="left")


def _draw_trade(axis: Axes, results: ComparisonResults) -> None:
    """Draw pass@k of the largest k against pass@1, without cost: a line for every arm, from the start on."""
    comparison, k = results.comparison, results.ks[-1]
    colors = arm_colors(comparison)
    by_k = [_curves(comparison, comparison.unit, i) for i in (1, k)]
    for name, color in colors.items():
        score_M, coverage_M = (curves[name][1].mean(1) for curves in by_k)
        axis.plot(
            score_M, coverage_M, color=color, linewidth=1.6, marker="o", markersize=3,
            markevery=slice(1, None), label=name,
        )  # fmt: skip
    axis.plot(score_M[:1], coverage_M[:1], color=_INK, marker="o", markersize=4, markerfacecolor="white", zorder=5)
    _style(axis)
    axis.set_xlabel("pass@1", fontsize=9, color=_INK)
    axis.set_ylabel(f"pass@{k}", fontsize=9, color=_INK)


def _draw_tasks(part: SubFigure, results: ComparisonResults, tasks: list[str]) -> None:
    """Draw pass@1 of each task against the unit of the budget, with the trend in the title."""
    comparison = results.comparison
    trends = {} if results.pair is None else {t.task: with_names(t.kind, *results.names) for t in results.pair.trends}
    rows = -(-len(tasks) // _TASKS_A_ROW)
    axes = part.subplots(rows, _TASKS_A_ROW, sharex=True, squeeze=False)
    for index, task in enumerate(tasks):
        axis, prompts = axes.flat[index], comparison.prompts_of(task)
        curves = _curves(comparison, comparison.unit, prompts=prompts)
        _draw_lines(axis, comparison, comparison.unit, curves, small=True)
        title = f"{task if len(task) <= 24 else f'{task[:21]}...'} ({len(prompts)})"
        trend = f"\n{fill(trends[task], 32)}" if trends else ""
        axis.set_title(f"{title}{trend}", fontsize=8.5, color=_INK, loc="left")
        _cost_axis(axis, comparison.unit, max_ticks=3)
        axis.set_xlabel("")
        axis.tick_params(labelbottom=index + _TASKS_A_ROW >= len(tasks))
    for axis in axes.flat[len(tasks) :]:
        axis.set_axis_off()
    whole = len(comparison.task_names())
    left_out = f": the {len(tasks)} of {whole} with the most prompts" if whole > len(tasks) else ""
    part.suptitle(f"pass@1 by task (number of prompts){left_out}", fontsize=10, color=_INK, x=0.01, ha="left")


def _draw_lines(
    axis: Axes,
    comparison: Comparison,
    unit: Unit,
    curves: Mapping[str, tuple[FloatArray, FloatArray]],
    *,
    small: bool = False,
) -> None:
    """Draw a line with a band over runs for every arm, with a diamond where a phase of its objective begins."""
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
        for begin in arm.phase_begins(unit).values():
            height = float(np.interp(begin, cost_M, mean_M))
            axis.plot(begin, height, "D", markersize=7, color=color, markerfacecolor="white", zorder=6)
    _, score_MS = next(iter(curves.values()))
    axis.add_line(
        Line2D([0], [score_MS[0].mean()], color=_INK, marker="o", markersize=4 if small else 6,
               markerfacecolor="white", linestyle="none", label="start", clip_on=False, zorder=5)
    )  # fmt: skip
    _style(axis)


def _draw_frontier(axis: Axes, frontier: Frontier, results: ComparisonResults) -> None:
    """Draw every arm's score against the budget, the best of each budget, and its interval."""
    comparison = results.comparison
    colors = arm_colors(comparison)
    best = [frontier.at(b.eval_point)[b.arm].score for b in frontier.best]
    points = [b.eval_point for b in frontier.best]
    low, high = [score.low for score in best], [score.high for score in best]
    axis.fill_between(points, low, high, color=_PALE, alpha=0.42, linewidth=0, zorder=1)
    axis.plot(points, [score.value for score in best], color=_BAND, linewidth=9, alpha=0.75, zorder=2,
              solid_capstyle="round", solid_joinstyle="round", gid="frontier")  # fmt: skip
    for arm in comparison.arms:
        of_arm = [point for point in frontier.points if point.arm == arm.name]
        _draw_arm(axis, of_arm, colors[arm.name], adaptive=arm.num_rollouts is None)
    for b, score in zip(frontier.best, best, strict=True):
        if not b.is_tied:
            axis.plot(
                b.eval_point, score.value, "o", markersize=8.5, markeredgewidth=1.8, markeredgecolor=colors[b.arm],
                markerfacecolor=colors[b.arm] if b.lead_shown else "white", zorder=5,
            )  # fmt: skip
    start = float(start_scores(comparison, frontier.measure).mean())
    _draw_start(axis, start, below=start <= min(p.score.value for p in frontier.points), fontsize=8.5)
    _style(axis)
    _log_cost_axis(axis, comparison.unit, comparison.eval_points)
    axis.set_xlabel("")
    axis.tick_params(labelbottom=False)
    axis.set_title(_title(frontier), fontsize=11, color=_INK, loc="left")
    seen = [start, *(p.score.value for p in frontier.points), *low, *high]
    pad = 0.07 * (max(seen) - min(seen)) or 0.05
    axis.set_ylim(min(seen) - pad, max(seen) + pad)
    labels = {name: (point.score.value, name) for name, point in frontier.at(results.budget).items()}
    _label_ends(axis, results.budget, labels, comparison)


def _draw_arm(axis: Axes, points: Sequence[FrontierPoint], color: str, *, adaptive: bool) -> None:
    """Draw an arm's line through the evaluation points at which it is compared, and crosses where it is not."""
    compared = [p.score.value if p.why_left_out is None else np.nan for p in points]
    axis.plot(
        [p.eval_point for p in points], compared, color=color, linewidth=1.7, marker="o", markersize=3.5, zorder=4,
        linestyle="--" if adaptive else "-", label=points[0].arm,
    )  # fmt: skip
    if any(np.isnan(compared)):
        left_out = [(p.eval_point, p.score.value) for p in points if p.why_left_out is not None]
        axis.plot(*zip(*left_out, strict=True), "x", color=color, markersize=6, zorder=4)


def _draw_best(axis: Axes, frontier: Frontier, results: ComparisonResults, *, first: bool) -> None:
    """Draw the fraction of resamples in which each arm is best at each budget, the best arm, and the sigmoid."""
    comparison = results.comparison
    colors = arm_colors(comparison)
    row_of, names = rows_of(comparison)
    compared = {b.eval_point for b in frontier.best}
    for point in frontier.points:
        if point.eval_point in compared and point.best_fraction is not None and point.best_fraction >= _MIN_FRACTION:
            axis.scatter(
                point.eval_point, row_of[point.arm], s=_LARGEST_BUBBLE * point.best_fraction, color=colors[point.arm],
                alpha=0.85, linewidth=0, zorder=3,
            )  # fmt: skip
    axis.plot(
        [b.eval_point for b in frontier.best], [np.nan if b.is_tied else row_of[b.arm] for b in frontier.best],
        color=_BAND, linewidth=5, alpha=0.6, zorder=2, solid_capstyle="round", solid_joinstyle="round", gid="best",
    )  # fmt: skip
    _log_cost_axis(axis, comparison.unit, comparison.eval_points)
    _draw_sigmoid(axis, frontier, results)
    axis.set_yticks(list(row_of.values()), [names[arm] for arm in row_of])
    axis.yaxis.set_minor_locator(NullLocator())
    low, high = min(row_of.values()), max(row_of.values())
    axis.set_ylim(low - 0.13 * (high - low), high + 0.13 * (high - low))
    _style(axis)
    if first:
        axis.set_ylabel("best N (log scale)" if comparison.ordered_by_rollouts else "best arm", fontsize=10, color=_INK)


def _draw_sigmoid(axis: Axes, frontier: Frontier, results: ComparisonResults) -> None:
    """Draw the fitted rise of the best N, or write why there is none."""
    comparison = results.comparison
    if not comparison.ordered_by_rollouts:
        return
    if frontier.sigmoid is None:
        axis.set_title(fill(f"no sigmoid: {frontier.why_no_sigmoid}", 52), fontsize=8.5, color=_GREY, loc="left")
        return
    budget_X = np.geomspace(comparison.eval_points[0], comparison.eval_points[-1], 200)
    axis.plot(
        budget_X, [log2(frontier.sigmoid.num_rollouts_at(budget)) for budget in budget_X], color=_INK, linewidth=1.6,
        zorder=4, gid="sigmoid",
    )  # fmt: skip
    middle = frontier.sigmoid.midpoint
    axis.axvspan(middle.low, middle.high, color=_PALE, alpha=0.5, linewidth=0, zorder=0)
    low, value, high = (short_amount(v, comparison.unit) for v in (middle.low, middle.value, middle.high))
    axis.set_title(f"sigmoid: halfway up at {value} [{low}, {high}]", fontsize=9, color=_INK, loc="left")


def rows_of(comparison: Comparison) -> tuple[dict[str, float], dict[str, str]]:
    """Return the height of each arm in the lower panel, and the text of its tick: log2 of N, or one row per arm.

    Adaptive arms stand above all others, apart from them.
    """
    arms = comparison.arms
    if not comparison.ordered_by_rollouts:
        return {arm.name: float(i) for i, arm in enumerate(arms)}, {arm.name: arm.name for arm in arms}
    top = max(log2(arm.num_rollouts) for arm in arms if arm.num_rollouts is not None)
    row_of = {arm.name: top + 1.5 if arm.num_rollouts is None else log2(arm.num_rollouts) for arm in arms}
    return row_of, {arm.name: arm.name if arm.num_rollouts is None else f"{arm.num_rollouts:,}" for arm in arms}


def _title(frontier: Frontier) -> str:
    measure = frontier.measure
    if measure.k == 1:
        return measure.name
    if measure.worst:
        return f"{measure.name}: sharpness (all {measure.k} correct)"
    return f"{measure.name}: coverage (one of {measure.k} correct)"


def _legend(results: ComparisonResults) -> list[Line2D]:
    """Return the legend of bands, dots, crosses and letters."""
    dot: dict[str, Any] = {"linestyle": "none", "marker": "o", "color": _INK}
    handles = [
        Line2D([], [], color=_BAND, linewidth=7, alpha=0.75, label="best at each budget (band: its 95% interval)"),
        Line2D([], [], **dot, markersize=8, label="its lead over the second is shown (95%)"),
        Line2D(
            [], [], **dot, markersize=8, markerfacecolor="white", markeredgewidth=1.8, label="its lead is not shown"
        ),
        Line2D(
            [], [], **dot, markersize=11, alpha=0.85, label="below: area = fraction of resamples in which it is best"
        ),
    ]
    if any(point.why_left_out for frontier in results.frontiers for point in frontier.points):
        handles.append(
            Line2D([], [], color=_INK, marker="x", linestyle="none", label="not compared: overshot the budget")
        )
    if not results.key:
        return handles
    keys = _key_handles(results)
    empty = Line2D([], [], linestyle="none", label=" ")
    rows = max(len(handles), len(keys))  # a column each
    return [column[i] if i < len(column) else empty for column in (handles, keys) for i in range(rows)]


def arm_colors(comparison: Comparison) -> dict[str, str]:
    """Return a color for each arm: two that are far apart; of more a ramp by N, adaptive arms in gray; else any."""
    arms = comparison.arms
    if len(arms) == 2:
        return {arms[0].name: _ORANGE, arms[1].name: _BLUE}
    if not comparison.ordered_by_rollouts:
        return {arm.name: _ANY[i % len(_ANY)] for i, arm in enumerate(arms)}
    fixed = sorted((a for a in arms if a.num_rollouts is not None), key=lambda a: a.num_rollouts or 0)
    colors = {arm.name: to_hex(_RAMP(i / (len(fixed) - 1))) for i, arm in enumerate(fixed)}
    return {arm.name: colors.get(arm.name, "#5b626d") for arm in arms}


def _key_handles(results: ComparisonResults) -> list[Line2D]:
    """Return entries of a legend for the arms that have letters as names."""
    colors = arm_colors(results.comparison)
    return [
        Line2D([], [], linestyle="none", marker="s", markersize=6, color=colors[letter], label=f"{letter}: {name}")
        for letter, name in results.key.items()
    ]


def _draw_start(axis: Axes, start: float, *, below: bool, fontsize: float) -> None:
    """Draw the score of the start as a dotted line with its value, which stands below the line or above it."""
    axis.axhline(start, color=_GREY, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
    axis.annotate(
        f"start {start:.3f}", (1, start), xycoords=("axes fraction", "data"), xytext=(-2, -10 if below else 3),
        textcoords="offset points", fontsize=fontsize, color=_GREY, ha="right", zorder=6,
        path_effects=[withStroke(linewidth=3, foreground="white")],
    )  # fmt: skip


def _label_ends(axis: Axes, end: float, labels: Mapping[str, tuple[float, str]], comparison: Comparison) -> None:
    """Write each arm's label at the end of its line, apart from the others; limits must be set before."""
    colors = arm_colors(comparison)
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
    """Move rising heights as little as leaves a gap between neighbors and all of them between 0 and 1.

    It is the least-squares solution. If there are too many heights for the bounds, the gaps are smaller.
    """
    last = len(height_A) - 1
    shift_A = min(gap, 1 / max(last, 1)) * np.arange(len(height_A))
    rising_A = isotonic_regression(height_A - shift_A).x
    moved_A: FloatArray = np.clip(rising_A, 0, max(0, 1 - shift_A[-1])) + shift_A
    return moved_A


def _style(axis: Axes) -> None:
    """Draw a panel with two spines and faint horizontal lines."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(_GREY)
    axis.tick_params(colors=_INK, labelsize=9.5)
    axis.grid(axis="y", color=_PALE, linewidth=0.6, alpha=0.7)
    axis.set_axisbelow(True)


def _cost_axis(axis: Axes, unit: Unit, *, max_ticks: int = 5) -> None:
    """Label an axis of costs that starts at 0."""
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value, unit)))
    axis.locator_params(axis="x", nbins=max_ticks)
    axis.set_xlabel(_axis_label(unit), fontsize=9, color=_INK)
    axis.set_xlim(left=0)


def _log_cost_axis(axis: Axes, unit: Unit, eval_points: Sequence[float]) -> None:
    """Label a logarithmic axis of costs at some of the evaluation points."""
    axis.set_xscale("log")
    every = -(-len(eval_points) // 7)
    ticks = list(eval_points[::-1][::every])
    axis.set_xticks(ticks, [tick_text(tick, unit) for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel(f"{_axis_label(unit)} (log scale)", fontsize=9.5, color=_INK)


def tick_text(value: float, unit: Unit) -> str:
    """Return an amount in the short form of a tick label: 0, 40 s, 2.5M."""
    return "0" if value == 0 else short_amount(value, unit)


def _axis_label(unit: Unit) -> str:
    """Return the label of an axis of costs."""
    return "training time, without evaluations" if unit == "seconds" else f"{UNIT_WORDS[unit]} of training"
