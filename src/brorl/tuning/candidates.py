"""The candidates of `brorl tune`: the user's recipe, and others that may end higher for an aim.

Each candidate is the user's recipe with another N, the prompts per step that take as long, another objective, another
learning rate, and a rate that falls over the budget. The study (docs/explanation/study.md) is the reason for the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brorl.algorithms.settings import AdvantageSettings
from brorl.comparison.arm_plans import ArmPlan
from brorl.config.reading import with_settings
from brorl.config.settings import TrainConfig
from brorl.format import plain
from brorl.tuning import Aim

OWN = "yours"
ROLLOUTS = (128, 16, 512)  # the numbers of rollouts to try, in this order
# The order of MaxRL at the end of a long run, as docs/explanation/study.md found; None for no fall.
_FINAL_ORDERS: Mapping[Aim, int | None] = {"pass@1": 1, "pass@k": 16, "coverage": None}
_FALLING = {"optimizer.schedule": "cosine"}


def candidates(config: TrainConfig, prompts: Mapping[int, int], aim: Aim) -> list[ArmPlan]:
    """Return at most nine arms, the user's own first and then the most promising ones.

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
