"""The plan of a tuning: what is raced and judged, as `tune.json` in its folder holds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import brorl
from brorl.comparison.arm_plans import ArmPlan, run_config
from brorl.comparison.arm_runs import ArmRun
from brorl.comparison.plan import ComparisonPlan
from brorl.config.reading import dump_yaml, make_config, with_settings
from brorl.cost import Budget
from brorl.errors import UserError
from brorl.format import Estimate, exact
from brorl.runs.run_record import TUNE_FILE
from brorl.storage import replace_file, storage_errors
from brorl.tuning import Aim
from brorl.tuning.standings import RUNGS

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
        return ComparisonPlan((self.own, winner), "seconds", run_seconds, points, seeds)

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
        content: dict[str, Any] = {"brorl": brorl.__version__} | vars(self)
        content["start"] = {str(k): asdict(estimate) for k, estimate in self.start.items()}
        content["arms"] = [
            {"name": arm.name, "title": arm.title, "settings": arm.config.model_dump(mode="json")} for arm in self.arms
        ]
        with storage_errors(folder):
            replace_file(folder / TUNE_FILE, json.dumps(content, indent=2).encode())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the plan of a folder.

        Raises:
            UserError: If it is damaged.
        """
        file = folder / TUNE_FILE
        try:
            content = json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise UserError(f"{file} is damaged ({error}); start a new tuning in another folder") from error
        del content["brorl"]
        content["start"] = {int(k): Estimate(**estimate) for k, estimate in content["start"].items()}
        content["tuning_prompts"] = tuple(content["tuning_prompts"])
        content["arms"] = tuple(
            ArmPlan(arm["name"], make_config(arm["settings"], {}, str(file)), title=arm["title"])
            for arm in content["arms"]
        )
        return cls(**content)
