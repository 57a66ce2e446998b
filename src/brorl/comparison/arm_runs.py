"""The runs of a comparison, and how far each has come, read from its metrics as they grow."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brorl.cost import Budget, Cost, Unit, cost_of_step


@dataclass(frozen=True)
class ArmRun:
    """One run of an arm."""

    arm: str
    seed: int
    recipe: Path  # with all its settings
    directory: Path
    budget: Budget
    resume_with: tuple[str, ...] = ()  # options of the command that resumes it


@dataclass
class RunProgress:
    """The progress of a run, read from its metrics as they grow."""

    run: ArmRun
    spent: Cost = field(default_factory=Cost)
    score: dict[int, float] = field(default_factory=dict)  # pass@k by k of the last evaluation
    first: dict[int, float] = field(default_factory=dict)  # pass@k by k of the first evaluation
    ended: bool = False
    ended_early: bool = False  # before the budget was spent
    steps: list[Cost] = field(default_factory=list)
    _offset: int = 0
    _file: int = 0

    @property
    def fraction(self) -> float:
        """Fraction of the budget that is spent, at most 1."""
        budget = self.run.budget
        return 1.0 if self.ended else min(self.spent.of(budget.unit) / budget.limit, 1.0)

    def costs_of_steps(self, unit: Unit) -> list[float]:
        """Return the cost of each step in a unit."""
        return [cost.of(unit) for cost in self.steps]

    def update(self) -> None:
        """Read the new metrics records."""
        metrics = self.run.directory / "metrics.jsonl"
        if not metrics.is_file():
            return
        with metrics.open("rb") as file:
            now = os.fstat(file.fileno())
            if now.st_ino != self._file or now.st_size < self._offset:  # a resumed run begins with a new, shorter file
                self._offset, self._file = 0, now.st_ino
                self.spent, self.score, self.first, self.steps = Cost(), {}, {}, []
                self.ended = self.ended_early = False
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._take(json.loads(line))

    def _take(self, record: dict[str, Any]) -> None:
        cost = cost_of_step(record)
        self.spent += cost
        if cost.samples:
            self.steps.append(cost)
        if "evaluation" in record:
            self.score = {int(k): e["value"] for k, e in record["evaluation"]["pass_at"].items()}
            self.first = self.first or self.score
        self.ended_early = "ended" in record
        self.ended = self.ended_early or self.run.budget.is_spent(self.spent)


def progress_of(run: ArmRun) -> RunProgress:
    """Read the progress of a run."""
    progress = RunProgress(run)
    progress.update()
    return progress
