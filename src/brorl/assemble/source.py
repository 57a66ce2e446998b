"""The source of a run's groups, from its settings: it samples in turn with the learner, or ahead of it."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, assert_never

from brorl.activity import Observe, unobserved
from brorl.assemble.cluster import Say, place_pool
from brorl.assemble.inputs import RunInputs
from brorl.assemble.settings import build_rollouts_per_prompt, build_sampling
from brorl.config.settings import TrainConfig
from brorl.rollout.engine import Engine
from brorl.rollout.pool import PooledEngine
from brorl.training.async_source import AsyncSource
from brorl.training.collect import Collector
from brorl.training.learner import Learner
from brorl.training.source import GroupSource
from brorl.training.stopwatch import Stopwatch
from brorl.verification.one_at_a_time import OneAtATime
from brorl.verification.verifier import Verifier

if TYPE_CHECKING:
    from brorl.distributed.cluster import Cluster


def build_collector(
    config: TrainConfig,
    ready: RunInputs,
    engine: Engine,
    learner: Learner,
    clock: Stopwatch,
    observe: Observe = unobserved,
) -> Collector:
    """Make a source that samples when the loop needs groups.

    Args:
        config: The run's settings.
        ready: The prompts and the grader.
        engine: Samples trees.
        learner: Computes the old log-probs of groups that wait.
        clock: Adds up the seconds of each phase.
        observe: Receives each round.
    """
    num_rollouts, adaptive = build_rollouts_per_prompt(config)
    return Collector(
        engine=engine,
        stream=ready.prompts.train,
        grader=ready.grader,
        sampling=build_sampling(config),
        rollouts_per_prompt=num_rollouts,
        prompts_per_step=config.prompts_per_step,
        dynamic_sampling=config.dynamic_sampling.enabled,
        max_tries=config.dynamic_sampling.max_tries,
        seed=config.seed,
        adaptive=adaptive,
        keep_old_logprobs=learner.with_old_logprobs,
        clock=clock,
        observe=observe,
    )


def place_source(
    cluster: Cluster,
    config: TrainConfig,
    ready: RunInputs,
    learner: Learner,
    clock: Stopwatch,
    say: Say,
    observe: Observe = unobserved,
) -> GroupSource:
    """Start the rollout workers, and make a source over them.

    Args:
        cluster: The cluster, which has started.
        config: The run's settings.
        ready: The prompts and the grader; its verifiers allow calls from several threads if the source is asynchronous.
        learner: Computes the old log-probs of groups that wait.
        clock: Adds up the seconds of each phase.
        say: Receives a line for each lost worker.
        observe: Receives the progress of sampling.
    """
    pool = place_pool(cluster, config, ready.context, say)
    settings = config.cluster
    match settings.mode:
        case "sync":
            engine = PooledEngine(pool, settings.prompts_per_task, observe)
            return build_collector(config, ready, engine, learner, clock, observe)
        case "async":
            source = AsyncSource(
                pool=pool,
                stream=ready.prompts.train,
                grader=ready.grader,
                sampling=build_sampling(config),
                rollouts_per_prompt=config.rollouts_per_prompt,
                prompts_per_step=config.prompts_per_step,
                dynamic_sampling=config.dynamic_sampling.enabled,
                max_tries=config.dynamic_sampling.max_tries,
                seed=config.seed,
                max_staleness=settings.max_staleness,
                stragglers=settings.stragglers,
                segment_tokens=settings.segment_tokens,
                prompts_per_task=settings.prompts_per_task,
                clock=clock,
                observe=observe,
            )
            cluster.on_release(source.close)  # before the pool
            return source
        case _:
            assert_never(settings.mode)


def in_turns(verifiers: Mapping[str, Verifier]) -> dict[str, Verifier]:
    """Return verifiers that allow calls from several threads; those of one run share worker processes."""
    lock = Lock()
    return {domain: OneAtATime(verifier, lock) for domain, verifier in verifiers.items()}
