"""The answer of a comparison: a sentence, its limits, the next command, and files for people and for programs.

The answer begins with the finding: an arm that won, or "No difference shown". It calls nothing matched or shown that is
not. With two arms, the second is measured against the first. With more, the answer names the best arm at the budget.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from rich.text import Text

from brorl.comparison.figure import make_figure
from brorl.comparison.results import TOLERANCE, ComparisonResults, results_of, with_names
from brorl.comparison.scores import Arm, Comparison, RunScores, score_at, scores_at, start_scores
from brorl.comparison.spec import read_comparison
from brorl.comparison.tables import tables_of
from brorl.cost import UNIT_WORDS, Unit, amount, short_amount
from brorl.evaluation.paired import PairedDifference
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.format import Estimate, exact, interval, listed, p_value, shell_command, signed
from brorl.reporting.figure import PNG, ResultFigure
from brorl.reporting.frame import AnswerParts, answer_page
from brorl.storage import json_ready, replace_file, storage_errors
from brorl.table import Result, Table

_ROLLOUTS = "rollouts_per_prompt"
_EXPECTED = {_ROLLOUTS, "prompts_per_step"}  # settings that a comparison of N changes
_SLOW = 0.7  # a run with fewer steps than this fraction of its siblings' steps was disturbed
_FEWEST_SIBLINGS = 3  # fewer runs of an arm have no meaningful median
MOST_CAVEATS = 3  # show at most this many; the record has all


def sentences_of(results: ComparisonResults) -> tuple[str, ...]:
    """Return the answer; if the arms are named A, B, ..., also a sentence that explains the letters."""
    key = [f"{'; '.join(f'{letter} is {name}' for letter, name in results.key.items())}."] if results.key else []
    return answer_of(results), *key


def answer_of(results: ComparisonResults) -> str:
    """Return the answer in one sentence: whether the second of two arms won, or which of more arms is best."""
    return _sweep_answer(results) if results.pair is None else _pair_answer(results, results.pair[1])


def caveats_of(results: ComparisonResults) -> tuple[str, ...]:
    """Return all limits of the answer, the gravest first: faults of the comparison, then its uncertainty."""
    comparison = results.comparison
    unit, whole = comparison.unit, amount(results.budget, comparison.unit)
    ended = [
        f"{arm.name}, seed {run.seed}, ended early at {amount(spent, unit)} of {whole} ({run.ended_early}); its last "
        "score counts, because it could not spend more."
        for arm in comparison.arms
        for run in arm.runs
        if (spent := run.scores[-1].cost.of(unit)) < results.budget
    ]
    machine = f", and for this machine ({comparison.machine})" if unit == "seconds" else ""
    caveats = [
        "" if results.matched else match_words(results),
        " ".join(_slow_runs(results)),
        " ".join(ended),
        _changed_at_equal_budget(results),
        unverified_words(comparison),
        _differing_settings(comparison),
        " ".join(f"{note[0].upper()}{note[1:]}." for note in comparison.notes),
        " ".join(_certainty(results)),
        _seeds_needed(results),
        f"This holds for this checkpoint ({comparison.checkpoint}), this data and this budget{machine}: a longer run "
        "may rank the arms differently.",
    ]
    return tuple(caveat for caveat in caveats if caveat)


def match_words(results: ComparisonResults) -> str:
    """Return the unit in which the arms are matched, or the arms that are not matched, with the fix."""
    unit, budget = results.comparison.unit, results.budget
    at_budget = [(name, points[-1]) for name, points in results.at_eval_points.items()]
    unmatched = [(name, at.costs[unit].most) for name, at in at_budget if not at.matched]
    if not unmatched:
        return (
            f"Compute-matched in {UNIT_WORDS[unit]}: no run spent over {TOLERANCE:.0%} more than "
            f"{amount(budget, unit)}; evaluations are not counted."
        )
    return " ".join(
        f"NOT compute-matched: {name} spent up to {amount(spent, unit)}, {spent / budget - 1:.0%} more than "
        f"{amount(budget, unit)} (at most {TOLERANCE:.0%} is allowed), because its last step was long; raise the "
        "budget, or lower its prompts_per_step."
        for name, spent in unmatched
    )


def _pair_answer(results: ComparisonResults, difference: PairedDifference) -> str:
    a, b = results.names
    at_a, at_b = (f"{results.scores.pass_at[name][1].value:.3f}" for name in (a, b))
    matched, shown = results.matched, "No difference shown"
    if difference.conclusion != "no difference shown":
        shown = f"{b if difference.conclusion == 'B leads' else a} {'won' if matched else 'scored higher'}"
        if matched and min(difference.num_seeds) == 1:
            shown += " with this one seed" if max(difference.num_seeds) == 1 else " with these seeds"
    where = f"{amount(results.budget, results.comparison.unit)} of training {'each' if matched else 'or more'}"
    but = "" if matched else ", but the runs are not matched"
    return (
        f"{shown}{but}: at {where}, {b} is {_higher_or_lower(difference.difference)} in pass@1 ({at_b} against {at_a} "
        f"of {a}){_interval_words(difference.difference)}, {results.seeds_text}."
    )


def _sweep_answer(results: ComparisonResults) -> str:
    """Return which arm is best at the whole budget, and whether its lead is shown."""
    budget = amount(results.budget, results.comparison.unit)
    over = [name for name, points in results.at_eval_points.items() if not points[-1].matched]
    best = next((b for b in results.best[1] if b.eval_point == results.budget), None)
    if best is None:
        kept = [name for name in results.names if name not in over]
        who = f"only {kept[0]} kept to it" if kept else "every arm overshot it"
        return f"At {budget} of training nothing can be compared: {who}."
    where = f"Of the arms that kept to {budget} ({listed(over)} did not)" if over else f"At {budget} of training each"
    score = interval(results.scores.pass_at[best.arm][1])
    if best.is_tied:
        return f"{where}, {best.arm} and {best.second} scored the same pass@1, {score}."
    shown = "No winner shown"
    if best.lead_shown:
        shown = f"{best.arm} won{' with this one seed' if results.seeds_text == '1 seed' else ''}"
    return (
        f"{shown}: {where[0].lower()}{where[1:]}, {best.arm} scored the highest pass@1, {score}, "
        f"{_higher_or_lower(best.lead)} than {best.second}{_interval_words(best.lead)}, {results.seeds_text}."
    )


def _slow_runs(results: ComparisonResults) -> Iterator[str]:
    """Name runs that made far fewer steps than their siblings in the same seconds, because the machine was busy."""
    comparison = results.comparison
    for arm in comparison.arms if comparison.unit == "seconds" else ():
        steps = {
            run: score_at(run, "seconds", results.budget).cost.steps for run in arm.runs if run.ended_early is None
        }
        usual = median(steps.values()) if len(steps) >= _FEWEST_SIBLINGS else 0
        for run, made in steps.items():
            if made < _SLOW * usual:
                yield (
                    f"Seed {run.seed} of {arm.name} made {made:,} steps in its time; {usual:,.0f} are usual for "
                    f"{arm.name}. The machine was probably busy with other work, so its scores are too low. To repeat "
                    f"it, delete {run.path} and rerun the command."
                )


def _changed_at_equal_budget(results: ComparisonResults) -> str:
    """Return a sentence if the conclusion would differ at exactly equal spending of all runs."""
    unit = results.comparison.unit
    equal = next((e for e in results.at_equal_cost if e.unit == unit), None)
    there = None if equal is None else equal.differences[1]
    if results.pair is None or equal is None or there is None or there.conclusion == results.pair[1].conclusion:
        return ""
    a, b = results.names
    spent = [
        f"{name} {short_amount(points[-1].costs[unit].mean, unit)}" for name, points in results.at_eval_points.items()
    ]
    return (
        f"The conclusion changes where all runs had spent exactly the same: at {amount(equal.amount, unit)} each, "
        f"{with_names(there.conclusion, a, b)}: {b} is {_higher_or_lower(there.difference)} in pass@1"
        f"{_interval_words(there.difference)}, on straight lines between evaluations. At their ends they had spent "
        f"{listed(spent)}, because a run ends with the step that reaches the budget."
    )


def unverified_words(comparison: Comparison) -> str:
    """Return a sentence about the held-out prompts that are left out, if any."""
    if not comparison.num_left_out:
        return ""
    number = len(comparison.prompts) + comparison.num_left_out
    return (
        f"{comparison.num_left_out} of {number} held-out prompts are left out: in an evaluation of a run, responses to "
        "them could not be verified because of an infrastructure failure."
    )


def _certainty(results: ComparisonResults) -> Iterator[str]:
    """Yield the seeds, the variation that the intervals cover, and a test that disagrees."""
    pair = None if results.pair is None else results.pair[1]
    one_seed = min(len(arm.runs) for arm in results.comparison.arms) == 1
    covers = {
        "prompts and seeds": "other prompts and other seeds",
        "prompts": "other prompts, not for other seeds",
        "seeds": "other seeds, not for other prompts",
        "nothing": "neither other prompts nor other seeds",
    }[pair.covers if pair else "prompts" if one_seed else "prompts and seeds"]
    yield f"{results.seeds_text.capitalize()} an arm: intervals (95%) allow for {covers}."
    if one_seed:
        yield "With one seed, only these trained models are compared; another seed may reverse the order."
    elif pair and pair.seeds_ahead is not None:
        yield f"{results.names[1]} was ahead in {pair.seeds_ahead} of {pair.num_seeds[0]} seeds."
    test = pair.prompt_test if pair and pair.conclusion == "no difference shown" else None
    if test is not None and test.p_two_sided < 0.05:
        yield (
            f"The t-test over prompts alone would show a difference (two-tailed p = {p_value(test.p_two_sided)}), but "
            "it does not allow for other seeds."
        )


def _seeds_needed(results: ComparisonResults) -> str:
    """Return how many seeds would show a difference of 0.02 in pass@1, for the arm that needs the most."""
    known = {arm: needed for arm, needed in results.seeds_needed.items() if needed is not None}
    if not known:
        return "The seeds that a small difference takes are unknown: that needs 2 seeds of each arm, and 2 prompts."
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


def _differing_settings(comparison: Comparison) -> str:
    """Warn if several settings differ, and not only N and the prompts per step."""
    names = sorted({name for arm in comparison.arms for name in arm.differs})
    others = [name for name in names if name not in _EXPECTED]
    if not others or len(names) == 1:
        return ""
    differing = f"{listed(others)} too" if _ROLLOUTS in names else listed(names)
    return f"The arms differ in {differing}: the result is due to all of these together."


def _higher_or_lower(difference: Estimate) -> str:
    """Return the size of a difference in words: 0.059 lower."""
    size = f"{abs(difference.value):.3f}"
    return "as high" if size == "0.000" else f"{size} {'higher' if difference.value > 0 else 'lower'}"


def _interval_words(difference: Estimate) -> str:
    """Return the interval of a difference, after a comma; nothing if it has none."""
    ends = signed(difference).partition(" ")[2]
    return f", interval {ends}" if ends else ""


_LONGER = 2  # a longer comparison gets this multiple of the budget


def next_command(results: ComparisonResults, folder: Path) -> tuple[str, str]:
    """Return why to run which command after a comparison.

    Two matched arms without a shown difference get more seeds, or more prompts where no number of seeds can show one.
    All others get a larger budget, either to be matched, or because a longer run may rank the arms differently.
    """
    comparison = results.comparison
    recipes = [f"{arm.runs[0].path}.yaml" for arm in comparison.arms]
    seeds = max(len(arm.runs) for arm in comparison.arms)
    unshown = results.pair is not None and results.pair[1].conclusion == "no difference shown"
    needed = next(iter(results.seeds_needed.values()), None)
    why = f"to show a difference of {needed.half_width:g} in pass@1" if needed else ""
    if unshown and results.matched and needed and needed.enough_prompts and needed.seeds > seeds:
        return why, shell_command("compare", folder, "--seeds", needed.seeds)
    budget, more = _LONGER * comparison.budget, list[str]()
    if unshown and results.matched and needed and not needed.enough_prompts:
        budget, seeds = comparison.budget, max(seeds, needed.seeds)
        more = ["--evaluation.num_prompts", str(ceil(needed.prompts / max(len(comparison.task_names()), 1)))]
        why += f", with {needed.prompts:,} held-out prompts (raise data.held_out_fraction too if there are fewer)"
    elif results.matched:
        why = f"to see whether this holds for longer ({amount(budget, comparison.unit)} each)"
    else:
        why = f"to match the arms ({amount(budget, comparison.unit)} each)"
    options = ["--match", comparison.unit, "--budget", exact(budget), "--seeds", str(seeds)]
    options += ["--marks", str(len(comparison.eval_points)), *more]
    return why, shell_command("compare", *recipes, *options)


def comparison_page(results: ComparisonResults, figures: Sequence[Path], following: tuple[str, str]) -> str:
    """Return the page of a comparison, with its tables in the order of reading and its figures (PNG files)."""
    matched = match_words(results)
    title = f"{listed(results.names)}, {amount(results.budget, results.comparison.unit)} each"
    caveats = [line for line in caveats_of(results)[:MOST_CAVEATS] if line != matched]
    return answer_page(
        AnswerParts(
            "brorl compare", title, sentences_of(results), matched, tables_of(results), figures, caveats, following
        )
    )


def comparison_record(results: ComparisonResults) -> dict[str, Any]:
    """Return the content of `comparison.json`: the answer, the conditions, all numbers, and the scores of prompts."""
    comparison, caveats = results.comparison, caveats_of(results)
    conditions = {field.name: getattr(comparison, field.name) for field in fields(comparison)}
    start_P = start_scores(comparison).mean(0)
    end_P = {arm.name: scores_at(comparison, arm, results.budget).mean(0) for arm in comparison.arms}
    record = {
        "verdict": [*sentences_of(results), *caveats[:MOST_CAVEATS]],
        "caveats": caveats,
        **conditions,
        "tolerance": TOLERANCE,
        "matched": results.matched,
        **{field.name: getattr(results, field.name) for field in fields(results) if field.name != "comparison"},
        "arms": [{**vars(arm), "runs": [_run(run, results) for run in arm.runs]} for arm in comparison.arms],
        "prompts": [
            {"id": prompt.id, "source": prompt.source, "start": start_P[i], "arms": {a: p[i] for a, p in end_P.items()}}
            for i, prompt in enumerate(comparison.prompts)
        ],
    }
    plain: dict[str, Any] = json_ready(record)
    return plain


def _run(run: RunScores, results: ComparisonResults) -> dict[str, Any]:
    """Return a run with all its evaluations, also between the evaluation points."""
    num_samples = results.comparison.num_samples
    evaluations = [
        {
            "cost": score.cost,
            "truncation_rate": score.truncation_rate,
            "tokens_per_response": score.sampled_tokens_P.mean() / num_samples,
            "pass_at": {k: pass_at_k(score.num_correct_P, num_samples, k).mean() for k in results.ks},
        }
        for score in run.scores
    ]
    return {**vars(run), "scores": evaluations}


@dataclass(frozen=True, eq=False, repr=False)
class FinishedComparison(Result):
    """A comparison whose runs are complete."""

    path: Path  # folder of the comparison
    results: ComparisonResults  # all numbers, with 95% intervals
    answer: tuple[str, ...]  # sentences; the second one explains the letters, if the arms are named by letters
    caveats: tuple[str, ...]  # limits of the answer, at most three
    tables: tuple[Table, ...]  # the first one shows the answer
    files: tuple[Path, ...]  # `comparison.json`, `comparison.png` and `comparison.html`
    next: tuple[str, str]  # why to run which command next

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms with their runs and evaluations."""
        return self.results.comparison.arms

    @property
    def unit(self) -> Unit:
        """The unit in which the arms are matched; `results.matched` states whether they are."""
        return self.results.comparison.unit

    @property
    def difference(self) -> PairedDifference | None:
        """pass@1 of the second arm minus the first, with its interval and conclusion; None for more than two arms."""
        return None if self.results.pair is None else self.results.pair[1]

    def figure(self) -> ResultFigure:
        """Return the figure of the comparison, that of `comparison.png`, as a matplotlib figure."""
        return make_figure(self.results, self.answer[0])

    def parts(self) -> Iterator[str | Text | Table]:
        """Yield the answer, the table that shows it, its caveats, the files and the next command."""
        yield Text("\n".join(self.answer), style="bold")
        yield from ("", self.tables[0], "")
        yield from (f"- {line}" for line in self.caveats)
        names = ", ".join(file.name for file in self.files[:-1])
        yield f"\nwritten to {self.path}: {names}; all tables and figures: open {self.files[-1]} in a browser"
        yield ": ".join(self.next)

    def __repr__(self) -> str:
        return f"FinishedComparison({str(self.path)!r}: {self.answer[0]})"


def finished_comparison(folder: Path) -> FinishedComparison:
    """Read the runs of a complete comparison, and write its files.

    Raises:
        StorageError: If a file could not be written.
    """
    results = results_of(read_comparison(folder))
    answer, following = sentences_of(results), next_command(results, folder)
    record, figure, page = (folder / f"comparison.{ending}" for ending in ("json", "png", "html"))
    with storage_errors(folder):
        replace_file(record, json.dumps(comparison_record(results), indent=1).encode())
        make_figure(results, answer[0]).savefig(figure, **PNG)
        replace_file(page, comparison_page(results, [figure], following).encode())
    caveats, tables = caveats_of(results)[:MOST_CAVEATS], tuple(tables_of(results))
    return FinishedComparison(folder, results, answer, caveats, tables, (record, figure, page), following)
