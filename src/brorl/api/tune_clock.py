"""The time of a tuning: how much of its budget is left for the race and for the final, as fast as the runs are."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from time import perf_counter

from brorl.api.tune_plan import NUM_EVALUATIONS, TunePlan
from brorl.comparison.race import rung_cost

USED = 0.85  # of the time without evaluations goes to training; the rest to starting and to last steps
_CONCLUDING = 0.03  # of the whole budget is for the tables and figures of the answer
_SHORTEST = 0.5  # of the planned budget of a run: a final has fewer seeds rather than shorter runs
_FEWEST_SEEDS = 2


@dataclass
class TuneClock:
    """Measures how long the runs take, and plans the rest of the budget accordingly."""

    plan: TunePlan
    deadline: float  # of the runs, on the clock of `time.perf_counter`
    slowness: float = 1.0  # seconds that pass per planned second

    @classmethod
    def start(cls, plan: TunePlan) -> TuneClock:
        """Start with what earlier calls have left of the budget."""
        return cls(plan, perf_counter() + plan.seconds * (1 - _CONCLUDING) - plan.used_seconds)

    @property
    def left(self) -> float:
        """Seconds that are left for runs; negative after the deadline."""
        return self.deadline - perf_counter()

    def rung_seconds(self, rung: int) -> float:
        """Return the time that a rung should take."""
        return self.slowness * self._seconds(*rung_cost(len(self.plan.arms), rung, self.plan.jobs))

    def observe(self, rung: int, seconds: float) -> None:
        """Take the time that a rung took."""
        self.slowness *= seconds / self.rung_seconds(rung)

    def final_seconds(self, fraction: float = 1.0) -> float:
        """Return the time that the final should take, with a fraction of the planned budget of each run."""
        waves = self._waves(self.plan.seeds)
        return self.slowness * self._seconds(waves * fraction, waves * NUM_EVALUATIONS)

    @property
    def end_of_race(self) -> float:
        """When the race must end, so that there is time for a final."""
        return self.deadline - self.final_seconds(_SHORTEST)

    def size_of_final(self) -> tuple[float, int] | None:
        """Return the budget of a run and the seeds of a final that fits in what is left; None if none does."""
        for seeds in range(self.plan.seeds, _FEWEST_SEEDS - 1, -1):
            waves = self._waves(seeds)
            evaluations = NUM_EVALUATIONS * self.plan.evaluation_seconds
            run_seconds = USED * (self.left / self.slowness / waves - evaluations)
            if run_seconds >= _SHORTEST * self.plan.run_seconds:
                return min(float(f"{run_seconds:.4g}"), self.plan.run_seconds), seeds
        return None

    def _waves(self, seeds: int) -> int:
        return ceil(2 * seeds / self.plan.jobs)

    def _seconds(self, runs: float, evaluations: float) -> float:
        """Return the planned time of so many budgets of a run and evaluations, one after the other."""
        return runs * self.plan.run_seconds / USED + evaluations * self.plan.evaluation_seconds
