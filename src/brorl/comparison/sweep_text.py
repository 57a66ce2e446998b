"""The answer of a comparison of more than two arms in sentences: the best arm at each budget, and from which budget on.

In: the results of a comparison. Out: sentences. A lead that is not shown is called that.
"""

from __future__ import annotations

from brorl.comparison.frontier import Frontier, LeadingRange
from brorl.comparison.matching import TOLERANCE
from brorl.comparison.results import ComparisonResults
from brorl.comparison.text import (
    ComparisonText,
    differing_settings,
    ending_words,
    equal_score_words,
    grouped,
    key_words,
    limit_words,
    match_words,
    phase_words,
    seeds_needed_words,
    unverified_words,
)
from brorl.cost import UNIT_WORDS, Unit, amount, short_amount
from brorl.format import interval, listed, signed


def sweep_text(results: ComparisonResults) -> ComparisonText:
    """Return a comparison of more than two arms in sentences."""
    first, unit = results.frontiers[0], results.comparison.unit
    return ComparisonText(
        (
            sweep_answer(results),
            *key_words(results),
            *(_leading_ranges(frontier, results) for frontier in results.frontiers),
            *_against_first(results),
            *equal_score_words(results),
        ),
        (
            *(_sigmoids(results) if results.comparison.ordered_by_rollouts else []),
            *_saturation(first, unit),
            *match_words(results),
            *_left_out(first, unit),
            *phase_words(results),
            *ending_words(results),
            *unverified_words(results.comparison),
            _seeds(results),
            seeds_needed_words(results),
            *differing_settings(results.comparison.arms),
            limit_words(results),
        ),
    )


def sweep_answer(results: ComparisonResults) -> str:
    """Return in one sentence which arm is best at the budget."""
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
    start = f"{where}, {best.arm} scored the highest {frontier.measure.name}, {score}"
    lead = f"{signed(best.lead)}, {results.seeds_text}"
    if best.lead_shown:
        one = " with this one seed" if results.seeds_text == "1 seed" else ""
        return f"{start}: it won{one}, its lead over {best.second} is shown ({lead})."
    return (
        f"{start}, but it did not win: its lead over {best.second} is not shown ({lead}; best in "
        f"{best.best_fraction:.0%} of bootstrap resamples)."
    )


def _leading_ranges(frontier: Frontier, results: ComparisonResults) -> str:
    """Return which arm is best from which budget on."""
    unit, measure = results.comparison.unit, frontier.measure.name
    if not frontier.leading_ranges:
        return f"{measure}: at no budget did two arms keep to it."
    ranges = [_leading_range(one, frontier, unit, results.budget) for one in frontier.leading_ranges]
    points = [b.eval_point for b in frontier.best]
    compared = {p.arm for p in frontier.points if p.why_left_out is None and p.eval_point in points}
    never_best = compared - {one.arm for one in frontier.leading_ranges}
    never = [name for name in results.names if name in never_best]
    at_none = f"; at no budget {listed(never)}" if never else ""
    return f"Best {measure}{_by(unit)}: {', '.join(ranges)}{at_none}."


def _by(unit: Unit) -> str:
    return "" if unit == "seconds" else f" by {UNIT_WORDS[unit]}"


def _leading_range(one: LeadingRange, frontier: Frontier, unit: Unit, last: float) -> str:
    first, until = short_amount(one.first_point, unit), short_amount(one.last_point, unit)
    span = f"at {first}" if first == until else f"from {first} to {until}"
    if one.last_point == last and first != until:
        span = f"from {first} on"
    best = [b for b in frontier.best if one.first_point <= b.eval_point <= one.last_point]
    if all(b.is_tied for b in best):
        lead = f"tied with {best[-1].second}"
    elif not one.shown_at:
        lead = "lead not shown"
    elif len(one.shown_at) == len(best):
        lead = f"lead shown{' throughout' if len(best) > 1 else ''}"
    else:
        lead = f"lead shown at {listed([short_amount(point, unit) for point in one.shown_at])}"
    return f"{one.arm} {span} ({lead})"


def _sigmoids(results: ComparisonResults) -> list[str]:
    """Describe the sigmoids, and give each reason for a missing one once for all measures."""
    lines, unit = [], results.comparison.unit
    reasons: dict[str, list[str]] = {}
    for frontier in results.frontiers:
        if frontier.why_no_sigmoid is not None:
            reasons.setdefault(frontier.why_no_sigmoid, []).append(frontier.measure.name)
        if (fit := frontier.sigmoid) is not None:
            middle, low, high = (
                short_amount(v, unit) for v in (fit.midpoint.value, fit.midpoint.low, fit.midpoint.high)
            )
            lines.append(
                f"The best N for {frontier.measure.name} rises with the budget from about {2**fit.low:,.0f} to about "
                f"{2**fit.high:,.0f}, halfway (in log N) at {middle} [{low}, {high}]{_counted(unit)}."
            )
    return [*lines, *(f"No sigmoid of the best N for {listed(names)}: {why}." for why, names in reasons.items())]


def _against_first(results: ComparisonResults) -> list[str]:
    """Name the arms that score higher and lower than the first where all spent the same of the budget's unit."""
    unit, first = results.comparison.unit, results.names[0]
    lines = []
    for k in results.end_ks:
        differences, unknown = [], []
        for one in results.against_first:
            difference, corrected = one.equal[k].difference, one.corrected[k]
            if one.equal[k].unit != unit:
                continue
            if difference is None or corrected is None:
                unknown.append(one.arm)
            else:
                text = f"{one.arm} ({signed(difference.difference)})"
                differences.append((text, difference.conclusion, corrected))
        phrases = grouped(differences)
        if unknown:
            phrases.append(f"not evaluated close enough to equal {UNIT_WORDS[unit]}: {', '.join(unknown)}")
        lines.append(f"pass@{k} against {first} at equal {UNIT_WORDS[unit]}, {'; '.join(phrases)}.")
    return lines


def _saturation(frontier: Frontier, unit: Unit) -> list[str]:
    """Name the arms that still rose between their last two evaluation points."""
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


def _counted(unit: Unit) -> str:
    return "" if unit == "seconds" else f" {UNIT_WORDS[unit]}"


def _left_out(frontier: Frontier, unit: Unit) -> list[str]:
    """Name the arms that are not compared at an evaluation point before the last."""
    last = max(point.eval_point for point in frontier.points)
    left_out: dict[str, list[str]] = {}
    for point in frontier.points:
        if point.why_left_out and point.eval_point < last:
            left_out.setdefault(point.arm, []).append(short_amount(point.eval_point, unit))
    if not left_out:
        return []
    places = "; ".join(f"{arm} at {listed(points)}" for arm, points in left_out.items())
    return [f"Not compared, because a run overshot by over {TOLERANCE:.0%}: {places}{_counted(unit)}."]


def _seeds(results: ComparisonResults) -> str:
    """Return the number of seeds and the variation that the intervals cover."""
    seeds = f"{results.seeds_text.capitalize()} an arm"
    if min(len(arm.runs) for arm in results.comparison.arms) == 1:
        return f"{seeds}: with one, intervals allow for other prompts only, and another seed may reverse every order."
    return f"{seeds}: intervals (95%) allow for other prompts and other seeds."
