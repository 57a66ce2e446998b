"""The tables of a comparison, laid out like those of the paper.

In: what a comparison shows. Out: tables of text: what the arms spent and scored, how they used their samples, pass@k,
paired tests, scores per token, tasks with their kinds of trajectory, prompts gained and lost, differing settings; for
more than two arms the frontier in place of the paired tests. Lengthy lists (all marks of all runs, all prompts) are
left to the record.

Source: the layout of BroRL (arXiv 2510.01180), Tables 1 to 5.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from brorl.comparison.arms import Arm
from brorl.comparison.coverage import CoverageChange
from brorl.comparison.equal_score import EqualScore
from brorl.comparison.findings import ArmAt, Findings, ends_of, tied
from brorl.comparison.frontier import Frontier
from brorl.comparison.matching import TOLERANCE, Spread
from brorl.comparison.paired import PairedDifference, TTest, Verdict
from brorl.comparison.token_efficiency import TokenEfficiency
from brorl.cost import UNIT_WORDS, amount, short_amount
from brorl.format import interval, p_value, short, short_time, signed, significant_interval
from brorl.table import Table

_MOST_MARKS = 4  # rows of an arm in the first table of two arms
_NOT_KNOWN = "Empty: the arm was not evaluated close enough to that cost; a larger --marks adds evaluations."
_LONGEST_VALUE = 9  # characters of a setting in a column


def tables_of(found: Findings) -> list[Table]:
    """Return the tables of a comparison, in the order of reading."""
    settings = settings_table(found).parts() if any(arm.differs for arm in found.comparison.arms) else []
    result = [*settings] if found.key else []
    result += [cost_table(found), use_table(found)]
    if found.pair is not None:
        result += [pass_table(found), paired_table(found)]
    if found.equal:
        result += equal_table(found).parts()
    if found.equal_score is not None:
        result.append(equal_score_table(found.equal_score, found))
    if found.against_first:
        result += against_first_table(found).parts()
    for line in found.frontiers:
        result += frontier_table(line, found).parts()
    if found.frontiers and found.frontiers[0].best:
        result.append(best_table(found.frontiers[0], found))
    result.append(token_table(found))
    if found.tasks:
        result += [*task_tables(found)]
    result.append(coverage_table(found))
    return result if found.key else [*result, *settings]


def cost_table(found: Findings) -> Table:
    """Make the table of what each arm spent and scored (the paper's Table 1)."""
    comparison = found.comparison
    columns = ("arm", "N", "prompts\n/step", "steps", "samples", "unique\ntokens", "time", "pass@1")
    marks = shown_marks(comparison.marks) if found.pair is not None else comparison.marks[-1:]
    rows = [
        ("start", *[""] * 6, interval(found.start[1])),
        *(_cost_row(arm, at) for arm in comparison.arms for at in found.arms[arm.name] if at.mark in marks),
    ]
    notes = [
        f"Means over runs ({seeds_words(comparison.arms)} an arm); brackets: 95% intervals. Samples before dynamic "
        f"sampling. Evaluations are not part of any cost. Machine: {comparison.machine}."
    ]
    if not all(at.matched for ats in found.arms.values() for at in ats if at.mark in marks):
        notes.append(f"* a run spent over {TOLERANCE:.0%} more than the mark: not compute-matched there")
    strong = frozenset(i for i, row in enumerate(rows) if i + 1 == len(rows) or row[0] != rows[i + 1][0]) - {0}
    title = f"What the arms spent and scored, up to {amount(found.budget, comparison.unit)} each"
    return Table(title, columns, tuple(rows), tuple(notes), strong=strong if len(marks) > 1 else frozenset())


def shown_marks(marks: tuple[float, ...]) -> tuple[float, ...]:
    """Choose at most 4 marks, spread evenly over all and with the last."""
    if len(marks) <= _MOST_MARKS:
        return marks
    last = len(marks) - 1
    return tuple(marks[round(last * (i + 1) / _MOST_MARKS)] for i in range(_MOST_MARKS))


def _cost_row(arm: Arm, at: ArmAt) -> tuple[str, ...]:
    costs = at.costs
    return (
        arm.name if at.matched else f"{arm.name} *",
        rollouts(arm.num_rollouts),
        f"{arm.prompts_per_step:,}",
        f"{costs.steps.mean:,.0f}",
        short(costs.samples.mean),
        short(costs.unique_tokens.mean),
        short_time(costs.seconds.mean),
        interval(at.pass_at[1]),
    )


def use_table(found: Findings) -> Table:
    """Make the table of dynamic-sampling pass rates and throughput (the paper's Table 2)."""
    columns = ("arm", "both\noutcomes", "samples\n/s", "generated\n/s", "unique\ntokens/s", "sampled per\nunique token")
    rows = [
        (
            t.arm,
            "-" if t.informative_share is None else f"{t.informative_share.mean:.1%}",
            *(
                "-" if rate is None else short(rate.mean)
                for rate in (t.samples_per_s, t.generated_per_s, t.unique_tokens_per_s)
            ),
            "-" if t.tokens_per_unique is None else f"{t.tokens_per_unique.mean:,.2f}",
        )
        for t in found.training
    ]
    notes = (
        "Both outcomes: share of sampled groups with correct and incorrect rollouts, which is what dynamic sampling "
        "keeps. Samples/s: per second of the run; generated/s: per second of generation alone. Means over whole runs.",
    )
    return Table("How the training's samples were used", columns, tuple(rows), notes)


def pass_table(found: Findings) -> Table:
    """Make the table of pass@k of two arms."""
    assert found.pair is not None
    a, b = (arm.name for arm in found.comparison.arms)
    rows = []
    for k in found.ks:
        difference = found.pair.differences[k]
        at_a, at_b = (found.arms[name][-1].pass_at[k] for name in (a, b))
        values = (f"{e.value:.3f}" for e in (found.start[k], at_a, at_b))
        rows.append((f"pass@{k}", *values, signed(difference.difference), _lead(difference, a, b)))
    worst, worst_at = found.pair.worst, found.pair.worst_at
    if worst is not None and worst_at is not None:
        values = (f"{e.value:.3f}" for e in worst_at)
        rows.append((f"worst@{found.largest_k}", *values, signed(worst.difference), _lead(worst, a, b)))
    notes = [
        f"Over {len(found.comparison.prompts)} held-out prompts with {found.comparison.num_samples} responses each."
    ]
    if worst is not None:
        notes.append(f"worst@{found.largest_k}: the chance that all of {found.largest_k} responses are correct.")
    title = f"{b} against {a} after {amount(found.budget, found.comparison.unit)}"
    columns = ("score", "start", a, b, "difference", "what it shows")
    return Table(title, columns, tuple(rows), tuple(notes), words=frozenset({0, 5}))


def paired_table(found: Findings) -> Table:
    """Make the table of the paired tests."""
    assert found.pair is not None
    a, b = (arm.name for arm in found.comparison.arms)
    rows: list[tuple[str, ...]] = []
    for k in ends_of(found.ks):
        d = found.pair.differences[k]
        rows += [
            (f"pass@{k}", f"over {d.covers}", signed(d.difference), "", "", ""),
            ("", "bootstrap", signed(d.bootstrap), "", "", ""),
            ("", f"{d.num_prompts:,} prompts", f"{d.difference.value:+.3f}", *_test(d.prompt_test)),
        ]
        if d.seed_test is not None and d.seed_interval is not None:
            seeds = d.num_seeds[0] if d.seeds_paired else f"{d.num_seeds[0]} + {d.num_seeds[1]}"
            rows.append(("", f"{seeds} seeds", signed(d.seed_interval), *_test(d.seed_test)))
    notes = (
        f"The verdict uses the first line of each score. The test over prompts, which is the paper's, does not allow "
        f"for other seeds, and the test over seeds does not allow for other prompts. One-tailed p: for {b} above {a}.",
    )
    columns = ("score", "test", "difference", "t (df)", "p, one-\ntailed", "p, two-\ntailed")
    return Table(f"Paired tests: {b} less {a}", columns, tuple(rows), notes, words=frozenset({0, 1}))


def _test(test: TTest | None) -> tuple[str, str, str]:
    if test is None:
        return "-", "-", "-"
    degrees = f"{test.degrees:,.0f}" if test.degrees == round(test.degrees) else f"{test.degrees:,.1f}"
    return f"{test.t:.2f} ({degrees})", p_value(test.p_greater), p_value(test.p_two_sided)


def _shown(verdict: Verdict, a: str, b: str) -> str:
    return {"A leads": f"{a} leads", "B leads": f"{b} leads"}.get(verdict, verdict)


def _lead(difference: PairedDifference, a: str, b: str) -> str:
    return _shown(difference.verdict, a, b)


def equal_table(found: Findings) -> Table:
    """Make the table of pass@1 at equal cost, in every unit."""
    names = [arm.name for arm in found.comparison.arms]
    rows = []
    for equal in found.equal:
        row = [
            amount(equal.amount, equal.unit),
            *("" if score is None else f"{score.value:.3f}" for score in equal.scores),
        ]
        if equal.difference is not None:
            row += [signed(equal.difference.difference), _lead(equal.difference, names[0], names[1])]
        elif found.pair is not None:
            row += ["", ""]
        rows.append(tuple(row))
    notes = ["At the largest cost that every run reached, on straight lines between its evaluations."]
    if any(equal.not_evaluated for equal in found.equal):
        notes.append(_NOT_KNOWN)
    more = () if found.pair is None else ("difference", "what it shows")
    words = frozenset({0}) if found.pair is None else frozenset({0, 4})
    return Table("pass@1 at equal cost", ("spent", *names, *more), tuple(rows), tuple(notes), words)


def equal_score_table(equal: EqualScore, found: Findings) -> Table:
    """Make the table of the coverage that each arm had where its pass@1 was the same."""
    unit, first = found.comparison.unit, found.comparison.arms[0].name
    rows = []
    for one in equal.arms:
        spent = "" if one.spent is None else short_amount(one.spent, unit)
        coverage = "" if one.coverage is None else interval(one.coverage)
        if one.difference is None or one.verdict is None or one.arm == first:
            rows.append((one.arm, spent, coverage, "", ""))
        else:
            rows.append((one.arm, spent, coverage, signed(one.difference), _shown(one.verdict, first, one.arm)))
    notes = [
        "Where the mean curve of an arm's runs first reached this pass@1, the highest that all of them reached, on "
        "straight lines between evaluations."
    ]
    if any(one.coverage is None for one in equal.arms):
        notes.append("Empty: the arm had passed this pass@1 before its first evaluation. --marks adds earlier ones.")
    if equal.not_risen:
        notes.append(f"Left out, since their pass@1 is not shown to have risen: {', '.join(equal.not_risen)}.")
    columns = ("arm", UNIT_WORDS[unit], f"pass@{equal.k}", f"less {first}", "what it shows")
    title = f"pass@{equal.k} where pass@1 was {equal.level:.3f}"
    return Table(title, columns, tuple(rows), tuple(notes), frozenset({0, 4}))


def against_first_table(found: Findings) -> Table:
    """Make the table of every later arm of a sweep less the first, at equal cost in every unit."""
    first = found.comparison.arms[0].name
    ends = ends_of(found.ks)
    rows = []
    for one in found.against_first:
        spent, unit = short_amount(one.equal[1].amount, one.equal[1].unit), one.equal[1].unit
        counted = {"seconds": "", "unique_tokens": " tokens"}.get(unit, f" {unit}")
        cells = [f"{one.arm}, {spent}{counted}"]
        for k in ends:
            difference = one.equal[k].difference
            shown = "" if difference is None or difference.verdict == "no difference shown" else " *"
            cells.append("" if difference is None else f"{signed(difference.difference)}{shown}")
        rows.append(tuple(cells))
    filled = sum(one.equal[k].difference is not None for one in found.against_first for k in ends)
    notes = [
        "At the largest cost that every run of the two arms reached, on straight lines between evaluations; tokens are "
        f"unique tokens. * the 95% interval over prompts and seeds excludes 0; of {filled} such intervals, one in 20 "
        "would by chance."
    ]
    if any(equal.not_evaluated for one in found.against_first for equal in one.equal.values()):
        notes.append(_NOT_KNOWN)
    columns = ("arm, spent", *(f"pass@{k}" for k in ends))
    return Table(f"Every arm less {first}, at equal cost", columns, tuple(rows), tuple(notes))


def frontier_table(line: Frontier, found: Findings) -> Table:
    """Make the table of every arm's score at every budget, the best of each marked."""
    unit = found.comparison.unit
    names = [arm.name for arm in found.comparison.arms]
    best = {b.mark: b for b in line.best}
    rows = []
    for mark in found.comparison.marks:
        cells = {p.arm: f"{p.score.value:.3f}" for p in line.points if p.mark == mark}
        cells |= {p.arm: f"({cells[p.arm]})" for p in line.points if p.mark == mark and p.why_left_out}
        if mark in best and not tied(best[mark]):
            winner = best[mark]
            cells[winner.arm] = f"{cells[winner.arm]}{'**' if winner.lead_shown else '*'}"
        rows.append((short_amount(mark, unit), *(cells[name] for name in names)))
    notes = ["* best at that budget; ** and its lead over the second is shown (the 95% interval lies above 0)"]
    if any(point.why_left_out for point in line.points):
        notes.append(f"(in brackets): a run overshot the mark by over {TOLERANCE:.0%}: not compared there")
    title = f"{measure_name(line)} by budget"
    return Table(title, (UNIT_WORDS[unit], *names), tuple(rows), tuple(notes))


def best_table(line: Frontier, found: Findings) -> Table:
    """Make the table of the best arm at every budget."""
    unit = found.comparison.unit
    points = {(p.mark, p.arm): p.score for p in line.points}
    rows = [
        (
            short_amount(b.mark, unit),
            b.arm,
            interval(points[b.mark, b.arm]),
            f"{b.best_share:.0%}",
            b.second,
            signed(b.lead),
        )
        for b in line.best
    ]
    notes = ("Share: of bootstrap resamples of prompts and seeds in which it is the best.",)
    columns = (UNIT_WORDS[unit], "best", measure_name(line), "share", "second", "lead")
    return Table(f"The best arm by budget, in {measure_name(line)}", columns, tuple(rows), notes, frozenset({0, 1, 4}))


def measure_name(line: Frontier) -> str:
    """Return what a frontier measures: pass@1, pass@16, worst@16."""
    return "pass@1" if line.k == 1 else f"{'pass' if line.measure == 'best@k' else 'worst'}@{line.k}"


def token_table(found: Findings) -> Table:
    """Make the table of scores and tokens (the paper's Table 3)."""
    tasks = list(dict.fromkeys(e.task for e in found.efficiency))
    if len(found.comparison.arms) > 2:
        tasks = tasks[:1]  # of a sweep all prompts together; tasks are in the record
    rows = []
    for task in tasks:
        for e in found.efficiency:
            if e.task == task:
                row = (e.arm, f"{e.score.value:.3f}", significant_interval(e.tokens), _per_thousand(e))
                rows.append((task if e.arm == "start" else "", *row))
    columns = ("task", "arm", "pass@1", "tokens per\nresponse", "correct per\n1,000 tokens")
    title = "Scores and tokens of the evaluations"
    return Table(title, columns, tuple(rows), words=frozenset({0, 1}))


def _per_thousand(efficiency: TokenEfficiency) -> str:
    return "-" if efficiency.per_thousand is None else significant_interval(efficiency.per_thousand)


def task_tables(found: Findings) -> list[Table]:
    """Make the tables of scores by task: of two arms with the kind of trajectory, of more one for each measure."""
    arms = [arm.name for arm in found.comparison.arms]
    ks = list(found.tasks[0].start)
    if found.pair is None:
        made = []
        for k in ks:
            rows = [
                (
                    f"{t.task} ({t.num_prompts})",
                    *(f"{e.value:.3f}" for e in (t.start[k], *(t.arms[a][k] for a in arms))),
                )
                for t in found.tasks
            ]
            notes = ("In brackets: prompts. Intervals are in the record.",)
            made += Table(f"pass@{k} by task", ("task", "start", *arms), tuple(rows), notes).parts()
        return made
    rows = []
    for t in found.tasks:
        for k in ks:
            values = (f"{e.value:.3f}" for e in (t.start[k], *(t.arms[a][k] for a in arms)))
            name = f"{t.task} ({t.num_prompts})" if k == ks[0] else ""
            rows.append((name, f"pass@{k}", *values, signed(t.differences[k].difference)))
    scores = Table(
        "Scores by task", ("task", "score", "start", *arms, "difference"), tuple(rows), ("In brackets: prompts.",)
    )  # fmt: skip
    kinds = Table(
        "Kinds of pass@1 trajectory by task",
        ("task", f"{arms[0]}\nsince the start", f"{arms[1]}\nsince the start", "kind"),
        tuple((t.task, signed(t.change_a), signed(t.change_b), kind_words(t.kind, *arms)) for t in found.pair.kinds),
        words=frozenset({0, 3}),
    )
    return [scores, kinds]


def coverage_table(found: Findings) -> Table:
    """Make the table of prompts gained and lost since the start."""
    k = found.largest_k
    rows = [
        (
            c.arm,
            spread_text(c.gained),
            spread_text(c.lost),
            f"{c.by_chance.mean:.1f}",
            f"{c.expected_end.mean:.1f}",
            _change(c),
        )
        for c in found.coverage
    ]
    notes = [
        f"Of {len(found.comparison.prompts)} prompts. Gained: none of {found.comparison.num_samples} responses "
        "correct at the start and one at least now; lost: the reverse; mean over runs (least-most). By luck: as "
        f"many gains, and as many losses, if no pass rate had changed. Expected: prompts solved in {k} "
        f"{'attempts' if k > 1 else 'attempt'}, and their change since the start."
    ]
    if found.pair is not None:
        c = found.pair.coverage
        a, b = (arm.name for arm in found.comparison.arms)
        notes.append(
            f"Solved by most runs of {b} alone: {len(c.only_b)}; of {a} alone: {len(c.only_a)}; of both: {c.both}; of "
            f"neither: {c.neither}. Expected in {k}: {b} less {a} {signed(c.expected, 1)}."
        )
    columns = ("arm", "gained", "lost", "by luck", f"expected\nin {k}", "change")
    return Table("Prompts gained and lost since the start", columns, tuple(rows), tuple(notes))


def spread_text(values: Spread) -> str:
    """Return a mean over runs with its range; the number alone if all runs have the same."""
    low, high = (f"{v:,.0f}" if v == round(v) else f"{v:,.1f}" for v in (values.least, values.most))
    return low if values.least == values.most else f"{values.mean:,.1f} ({low}-{high})"


def _change(change: CoverageChange) -> str:
    return signed(change.expected_change, 1)


def settings_table(found: Findings) -> Table:
    """Make the table of the settings in which the arms differ; a row for each arm where the values are long."""
    arms = found.comparison.arms
    title = "Settings in which the arms differ"
    told = [_told_settings(arm) for arm in arms]
    names = _ordered(name for of_arm in told for name in of_arm)
    if len(arms) == 2 or max(len(value) for of_arm in told for value in of_arm.values()) <= _LONGEST_VALUE:
        rows = tuple((name, *(of_arm.get(name, "-") for of_arm in told)) for name in names)
        words = frozenset({0, 1, 2} if len(arms) == 2 else {0})
        return Table(title, ("setting", *(arm.name for arm in arms)), rows, words=words)
    each = tuple(
        (arm.name, ", ".join(f"{n}: {v}" for n, v in of_arm.items())) for arm, of_arm in zip(arms, told, strict=True)
    )
    return Table(title, ("arm", "settings"), each, words=frozenset({0, 1}))


def _told_settings(arm: Arm) -> dict[str, str]:
    """Return the settings in which an arm differs, and its recipe unless its title repeats them all."""
    repeated = all(f"{name.rpartition('.')[2]}={value}" in arm.title for name, value in arm.differs.items())
    return {**({} if not arm.title or repeated else {"recipe": arm.title}), **arm.differs}


def seeds_words(arms: Sequence[Arm]) -> str:
    """Return how many seeds arms have: 5 seeds, or 3 to 5 seeds."""
    numbers = sorted({len(arm.trajectories) for arm in arms})
    if len(numbers) > 1:
        return f"{numbers[0]} to {numbers[-1]} seeds"
    return f"{numbers[0]} {'seed' if numbers[0] == 1 else 'seeds'}"


def rollouts(number: int | None) -> str:
    """Return N as a table holds it."""
    return "adapt." if number is None else f"{number:,}"


def kind_words(kind: str, a: str, b: str) -> str:
    """Return a kind of trajectory with the names of the arms for A and B."""
    return re.sub(r"\b[AB]\b", lambda letter: a if letter[0] == "A" else b, kind)


def _ordered(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
