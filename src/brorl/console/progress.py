"""Show a training run's progress on the screen and in `run.log`, one line per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple

from rich.text import Text

from brorl.activity import Activity, Round
from brorl.console import tables
from brorl.console.screen import Screen, join_fitting
from brorl.cost import Budget, Cost, fraction_spent
from brorl.format import counted, duration
from brorl.runs.step_record import KeptRecord, SamplingRecord, SecondsRecord, StepRecord, total_cost

_LARGE_STEP = 0.5  # nats per token; PPO's clip keeps it near 0.01
_LINES_PER_HEADER = 25
_UNVERIFIED_FRACTION = 0.01  # warn if more of a step's rollouts are unverified
_STEPS_PER_WARNING = 10
_TRUNCATED_FRACTION = 1 / 3  # warn if more of the rollouts are truncated at the length limit
_CORRECT_FRACTION = 0.9  # warn if more of the rollouts are correct
_GAP = "  "
_INDENT = " " * 7  # for notes on a step


class TrainingProgress:
    """Writes one line per step. A run ends after `steps` steps (None: no limit) or when its budget is spent."""

    def __init__(self, steps: int | None, budget: Budget, screen: Screen) -> None:
        self._steps, self._budget, self._screen = steps, budget, screen
        self._step_lines = StepLines(screen.console.width)
        self._start: float | None = None
        self._spent = Cost()
        self._fraction_at_start = 0.0
        self._carried = 0
        self._num_lines = 0
        self._warned: dict[str, int] = {}  # kind of warning -> step that last showed it

    def recall(self, past: Sequence[StepRecord]) -> None:
        """Restore the metrics of steps before a resume."""
        self._spent = total_cost(past)
        self._carried = next((record.kept.carried for record in reversed(past) if record.kept), 0)

    def observe(self, activity: Activity) -> None:
        """Update the status line; at rounds 3, 4, 6, 10, ... of a step, also write a line."""
        self._screen.observe(activity)
        if isinstance(activity, Round) and activity.number > 2 and (activity.number - 2).bit_count() == 1:
            so_far = f"{activity.groups} of {activity.wanted} mixed groups so far"
            self._screen.echo(Text(f"step {activity.step}: round {activity.number}, {so_far}", style="dim"))
            self._warn(activity.step, {"cut": truncation_warning(activity.truncation_rate)})

    def show(self, record: StepRecord) -> None:
        """Write the line for a step or an evaluation, and notes on anything unusual."""
        self._spent += record.cost
        if self._start is None:
            self._start, self._fraction_at_start = perf_counter(), self._fraction_done()
        if record.update:
            if record.objective and record.objective.begins:
                self._screen.echo(Text(f"begins: {record.objective.begins}", style="bold"))
            self._show_step(record)
            indent = _INDENT
        elif record.evaluation or record.evaluation_unverified:
            if record.evaluation:
                when = "at the end" if record.step else "before training"
                self._screen.echo(f"held-out prompts {when}: {tables.pass_at_line(record.evaluation)}")
            indent = ""
        else:
            return
        for note in step_notes(record):
            self._screen.echo(Text(f"{indent}{note}", style="yellow"))
        self._warn(record.step, warnings(record))

    def _show_step(self, record: StepRecord) -> None:
        if self._num_lines == 0:
            self._step_lines = StepLines(self._screen.console.width, tools=record.tools is not None)
            self._screen.echo(Text(self._step_lines.legend, style="dim"))
        if self._num_lines % _LINES_PER_HEADER == 0:
            self._screen.echo(Text(self._step_lines.header, style="dim"))
        self._num_lines += 1
        kept = record.kept or KeptRecord()
        carried, self._carried = min(self._carried, kept.groups), kept.carried
        self._screen.echo(self._step_lines.line(record, carried, self._time_left()))

    def _warn(self, step: int, lines: Mapping[str, str | None]) -> None:
        """Write the given warnings, each kind at most once every ten steps."""
        for kind, line in lines.items():
            if line is not None and step >= self._warned.get(kind, -_STEPS_PER_WARNING) + _STEPS_PER_WARNING:
                self._warned[kind] = step
                self._screen.echo(Text(f"{_INDENT}{line}", style="yellow"))

    def _fraction_done(self) -> float:
        return fraction_spent(self._steps, self._budget, self._spent.steps, self._spent)

    def _time_left(self) -> str:
        assert self._start is not None
        fraction = self._fraction_done()
        if fraction <= self._fraction_at_start:
            return ""
        return duration((perf_counter() - self._start) / (fraction - self._fraction_at_start) * max(1 - fraction, 0.0))


def step_notes(record: StepRecord) -> list[str]:
    """Return one line for each unusual event in a step."""
    lines = []
    evaluation = record.evaluation
    for measured, where in (
        (record.sampling, "their reasons are in rollouts/"),
        (evaluation, "this was during evaluation"),
    ):
        if measured and (measured.verifier_timeouts or measured.verifier_failures):
            lines.append(
                f"{measured.verifier_timeouts} verifications timed out and {measured.verifier_failures} failed; they "
                f"count as incorrect, and {where}"
            )
    if lost := record.evaluation_unverified:
        lines.append(
            f"warning: no evaluation: {lost:,} responses could not be verified because of infrastructure failures"
        )
    elif evaluation and evaluation.num_unverified:
        lines.append(
            f"warning: {evaluation.num_unverified:,} of {evaluation.num_prompts * evaluation.num_samples:,} responses "
            "to held-out prompts could not be verified because of infrastructure failures; they are excluded"
        )
    update = record.update
    if update and update.out_of_memory_retries:
        lines.append(f"out of memory: {update.nodes_per_pass} nodes per forward pass from now on, same gradients")
    if update and update.old_policy_kl > _LARGE_STEP:
        lines.append(
            f"warning: the updates of this step moved the policy by {update.old_policy_kl:.2g} nats per token; "
            "lower optimizer.learning_rate"
        )
    if record.reference_reset is not None:
        lines.append(f"reference policy reset: {record.reference_reset}")
    if record.collapse is not None:
        lines.append(f"warning: {record.collapse}")
    return lines


def warnings(record: StepRecord) -> dict[str, str | None]:
    """Return warnings about truncated, unverified (more than 1%), or correct rollouts (90%), and stopped programs."""
    sampling = record.sampling
    if sampling is None:
        return {}
    lost = sampling.samples_unverified or 0
    lines = {"cut": truncation_warning(sampling.truncation_rate, record.tools is not None)}
    if lost > _UNVERIFIED_FRACTION * sampling.samples:
        lines["unverified"] = (
            f"warning: {lost:,} of {sampling.samples:,} rollouts could not be verified because of infrastructure "
            f"failures (most often: {next(iter(sampling.unverified_reasons or {}), 'unknown')}); they were removed "
            "from their groups"
        )
    if sampling.accuracy > _CORRECT_FRACTION:
        lines["correct"] = (
            f"warning: {sampling.accuracy:.0%} of the rollouts are correct; read some (brorl samples RUN --kind "
            "right), because a model can also learn responses that the verifier accepts by mistake"
        )
    if timed_out := sampling.verifier_batch_timeouts:
        lines["programs"] = (
            f"warning: {counted(timed_out, 'response')} used up an equal share of the batch time limit and were graded "
            "incorrect; raise verification.batch_timeout_s or verification.workers if they are right"
        )
    return lines


def truncation_warning(fraction: float, tools: bool = False) -> str | None:
    """Return a warning if more than a third of the rollouts were truncated at the length limit."""
    if not fraction > _TRUNCATED_FRACTION:
        return None
    tool_advice = "; tools.max_turns and tools.max_response_tokens truncate rollouts too" if tools else ""
    return (
        f"warning: {fraction:.0%} of the rollouts were truncated at sampling.max_new_tokens; raise it, or make the "
        f"model answer sooner (docs/how-to/thinking_models.md){tool_advice}"
    )


class _Column(NamedTuple):
    head: str
    width: int
    rank: int  # narrow terminals drop the highest rank first
    legend: str = ""
    style: str = ""


_TURNS = "turns"  # shown only in runs with tools
_COLUMNS = (
    _Column("step", 5, 0),
    _Column("reward", 6, 1),
    _Column("held-out pass@1", 18, 3, style="bold green"),
    _Column("groups", 17, 2, "groups: in the update"),
    _Column("sampled", 7, 8, "sampled: all prompts"),
    _Column("cut", 4, 6, "cut: rollouts at the limit"),
    _Column(_TURNS, 5, 7),
    _Column("computed", 8, 9, "computed: of sampled tokens"),
    _Column("rollouts/s", 10, 10),
    _Column("time", 6, 4),
    _Column("sample/verify/learn", 19, 11),
    _Column("left", 6, 5),
)


def _cells(record: StepRecord, carried: int, left: str) -> list[str]:
    """Return the text of every column for one step."""
    sampling = record.sampling or SamplingRecord()
    kept = record.kept or KeptRecord()
    seconds = record.seconds or SecondsRecord()
    pass_at_1 = record.evaluation.pass_at.get(1) if record.evaluation else None
    stages = (seconds.generation, seconds.verification, seconds.training)
    return [
        str(record.step),
        f"{sampling.reward:.3f}",
        f"{pass_at_1.value:.3f} [{pass_at_1.low:.2f}, {pass_at_1.high:.2f}]" if pass_at_1 else "",
        f"{kept.groups} ({carried} carried)" if carried else str(kept.groups),
        f"{sampling.groups:,}",
        f"{sampling.truncation_rate:.0%}",
        f"{record.tools.turns:.2f}" if record.tools else "",
        f"{sampling.unique_tokens / max(sampling.sampled_tokens, 1):.1%}",
        f"{sampling.samples / seconds.total:,.0f}",
        f"{seconds.total:.2f}s" if seconds.total < 100 else duration(seconds.total),
        "/".join(f"{s:.2f}" if s < 100 else f"{s:.0f}" for s in (stage or 0.0 for stage in stages)),
        left,
    ]


class StepLines:
    """Makes lines of at most `width` characters. `header` contains the column heads; `legend` explains some of them.

    The least important columns are dropped on a narrow terminal.
    """

    def __init__(self, width: int, tools: bool = False) -> None:
        by_rank = sorted((c for c in _COLUMNS if tools or c.head != _TURNS), key=lambda column: column.rank)
        widths = accumulate(len(_GAP) + column.width for column in by_rank)
        num_shown = sum(total - len(_GAP) <= width for total in widths)
        self._shown = set(by_rank[: max(num_shown, 1)])
        shown = [column for column in _COLUMNS if column in self._shown]
        self.header = _GAP.join(c.head.rjust(c.width) for c in shown)
        self.legend = join_fitting([c.legend for c in shown if c.legend] or [""], width, "; ")

    def line(self, record: StepRecord, carried: int, left: str) -> Text:
        """Return the line for a step; `carried` of its groups come from earlier steps."""
        cells = zip(_COLUMNS, _cells(record, carried, left), strict=True)
        return Text(_GAP).join(Text(text.rjust(c.width), style=c.style) for c, text in cells if c in self._shown)
