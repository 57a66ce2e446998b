"""The time of a tuning: how much of its budget is left for the race and for the final, as long as the runs take."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from time import perf_counter

from brorl.tuning.plan import NUM_EVALUATIONS, TunePlan
from brorl.tuning.standings import RUNGS, room_after

USED = 0.85  # of the time without evaluations goes to training; the rest to starting and to last steps
FEWEST_SEEDS = 2  # of a final
_CONCLUDING = 0.03  # of the whole budget is for the tables and figures of the answer
_SHORTEST = 0.5  # of the planned budget of a run: a final has fewer seeds rather than shorter runs
_FIRST_EVALUATIONS = 3  # of a run in the first rung; later rungs have one


@dataclass
class TuneClock:
    """Measures how long runs take besides their training, and plans the rest of the budget accordingly."""

    plan: TunePlan
    deadline: float  # of the runs, on the clock of `time.perf_counter`
    extra: float | None = None  # measured seconds of a run of the first rung, less its training; None before

    @classmethod
    def start(cls, plan: TunePlan) -> TuneClock:
        """Start with what earlier calls have left of the budget."""
        return cls(plan, perf_counter() + plan.seconds * (1 - _CONCLUDING) - plan.used_seconds)

    @property
    def left(self) -> float:
        """Seconds that are left for runs; negative after the deadline."""
        return self.deadline - perf_counter()

    @property
    def left_to_race(self) -> float:
        """Seconds that are left for the race, less the time of a short final."""
        return self.left - self.final_seconds(_SHORTEST)

    def rung_seconds(self, rung: int) -> float:
        """Return the time that a rung should take."""
        entering = room_after(rung - 1, len(self.plan.arms)) if rung else len(self.plan.arms)
        length = RUNGS[rung] - (RUNGS[rung - 1] if rung else 0.0)
        return ceil(entering / self.plan.jobs) * self._run_seconds(length, 1 if rung else _FIRST_EVALUATIONS)

    def final_seconds(self, fraction: float = 1.0) -> float:
        """Return the time that the final should take, with a fraction of the planned budget of each run."""
        return self._waves(self.plan.seeds) * self._run_seconds(fraction, NUM_EVALUATIONS)

    def observe(self, seconds: float) -> None:
        """Take the time that the first rung took."""
        waves = ceil(len(self.plan.arms) / self.plan.jobs)
        self.extra = max(seconds / waves - RUNGS[0] * self.plan.run_seconds, 0.0)

    def size_of_final(self) -> tuple[float, int] | None:
        """Return the budget of a run and the seeds of a final that fits in what is left; None if none does."""
        for seeds in range(self.plan.seeds, FEWEST_SEEDS - 1, -1):
            each = self.left / self._waves(seeds)
            shortest, whole = (self._run_seconds(fraction, NUM_EVALUATIONS) for fraction in (_SHORTEST, 1.0))
            if each >= shortest:
                part = min((each - shortest) / (whole - shortest), 1.0)
                fraction = _SHORTEST + (1 - _SHORTEST) * part
                return float(f"{fraction * self.plan.run_seconds:.4g}"), seeds
        return None

    def _waves(self, seeds: int) -> int:
        return ceil(2 * seeds / self.plan.jobs)

    def _run_seconds(self, fraction: float, evaluations: int) -> float:
        """Return the time of a run with a fraction of the planned budget; it is linear in the fraction from 1/4 on."""
        training = fraction * self.plan.run_seconds
        if self.extra is None:
            return training / USED + evaluations * self.plan.evaluation_seconds
        more = evaluations / _FIRST_EVALUATIONS
        if self.plan.own.config.engine.clock == "cpu":  # the extra is also time in which the run had no core
            more = max(more, fraction / RUNGS[0])
        return training + max(more, 1.0) * self.extra
