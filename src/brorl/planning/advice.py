"""Turn a plan into tables, sentences, commands and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isinf, isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.text import Text

from brorl.config.reading import options_of
from brorl.config.settings import TrainConfig
from brorl.errors import option
from brorl.format import Estimate, interval, plain, shell_command
from brorl.planning.pilot import PlanMeasurements, generator_of, measure
from brorl.planning.recommendation import NEARLY_BEST, PlanRow, RolloutPlan, StepSettings, make_plan
from brorl.storage import json_ready
from brorl.table import Result, Table
from brorl.training.local_parts import LocalParts


@dataclass(frozen=True, eq=False, repr=False)
class PlanResult(Result):
    """A plan with its measurements."""

    plan: RolloutPlan
    measured: PlanMeasurements
    settings: StepSettings
    model: str
    device: str  # device on which the plan was measured
    path: Path  # folder that contains `plan.json`
    # trains with the recommendation; None if no N fits in the budget, or if the recipe is not a file
    train_command: str | None = None
    compare_command: str | None = None  # tests the plan; None if there is nothing to compare

    @property
    def recommended(self) -> PlanRow | None:
        """The recommended row; its `budget_prompts` is the prompts per step. None if no N fits in the budget."""
        return self.plan.recommended

    @classmethod
    def measure(
        cls,
        config: TrainConfig,
        parts: LocalParts,
        pilot: tuple[int, int],
        rollouts: Sequence[int],
        folder: Path,
        announce: Callable[[str], None],
        seconds_per_step: float | None = None,
    ) -> PlanResult:
        """Run a pilot of (prompts, rollouts per prompt), time a few steps, and make a plan from them.

        The recipe's N is also compared. An N that the recipe's objective does not support is skipped. Without
        `seconds_per_step`, the budget is the time of a step with the recipe's settings.

        Raises:
            NoKeptGroupsError: If no group of the pilot is mixed and kept.
        """
        fewest = max((a.k + 1 for a in config.advantages if a.estimator == "pass_at_k"), default=2)
        compared = np.array(sorted({*(n for n in rollouts if n >= fewest), config.rollouts_per_prompt}))
        with TemporaryDirectory(dir=folder, prefix=".pilot-") as scratch:
            measured = measure(parts, *pilot, compared, Path(scratch), announce)
        settings = StepSettings.of(config, parts.stream.num_prompts)
        plan = make_plan(measured.counts, measured.cost, settings, seconds_per_step, generator_of(parts, 3))
        return cls(plan, measured, settings, config.model, str(parts.model.device), folder)

    def parts(self) -> Iterator[Any]:
        """Yield the recommendation, tables, pilot summary, reasons, file path and commands."""
        recommendation, *reasons = advice_lines(self)
        yield from (Text(f"\n{recommendation}\n", style="bold"), budget_table(self), "", fraction_table(self), "")
        yield pilot_line(self)
        yield from (f"- {line}" for line in reasons)
        yield f"\nwritten: {self.path / 'plan.json'}"
        if self.train_command:
            yield f"train with it: {self.train_command}"
        if self.compare_command:
            yield f"or measure it: {self.compare_command}"

    def __repr__(self) -> str:
        return f"PlanResult({str(self.path)!r}: {advice_lines(self)[0]})"


def pilot_line(result: PlanResult) -> str:
    """Return a one-line summary of the pilot."""
    pilot = result.measured.summary
    return (
        f"the pilot: pass@1 {pilot.accuracy:.3f}, {pilot.mean_length:.1f} tokens per rollout, "
        f"{pilot.entropy:.2f} nats per token, {pilot.truncation_rate:.1%} truncated, "
        f"{pilot.duplicate_rate:.1%} duplicates, {pilot.tokens_per_second:,.0f} sampled tokens/s"
    )


def fraction_table(result: PlanResult) -> Table:
    """Return a table with one row per N: fractions, tokens per prompt, and seconds per step."""
    columns = ("N", "mixed groups", "solved prompts", "unique tokens", "of sampled", "seconds")
    rows = []
    for row in result.plan.rows:
        fractions = interval(row.kept, 2), interval(row.solved, 2)
        tokens = f"{row.unique_tokens.value:,.0f}", f"{row.unique_fraction:.3f}"
        rows.append((_number(row), *fractions, *tokens, plain(row.seconds["total"])))
    seconds = f"seconds: for a step with {result.settings.prompts_per_step} prompts"
    notes = *_beyond_pilot(result), *_limited(result), seconds
    return Table("N rollouts per prompt", columns, tuple(rows), notes, words=frozenset())


def _beyond_pilot(result: PlanResult) -> tuple[str, ...]:
    """Return the note that explains the stars, if any N has one."""
    pilot = result.measured.summary.num_rollouts
    note = f"* beyond the pilot's {pilot} rollouts: predicted from a fit"
    return (note,) if any(row.extrapolated for row in result.plan.rows) else ()


def _limited(result: PlanResult) -> tuple[str, ...]:
    """Return the note on mixed groups that are not kept, if the recipe limits their pass rate."""
    rate = result.measured.counts.dynamic_sampling.max_pass_rate
    return (f"mixed groups: with a pass rate of at most {rate:g} (dynamic_sampling.max_pass_rate)",) if rate < 1 else ()


def budget_table(result: PlanResult) -> Table:
    """Return a table of the step that fits in the time budget, one row per N."""
    plan = result.plan
    rows = []
    for index, row in enumerate(plan.rows):
        if not row.budget_prompts:
            rows.append((_number(row), f"< {result.settings.mini_batches}", "-", "-", "-", "does not fit"))
            continue
        remarks = {
            "use this": index == plan.chosen,
            "tied": index in plan.tied and len(plan.tied) > 1,
            "recipe": index == plan.recipe,
        }
        remark = ", ".join(remark for remark, holds in remarks.items() if holds)
        noise = format_noise(row.budget_noise), _to_recipe(plan, row), interval(row.to_best, 2)
        rows.append((_number(row), f"{row.budget_prompts:,}", *noise, remark))
    columns = ("N", "prompts", "gradient noise", "times\nrecipe's", "times the least", "")
    strong = frozenset(() if plan.chosen is None else {plan.chosen})
    notes = [*_beyond_pilot(result)]
    if any(not row.budget_prompts for row in plan.rows):
        notes.append("does not fit: even a step with the fewest prompts, one per mini-batch, takes longer")
    title = f"Steps of {plain(plan.budget)} s"
    return Table(title, columns, tuple(rows), tuple(notes), words=frozenset({5}), strong=strong)


def advice_lines(result: PlanResult) -> list[str]:
    """Return the recommendation, its reasons and its limits, as sentences."""
    plan = result.plan
    settings = result.settings
    row = plan.recommended
    budget = f"{plain(plan.budget)} s"
    if row is None:
        return [
            f"No N fits in {budget} per step with {settings.mini_batches} prompts, one per mini-batch; raise "
            f"{option('seconds-per-step')}, or lower optimizer.mini_batches."
        ]
    return [
        f"For pass@1, use N = {row.num_rollouts} rollouts per prompt.",
        f"With {row.budget_prompts} prompts, a step takes {budget} on this machine, which is the time budget; "
        f"{_recipe_words(plan, row, settings)}.",
        *_alternatives(plan, row),
        _limits(result, row),
        "The noise of one step's gradient and the fraction of mixed groups do not determine the final result: rare "
        "successes, the objective, later policies and the optimizer also matter (docs/explanation/theory.md). "
        "brorl tune measures which settings end higher.",
    ]


def _recipe_words(plan: RolloutPlan, chosen: PlanRow, settings: StepSettings) -> str:
    """Return how many prompts fit in the same time at the recipe's N."""
    recipe = plan.rows[plan.recipe]
    if chosen is recipe:
        return f"N is the recipe's own, with {settings.prompts_per_step} prompts per step in the recipe"
    fits = f"has {recipe.budget_prompts} prompts in this time" if recipe.budget_prompts else "does not fit"
    return f"the recipe's N = {recipe.num_rollouts} {fits}"


def _to_recipe(plan: RolloutPlan, row: PlanRow) -> str:
    """Return the gradient noise of a row as a multiple of the recipe's noise at equal time."""
    recipe = plan.rows[plan.recipe]
    return f"{row.to_best.value / recipe.to_best.value:.2f}" if recipe.budget_prompts else "-"


def _alternatives(plan: RolloutPlan, chosen: PlanRow) -> Iterator[str]:
    """Name every N tied with the best, or the second best if there is no tie."""
    fitting = [row for row in plan.rows if row is not chosen and row.budget_prompts]
    if len(plan.tied) > 1:
        *tied, last = [str(plan.rows[i].num_rollouts) for i in plan.tied]
        yield (
            f"This pilot cannot distinguish N = {', '.join(tied)} and {last} (assuming a timing error of "
            f"{plan.time_error:.0%}). The plan recommends the largest of them with at most {NEARLY_BEST - 1:.0%} more "
            "noise than the least, because it covers more rare successes."
        )
    elif fitting:
        second = min(fitting, key=lambda row: row.to_best.value)
        yield (
            f"It has the least gradient noise. The next best, N = {second.num_rollouts}, has "
            f"{interval(second.to_best, 2)} times as much."
        )


def _limits(result: PlanResult, chosen: PlanRow) -> str:
    """Return the plan's uncertainty, and how to reduce it."""
    plan = result.plan
    summary = result.measured.summary
    more = option("pilot-prompts", 4 * summary.num_prompts)
    reasons = []
    if not plan.gradient_seen:
        reasons.append(
            f"the mean gradient of {summary.num_prompts} prompts is not significantly different from 0, so the noise "
            "has only a lower bound (comparisons at equal time are still valid)"
        )
    if len(plan.tied) >= 3:
        reasons.append(f"{len(plan.tied)} numbers of rollouts are tied")
    if chosen.kept.high - chosen.kept.low > 0.2:
        reasons.append(f"the fraction of mixed groups at N = {chosen.num_rollouts} is {interval(chosen.kept, 2)}")
    if reasons:
        return f"Uncertain: {'; '.join(reasons)}. {more} reduces the uncertainty."
    return f"Intervals are 95% over {summary.num_prompts} prompts; {more} would roughly halve them."


def plan_record(result: PlanResult) -> dict[str, Any]:
    """Return the content of `plan.json`. Missing numbers and infinite interval ends are null."""
    plan = result.plan
    numbers = [row.num_rollouts for row in plan.rows]
    record: dict[str, Any] = json_ready({
        "recommendation": {
            "seconds_per_step": plan.budget,
            "rollouts_per_prompt": plan.recommended and plan.recommended.num_rollouts,
            "prompts_per_step": plan.recommended and plan.recommended.budget_prompts,
            "least_noise": None if plan.best is None else numbers[plan.best],
            "tied": [numbers[i] for i in plan.tied],
            "lines": advice_lines(result),
        },
        "model": result.model,
        "device": result.device,
        "recipe": result.settings,
        "pilot": result.measured.summary,
        "rows": plan.rows,
        "pass_rates": plan.pass_rates,
        "gradient": {
            "mean_squared": float(plan.moments.mean_squared),
            "between_prompts": float(plan.moments.between),
            "within_prompt_per_rollout": float(plan.moments.within),
            "p_value": plan.p_value,
        },
        "probes": result.measured.timings,
        "cost": result.measured.cost,
        "time_error": plan.time_error,
    })  # fmt: skip
    return record


def format_noise(estimate: Estimate) -> str:
    """Format relative noise with its interval, or only its lower bound if the mean gradient may be 0."""
    if isnan(estimate.value) or isnan(estimate.low):
        return ""
    if isinf(estimate.value):
        return f"above {plain(estimate.low, 2)}"
    high = "inf" if isinf(estimate.high) else plain(estimate.high, 2)
    return f"{plain(estimate.value, 2)} [{plain(estimate.low, 2)}, {high}]"


def _number(row: PlanRow) -> str:
    return f"{row.num_rollouts:,}{'*' if row.extrapolated else ''}"


_NOT_COMPARED = ("rollouts_per_prompt", "prompts_per_step", "seed", "steps", "evaluation.every")  # compare sets these
_COMPARED_STEPS = 100  # length of the recommended comparison, in steps
_LARGE_N = 512


def next_commands(
    result: PlanResult, recipe: str | Path, given: Mapping[str, Any], is_of_a_run: bool
) -> tuple[str | None, str | None]:
    """Return two commands: to train with the recommendation, and to test the plan. Either may be None.

    The settings in `given` override the recipe, which may be a run's recipe.
    """
    plan = result.plan
    row = plan.recommended
    if row is None:
        return None, None
    settings = {name: value for name, value in given.items() if name != "model"}
    trained = {"model": given["model"]} if given.get("model") else {}
    compared = {"from": given["model"]} if given.get("model") else {}
    if is_of_a_run:
        trained["output_dir"] = None  # the original run's directory is not empty
    trained |= settings | {"rollouts_per_prompt": row.num_rollouts, "prompts_per_step": row.budget_prompts}
    train = shell_command("train", recipe, *options_of(trained))
    fitting = [other for other in plan.rows if other.budget_prompts]
    wanted = {fitting[0].num_rollouts, plan.rows[plan.recipe].num_rollouts, row.num_rollouts, _LARGE_N}
    arms = [(arm.num_rollouts, arm.budget_prompts) for arm in fitting if arm.num_rollouts in wanted]
    if len(arms) < 2:
        return train, None
    compared |= {name: value for name, value in settings.items() if name not in _NOT_COMPARED}
    rollouts, prompts = (",".join(map(str, numbers)) for numbers in zip(*arms, strict=True))
    sweep = ["--sweep", f"rollouts_per_prompt={rollouts}", "--sweep", f"prompts_per_step={prompts}"]
    budget = plain(_COMPARED_STEPS * plan.budget).replace(",", "")
    return train, shell_command("compare", recipe, *options_of(compared), *sweep, "--budget", budget)
