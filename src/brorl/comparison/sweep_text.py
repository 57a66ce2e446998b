"""The sentences about a sweep: the best arm at each budget, and every arm against the first."""

from __future__ import annotations

from collections.abc import Sequence

from brorl.comparison.frontier import Frontier, LeadingRange
from brorl.comparison.matching import TOLERANCE
from brorl.comparison.paired import Conclusion, CorrectedInterval
from brorl.comparison.results import ComparisonResults, higher_or_lower, interval_words
from brorl.cost import UNIT_WORDS, Unit, amount, short_amount
from brorl.format import interval, listed, signed

_GROUPS: dict[Conclusion, str] = {"B leads": "higher", "A leads": "lower", "no difference shown": "no difference shown"}
_UNCORRECTED = " only without correction"


def sweep_answer(results: ComparisonResults) -> str:
    """Return which arm is best at the whole budget, and whether its lead is shown."""
    frontier, budget = results.frontiers[0], amount(results.budget, results.comparison.unit)
    at_budget = frontier.at(results.budget)
    over = [name for name, point in at_budget.items() if point.why_left_out]
    best = next((b for b in frontier.best if b.eval_point == results.budget), None)
    if best is None:
        kept = [name for name in at_budget if name not in over]
        who = f"only {kept[0]} kept to it" if kept else "every arm overshot it"
        return f"At {budget} of training nothing can be compared: {who}."
    where = f"Of the arms that kept to {budget} ({listed(over)} did not)" if over else f"At {budget} of training each"
    score = interval(at_budget[best.arm].score)
    if best.is_tied:
        return f"{where}, {best.arm} and {best.second} scored the same {frontier.measure.name}, {score}."
    shown, resampled = "No winner shown", f", best in {best.best_fraction:.0%} of bootstrap resamples"
    if best.lead_shown:
        shown, resampled = f"{best.arm} won{' with this one seed' if results.seeds_text == '1 seed' else ''}", ""
    return (
        f"{shown}: {where[0].lower()}{where[1:]}, {best.arm} scored the highest {frontier.measure.name}, {score}, "
        f"{higher_or_lower(best.lead)} than {best.second}{interval_words(best.lead)}, {results.seeds_text}{resampled}."
    )


def leading_ranges(frontier: Frontier, results: ComparisonResults) -> str:
    """Return which arm is best from which budget on."""
    unit, measure = results.comparison.unit, frontier.measure.name
    if not frontier.leading_ranges:
        return f"{measure}: at no budget did two arms keep to it."
    ranges = [_leading_range(led, frontier, unit, results.budget) for led in frontier.leading_ranges]
    points = [b.eval_point for b in frontier.best]
    compared = {p.arm for p in frontier.points if p.why_left_out is None and p.eval_point in points}
    never_best = compared - {led.arm for led in frontier.leading_ranges}
    never = [name for name in results.names if name in never_best]
    at_none = f"; at no budget {listed(never)}" if never else ""
    return f"Best {measure}{'' if unit == 'seconds' else f' by {UNIT_WORDS[unit]}'}: {', '.join(ranges)}{at_none}."


def _leading_range(led: LeadingRange, frontier: Frontier, unit: Unit, last: float) -> str:
    first, until = short_amount(led.first_point, unit), short_amount(led.last_point, unit)
    span = f"at {first}" if first == until else f"from {first} to {until}"
    if led.last_point == last and first != until:
        span = f"from {first} on"
    best = [b for b in frontier.best if led.first_point <= b.eval_point <= led.last_point]
    if all(b.is_tied for b in best):
        lead = f"tied with {best[-1].second}"
    elif not led.shown_at:
        lead = "lead not shown"
    elif len(led.shown_at) == len(best):
        lead = f"lead shown{' throughout' if len(best) > 1 else ''}"
    else:
        lead = f"lead shown at {listed([short_amount(point, unit) for point in led.shown_at])}"
    return f"{led.arm} {span} ({lead})"


def against_first(results: ComparisonResults) -> list[str]:
    """Name the arms that score higher and lower than the first where all spent the same of the budget's unit."""
    unit, first = results.comparison.unit, results.names[0]
    lines = []
    for k in results.end_ks:
        differences, unknown = [], []
        for row in results.against_first:
            difference, corrected = row.equal[k].difference, row.corrected[k]
            if row.equal[k].unit != unit:
                continue
            if difference is None or corrected is None:
                unknown.append(row.arm)
            else:
                text = f"{row.arm} ({signed(difference.difference)})"
                differences.append((text, difference.conclusion, corrected))
        phrases = grouped(differences)
        if unknown:
            phrases.append(f"not evaluated close enough to equal {UNIT_WORDS[unit]}: {', '.join(unknown)}")
        if phrases:
            lines.append(f"pass@{k} against {first} at equal {UNIT_WORDS[unit]}, {'; '.join(phrases)}.")
    return lines


def grouped(differences: Sequence[tuple[str, Conclusion, CorrectedInterval]]) -> list[str]:
    """Return a phrase for each conclusion that some arms share, after correction: higher: N=64, N=512."""
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


def saturation(results: ComparisonResults) -> list[str]:
    """Name the arms that still rose between their last two evaluation points."""
    frontier, unit = results.frontiers[0], results.comparison.unit
    words = {"improves": "still rising", "no change shown": "no change shown", "degrades": "falling"}
    lines = []
    for points in dict.fromkeys(s.eval_points for s in frontier.saturation):
        first, last = (short_amount(point, unit) for point in points)
        phrases = []
        for movement, word in words.items():
            rows = [s for s in frontier.saturation if (s.movement, s.eval_points) == (movement, points)]
            arms = [s.arm if movement == "no change shown" else f"{s.arm} ({signed(s.change)})" for s in rows]
            phrases += [f"{word}: {', '.join(arms)}"] if arms else []
        lines.append(f"{frontier.measure.name} between {first} and {last}{_counted(unit)}, {'; '.join(phrases)}.")
    return lines


def left_out_words(results: ComparisonResults) -> list[str]:
    """Name the arms that are not compared at an evaluation point before the last."""
    frontier, unit = results.frontiers[0], results.comparison.unit
    last = max(point.eval_point for point in frontier.points)
    left_out: dict[str, list[str]] = {}
    for point in frontier.points:
        if point.why_left_out and point.eval_point < last:
            left_out.setdefault(point.arm, []).append(short_amount(point.eval_point, unit))
    if not left_out:
        return []
    places = "; ".join(f"{arm} at {listed(points)}" for arm, points in left_out.items())
    return [f"Not compared, because a run overshot by over {TOLERANCE:.0%}: {places}{_counted(unit)}."]


def seeds_of_sweep(results: ComparisonResults) -> str:
    """Return the number of seeds and the variation that the intervals cover."""
    seeds = f"{results.seeds_text.capitalize()} an arm"
    if min(len(arm.runs) for arm in results.comparison.arms) == 1:
        return f"{seeds}: with one, intervals allow for other prompts only, and another seed may reverse every order."
    return f"{seeds}: intervals (95%) allow for other prompts and other seeds."


def _counted(unit: Unit) -> str:
    return "" if unit == "seconds" else f" {UNIT_WORDS[unit]}"
