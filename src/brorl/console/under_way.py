"""What is under way, in one line: the reports of the parts of a run, put together.

In: activities as they are reported. Out: a line for people, and the answer to a request to stop. It estimates times
only from what it saw take that long before; where it saw nothing, it leaves them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import monotonic

from brorl.activity import Activity, Decoding, Phase, Round, Step, Updating
from brorl.format import duration

_VERBS = {
    "generation": "sampling",
    "verification": "verifying",
    "training": "learning",
    "diagnostics": "measuring",
    "storing": "saving rollouts",
}
_AFTER = {  # what a step still has to do when a phase is over
    "training": ("storing", "diagnostics"),
    "storing": ("diagnostics",),
}
_RECENT_STEPS = 5
_LEAST_SHARE = 0.05  # of the rollouts; before that, how long the rest takes cannot be told from them


@dataclass(frozen=True)
class _Now:
    """What is under way, since when, and how far it has come; one value, so that threads never see half of it."""

    phase: Phase
    phase_began: float
    step: int | None = None
    step_began: float = 0.0
    round: Round | None = None
    decoding: Decoding | None = None
    updating: Updating | None = None


class UnderWay:
    """Observes a run.

    Args:
        begins_with: What is under way before the first report.
        clock: Returns the time in seconds.
    """

    def __init__(self, begins_with: Phase, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._now = _Now(begins_with, clock())
        self._took: dict[str, float] = {}  # seconds of each phase when it was last under way
        self._steps: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._saved: int | None = None
        self.evaluates_after: Callable[[int], bool] = lambda _: False

    def start_from(self, step: int) -> None:
        """Take the step that is saved already; 0 at the start."""
        self._saved = step

    def observe(self, activity: Activity) -> None:
        """Take a report."""
        now, time = self._now, self._clock()
        match activity:
            case Step():
                self._end(now, time)
                if now.step is not None:
                    self._steps.append(time - now.step_began)
                self._now = _Now(Phase("beginning"), time, activity.number, time)
            case Phase() if activity.name == now.phase.name and activity.detail:  # the same one goes on
                self._now = replace(now, phase=activity)
            case Phase():
                self._end(now, time)
                self._now = replace(now, phase=activity, phase_began=time, decoding=None, updating=None)
            case Round():
                self._now = replace(now, round=activity)
            case Decoding():
                self._now = replace(now, decoding=activity)
            case Updating():
                self._now = replace(now, updating=activity)

    def _end(self, now: _Now, time: float) -> None:
        """Remember a phase that is over."""
        self._took[now.phase.name] = time - now.phase_began
        if now.phase.name == "saving":
            self._saved = now.step

    def line(self, width: int | None = None) -> str:
        """Return what is under way.

        Args:
            width: Characters that there is room for; what matters least is left out. None is no limit.
        """
        now = self._now
        elapsed = duration(self._clock() - now.phase_began)
        return fitting(f"{_name(now)} for {elapsed}", self._details(now), width)

    def answer(self, discards: bool) -> str:
        """Return the answer to a request to stop.

        Args:
            discards: Whether the work under way is discarded.
        """
        now = self._now
        if discards and now.step is None:
            return "stopping now: training has not begun, so nothing is lost"
        if discards:
            return (
                f"stopping now and saving the state after step {(now.step or 1) - 1}; step {now.step} has not learned "
                "anything yet, and `brorl resume` samples it again"
            )
        if now.step is None:
            return "stopping before the first step; Ctrl-C again stops now"
        doing = f"finishing step {now.step}"
        if now.phase.name == "evaluating":
            doing = f"finishing the evaluation after step {now.step}"
        left = self._seconds_until_saved(now)
        estimate = f" (about {duration(left)})" if left is not None else ""
        lost = "discards it" if self._saved == now.step - 1 else f"discards what came after step {self._saved or 0}"
        return f"{doing}, then saving{estimate}; Ctrl-C again stops now and {lost}"

    def _details(self, now: _Now) -> list[str]:
        """Return how far it has come, what matters most first."""
        details = []
        if now.phase.detail and now.phase.name == "evaluating":
            details.append(now.phase.detail)
        elif now.decoding:
            details.append(f"{now.decoding.finished:,}/{now.decoding.rollouts:,} rollouts")
        if now.updating:
            details.append(f"update {now.updating.done + 1} of {now.updating.updates}")
        if now.round and now.phase.name in ("generation", "verification"):
            details.append(f"{now.round.groups}/{now.round.wanted} groups (round {now.round.number})")
        left = self._seconds_left(now)
        if left is not None:
            details.append(f"about {duration(left)} left")
        if now.decoding and not now.phase.detail.startswith("verifying"):
            seconds = max(self._clock() - now.phase_began, 1e-3)
            details.append(f"{now.decoding.tokens / seconds:,.0f} tokens/s")
            details.append(f"at token {now.decoding.depth:,}")
        return details

    def _seconds_left(self, now: _Now) -> float | None:
        """Estimate the time until the step, or the evaluation, is over; None where nothing tells."""
        time = self._clock()
        if now.phase.name == "evaluating":
            before, so_far = self._took.get("evaluating"), time - now.phase_began
            if before is not None:
                return before - so_far if before > so_far else None
            share = now.decoding.finished / now.decoding.rollouts if now.decoding else 0.0
            return so_far / share - so_far if _LEAST_SHARE <= share < 1 else None
        if now.step is None or not self._steps or now.phase.name in ("saving", "writing"):
            return None
        left = median(self._steps) - (time - now.step_began)
        return left if left > 0 else None

    def _seconds_until_saved(self, now: _Now) -> float | None:
        """Estimate the time until a step that is learning is saved; None where nothing tells."""
        assert now.step is not None
        name = now.phase.name
        to_do = [name] if name != "saving" else []
        to_do += _AFTER.get(name, ())
        if name not in ("evaluating", "saving") and self.evaluates_after(now.step):
            to_do.append("evaluating")
        known = [self._took.get(phase) for phase in (*to_do, "saving")]
        seconds = [one for one in known[:-1] if one is not None]
        if len(seconds) < len(to_do):
            return None
        return max(sum(seconds) - (self._clock() - now.phase_began), 0.0) + (known[-1] or 0.0)


def fitting(head: str, details: Sequence[str], width: int | None, separator: str = ", ") -> str:
    """Return a head and as many details after it, from the first on, as there is room for."""
    line = head
    for detail in details:
        longer = f"{line}{separator}{detail}"
        if width is not None and len(longer) > width:
            break
        line = longer
    return line if width is None else line[:width]


def _name(now: _Now) -> str:
    phase = now.phase
    match phase.name:
        case "evaluating":
            return "evaluating before training" if now.step is None else f"evaluating after step {now.step}"
        case "saving" | "writing":
            return f"{phase.name} {phase.detail}"
        case name if now.step is not None:
            return f"step {now.step}, {_VERBS.get(name, name)}"
    return f"{_VERBS.get(phase.name, phase.name)} {phase.detail}".rstrip()
