"""A comparison as a figure: scores against cost from the checkpoint on, the same in other units, and by task.

In: a comparison. Out: a PNG. Its title is the answer. Tasks beyond the 24 with the most prompts are left out and
counted.

Source: the panels of BroRL (arXiv 2510.01180), Figures 1 and 4.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from brorl.comparison.arms import Comparison
from brorl.comparison.curves import (
    GREY,
    INK,
    Curve,
    arm_colours,
    axis_label,
    cost_axis,
    curve,
    key_handles,
    label_ends,
    style,
)
from brorl.comparison.findings import Findings, findings, prompts_of, task_names
from brorl.comparison.frontier_text import sweep_answer
from brorl.comparison.tables import kind_words, seeds_words
from brorl.comparison.text import answer
from brorl.cost import UNITS, Unit

_MOST_TASKS, _TASKS_A_ROW = 24, 4


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Draw a comparison as a PNG.

    Raises:
        ValueError: If there are fewer than two arms, or runs that were not evaluated at a mark.
    """
    make_figure(comparison).savefig(path, dpi=130, facecolor="white")


def make_figure(comparison: Comparison) -> Figure:
    """Make the figure of a comparison."""
    found = findings(comparison)
    tasks = _tasks(comparison)
    task_rows = -(-len(tasks) // _TASKS_A_ROW)
    heights = [4.4, 2.7, *([0.35 + 2.15 * task_rows] if tasks else [])]
    figure = Figure(figsize=(11, 0.75 + sum(heights) + 0.21 * len(found.key)), layout="constrained")
    FigureCanvasAgg(figure)
    words = sweep_answer(found.frontiers[0], found) if found.pair is None else answer(found)
    figure.suptitle(fill(words, 112), fontsize=11.5, color=INK, x=0.01, ha="left")
    rows = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_scores(rows[0], found)
    _draw_other_units(rows[1], found)
    if tasks:
        _draw_tasks(rows[2], found, tasks)
    if found.key:
        figure.legend(handles=key_handles(found), loc="outside lower left", frameon=False, fontsize=9, labelcolor=INK)
    return figure


def _draw_scores(part: SubFigure, found: Findings) -> None:
    """Draw pass@1 and pass@k of the largest k against the unit of the budget."""
    comparison = found.comparison
    ks = list(dict.fromkeys((1, found.largest_k)))
    axes = part.subplots(1, len(ks), squeeze=False)[0]
    several = max(len(arm.trajectories) for arm in comparison.arms) > 1
    spread = f"mean of {seeds_words(comparison.arms)}, band: all of them" if several else "one seed"
    for axis, k in zip(axes, ks, strict=True):
        ends = _draw_lines(axis, comparison, lambda arm, k=k: curve(comparison, arm, k, comparison.unit))
        axis.set_title(f"pass@{k} on held-out prompts ({spread})", fontsize=10, color=INK, loc="left")
        cost_axis(axis, comparison.unit)
        axis.set_xlim(left=0)
        axis.margins(y=0.12)
        axis.set_ylim(axis.get_ylim())
        lowest = all(found.start[k].value <= line.mean_M[1:].min() for line in ends.values())
        axis.axhline(found.start[k].value, color=GREY, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        axis.annotate(
            f"start {found.start[k].value:.3f}", (1, found.start[k].value), xycoords=("axes fraction", "data"),
            xytext=(-2, -10 if lowest else 3), textcoords="offset points", fontsize=8, color=GREY, ha="right",
        )  # fmt: skip
        label_ends(
            axis, axis.get_xlim()[1],
            {name: (line.mean_M[-1], f"{name}  {line.mean_M[-1]:.3f}") for name, line in ends.items()},
            arm_colours(comparison.arms),
        )  # fmt: skip


def _draw_other_units(part: SubFigure, found: Findings) -> None:
    """Draw pass@1 against the units that the budget does not count, in which the arms are not matched.

    Beside them, coverage against pass@1: arms on one line differ only in how far they have come.
    """
    comparison = found.comparison
    units: list[Unit] = [unit for unit in UNITS if unit != comparison.unit]
    trade = found.largest_k > 1
    grid = part.add_gridspec(1, len(units) + trade)
    first = part.add_subplot(grid[0])
    axes = [first, *(part.add_subplot(grid[i], sharey=first) for i in range(1, len(units)))]
    for axis, unit in zip(axes, units, strict=True):
        _draw_lines(axis, comparison, lambda arm, unit=unit: curve(comparison, arm, 1, unit), small=True)
        cost_axis(axis, unit, most_ticks=4)
        axis.set_xlim(left=0)
        axis.margins(y=0.1)
        axis.tick_params(labelleft=axis is first)
    first.set_ylabel("pass@1", fontsize=9, color=INK)
    title = f"The same runs by what else they spent: {', '.join(map(_plain, units))}"
    if trade:
        _draw_trade(part.add_subplot(grid[-1]), found)
        title += "; and coverage against pass@1"
    part.suptitle(title, fontsize=10, color=INK, x=0.01, ha="left")


def _draw_trade(axis: Axes, found: Findings) -> None:
    """Draw pass@k of the largest k against pass@1: a line for every arm, from the start on, without what it cost."""
    comparison, k = found.comparison, found.largest_k
    colours = arm_colours(comparison.arms)
    for arm in comparison.arms:
        score_M, coverage_M = (curve(comparison, arm, i, comparison.unit).mean_M for i in (1, k))
        axis.plot(
            score_M, coverage_M, color=colours[arm.name], linewidth=1.6, marker="o", markersize=3,
            markevery=slice(1, None), label=arm.name,
        )  # fmt: skip
    axis.plot(score_M[:1], coverage_M[:1], color=INK, marker="o", markersize=4, markerfacecolor="white", zorder=5)
    style(axis)
    axis.set_xlabel("pass@1", fontsize=9, color=INK)
    axis.set_ylabel(f"pass@{k}", fontsize=9, color=INK)


def _plain(unit: Unit) -> str:
    return axis_label(unit).removesuffix(" of training").removesuffix(", without evaluations")


def _draw_tasks(part: SubFigure, found: Findings, tasks: list[str]) -> None:
    """Draw pass@1 of each task against the unit of the budget, with the kind of trajectory in the title."""
    comparison = found.comparison
    names = [arm.name for arm in comparison.arms]
    kinds = {} if found.pair is None else {t.task: kind_words(t.kind, *names) for t in found.pair.kinds}
    rows = -(-len(tasks) // _TASKS_A_ROW)
    axes = part.subplots(rows, _TASKS_A_ROW, sharex=True, squeeze=False)
    for index, task in enumerate(tasks):
        axis = axes.flat[index]
        prompts = prompts_of(comparison, task)
        _draw_lines(
            axis, comparison, lambda arm, p=prompts: curve(comparison, arm, 1, comparison.unit, p), small=True
        )  # fmt: skip
        title = f"{task if len(task) <= 24 else f'{task[:21]}...'} ({len(prompts)})"
        axis.set_title(f"{title}\n{fill(kinds[task], 32)}" if kinds else title, fontsize=8.5, color=INK, loc="left")
        cost_axis(axis, comparison.unit, most_ticks=3)
        axis.set_xlim(left=0)
        axis.set_xlabel("")
        axis.tick_params(labelbottom=index + _TASKS_A_ROW >= len(tasks))
    for axis in axes.flat[len(tasks) :]:
        axis.set_axis_off()
    whole = len(task_names(comparison))
    left_out = f": the {len(tasks)} of {whole} with the most prompts" if whole > len(tasks) else ""
    part.suptitle(f"pass@1 by task (number of prompts){left_out}", fontsize=10, color=INK, x=0.01, ha="left")


def _draw_lines(
    axis: Axes, comparison: Comparison, make: Callable[..., Curve], *, small: bool = False
) -> dict[str, Curve]:  # fmt: skip
    """Draw a line with a band for every arm, from the start on."""
    colours = arm_colours(comparison.arms)
    curves = {arm.name: make(arm) for arm in comparison.arms}
    for name, line in curves.items():
        colour = colours[name]
        if (line.high_M > line.low_M).any():
            axis.fill_between(line.cost_M, line.low_M, line.high_M, color=colour, alpha=0.16, linewidth=0)
        axis.plot(
            line.cost_M, line.mean_M, color=colour, linewidth=1.6 if small else 2.2, marker="o",
            markersize=3 if small else 4.5, markevery=slice(1, None), label=name,
        )  # fmt: skip
    first = next(iter(curves.values()))
    axis.add_line(
        Line2D([0], [first.mean_M[0]], color=INK, marker="o", markersize=4 if small else 6,
               markerfacecolor="white", linestyle="none", label="start", clip_on=False, zorder=5)
    )  # fmt: skip
    style(axis)
    return curves


def _tasks(comparison: Comparison) -> list[str]:
    """Return the tasks to draw, by name: none of one, else those with the most prompts."""
    names = task_names(comparison)
    if len(names) < 2:
        return []
    most = sorted(names, key=lambda name: -len(prompts_of(comparison, name)))[:_MOST_TASKS]
    return sorted(most)
