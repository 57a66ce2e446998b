"""A plan for people and for programs: tables, a few plain sentences, JSON.

In: a plan, what it was made from, and the memory it predicts. Out: rich tables, lines of text, a dictionary. Nothing is
computed here but ratios of what is in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite, isinf, isnan
from typing import Any

from rich import box
from rich.table import Table

from brorl.format import plain
from brorl.planning.pilot_counts import Estimate
from brorl.planning.recommendation import NEARLY_BEST, Plan, PlanRow, StepSettings
from brorl.planning.step_timing import Measured
from brorl.storage import json_ready


@dataclass(frozen=True)
class PlanReport:
    """A plan with what belongs beside it.

    Attributes:
        plan: The plan.
        measured: What it was made from.
        settings: How the recipe makes a step.
        model: Name of the model.
        device: Where it ran.
        memory_bytes: Memory of a step above the loaded model with the recipe's prompts, per row; None if unknown.
        budget_memory_bytes: The same with the prompts that fit in the budget.
    """

    plan: Plan
    measured: Measured
    settings: StepSettings
    model: str
    device: str
    memory_bytes: Sequence[int | None]
    budget_memory_bytes: Sequence[int | None]


def predict_memory(measured: Measured, plan: Plan, settings: StepSettings) -> tuple[list[int | None], list[int | None]]:
    """Return the memory of each row's step, with the recipe's prompts and with those that fit in the budget."""
    at_recipe: list[int | None] = []
    at_budget: list[int | None] = []
    for row, rows_D in zip(plan.rows, measured.rows_JD, strict=True):
        for found, num_prompts in ((at_recipe, settings.prompts_per_step), (at_budget, row.budget_prompts)):
            nodes = row.trained_nodes * num_prompts / settings.mini_batches
            known = measured.memory is not None and num_prompts > 0
            found.append(
                measured.memory.predict(rows_D, row.num_rollouts, num_prompts, nodes)
                if known and measured.memory
                else None
            )
    return at_recipe, at_budget


def pilot_line(report: PlanReport) -> str:
    """Return what the pilot's rollouts look like, on one line."""
    pilot = report.measured.summary
    return (
        f"the pilot: pass@1 {pilot.share_correct:.3f}, {pilot.mean_length:.1f} tokens a rollout, "
        f"{pilot.entropy:.2f} nats a token, {pilot.share_truncated:.1%} cut off, "
        f"{pilot.share_duplicate:.1%} duplicates, {pilot.tokens_per_second:,.0f} sampled tokens/s"
    )


def share_table(report: PlanReport) -> Table:
    """Make the table of what N rollouts of a prompt give."""
    table = _table("What N rollouts of a prompt give", "N", "both outcomes", "a success", "unique tokens", "of sampled")
    for row in report.plan.rows:
        table.add_row(
            _number(row),
            interval(row.informative),
            interval(row.solved),
            f"{row.unique_tokens.value:,.0f}",
            f"{row.unique_share:.3f}",
        )
    if any(row.extrapolated for row in report.plan.rows):
        table.caption = f"* beyond the pilot's {report.measured.summary.num_rollouts} rollouts: shares from a fit"
        table.caption_justify = "left"
    return table


def step_table(report: PlanReport) -> Table:
    """Make the table of what a step with the recipe's number of prompts costs, and the noise of its gradient."""
    title = f"What a step with {report.settings.prompts_per_step} prompts takes"
    table = _table(title, "N", "seconds", "sample/verify/train/rest", "memory", "gradient noise")
    for row, memory in zip(report.plan.rows, report.memory_bytes, strict=True):
        main = [row.seconds[p] for p in ("generation", "verification", "training")]
        known = isfinite(row.seconds["total"])
        table.add_row(
            _number(row),
            seconds_text(row.seconds["total"]),
            "/".join(f"{s:.2f}" for s in (*main, row.seconds["total"] - sum(main))) if known else "never full",
            _memory(memory),
            noise(row.noise),
        )
    return table


def budget_table(report: PlanReport) -> Table:
    """Make the table of what fits in the time budget."""
    plan = report.plan
    title = f"What fits in {seconds_text(plan.budget)} s a step"
    table = _table(title, "N", "prompts", "gradient noise", "times the least", "")
    for index, row in enumerate(plan.rows):
        if not row.budget_prompts:
            table.add_row(_number(row), f"< {report.settings.mini_batches}", "", "", "does not fit")
            continue
        remarks = [
            *(["recommended"] if index == plan.chosen else []),
            *(["tied"] if index in plan.tied and len(plan.tied) > 1 else []),
            *(["the recipe's N"] if index == plan.recipe else []),
        ]
        table.add_row(
            _number(row),
            f"{row.budget_prompts:,}",
            noise(row.budget_noise),
            interval(row.to_best),
            ", ".join(remarks),
            style="bold green" if index == plan.chosen else None,
        )
    return table


def advice(report: PlanReport) -> list[str]:
    """Return the recommendation with its reasons, and what would sharpen it, in plain sentences."""
    plan, settings = report.plan, report.settings
    if plan.chosen is None or plan.best is None:
        return [
            f"no N fits in {seconds_text(plan.budget)} s a step with {settings.mini_batches} prompts, one for each "
            "mini-batch; raise --seconds-per-step, or lower optimizer.mini_batches"
        ]
    chosen = plan.rows[plan.chosen]
    lines = [
        f"For {seconds_text(plan.budget)} s a step on this machine: N = {chosen.num_rollouts} with "
        f"{chosen.budget_prompts} prompts per step{_against_recipe(plan, settings)}."
    ]
    if len(plan.tied) > 1:
        tied = [str(plan.rows[i].num_rollouts) for i in plan.tied]
        lines.append(
            f"N = {', '.join(tied[:-1])} and {tied[-1]} cannot be told apart by this pilot (times count as known "
            f"within {plan.time_error:.0%}); the largest of them with at most {NEARLY_BEST - 1:.0%} more noise than "
            "the least is recommended, since it covers more rare successes."
        )
    else:
        others = [r for r in plan.rows if r is not chosen and r.budget_prompts]
        if others:
            nearest = min(others, key=lambda r: r.to_best.value)
            lines.append(
                f"Its gradient noise is the least; the next is N = {nearest.num_rollouts} with "
                f"{interval(nearest.to_best)} times as much."
            )
    lines.append(_next_factor(plan, plan.chosen))
    lines.append(_limits(report))
    lines.append(
        "Noise of one step's gradient and the share of informative groups are not the final performance: rare "
        "successes, changed policies and the optimizer count too (docs/explanation/theory.md)."
    )
    return lines


def _against_recipe(plan: Plan, settings: StepSettings) -> str:
    """Compare the chosen N with the recipe's own."""
    assert plan.chosen is not None
    chosen, recipe = plan.rows[plan.chosen], plan.rows[plan.recipe]
    if plan.chosen == plan.recipe:
        return f", the recipe's own N (it has {settings.prompts_per_step} prompts per step)"
    if not recipe.budget_prompts:
        return f"; the recipe's own N = {recipe.num_rollouts} does not fit"
    ratio = chosen.to_best.value / recipe.to_best.value
    return (
        f", which has {ratio:.2f} times the gradient noise of the recipe's N = {recipe.num_rollouts} with "
        f"{recipe.budget_prompts} prompts in the same time"
    )


def _next_factor(plan: Plan, column: int) -> str:
    """Say what the recipe's N, or else a larger one, would buy and cost at the recipe's number of prompts."""
    row = plan.rows[column]
    larger = plan.rows[column + 1 :]
    if not larger:
        return f"No N above {row.num_rollouts} was asked for; --rollouts takes larger ones."
    other = plan.rows[plan.recipe] if plan.recipe > column else larger[min(1, len(larger) - 1)]
    factor = other.num_rollouts / row.num_rollouts
    return (
        f"From N = {row.num_rollouts}, {plain(factor)} times the rollouts take informative groups from "
        f"{row.informative.value:.2f} to {other.informative.value:.2f} and prompts with a success from "
        f"{row.solved.value:.2f} to {other.solved.value:.2f}, for "
        f"{other.seconds['total'] / row.seconds['total']:.1f} times the seconds at the same number of prompts."
    )


def _limits(report: PlanReport) -> str:
    """Say how certain the plan is, and what would make it more so."""
    plan, summary = report.plan, report.measured.summary
    wider = 4 * summary.num_prompts
    reasons = []
    if not plan.gradient_seen:
        reasons.append(
            f"the mean gradient of {summary.num_prompts} prompts cannot be told from 0, so noise has a lower bound "
            "alone (comparisons at equal time hold)"
        )
    if len(plan.tied) >= 3:
        reasons.append(f"{len(plan.tied)} numbers of rollouts are tied")
    chosen = plan.rows[plan.chosen if plan.chosen is not None else plan.recipe]
    if chosen.informative.high - chosen.informative.low > 0.2:
        share = interval(chosen.informative)
        reasons.append(f"the share of informative groups at N = {chosen.num_rollouts} is {share}")
    if reasons:
        return f"Uncertain: {'; '.join(reasons)}. Sharpen it with --pilot-prompts {wider}."
    return f"Intervals are 95%, over {summary.num_prompts} prompts; --pilot-prompts {wider} would about halve them."


def plan_record(report: PlanReport) -> dict[str, Any]:
    """Return everything as JSON can hold it; numbers without a value or without an end are null."""
    plan = report.plan
    rows = [
        {**asdict(row), "memory_bytes": memory, "budget_memory_bytes": at_budget}
        for row, memory, at_budget in zip(plan.rows, report.memory_bytes, report.budget_memory_bytes, strict=True)
    ]
    numbers = [row.num_rollouts for row in plan.rows]
    record = {
        "model": report.model,
        "device": report.device,
        "recipe": asdict(report.settings),
        "pilot": asdict(report.measured.summary),
        "recommendation": {
            "seconds_per_step": plan.budget,
            "rollouts_per_prompt": None if plan.chosen is None else numbers[plan.chosen],
            "prompts_per_step": None if plan.chosen is None else plan.rows[plan.chosen].budget_prompts,
            "least_noise": None if plan.best is None else numbers[plan.best],
            "tied": [numbers[i] for i in plan.tied],
            "lines": advice(report),
        },
        "rows": rows,
        "pass_rates": asdict(plan.pass_rates),
        "gradient": {
            "mean_squared": float(plan.moments.mean_squared),
            "between_prompts": float(plan.moments.between),
            "within_prompt_per_rollout": float(plan.moments.within),
            "p_value": plan.p_value,
        },
        "probes": [asdict(probe) for probe in report.measured.probes],
        "cost": asdict(report.measured.cost),
        "time_error": plan.time_error,
    }
    found: dict[str, Any] = json_ready(record)
    return found


def interval(estimate: Estimate, digits: int = 2) -> str:
    """Return a number with its interval."""
    if isnan(estimate.value):
        return ""
    high = "no end" if isinf(estimate.high) else f"{estimate.high:.{digits}f}"
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f}, {high}]"


def noise(estimate: Estimate) -> str:
    """Return a relative noise with its interval; where the mean gradient was not seen, its lower end alone."""
    if isnan(estimate.value) or isnan(estimate.low):
        return ""
    if isinf(estimate.value):
        return f"above {plain(estimate.low, 2)}"
    high = "no end" if isinf(estimate.high) else plain(estimate.high, 2)
    return f"{plain(estimate.value, 2)} [{plain(estimate.low, 2)}, {high}]"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    return table


def _number(row: PlanRow) -> str:
    return f"{row.num_rollouts:,}{'*' if row.extrapolated else ''}"


def seconds_text(seconds: float) -> str:
    """Return seconds with as many digits as they deserve."""
    if isinf(seconds):
        return "-"
    return f"{seconds:.3f}" if seconds < 0.1 else f"{seconds:.2f}" if seconds < 10 else f"{seconds:,.0f}"


def _memory(memory_bytes: int | None) -> str:
    if memory_bytes is None:
        return "unknown"
    return f"{memory_bytes / 2**20:,.0f} MiB" if memory_bytes < 2**30 else f"{memory_bytes / 2**30:,.1f} GiB"
