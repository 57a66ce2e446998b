"""The status line: the current work, its progress, the time left, and the answer to a stop request.

A time estimate comes from an earlier step or evaluation, or from the finished fraction of the rollouts; without these
the line has none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import monotonic

from brorl.activity import Activity, Decoding, Phase, Round, Step, Updating
from brorl.format import duration

PHASE_NAMES = {  # the names in the metrics, and those that users read
    "generation": "sampling",
    "verification": "verifying",
    "training": "learning",
    "diagnostics": "measuring",
    "storing": "saving",
}
_REMAINING = {"training": ("storing", "diagnostics"), "storing": ("diagnostics",)}  # phases of the step that follow
_RECENT_STEPS = 5
_MIN_FRACTION = 0.05  # of the rollouts; a smaller finished share does not predict the time of the rest


@dataclass(frozen=True)
class _CurrentWork:
    """The current work. A new value replaces the whole, so no thread reads a mixture of two states."""

    phase: Phase
    phase_start: float
    step: int | None = None
    step_start: float = 0.0
    round: Round | None = None
    decoding: Decoding | None = None
    updating: Updating | None = None

    @property
    def title(self) -> str:
        """The step and the phase."""
        name, detail = PHASE_NAMES.get(self.phase.name, self.phase.name), self.phase.detail
        if name == "evaluating":
            return "evaluating before training" if self.step is None else f"evaluating after step {self.step}"
        if self.step is None or self.phase.name in ("saving", "writing"):
            return f"{name} {detail}".rstrip()
        return f"step {self.step}, {name}"


class StatusLine:
    """Observes a run, from a first phase on."""

    def __init__(self, phase: Phase, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._now = _CurrentWork(phase, clock())
        self._phase_seconds: dict[str, float] = {}  # of the last time that each phase ended
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._saved_step: int | None = None
        self._evaluates_after: Callable[[int], bool] = lambda _: False

    def start_training(self, saved_step: int, evaluates_after: Callable[[int], bool]) -> None:
        """Prepare for the steps of a run after its last checkpoint (0: none); some are followed by an evaluation."""
        self._saved_step, self._evaluates_after = saved_step, evaluates_after

    def observe(self, activity: Activity) -> None:
        """Update the current work."""
        now, time = self._now, self._clock()
        match activity:
            case Step():
                self._end_phase(now, time)
                if now.step is not None:
                    self._step_seconds.append(time - now.step_start)
                self._now = _CurrentWork(Phase("starting"), time, activity.number, time)
            case Phase() if activity.name == now.phase.name and activity.detail:  # the same phase continues
                self._now = replace(now, phase=activity)
            case Phase():
                self._end_phase(now, time)
                self._now = replace(now, phase=activity, phase_start=time, decoding=None, updating=None)
            case Round():
                self._now = replace(now, round=activity)
            case Decoding():
                self._now = replace(now, decoding=activity)
            case Updating():
                self._now = replace(now, updating=activity)

    def _end_phase(self, now: _CurrentWork, time: float) -> None:
        self._phase_seconds[now.phase.name] = time - now.phase_start
        if now.phase.name == "saving":
            self._saved_step = now.step

    def line(self, width: int | None = None) -> str:
        """Return the status line; the least important details are dropped from one wider than `width`."""
        now, time = self._now, self._clock()
        head = f"{now.title} for {duration(time - now.phase_start)}"
        return join_fitting([head, *self._details(now, time)], width)

    def stop_answer(self, discards: bool) -> str:
        """Return the answer to a stop request, which may discard the current work."""
        now = self._now
        step = now.step
        if step is None:
            if discards:
                return "stopping now: training has not begun, so nothing is lost"
            return "stopping before the first step; Ctrl-C again stops now"
        if discards:
            return (
                f"stopping now and saving the state after step {step - 1}; step {step} has not updated the model yet, "
                "and `brorl resume` samples it again"
            )
        current = f"the evaluation after step {step}" if now.phase.name == "evaluating" else f"step {step}"
        left = self._seconds_until_saved(now, step)
        estimate = f" (about {duration(left)})" if left is not None else ""
        lost = "it" if self._saved_step == step - 1 else f"everything after step {self._saved_step or 0}"
        return f"finishing {current}, then saving{estimate}; Ctrl-C again stops now and discards {lost}"

    def _details(self, now: _CurrentWork, time: float) -> list[str]:
        """Return the progress and the time left, the most important detail first."""
        details = []
        if now.phase.detail and now.phase.name == "evaluating":
            details.append(now.phase.detail)
        elif now.decoding:
            details.append(f"{now.decoding.finished:,}/{now.decoding.rollouts:,} rollouts")
        if now.updating:
            details.append(f"update {now.updating.done + 1} of {now.updating.updates}")
        if now.round and now.phase.name in ("generation", "verification"):
            details.append(f"{now.round.groups}/{now.round.wanted} groups (round {now.round.number})")
        left = self._seconds_left(now, time)
        if left is not None:
            details.append(f"about {duration(left)} left")
        if now.decoding and not now.phase.detail.startswith("verifying"):
            seconds = max(time - now.phase_start, 1e-3)
            details.append(f"{now.decoding.tokens / seconds:,.0f} tokens/s")
            details.append(f"at token {now.decoding.depth:,}")
        return details

    def _seconds_left(self, now: _CurrentWork, time: float) -> float | None:
        """Estimate the time until the end of the step or evaluation; None without an estimate."""
        if now.phase.name == "evaluating":
            elapsed = time - now.phase_start
            fraction = now.decoding.finished / now.decoding.rollouts if now.decoding else 0.0
            if "evaluating" in self._phase_seconds:
                left = self._phase_seconds["evaluating"] - elapsed
            else:
                left = elapsed / fraction - elapsed if fraction >= _MIN_FRACTION else 0.0
        elif now.step is None or not self._step_seconds or now.phase.name in ("saving", "writing"):
            return None
        else:
            left = median(self._step_seconds) - (time - now.step_start)
        return left if left > 0 else None

    def _seconds_until_saved(self, now: _CurrentWork, step: int) -> float | None:
        """Estimate the time until a step that has begun to learn is saved; None without an estimate."""
        name = now.phase.name
        phases = [phase for phase in (name, *_REMAINING.get(name, ())) if phase != "saving"]
        if name not in ("evaluating", "saving") and self._evaluates_after(step):
            phases.append("evaluating")
        if not all(phase in self._phase_seconds for phase in phases):
            return None
        left = sum(self._phase_seconds[phase] for phase in phases) - (self._clock() - now.phase_start)
        return max(left, 0.0) + self._phase_seconds.get("saving", 0.0)


def join_fitting(parts: Sequence[str], width: int | None, separator: str = ", ") -> str:
    """Join as many parts, from the first on, as fit into a width; None is no limit."""
    line, *more = parts
    for part in more:
        longer = f"{line}{separator}{part}"
        if width is not None and len(longer) > width:
            break
        line = longer
    return line[:width]
