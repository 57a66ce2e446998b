"""What the figures of this package share: colors, axes of costs, and labels that do not overlap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter
from scipy.optimize import isotonic_regression

from brorl.arrays import FloatArray
from brorl.comparison.arms import Comparison
from brorl.comparison.results import ComparisonResults
from brorl.cost import UNIT_WORDS, Unit, short_amount

PNG: dict[str, Any] = {"dpi": 130, "facecolor": "white"}  # options of `Figure.savefig`
INK, GREY, PALE = "#2b2f36", "#8a8f98", "#d5d8dd"
_BLUE, _ORANGE = "#1f5fa8", "#cc7417"
COLORS = (_BLUE, _ORANGE, "#2e8b6a", "#b3382c", "#7b5ea7", "#8a6d3b", "#5b626d", "#c2508f", "#3aa0c8")
# from light to dark and from warm to cold: the order survives color blindness and gray printing
_RAMP = LinearSegmentedColormap.from_list("rollouts", ["#d3901c", "#cf5a3c", "#9a3f77", "#4c489c", "#142f57"])


def arm_colors(comparison: Comparison) -> dict[str, str]:
    """Return a color for each arm: two that are far apart; of more a ramp by N; else any."""
    arms = comparison.arms
    if len(arms) == 2:
        return {arms[0].name: _ORANGE, arms[1].name: _BLUE}
    if not comparison.ordered_by_rollouts:
        return {arm.name: COLORS[i % len(COLORS)] for i, arm in enumerate(arms)}
    ascending = sorted(arms, key=lambda arm: arm.num_rollouts)
    return {arm.name: to_hex(_RAMP(i / (len(arms) - 1))) for i, arm in enumerate(ascending)}


def key_handles(results: ComparisonResults) -> list[Line2D]:
    """Return entries of a legend for the arms that have letters as names."""
    colors = arm_colors(results.comparison)
    return [
        Line2D([], [], linestyle="none", marker="s", markersize=6, color=colors[letter], label=f"{letter}: {name}")
        for letter, name in results.key.items()
    ]


def draw_start(axis: Axes, start: float, *, below: bool, fontsize: float) -> None:
    """Draw the score of the start as a dotted line with its value, which stands below the line or above it."""
    axis.axhline(start, color=GREY, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
    axis.annotate(
        f"start {start:.3f}", (1, start), xycoords=("axes fraction", "data"), xytext=(-2, -10 if below else 3),
        textcoords="offset points", fontsize=fontsize, color=GREY, ha="right", zorder=6,
        path_effects=[withStroke(linewidth=3, foreground="white")],
    )  # fmt: skip


def label_ends(axis: Axes, end: float, labels: Mapping[str, tuple[float, str]], colors: Mapping[str, str]) -> None:
    """Write each arm's label at the end of its line, apart from the others; limits must be set before."""
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


def style(axis: Axes) -> None:
    """Draw a panel with two spines and faint horizontal lines."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(GREY)
    axis.tick_params(colors=INK, labelsize=9.5)
    axis.grid(axis="y", color=PALE, linewidth=0.6, alpha=0.7)
    axis.set_axisbelow(True)


def cost_axis(axis: Axes, unit: Unit, *, max_ticks: int = 5) -> None:
    """Label an axis of costs that starts at 0."""
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value, unit)))
    axis.locator_params(axis="x", nbins=max_ticks)
    axis.set_xlabel(axis_label(unit), fontsize=9, color=INK)
    axis.set_xlim(left=0)


def tick_text(value: float, unit: Unit) -> str:
    """Return an amount in the short form of a tick label: 0, 40 s, 2.5M."""
    return "0" if value == 0 else short_amount(value, unit)


def axis_label(unit: Unit) -> str:
    """Return the label of an axis of costs."""
    return "training time, without evaluations" if unit == "seconds" else f"{UNIT_WORDS[unit]} of training"
