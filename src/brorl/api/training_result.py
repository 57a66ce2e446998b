"""The result of `brorl.train`: the run directory and the numbers in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.text import Text

from brorl.api.display import to_html
from brorl.console.tables import coverage_hints, held_out_check_lines, result_tables
from brorl.cost import Cost, total_cost
from brorl.evaluation.pass_at_k import Estimate
from brorl.reporting.page.page import REPORT
from brorl.runs.checkpoint import best_checkpoint, complete_checkpoints
from brorl.runs.run_directory import Record, RunDirectory
from brorl.training.journal import Ending


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """A run that ended, or was interrupted and can be resumed.

    Attributes:
        path: The run directory.
        ending: Why the run ended.
        message: The same as a sentence, with the steps done.
        metrics: The lines of metrics.jsonl; step 0 is the evaluation before training.
        checkpoints: The complete checkpoints, oldest first; each loads with transformers.
        best_checkpoint: The checkpoint with the best held-out pass@k; None if none was kept.
        report: The HTML report; None if the run has none.
    """

    path: Path
    ending: Ending
    message: str
    metrics: tuple[Record, ...]
    checkpoints: tuple[Path, ...]
    best_checkpoint: Path | None
    report: Path | None

    @property
    def cost(self) -> Cost:
        """The cost of all steps in every unit."""
        return total_cost(self.metrics)

    @property
    def first_evaluation(self) -> dict[int, Estimate]:
        """Held-out pass@k by k with 95% intervals, at the first evaluation; empty if there was none."""
        return next(iter(self._evaluations()), {})

    @property
    def last_evaluation(self) -> dict[int, Estimate]:
        """Held-out pass@k by k with 95% intervals, at the last evaluation; empty if there was none."""
        return next(reversed(self._evaluations()), {})

    def _evaluations(self) -> list[dict[int, Estimate]]:
        found = [record["evaluation"]["pass_at"] for record in self.metrics if record.get("evaluation")]
        return [{int(k): Estimate(**estimate) for k, estimate in pass_at.items()} for pass_at in found]

    def __repr__(self) -> str:
        return f"TrainingResult({self.message}; run directory: {self.path})"

    def __rich__(self) -> Group:
        report = [] if self.report is None else [f"charts and rollouts: {self.report}"]
        lines = [f"{self.message}; run directory: {self.path}", *held_out_check_lines(self.metrics)]
        lines += [*coverage_hints(self.metrics), *report]
        return Group(*result_tables(self.metrics), *map(Text, lines))

    def _repr_html_(self) -> str:
        return to_html(self)


def read_result(directory: RunDirectory, ending: Ending, message: str) -> TrainingResult:
    """Read the result of a run from its directory.

    Args:
        directory: The run's files.
        ending: Why training returned.
        message: The same as a sentence.
    """
    report = directory.path / REPORT
    return TrainingResult(
        path=directory.path,
        ending=ending,
        message=message,
        metrics=tuple(directory.read_metrics()),
        checkpoints=tuple(complete_checkpoints(directory.checkpoints)),
        best_checkpoint=best_checkpoint(directory.checkpoints),
        report=report if report.is_file() else None,
    )
