"""The tables of a comparison, laid out like the paper's.

Per-prompt results for every evaluation of every run are only in the record.

Source: the layout of BroRL (arXiv 2510.01180), Tables 1 to 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from brorl.comparison.results import START, TOLERANCE, ComparisonResults, Spread, with_names
from brorl.comparison.scores import Arm
from brorl.cost import UNIT_WORDS, amount, short_amount
from brorl.errors import option
from brorl.evaluation.paired import CorrectedInterval, TTest, conclusion_of
from brorl.format import Estimate, interval, p_value, plain, short, short_time, signed
from brorl.table import Table

_MAX_VALUE_LENGTH = 9  # with longer values (in characters), the settings table has one row per arm


def tables_of(results: ComparisonResults) -> list[Table]:
    """Return the tables of a comparison. The first one shows the answer.

    With two arms it shows pass@k at the budget; with more, the costs and scores of the arms.
    """
    costs = arm_table(results)
    first = [costs] if results.pair is None else [pair_table(results), costs, paired_table(results)]
    settings = [settings_table(results)] if any(arm.differs for arm in results.comparison.arms) else []
    further = [
        *(frontier_table(results, k) for k in results.end_ks),
        equal_table(results),
        use_table(results),
        *(source_table(results, k) for k in results.end_ks if results.sources),
        solved_table(results),
    ]
    if results.key:  # explain the letters early
        return [first[0], *settings, *first[1:], *further]
    return [*first, *further, *settings]


def arm_table(results: ComparisonResults) -> Table:
    """Make the table of costs and scores of each arm at the budget (the paper's Table 1)."""
    comparison = results.comparison
    columns = ("arm", "N", "prompts\n/step", "steps", "samples", "unique\ntokens", "time", "pass@1")
    rows = [(START, *["-"] * 6, interval(results.scores.pass_at[START][1]))]
    for arm in comparison.arms:
        at = results.at_eval_points[arm.name][-1]
        rows.append((
            arm.name if at.matched else f"{arm.name} *",
            f"{arm.num_rollouts:,}",
            f"{arm.prompts_per_step:,}",
            f"{at.costs['steps'].mean:,.0f}",
            short(at.costs["samples"].mean),
            short(at.costs["unique_tokens"].mean),
            short_time(at.costs["seconds"].mean),
            interval(at.pass_at[1]),
        ))  # fmt: skip
    notes = [
        f"Means over runs ({results.seeds_text} per arm); brackets: 95% intervals. Samples are counted before dynamic "
        f"sampling. Evaluations are not part of any cost. Machine: {comparison.machine}."
    ]
    notes += [
        f"In {arm.name}, {title} began after {amount(begin, comparison.unit)} on average."
        for arm in comparison.arms
        for title, begin in arm.phase_begins(comparison.unit).items()
    ]
    if not results.matched:
        notes.append(f"* a run spent over {TOLERANCE:.0%} more than the budget: not compute-matched")
    title = f"Costs and scores of the arms after {amount(results.budget, comparison.unit)} each"
    return Table(title, columns, tuple(rows), tuple(notes))


# key of `use_of_samples` -> (heading, format of the numbers)
_USE: dict[str, tuple[str, Callable[[float], str]]] = {
    "mixed_fraction": ("mixed\ngroups", "{:.1%}".format),
    "samples_per_s": ("samples\n/s", short),
    "generated_per_s": ("generated\n/s", short),
    "unique_tokens_per_s": ("unique\ntokens/s", short),
    "tokens_per_unique": ("sampled per\nunique token", "{:,.2f}".format),
    "tokens_per_response": ("tokens per\nresponse", plain),
    "correct_per_1000_tokens": ("correct per\n1,000 tokens", plain),
}


def use_table(results: ComparisonResults) -> Table:
    """Make the table of mixed groups, throughput and tokens (the paper's Tables 2 and 3)."""
    rows = [
        (name, *("-" if (spread := use.get(key)) is None else form(spread.mean) for key, (_, form) in _USE.items()))
        for name, use in results.use.items()
    ]
    notes = (
        "Mixed groups: fraction of sampled groups with correct and incorrect rollouts; dynamic sampling keeps these. "
        "Samples/s: per second of the run; generated/s: per second of generation alone. Means over whole runs; the "
        "last two columns come from the evaluations at the budget.",
    )
    return Table("Use of samples", ("arm", *(heading for heading, _ in _USE.values())), tuple(rows), notes)


def pair_table(results: ComparisonResults) -> Table:
    """Make the table that compares the pass@k of two arms."""
    assert results.pair is not None
    a, b = results.names
    rows = []
    for k, difference in results.pair.items():
        shown = signed(difference.difference), with_names(difference.conclusion, a, b)
        rows.append((f"pass@{k}", *_values(by_k[k] for by_k in results.scores.pass_at.values()), *shown))
    notes = (
        f"Over {len(results.comparison.prompts)} held-out prompts with {results.comparison.num_samples} responses "
        "each.",
    )
    title = f"{b} against {a} after {amount(results.budget, results.comparison.unit)}"
    columns = ("score", START, a, b, "difference", "conclusion")
    return Table(title, columns, tuple(rows), notes, words=frozenset({0, 5}))


def paired_table(results: ComparisonResults) -> Table:
    """Make the table of the paired tests."""
    assert results.pair is not None
    a, b = results.names
    rows: list[tuple[str, ...]] = []
    for k in results.end_ks:
        d = results.pair[k]
        rows += [
            (f"pass@{k}", f"over {d.covers}", signed(d.difference), "-", "-", "-"),
            ("", f"{d.num_prompts:,} prompts", f"{d.difference.value:+.3f}", *_test(d.prompt_test)),
        ]
        if d.seed_test is not None and d.seed_interval is not None:
            seeds = d.num_seeds[0] if d.seeds_paired else f"{d.num_seeds[0]} + {d.num_seeds[1]}"
            rows.append(("", f"{seeds} seeds", signed(d.seed_interval), *_test(d.seed_test)))
    notes = (
        "The conclusion uses the first line of each score. The test over prompts (the paper's) does not allow for "
        f"other seeds, and the test over seeds does not allow for other prompts. One-tailed p: for {b} above {a}.",
    )
    columns = ("score", "test", "difference", "t (df)", "p, one-\ntailed", "p, two-\ntailed")
    return Table(f"Paired tests: {b} minus {a}", columns, tuple(rows), notes, words=frozenset({0, 1}))


def _test(test: TTest | None) -> tuple[str, str, str]:
    if test is None:
        return "-", "-", "-"
    degrees = f"{test.degrees:,.{0 if test.degrees == round(test.degrees) else 1}f}"
    return f"{test.t:.2f} ({degrees})", p_value(test.p_greater), p_value(test.p_two_sided)


def _marked(difference: Estimate, corrected: CorrectedInterval, digits: int = 3) -> str:
    """Return a difference with its uncorrected 95% interval, and a mark if the difference is shown."""
    mark = "" if conclusion_of(difference) == "no difference shown" else " *"
    if corrected.num_intervals > 1 and corrected.conclusion != "no difference shown":
        mark = " **"
    return f"{signed(difference, digits)}{mark}"


def _marks_note(num_intervals: int) -> str:
    """Explain the marks in a table with this many differences."""
    own = "Marks: * the difference's own 95% interval, as printed, excludes 0"
    if num_intervals == 1:
        return f"{own}."
    return (
        f"{own}; ** also its interval corrected for the {num_intervals} intervals of this table (Bonferroni: each at "
        f"the level 1 - 0.05/{num_intervals}). Only ** shows a difference."
    )


def _values(estimates: Iterable[Estimate]) -> tuple[str, ...]:
    return tuple(f"{estimate.value:.3f}" for estimate in estimates)


def equal_table(results: ComparisonResults) -> Table:
    """Make the table of differences from the first arm at equal cost, in every unit."""
    first = results.names[0]
    rows = []
    num_intervals = sum(d is not None for row in results.at_equal_cost for d in row.differences.values())
    for equal in results.at_equal_cost:
        counted_in = {"seconds": "", "unique_tokens": " tokens"}.get(equal.unit, f" {equal.unit}")
        cells = [f"{equal.arm}, {short_amount(equal.amount, equal.unit)}{counted_in}"]
        for k, score in equal.scores.items():
            difference = equal.differences[k]
            cells.append("-" if score is None else f"{score.value:.3f}")
            corrected = None if difference is None else CorrectedInterval.of(difference.at_level, num_intervals)
            cells.append("-" if not difference or not corrected else _marked(difference.difference, corrected))
        rows.append(tuple(cells))
    notes = [
        "At the largest cost that every run of the two arms reached, interpolated linearly between evaluations; tokens "
        "are unique tokens.",
        *([_marks_note(num_intervals)] if num_intervals else []),
    ]
    if any(score is None for equal in results.at_equal_cost for score in equal.scores.values()):
        notes.append(
            "-: a run was not evaluated close enough to that cost; "
            f"a larger {option('eval-points')} adds evaluation points."
        )
    columns = ("arm, spent", *(column for k in results.end_ks for column in (f"pass@{k}", f"minus {first}")))
    return Table("At equal cost", columns, tuple(rows), tuple(notes))


def frontier_table(results: ComparisonResults, k: int) -> Table:
    """Make the table of every arm's pass@k at every evaluation point; the best arm at each point is marked."""
    unit = results.comparison.unit
    best = {b.eval_point: b for b in results.best[k] if not b.is_tied}
    rows = []
    for index, eval_point in enumerate(results.comparison.eval_points):
        cells = []
        for name, points in results.at_eval_points.items():
            at = points[index]
            cell = f"{at.pass_at[k].value:.3f}" if at.matched else f"({at.pass_at[k].value:.3f})"
            if eval_point in best and best[eval_point].arm == name:
                cell += "**" if best[eval_point].lead_shown else "*"
            cells.append(cell)
        rows.append((short_amount(eval_point, unit), *cells))
    notes = ["* best at that budget; ** and its lead over the second is shown (the 95% interval is above 0)"]
    if not all(at.matched for points in results.at_eval_points.values() for at in points):
        notes.append(f"(in brackets): a run overshot the budget by over {TOLERANCE:.0%}: not compared there")
    return Table(f"pass@{k} by budget", (UNIT_WORDS[unit], *results.names), tuple(rows), tuple(notes))


def source_table(results: ComparisonResults, k: int) -> Table:
    """Make the table of pass@k by source, with the difference of two arms."""
    is_pair = results.pair is not None
    rows = []
    for source, scores in results.sources.items():
        differences = [signed(by_k[k].difference) for by_k in scores.differences.values()] if is_pair else []
        cells = *_values(by_k[k] for by_k in scores.pass_at.values()), *differences
        rows.append((f"{source} ({scores.num_prompts})", *cells))
    columns = ("source", START, *results.names, *(("difference",) if is_pair else ()))
    return Table(f"pass@{k} by source", columns, tuple(rows), ("In brackets: prompts.",))


def solved_table(results: ComparisonResults) -> Table:
    """Make the table of prompts gained and lost since the start."""
    k = results.ks[-1]
    comparison = results.comparison
    rows = tuple(
        (
            c.arm,
            spread_text(c.gained),
            spread_text(c.lost),
            f"{c.by_chance.mean:.1f}",
            f"{c.expected.mean:.1f}",
            _marked(c.expected_change, c.corrected, digits=1),
        )
        for c in results.coverage
    )
    notes = (
        f"Of {len(comparison.prompts)} prompts. Gained: none of {comparison.num_samples} responses correct at the "
        "start and at least one now; lost: the reverse; mean over runs (smallest-largest). By luck: the expected "
        f"gains and losses if no pass rate had changed. Expected: prompts solved in {k} "
        f"{'attempts' if k > 1 else 'attempt'}, and their change since the start.",
        _marks_note(len(results.coverage)),
    )
    columns = ("arm", "gained", "lost", "by luck", f"expected\nin {k}", "change")
    return Table("Prompts gained and lost since the start", columns, rows, notes)


def spread_text(values: Spread) -> str:
    """Return the mean over runs with its range, or just the value if all runs agree."""
    low, high = (f"{v:,.0f}" if v == round(v) else f"{v:,.1f}" for v in (values.least, values.most))
    return low if values.least == values.most else f"{values.mean:,.1f} ({low}-{high})"


def settings_table(results: ComparisonResults) -> Table:
    """Make the table of settings that differ between arms; with long values, it has one row per arm."""
    arms = results.comparison.arms
    title = "Settings in which the arms differ"
    values = [_shown_settings(arm) for arm in arms]
    if len(arms) == 2 or max(len(value) for arm_values in values for value in arm_values.values()) <= _MAX_VALUE_LENGTH:
        names = dict.fromkeys(name for arm_values in values for name in arm_values)
        rows = tuple((name, *(arm_values.get(name, "-") for arm_values in values)) for name in names)
        words = frozenset({0, 1, 2} if len(arms) == 2 else {0})
        return Table(title, ("setting", *results.names), rows, words=words)
    rows = tuple(
        (arm.name, ", ".join(f"{n}: {v}" for n, v in arm_values.items()))
        for arm, arm_values in zip(arms, values, strict=True)
    )
    return Table(title, ("arm", "settings"), rows, words=frozenset({0, 1}))


def _shown_settings(arm: Arm) -> dict[str, str]:
    """Return the settings in which an arm differs, and its recipe, unless its title already contains them all."""
    repeated = all(f"{name.rpartition('.')[2]}={value}" in arm.title for name, value in arm.differs.items())
    return {**({} if not arm.title or repeated else {"recipe": arm.title}), **arm.differs}
