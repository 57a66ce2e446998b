"""The race of `brorl.tune`, from the pilot to the final."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from brorl.api.arm_runs import ArmRun, Slot, finish_runs, progress_of
from brorl.api.compare import finished_comparison, machine_of, run_comparison, slots_for
from brorl.api.comparison_view import ComparisonView
from brorl.api.plan import PlanRequest, measure_plan
from brorl.api.recipe import resolve_checkpoint, resolve_config
from brorl.api.tune_answer import TuningResult, conclude
from brorl.api.tune_plan import TunePlan
from brorl.assemble.candidates import OWN, ROLLOUTS, candidates
from brorl.assemble.comparison import ArmPlan, check_arms, reject_owned
from brorl.assemble.data import build_questions
from brorl.comparison.arms import Measure, score_at
from brorl.comparison.race import RUNGS, Course, Standing, race_cost, room_after, standings
from brorl.comparison.reading import read_run_scores
from brorl.config.reading import ConfigOrPath, builtin_recipes, make_config
from brorl.config.settings import TrainConfig
from brorl.console.screen import Screen
from brorl.cost import amount
from brorl.errors import UserError
from brorl.format import Estimate, counted, duration, interval
from brorl.planning import AIMS, Aim
from brorl.runs.run_directory import RunDirectory
from brorl.storage import storage_errors

_MOST, _FEWEST = 9, 4  # candidates, the user's own recipe among them
_STEPS_TO_A_RUNG = 25  # of the user's recipe, at least, in the first part of the race
_USED = 0.75  # of the time goes to training; the rest to evaluations and to starting
_HEADROOM = 0.02  # of pass@k above pass@1; below it there is hardly anything to find
_FEWEST_PROMPTS = 16  # held out, for the race and for the final each
_K = 16  # of the aim pass@k


@dataclass(frozen=True)
class Question:
    """What is asked, checked."""

    aim: Aim = "pass@1"
    budget: str | float = "30m"
    seeds: int = 5

    def __post_init__(self) -> None:
        if self.aim not in AIMS:
            raise UserError(f"--aim must be one of {', '.join(AIMS)}, got {self.aim}")
        if self.seeds < 2:
            raise UserError(f"--seeds: at least 2 are needed, got {self.seeds}")
        if self.seconds <= 0:
            raise UserError(f"--budget: a time such as 90s, 30m or 8h is needed, got {self.budget}")

    @property
    def seconds(self) -> float:
        """The budget in seconds; 0 if it is no time."""
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", str(self.budget))
        return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0


def train_race(plan: TunePlan, folder: Path, jobs: int | None, console: Console) -> TuningResult:
    """Train the race and the final, as far as they are not trained, and conclude. The folder is locked meanwhile."""
    slots = slots_for(jobs, [plan.own])
    if (machine := machine_of(slots, [plan.own])) != plan.machine:
        raise UserError(
            f"{folder} was started on {plan.machine}, and this is {machine}; use the same --jobs and machine"
        )
    with RunDirectory(folder).locked():
        _announce(plan, folder, len(slots), console)
        race = _race(plan, folder, slots, console)
        winner, final = plan.arm(race[-1][0].arm), None
        if winner is not plan.own:
            console.print(
                f"final: {winner.name} ({winner.title}) against {OWN}, {counted(plan.seeds, 'seed')} each, on other "
                "prompts",
                soft_wrap=True,
                markup=False,
            )
            compared = plan.final(winner)
            view = ComparisonView(console, compared.runs_in(folder / "final"))
            run_comparison(folder / "final", compared, slots, plan.machine, view, again(folder))
            final = finished_comparison(folder / "final")
        return conclude(plan, folder, race, final)


def again(folder: Path) -> str:
    """Return the command that continues a tuning."""
    return f"brorl tune {shlex.quote(str(folder))}"


def own_config(start: ConfigOrPath | None, recipe: ConfigOrPath | None, given: Mapping[str, Any]) -> TrainConfig:
    """Return the user's recipe, with the model that it starts from."""
    reject_owned({name: value for name, value in given.items() if name != "model"})
    is_recipe = not isinstance(start, str | Path) or str(start) in builtin_recipes() or Path(start).is_file()
    if start is None or is_recipe:
        if recipe is not None and start is not None:
            raise UserError(f"{start} is a recipe, and --recipe names another; give one of them")
        return resolve_config("quickstart" if start is None and recipe is None else start or recipe or "", given)
    if "model" in given:
        raise UserError(f"{start} and --model both name a model; give one of them")
    model, run_config = resolve_checkpoint(str(start))
    return resolve_config(recipe or run_config or "quickstart", {**given, "model": model})


def begin(
    config: TrainConfig, folder: Path, asked: Question, jobs: int | None, progress: bool
) -> TunePlan | TuningResult:
    """Take the pilot, choose the candidates, and write `tune.json`; or say that there is nothing to find."""
    config, tuning = _with_tuning_prompts(config)
    started = perf_counter()
    start, prompts, step_seconds = _pilot(config, tuning, folder, progress)
    largest = max(start)
    if start[largest].high - start[1].value < _HEADROOM:
        answer = (
            f"There is hardly anything to find: held-out pass@{largest} is {interval(start[largest])} and pass@1 "
            f"{interval(start[1])}, so more rollouts have no successes to learn from; choose harder prompts, or a "
            "model that solves more of them now and then."
        )
        return TuningResult(folder, answer, None, (), None)
    k = {"pass@1": 1, "coverage": largest}.get(asked.aim) or max((k for k in start if k <= _K), default=1)
    own = ArmPlan(OWN, config)
    slots = slots_for(jobs, [own])
    number, run_seconds = _size_of_race(asked, perf_counter() - started, len(slots), step_seconds)
    arms = tuple(candidates(config, prompts, asked.aim, number))
    check_arms(arms, "seconds", run_seconds, asked.seeds, len(slots))
    machine, run_seconds = machine_of(slots, [own]), float(f"{run_seconds:.4g}")
    plan = TunePlan(asked.aim, k, asked.seconds, run_seconds, asked.seeds, machine, start, tuning, arms)
    plan.write(folder)
    return plan


def _size_of_race(asked: Question, spent: float, num_slots: int, step_seconds: float) -> tuple[int, float]:
    """Return the most candidates whose first part of the race is long enough, and the budget of each run.

    The race and the final take the time that the pilot has left.
    """
    least = _STEPS_TO_A_RUNG * step_seconds / RUNGS[0]  # budget of a run
    runs = 0.0  # of the race and the final
    for number in range(_MOST, _FEWEST - 1, -1):
        runs = race_cost(number) + 2 * asked.seeds
        run_seconds = (asked.seconds - spent) * _USED * num_slots / runs
        if run_seconds >= least:
            return number, run_seconds
    needed = least * runs / (_USED * num_slots)
    raise UserError(
        f"--budget {duration(asked.seconds)} is too short: a step of the recipe takes {step_seconds:.2g} s, and each "
        f"run of the race needs {_STEPS_TO_A_RUNG} steps before it is judged; give at least "
        f"{duration(1.2 * needed + spent)}, more --jobs, or a recipe with shorter steps"
    )


def _with_tuning_prompts(config: TrainConfig) -> tuple[TrainConfig, tuple[int, int]]:
    """Divide the held-out prompts: those of the final stay the recipe's, and the race gets the ones after them."""
    skip, wanted = config.evaluation.skip_prompts, config.evaluation.num_prompts
    available = sum(len(source.held_out) for source in build_questions(_evaluated_on(config, skip, 2**20)))
    final = min(wanted, available - available // 2)
    tuning = min(wanted, available - final)
    if tuning < _FEWEST_PROMPTS:
        raise UserError(
            f"a tuning needs at least {2 * _FEWEST_PROMPTS} held-out prompts, half of them for the race, and there are "
            f"{min(available, 2 * wanted)}; raise data.held_out_fraction and evaluation.num_prompts, or set "
            "evaluation.sources"
        )
    return _evaluated_on(config, skip, final), (skip + final, tuning)


def _evaluated_on(config: TrainConfig, skip: int, num: int) -> TrainConfig:
    settings = {"evaluation.skip_prompts": skip, "evaluation.num_prompts": num}
    return make_config(config.model_dump(mode="json"), settings, "the recipe")


def _pilot(
    config: TrainConfig, tuning: tuple[int, int], folder: Path, progress: bool
) -> tuple[dict[int, Estimate], dict[int, int], float]:
    """Evaluate the start on the tuning prompts, and find the prompts per step that take as long at each N.

    Returns:
        pass@k by k; prompts per step by N, without those that do not fit; and the seconds of a step of the recipe.
    """
    config = _evaluated_on(config, *tuning)
    with Screen(silent=not progress) as screen, ExitStack() as ends:
        from brorl.assemble.inputs import prepare
        from brorl.assemble.run import build_benchmark, build_pilot_parts

        inputs = prepare(config, config.model)
        parts = build_pilot_parts(config, inputs, screen.observe, ends.callback)
        benchmark = build_benchmark(config, inputs, screen.observe)
        found = None if benchmark is None else benchmark.record(benchmark.answer(parts.engine))
        if found is None:
            raise UserError("the start could not be evaluated on the held-out prompts; run: brorl check")
        start = {int(k): Estimate(**estimate) for k, estimate in found["pass_at"].items()}
        scores = ", ".join(f"pass@{k} {interval(estimate)}" for k, estimate in start.items())
        screen.console.print(f"the start, on {tuning[1]} held-out prompts: {scores}", soft_wrap=True, markup=False)
        request = PlanRequest(min(64, parts.stream.num_prompts), 64, ROLLOUTS, None, "pass@1")
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        plan = measure_plan(config, parts, request, folder, screen.console).plan
    fitting = {row.num_rollouts: row.budget_prompts for row in plan.rows if row.budget_prompts}
    return start, fitting, plan.rows[plan.recipe].seconds["total"]


def _announce(plan: TunePlan, folder: Path, num_slots: int, console: Console) -> None:
    """Print what will be trained and how long that takes."""
    race, final = plan.run_seconds * race_cost(len(plan.arms)), plan.run_seconds * 2 * plan.seeds
    lines = [
        f"aim: pass@{plan.k} after {amount(plan.run_seconds, 'seconds')} of training; {plan.machine}; folder {folder}",
        f"race: {len(plan.arms)} arms, at most {duration(race / num_slots)}; final: 2 arms with {plan.seeds} seeds, "
        f"{duration(final / num_slots)}; evaluations and startup take extra time",
        *(f"{arm.name}: {arm.title}" for arm in plan.arms),
    ]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def _race(plan: TunePlan, folder: Path, slots: Sequence[Slot], console: Console) -> tuple[tuple[Standing, ...], ...]:
    """Train the arms from rung to rung, and return their standings; finished parts are not repeated."""
    arms, rungs = list(plan.arms), []
    for rung, fraction in enumerate(RUNGS):
        runs = [plan.race_run(folder, arm, fraction) for arm in arms]
        waiting = [run for run in runs if not progress_of(run).ended]
        if waiting:
            console.print(f"race, up to {amount(plan.run_seconds * fraction, 'seconds')}: {len(arms)} arms")
            view = ComparisonView(console, runs)
            with view.running(again(folder)):
                finish_runs(waiting, slots, view, matched=False)  # a step more or less decides no race
        found = standings([_course(plan, run) for run in runs], fraction, room_after(rung, len(plan.arms)), OWN)
        rungs.append(found)
        going = {standing.arm for standing in found if standing.dropped is None}
        arms = [arm for arm in arms if arm.name in going]
    return tuple(rungs)


def _course(plan: TunePlan, run: ArmRun) -> Course:
    scores = read_run_scores(run.directory, run.seed, run.budget)
    if scores is None:
        raise UserError(f"the run {run.directory} has no evaluation at its rung; rerun the command")
    ended = scores.ended_early or ("ended" if scores.cost.of(run.budget.unit) < run.budget.limit else None)
    until = replace(scores, ended_early=ended)  # an arm that could not spend the budget of a rung keeps its last score
    measure, n = Measure(plan.k), plan.own.config.evaluation.num_samples

    def at(spent: float) -> Any:
        return measure.of(score_at(until, "seconds", spent).num_correct_P, n)[None]

    objective = str(plan.arm(run.arm).config.advantages)
    return Course(run.arm, objective, at(0.0), *(at(point) for point in run.budget.eval_points))
