"""`brorl.check`: check everything about a recipe that does not require training. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.text import Text

from brorl.activity import Echo
from brorl.api.arguments import check_cheaply, recipe_name, refuse_in_worker
from brorl.api.data import prompt_lines
from brorl.api.data_warnings import (
    other_spellings,
    quoted,
    unreachable_references,
    unread_forms,
    unused_options,
)
from brorl.api.first_transcript import transcript_lines
from brorl.api.in_memory import resolve_in_memory
from brorl.config.reading import ConfigOrPath, flat_settings, options_of
from brorl.config.settings import TrainConfig
from brorl.console.progress import truncation_warning
from brorl.console.screen import in_notebook, text_console
from brorl.errors import UserError, option
from brorl.format import counted, duration, listed, plain, shell_command, shortened
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import CODE_DOMAIN, MATH_DOMAIN, SCIENCE_DOMAIN
from brorl.prompts.settings import FileSource
from brorl.sampling import decode_tokens
from brorl.table import Result, Table
from brorl.trackers import require_package
from brorl.verdict import Verdict, is_failure, is_timeout
from brorl.verification.verifier import Trial, try_verifier

if TYPE_CHECKING:
    from brorl.algorithms.groups import Group
    from brorl.planning.step_forecast import StepForecast
    from brorl.training.inputs import RunInputs


_ANSWER = "reference answer"
_MUCH_LONGER = 16  # times the measured length
_LONGER = ", or more, because a token of a long response attends to more tokens"
_MIN_SLOWDOWN = 1.2  # ratio of seconds; anything smaller is noise
_PHASES = ("generation", "verification", "training", "diagnostics", "storing")


@dataclass(frozen=True, eq=False, repr=False)
class CheckResult(Result):
    """The result of checking a recipe that can be trained."""

    config: TrainConfig  # the checked settings
    trials: tuple[Trial, ...]  # one trial of the verifier per source and domain
    forecast: StepForecast | None  # expected seconds per step; None without timing
    lines: tuple[Text | Table, ...]  # the report

    def parts(self) -> tuple[Text | Table, ...]:
        """Return the report."""
        return self.lines

    def __repr__(self) -> str:
        seconds = "" if self.forecast is None else f", about {self.forecast.seconds['total']:.2g} s per step"
        return f"CheckResult({self.config.model}, {counted(len(self.trials), 'verifier')} tried{seconds})"


def check(
    recipe: ConfigOrPath | None = None,
    *,
    timing: bool = True,
    timing_seconds: float = 60.0,
    progress: bool = True,
    **overrides: Any,
) -> CheckResult:
    """Check the settings, prompts, verifiers and memory of a recipe, and time a few small steps; write nothing.

    Examples:
        >>> brorl.check("mine.yaml", rollouts_per_prompt=256)
        >>> brorl.check(data=rows, reward=right, timing=False)

    Args:
        recipe: Built-in recipe or YAML file; from Python also nested settings or a config (default:
            quickstart).
        timing: Load the model and forecast the seconds of a step.
        timing_seconds: Time limit for timing small steps, from which the time of a full step is extrapolated.
        progress: Print the report line by line.
        overrides: Settings that replace those of the recipe, nested or by dotted name; `data` may be rows, and `reward`
            and `tools` functions, as in `brorl.train`.

    Raises:
        UserError: On the first problem.
    """
    refuse_in_worker()
    if not 0 < timing_seconds < inf:
        raise UserError(f"{option('timing-seconds')}: expected a number of seconds above 0, not {timing_seconds:g}")
    with TemporaryDirectory(prefix="brorl-given-") as scratch:
        reward = overrides.pop("reward", None)
        recipe, config, lines = resolve_in_memory(recipe, overrides, reward, Path(scratch))
        check_cheaply(config)
        report = _Report(progress)
        report.show(*lines)
        train_command = "brorl.train and the same arguments"
        if not lines and reward is None and not isinstance(overrides.get("tools"), list | tuple):
            train_command = shell_command("train", recipe_name(recipe), *options_of(flat_settings(overrides)))
        return _checked(config, recipe_name(recipe), timing_seconds if timing else None, report, train_command)


def _checked(
    config: TrainConfig, name: str, timing_seconds: float | None, report: _Report, train_command: str
) -> CheckResult:
    """Run the checks that need torch; `train_command` trains with the same settings."""
    from brorl.training.inputs import input_lines, prepare_run  # imports torch
    from brorl.training.run import check_start

    for tracker in config.tracking.to:
        require_package(tracker)
    check_start(config)
    memory: list[Table] = []
    inputs = prepare_run(config, config.model, memory.append)
    report.show(f"settings of {name}: ok")
    trials = []
    for source in dict.fromkeys(prompt.source for prompt in (*inputs.prompts.train.prompts, *inputs.prompts.held_out)):
        prompts = _show_source(source, inputs, report)
        files = [s for s in (*config.data.sources, *config.evaluation.sources) if isinstance(s, FileSource)]
        report.show(*unreachable_references(prompts))
        report.show(*(line for file in files if file.label == source for line in unused_options(file)))
        for domain in dict.fromkeys(prompt.domain for prompt in prompts):
            verifier = inputs.grader.verifiers[domain]
            is_own = domain in config.verification.functions
            domain_prompts = [prompt for prompt in prompts if prompt.domain == domain]
            trial = try_verifier(verifier, domain_prompts)
            check_trial(trial)
            report.show(*_trial_lines(trial, is_own))
            report.show(*unread_forms(verifier, domain_prompts, is_own))
            if domain in (MATH_DOMAIN, SCIENCE_DOMAIN):
                report.show(*other_spellings(verifier, domain_prompts))
            trials.append(trial)
    if inputs.toolbox is not None:
        report.show(*transcript_lines(inputs.toolbox))
    report.show("", *input_lines(inputs, config))
    report.show_tables(memory)
    forecast = None
    if timing_seconds is not None:
        report.show(
            f"loading the model, then timing small steps for at most {timing_seconds:g} s ({option('timing-seconds')}; "
            f"{option('no-timing')} skips this)",
            style="dim",
        )
        forecast = _forecast(config, inputs, timing_seconds, report.show)
        report.show(*_forecast_lines(forecast, config))
    report.show(*_thought_lines(config, inputs, () if forecast is None else forecast.groups))
    report.show(f"nothing was written; train with: {train_command}")
    return CheckResult(config, tuple(trials), forecast, tuple(report.lines))


class _Report:
    """Prints lines and keeps them. In a notebook it only keeps them, because the result shows them."""

    def __init__(self, progress: bool) -> None:
        self._console = text_console(quiet=not progress or in_notebook())
        self.lines: list[Text | Table] = []

    def show(self, *lines: str | Text, style: str = "") -> None:
        for line in lines:
            self.lines.append(Text(line, style) if isinstance(line, str) else line)
            self._console.print(self.lines[-1], soft_wrap=True)

    def show_tables(self, tables: Sequence[Table]) -> None:
        self.lines += tables
        self._console.print(*tables, sep="\n")


def _show_source(source: str, inputs: RunInputs, report: _Report) -> list[Prompt]:
    """Show a source's number of prompts, their lengths, and the first prompt as the model reads it."""
    train = [prompt for prompt in inputs.prompts.train.prompts if prompt.source == source]
    held_out = [prompt for prompt in inputs.prompts.held_out if prompt.source == source]
    prompts = [*train, *held_out]
    lengths = [len(prompt.token_ids) for prompt in prompts]
    first = prompts[0]
    report.show(
        f"\n{source}: {len(train):,} training prompts, {len(held_out):,} held out for evaluation; "
        f"median length {median(lengths):g} tokens, longest {max(lengths):,}",
    )
    text = decode_tokens(inputs.tokenizer, first.token_ids, special=True)
    report.show(*prompt_lines(replace(first, text=text), whole=inputs.toolbox is not None))
    return prompts


def check_trial(trial: Trial) -> None:
    """Reject a verifier that fails, or a built-in verifier that rejects the reference answer."""
    prompt = trial.prompt
    for response, verdict in ((trial.right, trial.right_verdict), (trial.wrong, trial.wrong_verdict)):
        reason = verdict.reason
        if is_timeout(reason) or is_failure(reason):
            raise UserError(
                f"the verifier of the domain {prompt.domain!r} failed on the response {quoted(response)} to "
                f"question {prompt.id}: {reason}; it must return a verdict for any text"
            )
    # the tests can be right even if this solution is wrong
    others_pass = prompt.domain == CODE_DOMAIN and any(verdict.correct for _, verdict in trial.answers)
    if not trial.right_verdict.correct and trial.certain and not others_pass:
        raise UserError(
            f"question {prompt.id}: a response with the reference answer, {quoted(trial.right)}, gets the "
            f"verdict {trial.right_verdict.reason!r}, so no response can be correct; fix the row's answer"
        )


def _trial_lines(trial: Trial, is_own: bool) -> list[str]:
    prompt = trial.prompt
    verifier = "your function" if is_own else "the verifier"
    reference, right = ("tests", "stored solution") if prompt.domain == CODE_DOMAIN and not is_own else (_ANSWER,) * 2
    lines = [f"verified as {prompt.domain}, question {prompt.id} with the {reference} {quoted(prompt.reference)}:"]
    known = trial.certain or (is_own and not prompt.reference.startswith("{"))  # "{" starts a row, not an answer
    if known:
        lines.append(_verdict_line(right, trial.right, trial.right_verdict))
    else:
        lines.append(f"  no {right}: no response to this question is known to be correct")
    lines.append(_verdict_line("a different answer", trial.wrong, trial.wrong_verdict))
    if len(trial.answers) > 1:
        accepted = sum(verdict.correct for _, verdict in trial.answers)
        lines.append(f"  {right}s of {len(trial.answers)} questions: {accepted} accepted")
    if is_own and known and not trial.right_verdict.correct:
        lines.append(
            "  warning: your function rejects the reference answer; this is right only if it also checks other things"
        )
    if trial.wrong_verdict.correct:
        lines.append(f"  warning: {verifier} accepts a different answer")
    rejected = [f"{prompt.id} ({verdict.reason})" for prompt, verdict in trial.answers if not verdict.correct]
    if rejected:
        more = [counted(len(rejected) - 3, "other")] if len(rejected) > 3 else []
        lines.append(f"  warning: the {right} is rejected, fix or delete these rows: {listed([*rejected[:3], *more])}")
    return lines


def _verdict_line(name: str, response: str, verdict: Verdict) -> str:
    outcome = "correct" if verdict.correct else "incorrect"
    reason = "" if verdict.reason == outcome else f", {shortened(verdict.reason)}"
    extracted = "" if verdict.extracted is None else f" (extracted {quoted(verdict.extracted)})"
    return f"  {name}, as the response {quoted(response)}: {outcome}{reason}{extracted}"


def _forecast(config: TrainConfig, inputs: RunInputs, max_seconds: float, echo: Echo) -> StepForecast:
    """Load the model and run a few small steps in a temporary folder."""
    from brorl.planning.step_forecast import forecast_step
    from brorl.rollout.chosen_engine import numbers_of_threads
    from brorl.training.local_parts import LocalParts

    with ExitStack() as ends, TemporaryDirectory(prefix="brorl-check-") as scratch:
        parts = LocalParts.load(config, inputs, on_end=ends.callback, echo=echo)
        threads = numbers_of_threads(config)
        return forecast_step(parts, Path(scratch), threads, max_seconds, echo)


def _forecast_lines(forecast: StepForecast, config: TrainConfig) -> list[str]:
    """Return the expected seconds per step and for the run, and how they were estimated."""
    import torch

    total = forecast.seconds["total"]
    rollouts = config.rollouts_per_prompt
    phases = ", ".join(f"{name} {plain(forecast.seconds[name])}" for name in _PHASES if name in forecast.seconds)
    lines = [f"seconds per step: about {plain(total)} ({phases})"]
    if config.steps is not None:
        lines.append(f"{config.steps:,} steps: about {duration(config.steps * total)}, without evaluations")
    lines.append(
        f"estimated from {forecast.num_rollouts:,} rollouts in steps of up to {forecast.num_prompts} prompts, timed in "
        f"{forecast.measured_seconds:.1f} s, extrapolated to {rollouts} rollouts x {config.prompts_per_step} prompts"
    )
    if forecast.is_stopped:
        lines[-1] += f", because larger steps would exceed the time limit ({option('timing-seconds')})"
    rate = config.dynamic_sampling.max_pass_rate
    limit = f" with a pass rate of at most {rate:g}" if rate < 1 else ""
    if forecast.kept_fraction is not None:
        lines[-1] += f"; the expected fraction of mixed groups{limit} is {forecast.kept_fraction:.0%}"
    elif config.dynamic_sampling.enabled and not forecast.truncation_rate:
        lines.append(
            f"warning: none of the measured groups is mixed (correct and incorrect rollouts){limit}; without mixed "
            "groups a step keeps resampling, takes longer than predicted, and learns nothing; try easier questions, a "
            "prompt.template that the model follows, a lower sampling.temperature, or more rollouts"
        )
    if forecast.truncation_rate:
        lines.append(
            f"{forecast.truncation_rate:.0%} of the measured responses were truncated at {forecast.max_tokens} tokens; "
            f"if all of these grow to {config.sampling.max_new_tokens:,}, a step takes about "
            f"{plain(forecast.max_seconds)} s"
            f"{_LONGER if config.sampling.max_new_tokens >= _MUCH_LONGER * forecast.max_tokens else ''}"
        )
        if config.dynamic_sampling.enabled:
            lines[-1] += (
                ", and longer if groups are dropped: truncated responses are graded incorrect, so the fraction of "
                "mixed groups was not measured"
            )
    if warning := truncation_warning(forecast.fraction_at_limit):
        lines.append(warning)
    if forecast.seconds_of_threads:
        lines.append(_threads_line(forecast.seconds_of_threads, torch.get_num_threads()))
    return lines


def _thought_lines(config: TrainConfig, inputs: RunInputs, groups: Sequence[Group]) -> list[str]:
    """Return a line if any prompts open a thought or any measured responses contain one."""
    tags = config.verification.thoughts
    if tags is None:
        return []
    prompts = [*inputs.prompts.train.prompts, *inputs.prompts.held_out]
    opened = sum(tags.opened_by(prompt.text) for prompt in prompts)
    findings: list[str] = []
    if opened:
        which = "all prompts end" if opened == len(prompts) else f"{opened:,} of {len(prompts):,} prompts end"
        findings.append(f"{which} with {tags.opening}, which opens a thought")
    thinking = cut = 0
    for group in groups:
        responses = zip(inputs.grader.texts(group), group.tree.finished, group.tree.leaf_count, strict=True)
        for text, finished, count in responses:
            if tags.opened_by(group.prompt.text) or tags.contained_in(text):
                thinking += int(count)
                cut += 0 if finished or tags.answer(group.prompt.text, text) is not None else int(count)
    if thinking:
        rollouts = sum(group.tree.num_rollouts for group in groups)
        longest = max(int(group.tree.length.max()) for group in groups)
        findings.append(
            f"{thinking:,} of {rollouts:,} measured rollouts contain a thought, and {cut:,} were truncated inside it "
            f"(at {longest:,} tokens; sampling.max_new_tokens = {config.sampling.max_new_tokens:,})"
        )
    judged = f"built-in verifiers judge what follows {tags.closing} (docs/how-to/thinking_models.md)"
    return [f"thoughts: {'; '.join([*findings, judged])}"] if findings else []


def _threads_line(seconds: Mapping[int, float], chosen: int) -> str:
    """Return the step time for each number of threads, and the setting to change if a different number is faster."""
    timed = ", ".join(f"{plain(time)} s with {counted(num_threads, 'thread')}" for num_threads, time in seconds.items())
    fastest = min(seconds, key=lambda num_threads: seconds[num_threads])
    slower = seconds.get(chosen, 0.0) / seconds[fastest]
    advice = f"; fastest right now: engine.threads: {fastest}" if slower > _MIN_SLOWDOWN else ""
    return f"threads: a small step takes {timed}; the run uses {chosen}{advice}"
