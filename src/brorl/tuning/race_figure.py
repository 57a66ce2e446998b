"""The figure of a race: the score of each arm at the rungs, and where an arm was dropped."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from matplotlib.figure import Figure

from brorl.comparison.axes import COLORS, GREY, INK, cost_axis, draw_start, label_ends, style
from brorl.tuning.standings import RUNGS, Standing


def make_race_figure(race: Sequence[Sequence[Standing]], start: float, seconds: float, score: str) -> Figure:
    """Make the figure of a race up to `seconds`: a line for each arm, with a cross where it was dropped."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axis = figure.subplots()
    names = [standing.arm for standing in race[0]]
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    labels, lowest = {}, start
    for name in names:
        reached = [(fraction, s) for fraction, rung in zip(RUNGS, race, strict=False) for s in rung if s.arm == name]
        points = [(0.0, start), *((seconds * fraction, standing.score) for fraction, standing in reached)]
        end = reached[-1][1]
        axis.plot(*zip(*points, strict=True), color=colors[name], linewidth=2, marker="o", markersize=4.5, label=name)
        if end.dropped:
            axis.plot(*points[-1], "x", color=colors[name], markersize=11, markeredgewidth=2)
        labels[name] = end.score, f"{name}  {end.score:.3f}{' dropped' if end.dropped else ''}"
        lowest = min(lowest, *(height for _, height in points))
    for fraction in RUNGS[: len(race)]:
        axis.axvline(seconds * fraction, color=GREY, linewidth=0.8, alpha=0.5)
    axis.set_title(fill(f"The race: held-out {score} on the tuning prompts, one seed", 90), color=INK, loc="left")
    style(axis)
    cost_axis(axis, "seconds")
    axis.margins(y=0.1)
    axis.set_ylim(axis.get_ylim())
    draw_start(axis, start, below=start <= lowest, fontsize=8)
    label_ends(axis, axis.get_xlim()[1], labels, colors)
    return figure
