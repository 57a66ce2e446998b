"""The answer of a comparison in sentences.

The answer begins with what is shown: an arm that won, or "No difference shown". Nothing is called matched or shown
that is not. Of two arms, the second is measured against the first; of more, the best arm at each budget is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from brorl.comparison.arms import Arm, Comparison
from brorl.comparison.equal import EqualCost
from brorl.comparison.matching import TOLERANCE, Spread
from brorl.comparison.paired import PairedDifference
from brorl.comparison.results import (
    ComparisonResults,
    Pair,
    difference_words,
    higher_or_lower,
    interval_words,
    with_names,
)
from brorl.comparison.sweep_text import (
    against_first,
    grouped,
    leading_ranges,
    left_out_words,
    saturation,
    seeds_of_sweep,
    sweep_answer,
)
from brorl.cost import UNIT_WORDS, UNITS, Unit, amount
from brorl.format import listed, p_value, plain, short, short_time, signed

_ROLLOUTS = "rollouts_per_prompt"
_EXPECTED = {_ROLLOUTS, "prompts_per_step"}  # settings that a comparison of N changes
_SLOW = 0.7  # a run with fewer steps than this fraction of its siblings' in the same seconds was disturbed
_FEWEST_SIBLINGS = 3  # runs of an arm whose median is meaningful


@dataclass(frozen=True)
class ComparisonText:
    """A comparison in sentences."""

    answer: tuple[str, ...]  # the sentences that answer the question, the answer first
    remarks: tuple[str, ...]  # the basis and the limits of the answer


def text_of(results: ComparisonResults) -> ComparisonText:
    """Return a comparison in sentences."""
    pair, comparison = results.pair, results.comparison
    if pair is not None:
        measured = [*_coverage(results, pair), *_equal_score(results), *_changed_at_equal_budget(results, pair)]
        first = [_gained_and_lost(results), *match_words(results), *_other_units(results), *_equal_cost(results)]
        certainty = _certainty(pair, results.names[1])
    else:
        ranges = [leading_ranges(frontier, results) for frontier in results.frontiers]
        measured = [*ranges, *against_first(results), *_equal_score(results)]
        first = [*saturation(results), *match_words(results), *left_out_words(results)]
        certainty = [seeds_of_sweep(results)]
    remarks = (
        *first, *_phases(results), *(f"{run.words}." for run in results.matches if run.ended_early is not None),
        *unverified_words(comparison), *certainty, _seeds_needed(results), *_trends(results),
        *_differing_settings(comparison.arms), *(f"{note[0].upper()}{note[1:]}." for note in comparison.notes),
        _limits(comparison),
    )  # fmt: skip
    key = [f"{'; '.join(f'{letter} is {name}' for letter, name in results.key.items())}."] if results.key else []
    return ComparisonText((answer_of(results), *key, *measured), remarks)


def answer_of(results: ComparisonResults) -> str:
    """Return the answer in one sentence: of two arms whether the second won, of more which is best at the budget."""
    return sweep_answer(results) if results.pair is None else _pair_answer(results, results.pair)


def _pair_answer(results: ComparisonResults, pair: Pair) -> str:
    difference, (a, b) = pair.differences[1], results.names
    at_a, at_b = (f"{results.arms[name][-1].pass_at[1].value:.3f}" for name in (a, b))
    matched, shown = not results.unmatched, "No difference shown"
    if difference.conclusion != "no difference shown":
        shown = f"{b if difference.conclusion == 'B leads' else a} {'won' if matched else 'scored higher'}"
        if matched and min(difference.num_seeds) == 1:
            shown += " with this one seed" if max(difference.num_seeds) == 1 else " with these seeds"
    where = f"{amount(results.budget, results.comparison.unit)} of training {'each' if matched else 'or more'}"
    but = "" if matched else ", but the runs are not matched"
    return (
        f"{shown}{but}: at {where}, {b} is {higher_or_lower(difference.difference)} in pass@1 ({at_b} against {at_a} "
        f"of {a}){interval_words(difference.difference)}, {_seeds(difference)}."
    )


def match_words(results: ComparisonResults) -> list[str]:
    """Return the unit in which the arms are matched, or the arms that are not, with the fix."""
    unit, budget = results.comparison.unit, results.budget
    at_budget = [(name, points[-1]) for name, points in results.arms.items()]
    unmatched = [(name, at.costs[unit].most) for name, at in at_budget if not at.matched]
    if not unmatched:
        return [
            f"Compute-matched in {UNIT_WORDS[unit]}: no run spent over {TOLERANCE:.0%} more than "
            f"{amount(budget, unit)}; evaluations are not counted.",
            *_slow_runs(results),
        ]
    return [
        *_slow_runs(results),
        *(
            f"NOT compute-matched: {name} spent up to {amount(spent, unit)}, {spent / budget - 1:.0%} more than "
            f"{amount(budget, unit)} (at most {TOLERANCE:.0%} is allowed), because its last step was long; raise the "
            "budget, or lower its prompts_per_step."
            for name, spent in unmatched
        ),
    ]


def _slow_runs(results: ComparisonResults) -> list[str]:
    """Name runs that made far fewer steps in the same seconds than their siblings: the machine had other work."""
    if results.comparison.unit != "seconds":
        return []
    lines = []
    for arm in results.comparison.arms:
        runs = [run for run in results.matches if run.arm == arm.name and run.ended_early is None]
        usual = median(run.spent.steps for run in runs) if len(runs) >= _FEWEST_SIBLINGS else 0
        path_of = {run.seed: run.path for run in arm.runs}
        lines += [
            f"Seed {run.seed} of {arm.name} made {run.spent.steps:,} steps in its time; {usual:,.0f} are usual for "
            f"{arm.name}. The machine was probably busy with other work, so its scores are too low. To repeat "
            f"it, delete {path_of[run.seed]} and rerun the command."
            for run in runs
            if run.spent.steps < _SLOW * usual
        ]
    return lines


def _other_units(results: ComparisonResults) -> list[str]:
    """Compare the costs of the arms in the units that the budget does not count."""
    a, b = results.names
    equal, unequal = [], []
    for unit in UNITS:
        of_a, of_b = (results.arms[name][-1].costs[unit].mean for name in (a, b))
        if unit == results.comparison.unit or not (of_a and of_b):  # an arm without a mixed group makes no step
            continue
        ratio = of_b / of_a
        text = f"{UNIT_WORDS[unit]} ({_in_short(of_b, unit)} against {_in_short(of_a, unit)})"
        if 1 - TOLERANCE <= ratio <= 1 + TOLERANCE:
            equal.append(text)
        else:
            unequal.append(f"{plain(ratio)} times the {text}")
    return [
        *([f"Not equal in other units: {b} took {listed(unequal)} of {a}."] if unequal else []),
        *([f"Equal within {TOLERANCE:.0%} also in {listed(equal)}."] if equal else []),
    ]


def _changed_at_equal_budget(results: ComparisonResults, pair: Pair) -> list[str]:
    """Return a sentence if the conclusion is another one where all runs had spent exactly the same of the budget."""
    unit = results.comparison.unit
    equal = next((e for e in results.equal if e.unit == unit), None)
    if equal is None or equal.difference is None or equal.difference.conclusion == pair.differences[1].conclusion:
        return []
    spent = [f"{name} {_in_short(points[-1].costs[unit].mean, unit)}" for name, points in results.arms.items()]
    return [
        "The conclusion changes where all runs had spent exactly the same: at "
        f"{_at_equal_cost(results, equal, equal.difference)}, on straight lines between evaluations. At their ends "
        f"they had spent {listed(spent)}, because a run ends with the step that reaches the budget."
    ]


def _equal_cost(results: ComparisonResults) -> list[str]:
    """Return which arm leads where all runs had spent the same of another unit."""
    units = [equal for equal in results.equal if equal.unit != results.comparison.unit]
    leads = [f"at {_at_equal_cost(results, e, e.difference)}" for e in units if e.difference]
    start = "pass@1 at equal cost in other units, on straight lines between evaluations"
    return [f"{start}: {'; '.join(leads)}."] if leads else []


def _at_equal_cost(results: ComparisonResults, equal: EqualCost, difference: PairedDifference) -> str:
    words = difference_words(difference.conclusion, difference.difference, results.names, "pass@1")
    return f"{amount(equal.amount, equal.unit)} each, {words}"


def _coverage(results: ComparisonResults, pair: Pair) -> list[str]:
    """Compare the coverage: pass@k of the largest k."""
    (a, b), k = results.names, results.ks[-1]
    if k == 1:
        return []
    difference = pair.differences[k]
    at_a, at_b = (results.arms[name][-1].pass_at[k].value for name in (a, b))
    return [
        f"In coverage, {difference_words(difference.conclusion, difference.difference, (a, b), f'pass@{k}')}; {b} has "
        f"{at_b:.3f}, {a} {at_a:.3f}, and the start {results.start[k].value:.3f}."
    ]


def _equal_score(results: ComparisonResults) -> list[str]:
    """Compare the coverage of the arms where their pass@1 was the same: a slow arm has much because it is slow."""
    equal, unit = results.equal_score, results.comparison.unit
    if equal is None:
        return []
    first, *others = equal.arms
    passed = [arm.arm for arm in equal.arms if arm.coverage is None]
    if first.coverage is None or len(passed) == len(others):
        return [
            f"pass@{equal.k} at equal pass@1 is not compared: {listed(passed)} had passed {equal.level:.3f} before the "
            "first evaluation; a larger --marks adds earlier evaluation points."
        ]
    reached = listed([f"{arm.arm} after {_in_short(arm.spent, unit)}" for arm in equal.arms if arm.spent is not None])
    where = f"Where pass@1 first was {equal.level:.3f} ({reached}), pass@{equal.k} was {first.coverage.value:.3f} with"
    differences = []
    for arm in others:
        if arm.coverage is None or arm.difference is None or arm.conclusion is None or arm.corrected is None:
            continue
        if len(others) == 1:
            words = difference_words(arm.conclusion, arm.difference, (first.arm, arm.arm), f"pass@{equal.k}")
            return [f"{where} {first.arm} and {arm.coverage.value:.3f} with {arm.arm}; {words}."]
        text = f"{arm.arm} {arm.coverage.value:.3f} ({signed(arm.difference)})"
        differences.append((text, arm.conclusion, arm.corrected))
    return [f"{where} {first.arm}; {'; '.join(grouped(differences))}."]


def _gained_and_lost(results: ComparisonResults) -> str:
    """Return the numbers of prompts that each arm gained and lost since the start."""

    def count(values: Spread) -> str:
        return f"{values.mean:.1f}".removesuffix(".0")

    changes = [
        f"{c.arm} gained {count(c.gained)} and lost {count(c.lost)} (luck alone: {count(c.by_chance)} each way)"
        for c in results.coverage
    ]
    comparison = results.comparison
    return (
        f"Prompts gained and lost since the start, of {len(comparison.prompts)} (solved: at least one of "
        f"{comparison.num_samples} responses is correct): {'; '.join(changes)}."
    )


def _phases(results: ComparisonResults) -> list[str]:
    """Return a sentence on each arm whose objective has phases."""
    unit = results.comparison.unit
    return [
        f"In {arm.name}, {title} began after {amount(begin, unit)} on average (diamonds in the figure)."
        for arm in results.comparison.arms
        for title, begin in arm.phase_begins(unit).items()
    ]


def unverified_words(comparison: Comparison) -> list[str]:
    """Return the number of held-out prompts that are left out because responses could not be verified, if any."""
    if not comparison.num_left_out:
        return []
    number = len(comparison.prompts) + comparison.num_left_out
    return [
        f"{comparison.num_left_out} of {number} held-out prompts are left out: in an evaluation of a run, responses to "
        "them could not be verified because of an infrastructure failure."
    ]


def _certainty(pair: Pair, b: str) -> list[str]:
    """Return the number of seeds, the variation that the interval covers, and the test that disagrees, if any."""
    difference, ahead = pair.differences[1], pair.seeds_ahead
    covers = {
        "prompts and seeds": "other prompts and other seeds",
        "prompts": "other prompts, not for other seeds",
        "seeds": "other seeds, not for other prompts",
        "nothing": "neither other prompts nor other seeds",
    }[difference.covers]
    lines = [f"{_seeds(difference).capitalize()} an arm: the interval (95%) allows for {covers}."]
    if min(difference.num_seeds) == 1:
        lines.append("With one seed, only these trained models are compared; another seed may reverse the order.")
    elif ahead is not None:
        lines.append(f"{b} was ahead in {ahead} of {difference.num_seeds[0]} seeds.")
    test = difference.prompt_test
    if test is not None and difference.conclusion == "no difference shown" and test.p_two_sided < 0.05:
        lines.append(
            f"The t-test over prompts alone would show a difference (two-tailed p = {p_value(test.p_two_sided)}), but "
            "it does not allow for other seeds."
        )
    return lines


def _seeds_needed(results: ComparisonResults) -> str:
    """Return the seeds that a difference of 0.02 in pass@1 takes: of several later arms, those of the largest need."""
    known = {arm: needed for arm, needed in results.seeds_needed.items() if needed is not None}
    if not known:
        return "The seeds that a small difference takes are unknown: that needs 2 seeds of each arm and 2 prompts."
    arm, needed = max(known.items(), key=lambda item: (item[1].prompts, item[1].seeds))
    several = len(results.names) > 2
    start = f"To show a difference of {needed.half_width:g} in pass@1{f' from {results.names[0]}' if several else ''}"
    note = f" ({arm} needs the most; without correction for several intervals)" if several else ""
    if needed.enough_prompts:
        return f"{start} with these {needed.prompts:,} prompts: {needed.seeds:,} seeds an arm{note}."
    number = len(results.comparison.prompts)
    return (
        f"{start}: {needed.prompts:,} prompts and {needed.seeds:,} seeds an arm{note}. These {number:,} prompts are "
        "too few: the prompts alone take most of that width, or more, with any number of seeds."
    )


def _trends(results: ComparisonResults) -> list[str]:
    """Count the tasks of each trend."""
    if results.pair is None or not results.tasks:
        return []
    trends = results.pair.trends
    kinds = Counter(trend.kind for trend in trends)
    counts = [f"{with_names(kind, *results.names)} on {number}" for kind, number in kinds.most_common()]
    return [f"By task, {len(trends)} in all: {'; '.join(counts)}."]


def _differing_settings(arms: Sequence[Arm]) -> list[str]:
    """Warn that several settings differ, unless only N and the prompts per step do."""
    names = sorted({name for arm in arms for name in arm.differs})
    others = [name for name in names if name not in _EXPECTED]
    if not others or len(names) == 1:
        return []
    differing = f"{listed(others)} too" if _ROLLOUTS in names else listed(names)
    return [f"The arms differ in {differing}: the result is due to all of these together."]


def _limits(comparison: Comparison) -> str:
    """Return the limits of the result."""
    machine = f", and for this machine ({comparison.machine})" if comparison.unit == "seconds" else ""
    return (
        f"This holds for this checkpoint ({comparison.checkpoint}), this data and this budget{machine}: a longer run "
        "may rank the arms differently."
    )


def _seeds(difference: PairedDifference) -> str:
    of_a, of_b = difference.num_seeds
    if of_a != of_b:
        return f"{of_b} and {of_a} seeds"
    return "1 seed" if of_a == 1 else f"{of_a} seeds"


def _in_short(value: float, unit: Unit) -> str:
    return short_time(value) if unit == "seconds" else short(value)
