"""What a sweep over more than two arms shows, in words: the best N at each budget, and from which budget on.

In: what a comparison shows. Out: sentences. A lead that is not shown is called that.
"""

from __future__ import annotations

from brorl.comparison.findings import Findings, ends_of, ordered_by_number, tied
from brorl.comparison.frontier import Frontier, Reign
from brorl.comparison.matching import TOLERANCE
from brorl.comparison.tables import measure_name, seeds_words
from brorl.comparison.text import (
    VerdictWords,
    ending_words,
    equal_score_words,
    key_words,
    limit_words,
    match_words,
    other_settings,
)
from brorl.cost import UNIT_WORDS, Unit, amount, short_amount
from brorl.format import interval, listed, signed


def sweep_verdict(found: Findings) -> VerdictWords:
    """Return what a sweep shows."""
    first, unit = found.frontiers[0], found.comparison.unit
    return VerdictWords(
        (
            sweep_answer(first, found),
            *key_words(found),
            *(_reigns(line, found) for line in found.frontiers),
            *_against_first(found),
            *equal_score_words(found),
        ),
        (
            *(_shapes(found) if ordered_by_number(found.comparison.arms) else []),
            *_saturation(first, unit),
            *match_words(found),
            *_left_out(first, unit),
            *ending_words(found),
            *_seeds(found),
            *other_settings(found.comparison.arms),
            *limit_words(found),
        ),
    )


def sweep_answer(line: Frontier, found: Findings) -> str:
    """Return in one sentence which arm is best at the budget."""
    budget = amount(found.budget, found.comparison.unit)
    at_budget = next((b for b in line.best if b.mark == found.budget), None)
    if at_budget is None:
        kept = [p.arm for p in line.points if p.mark == found.budget and p.why_left_out is None]
        who = f"only {kept[0]} kept to it" if kept else "every arm overshot it"
        return f"At {budget} of training nothing can be compared: {who}."
    score = next(p.score for p in line.points if p.mark == found.budget and p.arm == at_budget.arm)
    over = [point.arm for point in line.points if point.mark == found.budget and point.why_left_out]
    where = f"Of the arms that kept to {budget} ({listed(over)} did not)" if over else f"At {budget} of training each"
    start = f"{where}, {at_budget.arm} scored the highest {measure_name(line)}, {interval(score)}"
    lead = f"{signed(at_budget.lead)}, {seeds_words(found.comparison.arms)}"
    if at_budget.lead_shown:
        one = " with this one seed" if max(len(arm.trajectories) for arm in found.comparison.arms) == 1 else ""
        return f"{start}: it won{one}, its lead over {at_budget.second} is shown ({lead})."
    return (
        f"{start}, but it did not win: its lead over {at_budget.second} is not shown ({lead}; best in "
        f"{at_budget.best_share:.0%} of bootstrap resamples)."
    )


def _reigns(line: Frontier, found: Findings) -> str:
    """Say which arm is best from which budget on."""
    unit, last = found.comparison.unit, found.budget
    if not line.reigns:
        return f"{measure_name(line)}: at no budget did two arms keep to the mark."
    reigns = [_reign(reign, line, unit, last) for reign in line.reigns]
    best = {reign.arm for reign in line.reigns}
    marks = {b.mark for b in line.best}
    compared = {point.arm for point in line.points if point.why_left_out is None and point.mark in marks}
    never = [arm.name for arm in found.comparison.arms if arm.name in compared - best]
    at_none = f"; at no budget {listed(never)}" if never else ""
    counted = "" if unit == "seconds" else f" by {UNIT_WORDS[unit]}"
    return f"Best {measure_name(line)}{counted}: {', '.join(reigns)}{at_none}."


def _reign(reign: Reign, line: Frontier, unit: Unit, last: float) -> str:
    first, until = short_amount(reign.first_mark, unit), short_amount(reign.last_mark, unit)
    span = f"at {first}" if first == until else f"from {first} to {until}"
    if reign.last_mark == last and first != until:
        span = f"from {first} on"
    best = [b for b in line.best if reign.first_mark <= b.mark <= reign.last_mark]
    if all(map(tied, best)):
        return f"{reign.arm} {span} (tied with {best[-1].second})"
    if not reign.shown_at:
        return f"{reign.arm} {span} (lead not shown)"
    if len(reign.shown_at) == len(best):
        return f"{reign.arm} {span} (lead shown{' throughout' if len(best) > 1 else ''})"
    return f"{reign.arm} {span} (lead shown at {listed([short_amount(mark, unit) for mark in reign.shown_at])})"


def _shapes(found: Findings) -> list[str]:
    """Describe the sigmoids, and say once for all measures why there is none."""
    lines = [_shape(line, found.comparison.unit) for line in found.frontiers if line.sigmoid is not None]
    reasons: dict[str, list[str]] = {}
    for line in found.frontiers:
        if line.why_no_sigmoid is not None:
            reasons.setdefault(line.why_no_sigmoid, []).append(measure_name(line))
    return [*lines, *(f"No sigmoid of the best N for {listed(names)}: {why}." for why, names in reasons.items())]


def _shape(line: Frontier, unit: Unit) -> str:
    """Describe the sigmoid."""
    assert line.sigmoid is not None
    low, high, middle = 2**line.sigmoid.low, 2**line.sigmoid.high, line.sigmoid.midpoint
    half, least, most = (short_amount(value, unit) for value in (middle.value, middle.low, middle.high))
    return (
        f"The best N for {measure_name(line)} rises with the budget from about {low:,.0f} to about {high:,.0f}, "
        f"halfway (in log N) at {half} [{least}, {most}]{_counted(unit)}."
    )


def _against_first(found: Findings) -> list[str]:
    """Say which arms score higher and lower than the first where all spent the same of what the budget counts."""
    unit, first = found.comparison.unit, found.comparison.arms[0].name
    groups = {"B leads": "higher", "A leads": "lower", "no difference shown": "no difference shown"}
    lines = []
    for k in ends_of(found.ks):
        equal = {one.arm: one.equal[k].difference for one in found.against_first if one.equal[k].unit == unit}
        differences = {arm: difference for arm, difference in equal.items() if difference is not None}
        told = []
        for lead, words in groups.items():
            arms = [f"{a} ({signed(d.difference)})" for a, d in differences.items() if d.verdict == lead]
            told += [f"{words}: {', '.join(arms)}"] if arms else []
        if unknown := [arm for arm, difference in equal.items() if difference is None]:
            told.append(f"not evaluated close enough to equal {UNIT_WORDS[unit]}: {', '.join(unknown)}")
        lines.append(f"pass@{k} against {first} at equal {UNIT_WORDS[unit]}, {'; '.join(told)}.")
    return lines


def _saturation(line: Frontier, unit: Unit) -> list[str]:
    """Say which arms still rose between their last two marks."""
    groups = {"improves": "still rising", "no change shown": "no change shown", "degrades": "falling"}
    lines = []
    for marks in dict.fromkeys(s.marks for s in line.saturation):
        first, last = (short_amount(mark, unit) for mark in marks)
        told = []
        for movement, words in groups.items():
            rows = [s for s in line.saturation if (s.movement, s.marks) == (movement, marks)]
            arms = [s.arm if movement == "no change shown" else f"{s.arm} ({signed(s.change)})" for s in rows]
            told += [f"{words}: {', '.join(arms)}"] if arms else []
        lines.append(f"{measure_name(line)} between {first} and {last}{_counted(unit)}, {'; '.join(told)}.")
    return lines


def _counted(unit: Unit) -> str:
    return "" if unit == "seconds" else f" {UNIT_WORDS[unit]}"


def _left_out(line: Frontier, unit: Unit) -> list[str]:
    """Name the points that are not compared before the last budget."""
    last = max(point.mark for point in line.points)
    marks: dict[str, list[str]] = {}
    for point in line.points:
        if point.why_left_out and point.mark < last:
            marks.setdefault(point.arm, []).append(short_amount(point.mark, unit))
    if not marks:
        return []
    left_out = "; ".join(f"{arm} at {listed(at)}" for arm, at in marks.items())
    return [f"Not compared, since a run overshot the mark by over {TOLERANCE:.0%}: {left_out}{_counted(unit)}."]


def _seeds(found: Findings) -> list[str]:
    """Say how many seeds there are and what follows."""
    seeds = f"{seeds_words(found.comparison.arms).capitalize()} an arm"
    if min(len(arm.trajectories) for arm in found.comparison.arms) == 1:
        return [
            f"{seeds}: with one, intervals allow for other prompts alone, and another seed may reverse every order."
        ]
    return [f"{seeds}: intervals (95%) allow for other prompts and other seeds."]
