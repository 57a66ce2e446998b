"""The recipes of a comparison's arms, and checks that they differ only where they should.

Arms that start from different models or are evaluated differently are rejected before training starts.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from brorl.config.reading import (
    ConfigOrPath,
    builtin_recipes,
    flat_settings,
    make_config,
    options_of,
    raw_settings,
    read_recipe,
    with_settings,
)
from brorl.config.settings import TrainConfig
from brorl.cost import Budget, Unit
from brorl.distributed.remote_parts import check_ray
from brorl.errors import UserError, option
from brorl.format import counted, memory_size
from brorl.model.device import available_bytes
from brorl.model.load import choose_device
from brorl.runs.run_directory import held_out_record
from brorl.training.inputs import prepare_run

_MAX_NAME_LENGTH = 14  # longest arm name to use in tables and figures, in characters


@dataclass(frozen=True)
class ArmRecipe:
    """An arm that has not been run yet."""

    name: str  # short, such as "N=16" or "A"
    config: TrainConfig  # every run replaces seed, output directory and budget
    title: str = ""  # full name if the short name is a letter; else empty

    @property
    def full_name(self) -> str:
        """Name and title."""
        return f"{self.name} ({self.title})" if self.title else self.name


def _owned() -> dict[str, str]:
    """Return the settings reserved for the comparison: setting -> option to use instead."""
    return {
        "seed": f"{option('seeds', 'N')}, which runs seeds 0 to N-1",
        "output_dir": option("output-dir"),
        "model": option("checkpoint"),
        "steps": f"{option('match', 'steps')} {option('budget', 'N')}",
        "budget.unit": option("match"),
        "budget.limit": option("budget"),
        "budget.eval_points": option("eval-points"),
        "budget.pause_at": option("budget"),
        "evaluation.every": option("eval-points"),
    }


def reject_owned(overrides: Mapping[str, Any]) -> None:
    """Raise a UserError if an override changes a setting reserved for the comparison."""
    owned = _owned()
    if name := next((name for name in overrides if name in owned), None):
        raise UserError(f"{option(name)} is set by the comparison; use {owned[name]}")


def read_arms(recipes: Sequence[ConfigOrPath], settings: Mapping[str, Any]) -> list[ArmRecipe]:
    """Read one arm per recipe; `settings` apply to all arms."""
    arms = []
    for number, recipe in enumerate(recipes, 1):
        if not isinstance(recipe, str | Path):
            arms.append(ArmRecipe(f"arm {number}", arm_config(raw_settings(recipe), settings, f"arm {number}")))
            continue
        _reject_folder(recipe)
        arms.append(ArmRecipe(Path(recipe).stem, arm_config(read_recipe(str(recipe)), settings, str(recipe))))
    return _named(arms)


def sweep_arms(
    recipe: ConfigOrPath, settings: Mapping[str, Any], sweep: Mapping[str, Sequence[Any]]
) -> list[ArmRecipe]:
    """Make one arm per value of the swept settings, which change together; `settings` apply to all arms."""
    if isinstance(recipe, str | Path):
        _reject_folder(recipe)
    reject_owned(sweep)
    lengths = {name: len(values) for name, values in sweep.items()}
    if len({*lengths.values()}) > 1 or min(lengths.values()) < 2:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UserError(
            f"{option('sweep')}: settings change together and need the same number of values, at least two ({counts})"
        )
    if both := next((name for name in sweep if name in settings), None):
        raise UserError(f"{option(both)} and {option('sweep')} {both} both set it; remove one")
    rows = list(zip(*sweep.values(), strict=True))
    shown = [*map(repr, rows)]
    if repeated := next((values for values in shown if shown.count(values) > 1), None):
        raise UserError(
            f"{option('sweep')}: two arms would have the same values {repeated}; every arm needs different values"
        )
    given_settings = raw_settings(recipe)
    name_of_recipe = str(recipe) if isinstance(recipe, str | Path) else "the recipe"
    arms = []
    for values in rows:
        chosen = dict(zip(sweep, values, strict=True))
        differing = {key: value for key, value in chosen.items() if len({*map(str, sweep[key])}) > 1}
        name = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in differing.items())
        arms.append(ArmRecipe(name, arm_config(given_settings, {**settings, **chosen}, name_of_recipe)))
    return _named(arms)


def arm_config(settings: Mapping[str, Any], overrides: Mapping[str, Any], name: str) -> TrainConfig:
    """Make an arm's config. `steps: null` is dropped: it needs a budget, which the comparison sets later."""
    kept = {key: value for key, value in settings.items() if (key, value) != ("steps", None)}
    return make_config(kept, overrides, name)


def _reject_folder(recipe: str | Path) -> None:
    """Raise a UserError if the recipe is a folder, unless it is also the name of a built-in recipe."""
    if Path(recipe).is_dir() and str(recipe) not in builtin_recipes():
        told = (
            f"the recipe of a run is {recipe}/config.yaml"
            if (Path(recipe) / "config.yaml").is_file()
            else (f"give a model as {option('checkpoint')}, and the folder of a comparison alone")
        )
        raise UserError(f"{recipe} is a folder, but an arm is a recipe; {told}")


def _named(arms: Sequence[ArmRecipe]) -> list[ArmRecipe]:
    """Name the arms by N if all N differ, else by their recipes or values if these are short, else A, B, C, ..."""
    rollouts = [arm.config.rollouts_per_prompt for arm in arms]
    names = [arm.name for arm in arms]
    if len({*rollouts}) == len(arms):
        names = [f"N={n}" for n in rollouts]
    elif len({*names}) < len(arms):
        names = [f"{i}: {name}" for i, name in enumerate(names, 1)]
    return [replace(arm, name=name, title=title) for arm, (name, title) in zip(arms, short_names(names), strict=True)]


def short_names(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return each arm's short name and title: the name itself with no title if all names are short, else a letter."""

    def letters(index: int) -> str:  # A to Z, then AA, AB, ...
        more, last = divmod(index, 26)
        return (letters(more - 1) if more else "") + chr(ord("A") + last)

    if max(map(len, names), default=0) <= _MAX_NAME_LENGTH:
        return [(name, "") for name in names]
    return [(letters(i), name) for i, name in enumerate(names)]


def check_arms(arms: Sequence[ArmRecipe], unit: Unit, seeds: int, jobs: int, new_folder: Path | None = None) -> None:
    """Raise a UserError if arms cannot be compared in a unit, or if `jobs` of their runs do not fit in memory.

    Also raise it if the disk of `new_folder` has too little space for one checkpoint per run.
    """
    if len(arms) < 2:
        raise UserError(f"a comparison needs two recipes, or one recipe and {option('sweep', 'KEY=VALUE,VALUE,...')}")
    if len(arms) == 2 and not differences([arm.config for arm in arms])[0]:
        raise UserError(
            f"{arms[0].full_name} and {arms[1].full_name} do not differ in any setting; there is nothing to compare"
        )
    first = arms[0]
    for arm in arms[1:]:
        _check_same(first, arm, unit)
    _check_ready(arms, seeds, jobs, new_folder)


def _check_same(first: ArmRecipe, other: ArmRecipe, unit: Unit) -> None:
    """Raise a UserError if two arms start from different checkpoints, or are evaluated differently."""
    if first.config.model != other.config.model:
        raise UserError(
            f"{first.full_name} starts from {first.config.model} and {other.full_name} from {other.config.model}; arms "
            f"must start from the same checkpoint: {option('checkpoint', first.config.model)}"
        )
    theirs = _measured_by(other.config)
    clocks = [arm.config.engine.clock for arm in (first, other)]
    if unit == "seconds" and clocks[0] != clocks[1]:
        raise UserError(
            f"the seconds of the arms come from different clocks: engine.clock is {clocks[0]} for {first.full_name} "
            f"and {clocks[1]} for {other.full_name}; give one value for both: {option('engine.clock', '...')}"
        )
    different = {name: value for name, value in _measured_by(first.config).items() if value != theirs[name]}
    if different:
        told = "; ".join(
            f"{name} is {value} for {first.full_name} and {theirs[name]} for {other.full_name}"
            for name, value in different.items()
        )
        values = {**_measured_by(first.config), "rewards.stop_properly": first.config.rewards.stop_properly}
        options = shlex.join(options_of({name: values[name] for name in different}))
        raise UserError(f"the arms are evaluated differently: {told}; to evaluate them alike: {options}")
    if not first.config.evaluation.num_prompts:
        raise UserError("a comparison needs held-out prompts, and evaluation.num_prompts is 0; raise it")


def _measured_by(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that affect evaluation results."""
    evaluation = config.evaluation.model_dump(exclude={"every", "keep_best", "best_k", "patience"})
    drawn = asdict(config.evaluated_sampling)
    evaluation |= {name: drawn[name] for name in ("top_p", "top_k", "min_new_tokens", "max_new_tokens")}
    verification = config.verification.model_dump(exclude={"workers"})
    truncated = "above 0" if config.rewards.stop_properly else "0"  # above 0, truncated responses are verified too
    return {
        **{f"evaluation.{name}": value for name, value in evaluation.items()},
        **{f"verification.{name}": value for name, value in verification.items()},
        "sampling.stop": list(config.sampling.stop),
        "rewards.stop_properly": truncated,
        "device": config.device,
    }


def _check_ready(arms: Sequence[ArmRecipe], seeds: int, jobs: int, new_folder: Path | None) -> None:
    """Read the data and predict each arm's memory and disk use, without loading weights."""
    needed: list[int] = []
    stored = 0
    held_out: list[list[dict[str, str]]] = []
    for arm in arms:
        check_ray(arm.config)
        inputs = prepare_run(arm.config, arm.config.model)
        held_out.append(held_out_record(inputs.prompts.held_out))
        stored += inputs.memory.checkpoint_bytes * seeds
        if not arm.config.cluster.enabled:  # on a cluster, the parts are on other machines
            needed += [inputs.memory.certain_bytes] * seeds
    for arm, asked in zip(arms, held_out, strict=True):
        if asked != held_out[0]:
            raise UserError(
                f"{arm.full_name} holds out different prompts from {arms[0].full_name}, so their scores cannot be "
                "compared; give both the same data, data.held_out_fraction, data.split_seed and prompt settings"
            )
    if new_folder is not None:
        above = next(path for path in (new_folder.absolute(), *new_folder.absolute().parents) if path.exists())
        if stored > (free := shutil.disk_usage(above).free):
            raise UserError(
                f"{counted(len(arms) * seeds, 'run')} keep at least {memory_size(stored)} of checkpoints, but "
                f"only {memory_size(free)} is free in {above}; free some, compare fewer arms or seeds, or choose a "
                f"different {option('output-dir')}"
            )
    device = choose_device(arms[0].config.device)
    available = available_bytes(device)
    largest = sorted(needed, reverse=True)
    together = sum(largest[:jobs])
    if device.type == "cpu" and available is not None and together > available:
        fit = next((number for number in range(jobs - 1, 0, -1) if sum(largest[:number]) <= available), None)
        fix = "lower engine.memory_gib or prompts_per_step" if fit is None else f"use {option('jobs', fit)}"
        raise UserError(
            f"{counted(jobs, 'run')} in parallel need {memory_size(together)} of memory, but "
            f"only {memory_size(available)} is available; {fix}"
        )


def run_config(arm: ArmRecipe, seed: int, directory: Path, budget: Budget) -> TrainConfig:
    """Return the settings of one run of an arm."""
    stalling = any(phase.until_coverage_stalls for phase in arm.config.phases)
    patience = arm.config.reference.reset_patience or arm.config.evaluation.patience
    counts_evaluations = patience or arm.config.collapse.stop or stalling
    own: dict[str, Any] = {
        "seed": seed,
        "output_dir": str(directory.absolute()),
        "steps": None,  # only the budget ends a run
        "evaluation.every": arm.config.evaluation.every if counts_evaluations else 0,
        "report": False,
        "keep_checkpoints": min(arm.config.keep_checkpoints, 1),  # only the last one, for resuming; 0 keeps all
        "budget.unit": budget.unit,
        "budget.limit": budget.limit,
        "budget.eval_points": list(budget.eval_points),
        "budget.pause_at": None,
        "tracking.run_name": f"{arm.full_name} seed {seed}",
    }
    return with_settings(arm.config, own, arm.name)


def differences(configs: Sequence[TrainConfig]) -> list[dict[str, str]]:
    """Return each config's values for the settings that differ between configs."""
    flat = [
        {name: str(value) for name, value in flat_settings(config.model_dump(mode="json")).items()}
        | {"phases": _phases_text(config)}
        for config in configs
    ]
    ignored = {"seed", "output_dir", "steps", "report", "evaluation.every", "checkpoint_every", "keep_checkpoints"}
    differing = [
        name
        for name in flat[0]
        if len({f[name] for f in flat}) > 1 and name not in ignored and not name.startswith(("budget.", "tracking."))
    ]
    return [{name: f[name] for name in differing} for f in flat]


def _phases_text(config: TrainConfig) -> str:
    """Return the names, advantages and ends of the phases as text."""
    texts = []
    for phase in config.phases:
        end = "" if phase is config.phases[-1] else f" until {phase.until:g}"
        stall = "" if phase.until_coverage_stalls is None else f" or {phase.until_coverage_stalls} stalls"
        texts.append(f"{phase.name}{end}{stall} ({phase.title})")
    return ", then ".join(texts) or "none"
