"""Run the pilot, the race and the final within the tuning budget."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from brorl.activity import Stage
from brorl.comparison.answer import FinishedComparison, finished_comparison
from brorl.comparison.arm_recipes import ArmRecipe, check_arms
from brorl.comparison.findings import finding
from brorl.comparison.run_processes import ComparisonView, Slot, finish_runs, machine_of, run_comparison, slots_for
from brorl.comparison.scores import PlannedRun, RunEvaluation, progress_of, read_scores, score_at, verified_prompts
from brorl.comparison.spec import ComparisonRequest, ComparisonSpec, spec_in
from brorl.config.reading import with_settings
from brorl.config.settings import TrainConfig
from brorl.console.screen import Screen
from brorl.cost import amount
from brorl.errors import UserError, option
from brorl.evaluation.evaluator import Evaluator, evaluation_record, held_out_batch
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.evaluation.questions import build_questions
from brorl.format import Estimate, counted, duration, interval, shell_command
from brorl.model.device import return_freed_memory
from brorl.planning.advice import PlanResult
from brorl.planning.pilot import NoKeptGroupsError, least_step_seconds
from brorl.runs.run_directory import SPEC_FILE, RunDirectory
from brorl.training.inputs import prepare_run
from brorl.training.local_parts import LocalParts
from brorl.tuning import Aim
from brorl.tuning.answer import NOTHING_TO_FIND, TuningResult, conclude
from brorl.tuning.spec import (
    MIN_SEEDS,
    OWN,
    ROLLOUTS,
    RUNGS,
    RungStanding,
    TuneClock,
    TuningSpec,
    candidates,
    decide_rung,
    room_after,
)

_MIN_TRAINING_PROMPTS = 8  # for the pilot, as in `brorl plan`
_MIN_PROMPTS = 16  # minimum held-out prompts for the race, and for the final


@dataclass(frozen=True)
class TuningPilot:
    """The measurements of the pilot."""

    start: dict[int, Estimate]  # k -> pass@k on the tuning prompts
    prompts: dict[int, int]  # N that fits -> number of prompts for a step as long as the recipe's
    step_seconds: float  # time of one step of the recipe
    evaluation_seconds: float  # time of one evaluation


def with_tuning_prompts(config: TrainConfig) -> tuple[TrainConfig, tuple[int, int]]:
    """Divide each source's held-out prompts: the final keeps the recipe's, and the race gets those that follow."""
    skip = config.evaluation.skip_prompts
    wanted = config.evaluation.num_prompts
    everything = _evaluated_on(config, skip, 2**20)
    sizes = [len(source.held_out) for source in build_questions(everything) if source.held_out]
    smallest = min(sizes, default=0)
    final = min(wanted, smallest - smallest // 2)
    tuning = min(wanted, smallest - final)
    if tuning * len(sizes) < _MIN_PROMPTS:
        raise UserError(
            f"tuning needs at least {2 * _MIN_PROMPTS} held-out prompts, half of them for the race, and equally "
            f"many of each source; there are {2 * tuning * len(sizes)}; raise data.held_out_fraction and "
            "evaluation.num_prompts, or set evaluation.sources"
        )
    return _evaluated_on(config, skip, final), (skip + final, tuning)


def _evaluated_on(config: TrainConfig, skip: int, num: int) -> TrainConfig:
    return with_settings(config, {"evaluation.skip_prompts": skip, "evaluation.num_prompts": num})


def take_pilot(
    config: TrainConfig,
    tuning: tuple[int, int],
    folder: Path,
    screen: Screen,
    check_time: Callable[[float, float], None],
) -> TuningPilot:
    """Evaluate the start on the tuning prompts, and find the prompts per step that keep the step time equal for each N.

    `check_time` is called with lower bounds on the seconds of a step and of an evaluation as soon as they are known.
    It raises a UserError if the budget is too short for them.
    """
    config = _evaluated_on(config, *tuning)
    with ExitStack() as ends:
        screen.observe(Stage("loading", "data"))
        inputs = prepare_run(config, config.model)
        if (num_train := inputs.prompts.train.num_prompts) < _MIN_TRAINING_PROMPTS:
            raise UserError(f"tuning needs at least {_MIN_TRAINING_PROMPTS} training prompts, got {num_train}")
        parts = LocalParts.load(config, inputs, screen.observe, ends.callback, screen.echo)
        screen.observe(Stage("timing", "part of a step"))
        with TemporaryDirectory(dir=folder, prefix=".pilot-") as scratch:
            least = least_step_seconds(parts, Path(scratch))
        check_time(least, 0.0)
        num_rollouts = config.evaluation.rollouts_per_prompt
        evaluator = Evaluator(inputs.grader, config.evaluated_sampling, num_rollouts, screen.observe)
        held_out = held_out_batch(inputs.prompts.held_out, config.seed)
        began = config.engine.now()
        counts = None if held_out is None else evaluator.evaluate(parts.engine, held_out)
        evaluation = None if counts is None else evaluation_record(counts, config.evaluation.ks)
        evaluation_seconds = config.engine.now() - began
        check_time(least, evaluation_seconds)
        if evaluation is None:
            raise UserError("the start could not be evaluated on the held-out prompts; run: brorl check")
        start = dict(evaluation.pass_at)
        scores = ", ".join(f"pass@{k} {interval(estimate)}" for k, estimate in start.items())
        screen.echo(f"the start, on {len(evaluation.prompts.num_correct)} held-out prompts: {scores}")
        pilot = min(64, parts.stream.num_prompts), 64
        try:
            plan = PlanResult.measure(config, parts, pilot, ROLLOUTS, folder, screen.dim).plan
        except NoKeptGroupsError as error:
            raise UserError(
                f"the pilot has {pilot[1]} rollouts for each of {pilot[0]} training prompts, "
                "but no group is mixed and within dynamic_sampling.max_pass_rate; choose prompts that the model "
                "sometimes solves, or look at them: brorl data"
            ) from error
    fitting = {row.num_rollouts: row.budget_prompts for row in plan.rows if row.budget_prompts}
    return TuningPilot(start, fitting, plan.rows[plan.recipe].seconds["total"], evaluation_seconds)


_MIN_CANDIDATES = 3  # always at least the user's and two with a higher rate
_MIN_ARMS = 4  # race at least this many arms, including the user's, unless there are fewer candidates
_STEPS_TO_A_RUNG = 25  # the first rung has time for this many steps of the user's recipe
_HEADROOM = 0.02  # if pass@k exceeds pass@1 by less than this, there is little to gain
_K = 16  # the k of the aim pass@k


def train_race(spec: TuningSpec, folder: Path, jobs: int | None, screen: Screen) -> TuningResult:
    """Lock the folder, train the race and the final while there is time, and return the answer."""

    @cache
    def slots() -> list[Slot]:
        free = slots_for(spec.jobs if jobs is None else jobs, [spec.own])
        if (machine := machine_of(free, [spec.own])) != spec.machine:
            raise UserError(
                f"{folder} was started on {spec.machine}, but this is {machine}; use the same {option('jobs')} and "
                "machine"
            )
        return free

    began = perf_counter()
    clock = TuneClock.start(spec)
    with RunDirectory(folder).locked():
        try:
            _announce(spec, folder, screen)
            race = _race(folder, slots, clock, screen)
            final = None
            winner = spec.arm(race[-1][0].arm) if race else spec.own
            if winner is not spec.own:
                final = _final(spec, winner, folder, slots, clock, screen)
            return conclude(spec, folder, race, winner, final, _command_with_more_time(clock, folder))
        finally:
            replace(spec, used_seconds=spec.used_seconds + perf_counter() - began).write(folder)


def _command_with_more_time(clock: TuneClock, folder: Path) -> str:
    """Return the command that resumes the tuning with a budget that suffices at the measured speed."""
    needed = 60 * ceil((clock.spec.used_seconds + 1.2 * clock.whole_seconds) / 60)
    return f"{continue_command(folder)} --budget {max(needed, 2 * ceil(clock.spec.seconds / 60) * 60) // 60}m"


def _final(
    spec: TuningSpec,
    winner: ArmRecipe,
    folder: Path,
    slots: Callable[[], list[Slot]],
    clock: TuneClock,
    screen: Screen,
) -> FinishedComparison | None:
    """Compare the winner with the user's recipe; return None if there is no time for two seeds of each."""
    path = folder / "final"
    if (path / SPEC_FILE).is_file():
        compared = spec_in(path, ComparisonRequest())
    elif size := clock.size_of_final():
        compared = spec.final(winner, *size)
        screen.echo(
            f"final: {winner.name} ({winner.title}) against {OWN}, {amount(compared.budget, 'seconds')} each, "
            f"{counted(compared.seeds, 'seed')} each, on different prompts"
        )
    else:
        return None
    ended = all(progress_of(run).ended for run in compared.runs_in(path))
    command = continue_command(folder)
    if not (ended or run_comparison(path, compared, slots(), screen, command, perf_counter() + clock.left)):
        compared = replace(compared, seeds=_complete_seeds(compared, path))
        if compared.seeds < MIN_SEEDS:
            return None
        compared.write(path)
    return finished_comparison(path)


def _complete_seeds(compared: ComparisonSpec, path: Path) -> int:
    """Return the number of seeds for which the runs of both arms are complete; seeds run in order."""
    left = [run.seed for run in compared.runs_in(path) if not progress_of(run).ended]
    return min(left, default=compared.seeds)


def continue_command(folder: Path) -> str:
    """Return the command that resumes the tuning in a folder."""
    return shell_command("tune", folder)


def prepare_tuning(
    config: TrainConfig, folder: Path, aim: Aim, seconds: float, seeds: int, jobs: int | None, screen: Screen
) -> TuningSpec | TuningResult:
    """Run the pilot, choose the candidates and write `tune.json`, or return a result if there is nothing to gain."""
    started = perf_counter()
    config = with_settings(config, {"evaluation.ks": sorted({1, *config.evaluation.ks})})
    largest = max(config.evaluation.ks)
    most = {"pass@1": 1, "pass@k": _K, "coverage": largest}[aim]
    k = max(k for k in config.evaluation.ks if k <= most)
    if k == 1 and aim != "pass@1":
        raise UserError(
            f"{option('aim', aim)}: evaluation.ks has no k from 2 to {max(most, _K)}; set "
            f"{option('evaluation.ks', [1, _K])}"
        )
    slots = slots_for(jobs, [ArmRecipe(OWN, config)])
    config, tuning = with_tuning_prompts(config)
    fewest = (ArmRecipe(OWN, config),) * _MIN_CANDIDATES
    before = TuningSpec(aim, k, seconds, 0.0, seeds, len(slots), "", {}, tuning, fewest)

    def check_time(step_seconds: float, evaluation_seconds: float) -> None:
        used = perf_counter() - started
        spec = replace(before, evaluation_seconds=evaluation_seconds, used_seconds=used)
        with_sizes(spec, step_seconds, are_bounds=True)

    pilot = take_pilot(config, tuning, folder, screen, check_time)
    return_freed_memory()  # the race needs it while this process only waits
    start = pilot.start
    if largest > 1 and start[largest].high - start[1].value < _HEADROOM:
        ends = {"pass_k": interval(start[largest]), "pass_1": interval(start[1])}
        return TuningResult(folder, str(finding(NOTHING_TO_FIND, k=largest, **ends)), None, (), None)
    arms = tuple(candidates(config, pilot.prompts, aim))
    used = perf_counter() - started
    spec = TuningSpec(
        aim, k, seconds, 0.0, seeds, len(slots), machine_of(slots, arms[:1]), start, tuning, arms,
        evaluation_seconds=pilot.evaluation_seconds, used_seconds=used,
    )  # fmt: skip
    spec = with_sizes(spec, pilot.step_seconds)
    check_arms(spec.arms, "seconds", 1, len(slots), folder)  # the final has fewer runs
    spec = replace(spec, used_seconds=perf_counter() - started)
    spec.write(folder)
    return spec


def with_sizes(spec: TuningSpec, step_seconds: float, are_bounds: bool = False) -> TuningSpec:
    """Return the spec with as many arms as still leave the first rung long enough, and with the budget per run.

    The race and the final share the remaining time. One step of the recipe takes `step_seconds`. If `are_bounds`, this
    and the evaluation time are lower bounds.

    Raises:
        UserError: If the budget is too short even for the smallest number of arms.
    """
    least = _STEPS_TO_A_RUNG * step_seconds / RUNGS[0]
    left = spec.seconds - spec.used_seconds
    needed = 0.0
    for num_arms in range(len(spec.arms), min(_MIN_ARMS, len(spec.arms)) - 1, -1):
        fewer = replace(spec, arms=spec.arms[:num_arms])
        # The race and the final take `fixed` seconds, plus `slope` seconds per second of a run's budget.
        fixed, with_one = (TuneClock(replace(fewer, run_seconds=seconds), 0.0).whole_seconds for seconds in (0.0, 1.0))
        slope = with_one - fixed
        run_seconds = (left - fixed) / slope
        if run_seconds >= least:
            return replace(fewer, run_seconds=float(f"{run_seconds:.4g}"))
        needed = least * slope + fixed
    takes, give, margin = ("takes at least", "more than", 1.0) if are_bounds else ("takes", "at least", 1.2)
    evaluation = f", and an evaluation {takes} {spec.evaluation_seconds:.2g} s" if spec.evaluation_seconds else ""
    raise UserError(
        f"{option('budget', duration(spec.seconds))} is too short: a step of the recipe {takes} {step_seconds:.2g} s, "
        f"each run of the race needs {_STEPS_TO_A_RUNG} steps before it is judged{evaluation}; give {give} "
        f"{duration(margin * needed + spec.used_seconds)}, more {option('jobs')}, or a recipe with shorter steps or "
        "fewer held-out responses"
    )


def _announce(spec: TuningSpec, folder: Path, screen: Screen) -> None:
    """Print the arms and how long the race and the final will take."""
    clock = TuneClock(spec, 0.0)
    final = clock.final_seconds()
    lines = [
        f"aim: pass@{spec.k} after {amount(spec.run_seconds, 'seconds')} of training; {spec.machine}; folder {folder}",
        f"race: {len(spec.arms)} arms, about {duration(clock.whole_seconds - final)}; final: 2 arms with {spec.seeds} "
        f"seeds, about {duration(final)}",
        *(f"{arm.name}: {arm.title}" for arm in spec.arms),
    ]
    for line in lines:
        screen.echo(line)


def _race(
    folder: Path, slots: Callable[[], list[Slot]], clock: TuneClock, screen: Screen
) -> tuple[tuple[RungStanding, ...], ...]:
    """Train the arms from rung to rung and return their standings. Finished parts are not repeated."""
    spec = clock.spec
    arms = list(spec.arms)
    race = []
    for rung, fraction in enumerate(RUNGS):
        runs = [spec.race_run(folder, arm, fraction) for arm in arms]
        if not _train_to_rung(rung, runs, folder, slots, clock, screen):
            break
        room = room_after(rung, len(spec.arms)) if fraction < 1 else len(arms)
        standings = decide_rung(_read_rung(spec, runs), fraction, room, OWN)
        race.append(standings)
        staying = {standing.arm for standing in standings if standing.dropped is None}
        arms = [arm for arm in arms if arm.name in staying]
        for run in runs:
            if run.arm not in staying:
                shutil.rmtree(RunDirectory(run.directory).checkpoints, ignore_errors=True)
    return tuple(race)


def _train_to_rung(
    rung: int,
    runs: Sequence[PlannedRun],
    folder: Path,
    slots: Callable[[], list[Slot]],
    clock: TuneClock,
    screen: Screen,
) -> bool:
    """Train the runs that have not reached a rung yet, and return whether all reached it.

    A rung is not started if it would leave no time for the final. A rung that takes too long is stopped.
    """
    waiting = [run for run in runs if not progress_of(run).ended]
    if not waiting:
        return True
    if (folder / "final" / SPEC_FILE).is_file():  # an earlier call skipped this rung and began the final
        return False
    rung_amount = amount(clock.spec.run_seconds * RUNGS[rung], "seconds")
    if rung and clock.rung_seconds(rung) > clock.left_to_race:
        screen.echo(f"no time for the race up to {rung_amount}")
        return False
    screen.echo(f"race, up to {rung_amount}: {len(runs)} arms")
    view = ComparisonView(screen, runs)
    began = perf_counter()
    with view.running(continue_command(folder)):
        if not finish_runs(waiting, slots(), view, began + (clock.left_to_race if rung else clock.left)):
            screen.echo("the time is up: the runs of this part are stopped")
            return False
    if not rung and len(waiting) == len(runs):
        clock.observe(perf_counter() - began)
    return True


def _read_rung(spec: TuningSpec, runs: Sequence[PlannedRun]) -> list[RungStanding]:
    """Read the runs' scores at a rung, using only prompts whose responses were verified in every run."""
    evaluations: list[list[RunEvaluation]] = []
    for run in runs:
        read = read_scores(run.directory, run.seed, run.budget)
        if read is None:
            raise UserError(f"the run {run.directory} has no evaluation at its rung; rerun the command")
        evaluations.append([score_at(read[0], "seconds", spent) for spent in (0.0, *run.budget.eval_points)])
    kept = verified_prompts([evaluation for run_evaluations in evaluations for evaluation in run_evaluations])
    n = spec.own.config.evaluation.rollouts_per_prompt
    standings = []
    for run, run_evaluations in zip(runs, evaluations, strict=True):
        start, half, score = (float(pass_at_k(e.num_correct_P[kept], n, spec.k).mean()) for e in run_evaluations)
        standings.append(RungStanding(run.arm, str(spec.arm(run.arm).config.advantages), start, half, score))
    return standings
