"""A comparison whose runs are complete: its numbers, its answer, and its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from brorl.comparison.arms import Arm
from brorl.comparison.next_command import NextCommand, next_command
from brorl.comparison.reading import read_comparison
from brorl.comparison.report import write_report
from brorl.comparison.results import ComparisonResults, results_of
from brorl.comparison.tables import tables_of
from brorl.comparison.text import MOST_CAVEATS, caveats_of, sentences_of
from brorl.cost import Unit
from brorl.evaluation.paired import PairedDifference
from brorl.table import Result, Table


@dataclass(frozen=True, eq=False, repr=False)
class FinishedComparison(Result):
    """A comparison whose runs are complete."""

    path: Path  # its folder
    results: ComparisonResults  # all numbers, with 95% intervals
    answer: tuple[str, ...]  # the answer; and what the letters stand for, if the arms have letters as names
    caveats: tuple[str, ...]  # what limits the answer, at most three sentences or so
    tables: tuple[Table, ...]  # the tables; the first one shows the answer
    files: tuple[Path, ...]  # `comparison.json`, `comparison.md`, `comparison.png` and `comparison.html`
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
