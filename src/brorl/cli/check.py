"""`brorl check`: everything that can be found out about a recipe before it is trained, without writing anything."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from brorl.api.runs_folder import refuse_used_folder
from brorl.cli.settings import Commands, add_settings, overrides_of
from brorl.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from brorl.assemble.inputs import RunInputs
    from brorl.config.settings import TrainConfig
    from brorl.planning.step_forecast import StepForecast
    from brorl.verify.trial import Trial, Verified

_PHASES = ("generation", "verification", "training", "diagnostics", "storing")


def add_parser(commands: Commands, chosen: bool) -> None:
    """Add the command; its settings only if it was `chosen`."""
    parser = commands.add_parser(
        "check",
        usage="brorl check [RECIPE] [--no-timing] [--key value ...]",
        help="check a recipe without training: settings, prompts, verifier, memory, seconds a step",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", nargs="?", default="quickstart", metavar="RECIPE", help="YAML file or built-in name")
    parser.add_argument(
        "--no-timing", "--no_timing", dest="timing", action="store_false",
        help="do not load the model to measure the seconds of a step",
    )  # fmt: skip
    parser.set_defaults(execute=lambda parsed: check(parsed.recipe, overrides_of(parsed), parsed.timing))
    if chosen:
        add_settings(parser)


def check(recipe: str, overrides: dict[str, Any], timing: bool = True) -> int:
    """Check a recipe, print what was found, and return the exit code."""
    from brorl.config.reading import make_config, read_recipe

    config = make_config(read_recipe(recipe), overrides, recipe)
    if config.output_dir is not None:
        refuse_used_folder(Path(config.output_dir).expanduser())

    from rich.console import Console

    from brorl.assemble.inputs import input_lines, prepare
    from brorl.assemble.run import check_start
    from brorl.trackers import require_package

    for tracker in config.tracking.to:
        require_package(tracker)
    check_start(config)
    console = Console(highlight=False)
    ready = prepare(config, config.model)
    _say(console, f"settings of {recipe}: ok")
    for source in dict.fromkeys(prompt.source for prompt in (*ready.prompts.train.prompts, *ready.prompts.held_out)):
        _show_source(console, source, ready)
    _say(console, "")
    for line in input_lines(ready, config):
        _say(console, line)
    if timing:
        for line in _forecast_lines(_forecast(console, config, ready), config):
            _say(console, line)
    _say(console, f"nothing was written; train with: brorl train {recipe}")
    return 0


def _show_source(console: Console, source: str, ready: RunInputs) -> None:
    """Show the prompts of a source: how many, how long, the first one as the model reads it, and its verification."""
    from brorl.report.visible_text import visible_text
    from brorl.verify.trial import try_verifier

    train = [prompt for prompt in ready.prompts.train.prompts if prompt.source == source]
    held_out = [prompt for prompt in ready.prompts.held_out if prompt.source == source]
    prompts = [*train, *held_out]
    lengths = [len(prompt.token_ids) for prompt in prompts]
    first = prompts[0]
    _say(
        console,
        f"\n{source}: {len(train):,} training prompts, {len(held_out):,} held out for evaluation; "
        f"{median(lengths):g} tokens in the median, {max(lengths):,} in the longest",
    )
    _say(console, f"prompt {first.id}, as the model reads it ({lengths[0]:,} tokens):")
    text = str(ready.tokenizer.decode(list(first.token_ids), skip_special_tokens=False))
    for line in visible_text(text).split("\n"):
        _say(console, f"  | {line}", "cyan")
    for domain in dict.fromkeys(prompt.domain for prompt in prompts):
        verifier = ready.grader.verifiers[domain]
        trial = try_verifier(verifier, [prompt for prompt in prompts if prompt.domain == domain])
        refuse_failed_trial(trial)
        for line in _trial_lines(trial):
            _say(console, line)


def refuse_failed_trial(trial: Trial) -> None:
    """Refuse a verifier that fails, or a built-in one that calls the reference answer incorrect.

    Raises:
        UserError: Naming the question, the response and what the verifier said.
    """
    from brorl.verify.verifier import TIMEOUT, is_failure

    prompt = trial.prompt
    for verified in (trial.right, trial.wrong):
        reason = verified.verdict.reason
        if reason == TIMEOUT or is_failure(reason):
            raise UserError(
                f"the verifier of the domain {prompt.domain!r} failed on the response {_short(verified.response)} to "
                f"question {prompt.id}: {reason}; it has to return a verdict for every text"
            )
    if not trial.right.verdict.correct and trial.certain:
        raise UserError(
            f"question {prompt.id}: a response with the reference answer, {_short(trial.right.response)}, has the "
            f"verdict {trial.right.verdict.reason!r}, so no response can be correct; fix the row's answer"
        )


def _trial_lines(trial: Trial) -> list[str]:
    prompt = trial.prompt
    lines = [
        f"verified as {prompt.domain}, question {prompt.id} with the reference answer {_short(prompt.reference)}:",
        _verified_line("reference answer", trial.right),
        _verified_line("another answer", trial.wrong),
    ]
    if not trial.right.verdict.correct:
        lines.append(
            "  warning: your function calls the reference answer incorrect; this is right only if it wants more"
        )
    if trial.wrong.verdict.correct:
        lines.append("  warning: your function calls another answer correct")
    return lines


def _verified_line(name: str, verified: Verified) -> str:
    verdict = verified.verdict
    outcome = "correct" if verdict.correct else "incorrect"
    reason = "" if verdict.reason == outcome else f", {_short(verdict.reason, quoted=False)}"
    extracted = "no answer extracted" if verdict.extracted is None else f"extracted {_short(verdict.extracted)}"
    return f"  {name}, as the response {_short(verified.response)}: {outcome}{reason} ({extracted})"


def _forecast(console: Console, config: TrainConfig, ready: RunInputs) -> StepForecast:
    """Load the model and make a few small steps in a temporary folder."""
    from tempfile import TemporaryDirectory

    from brorl.assemble.run import build_pilot_parts
    from brorl.assemble.settings import build_sampling
    from brorl.planning.step_forecast import forecast_step

    _say(console, "loading the model and timing a few small steps (--no-timing leaves this out)", "dim")
    parts = build_pilot_parts(config, ready, build_sampling(config))
    with TemporaryDirectory(prefix="brorl-check-") as scratch:
        return forecast_step(parts, config.samples_per_step // config.prompts_per_step, Path(scratch))


def _forecast_lines(forecast: StepForecast, config: TrainConfig) -> list[str]:
    """Say how long a step and the run will take, and how that was estimated."""
    from brorl.format import duration
    from brorl.planning.report import seconds_text
    from brorl.planning.step_forecast import MOST_TOKENS

    total = forecast.seconds["total"]
    phases = ", ".join(f"{name} {seconds_text(forecast.seconds[name])}" for name in _PHASES if name in forecast.seconds)
    lines = [f"seconds a step: about {seconds_text(total)} ({phases})"]
    if config.steps is not None:
        lines.append(f"{config.steps:,} steps: about {duration(config.steps * total)}, without evaluations")
    how = (
        f"estimated from {forecast.num_rollouts:,} rollouts in steps of up to {forecast.num_prompts} prompts, timed in "
        f"{forecast.measured_seconds:.1f} s, and extrapolated to {config.samples_per_step // config.prompts_per_step} "
        f"rollouts x {config.prompts_per_step} prompts"
    )
    if not config.dynamic_sampling.enabled:
        lines.append(how)
    elif forecast.kept_share is None:
        lines += [
            how,
            "warning: none of the measured groups had both correct and incorrect rollouts; if that stays so, a step "
            "samples again and again, takes longer than predicted, and learns nothing",
        ]
    else:
        lines.append(f"{how}; {forecast.kept_share:.0%} of the groups are expected to have both outcomes")
    if forecast.most_seconds > 1.01 * total:
        lines.append(
            f"measured responses were cut at {MOST_TOKENS} tokens; if all that were cut go on to "
            f"{config.sampling.max_new_tokens:,}, a step takes up to about {seconds_text(forecast.most_seconds)} s"
        )
    return lines


def _short(text: str, quoted: bool = True) -> str:
    from brorl.report.visible_text import visible_text

    shown = visible_text(text if len(text) <= 80 else f"{text[:77]}...", one_line=True)
    return f"`{shown}`" if quoted else shown


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, soft_wrap=True, markup=False, style=style)
