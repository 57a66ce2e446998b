"""The figure of a comparison: scores against cost from the checkpoint on, the same in other units, and by task.

Its title is the answer. At most 24 tasks are shown, those with the most prompts.

Source: the panels of BroRL (arXiv 2510.01180), Figures 1 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from brorl.arrays import FloatArray, IntArray
from brorl.comparison.arms import Comparison, score_at, scores_at
from brorl.comparison.axes import INK, arm_colors, axis_label, cost_axis, draw_start, key_handles, label_ends, style
from brorl.comparison.results import ComparisonResults
from brorl.comparison.text import answer_of
from brorl.cost import UNITS, Unit

_MAX_TASKS, _TASKS_A_ROW = 24, 4


def make_figure(results: ComparisonResults) -> Figure:
    """Make the figure of a comparison."""
    comparison = results.comparison
    largest = sorted(comparison.task_names(), key=lambda name: -len(comparison.prompts_of(name)))[:_MAX_TASKS]
    tasks = sorted(largest) if len(largest) > 1 else []
    heights = [4.4, 2.7, *([0.35 + 2.15 * -(-len(tasks) // _TASKS_A_ROW)] if tasks else [])]
    figure = Figure(figsize=(11, 0.75 + sum(heights) + 0.21 * len(results.key)), layout="constrained")
    figure.suptitle(fill(answer_of(results), 112), fontsize=11.5, color=INK, x=0.01, ha="left")
    rows = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_scores(rows[0], results)
    _draw_other_units(rows[1], results)
    if tasks:
        _draw_tasks(rows[2], results, tasks)
    if results.key:
        handles = key_handles(results)
        figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=9, labelcolor=INK)
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
            score_SP = scores_at(comparison, arm, point, k)
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
        _draw_best(axis, results, k)
        axis.set_title(f"pass@{k} on held-out prompts ({spread})", fontsize=10, color=INK, loc="left")
        cost_axis(axis, comparison.unit)
        axis.margins(y=0.12)
        axis.set_ylim(axis.get_ylim())
        start = results.start[k].value
        lowest = min(score_MS.mean(1)[1:].min() for _, score_MS in curves.values())
        draw_start(axis, start, below=start <= lowest, fontsize=8)
        ends = {name: float(score_MS[-1].mean()) for name, (_, score_MS) in curves.items()}
        labels = {name: (end, f"{name}  {end:.3f}") for name, end in ends.items()}
        label_ends(axis, axis.get_xlim()[1], labels, arm_colors(comparison))


def _draw_best(axis: Axes, results: ComparisonResults, k: int) -> None:
    """Draw a large dot at the best arm of each budget, filled where its lead over the second is shown."""
    colors, points = arm_colors(results.comparison), results.comparison.eval_points
    for best in results.best[k]:
        if not best.is_tied:
            color, at = colors[best.arm], results.arms[best.arm][points.index(best.eval_point)]
            axis.plot(
                at.costs[results.comparison.unit].mean, at.pass_at[k].value, "o", markersize=8, markeredgewidth=1.8,
                markeredgecolor=color, markerfacecolor=color if best.lead_shown else "white", zorder=4,
            )  # fmt: skip


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
    colors = arm_colors(comparison)
    by_k = [_curves(comparison, comparison.unit, i) for i in (1, k)]
    for name, color in colors.items():
        score_M, coverage_M = (curves[name][1].mean(1) for curves in by_k)
        axis.plot(
            score_M, coverage_M, color=color, linewidth=1.6, marker="o", markersize=3,
            markevery=slice(1, None), label=name,
        )  # fmt: skip
    axis.plot(score_M[:1], coverage_M[:1], color=INK, marker="o", markersize=4, markerfacecolor="white", zorder=5)
    style(axis)
    axis.set_xlabel("pass@1", fontsize=9, color=INK)
    axis.set_ylabel(f"pass@{k}", fontsize=9, color=INK)


def _draw_tasks(part: SubFigure, results: ComparisonResults, tasks: list[str]) -> None:
    """Draw pass@1 of each task against the unit of the budget."""
    comparison = results.comparison
    rows = -(-len(tasks) // _TASKS_A_ROW)
    axes = part.subplots(rows, _TASKS_A_ROW, sharex=True, squeeze=False)
    for index, task in enumerate(tasks):
        axis, prompts = axes.flat[index], comparison.prompts_of(task)
        curves = _curves(comparison, comparison.unit, prompts=prompts)
        _draw_lines(axis, comparison, comparison.unit, curves, small=True)
        title = f"{task if len(task) <= 24 else f'{task[:21]}...'} ({len(prompts)})"
        axis.set_title(title, fontsize=8.5, color=INK, loc="left")
        cost_axis(axis, comparison.unit, max_ticks=3)
        axis.set_xlabel("")
        axis.tick_params(labelbottom=index + _TASKS_A_ROW >= len(tasks))
    for axis in axes.flat[len(tasks) :]:
        axis.set_axis_off()
    whole = len(comparison.task_names())
    left_out = f": the {len(tasks)} of {whole} with the most prompts" if whole > len(tasks) else ""
    part.suptitle(f"pass@1 by task (number of prompts){left_out}", fontsize=10, color=INK, x=0.01, ha="left")


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
        Line2D([0], [score_MS[0].mean()], color=INK, marker="o", markersize=4 if small else 6,
               markerfacecolor="white", linestyle="none", label="start", clip_on=False, zorder=5)
    )  # fmt: skip
    style(axis)
