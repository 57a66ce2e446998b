"""The pilot of a tuning: the score of the start, and how many prompts fit into a step at each N."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from brorl.activity import Phase
from brorl.config.reading import with_settings
from brorl.config.settings import TrainConfig
from brorl.console.screen import Screen
from brorl.errors import UserError
from brorl.evaluation.benchmark import Benchmark
from brorl.evaluation.questions import build_questions
from brorl.format import Estimate, interval
from brorl.planning.pilot import PilotParts
from brorl.planning.report import PlanReport
from brorl.planning.step_timing import NoMixedGroupError
from brorl.training.inputs import prepare
from brorl.tuning.candidates import ROLLOUTS

_FEWEST_PROMPTS = 16  # held out, for the race and for the final each


@dataclass(frozen=True)
class StartPilot:
    """What the pilot found."""

    start: dict[int, Estimate]  # pass@k on the tuning prompts, by k
    prompts: dict[int, int]  # prompts per step that take as long as the recipe's, by N; without N that do not fit
    step_seconds: float  # of the recipe
    evaluation_seconds: float


def with_tuning_prompts(config: TrainConfig) -> tuple[TrainConfig, tuple[int, int]]:
    """Divide the held-out prompts of each source: those of the final stay the recipe's; the race gets the next ones."""
    skip, wanted = config.evaluation.skip_prompts, config.evaluation.num_prompts
    everything = _evaluated_on(config, skip, 2**20)
    sizes = [len(source.held_out) for source in build_questions(everything) if source.held_out]
    smallest = min(sizes, default=0)
    final = min(wanted, smallest - smallest // 2)
    tuning = min(wanted, smallest - final)
    if tuning * len(sizes) < _FEWEST_PROMPTS:
        raise UserError(
            f"a tuning needs at least {2 * _FEWEST_PROMPTS} held-out prompts, half of them for the race, and as many "
            f"of each source; there are {2 * tuning * len(sizes)}; raise data.held_out_fraction and "
            "evaluation.num_prompts, or set evaluation.sources"
        )
    return _evaluated_on(config, skip, final), (skip + final, tuning)


def _evaluated_on(config: TrainConfig, skip: int, num: int) -> TrainConfig:
    return with_settings(config, {"evaluation.skip_prompts": skip, "evaluation.num_prompts": num})


def take_pilot(config: TrainConfig, tuning: tuple[int, int], folder: Path, progress: bool) -> StartPilot:
    """Evaluate the start on the tuning prompts, and find the prompts per step that take as long at each N."""
    config = _evaluated_on(config, *tuning)
    with Screen(silent=not progress) as screen, ExitStack() as ends:
        screen.observe(Phase("loading", "data"))
        inputs = prepare(config, config.model)
        parts = PilotParts.load(config, inputs, screen.observe, ends.callback, screen.echo)
        benchmark = Benchmark.from_recipe(config, inputs.prompts.held_out, inputs.grader, screen.observe)
        began = parts.now()
        found = None if benchmark is None else benchmark.record(*benchmark.answer(parts.engine))
        evaluation_seconds = parts.now() - began
        if found is None:
            raise UserError("the start could not be evaluated on the held-out prompts; run: brorl check")
        start = {int(k): Estimate(**estimate) for k, estimate in found["pass_at"].items()}
        scores = ", ".join(f"pass@{k} {interval(estimate)}" for k, estimate in start.items())
        number = len(found["prompts"]["num_correct"])
        screen.console.print(f"the start, on {number} held-out prompts: {scores}", soft_wrap=True, markup=False)
        pilot = min(64, parts.stream.num_prompts), 64
        try:
            plan = PlanReport.measure(config, parts, pilot, ROLLOUTS, folder, screen.dim).plan
        except NoMixedGroupError as error:
            raise UserError(
                f"the pilot has {pilot[1]} rollouts of each of {pilot[0]} training prompts, "
                "and no group is mixed; choose prompts that the model solves sometimes, or look at them: brorl data"
            ) from error
    fitting = {row.num_rollouts: row.budget_prompts for row in plan.rows if row.budget_prompts}
    return StartPilot(start, fitting, plan.rows[plan.recipe].seconds["total"], evaluation_seconds)
