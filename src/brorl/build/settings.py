"""Settings to the plain arguments of the parts: sampling, rewards, advantages, learner."""

from __future__ import annotations

from functools import partial
from typing import assert_never

from brorl.algorithms import advantages
from brorl.algorithms.importance import ImportanceCorrection
from brorl.algorithms.kl import KLPenalty
from brorl.algorithms.learning_rate import scaled_learning_rate
from brorl.algorithms.policy_loss import PolicyLossSettings
from brorl.algorithms.rewards import CosineLength, Overlong, RewardShaping
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.evaluation.compute_match import Budget
from brorl.model.lora import LoraSettings
from brorl.sampling import SamplingParams
from brorl.theory.allocation import Widening
from brorl.training.collapse import CollapseLimits
from brorl.training.learner import LearnerSettings
from brorl.training.loop import EstimateAdvantages
from brorl.training.reference_schedule import ReferenceSchedule


def build_rollouts_per_prompt(config: TrainConfig) -> tuple[int, Widening | None]:
    """Return the rollouts that every prompt gets, and how prompts may be widened after them, if at all."""
    if isinstance(config.rollouts_per_prompt, int):
        return config.rollouts_per_prompt, None
    adaptive = config.adaptive
    return adaptive.pilot_rollouts, Widening(adaptive.max_rollouts, adaptive.samples_per_prompt)


def build_budget(config: TrainConfig) -> Budget:
    """Return what the run may cost: its number of steps where no budget is set."""
    budget = config.budget
    if budget.limit is not None:
        return Budget(budget.unit, budget.limit, budget.marks)
    assert config.steps is not None  # the config has checked it
    return Budget("steps", config.steps)


def build_sampling(config: TrainConfig) -> SamplingParams:
    """Return how training's rollouts are drawn."""
    sampling = config.sampling
    return SamplingParams(
        sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens, scheme=sampling.scheme
    )


def build_shaping(config: TrainConfig) -> RewardShaping:
    """Return how verdicts become rewards.

    Raises:
        UserError: If the settings contradict each other.
    """
    try:
        return _shaping(config)
    except ValueError as error:
        raise UserError(str(error)) from error


def _shaping(config: TrainConfig) -> RewardShaping:
    rewards, length = config.rewards, config.rewards.cosine_length
    limit = config.sampling.max_new_tokens
    cosine = CosineLength(
        max_length=limit,
        correct_short=length.correct_short,
        correct_long=length.correct_long,
        wrong_short=length.wrong_short,
        wrong_long=length.wrong_long,
        on_steps=length.on_steps,
        every_steps=length.every_steps,
    ) if length.every_steps else None  # fmt: skip
    return RewardShaping(
        partial_credit=rewards.partial_credit,
        stop_properly=rewards.stop_properly,
        cosine_length=cosine,
        overlong=Overlong(limit, rewards.overlong_tokens) if rewards.overlong_tokens else None,
        domain_weights=rewards.domain_weights,
    )


def build_advantages(config: TrainConfig) -> EstimateAdvantages:
    """Return the advantage estimator."""
    match config.advantage.estimator:
        case "reinforce_pp_baseline":
            return partial(advantages.reinforce_pp_baseline, normalise_over=config.advantage.normalise_over)
        case "grpo":
            return advantages.grpo
        case "rloo":
            return advantages.rloo
        case _:
            assert_never(config.advantage.estimator)


def build_learner_settings(config: TrainConfig) -> LearnerSettings:
    """Return the learner's settings, with the learning rate scaled for the batch."""
    optimizer, loss, kl, importance = config.optimizer, config.loss, config.kl, config.importance
    learning_rate = optimizer.learning_rate
    if optimizer.reference_batch:
        learning_rate = scaled_learning_rate(learning_rate, config.samples_per_step, optimizer.reference_batch)
    return LearnerSettings(
        learning_rate=learning_rate,
        mini_batches=optimizer.mini_batches,
        temperature=config.sampling.temperature,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        warmup_updates=optimizer.warmup_updates,
        responses_per_verdict=optimizer.responses_per_verdict,
        recompute_old_logprobs=config.recompute_old_logprobs,
        max_nodes=config.engine.nodes_per_pass,
        autocast=config.dtype == "bfloat16" and not config.lora.rank,  # adapters go with a base in bfloat16
        loss=PolicyLossSettings(
            loss.kind, loss.clip_low, loss.clip_high, loss.aggregation, config.sampling.max_new_tokens
        ),
        kl=KLPenalty(kl.coefficient, kl.estimator, kl.placement, kl.clamp) if kl.coefficient else None,
        importance=ImportanceCorrection(importance.correction, importance.low, importance.high),
        offload_reference=config.reference.offload,
    )


def build_schedule(config: TrainConfig) -> ReferenceSchedule:
    """Return when the reference policy is reset."""
    reference = config.reference
    return ReferenceSchedule(reference.reset_every, reference.reset_kl_above, reference.reset_patience)


def build_collapse_limits(config: TrainConfig) -> CollapseLimits:
    """Return when the model counts as collapsing."""
    collapse = config.collapse
    return CollapseLimits(collapse.entropy_share, collapse.reference_kl, patience=collapse.patience)


def build_lora(config: TrainConfig) -> LoraSettings | None:
    """Return the adapters to train, if not all weights are."""
    lora = config.lora
    return LoraSettings(rank=lora.rank, alpha=lora.alpha, target_modules=lora.target_modules) if lora.rank else None
