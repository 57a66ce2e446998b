"""`brorl.plan`: recommend N and the number of prompts per step for a time budget, from measurements made here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import brorl
from brorl.activity import Stage
from brorl.api.arguments import refuse_in_worker, resolve_checkpoint, resolve_config
from brorl.config.reading import ConfigOrPath, flat_settings, parse_yaml
from brorl.config.settings import TrainConfig
from brorl.console.screen import Screen, in_notebook
from brorl.errors import UserError, option
from brorl.format import plain
from brorl.runs import RUNS
from brorl.storage import output_folder, replace_file, storage_errors
from brorl.table import Table

if TYPE_CHECKING:
    from brorl.planning.advice import PlanResult
    from brorl.training.local_parts import LocalParts

ROLLOUTS = (16, 32, 64, 128, 256, 512, 1024, 2048)
RECIPE = "quickstart"
_MIN_PROMPTS = 8
_MIN_ROLLOUTS = 4
_MAX_ROLLOUTS = 2**20


def plan(
    checkpoint: str | Path | None = None,
    *,
    recipe: ConfigOrPath | None = None,
    pilot_prompts: int = 64,
    pilot_rollouts: int = 64,
    rollouts: Sequence[int] = ROLLOUTS,
    seconds_per_step: float | None = None,
    output_dir: str | Path = RUNS / "plan",
    progress: bool = True,
    **overrides: Any,
) -> PlanResult:
    """Compare N, the rollouts per prompt, on this machine, and recommend one for a time budget.

    The plan is based on a pilot and a few timed steps, and is written to `plan.json`. The model is not changed. Ctrl-C
    stops without writing a plan.

    Examples:
        >>> brorl.plan("runs/first", seconds_per_step=60)

    Args:
        checkpoint: A model (`quickstart`, a folder, a hub id), a run, or a checkpoint in a run; None is the recipe's
            model.
        recipe: Built-in recipe or YAML file; from Python also nested settings or a config (default: the run's, or
            quickstart).
        pilot_prompts: Training prompts of the pilot, >= 8.
        pilot_rollouts: Rollouts per pilot prompt, an even number >= 4.
        rollouts: Numbers of rollouts per prompt to compare, 2 to 2^20; the recipe's own number is added.
        seconds_per_step: Time budget of a step, > 0 (default: the time of the recipe's own N and prompts).
        output_dir: Folder of the files; an earlier plan in it is replaced.
        progress: Print the output of the command.
        overrides: Settings that replace those of the recipe, nested or by dotted name.

    Raises:
        UserError: If an argument, the data, the model or the machine's memory does not fit, or no pilot group is mixed.
    """
    refuse_in_worker()
    _check(pilot_prompts, pilot_rollouts, rollouts, seconds_per_step)
    replaced = flat_settings(overrides)
    config, source = _resolve(checkpoint, recipe, replaced)

    is_default = recipe is None and source == RECIPE and "data.sources" not in replaced
    pilot = pilot_prompts, pilot_rollouts
    with Screen(silent=not progress) as screen, ExitStack() as ends:  # shown while torch is imported
        from brorl.planning.advice import PlanResult, plan_record

        parts, memory = _load(config, pilot_prompts, screen, ends)
        with output_folder(Path(output_dir).expanduser()) as folder:
            for line in _announcement(config, parts, *pilot, is_default):
                screen.console.print(line, soft_wrap=True, markup=False)
            screen.console.print(*memory)
            result = PlanResult.measure(config, parts, pilot, rollouts, folder, screen.dim, seconds_per_step)
            with storage_errors(folder):
                replace_file(folder / "plan.json", json.dumps(plan_record(result), indent=2).encode())
            if isinstance(source, str | Path):
                result = _with_commands(result, source, checkpoint, replaced)
            screen.ending = f"the plan is in {folder}"
            if not in_notebook():
                screen.console.print(result, soft_wrap=True)
            return result


def _load(config: TrainConfig, pilot_prompts: int, screen: Screen, ends: ExitStack) -> tuple[LocalParts, list[Table]]:
    """Load the data and the model; return the parts of a run and tables of its memory use."""
    from brorl.training.inputs import prepare_run
    from brorl.training.local_parts import LocalParts

    screen.observe(Stage("loading", "data"))
    memory: list[Table] = []
    inputs = prepare_run(config, config.model, memory.append)
    parts = LocalParts.load(config, inputs, screen.observe, ends.callback, screen.echo)
    if pilot_prompts > parts.stream.num_prompts:
        raise UserError(
            f"pilot_prompts = {pilot_prompts} is more than the {parts.stream.num_prompts} training prompts; lower "
            f"{option('pilot-prompts')}"
        )
    return parts, memory


def _with_commands(
    result: PlanResult, source: str | Path, checkpoint: str | Path | None, replaced: Mapping[str, Any]
) -> PlanResult:
    """Add to a plan the commands that train its recommendation and compare it."""
    from brorl.planning.advice import next_commands

    start = None if checkpoint is None else resolve_checkpoint(str(checkpoint))
    settings = replaced if start is None else {**replaced, "model": start.model}
    train, compare = next_commands(result, source, settings, start is not None and source == start.run_config)
    return replace(result, train_command=train, compare_command=compare)


def plan_command(
    checkpoint: str | None = None,
    *,
    data: str | None = None,
    **options: Any,
) -> None:
    """Plan from the command line.

    Args:
        checkpoint: A model (`quickstart`, a folder, a hub id), a run, or a checkpoint in one (default: the recipe's
            model).
        data: File, hub id or puzzle of the prompts, as data.sources (default: the recipe's).
        options: Those of `plan`.
    """
    if data is not None:
        options["data.sources"] = parse_yaml(data, option("data"))
    try:
        plan(checkpoint, **options)
    except KeyboardInterrupt:
        print("\nstopped: the plan is written only at the end; rerun the command")  # noqa: T201
        raise KeyboardInterrupt("stopped") from None


def _check(pilot_prompts: int, pilot_rollouts: int, rollouts: Sequence[int], seconds_per_step: float | None) -> None:
    if not rollouts or min(rollouts) < 2 or max(rollouts) > _MAX_ROLLOUTS:
        raise UserError(f"rollouts: every number must be between 2 and {_MAX_ROLLOUTS:,}, got {list(rollouts)}")
    if pilot_prompts < _MIN_PROMPTS:
        raise UserError(f"pilot_prompts must be at least {_MIN_PROMPTS}, got {pilot_prompts}")
    if pilot_rollouts < _MIN_ROLLOUTS or pilot_rollouts % 2:
        raise UserError(
            f"pilot_rollouts must be an even number of at least {_MIN_ROLLOUTS} (the gradients of two halves are "
            f"compared), not {pilot_rollouts}"
        )
    if seconds_per_step is not None and not 0 < seconds_per_step < float("inf"):
        raise UserError(f"seconds_per_step must be above 0 and finite, got {seconds_per_step}")


def _resolve(
    checkpoint: str | Path | None, recipe: ConfigOrPath | None, replaced: Mapping[str, Any]
) -> tuple[TrainConfig, ConfigOrPath]:
    """Return the config to plan for, and its recipe."""
    overrides = dict(replaced)
    run_config = None
    if checkpoint is not None:
        overrides["model"], run_config = resolve_checkpoint(str(checkpoint))
        if "model" in replaced:
            raise UserError(f"{checkpoint} and {option('model')} both name a model; give one of them")
    source = recipe or run_config or RECIPE
    return resolve_config(source, overrides), source


def _announcement(
    config: TrainConfig, parts: LocalParts, pilot_prompts: int, pilot_rollouts: int, is_default: bool
) -> list[str]:
    """Return lines on the model, the recipe and the amount of work; `is_default`: neither recipe nor data was given."""
    pilot = pilot_prompts * pilot_rollouts
    step = config.rollouts_per_prompt * config.prompts_per_step
    parameters = sum(p.numel() for p in parts.model.parameters())
    lines = [
        f"brorl {brorl.__version__}: a plan for {config.model} ({parameters:,} parameters) on {parts.model.device}",
        f"the recipe: N = {config.rollouts_per_prompt} rollouts x {config.prompts_per_step} prompts per step",
        f"pilot: {pilot_rollouts} rollouts for each of {pilot_prompts} training prompts, {pilot:,} in "
        f"total ({plain(pilot / step, 2)} of a step), two gradients per prompt, and steps of up to 5 sizes",
    ]
    if is_default:
        lines.append(
            f"no {option('recipe')}: the plan is for the arithmetic puzzles of {RECIPE}; plan your own prompts with "
            f"{option('recipe', 'mine.yaml')} or {option('data', 'FILE')}"
        )
    return lines
