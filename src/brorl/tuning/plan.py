"""The plan of a tuning: its candidates, and what is raced and judged, as `tune.json` in its folder holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from brorl.algorithms.settings import AdvantageSettings
from brorl.comparison.arm_plans import ArmPlan, run_config
from brorl.comparison.arms import ArmRun
from brorl.comparison.plan import ComparisonPlan, read_fields, write_plan
from brorl.config.reading import dump_yaml, with_settings
from brorl.config.settings import TrainConfig
from brorl.cost import Budget
from brorl.format import Estimate, exact, plain
from brorl.runs.run_record import TUNE_FILE
from brorl.storage import replace_file, storage_errors
from brorl.tuning import Aim
from brorl.tuning.standings import RUNGS

OWN = "yours"
ROLLOUTS = (128, 16, 512)  # the numbers of rollouts to try, in this order
# The order of MaxRL at the end of a long run, as docs/explanation/study.md found; None for no fall.
_FINAL_ORDERS: Mapping[Aim, int | None] = {"pass@1": 1, "pass@k": 16, "coverage": None}
_FALLING = {"optimizer.schedule": "cosine"}


def candidates(config: TrainConfig, prompts: Mapping[int, int], aim: Aim) -> list[ArmPlan]:
    """Return at most nine arms, the user's own first and then the most promising ones.

    Each candidate is the user's recipe with another N, objective or learning rate, and a rate that falls over the
    budget; docs/explanation/study.md is the reason for the list.

    `prompts` has, for each N that fits, the prompts per step that take as long as a step of the recipe.
    """
    rate, sizes = config.optimizer.learning_rate, [n for n in ROLLOUTS if n in prompts]
    own_objective = {} if config.phases else {"advantage": config.advantage.model_dump(mode="json")}
    wanted: list[dict[str, Any]] = []
    for higher in (float(f"{factor * rate:.6g}") for factor in (3, 10)):
        wanted += [_settings(n, prompts[n], higher, _objective(aim)) for n in sizes]
        wanted.append(_settings(config.rollouts_per_prompt, config.prompts_per_step, higher, own_objective))
    arms = [ArmPlan(OWN, config, title=_title(config))]
    for settings in wanted:
        arm = with_settings(config, settings, "a candidate")
        if all(arm != other.config for other in arms):
            arms.append(ArmPlan(f"candidate {len(arms)}", arm, title=_title(arm)))
    return arms


def _settings(num_rollouts: int, num_prompts: int, rate: float, objective: Mapping[str, Any]) -> dict[str, Any]:
    changed = {"rollouts_per_prompt": num_rollouts, "prompts_per_step": num_prompts, "optimizer.learning_rate": rate}
    return changed | ({"phases": []} | dict(objective) if objective else {}) | _FALLING


def _objective(aim: Aim) -> dict[str, Any]:
    """Return the objective that the study found best for an aim: MaxRL, with an order that ends where the aim is."""
    return {"advantage": AdvantageSettings(estimator="maxrl", final_order=_FINAL_ORDERS[aim]).model_dump(mode="json")}


def _title(config: TrainConfig) -> str:
    advantage, optimizer = config.advantage, config.optimizer
    objective = " then ".join(phase.advantage.estimator for phase in config.phases) or advantage.estimator
    falls = f", order falls to {advantage.final_order}" if advantage.final_order else ""
    schedule = "" if optimizer.schedule == "constant" else f", {optimizer.schedule}"
    batch = f"N = {config.rollouts_per_prompt} x {config.prompts_per_step}"
    return f"{batch}, {objective}{falls}, rate {plain(optimizer.learning_rate)}{schedule}"


_TUNING_SEED = 1000  # of the race; the final has the seeds from 0
_POINTS = (RUNGS[0] / 2, *RUNGS)  # at which a run is evaluated: the rungs and their halves
NUM_EVALUATIONS = 1 + len(_POINTS)  # of a run to the end, that of the start included


@dataclass(frozen=True)
class TunePlan:
    """What is trained."""

    aim: Aim
    k: int  # of the pass@k that the aim means
    seconds: float  # of the whole command
    run_seconds: float  # of each run
    seeds: int  # of the final
    jobs: int  # runs at a time
    machine: str
    start: Mapping[int, Estimate]  # held-out pass@k of the start
    tuning_prompts: tuple[int, int]  # evaluation.skip_prompts and num_prompts of the race
    arms: tuple[ArmPlan, ...]  # the user's own first
    evaluation_seconds: float = 0.0  # of one evaluation
    used_seconds: float = 0.0  # of the whole command, by earlier calls and the pilot

    @property
    def own(self) -> ArmPlan:
        """The user's recipe."""
        return self.arms[0]

    def arm(self, name: str) -> ArmPlan:
        """Return the arm of a name."""
        return next(arm for arm in self.arms if arm.name == name)

    def final(self, winner: ArmPlan, run_seconds: float, seeds: int) -> ComparisonPlan:
        """Return the comparison of the winner with the user's recipe."""
        points = tuple(run_seconds * fraction for fraction in _POINTS)
        arms, where = (self.own, winner), (self.machine, self.jobs)
        return ComparisonPlan(arms, "seconds", run_seconds, points, seeds, (), (), *where)

    def race_run(self, folder: Path, arm: ArmPlan, fraction: float) -> ArmRun:
        """Return a run of the race up to a rung, with its recipe written. It is evaluated at half of each rung, too."""
        directory = folder / "race" / arm.name.replace(" ", "_")
        points = tuple(self.run_seconds * fraction for fraction in _POINTS)
        config = run_config(arm, _TUNING_SEED, directory, Budget("seconds", self.run_seconds, points))
        rung = self.run_seconds * fraction
        pause = None if fraction == 1 else rung
        skip, number = self.tuning_prompts
        changed = {"evaluation.skip_prompts": skip, "evaluation.num_prompts": number, "budget.pause_at": pause}
        recipe = directory.with_suffix(".yaml")
        with storage_errors(folder):
            recipe.parent.mkdir(parents=True, exist_ok=True)
            replace_file(recipe, dump_yaml(with_settings(config, changed, arm.name)).encode())
        resume = f"--budget.pause_at={'null' if pause is None else exact(pause)}"
        budget = Budget("seconds", rung, (rung / 2, rung))
        return ArmRun(arm.name, _TUNING_SEED, recipe, directory, budget, (resume,))

    def write(self, folder: Path) -> None:
        """Write `tune.json`."""
        with storage_errors(folder):
            write_plan(self, folder / TUNE_FILE)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the plan of a folder."""
        content = read_fields(folder / TUNE_FILE, "tuning")
        content["start"] = {int(k): Estimate(**estimate) for k, estimate in content["start"].items()}
        return cls(**content)
