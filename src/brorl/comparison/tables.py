"""The tables of a comparison, in the layout of the paper's. Of more than two arms the frontier replaces paired tests.

Long lists (all evaluation points of all runs, all prompts) are only in the record.

Source: the layout of BroRL (arXiv 2510.01180), Tables 1 to 5.
"""

from __future__ import annotations

from collections.abc import Iterable

from brorl.comparison.arms import Arm
from brorl.comparison.frontier import Frontier
from brorl.comparison.matching import TOLERANCE, Spread
from brorl.comparison.results import ArmScores, ComparisonResults, with_names
from brorl.cost import UNIT_WORDS, amount, short_amount
from brorl.evaluation.paired import CorrectedInterval, PairedDifference, TTest, conclusion_of
from brorl.format import Estimate, interval, p_value, short, short_time, signed, significant_interval
from brorl.table import Table

_MAX_POINTS = 4  # rows of an arm in the first table of two arms
_NOT_KNOWN = "-: the arm was not evaluated close enough to that cost; a larger --marks adds evaluation points."
_LONGEST_VALUE = 9  # characters of a setting in a column


def tables_of(results: ComparisonResults) -> list[Table]:
    """Return the tables of a comparison, the one that shows the answer first.

    Of two arms that is pass@k at the budget with the difference, of more the costs and scores of the arms.
    """
    tables = [cost_table(results), use_table(results)]
    if results.pair is not None:
        tables = [pass_table(results), *tables, paired_table(results)]
    settings = settings_table(results).parts() if any(arm.differs for arm in results.comparison.arms) else []
    if results.key:
        tables[1:1] = settings
    if results.equal:
        tables += equal_table(results).parts()
    if results.equal_score is not None:
        tables.append(equal_score_table(results))
    if results.against_first:
        tables += against_first_table(results).parts()
    for frontier in results.frontiers:
        tables += frontier_table(frontier, results).parts()
    if results.frontiers and results.frontiers[0].best:
        tables.append(best_table(results.frontiers[0], results))
    tables.append(token_table(results))
    if results.tasks:
        tables += task_tables(results)
    tables.append(coverage_table(results))
    return tables if results.key else [*tables, *settings]


def cost_table(results: ComparisonResults) -> Table:
    """Make the table of costs and scores of each arm (the paper's Table 1)."""
    comparison = results.comparison
    columns = ("arm", "N", "prompts\n/step", "steps", "samples", "unique\ntokens", "time", "pass@1")
    points = shown_points(comparison.eval_points) if results.pair is not None else comparison.eval_points[-1:]
    shown = [(arm, at) for arm in comparison.arms for at in results.arms[arm.name] if at.eval_point in points]
    rows = [("start", *["-"] * 6, interval(results.start[1])), *(_cost_row(arm, at) for arm, at in shown)]
    notes = [
        f"Means over runs ({results.seeds_text} an arm); brackets: 95% intervals. Samples are counted before dynamic "
        f"sampling. Evaluations are not part of any cost. Machine: {comparison.machine}."
    ]
    notes += [
        f"In {arm.name}, {title} began after {amount(begin, comparison.unit)} on average."
        for arm in comparison.arms
        for title, begin in arm.phase_begins(comparison.unit).items()
    ]
    if not all(at.matched for _, at in shown):
        notes.append(f"* a run spent over {TOLERANCE:.0%} more than the evaluation point: not compute-matched there")
    last_rows = frozenset(range(len(points), len(rows), len(points))) if len(points) > 1 else frozenset()
    title = f"Costs and scores of the arms, up to {amount(results.budget, comparison.unit)} each"
    return Table(title, columns, tuple(rows), tuple(notes), strong=last_rows)


def shown_points(eval_points: tuple[float, ...]) -> tuple[float, ...]:
    """Choose at most 4 evaluation points, spread evenly over all and with the last."""
    if len(eval_points) <= _MAX_POINTS:
        return eval_points
    last = len(eval_points) - 1
    return tuple(eval_points[round(last * (i + 1) / _MAX_POINTS)] for i in range(_MAX_POINTS))


def _cost_row(arm: Arm, at: ArmScores) -> tuple[str, ...]:
    costs = at.costs
    return (
        arm.name if at.matched else f"{arm.name} *",
        f"{arm.num_rollouts:,}",
        f"{arm.prompts_per_step:,}",
        f"{costs['steps'].mean:,.0f}",
        short(costs["samples"].mean),
        short(costs["unique_tokens"].mean),
        short_time(costs["seconds"].mean),
        interval(at.pass_at[1]),
    )


def use_table(results: ComparisonResults) -> Table:
    """Make the table of mixed groups and throughput (the paper's Table 2)."""
    columns = ("arm", "mixed\ngroups", "samples\n/s", "generated\n/s", "unique\ntokens/s", "sampled per\nunique token")

    def number(values: Spread | None, form: str = "") -> str:
        return "-" if values is None else f"{values.mean:{form}}" if form else short(values.mean)

    rows = tuple(
        (
            name,
            number(use["mixed_fraction"], ".1%"),
            *(number(use[rate]) for rate in ("samples_per_s", "generated_per_s", "unique_tokens_per_s")),
            number(use["tokens_per_unique"], ",.2f"),
        )
        for name, use in results.training.items()
    )
    notes = (
        "Mixed groups: fraction of sampled groups with correct and incorrect rollouts; dynamic sampling keeps these. "
        "Samples/s: per second of the run; generated/s: per second of generation alone. Means over whole runs.",
    )
    return Table("Use of the samples in training", columns, rows, notes)


def pass_table(results: ComparisonResults) -> Table:
    """Make the table of pass@k of two arms."""
    assert results.pair is not None
    a, b = results.names
    pair, largest_k = results.pair, results.ks[-1]
    rows = []
    for k in results.ks:
        scores = (results.start[k], *(results.arms[name][-1].pass_at[k] for name in (a, b)))
        rows.append((f"pass@{k}", *_values(scores), *_shown(pair.differences[k], a, b)))
    notes = [
        f"Over {len(results.comparison.prompts)} held-out prompts with {results.comparison.num_samples} responses each."
    ]
    if pair.worst is not None and pair.worst_at is not None:
        rows.append((f"worst@{largest_k}", *_values(pair.worst_at), *_shown(pair.worst, a, b)))
        notes.append(f"worst@{largest_k}: the probability that all of {largest_k} responses are correct.")
    title = f"{b} against {a} after {amount(results.budget, results.comparison.unit)}"
    columns = ("score", "start", a, b, "difference", "conclusion")
    return Table(title, columns, tuple(rows), tuple(notes), words=frozenset({0, 5}))


def paired_table(results: ComparisonResults) -> Table:
    """Make the table of the paired tests."""
    assert results.pair is not None
    a, b = results.names
    rows: list[tuple[str, ...]] = []
    for k in results.end_ks:
        d = results.pair.differences[k]
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
    """Return a difference with its own 95% interval and the mark of what it shows."""
    mark = "" if conclusion_of(difference) == "no difference shown" else " *"
    if corrected.num_intervals > 1 and corrected.conclusion != "no difference shown":
        mark = " **"
    return f"{signed(difference, digits)}{mark}"


def _marks_note(num_intervals: int) -> str:
    """Explain the marks of a table of so many differences."""
    own = "Marks: * the difference's own 95% interval, as printed, excludes 0"
    if num_intervals == 1:
        return f"{own}."
    return (
        f"{own}; ** also its interval corrected for the {num_intervals} intervals of this table (Bonferroni: each at "
        f"the level 1 - 0.05/{num_intervals}). Only ** shows a difference."
    )


def _values(estimates: Iterable[Estimate | None]) -> tuple[str, ...]:
    return tuple("-" if estimate is None else f"{estimate.value:.3f}" for estimate in estimates)


def _shown(difference: PairedDifference, a: str, b: str) -> tuple[str, str]:
    return signed(difference.difference), with_names(difference.conclusion, a, b)


def equal_table(results: ComparisonResults) -> Table:
    """Make the table of pass@1 at equal cost, in every unit."""
    names, two = results.names, results.pair is not None
    rows = []
    for equal in results.equal:
        row = (amount(equal.amount, equal.unit), *_values(equal.scores))
        shown = ("-", "-") if equal.difference is None else _shown(equal.difference, names[0], names[1])
        rows.append((*row, *shown) if two else row)
    notes = ["At the largest cost that every run reached, on straight lines between its evaluations."]
    if any(equal.not_evaluated for equal in results.equal):
        notes.append(_NOT_KNOWN)
    columns = ("spent", *names, *(("difference", "conclusion") if two else ()))
    return Table("pass@1 at equal cost", columns, tuple(rows), tuple(notes), frozenset({0, 4} if two else {0}))


def equal_score_table(results: ComparisonResults) -> Table:
    """Make the table of the coverage that each arm had where its pass@1 was the same."""
    equal, unit, first = results.equal_score, results.comparison.unit, results.names[0]
    assert equal is not None
    rows = []
    for arm in equal.arms:
        spent = "-" if arm.spent is None else short_amount(arm.spent, unit)
        coverage = "-" if arm.coverage is None else interval(arm.coverage)
        shown = "-", "-"
        if arm.difference is not None and arm.corrected is not None:
            marked = _marked(arm.difference, arm.corrected) if equal.num_differences > 1 else signed(arm.difference)
            shown = marked, with_names(arm.corrected.conclusion, first, arm.arm)
        rows.append((arm.arm, spent, coverage, *shown))
    notes = [
        "Where the mean curve of an arm's runs first reached this pass@1, the highest that all of them reached, on "
        "straight lines between evaluations."
    ]
    if equal.num_differences > 1:
        notes.append(f"{_marks_note(equal.num_differences)} The conclusion uses the corrected interval.")
    if any(arm.coverage is None for arm in equal.arms):
        notes.append(
            "-: the arm had passed this pass@1 before its first evaluation; a larger --marks adds earlier "
            "evaluation points."
        )
    if equal.not_risen:
        notes.append(f"Left out, because their pass@1 is not shown to have risen: {', '.join(equal.not_risen)}.")
    columns = ("arm", UNIT_WORDS[unit], f"pass@{equal.k}", f"minus {first}", "conclusion")
    title = f"pass@{equal.k} where pass@1 was {equal.level:.3f}"
    return Table(title, columns, tuple(rows), tuple(notes), frozenset({0, 4}))


def against_first_table(results: ComparisonResults) -> Table:
    """Make the table of every later arm of a sweep minus the first, at equal cost in every unit."""
    first, ks = results.names[0], results.end_ks
    rows = []
    for row in results.against_first:
        unit = row.equal[1].unit
        counted_in = {"seconds": "", "unique_tokens": " tokens"}.get(unit, f" {unit}")
        cells = [f"{row.arm}, {short_amount(row.equal[1].amount, unit)}{counted_in}"]
        for k in ks:
            difference, corrected = row.equal[k].difference, row.corrected[k]
            if difference is None or corrected is None:
                cells.append("-")
            else:
                cells.append(_marked(difference.difference, corrected))
        rows.append(tuple(cells))
    number = sum(c is not None for row in results.against_first for c in row.corrected.values())
    notes = [
        "At the largest cost that every run of the two arms reached, on straight lines between evaluations; tokens are "
        "unique tokens.",
        *([_marks_note(number)] if number else []),
    ]
    if any(equal.not_evaluated for row in results.against_first for equal in row.equal.values()):
        notes.append(_NOT_KNOWN)
    columns = ("arm, spent", *(f"pass@{k}" for k in ks))
    return Table(f"Every arm minus {first}, at equal cost", columns, tuple(rows), tuple(notes))


def frontier_table(frontier: Frontier, results: ComparisonResults) -> Table:
    """Make the table of every arm's score at every budget, the best of each marked."""
    unit = results.comparison.unit
    best = {b.eval_point: b for b in frontier.best if not b.is_tied}
    rows = []
    for eval_point in results.comparison.eval_points:
        cells = []
        for name, point in frontier.at(eval_point).items():
            cell = f"{point.score.value:.3f}" if point.matched else f"({point.score.value:.3f})"
            if eval_point in best and best[eval_point].arm == name:
                cell += "**" if best[eval_point].lead_shown else "*"
            cells.append(cell)
        rows.append((short_amount(eval_point, unit), *cells))
    notes = ["* best at that budget; ** and its lead over the second is shown (the 95% interval lies above 0)"]
    if not all(point.matched for point in frontier.points):
        notes.append(f"(in brackets): a run overshot the budget by over {TOLERANCE:.0%}: not compared there")
    title = f"{frontier.measure.name} by budget"
    return Table(title, (UNIT_WORDS[unit], *results.names), tuple(rows), tuple(notes))


def best_table(frontier: Frontier, results: ComparisonResults) -> Table:
    """Make the table of the best arm at every budget."""
    unit, measure = results.comparison.unit, frontier.measure.name
    rows = tuple(
        (
            short_amount(b.eval_point, unit),
            b.arm,
            interval(frontier.at(b.eval_point)[b.arm].score),
            b.second,
            signed(b.lead),
        )
        for b in frontier.best
    )
    columns = (UNIT_WORDS[unit], "best", measure, "second", "lead")
    return Table(f"The best arm by budget, in {measure}", columns, rows, words=frozenset({0, 1, 3}))


def token_table(results: ComparisonResults) -> Table:
    """Make the table of scores and tokens (the paper's Table 3)."""
    tasks = list(dict.fromkeys(e.task for e in results.efficiency))
    if results.pair is None:
        tasks = tasks[:1]  # of a sweep all prompts together; tasks are in the record
    rows = []
    for task in tasks:
        for e in (e for e in results.efficiency if e.task == task):
            per_thousand = "-" if e.per_thousand is None else significant_interval(e.per_thousand)
            name = task if e.arm == "start" else ""
            rows.append((name, e.arm, f"{e.score.value:.3f}", significant_interval(e.tokens), per_thousand))
    columns = ("task", "arm", "pass@1", "tokens per\nresponse", "correct per\n1,000 tokens")
    return Table("Scores and tokens of the evaluations", columns, tuple(rows), words=frozenset({0, 1}))


def task_tables(results: ComparisonResults) -> list[Table]:
    """Make the tables of scores by task: for two arms with the trends, for more one for each measure."""
    arms = results.names

    def scores(index: int, k: int) -> tuple[str, ...]:
        task = results.tasks[index]
        return _values((task.start[k], *(task.arms[name][k] for name in arms)))

    names = [f"{t.task} ({t.num_prompts})" for t in results.tasks]
    if results.pair is None:
        tables = []
        for k in results.end_ks:
            rows = tuple((name, *scores(i, k)) for i, name in enumerate(names))
            notes = ("In brackets: prompts. Intervals are in the record.",)
            tables += Table(f"pass@{k} by task", ("task", "start", *arms), rows, notes).parts()
        return tables
    rows = tuple(
        (name if k == 1 else "", f"pass@{k}", *scores(i, k), signed(results.tasks[i].differences[k].difference))
        for i, name in enumerate(names)
        for k in results.end_ks
    )
    columns = ("task", "score", "start", *arms, "difference")
    trends = tuple(
        (t.task, signed(t.change_a), signed(t.change_b), with_names(t.kind, *arms)) for t in results.pair.trends
    )
    heading = ("task", *(f"{name}\nsince the start" for name in arms), "trend")
    return [
        Table("Scores by task", columns, rows, ("In brackets: prompts.",)),
        Table("Trends of pass@1 by task", heading, trends, words=frozenset({0, 3})),
    ]


def coverage_table(results: ComparisonResults) -> Table:
    """Make the table of prompts gained and lost since the start."""
    k, comparison = results.ks[-1], results.comparison
    rows = tuple(
        (
            c.arm,
            spread_text(c.gained),
            spread_text(c.lost),
            f"{c.by_chance.mean:.1f}",
            f"{c.expected_end.mean:.1f}",
            _marked(c.expected_change, c.corrected, digits=1),
        )
        for c in results.coverage
    )
    notes = [
        f"Of {len(comparison.prompts)} prompts. Gained: none of {comparison.num_samples} responses correct at the "
        "start and at least one now; lost: the reverse; mean over runs (smallest-largest). By luck: as many gains, and "
        f"as many losses, if no pass rate had changed. Expected: prompts solved in {k} "
        f"{'attempts' if k > 1 else 'attempt'}, and their change since the start.",
    ]
    if results.pair is not None:
        c, (a, b) = results.pair.coverage, results.names
        notes.append(
            f"Solved by most runs of {b} alone: {len(c.only_b)}; of {a} alone: {len(c.only_a)}; of both: {c.both}; of "
            f"neither: {c.neither}. Expected in {k}: {b} minus {a} {signed(c.expected, 1)}."
        )
    notes.append(_marks_note(len(results.coverage)))
    columns = ("arm", "gained", "lost", "by luck", f"expected\nin {k}", "change")
    return Table("Prompts gained and lost since the start", columns, rows, tuple(notes))


def spread_text(values: Spread) -> str:
    """Return a mean over runs with its range; the number alone if all runs have the same."""
    low, high = (f"{v:,.0f}" if v == round(v) else f"{v:,.1f}" for v in (values.least, values.most))
    return low if values.least == values.most else f"{values.mean:,.1f} ({low}-{high})"


def settings_table(results: ComparisonResults) -> Table:
    """Make the table of the settings in which the arms differ; a row for each arm if the values are long."""
    arms = results.comparison.arms
    title = "Settings in which the arms differ"
    values = [_shown_settings(arm) for arm in arms]
    if len(arms) == 2 or max(len(value) for of_arm in values for value in of_arm.values()) <= _LONGEST_VALUE:
        names = dict.fromkeys(name for of_arm in values for name in of_arm)
        rows = tuple((name, *(of_arm.get(name, "-") for of_arm in values)) for name in names)
        words = frozenset({0, 1, 2} if len(arms) == 2 else {0})
        return Table(title, ("setting", *results.names), rows, words=words)
    rows = tuple(
        (arm.name, ", ".join(f"{n}: {v}" for n, v in of_arm.items())) for arm, of_arm in zip(arms, values, strict=True)
    )
    return Table(title, ("arm", "settings"), rows, words=frozenset({0, 1}))


def _shown_settings(arm: Arm) -> dict[str, str]:
    """Return the settings in which an arm differs, and its recipe unless its title repeats them all."""
    repeated = all(f"{name.rpartition('.')[2]}={value}" in arm.title for name, value in arm.differs.items())
    return {**({} if not arm.title or repeated else {"recipe": arm.title}), **arm.differs}
