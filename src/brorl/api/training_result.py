"""The result of a training run: its numbers, its files, and what is printed at its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brorl.cost import Cost, total_cost
from brorl.errors import STOPPED
from brorl.format import Estimate
from brorl.table import Result, Table

if TYPE_CHECKING:
    from brorl.console.screen import Screen
    from brorl.runs.run_directory import Record
    from brorl.training.recorder import Ending


@dataclass(frozen=True, eq=False, repr=False)
class TrainingResult(Result):
    """A run that ended, or was interrupted and can be resumed."""

    path: Path  # the run directory
    ending: Ending  # why the run ended
    message: str  # the same as a sentence, with the steps done
    metrics: tuple[Record, ...]  # the lines of metrics.jsonl; step 0 is the evaluation before training
    checkpoints: tuple[Path, ...]  # the complete checkpoints, oldest first; each loads with transformers
    best_checkpoint: Path | None  # the checkpoint with the best held-out pass@k; None if none was kept
    report: Path | None  # the HTML report; None if the run has none
    hints: tuple[str, ...] = ()  # where its charts are, and the commands that continue it

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
        evaluations = [record["evaluation"]["pass_at"] for record in self.metrics if record.get("evaluation")]
        return [{int(k): Estimate(**estimate) for k, estimate in pass_at.items()} for pass_at in evaluations]

    def __repr__(self) -> str:
        return f"TrainingResult({self.message}; run directory: {self.path})"

    def parts(self) -> Iterator[Any]:
        """Yield the tables of a run, why it ended, and what to do next, with commands to copy."""
        from brorl.console.tables import coverage_hints, held_out_check_lines, result_tables

        yield from result_tables(self.metrics)
        yield f"\n{self.message}; run directory: {self.path}"
        yield from (*held_out_check_lines(self.metrics), *coverage_hints(self.metrics), *self.hints)

    def show_on(self, screen: Screen) -> None:
        """Write the parts; commands are not wrapped."""
        for part in self.parts():
            if isinstance(part, Table):
                screen.show(part)
            else:
                screen.echo(part, is_command=part in self.hints)

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0, 130 if the run was stopped, 1 if it ended because no group was mixed."""
        return {"NO_MIXED_GROUPS": 1, "UNVERIFIED": 1, "INTERRUPTED": STOPPED}.get(self.ending.name, 0)
