"""What two arms show, in words: whether the second won, in what the arms are matched, and how sure that is.

In: what a comparison shows. Out: sentences. They say "did not win" where B did not, "no difference was shown" where
nothing was, and call nothing matched that is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from brorl.comparison.arms import Arm
from brorl.comparison.equal_cost import EqualCost
from brorl.comparison.findings import Findings
from brorl.comparison.matching import TOLERANCE, RunMatch, Spread
from brorl.comparison.paired import PairedDifference, Verdict
from brorl.comparison.tables import kind_words
from brorl.cost import UNIT_WORDS, UNITS, Unit, amount
from brorl.format import listed, p_value, plain, short, short_time, signed

_ROLLOUTS = "rollouts_per_prompt"
_SLOW = 0.7  # a run with fewer steps than this share of its siblings' in the same seconds was disturbed
_FEWEST_SIBLINGS = 3  # runs of an arm from which "usual" means something
_EXPECTED = {_ROLLOUTS, "prompts_per_step"}  # what a comparison of N is expected to change


@dataclass(frozen=True)
class VerdictWords:
    """What a comparison shows, in sentences.

    Attributes:
        answer: Those that answer the question, the answer itself first.
        remarks: What the answer rests on and holds for.
    """

    answer: tuple[str, ...]
    remarks: tuple[str, ...]


def pair_verdict(found: Findings) -> VerdictWords:
    """Return what two arms show."""
    assert found.pair is not None
    a, b = found.comparison.arms
    return VerdictWords(
        (
            answer(found),
            *key_words(found),
            *_coverage(found),
            *equal_score_words(found),
            *_at_the_same(found),
        ),
        (
            coverage_words(found),
            *match_words(found),
            *_other_units(found),
            *_equal_cost(found),
            *ending_words(found),
            *_certainty(found.pair.differences[1], found.pair.seeds_ahead, b.name),
            *_tasks(found),
            *other_settings((a, b)),
            *limit_words(found),
        ),
    )


def answer(found: Findings) -> str:
    """Return the answer in one sentence."""
    assert found.pair is not None
    comparison, difference = found.comparison, found.pair.differences[1]
    a, b = comparison.arms
    at_a, at_b = (found.arms[arm.name][-1].pass_at[1].value for arm in (a, b))
    evidence = f"difference {signed(difference.difference)}, {_seeds(difference)}"
    scored = f"{b.name} scored pass@1 {at_b:.3f} and {a.name} {at_a:.3f}"
    budget = amount(found.budget, comparison.unit)
    if found.mismatch:
        what = {"A leads": f"{b.name} did not win", "B leads": f"{b.name} scored higher"}.get(
            difference.verdict, "no difference was shown"
        )
        return f"At {budget} of training or more, {scored}: {what} ({evidence}), but the runs did not spend the same."
    what = {"A leads": f"{b.name} did not win", "B leads": f"{b.name} won"}.get(
        difference.verdict, f"{b.name} did not win, no difference was shown"
    )
    if min(difference.num_seeds) == 1 and difference.verdict == "B leads":
        what += " with this one seed" if max(difference.num_seeds) == 1 else " with these seeds"
    return f"At {budget} of training each, {scored}: {what} ({evidence})."


def key_words(found: Findings) -> list[str]:
    """Say what the arms are that are called by letters."""
    return [f"{'; '.join(f'{letter} is {name}' for letter, name in found.key.items())}."] if found.key else []


def match_words(found: Findings) -> list[str]:
    """Say in what unit the arms are matched, or which are not and what to do."""
    unit, budget = found.comparison.unit, found.budget
    over: dict[str, list[RunMatch]] = {}
    for run in found.runs:
        if not run.matched:
            over.setdefault(run.arm, []).append(run)
    if not over:
        return [
            f"Compute-matched in {UNIT_WORDS[unit]}: no run spent over {TOLERANCE:.0%} more than "
            f"{amount(budget, unit)}; evaluations are not counted.",
            *_slow_runs(found),
        ]
    lines = _slow_runs(found)
    for name, runs in over.items():
        most = max(run.spent.of(unit) for run in runs)
        lines.append(
            f"NOT compute-matched: {name} spent up to {amount(most, unit)}, {most / budget - 1:.0%} more than "
            f"{amount(budget, unit)} (at most {TOLERANCE:.0%} is allowed), because its last step was long; raise the "
            "budget, or lower its prompts_per_step."
        )
    return lines


def _slow_runs(found: Findings) -> list[str]:
    """Name runs that made far fewer steps in the same seconds than their siblings did: the machine had other work."""
    if found.comparison.unit != "seconds":
        return []
    lines = []
    for arm in found.comparison.arms:
        runs = [run for run in found.runs if run.arm == arm.name and run.ended_early is None]
        usual = median(run.spent.steps for run in runs) if len(runs) >= _FEWEST_SIBLINGS else 0
        lines += [
            f"Seed {run.seed} of {arm.name} made {run.spent.steps:,} steps in its time, where {usual:,.0f} are usual "
            f"for {arm.name}: the machine was busy with something else. Its scores are too low; to repeat it, delete "
            f"{_path(arm, run.seed)} and run the same command again."
            for run in runs
            if run.spent.steps < _SLOW * usual
        ]
    return lines


def _path(arm: Arm, seed: int) -> str:
    return next(run.path for run in arm.trajectories if run.seed == seed)


def _other_units(found: Findings) -> list[str]:
    """Say how the arms compare in the units that the budget does not count."""
    a, b = (found.arms[arm.name][-1].costs for arm in found.comparison.arms)
    names = [arm.name for arm in found.comparison.arms]
    equal, unequal = [], []
    for unit in UNITS:
        if unit == found.comparison.unit:
            continue
        of_a: Spread = getattr(a, unit)
        of_b: Spread = getattr(b, unit)
        if of_a.mean == of_b.mean == 0:
            continue
        ratio = of_b.mean / of_a.mean if of_a.mean else float("inf")
        text = f"{UNIT_WORDS[unit]} ({_in_short(of_b.mean, unit)} against {_in_short(of_a.mean, unit)})"
        if 1 - TOLERANCE <= ratio <= 1 + TOLERANCE:
            equal.append(text)
        else:
            unequal.append(f"{plain(ratio)} times the {text}")
    lines = []
    if unequal:
        lines.append(f"Not equal in other units: {names[1]} took {listed(unequal)} of {names[0]}.")
    if equal:
        lines.append(f"Equal within {TOLERANCE:.0%} also in {listed(equal)}.")
    return lines


def _at_the_same(found: Findings) -> list[str]:
    """Say so if another arm, or none, leads where no run had spent more of the budget's unit than any other.

    A run ends with the step that reaches the budget: the longer its steps, the more it has spent by then.
    """
    assert found.pair is not None
    equal = next((e for e in found.equal if e.unit == found.comparison.unit), None)
    if equal is None or equal.difference is None or equal.difference.verdict == found.pair.differences[1].verdict:
        return []
    spent = [
        f"{name} {_in_short(getattr(at_marks[-1].costs, equal.unit).mean, equal.unit)}"
        for name, at_marks in found.arms.items()
    ]
    return [
        f"The conclusion changes where all runs had spent exactly the same: at {_told(found, equal)}, read off between "
        f"evaluations. At their ends they had spent {listed(spent)}, since a run ends with the step that reaches the "
        "budget."
    ]


def _told(found: Findings, equal: EqualCost) -> str:
    """Return which arm leads at equal cost."""
    assert equal.difference is not None
    a, b = (arm.name for arm in found.comparison.arms)
    shown = {"A leads": f"{a} leads", "B leads": f"{b} leads"}.get(equal.difference.verdict, equal.difference.verdict)
    return f"{amount(equal.amount, equal.unit)} each {shown} ({signed(equal.difference.difference)})"


def _equal_cost(found: Findings) -> list[str]:
    """Say which arm leads where all runs had spent the same of another unit."""
    told = [
        f"at {_told(found, equal)}" for equal in found.equal if equal.unit != found.comparison.unit and equal.difference
    ]
    return [f"pass@1 at equal cost in other units, read off between evaluations: {'; '.join(told)}."] if told else []


def _coverage(found: Findings) -> list[str]:
    """Say what became of coverage: pass@k of the largest k."""
    assert found.pair is not None
    names = [arm.name for arm in found.comparison.arms]
    k = found.largest_k
    if k == 1:
        return []
    difference = found.pair.differences[k]
    at_a, at_b = (found.arms[name][-1].pass_at[k].value for name in names)
    leads = {"A leads": f"{names[0]} leads", "B leads": f"{names[1]} leads"}.get(
        difference.verdict, "no difference shown"
    )
    return [
        f"Coverage: pass@{k} is {at_b:.3f} with {names[1]} and {at_a:.3f} with {names[0]}, "
        f"{found.start[k].value:.3f} at the start: {leads} (difference {signed(difference.difference)})."
    ]


def equal_score_words(found: Findings) -> list[str]:
    """Say what coverage the arms had where their pass@1 was the same: a slow arm has much because it is slow."""
    equal = found.equal_score
    if equal is None:
        return []
    first, unit = equal.arms[0], found.comparison.unit
    passed = [one.arm for one in equal.arms if one.coverage is None]
    if first.coverage is None or len(passed) == len(equal.arms) - 1:
        return [
            f"pass@{equal.k} at equal pass@1 is not compared: {listed(passed)} had passed {equal.level:.3f} before the "
            "first evaluation; --marks adds earlier ones."
        ]
    reached = listed([f"{one.arm} after {_in_short(one.spent, unit)}" for one in equal.arms if one.spent is not None])
    where = f"Where pass@1 first was {equal.level:.3f} ({reached}), pass@{equal.k} was {first.coverage.value:.3f} with"
    groups: dict[Verdict, list[str]] = {"B leads": [], "A leads": [], "no difference shown": []}
    for one in equal.arms[1:]:
        if one.coverage is None or one.difference is None or one.verdict is None:
            continue
        if len(equal.arms) == 2:
            leads = {"A leads": f"{first.arm} leads", "B leads": f"{one.arm} leads"}.get(one.verdict, one.verdict)
            value = f"{one.coverage.value:.3f} with {one.arm}"
            return [f"{where} {first.arm} and {value}: {leads} (difference {signed(one.difference)})."]
        groups[one.verdict].append(f"{one.arm} {one.coverage.value:.3f} ({signed(one.difference)})")
    words = {"B leads": "higher", "A leads": "lower", "no difference shown": "no difference shown"}
    told = [f"{words[lead]}: {', '.join(arms)}" for lead, arms in groups.items() if arms]
    return [f"{where} {first.arm}; {'; '.join(told)}."]


def coverage_words(found: Findings) -> str:
    """Return how many prompts each arm gained and lost since the start."""
    changes = [
        f"{c.arm} gained {_count(c.gained)} and lost {_count(c.lost)} (luck alone: {_count(c.by_chance)} each way)"
        for c in found.coverage
    ]
    return (
        f"Of {len(found.comparison.prompts)} prompts, solved by one of {found.comparison.num_samples} responses or by "
        f"none, since the start: {'; '.join(changes)}."
    )


def ending_words(found: Findings) -> list[str]:
    """Say which runs ended before their budget was spent, and that their last scores count."""
    return [f"{run.words}." for run in found.runs if run.ended_early is not None]


def _certainty(difference: PairedDifference, ahead: int | None, name: str) -> list[str]:
    """Say how many seeds there are, what the interval allows for, and what other tests say."""
    covers = {
        "prompts and seeds": "other prompts and other seeds",
        "prompts": "other prompts, not for other seeds",
        "seeds": "other seeds, not for other prompts",
        "nothing": "neither other prompts nor other seeds",
    }[difference.covers]
    lines = [f"{_seeds(difference).capitalize()} an arm: the interval (95%) allows for {covers}."]
    if min(difference.num_seeds) == 1:
        lines.append("With one seed, only these trained models are compared; another seed may reverse it.")
    elif ahead is not None:
        lines.append(f"{name} was ahead in {ahead} of {difference.num_seeds[0]} seeds.")
    test = difference.prompt_test
    if test is not None and difference.verdict == "no difference shown" and test.p_two_sided < 0.05:
        lines.append(
            f"The t-test over prompts alone would call it a difference (two-tailed p = {p_value(test.p_two_sided)}), "
            "but it does not allow for other seeds."
        )
    return lines


def _tasks(found: Findings) -> list[str]:
    """Count the tasks of each kind of trajectory."""
    assert found.pair is not None
    if not found.tasks:
        return []
    kinds = Counter(task.kind for task in found.pair.kinds)
    a, b = (arm.name for arm in found.comparison.arms)
    counts = [f"{kind_words(kind, a, b)} on {number}" for kind, number in kinds.most_common()]
    return [f"By task, {len(found.pair.kinds)} in all: {'; '.join(counts)}."]


def other_settings(arms: Sequence[Arm]) -> list[str]:
    """Say which settings differ if the result cannot be put down to one of them, or to N with its prompts per step."""
    names = sorted({name for arm in arms for name in arm.differs})
    others = [name for name in names if name not in _EXPECTED]
    if not others or len(names) == 1:
        return []
    if _ROLLOUTS in names:
        return [f"The arms differ in {listed(others)} too: the result is due to all of these together."]
    return [f"The arms differ in {listed(names)}: the result is due to all of these together."]


def limit_words(found: Findings) -> list[str]:
    """Say what the result holds for."""
    comparison = found.comparison
    line = f"This holds for this checkpoint ({comparison.checkpoint}), this data and this budget"
    machine = f", and for this machine ({comparison.machine})" if comparison.unit == "seconds" else ""
    return [f"{line}{machine}: a longer run may rank the arms differently."]


def _seeds(difference: PairedDifference) -> str:
    of_a, of_b = difference.num_seeds
    if of_a != of_b:
        return f"{of_b} and {of_a} seeds"
    return "1 seed" if of_a == 1 else f"{of_a} seeds"


def _count(values: Spread) -> str:
    return f"{values.mean:.1f}".removesuffix(".0")


def _in_short(value: float, unit: Unit) -> str:
    return short_time(value) if unit == "seconds" else short(value)
