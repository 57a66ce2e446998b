"""A plan as a figure: fractions, tokens, seconds and noise against the number of rollouts."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from brorl.format import Estimate
from brorl.planning.report import PlanReport, seconds_text

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#1f5fa8", "#d9822b", "#3a8f5c", "#b3382c", "#8a8f98"
_LONGEST_NAME = 80  # characters that fit into the title
_PHASE_COLORS = {
    "generation": _BLUE,
    "verification": _GREEN,
    "training": _ORANGE,
    "storing": _GREY,
    "diagnostics": "#b9a6d3",
}


def draw_plan(report: PlanReport, path: Path) -> None:
    """Draw the plan as a PNG of four panels."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    _draw_fractions(axes[0, 0], report)
    _draw_tokens(axes[0, 1], report)
    _draw_seconds(axes[1, 0], report)
    _draw_noise(axes[1, 1], report)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("rollouts per prompt, N")
    figure.suptitle(
        f"{_recommendation(report)}{_shortened(report.model)} on {report.device}\n"
        f"pilot of {report.measured.summary.num_prompts} prompts x {report.measured.summary.num_rollouts} rollouts "
        "(bands: 95%)"
    )
    figure.savefig(path, dpi=130)


def _recommendation(report: PlanReport) -> str:
    """Return the recommendation as a line; "" if no N fits in the budget."""
    row = report.plan.recommended
    if row is None:
        return ""
    return f"For pass@1: N = {row.num_rollouts} with {row.budget_prompts} prompts per step\n"


def _shortened(model: str) -> str:
    """Return a model's name; of a path that is too long for the figure, the last folders."""
    if len(model) <= _LONGEST_NAME:
        return model
    end = model[-_LONGEST_NAME:]
    return f"...{end[end.find('/') :]}" if "/" in end else f"...{end}"


def _draw_fractions(axis: Axes, report: PlanReport) -> None:
    numbers = _log_axis(axis, report)
    _draw_estimates(axis, numbers, [r.mixed for r in report.plan.rows], "-o", _BLUE, "mixed groups")
    _draw_estimates(axis, numbers, [r.solved for r in report.plan.rows], "--s", _GREEN, "solved prompts")
    beyond = [n for n, r in zip(numbers, report.plan.rows, strict=True) if r.extrapolated]
    if beyond:
        axis.axvline(report.measured.summary.num_rollouts, color=_GREY, linewidth=1, linestyle=":")
        axis.annotate(
            "fit beyond the pilot ", (report.measured.summary.num_rollouts, 0.03), color=_GREY, fontsize=8,
            xytext=(4, 0), textcoords="offset points",
        )  # fmt: skip
    axis.set(ylim=(0, 1.02), title="Fraction of groups and prompts")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.08))


def _draw_tokens(axis: Axes, report: PlanReport) -> None:
    numbers = _log_axis(axis, report)
    axis.set_yscale("log")
    sampled = [r.unique_tokens.value / r.unique_fraction for r in report.plan.rows]
    axis.plot(numbers, sampled, "--", color=_GREY, label="sampled")
    _draw_estimates(axis, numbers, [r.unique_tokens for r in report.plan.rows], "-o", _BLUE, "unique: computed")
    for number, row in zip(numbers, report.plan.rows, strict=True):
        axis.annotate(
            f"{row.unique_fraction:.0%}" if row.unique_fraction >= 0.01 else f"{row.unique_fraction:.1%}",
            (number, row.unique_tokens.value), xytext=(0, -14), textcoords="offset points", ha="center", fontsize=8,
        )  # fmt: skip
    axis.margins(y=0.12)
    axis.set_title("Tokens of a group")
    axis.legend(frameon=False, loc="upper left")


def _draw_seconds(axis: Axes, report: PlanReport) -> None:
    rows = report.plan.rows
    position = range(len(rows))
    bottom = [0.0] * len(rows)
    for phase, color in _PHASE_COLORS.items():
        heights = [r.seconds.get(phase, 0.0) for r in rows]
        axis.bar(position, heights, 0.65, bottom, color=color, label=phase)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axis.axhline(report.plan.budget, color=_RED, linewidth=1, linestyle="--")
    axis.set_xticks(position, [str(r.num_rollouts) for r in rows])
    axis.set_title(f"Seconds of a step with {report.settings.prompts_per_step} prompts (dashed: the budget)")
    axis.legend(frameon=False, loc="upper left")


def _draw_noise(axis: Axes, report: PlanReport) -> None:
    plan = report.plan
    rows = [(i, r) for i, r in enumerate(plan.rows) if r.budget_prompts and isfinite(r.to_best.value)]
    _log_axis(axis, report)
    for index, row in rows:
        color = _GREEN if index == plan.chosen else _BLUE if index in plan.tied else _GREY
        low, value = row.to_best.low, row.to_best.value
        high = row.to_best.high if isfinite(row.to_best.high) else value
        axis.errorbar(row.num_rollouts, value, [[value - low], [high - value]], fmt="o", color=color, capsize=3)
        axis.annotate(
            f"{row.budget_prompts}", (row.num_rollouts, high), xytext=(0, 6), textcoords="offset points",
            ha="center", fontsize=8, color=color,
        )  # fmt: skip
    axis.axhline(1, color=_GREY, linewidth=1, linestyle=":")
    title = f"Gradient noise for {seconds_text(plan.budget)} s per step, times the least"
    axis.set_title(f"{title}\n(with the prompts that fit; green: recommended)")
    axis.margins(y=0.15)
    axis.set_ylim(bottom=0)


def _draw_estimates(
    axis: Axes, numbers: list[int], estimates: list[Estimate], style: str, color: str, label: str
) -> None:
    """Draw a line with a band of intervals."""
    axis.fill_between(numbers, [e.low for e in estimates], [e.high for e in estimates], color=color, alpha=0.15)
    axis.plot(numbers, [e.value for e in estimates], style, color=color, label=label, markersize=4)


def _log_axis(axis: Axes, report: PlanReport) -> list[int]:
    numbers = [r.num_rollouts for r in report.plan.rows]
    axis.set_xscale("log", base=2)
    axis.set_xticks(numbers, [str(n) for n in numbers])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlim(numbers[0] / 1.4, numbers[-1] * 1.4)
    return numbers
