"""`brorl.tune`: a race finds the N, objective and learning rate with the best final score, and a final tests them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brorl.api.arguments import recipe_name, refuse_in_worker, resolve_checkpoint
from brorl.config.reading import ConfigOrPath, builtin_recipes, flat_settings, raw_settings
from brorl.config.settings import TrainConfig
from brorl.console.screen import Screen
from brorl.errors import UserError, option
from brorl.format import in_seconds
from brorl.runs import RUNS
from brorl.runs.run_directory import TUNE_FILE
from brorl.storage import output_folder, refuse_used_output
from brorl.tuning import AIMS, Aim

if TYPE_CHECKING:
    from brorl.tuning.answer import TuningResult


def tune(
    start: ConfigOrPath | None = None,
    *,
    recipe: ConfigOrPath | None = None,
    aim: Aim | None = None,
    budget: str | float | None = None,
    seeds: int | None = None,
    jobs: int | None = None,
    output_dir: str | Path | None = None,
    progress: bool = True,
    **overrides: Any,
) -> TuningResult:
    """Find the N, objective and learning rate with the best final score for an aim, and test them against your recipe.

    A pilot measures the possible gain, and how many prompts fit in a step at each N. Candidates then race on tuning
    prompts: the best continue after a quarter, a half and all of their budget. The winner is compared with your recipe
    on different held-out prompts and seeds. If the command is stopped after the pilot, resume it by passing its folder
    as the only argument.

    Examples:
        >>> result = brorl.tune("mine.yaml", aim="pass@1", budget="2h")

    Args:
        start: A recipe (name or YAML file), or the model to start from: a model, a run (its last checkpoint), or a
            checkpoint in one; or the folder of an unfinished `tune` (default: quickstart).
        recipe: The recipe, if `start` is a model (default: the run's, or quickstart).
        aim: The score to raise: `pass@1`, `pass@k` (pass@16), or `coverage` (pass@k of the largest k)
            (default: pass@1).
        budget: Total time: seconds, or a number with s, m or h (default: 30m). Runs are stopped at its end, and the
            answer uses only complete ones. An unfinished tuning may get a new budget.
        seeds: Runs of each of the two arms of the final, >= 2 (default: 5).
        jobs: Runs in parallel, each on its own cores or GPU (default: as many as fit; an unfinished tuning keeps its
            number).
        output_dir: The folder (default: runs/tune-...).
        progress: Print what is run, and each run as it ends.
        overrides: Settings that replace those of the recipe, nested or by dotted name.

    Raises:
        UserError: If an argument is wrong, the budget is too small, or a run failed.
        KeyboardInterrupt: On Ctrl-C or SIGTERM, once every run has saved its state.
    """
    refuse_in_worker()
    from brorl.tuning.answer import TuningResult
    from brorl.tuning.race import prepare_tuning, train_race
    from brorl.tuning.spec import TuningSpec

    folder = _folder(start, output_dir)
    seconds = _seconds("30m" if budget is None else budget)
    with Screen(silent=not progress) as screen:
        if (folder / TUNE_FILE).is_file():
            asked = {"aim": aim, "seeds": seeds, "recipe": recipe, **overrides}
            _refuse_changes(folder, [name for name, value in asked.items() if value is not None])
            spec = TuningSpec.read(folder)
            return train_race(spec if budget is None else replace(spec, seconds=seconds), folder, jobs, screen)
        if aim not in (None, *AIMS):
            raise UserError(f"{option('aim')} must be one of {', '.join(AIMS)}, got {aim}")
        if seeds is not None and seeds < 2:
            raise UserError(f"{option('seeds')}: expected at least 2, got {seeds}")
        config = _own_config(start, recipe, flat_settings(overrides))
        with output_folder(folder):
            begun = prepare_tuning(config, folder, aim or "pass@1", seconds, seeds or 5, jobs, screen)
        return begun if isinstance(begun, TuningResult) else train_race(begun, folder, jobs, screen)


def _refuse_changes(folder: Path, changed: Sequence[str]) -> None:
    if changed:
        raise UserError(
            f"{folder} is already a tuning, which {option(changed[0])} cannot change; only {option('jobs')} and "
            f"{option('budget')} can"
        )


def _seconds(budget: str | float) -> float:
    seconds = in_seconds(budget)
    if not seconds:
        raise UserError(f"{option('budget')}: expected a time such as 90s, 30m or 8h, got {budget}")
    return seconds


def _own_config(start: ConfigOrPath | None, recipe: ConfigOrPath | None, settings: Mapping[str, Any]) -> TrainConfig:
    """Return the user's recipe with the model to start from."""
    from brorl.comparison.arm_recipes import arm_config, reject_owned

    reject_owned({name: value for name, value in settings.items() if name != "model"})
    is_recipe = not isinstance(start, str | Path) or str(start) in builtin_recipes() or Path(start).is_file()
    if start is None or is_recipe:
        if recipe is not None and start is not None:
            raise UserError(f"{start} is a recipe, and {option('recipe')} names a second one; give only one")
        chosen = "quickstart" if start is None and recipe is None else start or recipe or ""
    else:
        if "model" in settings:
            raise UserError(f"{start} and {option('model')} both name a model; give one of them")
        model, run_config = resolve_checkpoint(str(start))
        chosen = recipe or run_config or "quickstart"
        settings = {**settings, "model": model}
    return arm_config(raw_settings(chosen), settings, recipe_name(chosen))


def _folder(start: ConfigOrPath | None, output_dir: str | Path | None) -> Path:
    """Return the folder of an unfinished `tune`, or a new folder."""
    if isinstance(start, str | Path) and (Path(start) / TUNE_FILE).is_file():
        _refuse_changes(Path(start), [] if output_dir is None else ["output_dir"])
        return Path(start)
    folder = RUNS / f"tune-{datetime.now():%Y%m%d-%H%M%S}" if output_dir is None else Path(output_dir).expanduser()
    if (folder / TUNE_FILE).is_file():
        raise UserError(f"{folder} already contains a tuning; continue it with: brorl tune {shlex.quote(str(folder))}")
    refuse_used_output(folder)
    return folder
