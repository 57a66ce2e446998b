"""The answer of a comparison of two arms in sentences, and the sentences that a sweep shares with it.

In: the results of a comparison. Out: sentences. They state "did not win" if B did not, "no difference was shown" if
nothing was, and call nothing matched that is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from brorl.comparison.arms import Arm, Comparison
from brorl.comparison.corrected_interval import CorrectedInterval
from brorl.comparison.equal_cost import EqualCost
from brorl.comparison.matching import TOLERANCE, Spread
from brorl.comparison.paired import Conclusion, PairedDifference
from brorl.comparison.results import ComparisonResults, Pair, with_names
from brorl.cost import UNIT_WORDS, UNITS, Unit, amount
from brorl.format import listed, p_value, plain, short, short_time, signed

_ROLLOUTS = "rollouts_per_prompt"
_EXPECTED = {_ROLLOUTS, "adaptive.enabled", "prompts_per_step"}  # settings that a comparison of N changes
_SLOW = 0.7  # a run with fewer steps than this fraction of its siblings' in the same seconds was disturbed
_FEWEST_SIBLINGS = 3  # runs of an arm whose median is meaningful
_GROUPS: dict[Conclusion, str] = {"B leads": "higher", "A leads": "lower", "no difference shown": "no difference shown"}
_UNCORRECTED = " only without correction"


@dataclass(frozen=True)
class ComparisonText:
    """A comparison in sentences.

    Attributes:
        answer: The sentences that answer the question, the answer first.
        remarks: The basis and the limits of the answer.
    """

    answer: tuple[str, ...]
    remarks: tuple[str, ...]


def pair_text(results: ComparisonResults) -> ComparisonText:
    """Return a comparison of two arms in sentences."""
    assert results.pair is not None
    return ComparisonText(
        (
            pair_answer(results),
            *key_words(results),
            *_coverage(results, results.pair),
            *equal_score_words(results),
            *_changed_at_equal_budget(results, results.pair),
        ),
        (
            _gained_and_lost(results),
            *match_words(results),
            *_other_units(results),
            *_equal_cost(results),
            *phase_words(results),
            *ending_words(results),
            *unverified_words(results.comparison),
            *_certainty(results.pair, results.names[1]),
            seeds_needed_words(results),
            *_trends(results, results.pair),
            *differing_settings(results.comparison.arms),
            limit_words(results),
        ),
    )


def pair_answer(results: ComparisonResults) -> str:
    """Return the answer in one sentence."""
    assert results.pair is not None
    difference = results.pair.differences[1]
    a, b = results.names
    at_a, at_b = (results.arms[name][-1].pass_at[1].value for name in (a, b))
    evidence = f"difference {signed(difference.difference)}, {_seeds(difference)}"
    scored = f"{b} scored pass@1 {at_b:.3f} and {a} {at_a:.3f}"
    budget = amount(results.budget, results.comparison.unit)
    if results.unmatched:
        conclusion = {
            "A leads": f"{b} did not win",
            "B leads": f"{b} scored higher",
            "no difference shown": "no difference was shown",
        }[difference.conclusion]
        return f"At {budget} of training or more, {scored}: {conclusion} ({evidence}), but the runs are not matched."
    conclusion = {
        "A leads": f"{b} did not win",
        "B leads": f"{b} won",
        "no difference shown": f"{b} did not win, no difference was shown",
    }[difference.conclusion]
    if min(difference.num_seeds) == 1 and difference.conclusion == "B leads":
        conclusion += " with this one seed" if max(difference.num_seeds) == 1 else " with these seeds"
    return f"At {budget} of training each, {scored}: {conclusion} ({evidence})."


def key_words(results: ComparisonResults) -> list[str]:
    """Return the meaning of the letters."""
    return [f"{'; '.join(f'{letter} is {name}' for letter, name in results.key.items())}."] if results.key else []


def match_words(results: ComparisonResults) -> list[str]:
    """Return the unit in which the arms are matched, or the arms that are not, with the fix."""
    unit, budget = results.comparison.unit, results.budget
    at_budget = [(name, points[-1]) for name, points in results.arms.items()]
    unmatched = [(name, at.costs.of(unit).most) for name, at in at_budget if not at.matched]
    if not unmatched:
        return [
            f"Compute-matched in {UNIT_WORDS[unit]}: no run spent over {TOLERANCE:.0%} more than "
            f"{amount(budget, unit)}; evaluations are not counted.",
            *_slow_runs(results),
        ]
    return [
        *_slow_runs(results),
        *(
            f"NOT compute-matched: {name} spent up to {amount(most, unit)}, {most / budget - 1:.0%} more than "
            f"{amount(budget, unit)} (at most {TOLERANCE:.0%} is allowed), because its last step was long; raise the "
            "budget, or lower its prompts_per_step."
            for name, most in unmatched
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
            f"{arm.name}. The machine was busy with something else, so the scores of this run are too low. To repeat "
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
        of_a, of_b = (results.arms[name][-1].costs.of(unit).mean for name in (a, b))
        if unit == results.comparison.unit or of_a == of_b == 0:
            continue
        ratio = of_b / of_a if of_a else float("inf")
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
    """Return a sentence if the conclusion is another one where all runs had spent exactly the same of the budget.

    A run ends with the step that reaches the budget: the longer its steps, the more it has spent by then.
    """
    unit = results.comparison.unit
    equal = next((e for e in results.equal if e.unit == unit), None)
    if equal is None or equal.difference is None or equal.difference.conclusion == pair.differences[1].conclusion:
        return []
    spent = [f"{name} {_in_short(points[-1].costs.of(unit).mean, unit)}" for name, points in results.arms.items()]
    return [
        "The conclusion changes where all runs had spent exactly the same: at "
        f"{_at_equal_cost(results, equal, equal.difference)}, on straight lines between evaluations. At their ends "
        f"they had spent {listed(spent)}, because a run ends with the step that reaches the budget."
    ]


def _at_equal_cost(results: ComparisonResults, equal: EqualCost, difference: PairedDifference) -> str:
    conclusion = with_names(difference.conclusion, *results.names)
    return f"{amount(equal.amount, equal.unit)} each {conclusion} ({signed(difference.difference)})"


def _equal_cost(results: ComparisonResults) -> list[str]:
    """Return which arm leads where all runs had spent the same of another unit."""
    leads = [
        f"at {_at_equal_cost(results, equal, equal.difference)}"
        for equal in results.equal
        if equal.unit != results.comparison.unit and equal.difference
    ]
    start = "pass@1 at equal cost in other units, on straight lines between evaluations"
    return [f"{start}: {'; '.join(leads)}."] if leads else []


def _coverage(results: ComparisonResults, pair: Pair) -> list[str]:
    """Compare the coverage: pass@k of the largest k."""
    (a, b), k = results.names, results.ks[-1]
    if k == 1:
        return []
    difference = pair.differences[k]
    at_a, at_b = (results.arms[name][-1].pass_at[k].value for name in (a, b))
    return [
        f"Coverage: pass@{k} is {at_b:.3f} with {b} and {at_a:.3f} with {a}, {results.start[k].value:.3f} at the "
        f"start: {with_names(difference.conclusion, a, b)} (difference {signed(difference.difference)})."
    ]


def equal_score_words(results: ComparisonResults) -> list[str]:
    """Compare the coverage of the arms where their pass@1 was the same: a slow arm has much because it is slow."""
    equal, unit = results.equal_score, results.comparison.unit
    if equal is None:
        return []
    first, *others = equal.arms
    passed = [one.arm for one in equal.arms if one.coverage is None]
    if first.coverage is None or len(passed) == len(others):
        return [
            f"pass@{equal.k} at equal pass@1 is not compared: {listed(passed)} had passed {equal.level:.3f} before the "
            "first evaluation; a larger --marks adds earlier evaluation points."
        ]
    reached = listed([f"{one.arm} after {_in_short(one.spent, unit)}" for one in equal.arms if one.spent is not None])
    where = f"Where pass@1 first was {equal.level:.3f} ({reached}), pass@{equal.k} was {first.coverage.value:.3f} with"
    differences = []
    for one in others:
        if one.coverage is None or one.difference is None or one.conclusion is None or one.corrected is None:
            continue
        if len(others) == 1:
            return [
                f"{where} {first.arm} and {one.coverage.value:.3f} with {one.arm}: "
                f"{with_names(one.conclusion, first.arm, one.arm)} (difference {signed(one.difference)})."
            ]
        text = f"{one.arm} {one.coverage.value:.3f} ({signed(one.difference)})"
        differences.append((text, one.conclusion, one.corrected))
    return [f"{where} {first.arm}; {'; '.join(grouped(differences))}."]


def grouped(differences: Sequence[tuple[str, Conclusion, CorrectedInterval]]) -> list[str]:
    """Return a phrase for each conclusion that some arms share, after correction: higher: N=64, N=512.

    Args:
        differences: For each later arm its text, the conclusion from its own interval, and its corrected interval; the
            first arm is A.

    Returns:
        The phrases, with the correction last if it could have changed a conclusion.
    """
    groups: dict[str, list[str]] = {
        name: [] for name in ("higher", "lower", f"higher{_UNCORRECTED}", f"lower{_UNCORRECTED}", "no difference shown")
    }
    for text, own, corrected in differences:
        groups[_GROUPS[own] + (_UNCORRECTED if own != corrected.conclusion else "")].append(text)
    phrases = [f"{name}: {', '.join(texts)}" for name, texts in groups.items() if texts]
    number = max((corrected.num_intervals for *_, corrected in differences), default=1)
    if number > 1 and any(own != "no difference shown" for _, own, _ in differences):
        phrases.append(f"corrected for the {number} intervals of the table")
    return phrases


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


def phase_words(results: ComparisonResults) -> list[str]:
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
        "them could not be verified because of the machine."
    ]


def ending_words(results: ComparisonResults) -> list[str]:
    """Name the runs that ended before their budget was spent."""
    return [f"{run.words}." for run in results.matches if run.ended_early is not None]


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


def seeds_needed_words(results: ComparisonResults) -> str:
    """Return the seeds that a difference of 0.02 in pass@1 takes: of several later arms, those of the largest need."""
    known = {arm: needed for arm, needed in results.seeds_needed.items() if needed is not None}
    if not known:
        return "The seeds that a small difference takes are unknown: that needs 2 seeds of each arm and 2 prompts."
    arm, most = max(known.items(), key=lambda item: (item[1].prompts, item[1].seeds))
    several = len(results.names) > 2
    start = f"To show a difference of {most.half_width:g} in pass@1{f' from {results.names[0]}' if several else ''}"
    note = f" ({arm} needs the most; without correction for several intervals)" if several else ""
    if most.enough_prompts:
        return f"{start} with these {most.prompts:,} prompts: {most.seeds:,} seeds an arm{note}."
    number = len(results.comparison.prompts)
    return (
        f"{start}: {most.prompts:,} prompts and {most.seeds:,} seeds an arm{note}. These {number:,} prompts are too "
        "few: the prompts alone take most of that width, or more, with any number of seeds."
    )


def _trends(results: ComparisonResults, pair: Pair) -> list[str]:
    """Count the tasks of each trend."""
    if not results.tasks:
        return []
    kinds = Counter(trend.kind for trend in pair.trends)
    counts = [f"{with_names(kind, *results.names)} on {number}" for kind, number in kinds.most_common()]
    return [f"By task, {len(pair.trends)} in all: {'; '.join(counts)}."]


def differing_settings(arms: Sequence[Arm]) -> list[str]:
    """Name the settings that differ if the result is not due to one of them, or to N with its prompts per step."""
    names = sorted({name for arm in arms for name in arm.differs})
    others = [name for name in names if name not in _EXPECTED]
    if not others or len(names) == 1:
        return []
    differing = f"{listed(others)} too" if _ROLLOUTS in names else listed(names)
    return [f"The arms differ in {differing}: the result is due to all of these together."]


def limit_words(results: ComparisonResults) -> str:
    """Return the limits of the result."""
    comparison = results.comparison
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
