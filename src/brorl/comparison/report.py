"""A complete comparison for people and for programs: its answer, the next command, and its files.

In JSON, numbers without a value and infinite ends are null.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.text import Text

from brorl.comparison.arms import Arm, RunScores, scores_at, start_scores
from brorl.comparison.figure import PNG, make_figure
from brorl.comparison.plan import read_comparison
from brorl.comparison.results import TOLERANCE, ComparisonResults, results_of
from brorl.comparison.tables import tables_of
from brorl.comparison.text import MOST_CAVEATS, caveats_of, match_words, sentences_of
from brorl.cost import Unit, amount
from brorl.evaluation.paired import PairedDifference
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.format import exact, listed
from brorl.reporting.page.frame import Answer, answer_page
from brorl.storage import json_ready, replace_file, storage_errors
from brorl.table import Result, Table

_LONGER = 2  # times the budget


@dataclass(frozen=True)
class NextCommand:
    """A command that follows."""

    why: str  # what it is for
    command: str


def next_command(results: ComparisonResults, folder: Path) -> NextCommand:
    """Return the command that follows a comparison.

    A pair without a shown difference needs more seeds, if its prompts are enough for them. All others need a larger
    budget: to be matched, or because a longer run may rank the arms differently.
    """
    comparison = results.comparison
    recipes = [f"{arm.runs[0].path}.yaml" for arm in comparison.arms]
    seeds = max(len(arm.runs) for arm in comparison.arms)
    unshown = results.pair is not None and results.pair[1].conclusion == "no difference shown"
    needed = next(iter(results.seeds_needed.values()), None)
    if unshown and results.matched and needed and needed.enough_prompts and needed.seeds > seeds:
        return NextCommand(
            f"to show a difference of {needed.half_width:g} in pass@1",
            shlex.join(["brorl", "compare", str(folder), "--seeds", str(needed.seeds)]),
        )
    budget = _LONGER * comparison.budget
    options = ["--match", comparison.unit, "--budget", exact(budget), "--seeds", str(seeds)]
    options += ["--marks", str(len(comparison.eval_points))]
    why = "to see whether this holds for longer" if results.matched else "to match the arms"
    return NextCommand(
        f"{why} ({amount(budget, comparison.unit)} each)", shlex.join(["brorl", "compare", *recipes, *options])
    )


def write_report(results: ComparisonResults, folder: Path, following: NextCommand) -> list[Path]:
    """Write the files, and return them; the page is the last.

    Raises:
        StorageError: If a file could not be written.
    """
    files = [folder / f"comparison.{ending}" for ending in ("json", "png", "html")]
    with storage_errors(folder):
        replace_file(files[0], json.dumps(comparison_record(results), indent=1).encode())
        make_figure(results).savefig(files[1], **PNG)
        replace_file(files[2], comparison_page(results, files[1:2], following).encode())
    return files


def comparison_page(results: ComparisonResults, figures: Sequence[Path], following: NextCommand) -> str:
    """Return the page of a comparison, with its tables in the order of reading and its figures (PNG files)."""
    matched = match_words(results)
    title = f"{listed(results.names)}, {amount(results.budget, results.comparison.unit)} each"
    caveats = [line for line in caveats_of(results)[:MOST_CAVEATS] if line != matched]
    next_step = following.why, following.command
    return answer_page(
        Answer("brorl compare", title, sentences_of(results), matched, tables_of(results), figures, caveats, next_step)
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
    """Return a run with all its evaluations, also those between the evaluation points."""
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

    path: Path  # its folder
    results: ComparisonResults  # all numbers, with 95% intervals
    answer: tuple[str, ...]  # the answer; and what the letters stand for, if the arms have letters as names
    caveats: tuple[str, ...]  # what limits the answer, at most three sentences or so
    tables: tuple[Table, ...]  # the tables; the first one shows the answer
    files: tuple[Path, ...]  # `comparison.json`, `comparison.png` and `comparison.html`
    next: NextCommand  # the command that follows, with the reason for it

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

    def parts(self) -> Iterator[str | Text | Table]:
        """Yield the answer, the table that shows it, its caveats, the files and the next command."""
        yield Text("\n".join(self.answer), style="bold")
        yield from ("", self.tables[0], "")
        yield from (f"- {line}" for line in self.caveats)
        names = ", ".join(file.name for file in self.files[:-1])
        yield f"\nwritten to {self.path}: {names}; all tables and figures: open {self.files[-1]} in a browser"
        yield f"{self.next.why}: {self.next.command}"

    def __repr__(self) -> str:
        return f"FinishedComparison({str(self.path)!r}: {self.answer[0]})"


def finished_comparison(folder: Path) -> FinishedComparison:
    """Read the runs of a complete comparison, and write its files."""
    results = results_of(read_comparison(folder))
    following = next_command(results, folder)
    files, caveats = write_report(results, folder, following), caveats_of(results)[:MOST_CAVEATS]
    return FinishedComparison(
        folder, results, sentences_of(results), caveats, tuple(tables_of(results)), tuple(files), following
    )
