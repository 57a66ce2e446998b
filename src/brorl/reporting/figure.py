"""Drawing with matplotlib: curves with bands in the page's colors, and the figure of a run."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from math import ceil, isfinite, nan
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from scipy.optimize import isotonic_regression

from brorl.arrays import FloatArray
from brorl.cost import UNIT_WORDS, Unit, short_amount
from brorl.reporting.frame import resource
from brorl.runs.step_record import SamplingRecord, StepRecord

PNG: dict[str, Any] = {"dpi": 130, "facecolor": "white"}  # options of `Figure.savefig`
_THEME = json.loads(resource("colors.json"))["light"]
INK = _THEME["ink"]
GREY = _THEME["soft"]
PALE = _THEME["line"]
COLORS: tuple[str, ...] = tuple(_THEME["run"])  # for unordered lines
_RAMP = LinearSegmentedColormap.from_list("sequence", _THEME["sequence"])


def ordered_color(fraction: float) -> str:
    """Return the color of a line by its position in an order, from 0 for the first to 1 for the last.

    Lightness and hue both change, so the order is visible to color-blind readers and in grayscale.
    """
    return to_hex(_RAMP(fraction))


class ResultFigure(Figure):
    """A matplotlib figure that a notebook shows even if `matplotlib.pyplot` was never imported."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png", **PNG)
        return picture.getvalue()


def style(axis: Axes) -> None:
    """Style a panel with two spines and faint horizontal grid lines."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(GREY)
    axis.tick_params(colors=INK, labelsize=9.5)
    axis.grid(axis="y", color=PALE, linewidth=0.6, alpha=0.7)
    axis.set_axisbelow(True)


def draw_curve(
    axis: Axes,
    x_M: FloatArray,
    y_M: FloatArray,
    *,
    color: str,
    label: str = "",
    band: tuple[FloatArray, FloatArray] | None = None,
    small: bool = False,
    linestyle: str = "-",
    markevery: slice | None = None,
) -> None:
    """Draw a curve through M points, and a band between two other curves, (low, high).

    `markevery` selects the points with a marker; None marks all.
    """
    if band is not None and (band[1] > band[0]).any():
        axis.fill_between(x_M, *band, color=color, alpha=0.16, linewidth=0)
    axis.plot(
        x_M, y_M, color=color, linestyle=linestyle, linewidth=1.6 if small else 2.2, marker="o",
        markersize=3 if small else 4.5, markevery=markevery, label=label,
    )  # fmt: skip


def draw_start(axis: Axes, start: float, *, below: bool, fontsize: float) -> None:
    """Draw the starting score as a dotted line, with its value below or above the line."""
    axis.axhline(start, color=GREY, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
    axis.annotate(
        f"start {start:.3f}", (1, start), xycoords=("axes fraction", "data"), xytext=(-2, -10 if below else 3),
        textcoords="offset points", fontsize=fontsize, color=GREY, ha="right", zorder=6,
        path_effects=[withStroke(linewidth=3, foreground="white")],
    )  # fmt: skip


def label_ends(axis: Axes, end: float, labels: Mapping[str, tuple[float, str]], colors: Mapping[str, str]) -> None:
    """Label the arms at the ends of their lines without overlap; the axis limits must already be set."""
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
    """Spread ascending heights apart within [0, 1], with the smallest sum of squared moves.

    Neighbors end up at least `gap` apart: [0.5, 0.5] with gap 0.1 gives [0.45, 0.55]. Gaps are smaller if there are
    too many heights.
    """
    last = len(height_A) - 1
    shift_A = min(gap, 1 / max(last, 1)) * np.arange(len(height_A))
    rising_A = isotonic_regression(height_A - shift_A).x
    moved_A: FloatArray = np.clip(rising_A, 0, max(0, 1 - shift_A[-1])) + shift_A
    return moved_A


def cost_axis(axis: Axes, unit: Unit, *, max_ticks: int = 5) -> None:
    """Format a cost axis, starting at 0."""
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value, unit)))
    axis.set_xlim(left=0)
    if unit == "seconds":
        axis.xaxis.set_major_locator(MultipleLocator(tick_seconds(axis.get_xlim()[1] / max_ticks)))
    else:
        axis.locator_params(axis="x", nbins=max_ticks)
    axis.set_xlabel(axis_label(unit), fontsize=9, color=INK)


def tick_seconds(least: float) -> float:
    """Return the smallest round tick spacing, in seconds, that is at least `least`."""
    numbers = [(unit, number) for unit in (0.01, 1, 60, 3600) for number in (1, 2, 5, 10, 20, 30)]
    return next((unit * number for unit, number in numbers if unit * number >= least), 86_400 * ceil(least / 86_400))


def tick_text(value: float, unit: Unit) -> str:
    """Format an amount as a short tick label: 0, 40 s, 2.5M."""
    return "0" if value == 0 else short_amount(value, unit)


def axis_label(unit: Unit) -> str:
    """Return the label of a cost axis."""
    return "training time, without evaluations" if unit == "seconds" else f"{UNIT_WORDS[unit]} of training"


def run_figure(records: Sequence[StepRecord]) -> ResultFigure:
    """Draw a run's metrics by step; a panel without data is labeled as such."""
    figure = ResultFigure(figsize=(11, 3.2), layout="constrained")
    reward, held_out, mixed = figure.subplots(1, 3)
    _draw_line(reward, records, lambda sampled: sampled.reward)
    reward.set_title("mean reward of the rollouts", fontsize=10, color=INK, loc="left")
    _draw_evaluations(held_out, records)
    held_out.set_title("held-out prompts, with 95% intervals", fontsize=10, color=INK, loc="left")
    _draw_line(mixed, records, lambda sampled: sampled.groups_mixed / sampled.groups if sampled.groups else nan)
    mixed.set_title("mixed fraction of sampled groups", fontsize=10, color=INK, loc="left")
    mixed.set_ylim(0, 1.02)
    for axis in (reward, held_out, mixed):
        style(axis)
        axis.set_xlabel("step", fontsize=9, color=INK)
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if not axis.has_data():
            axis.text(0.5, 0.5, "nothing was measured", transform=axis.transAxes, ha="center", color=GREY)
    return figure


def _draw_line(axis: Axes, records: Sequence[StepRecord], value_of: Callable[[SamplingRecord], float]) -> None:
    """Draw a value for each step that sampled."""
    sampled = [(record.step, record.sampling) for record in records if record.sampling and record.sampling.samples]
    points = [(step, value) for step, sampling in sampled if isfinite(value := value_of(sampling))]
    if points:
        draw_curve(axis, *np.array(points, float).T, color=COLORS[0], small=True)


def _draw_evaluations(axis: Axes, records: Sequence[StepRecord]) -> None:
    """Draw pass@1, and pass@k at the largest k."""
    evaluations = [(record.step, record.evaluation.pass_at) for record in records if record.evaluation]
    ks = sorted({k for _, pass_at in evaluations for k in pass_at})
    for k, color in zip(dict.fromkeys((*ks[:1], *ks[-1:])), COLORS, strict=False):
        rows = [(step, at[k].value, at[k].low, at[k].high) for step, at in evaluations if k in at]
        step_M, value_M, low_M, high_M = np.array(rows, float).T
        draw_curve(axis, step_M, value_M, color=color, label=f"pass@{k}", band=(low_M, high_M), small=True)
    if ks:
        axis.legend(frameon=False, fontsize=9, labelcolor=INK)
