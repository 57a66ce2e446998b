"""The answer of a comparison: its findings, the next command, and files for people and programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path
from typing import Any

from rich.text import Text

from brorl.comparison.figure import make_figure
from brorl.comparison.findings import answer_of, caveats_of, match_of, sentences
from brorl.comparison.results import TOLERANCE, ComparisonResults, results_of
from brorl.comparison.scores import FinishedRun, scores_at, start_scores
from brorl.comparison.spec import read_comparison
from brorl.comparison.tables import tables_of
from brorl.cost import amount
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.format import exact, listed, shell_command
from brorl.reporting.figure import PNG, ResultFigure
from brorl.reporting.frame import AnswerParts, answer_page
from brorl.storage import json_ready, replace_file, storage_errors
from brorl.table import Result, Table

MAX_CAVEATS = 3  # show at most this many; the record contains all
_LONGER = 2  # budget multiplier for a longer comparison


def next_command(results: ComparisonResults, folder: Path) -> tuple[str, str]:
    """Return the reason for the next command after a comparison, and the command.

    If no difference is shown between two matched arms, suggest more seeds, or more prompts if no number of seeds can
    show one. Otherwise suggest a larger budget, to match the arms or because a longer run may rank them differently.
    """
    comparison = results.comparison
    recipes = [f"{arm.runs[0].path}.yaml" for arm in comparison.arms]
    seeds = max(len(arm.runs) for arm in comparison.arms)
    unshown = results.pair is not None and results.pair[1].conclusion == "no difference shown"
    needed = next(iter(results.seeds_needed.values()), None)
    why = f"to show a difference of {needed.half_width:g} in pass@1" if needed else ""
    if unshown and results.matched and needed and needed.enough_prompts and needed.seeds > seeds:
        return why, shell_command("compare", folder, "--seeds", needed.seeds)
    budget = _LONGER * comparison.budget
    more: list[str] = []
    if unshown and results.matched and needed and not needed.enough_prompts:
        budget, seeds = comparison.budget, max(seeds, needed.seeds)
        more = ["--evaluation.num_prompts", str(ceil(needed.prompts / max(len(comparison.source_names()), 1)))]
        why += f", with {needed.prompts:,} held-out prompts (raise data.held_out_fraction too if there are fewer)"
    elif results.matched:
        why = f"to see whether this holds for longer runs ({amount(budget, comparison.unit)} each)"
    else:
        why = f"to match the arms ({amount(budget, comparison.unit)} each)"
    options = ["--match", comparison.unit, "--budget", exact(budget), "--seeds", str(seeds)]
    options += ["--eval-points", str(len(comparison.eval_points)), *more]
    return why, shell_command("compare", *recipes, *options)


def comparison_page(results: ComparisonResults, figures: Sequence[Path], following: tuple[str, str]) -> str:
    """Return the page of a comparison, with its tables in reading order and its figures (PNG files)."""
    basis = match_of(results)
    return answer_page(
        AnswerParts(
            command="brorl compare",
            title=f"{listed(results.names)}, {amount(results.budget, results.comparison.unit)} each",
            sentences=[str(finding) for finding in answer_of(results)],
            basis=" ".join(map(str, basis)),
            tables=tables_of(results),
            figures=figures,
            caveats=sentences([topic for topic in caveats_of(results)[:MAX_CAVEATS] if topic != basis]),
            following=following,
        )
    )


def comparison_record(results: ComparisonResults) -> dict[str, Any]:
    """Return the contents of `comparison.json`: the answer, the conditions, all numbers, and the scores by prompt."""
    comparison = results.comparison
    caveats = sentences(caveats_of(results))
    per_prompt = ("prompts", "sources")
    conditions = {f.name: getattr(comparison, f.name) for f in fields(comparison) if f.name not in per_prompt}
    start_P = start_scores(comparison).mean(0)
    end_P = {arm.name: scores_at(comparison, arm, results.budget).mean(0) for arm in comparison.arms}
    record = {
        "summary": [*map(str, answer_of(results)), *caveats[:MAX_CAVEATS]],
        "caveats": caveats,
        **conditions,
        "tolerance": TOLERANCE,
        "matched": results.matched,
        **{f.name: getattr(results, f.name) for f in fields(ComparisonResults) if f.name != "comparison"},
        "arms": [{**vars(arm), "runs": [_run(run, results) for run in arm.runs]} for arm in comparison.arms],
        "prompts": [
            {"id": name, "source": source, "start": start_P[i], "arms": {arm: p[i] for arm, p in end_P.items()}}
            for i, (name, source) in enumerate(zip(comparison.prompts, comparison.sources, strict=True))
        ],
    }
    plain: dict[str, Any] = json_ready(record)
    return plain


def _run(run: FinishedRun, results: ComparisonResults) -> dict[str, Any]:
    """Return a run with all its evaluations, including those between the evaluation points."""
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
class FinishedComparison(Result, ComparisonResults):
    """A comparison whose runs are all complete, with its numbers, folder, answer and tables."""

    path: Path  # the comparison's folder

    @property
    def answer(self) -> tuple[str, ...]:
        """The answer, and a key to the letters if the arms are named by letters."""
        return tuple(map(str, answer_of(self)))

    @property
    def caveats(self) -> tuple[str, ...]:
        """Limits of the answer, most serious first, at most three."""
        return tuple(sentences(caveats_of(self)[:MAX_CAVEATS]))

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables; the first one shows the answer."""
        return tuple(tables_of(self))

    @property
    def next(self) -> tuple[str, str]:
        """The reason for the next command, and the command."""
        return next_command(self, self.path)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files `comparison.json`, `comparison.png` and `comparison.html`."""
        return tuple(self.path / f"comparison.{ending}" for ending in ("json", "png", "html"))

    def figure(self) -> ResultFigure:
        """Return the figure in `comparison.png` as a matplotlib figure."""
        return make_figure(self, self.answer[0])

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
    """Read the runs of a complete comparison and write its files.

    Raises:
        StorageError: If a file could not be written.
    """
    finished = FinishedComparison(**vars(results_of(read_comparison(folder))), path=folder)
    record, figure, page = finished.files
    with storage_errors(folder):
        replace_file(record, json.dumps(comparison_record(finished), indent=1).encode())
        finished.figure().savefig(figure, **PNG)
        replace_file(page, comparison_page(finished, [figure], finished.next).encode())
    return finished
