"""`brorl plan`: what another factor of N would buy on this machine, before anybody pays for a run."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import brorl
from brorl.activity import Phase
from brorl.api.checkpoint import resolve_checkpoint
from brorl.cli.settings import Commands, add_settings, overrides_of
from brorl.cli.stop_signals import STOPPED
from brorl.errors import UserError
from brorl.format import plain
from brorl.runs import RUNS

if TYPE_CHECKING:
    from rich.console import Console

    from brorl.config.settings import TrainConfig
    from brorl.console.screen import Screen
    from brorl.planning.pilot import PilotParts
    from brorl.planning.recommendation import PlanRow

_ROLLOUTS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_LEAST_PROMPTS, _LEAST_ROLLOUTS = 8, 4
_RECIPE = "quickstart"
_NOT_COMPARED = ("rollouts_per_prompt", "prompts_per_step", "seed", "steps", "evaluation.every")  # it decides these
_COMPARED_STEPS = 100  # what a comparison that is recommended lasts, in steps


def add_parser(commands: Commands, chosen: bool) -> None:
    """Add the command; its settings only if it was `chosen`."""
    parser = commands.add_parser(
        "plan",
        usage="brorl plan [CHECKPOINT] [--recipe RECIPE] [--seconds-per-step S] [--key value ...]",
        help="say what more rollouts per prompt would buy, and cost, on this machine",
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint", nargs="?", metavar="CHECKPOINT",
        help="a model (`quickstart`, a folder, a hub id), a run, or a checkpoint in one (default: the recipe's model)",
    )  # fmt: skip
    parser.add_argument("--recipe", metavar="RECIPE", help="YAML file or name (default: the run's, or quickstart)")
    parser.add_argument(
        "--data",
        metavar="SOURCE",
        help="file, hub id or puzzle of the prompts, as data.sources (default: the recipe's)",
    )
    for name, default, text in (
        ("pilot-prompts", 64, "training prompts of the pilot"),
        ("pilot-rollouts", 64, "rollouts of each, an even number"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="INT", help=f"{text} (default: {default})")
    parser.add_argument(
        "--rollouts", default=",".join(map(str, _ROLLOUTS)), metavar="N,N,...",
        help="numbers of rollouts per prompt to compare (default: 16,32,...,2048)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds-per-step", type=float, metavar="S",
        help="time budget of a step (default: what the recipe's own N and prompts take)",
    )  # fmt: skip
    parser.add_argument(
        "--output-dir", "--output_dir", default=str(RUNS / "plan"), metavar="DIR",
        help="folder; an earlier plan in it is replaced (default: %(default)s)",
    )  # fmt: skip
    parser.set_defaults(execute=plan)
    if chosen:
        from brorl.config.reading import settings_of
        from brorl.config.settings import TrainConfig

        add_settings(parser, [name for name, _ in settings_of(TrainConfig) if name != "output_dir"])


def plan(parsed: argparse.Namespace) -> int:
    """Take a pilot, print the plan, write it, and return the exit code."""
    wanted = check(parsed)
    config, num_rollouts = config_of(parsed)

    from brorl.console.screen import Screen

    with Screen(f"brorl {brorl.__version__}") as screen:
        return _plan(parsed, wanted, config, num_rollouts, screen)


def _plan(parsed: argparse.Namespace, wanted: list[int], config: TrainConfig, num_rollouts: int, screen: Screen) -> int:
    from brorl.assemble.run import build_pilot

    output = Path(parsed.output_dir).expanduser()
    parts = build_pilot(config, screen.observe)
    screen.observe(Phase("measuring"))
    if parsed.pilot_prompts > parts.stream.num_prompts:
        raise UserError(
            f"--pilot-prompts {parsed.pilot_prompts} is more than the {parts.stream.num_prompts} training prompts that "
            "there are; lower it"
        )
    is_new = not output.exists()
    _make_folder(output)
    console = screen.console
    try:
        _announce(console, parsed, config, parts, num_rollouts)
        _measure_and_report(console, parsed, config, parts, sorted({*wanted, num_rollouts}), num_rollouts, output)
    except KeyboardInterrupt:
        if is_new:
            with suppress(OSError):  # not empty: the plan is written already
                output.rmdir()
        console.print("\nstopped: a plan is written at its end; give the same command again", soft_wrap=True)
        return STOPPED
    return 0


def check(parsed: argparse.Namespace) -> list[int]:
    """Check the options, and return the numbers of rollouts to compare.

    Raises:
        UserError: On the first that cannot work.
    """
    try:
        wanted = [int(n) for n in parsed.rollouts.split(",")]
    except ValueError:
        raise UserError(f"--rollouts: the value should be numbers like 16,64,512, not {parsed.rollouts!r}") from None
    if min(wanted) < 2 or max(wanted) > 2**20:
        raise UserError(f"--rollouts: every number should lie between 2 and {2**20:,}, not {parsed.rollouts!r}")
    if parsed.pilot_prompts < _LEAST_PROMPTS:
        raise UserError(f"--pilot-prompts: at least {_LEAST_PROMPTS} are needed, not {parsed.pilot_prompts}")
    if parsed.pilot_rollouts < _LEAST_ROLLOUTS or parsed.pilot_rollouts % 2:
        raise UserError(
            f"--pilot-rollouts: an even number from {_LEAST_ROLLOUTS} on is needed (gradients are compared between two "
            f"halves), not {parsed.pilot_rollouts}"
        )
    budget = parsed.seconds_per_step
    if budget is not None and not 0 < budget < float("inf"):
        raise UserError(f"--seconds-per-step: a time above 0 is needed, not {budget}")
    return wanted


def config_of(parsed: argparse.Namespace) -> tuple[TrainConfig, int]:
    """Return the settings to plan for, and the recipe's own number of rollouts per prompt.

    Raises:
        UserError: If recipe, run or settings do not work.
    """
    from brorl.config.reading import make_config, parse_yaml, read_recipe

    overrides = overrides_of(parsed)
    if parsed.data is not None:
        overrides["data.sources"] = parse_yaml(parsed.data, "--data")
    model, run_config = (None, None) if parsed.checkpoint is None else resolve_checkpoint(parsed.checkpoint)
    if model is not None:
        if "model" in overrides:
            raise UserError(f"{parsed.checkpoint} and --model both name a model; give one of them")
        overrides["model"] = model
    source = parsed.recipe or (str(run_config) if run_config else _RECIPE)
    config = make_config(read_recipe(source), {**overrides, "adaptive.enabled": False}, source)
    return config, config.rollouts_per_prompt


def _make_folder(output: Path) -> None:
    """Make the folder before any work, or refuse one that cannot be written to."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write to --output-dir {output} ({error.strerror}); choose a folder that you may write to"
        ) from error


def _announce(
    console: Console, parsed: argparse.Namespace, config: TrainConfig, parts: PilotParts, num_rollouts: int
) -> None:
    """Say what is about to happen, and how much work it is."""
    pilot = parsed.pilot_prompts * parsed.pilot_rollouts
    step = num_rollouts * config.prompts_per_step
    parameters = sum(p.numel() for p in parts.model.parameters())
    lines = [
        f"brorl {brorl.__version__}: a plan for {config.model} ({parameters:,} parameters) on {parts.model.device}",
        f"the recipe: N = {num_rollouts} rollouts x {config.prompts_per_step} prompts a step",
        *_unnamed_recipe(parsed),
        f"pilot: {parsed.pilot_rollouts} rollouts of each of {parsed.pilot_prompts} training prompts, {pilot:,} in all "
        f"({plain(pilot / step, 2)} of a step), and two gradients of each prompt",
        "then the phases of a step are timed at up to 5 sizes, 3 times each after 1 or 2 to warm up; none samples more "
        "than the pilot, and after a pilot of more than 10 s none samples more than a quarter of it",
    ]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def _unnamed_recipe(parsed: argparse.Namespace) -> list[str]:
    """Say that the quickstart's recipe is planned where nothing names another one."""
    if parsed.recipe or (parsed.checkpoint is not None and resolve_checkpoint(parsed.checkpoint).run_config):
        return []
    if parsed.data is not None or hasattr(parsed, "setting:data.sources"):
        return [f"no --recipe was given: all settings but the prompts are those of {_RECIPE}"]
    return [
        f"no --recipe was given: the plan is for the arithmetic puzzles of {_RECIPE}; plan your own prompts with "
        "--recipe mine.yaml or --data FILE"
    ]


def _measure_and_report(
    console: Console,
    parsed: argparse.Namespace,
    config: TrainConfig,
    parts: PilotParts,
    wanted: list[int],
    num_rollouts: int,
    output: Path,
) -> None:
    import json
    from tempfile import TemporaryDirectory

    import numpy as np

    from brorl.planning import report as report_plan
    from brorl.planning.figure import draw_plan
    from brorl.planning.recommendation import StepSettings, make_plan
    from brorl.planning.step_timing import measure
    from brorl.storage import replace_file, storage_errors

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, style="dim")

    with TemporaryDirectory(dir=output, prefix=".pilot-") as scratch:
        measured = measure(parts, parsed.pilot_prompts, parsed.pilot_rollouts, np.array(wanted), Path(scratch), say)
    settings = StepSettings(
        num_rollouts=num_rollouts,
        prompts_per_step=config.prompts_per_step,
        mini_batches=config.optimizer.mini_batches,
        dynamic_sampling=config.dynamic_sampling.enabled,
        most_prompts=max(parts.stream.num_prompts, config.prompts_per_step),
    )
    found = make_plan(measured.counts, measured.cost, settings, parsed.seconds_per_step, parts.generator(3))
    report = report_plan.PlanReport.of(found, measured, settings, config.model, str(parts.model.device))
    with storage_errors(output):
        replace_file(output / "plan.json", json.dumps(report_plan.plan_record(report), indent=2).encode())
        draw_plan(report, output / "plan.png")
    console.print(report_plan.pilot_line(report), soft_wrap=True, markup=False)
    for table in (report_plan.share_table, report_plan.step_table, report_plan.budget_table):
        console.print()
        console.print(table(report))
    for line in report_plan.advice(report):
        console.print(f"- {line}", soft_wrap=True, markup=False)
    console.print(f"\nwritten: {output / 'plan.json'}, {output / 'plan.png'}", soft_wrap=True, markup=False)
    if found.chosen is not None:
        row = found.rows[found.chosen]
        options = {"rollouts_per_prompt": row.num_rollouts, "prompts_per_step": row.budget_prompts}
        command = _command(parsed, "train", options)
        console.print(f"train with it: {command}", soft_wrap=True, markup=False)
        if sweep := _sweep(found.rows, row, num_rollouts):
            budget = plain(_COMPARED_STEPS * found.budget).replace(",", "")
            measure_it = _command(parsed, "compare", {}, [*sweep, "--budget", budget])
            console.print(f"or measure it: {measure_it}", soft_wrap=True, markup=False)


def _sweep(rows: Sequence[PlanRow], chosen: PlanRow, num_rollouts: int) -> list[str]:
    """Return the options that compare the N of the plan, each with the prompts that fit its time; few of them."""
    fitting = [row for row in rows if row.budget_prompts]
    wanted = {fitting[0].num_rollouts, num_rollouts, chosen.num_rollouts, 512} if fitting else set()
    arms = [row for row in fitting if row.num_rollouts in wanted]
    if len(arms) < 2:
        return []
    values = (
        ("rollouts_per_prompt", [row.num_rollouts for row in arms]),
        ("prompts_per_step", [row.budget_prompts for row in arms]),
    )
    return [word for name, given in values for word in ("--sweep", f"{name}={','.join(map(str, given))}")]


def _command(parsed: argparse.Namespace, command: str, settings: Mapping[str, Any], options: Sequence[str] = ()) -> str:
    """Return a command that goes by the recommendation; settings given here stay as they were given."""
    given: dict[str, Any] = {n.removeprefix("setting:"): v for n, v in vars(parsed).items() if n.startswith("setting:")}
    recipe, model = parsed.recipe or _RECIPE, "model" if command == "train" else "from"
    if parsed.checkpoint is not None:
        given[model], run_config = resolve_checkpoint(parsed.checkpoint)
        recipe = parsed.recipe or run_config or _RECIPE
        if recipe == run_config is not None and command == "train":
            given["output_dir"] = "null"  # that of the run is taken
    elif "model" in given:
        given[model] = given.pop("model")
    if parsed.data is not None:
        given["data.sources"] = parsed.data
    if command == "compare":
        given = {name: value for name, value in given.items() if name not in _NOT_COMPARED}
    given |= settings
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return shlex.join(["brorl", command, str(recipe), *words, *options])
