"""The spec of a comparison: arms, budget, evaluation points and seeds, from arguments or from a folder.

Missing arguments get defaults. Contradictory arguments or a folder with a different comparison are errors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal
from pathlib import Path
from typing import Any

import brorl
from brorl.comparison.arm_recipes import ArmRecipe, differences, read_arms, reject_owned, run_config, sweep_arms
from brorl.comparison.results import TOLERANCE
from brorl.comparison.scores import (
    SETUP,
    Arm,
    Comparison,
    FinishedRun,
    PlannedRun,
    Setup,
    read_scores,
    without_unverified,
)
from brorl.config.reading import ConfigOrPath, dump_yaml, make_config
from brorl.cost import UNIT_WORDS, UNITS, Budget, Unit, amount
from brorl.errors import UserError, option
from brorl.format import counted, exact, in_seconds, plain
from brorl.runs.run_directory import SPEC_FILE
from brorl.storage import json_ready, read_json_file, refuse_used_output, replace_file, storage_errors

DEFAULT_ARMS = ("plateau-16", "plateau-512")
_DEFAULT_POINTS = 4  # evaluation points of the default arms
_MARGIN = 1.2  # allow a step to cost this multiple of the mean, since steps vary
MIN_STEPS = round(_MARGIN / TOLERANCE)  # in a budget, so the last step barely overshoots it
# Without --budget, a run gets at least these amounts and `MIN_STEPS` steps of every arm.
_MIN_BUDGET: dict[Unit, float] = {"steps": MIN_STEPS, "seconds": 30.0, "samples": 1.0, "unique_tokens": 1.0}
_FEW, _MANY = 16, 512  # a single recipe is compared with one of these N
_NUM_POINTS = 8
_SEEDS = 5
_SWEPT = "quickstart"  # recipe to sweep if none is given
_ROLLOUTS = "rollouts_per_prompt"
TRIAL = "trial-"  # prefix of folders for trial steps
_MAX_NAME_LENGTH = 60  # maximum length of an arm's folder name, in characters


@dataclass(frozen=True)
class ComparisonRequest:
    """The arguments of `brorl.compare` that define a new spec. None or empty means not given."""

    arms: tuple[ConfigOrPath, ...] = ()
    sweep: Mapping[str, Sequence[Any]] | None = None
    checkpoint: str | None = None
    match: Unit | None = None
    budget: float | str | None = None
    eval_points: int | Sequence[float] | None = None
    seeds: int | None = None
    overrides: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ComparisonSpec:
    """The definition of a comparison."""

    arms: tuple[ArmRecipe, ...]
    unit: Unit
    budget: float  # per run
    eval_points: tuple[float, ...]  # amounts at which every run is evaluated; the last is the budget
    seeds: int  # runs per arm
    seeds_before: tuple[int, ...] = ()  # previous values of `seeds`, if seeds were added
    notes: tuple[str, ...] = ()  # sentences on what was chosen or changed
    machine: str = ""  # result of `machine_of`; empty before the runs begin
    jobs: int = 0  # runs in parallel; 0 before the runs begin
    asked_budget: float | None = None  # the requested budget if it was raised, else None

    def runs_in(self, folder: Path) -> list[PlannedRun]:
        """Return all runs, seed by seed; each seed starts with a different arm."""
        budget = Budget(self.unit, self.budget, self.eval_points)
        folders = arm_folders(self.arms)
        runs = []
        for seed in range(self.seeds):
            turn = seed % len(self.arms)
            for arm in (*self.arms[turn:], *self.arms[:turn]):
                directory = folder / folders[arm.name] / f"seed-{seed}"
                runs.append(PlannedRun(arm.name, seed, directory.with_name(f"seed-{seed}.yaml"), directory, budget))
        return runs

    def announcement(self, folder: Path) -> Iterator[str]:
        """Yield the lines that announce the runs."""
        names = (" against " if len(self.arms) == 2 else ", ").join(arm.name for arm in self.arms)
        yield (
            f"{names}, from {self.arms[0].config.model}, {amount(self.budget, self.unit)} "
            f"of training each, {counted(self.seeds, 'seed')}"
        )
        yield f"{counted(self.seeds * len(self.arms), 'run')} in total; {self.machine}"
        *before, last = self.eval_points
        points = ", ".join(
            [*map(plain, before), amount(last, self.unit) if last == 1 else f"{plain(last)} {UNIT_WORDS[self.unit]}"]
        )
        yield f"evaluated at {points}; folder {folder}"
        yield from self.notes
        yield from (f"{arm.name}: {arm.title}" for arm in self.arms if arm.title)
        if self.unit == "seconds" and self.arms[0].config.engine.clock == "wall":
            yield (
                "evaluations and startup take extra time; keep the machine free of other work, because seconds are "
                f"matched, or match CPU time: {option('engine.clock', 'cpu')} {option('engine.threads', 1)}"
            )

    def write(self, folder: Path) -> None:
        """Write `compare.json` and a recipe for every run."""
        arm_of = {arm.name: arm for arm in self.arms}
        with storage_errors(folder):
            for run in self.runs_in(folder):
                run.directory.mkdir(parents=True, exist_ok=True)
                config = run_config(arm_of[run.arm], run.seed, run.directory, run.budget)
                replace_file(run.recipe, dump_yaml(config).encode())
            write_spec(self, folder / SPEC_FILE)


def arm_folders(arms: Sequence[ArmRecipe]) -> dict[str, str]:
    """Return arm -> folder name, made from the arm names if the results are valid and unique."""
    slugs = ["".join(c if c.isalnum() or c in "=.-" else "_" for c in arm.name) for arm in arms]
    plain = len({slug.lower() for slug in slugs}) == len(slugs) and max(map(len, slugs)) <= _MAX_NAME_LENGTH
    return {
        arm.name: f"arms/{slug}" if plain else f"arms/{number}-{slug[:_MAX_NAME_LENGTH]}"
        for number, (arm, slug) in enumerate(zip(arms, slugs, strict=True), 1)
    }


def spec_in(folder: Path, arguments: ComparisonRequest) -> ComparisonSpec:
    """Read the spec in a folder. `seeds` may be raised; other arguments are rejected."""
    names = ("sweep", "checkpoint", "match", "budget", "eval_points")
    changed = [*(name for name in names if getattr(arguments, name)), *(arguments.overrides or ())]
    if changed:
        raise UserError(
            f"{folder} is already a comparison, which {option(changed[0])} cannot change; only {option('seeds')} and "
            f"{option('jobs')} can"
        )
    return _with_seeds(read_spec(folder), arguments.seeds, folder)


def spec_for(folder: Path | None, arguments: ComparisonRequest) -> ComparisonSpec:
    """Make the spec of a comparison in a folder that is empty or contains the same comparison."""
    spec = _new_spec(arguments)
    if folder is None or not folder.exists():
        return spec
    if (folder / SPEC_FILE).is_file():
        before = read_spec(folder)
        _require_same(folder, before, spec, arguments)
        return _with_seeds(before, arguments.seeds, folder)
    has_only_trials = folder.is_dir() and all(path.name.startswith(TRIAL) for path in folder.iterdir())
    if not has_only_trials:
        refuse_used_output(folder)
    return spec


def write_spec(spec: Any, file: Path) -> None:
    """Write the fields of a spec that has arms."""
    arms = [{"name": arm.name, "title": arm.title, "settings": arm.config.model_dump(mode="json")} for arm in spec.arms]
    replace_file(
        file, json.dumps(json_ready({"brorl": brorl.__version__, **vars(spec), "arms": arms}), indent=2).encode()
    )


def read_fields(file: Path, noun: str) -> dict[str, Any]:
    """Read the fields that `write_spec` wrote; lists become tuples.

    Raises:
        UserError: If the file is damaged.
    """
    content = read_json_file(file, f"restore it, or start a new {noun} in a different folder")
    del content["brorl"]
    content["arms"] = [
        ArmRecipe(arm["name"], make_config(arm["settings"], {}, str(file)), arm["title"]) for arm in content["arms"]
    ]
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}


def read_spec(folder: Path) -> ComparisonSpec:
    """Read the spec of a comparison."""
    if not (folder / SPEC_FILE).is_file():
        raise UserError(f"{folder} is not a comparison (no {SPEC_FILE}); give the folder that `brorl compare` made")
    return ComparisonSpec(**read_fields(folder / SPEC_FILE, "comparison"))


def read_comparison(folder: Path) -> Comparison:
    """Read a complete comparison.

    Raises:
        UserError: If a run is not complete, or was evaluated differently from the others.
    """
    spec = read_spec(folder)
    runs: dict[str, list[FinishedRun]] = {arm.name: [] for arm in spec.arms}
    setups: dict[str, Setup] = {}
    for run in spec.runs_in(folder):
        if (scores := read_scores(run.directory, run.seed, run.budget)) is not None:
            finished, setup = scores
            runs[run.arm].append(finished)
            setups[finished.path] = setup
    if arm := next((name for name, arm_runs in runs.items() if len(arm_runs) < spec.seeds), None):
        raise UserError(
            f"{folder}: {len(runs[arm])} of {spec.seeds} runs of {arm} are complete; continue with: brorl compare "
            f"{folder}"
        )
    first, setup = next(iter(setups.items()))
    for path, other in setups.items():
        if differing := next((name for name, a, b in zip(SETUP, setup, other, strict=True) if a != b), None):
            raise UserError(f"{path} was evaluated with different {differing} from {first}, so they cannot be compared")
    held_out, num_samples, ks = setup
    arms = tuple(
        Arm(
            arm.name, arm.title, arm.config.rollouts_per_prompt, arm.config.prompts_per_step, differs,
            tuple(runs[arm.name]),
        )
        for arm, differs in zip(spec.arms, differences([arm.config for arm in spec.arms]), strict=True)
    )  # fmt: skip
    return without_unverified(
        Comparison(
            checkpoint=spec.arms[0].config.model,
            unit=spec.unit,
            budget=spec.budget,
            eval_points=spec.eval_points,
            prompts=tuple(prompt["id"] for prompt in held_out),
            sources=tuple(prompt["source"] for prompt in held_out),
            num_samples=num_samples,
            ks=ks,
            arms=arms,
            machine=spec.machine,
            notes=spec.notes,
        )
    )


def _with_seeds(before: ComparisonSpec, seeds: int | None, folder: Path) -> ComparisonSpec:
    if seeds is None or seeds == before.seeds:
        return before
    if seeds < before.seeds:
        raise UserError(f"{folder} already has {before.seeds} seeds; {option('seeds')} can only add to them")
    return replace(before, seeds=seeds, seeds_before=(*before.seeds_before, before.seeds))


def _new_spec(arguments: ComparisonRequest) -> ComparisonSpec:
    arms, notes = _arms(arguments)
    unit: Unit = arguments.match or "seconds"
    if unit not in UNITS:
        raise UserError(f"{option('match')}: {unit!r} is not a unit; the units are {', '.join(UNITS)}")
    seeds = _SEEDS if arguments.seeds is None else arguments.seeds
    if seeds < 1:
        raise UserError(f"{option('seeds')}: expected at least 1, got {seeds}")
    budget = _budget(arguments, unit)
    return ComparisonSpec(arms, unit, budget, _points_of(arguments, budget, unit), seeds, notes=notes)


def _budget(arguments: ComparisonRequest, unit: Unit) -> float:
    """Return the budget in its unit: the given budget, the last amount in --eval-points, or the smallest budget."""
    amount_or_text = arguments.budget
    points = arguments.eval_points
    if amount_or_text is None:
        return _MIN_BUDGET[unit] if points is None or isinstance(points, int) else max(points)
    budget = in_seconds(amount_or_text) if unit == "seconds" else _number(amount_or_text)
    if budget is None:
        example = "a time such as 90, 90s, 5m or 8h" if unit == "seconds" else f"a number of {UNIT_WORDS[unit]}"
        raise UserError(f"{option('budget')}: expected {example}, got {amount_or_text}")
    if not 0 < budget < float("inf"):
        raise UserError(f"{option('budget')}: expected an amount above 0, got {exact(budget)}")
    if unit == "steps" and not budget.is_integer():
        raise UserError(f"{option('budget')}: expected a whole number of steps, got {exact(budget)}")
    return budget


def _number(text: str | float) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def fit_budget(spec: ComparisonSpec, arguments: ComparisonRequest, cost_of: Mapping[str, float]) -> ComparisonSpec:
    """Return the spec with a budget large enough that a run's last step barely exceeds it, and a note if it was raised.

    `cost_of` maps each arm to its cost per step, in the unit of the budget.
    """
    unit = spec.unit
    slowest = max(cost_of, key=cost_of.__getitem__)
    least = _two_digits(_MARGIN * cost_of[slowest] / TOLERANCE)
    if least <= spec.budget:
        return spec
    step = f"a step of {slowest} takes {plain(cost_of[slowest], 2)} {UNIT_WORDS[unit]}"
    if arguments.budget is None and (arguments.eval_points is None or isinstance(arguments.eval_points, int)):
        note, asked = f"the budget is {amount(least, unit)}, because {step}; to set it: {option('budget', 'X')}", None
    else:
        asked = spec.budget
        note = (
            f"the budget is {amount(least, unit)} instead of {amount(asked, unit)}, because {step}, more than "
            f"{TOLERANCE:.0%} of {amount(asked, unit)}, so the arms would not be matched; to keep "
            f"{amount(asked, unit)}, lower prompts_per_step of all arms by one factor, to {asked / least:.2%} or less"
        )
    points = _points_of(arguments, least, unit)
    return replace(spec, budget=least, asked_budget=asked, eval_points=points, notes=(*spec.notes, note))


def _two_digits(value: float) -> float:
    """Round up to two significant digits."""
    size = Decimal(value)
    return float(size.quantize(Decimal(1).scaleb(size.adjusted() - 1), ROUND_CEILING))


def _arms(arguments: ComparisonRequest) -> tuple[tuple[ArmRecipe, ...], tuple[str, ...]]:
    """Return the arms, and a note if they were not given."""
    overrides = arguments.overrides or {}
    recipes = arguments.arms
    reject_owned(overrides)
    settings = dict(overrides) | ({} if arguments.checkpoint is None else {"model": arguments.checkpoint})
    if arguments.sweep:
        if len(recipes) > 1:
            raise UserError(f"{option('sweep')} makes arms from one recipe, not from {len(recipes)}")
        return tuple(sweep_arms(recipes[0] if recipes else _SWEPT, settings, arguments.sweep)), ()
    arms = tuple(read_arms(recipes or DEFAULT_ARMS, settings))
    if len(arms) > 1:
        return arms, ()
    own = arms[0].config.rollouts_per_prompt
    values = (_FEW, own) if own >= _MANY else (own, _MANY)
    note = f"one recipe at two N; for a different comparison, give a second recipe, or {option('sweep', 'KEY=V,V,...')}"
    settings = {name: value for name, value in settings.items() if name != _ROLLOUTS}
    return tuple(sweep_arms(recipes[0], settings, {_ROLLOUTS: values})), (note,)


def _points_of(arguments: ComparisonRequest, budget: float, unit: Unit) -> tuple[float, ...]:
    """Return the evaluation points; the default arms have fewer."""
    is_default = arguments.eval_points is None and not (arguments.arms or arguments.sweep)
    return _eval_points(_DEFAULT_POINTS if is_default else arguments.eval_points, budget, unit)


def _eval_points(points: int | Sequence[float] | None, budget: float, unit: Unit) -> tuple[float, ...]:
    """Return the amounts at which runs are evaluated; the last is the budget.

    If `points` is a number, each point is sqrt(2) times the previous one: 3 points up to 100 are 50, 70.7 and 100.
    """
    if points is None or isinstance(points, int):
        num_points = _NUM_POINTS if points is None else points
        if num_points < 1:
            raise UserError(
                f"{option('eval-points')}: expected a number of evaluation points, or amounts like 10,20,40, "
                f"got {num_points}"
            )
        points = [budget * 2 ** (-i / 2) for i in range(num_points)]
    else:
        if not all(0 < point <= budget for point in points):
            raise UserError(
                f"{option('eval-points')}: amounts must be above 0 and up to the budget of {exact(budget)}, got "
                f"{','.join(map(exact, points))}"
            )
        points = [*points, budget]
    if unit == "steps":
        points = [max(round(point), 1) for point in points]
    rounded = {float(f"{point:.6g}") for point in points if point < budget}
    return (*sorted(point for point in rounded if point < budget), budget)


def _require_same(folder: Path, before: ComparisonSpec, now: ComparisonSpec, arguments: ComparisonRequest) -> None:
    """Raise a UserError if the folder contains a different comparison from the requested one."""
    asked = before.budget if before.asked_budget is None else before.asked_budget
    wanted: list[tuple[str, Any, Any]] = [("unit", before.unit, now.unit)]
    wanted += [("budget", asked, now.budget)] if arguments.budget is not None else []
    if (arguments.budget is not None and asked == now.budget) or arguments.eval_points:
        wanted.append(("evaluation points", before.eval_points, _points_of(arguments, before.budget, before.unit)))
    for name, old, new in wanted:
        if old != new:
            raise UserError(
                f"{folder} contains a comparison with {name} {old}, not {new}; choose a different "
                f"{option('output-dir')}"
            )
    if [arm.config for arm in before.arms] != [arm.config for arm in now.arms]:
        raise UserError(
            f"{folder} contains a comparison of different arms ({', '.join(arm.full_name for arm in before.arms)}) or "
            f"with different settings; choose a different {option('output-dir')}, or continue that one: brorl compare "
            f"{folder}"
        )
