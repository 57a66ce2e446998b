"""Progress of a training run: one line per step, and tables at the end.

In: lines of the metrics. Out: lines and tables on the screen and in `run.log`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from rich.text import Text

from brorl.activity import Activity, Round
from brorl.console import tables
from brorl.console.screen import Screen
from brorl.console.step_line import StepLines
from brorl.cost import Budget, Cost, cost_of_step, total_cost
from brorl.format import counted, duration
from brorl.runs.run_directory import Record

_LARGE_STEP = 0.5  # nats per token; PPO's clip keeps it near 0.01
_LINES_PER_HEADER = 25
_UNVERIFIED_FRACTION = 0.01  # of a step's rollouts; above it a step is worth a warning
_STEPS_PER_WARNING = 10


class TrainingProgress:
    """Writes one line per step.

    Args:
        steps: Most steps of the whole run; None if only the budget ends it.
        budget: Most cost of the whole run.
        screen: The screen to write to.
    """

    def __init__(self, steps: int | None, budget: Budget, screen: Screen) -> None:
        self._steps, self._budget, self._screen = steps, budget, screen
        self._step_lines = StepLines(screen.console.width)
        self._start: float | None = None
        self._spent = Cost()
        self._fraction_at_start = 0.0
        self._carried = 0
        self._num_lines = 0
        self._warned_at: int | None = None

    def recall(self, past: Sequence[Record]) -> None:
        """Take over the metrics of the steps before a resume."""
        self._spent = total_cost(past)
        self._carried = next((r["kept"]["carried"] for r in reversed(past) if "kept" in r), 0)

    def observe(self, activity: Activity) -> None:
        """Update the status line, and write a line at rounds 3, 4, 6, 10, ... of a step."""
        self._screen.observe(activity)
        if isinstance(activity, Round) and activity.number > 2 and (activity.number - 2).bit_count() == 1:
            so_far = f"{activity.groups} of {activity.wanted} mixed groups so far"
            self._screen.say(Text(f"step {activity.step}: round {activity.number}, {so_far}", style="dim"))

    def show(self, record: Record) -> None:
        """Write the line of a step or of an evaluation, and notes on anything unusual in it."""
        self._spent += cost_of_step(record)
        if self._start is None:
            self._start, self._fraction_at_start = perf_counter(), self._fraction_done()
        if "update" in record:
            if begins := record.get("objective", {}).get("begins"):
                self._screen.say(Text(f"begins: {begins}", style="bold"))
            self._show_step(record)
            indent = " " * 7
        elif "evaluation" in record or "evaluation_unverified" in record:
            when = "at the end" if record["step"] else "before training"
            if "evaluation" in record:
                self._screen.say(f"held-out prompts {when}: {tables.pass_at_line(record['evaluation'])}")
            indent = ""
        else:
            return
        for note in (*notes(record), *self._warning(record)):
            self._screen.say(Text(f"{indent}{note}", style="yellow"))

    def finish(self, records: Sequence[Record], run_path: Path, ending: str, hints: Sequence[str]) -> None:
        """Write the tables of a run.

        Args:
            records: All lines of the metrics.
            run_path: The run directory.
            ending: Why the run ended.
            hints: What to do next, with commands to copy.
        """
        for table in tables.result_tables(records):
            self._screen.show(table)
        self._screen.say(f"\n{ending}; run directory: {run_path}")
        for line in [*tables.held_out_check_lines(records), *tables.coverage_hints(records)]:
            self._screen.say(line)
        for hint in hints:
            self._screen.say(hint, is_command=True)

    def _show_step(self, record: Record) -> None:
        if self._num_lines == 0:
            self._screen.say(Text(self._step_lines.legend, style="dim"))
        if self._num_lines % _LINES_PER_HEADER == 0:
            self._screen.say(Text(self._step_lines.header, style="dim"))
        self._num_lines += 1
        carried = min(self._carried, record["kept"]["groups"])
        self._carried = record["kept"]["carried"]
        self._screen.say(self._step_lines.line(record, carried, self._time_left()))

    def _warning(self, record: Record) -> list[str]:
        """Return warnings about unverified rollouts and cut-off programs, at most once in ten steps."""
        step = record["step"]
        found = [note for note in (unverified_note(record), cut_off_note(record)) if note is not None]
        if not found or (self._warned_at is not None and step - self._warned_at < _STEPS_PER_WARNING):
            return []
        self._warned_at = step
        return found

    def _fraction_done(self) -> float:
        of_budget = self._spent.of(self._budget.unit) / self._budget.limit
        return of_budget if self._steps is None else max(self._spent.steps / self._steps, of_budget)

    def _time_left(self) -> str:
        assert self._start is not None
        fraction = self._fraction_done()
        if fraction <= self._fraction_at_start:
            return ""
        return duration((perf_counter() - self._start) / (fraction - self._fraction_at_start) * max(1 - fraction, 0.0))


def notes(record: Record) -> list[str]:
    """Return a line on each unusual event of a step."""
    lines = []
    for name, where in (("sampling", "their reasons are in rollouts/"), ("evaluation", "this was during evaluation")):
        late, failed = (record.get(name, {}).get(f"verifier_{what}", 0) for what in ("timeouts", "failures"))
        if late or failed:
            lines.append(f"{late} verifications timed out and {failed} failed; they count as incorrect, and {where}")
    lines += _unverified_evaluation(record)
    update = record.get("update")
    if update and update["out_of_memory_retries"]:
        lines.append(f"out of memory: from now on {update['nodes_per_pass']} nodes per forward pass, same gradients")
    if update and update["old_policy_kl"] > _LARGE_STEP:
        lines.append(
            f"warning: the updates of this step moved the policy by {update['old_policy_kl']:.2g} nats per token; "
            "lower optimizer.learning_rate"
        )
    if "reference_reset" in record:
        lines.append(f"reference policy reset: {record['reference_reset']}")
    if "collapse" in record:
        lines.append(f"warning: {record['collapse']}")
    return lines


def unverified_note(record: Record) -> str | None:
    """Return a warning if more than 1% of a step's rollouts could not be verified because of the machine."""
    sampling = record.get("sampling", {})
    lost, rollouts = sampling.get("samples_unverified", 0), sampling.get("samples", 0)
    if lost <= _UNVERIFIED_FRACTION * rollouts:
        return None
    return (
        f"warning: {lost:,} of {rollouts:,} rollouts could not be verified because of the machine (most often: "
        f"{next(iter(sampling['unverified_reasons']))}); they were taken out of their groups"
    )


def cut_off_note(record: Record) -> str | None:
    """Return a warning if programs of a step were cut off because the time of all programs was over."""
    cut_off = record.get("sampling", {}).get("verifier_cut_offs", 0)
    if not cut_off:
        return None
    return (
        f"warning: {counted(cut_off, 'response')} had used the equal part of the time of all programs when it was "
        "over, and counted as incorrect; raise verification.batch_timeout_s or verification.workers if they are right"
    )


def _unverified_evaluation(record: Record) -> list[str]:
    """Return a line on responses to held-out prompts that could not be verified because of the machine."""
    if lost := record.get("evaluation_unverified"):
        return [f"warning: no evaluation: {lost:,} responses could not be verified because of the machine"]
    evaluation = record.get("evaluation", {})
    if lost := evaluation.get("num_unverified"):
        responses = evaluation["num_prompts"] * evaluation["num_samples"]
        return [
            f"warning: {lost:,} of {responses:,} responses to held-out prompts could not be verified because of the "
            "machine; they do not count"
        ]
    return []
