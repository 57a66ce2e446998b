"""The figure of a run: reward, held-out pass@k and mixed groups by step; and the look of all figures."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from brorl.runs.run_directory import Record, number

PNG: dict[str, Any] = {"dpi": 130, "facecolor": "white"}  # options of `Figure.savefig`
INK, GREY, PALE = "#2b2f36", "#8a8f98", "#d5d8dd"
BLUE, ORANGE = "#1f5fa8", "#cc7417"


class ResultFigure(Figure):
    """A matplotlib figure that a notebook shows, also where `matplotlib.pyplot` was never imported."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png", **PNG)
        return picture.getvalue()


def style(axis: Axes) -> None:
    """Draw a panel with two spines and faint horizontal lines."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(GREY)
    axis.tick_params(colors=INK, labelsize=9.5)
    axis.grid(axis="y", color=PALE, linewidth=0.6, alpha=0.7)
    axis.set_axisbelow(True)


def run_figure(records: Sequence[Record]) -> ResultFigure:
    """Draw the metrics of a run by step; a panel without a number says so."""
    figure = ResultFigure(figsize=(11, 3.2), layout="constrained")
    reward, held_out, mixed = figure.subplots(1, 3)
    _draw_line(reward, records, lambda record: number(record, "sampling", "reward"))
    reward.set_title("mean reward of the rollouts", fontsize=10, color=INK, loc="left")
    _draw_evaluations(held_out, [record for record in records if "evaluation" in record])
    held_out.set_title("held-out prompts, with 95% intervals", fontsize=10, color=INK, loc="left")
    _draw_line(mixed, records, _mixed_fraction)
    mixed.set_title("mixed groups, of the sampled ones", fontsize=10, color=INK, loc="left")
    mixed.set_ylim(0, 1.02)
    for axis in (reward, held_out, mixed):
        style(axis)
        axis.set_xlabel("step", fontsize=9, color=INK)
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if not axis.has_data():
            axis.text(0.5, 0.5, "nothing was measured", transform=axis.transAxes, ha="center", color=GREY)
    return figure


def _draw_line(axis: Axes, records: Sequence[Record], value_of: Callable[[Record], float | None]) -> None:
    """Draw a number of the steps that sampled."""
    sampled = [record for record in records if number(record, "sampling", "samples")]
    points = [(record["step"], value) for record in sampled if (value := value_of(record)) is not None]
    if points:
        axis.plot(*zip(*points, strict=True), color=BLUE, linewidth=1.8, marker="o", markersize=3)


def _mixed_fraction(record: Record) -> float | None:
    mixed, groups = number(record, "sampling", "groups_mixed"), number(record, "sampling", "groups")
    return None if mixed is None or not groups else mixed / groups


def _draw_evaluations(axis: Axes, records: Sequence[Record]) -> None:
    """Draw pass@1 and pass@k of the largest k."""
    ks = sorted({int(k) for record in records for k in record["evaluation"]["pass_at"]})
    for k, color in zip(dict.fromkeys((*ks[:1], *ks[-1:])), (BLUE, ORANGE), strict=False):
        rows = []
        for record in records:
            estimates = {int(name): one for name, one in record["evaluation"]["pass_at"].items()}
            if one := estimates.get(k):
                rows.append((record["step"], one["value"], one["value"] - one["low"], one["high"] - one["value"]))
        steps, values, *bars = zip(*rows, strict=True)
        axis.errorbar(steps, values, bars, color=color, linewidth=1.8, marker="o", markersize=3, capsize=2,
                      elinewidth=0.9, label=f"pass@{k}")  # fmt: skip
    if ks:
        axis.legend(frameon=False, fontsize=9, labelcolor=INK)
