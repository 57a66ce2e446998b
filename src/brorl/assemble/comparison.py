"""A comparison from recipes: the arms as checked configs that differ only where they should.

In: recipes, finished runs, settings for all arms, a sweep. Out: one config per arm and what they have in common. What
would make the comparison worth nothing is refused here, before anything is trained: other start, other held-out
prompts, other ways of sampling them, steps too large for the budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brorl.assemble.inputs import prepare
from brorl.comparison.arms import labelled
from brorl.comparison.matching import TOLERANCE
from brorl.config.reading import builtin_recipes, make_config, parse_yaml, read_recipe, settings_of
from brorl.config.settings import TrainConfig
from brorl.cost import UNIT_WORDS, Budget, Unit
from brorl.errors import UserError
from brorl.model.load import choose_device
from brorl.model.memory_plan import available_bytes
from brorl.runs.run_directory import RunDirectory, held_out_record

_OWNED = {
    "seed": "--seeds N, which runs seeds 0 to N-1",
    "output_dir": "--output-dir",
    "model": "--from",
    "steps": "--match steps --budget N",
    "budget.unit": "--match",
    "budget.limit": "--budget",
    "budget.marks": "--marks",
    "evaluation.every": "--marks",
}


@dataclass(frozen=True)
class ArmPlan:
    """An arm before it is run.

    Attributes:
        name: What it is called: short.
        config: Its settings, but for seed, output directory and budget.
        run: The finished run that it is; None if it is still to be run.
        title: Its full name, if it is called by a letter; else empty.
    """

    name: str
    config: TrainConfig
    run: Path | None = None
    title: str = ""

    @property
    def full_name(self) -> str:
        """Name and title, for whoever has not seen yet what the letters are."""
        return f"{self.name} ({self.title})" if self.title else self.name


def refuse_owned(overrides: Mapping[str, Any]) -> None:
    """Refuse settings that the comparison itself decides.

    Raises:
        UserError: Naming the option to use instead.
    """
    taken = next((name for name in overrides if name in _OWNED), None)
    if taken:
        raise UserError(f"--{taken} is decided by the comparison; use {_OWNED[taken]}")


def is_run(path: str) -> bool:
    """Return whether an argument is a run directory."""
    return (Path(path) / "config.yaml").is_file() and (Path(path) / "metrics.jsonl").is_file()


def read_arms(recipes: Sequence[str], overrides: Mapping[str, Any], checkpoint: str | None) -> list[ArmPlan]:
    """Read one arm per recipe or run directory.

    Args:
        recipes: Recipe files, built-in names, or directories of runs.
        overrides: Settings for all arms that are still to be run.
        checkpoint: What they start from; None leaves it to the recipes.

    Raises:
        UserError: If a recipe does not work.
    """
    plans = []
    settings = dict(overrides) | ({} if checkpoint is None else {"model": checkpoint})
    for recipe in recipes:
        if Path(recipe).is_dir() and not is_run(recipe) and recipe not in builtin_recipes():
            raise UserError(
                f"{recipe} is a folder, but of no run; an arm is a recipe or a finished run (a checkpoint is given "
                "with --from, and the folder of a comparison alone)"
            )
        if is_run(recipe):
            file = Path(recipe) / "config.yaml"
            config = make_config(parse_yaml(file.read_text("utf-8"), str(file)), {}, str(file))
            plans.append(ArmPlan(Path(recipe).resolve().name, config, Path(recipe).resolve()))
        else:
            plans.append(ArmPlan(Path(recipe).stem, make_config(read_recipe(recipe), settings, recipe)))
    return _named(plans)


def sweep_arms(
    recipe: str, overrides: Mapping[str, Any], checkpoint: str | None, sweep: Mapping[str, Sequence[Any]]
) -> list[ArmPlan]:
    """Make one arm per value of the swept settings, which change together.

    Args:
        recipe: The recipe of all arms.
        overrides: Settings for all arms.
        checkpoint: What they start from; None leaves it to the recipe.
        sweep: Values by setting, of one length.

    Raises:
        UserError: If the values are not of one length, repeat themselves, or do not work.
    """
    if is_run(recipe):
        raise UserError(f"{recipe} is a run, and --sweep makes new ones; give the recipe: {recipe}/config.yaml")
    refuse_owned(sweep)
    lengths = {name: len(values) for name, values in sweep.items()}
    if len({*lengths.values()}) > 1 or min(lengths.values()) < 2:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UserError(f"--sweep: settings change together, and need as many values, at least two, each ({told})")
    settings = dict(overrides) | ({} if checkpoint is None else {"model": checkpoint})
    if both := next((name for name in sweep if name in overrides), None):
        raise UserError(f"--{both} and --sweep {both} both set it; leave one out")
    arms = [*map(repr, zip(*sweep.values(), strict=True))]
    if repeated := next((arm for arm in arms if arms.count(arm) > 1), None):
        raise UserError(f"--sweep: two arms would have the same values {repeated}; every arm needs its own")
    given = read_recipe(recipe)
    plans = []
    for values in zip(*sweep.values(), strict=True):
        chosen = dict(zip(sweep, values, strict=True))
        telling = {key: value for key, value in chosen.items() if len({*map(str, sweep[key])}) > 1}
        name = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in telling.items())
        plans.append(ArmPlan(name, make_config(given, {**settings, **chosen}, recipe)))
    return _named(plans)


def _named(plans: Sequence[ArmPlan]) -> list[ArmPlan]:
    """Call arms by their N if each has its own, else by recipe or swept values if all are short, else A, B, C, ..."""
    rollouts = ["adaptive" if plan.config.adaptive.enabled else plan.config.rollouts_per_prompt for plan in plans]
    names = [plan.name for plan in plans]
    if len({*map(str, rollouts)}) == len(plans):
        names = [f"N={n}" for n in rollouts]
    elif len({*names}) < len(plans):
        names = [f"{i}: {name}" for i, name in enumerate(names, 1)]
    return [replace(plan, name=name, title=title) for plan, (name, title) in zip(plans, labelled(names), strict=True)]


def check_arms(plans: Sequence[ArmPlan], unit: Unit, budget: float, seeds: int, jobs: int) -> None:
    """Refuse arms that cannot be compared, or that cannot run.

    Args:
        plans: The arms.
        unit: What the budget counts.
        budget: What each run may spend.
        seeds: Runs of each arm.
        jobs: Runs at a time, whose memory adds up.

    Raises:
        UserError: On the first thing that is wrong.
    """
    if len(plans) < 2:
        raise UserError("a comparison needs two recipes, or one recipe and --sweep KEY=VALUE,VALUE,...")
    if len(plans) == 2 and not differences([plan.config for plan in plans])[0]:
        raise UserError(
            f"{plans[0].full_name} and {plans[1].full_name} do not differ in any setting; there is nothing to compare"
        )
    first = plans[0]
    for plan in plans[1:]:
        _check_same(first, plan)
    for plan in plans:
        step = _cost_of_one_step(plan.config, unit)
        if plan.run is None and step > TOLERANCE * budget:
            raise UserError(
                f"one step of {plan.full_name} takes {step:,} {UNIT_WORDS[unit]}, more than {TOLERANCE:.0%} of the "
                f"budget of {budget:,.0f}, so it cannot be matched; raise --budget to {step / TOLERANCE:,.0f} or more, "
                "or lower prompts_per_step"
            )
    _check_ready(plans, seeds, jobs)


def _check_same(first: ArmPlan, other: ArmPlan) -> None:
    """Refuse two arms that do not start at the same place, or are not measured alike."""
    if first.config.model != other.config.model:
        raise UserError(
            f"{first.full_name} starts from {first.config.model} and {other.full_name} from {other.config.model}; arms "
            "must start from the same checkpoint: give it with --from"
        )
    theirs = _measured_by(other.config)
    for name, value in _measured_by(first.config).items():
        if value != theirs[name]:
            raise UserError(
                f"the arms are evaluated differently: {name} is {value} for {first.full_name} and {theirs[name]} for "
                f"{other.full_name}; give one value for both: --{name} ..."
            )
    if not first.config.evaluation.num_prompts:
        raise UserError("a comparison needs held-out prompts, and evaluation.num_prompts is 0; raise it")


def _measured_by(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that decide what an evaluation finds."""
    evaluation = config.evaluation.model_dump(exclude={"every", "keep_best"})
    evaluation["max_new_tokens"] = config.evaluation.max_new_tokens or config.sampling.max_new_tokens
    verification = config.verification.model_dump(exclude={"workers"})
    return {
        **{f"evaluation.{name}": value for name, value in evaluation.items()},
        **{f"verification.{name}": value for name, value in verification.items()},
        "sampling.end_token": config.sampling.end_token,
        "rewards.stop_properly": "above 0" if config.rewards.stop_properly else "0",  # then cut ones are verified too
        "device": config.device,
    }


def _cost_of_one_step(config: TrainConfig, unit: Unit) -> int:
    return config.samples_per_step if unit == "samples" else 0


def _check_ready(plans: Sequence[ArmPlan], seeds: int, jobs: int) -> None:
    """Read the data of every arm that is to be run, and predict its memory; no weights are loaded."""
    needed: list[int] = []
    held_out: list[list[dict[str, str]]] = []
    for plan in plans:
        if plan.run is not None:
            held_out.append(RunDirectory(plan.run).read_held_out())
            continue
        ready = prepare(plan.config, plan.config.model)
        held_out.append(held_out_record(ready.prompts.held_out))
        needed += [ready.memory.certain_bytes] * seeds
    for plan, asked in zip(plans, held_out, strict=True):
        if asked != held_out[0]:
            raise UserError(
                f"{plan.full_name} holds out other prompts than {plans[0].full_name}, so that their scores cannot be "
                "compared; give both the same data, data.held_out_share, data.split_seed and prompt settings"
            )
    device = choose_device(plans[0].config.device)
    available = available_bytes(device)
    together = sum(sorted(needed)[-jobs:])
    if device.type == "cpu" and available is not None and together > available:
        raise UserError(
            f"{jobs} runs at a time need {together / 2**30:.1f} GiB of memory and there are {available / 2**30:.1f}; "
            "lower --jobs or engine.memory_gib"
        )


def run_config(plan: ArmPlan, seed: int, directory: Path, budget: Budget) -> TrainConfig:
    """Return the settings of one run of an arm."""
    settings = plan.config.model_dump(mode="json")
    counts_evaluations = plan.config.reference.reset_patience or plan.config.collapse.stop
    own: dict[str, Any] = {
        "seed": seed,
        "output_dir": str(directory.absolute()),
        "steps": None,  # the budget alone ends a run
        "evaluation.every": plan.config.evaluation.every if counts_evaluations else 0,
        "report": False,
        "budget.unit": budget.unit,
        "budget.limit": budget.limit,
        "budget.marks": list(budget.marks),
        "tracking.run_name": f"{plan.full_name} seed {seed}",
    }
    return make_config(settings, own, plan.name)


def differences(configs: Sequence[TrainConfig]) -> list[dict[str, str]]:
    """Return, for each config, its values of the settings in which not all of them agree."""
    dumped = [config.model_dump(mode="json") for config in configs]
    flat = [{name: str(_value(settings, name)) for name, _ in settings_of(TrainConfig)} for settings in dumped]
    ignored = {"seed", "output_dir", "steps", "report", "evaluation.every", "checkpoint_every", "keep_checkpoints"}
    names = [
        name
        for name in flat[0]
        if len({f[name] for f in flat}) > 1 and name not in ignored and not name.startswith(("budget.", "tracking."))
    ]
    return [{name: f[name] for name in names} for f in flat]


def _value(settings: Mapping[str, Any], name: str) -> Any:
    for key in name.split("."):
        settings = settings[key]
    return settings
