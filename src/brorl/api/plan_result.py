"""The result of `brorl.plan`: the plan, its files, and the commands that train with it or measure it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from brorl.api.checkpoint import resolve_checkpoint
from brorl.api.display import to_html
from brorl.api.settings import ConfigOrPath
from brorl.format import plain
from brorl.planning.estimators import K
from brorl.planning.recommendation import PlanRow, RolloutPlan
from brorl.planning.report import PlanReport, advice

_NOT_COMPARED = ("rollouts_per_prompt", "prompts_per_step", "seed", "steps", "evaluation.every")  # compare sets these
_COMPARED_STEPS = 100  # length of the recommended comparison
_LARGE_N = 512


@dataclass(frozen=True, eq=False)
class PlanResult:
    """A plan that was written.

    Attributes:
        path: The folder of `plan.json` and `plan.png`.
        report: The plan with its measurements and the memory that it predicts.
        train_command: The command that trains with the recommendation; None if no N fits in the budget, or if the
            recipe has no name on the command line.
        compare_command: The command that measures the plan; None if there is nothing to compare.
    """

    path: Path
    report: PlanReport
    train_command: str | None
    compare_command: str | None

    @property
    def json_file(self) -> Path:
        """All numbers of the plan."""
        return self.path / "plan.json"

    @property
    def figure_file(self) -> Path:
        """The plan as a figure."""
        return self.path / "plan.png"

    @property
    def rows(self) -> list[PlanRow]:
        """One row per N, ascending."""
        return self.report.plan.rows

    @property
    def recommended(self) -> PlanRow | None:
        """The recommended row, with the prompts per step as `budget_prompts`; None if no N fits in the budget."""
        return self.report.plan.recommended

    @property
    def memory_bytes(self) -> Sequence[int | None]:
        """Memory of a step above the loaded model with the recipe's prompts, per row; None if unknown."""
        return self.report.memory_bytes

    def __rich__(self) -> Group:
        """Return the tables, the advice, the files, and the commands."""
        lines = [f"\nwritten: {self.json_file}, {self.figure_file}"]
        if self.train_command:
            lines.append(f"train with it: {self.train_command}")
        if self.compare_command:
            lines.append(f"or measure it: {self.compare_command}")
        return Group(self.report, *map(Text, lines))

    def __repr__(self) -> str:
        return f"PlanResult({str(self.path)!r}: {advice(self.report)[0]})"

    def _repr_html_(self) -> str:
        return to_html(self)


def next_commands(
    plan: RolloutPlan, checkpoint: str | Path | None, recipe: ConfigOrPath, given: Mapping[str, Any]
) -> tuple[str | None, str | None]:
    """Return the commands that train with the recommendation and that measure the plan, as far as they exist.

    Args:
        plan: The plan.
        checkpoint: The planned model, run or checkpoint; None for the recipe's model.
        recipe: The planned recipe.
        given: The overrides of its settings, by dotted name.
    """
    row = plan.recommended
    if row is None or not isinstance(recipe, str | Path):
        return None, None
    model, run_config = (given.get("model"), None) if checkpoint is None else resolve_checkpoint(str(checkpoint))
    others = {name: value for name, value in given.items() if name != "model"}
    trained = {"model": model} if model else {}
    if recipe == run_config:
        trained["output_dir"] = None  # the run's own directory is not empty
    trained |= others | {"rollouts_per_prompt": row.num_rollouts, "prompts_per_step": row.budget_prompts}
    train = ["brorl", "train", str(recipe), *_options(trained)]
    least = K + 1 if others.get("advantage.estimator") == "pass_at_k" else 2
    if not (sweep := _sweep(plan, row, least)):
        return shlex.join(train), None
    compared = {"from": model} if model else {}
    compared |= {name: value for name, value in others.items() if name not in _NOT_COMPARED}
    budget = plain(_COMPARED_STEPS * plan.budget).replace(",", "")
    compare = ["brorl", "compare", str(recipe), *_options(compared), *sweep, "--budget", budget]
    return shlex.join(train), shlex.join(compare)


def _options(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as options, with values in YAML."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
    return [word for name, text in texts.items() for word in (f"--{name}", text)]


def _sweep(plan: RolloutPlan, chosen: PlanRow, least: int) -> list[str]:
    """Return the options that compare a few N of the plan from `least` on, each with the prompts that fit its time."""
    fitting = [row for row in plan.rows if row.budget_prompts and row.num_rollouts >= least]
    if not fitting:
        return []
    wanted = {fitting[0].num_rollouts, plan.rows[plan.recipe].num_rollouts, chosen.num_rollouts, _LARGE_N}
    arms = [row for row in fitting if row.num_rollouts in wanted]
    if len(arms) < 2:
        return []
    rollouts = ",".join(str(row.num_rollouts) for row in arms)
    prompts = ",".join(str(row.budget_prompts) for row in arms)
    return ["--sweep", f"rollouts_per_prompt={rollouts}", "--sweep", f"prompts_per_step={prompts}"]
