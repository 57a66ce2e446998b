"""The findings of a comparison, each a template with its numbers. Only what is matched or shown is called so.

`answer_of` and `caveats_of` decide which findings hold; `str` of a finding is its sentence. With two arms, the second
is measured against the first. With more, the answer names the best arm at the budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from brorl.comparison.results import TOLERANCE, ComparisonResults, with_names
from brorl.comparison.scores import Comparison, score_at
from brorl.cost import UNIT_WORDS, amount, short_amount
from brorl.evaluation.paired import PairedDifference
from brorl.format import Estimate, interval, listed, p_value, signed

_PAIR = "pass@1 is {score_b:.3f} with {b} and {score_a:.3f} with {a}, a difference of {difference}, {seeds}."
_BEST = "{arm} scored the highest pass@1, {score}, a lead over {second} of {lead}, {seeds}."

# The answer for two arms
WON = "{winner} won: at {budget} of training each, " + _PAIR
WON_WITH_ONE_SEED = "{winner} won with {seeds}: at {budget} of training each, " + _PAIR
SCORED_HIGHER = "{winner} scored higher, but the runs are not matched: at {budget} of training or more, " + _PAIR
NO_DIFFERENCE = "No difference shown: at {budget} of training each, " + _PAIR
NO_DIFFERENCE_UNMATCHED = "No difference shown, and the runs are not matched: at {budget} of training or more, " + _PAIR
# The answer for more arms
BEST_WON = "{arm} won: at {budget} of training each{left_out}, " + _BEST
BEST_WON_WITH_ONE_SEED = "{arm} won with {seeds}: at {budget} of training each{left_out}, " + _BEST
NO_WINNER = "No winner shown: at {budget} of training each{left_out}, " + _BEST
TIED = "At {budget} of training each{left_out}, {arm} and {second} scored the same pass@1, {score}."
ONE_ARM_LEFT = "At {budget} of training nothing can be compared: only {arm} stayed within it."
NO_ARM_LEFT = "At {budget} of training nothing can be compared: every arm overshot it."
LETTERS = "{key}."  # explains the letters that stand for long names
# The basis
MATCHED = (
    "Compute-matched in {unit}: no run spent over {tolerance:.0%} more than {budget}; evaluations are not counted."
)
NOT_MATCHED = (
    "NOT compute-matched: {arm} spent up to {spent}, {excess:.0%} more than {budget} (at most {tolerance:.0%} is "
    "allowed), because its last step was long; raise the budget, or lower its prompts_per_step."
)
# The caveats
SLOW_RUN = (
    "Seed {seed} of {arm} made {steps:,} steps in its time; {usual:,.0f} are usual for {arm}. The machine was probably "
    "busy with other work, so its scores are too low. To repeat it, delete {path} and rerun the command."
)
ENDED_EARLY = (
    "{arm}, seed {seed}, ended early at {spent} of {budget} ({reason}); its last score is used, because it could "
    "not spend more."
)
CHANGES_AT_EQUAL_COST = (
    "The conclusion changes when all runs have spent exactly the same: at {amount} each, {conclusion}. pass@1 of {b} "
    "minus {a} is {difference}, interpolated linearly between evaluations. By their ends the runs had spent {spent}, "
    "because a run ends with the step that reaches the budget."
)
LEFT_OUT = (
    "{left_out} of {number} held-out prompts are excluded: in some run's evaluation, responses to them could not be "
    "verified because of an infrastructure failure."
)
SEVERAL_SETTINGS = "The arms differ in {settings}: the result is due to all of these together."
MORE_SETTINGS = "The arms also differ in {settings}: the result is due to all of these together."
NOTE = "{note}."
COVERS = "{seeds} per arm: the 95% intervals allow for {covers}."
ONE_SEED = "With one seed, only these trained models are compared; a different seed may reverse the order."
SEEDS_AHEAD = "{b} was ahead in {ahead} of {number} seeds."
T_TEST_DISAGREES = (
    "The t-test over prompts alone would show a difference (two-tailed p = {p}), but it does not allow for other seeds."
)
SEEDS_UNKNOWN = "The seeds that a small difference needs are unknown: the estimate needs 2 seeds per arm and 2 prompts."
SEEDS_NEEDED = (
    "To show a difference of {half_width:g} in pass@1{pair}, these {prompts:,} prompts need {seeds:,} seeds per arm."
)
PROMPTS_NEEDED = (
    "To show a difference of {half_width:g} in pass@1{pair}, a comparison needs {needed:,} prompts and {seeds:,} "
    "seeds per arm. These {prompts:,} prompts are too few: with any number of seeds, the prompts alone take up most of "
    "that width, or more."
)
SCOPE = (
    "This holds for this checkpoint ({checkpoint}), this data and this budget{machine}: a longer run may rank the arms "
    "differently."
)

_ROLLOUTS = "rollouts_per_prompt"
_EXPECTED = {_ROLLOUTS, "prompts_per_step"}  # settings that a comparison of N changes
_SLOW = 0.7  # a run with fewer steps than this fraction of its siblings' was slowed down
_MIN_SIBLINGS = 3  # with fewer runs of an arm, the median means little
_COVERS = {
    "prompts and seeds": "other prompts and other seeds",
    "prompts": "other prompts, not for other seeds",
    "seeds": "other seeds, not for other prompts",
    "nothing": "neither other prompts nor other seeds",
}


@dataclass(frozen=True)
class Finding:
    """A statement as data."""

    template: str  # its sentence, with a placeholder for each value
    values: Mapping[str, Any]  # names, numbers, and estimated differences

    def __str__(self) -> str:
        shown = {name: signed(v) if isinstance(v, Estimate) else v for name, v in self.values.items()}
        return self.template.format(**shown)


def finding(template: str, **values: Any) -> Finding:
    """Return a finding with the values for its template."""
    return Finding(template, values)


def answer_of(results: ComparisonResults) -> list[Finding]:
    """Return whether the second of two arms won, or which of several is best; add the key to the letters, if any."""
    key = "; ".join(f"{letter} is {name}" for letter, name in results.key.items())
    first = _best_arm(results) if results.pair is None else _pair(results, results.pair[1])
    return [first, *([finding(LETTERS, key=key)] if key else [])]


def caveats_of(results: ComparisonResults) -> list[list[Finding]]:
    """Return all limits of the answer by topic, most serious first: flaws in the comparison, then its uncertainty."""
    topics = [
        [] if results.matched else match_of(results),
        _slow_runs(results),
        _early_ends(results),
        _change_at_equal_cost(results),
        unverified_prompts(results.comparison),
        _settings(results.comparison),
        (finding(NOTE, note=f"{note[0].upper()}{note[1:]}") for note in results.comparison.notes),
        _certainty(results),
        [_seeds_needed(results)],
        [_scope(results.comparison)],
    ]
    return [findings for findings in map(list, topics) if findings]


def sentences(topics: list[list[Finding]]) -> list[str]:
    """Join the sentences of each topic into one string."""
    return [" ".join(map(str, findings)) for findings in topics]


def match_of(results: ComparisonResults) -> list[Finding]:
    """Return the unit in which the arms are matched, or else the unmatched arms and the fix."""
    unit, budget = results.comparison.unit, results.budget
    same = {"tolerance": TOLERANCE, "budget": amount(budget, unit)}
    over = {
        name: points[-1].costs[unit].most for name, points in results.at_eval_points.items() if not points[-1].matched
    }
    if not over:
        return [finding(MATCHED, unit=UNIT_WORDS[unit], **same)]
    return [
        finding(NOT_MATCHED, arm=name, spent=amount(spent, unit), excess=spent / budget - 1, **same)
        for name, spent in over.items()
    ]


def _pair(results: ComparisonResults, difference: PairedDifference) -> Finding:
    a, b = results.names
    score_a, score_b = (results.scores.pass_at[name][1].value for name in (a, b))
    shown = difference.conclusion != "no difference shown"
    match results.matched, shown:
        case True, True:
            template = WON_WITH_ONE_SEED if min(difference.num_seeds) == 1 else WON
        case True, False:
            template = NO_DIFFERENCE
        case False, True:
            template = SCORED_HIGHER
        case _:
            template = NO_DIFFERENCE_UNMATCHED
    return finding(
        template, a=a, b=b, score_a=score_a, score_b=score_b, difference=difference.difference,
        winner=b if difference.conclusion == "B leads" else a, seeds=results.seeds_text,
        budget=amount(results.budget, results.comparison.unit),
    )  # fmt: skip


def _best_arm(results: ComparisonResults) -> Finding:
    budget = amount(results.budget, results.comparison.unit)
    over = [name for name, points in results.at_eval_points.items() if not points[-1].matched]
    best = next((best for best in results.best[1] if best.eval_point == results.budget), None)
    if best is None:
        kept = [name for name in results.names if name not in over]
        return finding(ONE_ARM_LEFT, budget=budget, arm=kept[0]) if kept else finding(NO_ARM_LEFT, budget=budget)
    if best.is_tied:
        template = TIED
    elif not best.lead_shown:
        template = NO_WINNER
    else:
        template = BEST_WON_WITH_ONE_SEED if results.fewest_seeds == 1 else BEST_WON
    return finding(
        template, budget=budget, left_out=f" (without {listed(over)}, which overshot it)" if over else "", arm=best.arm,
        second=best.second, score=interval(results.scores.pass_at[best.arm][1]), lead=best.lead,
        seeds=results.seeds_text,
    )  # fmt: skip


def _slow_runs(results: ComparisonResults) -> Iterator[Finding]:
    """Yield runs that completed far fewer steps than their siblings in the same time because the machine was busy."""
    comparison = results.comparison
    for arm in comparison.arms if comparison.unit == "seconds" else ():
        runs = [run for run in arm.runs if run.end_reason is None]
        steps = [score_at(run, "seconds", results.budget).cost.steps for run in runs]
        usual = median(steps) if len(steps) >= _MIN_SIBLINGS else 0
        for run, made in zip(runs, steps, strict=True):
            if made < _SLOW * usual:
                yield finding(SLOW_RUN, seed=run.seed, arm=arm.name, steps=made, usual=usual, path=run.path)


def _early_ends(results: ComparisonResults) -> Iterator[Finding]:
    unit = results.comparison.unit
    for arm in results.comparison.arms:
        for run in arm.runs:
            if (spent := run.scores[-1].cost.of(unit)) < results.budget:
                budget = amount(results.budget, unit)
                ended = {"spent": amount(spent, unit), "budget": budget, "reason": run.end_reason}
                yield finding(ENDED_EARLY, arm=arm.name, seed=run.seed, **ended)


def _change_at_equal_cost(results: ComparisonResults) -> Iterator[Finding]:
    """Yield a finding if the conclusion would differ had all runs spent exactly the same amount."""
    unit = results.comparison.unit
    equal = next((equal for equal in results.at_equal_cost if equal.unit == unit), None)
    if results.pair is None or equal is None or (there := equal.differences[1]) is None:
        return
    if there.conclusion != results.pair[1].conclusion:
        a, b = results.names
        ends = {name: points[-1].costs[unit].mean for name, points in results.at_eval_points.items()}
        spent = listed([f"{short_amount(cost, unit)} with {name}" for name, cost in ends.items()])
        conclusion = with_names(there.conclusion, a, b)
        at = {"amount": amount(equal.amount, unit), "conclusion": conclusion, "difference": there.difference}
        yield finding(CHANGES_AT_EQUAL_COST, a=a, b=b, spent=spent, **at)


def unverified_prompts(comparison: Comparison) -> Iterator[Finding]:
    """Yield a finding if any held-out prompts are excluded."""
    if comparison.num_left_out:
        num_prompts = len(comparison.prompts) + comparison.num_left_out
        yield finding(LEFT_OUT, left_out=comparison.num_left_out, number=num_prompts)


def _settings(comparison: Comparison) -> Iterator[Finding]:
    """Yield a finding if several settings differ, other than just N and the prompts per step."""
    names = sorted({name for arm in comparison.arms for name in arm.differs})
    unexpected = [name for name in names if name not in _EXPECTED]
    if unexpected and _ROLLOUTS in names:
        yield finding(MORE_SETTINGS, settings=listed(unexpected))
    elif unexpected and len(names) > 1:
        yield finding(SEVERAL_SETTINGS, settings=listed(names))


def _certainty(results: ComparisonResults) -> Iterator[Finding]:
    """Yield findings on the seeds, the variation covered by the intervals, and a test that disagrees."""
    pair = None if results.pair is None else results.pair[1]
    one_seed = results.fewest_seeds == 1
    covers = pair.covers if pair else "prompts" if one_seed else "prompts and seeds"
    yield finding(COVERS, seeds=results.seeds_text, covers=_COVERS[covers])
    if one_seed:
        yield finding(ONE_SEED)
    elif pair and pair.seeds_ahead is not None:
        yield finding(SEEDS_AHEAD, b=results.names[1], ahead=pair.seeds_ahead, number=pair.num_seeds[0])
    test = pair.prompt_test if pair and pair.conclusion == "no difference shown" else None
    if test is not None and test.p_two_sided < 0.05:
        yield finding(T_TEST_DISAGREES, p=p_value(test.p_two_sided))


def _seeds_needed(results: ComparisonResults) -> Finding:
    """Return the number of seeds needed to show a difference of 0.02 in pass@1, for the arm that needs the most."""
    known = {arm: needed for arm, needed in results.seeds_needed.items() if needed is not None}
    if not known:
        return finding(SEEDS_UNKNOWN)
    arm, needed = max(known.items(), key=lambda item: (item[1].prompts, item[1].seeds))
    first = results.names[0]
    several = len(results.names) > 2
    pair = f" between {first} and {arm}, which needs the most (without correction for several intervals)"
    return finding(
        SEEDS_NEEDED if needed.enough_prompts else PROMPTS_NEEDED, half_width=needed.half_width,
        arm=arm, pair=pair if several else "", prompts=len(results.comparison.prompts), needed=needed.prompts,
        seeds=needed.seeds,
    )  # fmt: skip


def _scope(comparison: Comparison) -> Finding:
    machine = f", and for this machine ({comparison.machine})" if comparison.unit == "seconds" else ""
    return finding(SCOPE, checkpoint=comparison.checkpoint, machine=machine)
