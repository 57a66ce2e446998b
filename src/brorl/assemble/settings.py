"""Settings to the plain arguments of the parts: sampling, rewards, advantages, learner."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, process_time
from typing import assert_never

from brorl.algorithms.importance import ImportanceCorrection
from brorl.algorithms.kl import KLPenalty
from brorl.algorithms.learning_rate import scaled_learning_rate
from brorl.algorithms.policy_loss import DEFAULT_CLIP, PolicyLossSettings
from brorl.algorithms.rewards import CosineLength, Overlong, RewardShaping
from brorl.config.settings import TrainConfig
from brorl.cost import Budget
from brorl.errors import UserError
from brorl.model.forward import Forward
from brorl.model.lora import LoraSettings
from brorl.model.next_token import NextToken
from brorl.sampling import SamplingParams
from brorl.theory.allocation import AdaptiveAllocation
from brorl.training.collapse import CollapseLimits
from brorl.training.learner import LearnerSettings
from brorl.training.reference_schedule import ReferenceSchedule
from brorl.training.schedule import Schedule
from brorl.verification.response_format import ResponseFormat


def build_rollouts_per_prompt(config: TrainConfig) -> tuple[int, AdaptiveAllocation | None]:
    """Return the rollouts that every prompt gets, and how prompts may be widened after them, if at all."""
    adaptive, number = config.adaptive, config.rollouts_per_prompt
    if not adaptive.enabled:
        return number, None
    return adaptive.pilot_rollouts, AdaptiveAllocation(adaptive.max_rollouts, samples_per_prompt=number)


def autocasts(config: TrainConfig) -> bool:
    """Return whether the learner computes in bfloat16 with float32 weights; adapters go with a base in bfloat16."""
    return config.dtype == "bfloat16" and not config.lora.rank


def build_clock(config: TrainConfig) -> Callable[[], float]:
    """Return the clock of the run's seconds."""
    match config.engine.clock:
        case "wall":
            return perf_counter
        case "cpu":
            return process_time
        case _:
            assert_never(config.engine.clock)


def build_budget(config: TrainConfig) -> Budget:
    """Return the budget of the run: its number of steps if no budget is set."""
    budget = config.budget
    if budget.limit is not None:
        return Budget(budget.unit, budget.limit, budget.marks)
    assert config.steps is not None  # the config has checked it
    return Budget("steps", config.steps)


def build_sampling(config: TrainConfig) -> SamplingParams:
    """Return how training's rollouts are drawn."""
    sampling = config.sampling
    return SamplingParams(
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
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
        format_reward=rewards.format_reward if rewards.format_pattern is not None else 0.0,
    )


def build_response_format(config: TrainConfig) -> ResponseFormat | None:
    """Return the format that responses are rewarded for, if any."""
    pattern = config.rewards.format_pattern
    return None if pattern is None else ResponseFormat(pattern)


def build_learning_rate(config: TrainConfig) -> float:
    """Return the learning rate, scaled for the batch."""
    optimizer = config.optimizer
    if not optimizer.reference_batch:
        return optimizer.learning_rate
    return scaled_learning_rate(optimizer.learning_rate, config.samples_per_step, optimizer.reference_batch)


def build_policy_loss(config: TrainConfig) -> PolicyLossSettings:
    """Return the policy loss, with the bounds of its kind where none are set.

    Raises:
        UserError: If the settings contradict each other.
    """
    loss = config.loss
    clip = DEFAULT_CLIP[loss.kind]
    try:
        return PolicyLossSettings(
            loss.kind,
            clip.low if loss.clip_low is None else loss.clip_low,
            clip.high if loss.clip_high is None else loss.clip_high,
            loss.aggregation,
            config.sampling.max_new_tokens,
            loss.dual_clip,
            loss.entropy_coefficient,
            loss.mask_truncated,
        )
    except ValueError as error:
        raise UserError(f"loss: {error}") from error


def build_learner_settings(config: TrainConfig, stop_token_ids: tuple[int, ...], forward: Forward) -> LearnerSettings:
    """Return the learner's settings.

    Args:
        config: The run's settings.
        stop_token_ids: Tokens that end a response.
        forward: How trees go through the model.
    """
    optimizer, kl, importance = config.optimizer, config.kl, config.importance
    sampling = config.sampling
    return LearnerSettings(
        learning_rate=build_learning_rate(config),
        mini_batches=optimizer.mini_batches,
        next_token=NextToken(sampling.temperature, sampling.min_new_tokens, stop_token_ids),
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        warmup_updates=optimizer.warmup_updates,
        max_responses_per_outcome=optimizer.max_responses_per_outcome,
        recompute_old_logprobs=config.recompute_old_logprobs,
        max_nodes=config.engine.nodes_per_pass,
        autocast=autocasts(config),
        loss=build_policy_loss(config),
        kl=KLPenalty(kl.coefficient, kl.estimator, kl.placement, kl.clamp) if kl.coefficient else None,
        importance=ImportanceCorrection(importance.correction, importance.low, importance.high),
        offload_reference=config.reference.offload,
        forward=forward,
    )


def build_schedule(config: TrainConfig) -> Schedule:
    """Return when the run ends, is evaluated and saved, and when the reference policy is reset."""
    reference = config.reference
    return Schedule(
        budget=build_budget(config),
        steps=config.steps,
        evaluate_every=config.evaluation.every,
        checkpoint_every=config.checkpoint_every,
        store_rollouts_every=config.store_rollouts_every,
        reference=ReferenceSchedule(
            reference.reset_every,
            reference.reset_kl_above,
            reference.reset_patience,
            clear_optimizer=reference.reset_optimizer,
        ),
    )


def build_collapse_limits(config: TrainConfig) -> CollapseLimits:
    """Return when the model counts as collapsing."""
    collapse = config.collapse
    return CollapseLimits(collapse.entropy_fraction, collapse.reference_kl, patience=collapse.patience)


def build_lora(config: TrainConfig) -> LoraSettings | None:
    """Return the adapters to train, if not all weights are."""
    lora = config.lora
    return LoraSettings(rank=lora.rank, alpha=lora.alpha, target_modules=lora.target_modules) if lora.rank else None
