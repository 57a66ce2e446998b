"""Settings to the objective of a run: its phases, and the advantage estimator of each."""

from __future__ import annotations

from functools import partial
from typing import assert_never

from brorl.algorithms import advantages, outcome_weights
from brorl.algorithms.advantages import EstimateAdvantages
from brorl.algorithms.outcome_weights import OutcomeWeight
from brorl.algorithms.settings import AdvantageSettings
from brorl.config.settings import TrainConfig
from brorl.training.objective import Objective, ObjectivePhase
from brorl.training.settings import PhaseSettings


def build_objective(config: TrainConfig) -> Objective:
    """Return the objective of the run, with one phase if the recipe names none."""
    phases = config.phases or (PhaseSettings(name="train", advantage=config.advantage),)
    rate, number = config.optimizer.learning_rate, config.rollouts_per_prompt
    built = [_objective_phase(phase, rate, number) for phase in phases]
    return Objective(built, config.evaluation.every)


def _objective_phase(phase: PhaseSettings, learning_rate: float, num_rollouts: int) -> ObjectivePhase:
    def settings_at(progress: float) -> AdvantageSettings:
        return _annealed(phase.advantage, progress, num_rollouts)

    return ObjectivePhase(
        name=phase.name,
        title=_phase_title(phase),
        estimator_at=lambda progress: build_advantages(settings_at(progress)),
        until=phase.until,
        patience=phase.until_coverage_stalls,
        lr_scale=1.0 if phase.learning_rate is None else phase.learning_rate / learning_rate,
    )


def _annealed(config: AdvantageSettings, progress: float, num_rollouts: int) -> AdvantageSettings:
    """Return the settings at a progress from 0 to 1, with the order between `order` and `final_order`.

    Without `order` it starts at N - 1; with adaptive rollouts N is the largest average.
    """
    if config.final_order is None:
        return config
    first = min(config.order or num_rollouts - 1, num_rollouts - 1)
    order = round(first ** (1 - progress) * config.final_order**progress)
    return config.model_copy(update={"order": order, "final_order": None})


def _phase_title(phase: PhaseSettings) -> str:
    title = advantage_title(phase.advantage)
    return title if phase.learning_rate is None else f"{title}, learning rate {phase.learning_rate:.1e}"


def phases_text(config: TrainConfig) -> str:
    """Return the phases in a few words: names, advantages and ends."""
    texts = []
    for phase in config.phases:
        end = "" if phase is config.phases[-1] else f" until {phase.until:g}"
        stall = "" if phase.until_coverage_stalls is None else f" or {phase.until_coverage_stalls} stalls"
        texts.append(f"{phase.name}{end}{stall} ({_phase_title(phase)})")
    return ", then ".join(texts) or "none"


def advantage_title(config: AdvantageSettings) -> str:
    """Return the estimator and its parameter in a few words."""
    match config.estimator:
        case "maxrl":
            last = "" if config.final_order is None else f" to {config.final_order}"
            first = "N-1" if config.order is None else str(config.order)
            return f"maxrl, order {first}{last}"
        case "pass_at_k":
            return f"pass_at_k, k {config.k}"
        case "power":
            return f"power, alpha {config.alpha:g}"
        case "reinforce_pp_baseline" | "grpo" | "rloo":
            return config.estimator
        case _:
            assert_never(config.estimator)


def build_advantages(config: AdvantageSettings) -> EstimateAdvantages:
    """Return the advantage estimator: the estimator's own advantages, then batch statistics."""
    estimate = _estimator(config)
    if not config.batch_scale and config.estimator != "reinforce_pp_baseline":
        return estimate
    return lambda groups: advantages.batch_normalized(groups, estimate(groups), config.normalize_over)


def _estimator(config: AdvantageSettings) -> EstimateAdvantages:
    match config.estimator:
        case "reinforce_pp_baseline":
            return _weighted(outcome_weights.reinforce_pp_baseline)
        case "grpo":
            return advantages.grpo
        case "rloo":
            return advantages.rloo
        case "maxrl":
            return _weighted(partial(outcome_weights.maxrl, order=config.order))
        case "pass_at_k":
            return _weighted(partial(_pass_at_most, k=config.k))
        case "power":
            return _weighted(partial(outcome_weights.power, alpha=config.alpha))
        case _:
            assert_never(config.estimator)


def _pass_at_most(num_rollouts: int, num_correct: int, k: int) -> float:
    """Return the weight of pass@k, or of pass@(N-1) for a group that has k rollouts or fewer left.

    The recipe has k below its own N. A group becomes smaller if rollouts could not be verified. MaxRL bounds its order
    in the same way.
    """
    return outcome_weights.pass_at_k(num_rollouts, num_correct, min(k, num_rollouts - 1))


def _weighted(weight: OutcomeWeight) -> EstimateAdvantages:
    return partial(advantages.outcome_weighted, weight=weight)
