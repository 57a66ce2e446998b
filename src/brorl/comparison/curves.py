"""Curves of a comparison: an arm's score against its cost, as means over runs with their range, and how arms are drawn.

In: a comparison. Out: arrays for the figures, colours, places of labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator
from numpy.typing import NDArray

from brorl.comparison.arms import Arm, Comparison
from brorl.comparison.findings import Findings, measure_of, ordered_by_number
from brorl.comparison.matching import score_at
from brorl.comparison.paired import scores_at
from brorl.cost import UNIT_WORDS, Unit, short_amount
from brorl.evaluation.pass_at_k import FloatArray

INK, GREY, PALE = "#2b2f36", "#8a8f98", "#d5d8dd"
_BLUE, _ORANGE = "#1f5fa8", "#cc7417"
_ANY = (_BLUE, _ORANGE, "#2e8b6a", "#b3382c", "#7b5ea7", "#8a6d3b", "#5b626d", "#c2508f")
# from light to dark as well as from warm to cold, so that the order survives colour blindness and grey printing
_RAMP = LinearSegmentedColormap.from_list("rollouts", ["#d3901c", "#cf5a3c", "#9a3f77", "#4c489c", "#142f57"])


@dataclass(frozen=True, eq=False)
class Curve:
    """An arm's score at the start (index 0) and at each of M marks.

    Attributes:
        cost_M: Mean cost of its runs, shape [1 + M].
        mean_M: Mean score over runs and prompts.
        low_M: That of the lowest run.
        high_M: That of the highest.
    """

    cost_M: FloatArray
    mean_M: FloatArray
    low_M: FloatArray
    high_M: FloatArray


def curve(
    comparison: Comparison, arm: Arm, k: int, unit: Unit, prompts: NDArray[np.int64] | None = None
) -> Curve:  # fmt: skip
    """Return an arm's pass@k against its cost.

    A run that ended early stands at the mark in the comparison's unit, since its last score counts there, and at what
    it had spent in the other units.

    Args:
        comparison: The comparison.
        arm: One of its arms.
        k: k.
        unit: What the cost counts.
        prompts: Indices of the prompts to score; None for all.
    """
    marks = (0.0, *comparison.marks)
    costs, scores = [], []
    for mark in marks:
        score_SP = scores_at(comparison, arm, mark, measure_of(k), k)
        scores.append((score_SP if prompts is None else score_SP[:, prompts]).mean(1))
        spent = [score_at(run, comparison.unit, mark).cost.of(unit) for run in arm.trajectories]
        costs.append(float(np.mean(np.maximum(spent, mark) if unit == comparison.unit else spent)))
    score_MS = np.stack(scores)
    return Curve(np.array(costs), score_MS.mean(1), score_MS.min(1), score_MS.max(1))


def arm_colours(arms: Sequence[Arm]) -> dict[str, str]:
    """Return a colour for each arm: two that are far apart; of more a ramp by N, adaptive arms in grey; else any."""
    if len(arms) == 2:
        return {arms[0].name: _ORANGE, arms[1].name: _BLUE}
    if not ordered_by_number(arms):
        return {arm.name: _ANY[i % len(_ANY)] for i, arm in enumerate(arms)}
    fixed = sorted((a for a in arms if a.num_rollouts is not None), key=lambda a: a.num_rollouts or 0)
    colours = {arm.name: to_hex(_RAMP(i / (len(fixed) - 1))) for i, arm in enumerate(fixed)}
    return {arm.name: colours.get(arm.name, "#5b626d") for arm in arms}


def label_ends(axis: Axes, end: float, values: Mapping[str, tuple[float, str]], colours: Mapping[str, str]) -> None:
    """Write labels to the right of lines' ends, apart from each other; limits must be set before.

    Args:
        axis: The panel.
        end: Where lines end, in data units.
        values: By arm, where its line ends and what is written there.
        colours: By arm.
    """
    low, high = axis.get_ylim()
    order = sorted(values, key=lambda name: values[name][0])
    place_A = apart(np.array([(values[name][0] - low) / (high - low) for name in order]), 0.062)
    for name, place in zip(order, place_A, strict=True):
        axis.annotate(
            values[name][1], xy=(end, values[name][0]), xytext=(1.02, place), textcoords="axes fraction",
            color=colours[name], fontsize=9.5, va="center", annotation_clip=False,
        )  # fmt: skip


def apart(place_A: FloatArray, gap: float, low: float = 0.0, high: float = 1.0) -> FloatArray:
    """Move rising places as little as leaves a gap between neighbours and all of them within bounds.

    It is the least-squares solution (isotonic regression of the places less their gaps, clipped). Where there are too
    many for the bounds, the gaps are smaller.
    """
    last = len(place_A) - 1
    shift_A = min(gap, (high - low) / max(last, 1)) * np.arange(len(place_A))
    blocks: list[tuple[float, int]] = []  # mean and size of runs of places that had to be moved together
    for value in place_A - shift_A:
        mean, size = float(value), 1
        while blocks and blocks[-1][0] > mean:
            before, number = blocks.pop()
            mean, size = (before * number + mean * size) / (number + size), number + size
        blocks.append((mean, size))
    rising_A = np.concatenate([np.full(size, mean) for mean, size in blocks])
    moved_A: FloatArray = np.clip(rising_A, low, max(low, high - shift_A[-1])) + shift_A
    return moved_A


def key_handles(found: Findings) -> list[Line2D]:
    """Return entries of a legend that say what the arms are that are called by letters."""
    colours = arm_colours(found.comparison.arms)
    return [
        Line2D([], [], linestyle="none", marker="s", markersize=6, color=colours[letter], label=f"{letter}: {name}")
        for letter, name in found.key.items()
    ]


def style(axis: Axes) -> None:
    """Draw a panel in the restrained way: two spines, faint horizontal lines."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(GREY)
    axis.tick_params(colors=INK, labelsize=9.5)
    axis.grid(axis="y", color=PALE, linewidth=0.6, alpha=0.7)
    axis.set_axisbelow(True)


def cost_axis(axis: Axes, unit: Unit, *, most_ticks: int = 5) -> None:
    """Label an axis of costs that starts at 0."""
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value, unit)))
    axis.locator_params(axis="x", nbins=most_ticks)
    axis.set_xlabel(axis_label(unit), fontsize=9, color=INK)


def log_cost_axis(axis: Axes, unit: Unit, marks: Sequence[float], most_ticks: int = 7) -> None:
    """Label a logarithmic axis of costs at the marks, or at some of them."""
    axis.set_xscale("log")
    every = -(-len(marks) // most_ticks)
    ticks = list(marks[::-1][::every])
    axis.set_xticks(ticks, [tick_text(tick, unit) for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel(f"{axis_label(unit)} (log scale)", fontsize=9.5, color=INK)


def tick_text(value: float, unit: Unit) -> str:
    """Return an amount as short as a tick can hold it: 0, 40 s, 2.5M."""
    return "0" if value == 0 else short_amount(value, unit)


def axis_label(unit: Unit) -> str:
    """Return what an axis of costs counts."""
    return "training time, without evaluations" if unit == "seconds" else f"{UNIT_WORDS[unit]} of training"
