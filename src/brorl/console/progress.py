"""What a person sees while a run trains: one line a step, and at the end what the run bought.

In: lines of the metrics. Out: text on the screen and in `run.log`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from rich.text import Text

from brorl.activity import Activity, Round
from brorl.console.screen import Screen
from brorl.console.step_line import StepLines, StepResult
from brorl.console.tables import certificate_lines, coverage_hints, pass_at_line, result_tables
from brorl.cost import Budget, Cost, cost_of_step, total_cost
from brorl.format import duration
from brorl.runs.run_directory import Record

_LARGE_STEP = 0.5  # nats per token; within the clip of PPO it is about 0.01
_LINES_PER_HEADER = 25
_MANY_ROUNDS = 3


class Progress:
    """Writes a line a step.

    Args:
        steps: Number of steps of the whole run, at most; None if the budget alone ends it.
        budget: What the whole run may cost.
        screen: Where to.
    """

    def __init__(self, steps: int | None, budget: Budget, screen: Screen) -> None:
        self._steps, self._budget, self._screen = steps, budget, screen
        self._step_lines = StepLines(screen.width)
        self._started: float | None = None
        self._spent = Cost()
        self._share_before = 0.0
        self._carried = 0
        self._lines = 0

    def recall(self, past: Sequence[Record]) -> None:
        """Take the lines that the metrics of a resumed run hold already."""
        self._spent = total_cost(past)
        self._carried = next((r["kept"]["carried"] for r in reversed(past) if "kept" in r), 0)

    def observe(self, activity: Activity) -> None:
        """Take a report of what is under way; a step that needs round after round says so."""
        self._screen.observe(activity)
        if isinstance(activity, Round) and _is_power_of_two(activity.number - _MANY_ROUNDS + 1):
            so_far = f"{activity.groups} of {activity.wanted} groups with both outcomes so far"
            self._screen.say(Text(f"step {activity.step}: round {activity.number}, {so_far}", style="dim"))

    def show(self, record: Record) -> None:
        """Write a line of the metrics."""
        self._spent += cost_of_step(record)
        if self._started is None:
            self._started, self._share_before = perf_counter(), self._share_done()
        if "update" not in record:
            if "evaluation" in record:
                when = "at the end" if record["step"] else "before training"
                self._screen.say(f"held out, {when}: {pass_at_line(record['evaluation'])}")
                for note in notes(record):
                    self._screen.say(Text(note, style="yellow"))
            return
        if self._lines == 0:
            self._screen.say(Text(self._step_lines.legend, style="dim"))
        if self._lines % _LINES_PER_HEADER == 0:
            self._screen.say(Text(self._step_lines.header, style="dim"))
        self._lines += 1
        carried = min(self._carried, record["kept"]["groups"])
        self._carried = record["kept"]["carried"]
        self._screen.say(self._step_lines.line(StepResult(record, carried, self._time_left())))
        for note in notes(record):
            self._screen.say(Text(f"       {note}", style="yellow"))

    def finish(self, records: Sequence[Record], run_path: Path, ending: str, hints: Sequence[str]) -> None:
        """Write what the run bought, from all its metrics."""
        for table in result_tables(records):
            self._screen.show(table)
        self._screen.say(f"\n{ending}; run directory: {run_path}")
        for line in [*certificate_lines(records), *coverage_hints(records)]:
            self._screen.say(line)
        for hint in hints:
            self._screen.say(hint, is_command=True)

    def _share_done(self) -> float:
        of_budget = self._spent.of(self._budget.unit) / self._budget.limit
        return of_budget if self._steps is None else max(self._spent.steps / self._steps, of_budget)

    def _time_left(self) -> str:
        assert self._started is not None
        share = self._share_done()
        if share <= self._share_before:
            return ""
        return duration((perf_counter() - self._started) / (share - self._share_before) * max(1 - share, 0.0))


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def notes(record: Record) -> list[str]:
    """Say what was out of the ordinary in a step."""
    said = []
    for name, where in (("sampling", "their reasons are in rollouts/"), ("evaluation", "this was while evaluating")):
        lost, failed = (record.get(name, {}).get(f"verifier_{what}", 0) for what in ("timeouts", "failures"))
        if lost or failed:
            said.append(f"{lost} verifications timed out and {failed} failed; they count as incorrect, and {where}")
    update = record.get("update")
    if update and update["out_of_memory_retries"]:
        said.append(f"out of memory: from now on {update['nodes_per_pass']} nodes per forward pass, same gradients")
    if update and update["old_policy_kl"] > _LARGE_STEP:
        said.append(
            f"warning: the updates of this step moved the policy by {update['old_policy_kl']:.2g} nats per token; "
            "lower optimizer.learning_rate"
        )
    if "reference_reset" in record:
        said.append(f"reference policy reset: {record['reference_reset']}")
    if "collapse" in record:
        said.append(f"warning: {record['collapse']}")
    return said
