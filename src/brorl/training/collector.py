"""Collectors, which give each step its batch of groups.

`SyncCollector` samples in rounds when called, until enough groups are kept (dynamic sampling). On a GPU a round takes
nearly as long for a few prompts as for many. So each round samples enough prompts to fill the step in nine out of ten
cases, judging by the fraction of groups that this and recent steps kept. Surplus groups carry over to the next step
with the log-probs of the policy that sampled them. `AsyncCollector` (async_collector.py) samples ahead of the learner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from brorl.activity import Observe, Round, Stopwatch, unobserved
from brorl.algorithms.groups import Group, main_failure
from brorl.arrays import IntArray
from brorl.config.settings import TrainConfig
from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptStream
from brorl.rollout.engine import Engine, Sampler, SampleTask
from brorl.runs.checkpoint import CollectorState
from brorl.seeds import derived_seed
from brorl.training.batch import Batch
from brorl.training.settings import DynamicSamplingSettings
from brorl.tree import RolloutTree
from brorl.verdict import NO_ANSWER, NO_CODE, UNFINISHED, is_failure, is_timeout
from brorl.verification.grade import Grader

if TYPE_CHECKING:
    from brorl.training.learner import Learner


class NoGroupsError(RuntimeError):
    """A step could not get its groups. Any groups that were kept carry over to the next attempt.

    Attributes:
        batch: Everything that the step sampled.
        unverified: True if infrastructure failures left most rollouts unverified, False if no group was kept in as many
            rounds as the config allows.
    """

    def __init__(self, message: str, batch: Batch, unverified: bool = False) -> None:
        super().__init__(message)
        self.batch = batch
        self.unverified = unverified


@dataclass(kw_only=True)
class Collector(ABC):
    """Gives each step its batch of groups."""

    config: TrainConfig  # the recipe
    stream: PromptStream  # the training prompts
    grader: Grader  # verifies and rewards responses
    clock: Stopwatch = field(default_factory=Stopwatch)  # times generation, verification and training, in seconds
    observe: Observe = unobserved  # receives the progress of sampling

    def __post_init__(self) -> None:
        self._sampling = self.config.sampling.params
        self._attempts = 0  # attempts at the next step that ended with a `NoGroupsError`
        # the state before the last `next_batch`; None once new weights are published
        self._state_before_batch: CollectorState | None = None

    @abstractmethod
    def next_batch(self, step: int) -> Batch:
        """Return the groups of a step.

        Raises:
            NoGroupsError: If no group is kept, or if most rollouts cannot be verified.
        """

    @abstractmethod
    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights from now on. Version 3 means the weights after the update of step 3."""

    @property
    @abstractmethod
    def sampler(self) -> Sampler:
        """The sampler for evaluation and diagnostics. It uses the published weights."""

    @abstractmethod
    def state(self) -> CollectorState:
        """Return the state for a checkpoint."""

    @abstractmethod
    def load_state(self, state: CollectorState) -> None:
        """Restore a state.

        Raises:
            ValueError: If the state belongs to different prompts.
        """

    def rewind(self) -> None:
        """Undo the last `next_batch` unless new weights have been published since. Its prompts get sampled again."""
        if self._state_before_batch is not None:
            self.load_state(self._state_before_batch)


_MAX_LOST_ROUNDS = 3


class RetryPolicy:
    """Ends a step after too many consecutive rounds without a group to train on, or with most verdicts lost."""

    def __init__(self, settings: DynamicSamplingSettings) -> None:
        self._settings = settings
        self._failed = self._lost = 0  # consecutive rounds without a group, and with most verdicts lost
        self._last: Sequence[Group] = ()  # the last round

    def restart(self) -> None:
        """Begin a step: reset the count of rounds without a group."""
        self._failed = 0

    def trainable(self, groups: Sequence[Group]) -> list[Group]:
        """Choose the groups to train on, each with only its verified rollouts."""
        enough = [group.verified for group in groups if group.verified]
        return [group for group in enough if self._settings.keeps(group)]

    def add(self, groups: Sequence[Group]) -> None:
        """Count a round. Infrastructure failures do not count against the prompts."""
        self._last = groups
        num_unverified = _num_unverified(groups)
        any_verified = any(group.verified for group in groups)
        lost = 2 * num_unverified > _num_rollouts(groups) or (num_unverified > 0 and not any_verified)
        self._lost = self._lost + 1 if lost else 0
        if self.trainable(groups):
            self._failed = 0
        elif not lost:
            self._failed += 1

    @property
    def is_over(self) -> bool:
        """Whether too many consecutive rounds failed in either of the two ways."""
        return self._lost >= _MAX_LOST_ROUNDS or self._failed >= self._settings.max_tries

    def error(self, batch: Batch) -> NoGroupsError:
        """Return the error that ends the run, which explains the last round. Reset the count that led to it."""
        if self._lost >= _MAX_LOST_ROUNDS:
            self._lost = 0
            return NoGroupsError(_why_unverified(self._last), batch, unverified=True)
        self._failed = 0
        return NoGroupsError(why_none_kept(self._last, self._settings), batch)


def _num_rollouts(groups: Sequence[Group]) -> int:
    return sum(group.tree.num_rollouts for group in groups)


def _num_unverified(groups: Sequence[Group]) -> int:
    return sum(group.num_unverified for group in groups)


def _why_unverified(groups: Sequence[Group]) -> str:
    return (
        f"most rollouts could not be verified because of infrastructure failures in {_MAX_LOST_ROUNDS} rounds in a row "
        f"(in the last one {_num_unverified(groups):,} of {_num_rollouts(groups):,}, most often: "
        f"{main_failure(groups)}); free up memory or lower verification.workers, then resume the run"
    )


def why_none_kept(sampled: Sequence[Group], settings: DynamicSamplingSettings) -> str:
    """Explain why no group in the last round is kept, and suggest a fix. Silent failures come before difficulty."""
    groups = [group.verified for group in sampled if group.verified]
    tries = settings.max_tries
    if easy := sum(group.is_mixed for group in groups):
        return (
            f"no group was kept in {tries} rounds in a row: in the last one, {easy} of {len(groups)} groups were mixed "
            "(correct and incorrect rollouts), with pass rates above dynamic_sampling.max_pass_rate = "
            f"{settings.max_pass_rate:g}; raise it, or choose harder prompts"
        )
    solved = sum(g.num_correct > 0 for g in groups)
    state = "all rollouts were correct" if groups and solved == len(groups) else "no rollout was correct"
    if 0 < solved < len(groups):
        state = f"all rollouts were correct in {solved} of the last {len(groups)} groups, and none in the others"
    cause = _silent_cause(sampled, groups, solved) or _difficulty(solved, len(groups))
    return f"no group was mixed (correct and incorrect rollouts) in {tries} rounds in a row ({state}): {cause}"


def _silent_cause(sampled: Sequence[Group], groups: Sequence[Group], solved: int) -> str | None:
    """Return a cause other than difficulty (such as failed verification of most samples), or None."""
    verdicts = [verdict for group in sampled for verdict in group.verdicts]
    lost = Counter(v.reason for v in verdicts if is_timeout(v.reason) or is_failure(v.reason) or v.unverified)
    if 2 * lost.total() > len(verdicts):
        reason, _ = lost.most_common(1)[0]
        return f"{lost.total()} of {len(verdicts)} verifications failed (most often: {reason}); fix the verifier"
    rollouts, truncated = _num_rollouts(groups), sum(g.tree.num_truncated for g in groups)
    if 2 * truncated > rollouts:
        return f"{truncated:,} of {rollouts:,} rollouts were truncated at sampling.max_new_tokens; raise it"
    if solved:
        return None
    if any(0 < v.score < 1 for v in verdicts):
        return (
            "the verifier gives partial scores, but dynamic sampling only counts correct responses; set "
            "rewards.partial_credit: true and dynamic_sampling.enabled: false"
        )
    unfinished = sum(v.reason == UNFINISHED for v in verdicts)
    if 2 * unfinished > len(verdicts):
        return (
            f"{unfinished:,} of {len(verdicts):,} distinct responses end inside a thought; use a prompt that makes "
            "the model close its thoughts, or set verification.thought_tags to its tags"
        )
    unanswered = sum(v.reason in (NO_ANSWER, NO_CODE) for v in verdicts)
    if 2 * unanswered > len(verdicts):
        return (
            f"the verifier found no answer in {unanswered:,} of {len(verdicts):,} distinct responses; set "
            "prompt.template to a text that requests the verifier's answer format"
        )
    return None


def _difficulty(solved: int, num_groups: int) -> str:
    """Return a remedy. All rollouts are correct in `solved` of the last groups, and none in the others."""
    if solved == num_groups:
        return "there is nothing left to learn from these prompts; choose harder ones"
    remedy = (
        "try more rollouts_per_prompt, a higher sampling.temperature, or different prompts (or a lower "
        "optimizer.learning_rate, if they were solved before)"
    )
    if solved:
        return f"there is nothing left to learn from these prompts with this N; {remedy}"
    return (
        "first check the format and the verifier: compare the extracted answers with the reference answers. If both "
        f"are right, the prompts are too hard for the model: {remedy}"
    )


KEPT_DECAY = 0.8  # the kept fraction weights this step's groups by 1, the last step's by 0.8, those before by 0.64, ...
MAX_STEPS_PER_ROUND = 6  # limit on a round's prompts, in steps, in case the kept fraction is underestimated
_Z_90 = 1.2816  # 90% quantile of the standard normal distribution
_SURPLUS = 1 / 3  # maximum expected surplus, in steps; low enough that few groups wait longer than one step
_ROUND_BITS = 20  # an attempt has fewer than 2^20 rounds


def num_prompts_for_round(
    prompts_per_step: int, missing: ArrayLike, kept: ArrayLike, sampled: ArrayLike
) -> IntArray | np.int64:
    """Return how many prompts to sample to fill a step: exactly `missing` if nothing has been sampled yet.

    n prompts give about nf groups if the fraction f is kept. The result is the smallest n for which a normal variable
    with mean nf and variance nf(1 - f) is at least `missing` - 0.5 (the continuity correction) nine times out of ten.
    Two limits apply. The expected surplus is at most a third of a step. A round has at most the prompts of
    `MAX_STEPS_PER_ROUND` steps, or of one step while no group has been kept, because the run may be about to give up.

    `kept` and `sampled` count groups of this and earlier steps, weighted by `KEPT_DECAY`.
    """
    needed = np.asarray(missing, np.float64)
    fraction = np.add(kept, 1) / np.add(sampled, 1)
    # solve nf - spread sqrt(n) = needed - 1/2, which is quadratic in sqrt(n)
    spread = _Z_90 * np.sqrt(fraction * (1 - fraction))
    likely = ((spread + np.sqrt(spread**2 + 4 * fraction * np.maximum(needed - 0.5, 0))) / (2 * fraction)) ** 2
    num_prompts = np.minimum(likely, (needed + prompts_per_step * _SURPLUS) / fraction)
    most = prompts_per_step * np.where(np.less(kept, 1) & np.greater(sampled, 0), 1, MAX_STEPS_PER_ROUND)
    size: IntArray | np.int64 = np.minimum(most, np.ceil(num_prompts - 1e-9)).astype(np.int64)  # the root is rounded
    return size


@dataclass(kw_only=True)
class SyncCollector(Collector):
    """Samples when called, verifies, and keeps mixed groups, as `dynamic_sampling` says."""

    engine: Engine  # samples trees
    # adds old log-probs to groups that carry over to a later step; see `Learner`
    with_old_logprobs: Callable[[Sequence[Group]], list[Group]] = list

    @classmethod
    def for_run(
        cls,
        config: TrainConfig,
        stream: PromptStream,
        grader: Grader,
        engine: Engine,
        learner: Learner,
        clock: Stopwatch,
        observe: Observe,
    ) -> SyncCollector:
        """Make the collector of a run."""
        return cls(
            config=config, stream=stream, grader=grader, clock=clock, observe=observe,
            engine=engine, with_old_logprobs=learner.with_old_logprobs,
        )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self._carried: tuple[Group, ...] = ()
        self._seen = (0.0, 0.0)  # (kept, sampled): groups that earlier steps kept and sampled, weighted by `KEPT_DECAY`
        self._retries = RetryPolicy(self.config.dynamic_sampling)

    @property
    def sampler(self) -> Sampler:
        """The sampler for evaluation and diagnostics. It uses the published weights."""
        return self.engine

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights from now on. See `Collector`."""
        self.engine.load_weights(weights, version)
        self._state_before_batch = None

    def state(self) -> CollectorState:
        """Return the state for a checkpoint."""
        return CollectorState(self.stream.state_dict(), self._carried, self._attempts, seen=self._seen)

    def load_state(self, state: CollectorState) -> None:
        """Restore a state. See `Collector`."""
        if state.stream is not None:
            self.stream.load_state_dict(state.stream)
        self._carried = state.carried
        self._attempts = state.attempts
        self._seen = state.seen

    def next_batch(self, step: int) -> Batch:
        """Sample until the step has its groups, or too many consecutive rounds fail. Carried groups go first."""
        self._state_before_batch = self.state()
        per_step = self.config.prompts_per_step
        batch = Batch(attempt=self._attempts, dynamic_sampling=self.config.dynamic_sampling)
        self._retries.restart()
        groups = list(self._carried)
        round_number = 0
        while len(groups) < per_step:
            round_number += 1
            self.observe(Round(step, round_number, len(groups), per_step, batch.truncation_rate))
            sampled = self._round(step, batch, per_step - len(groups))
            groups += self._retries.trainable(sampled)
            self._retries.add(sampled)
            if self._retries.is_over:
                self._carried = tuple(groups)
                self._attempts += 1
                raise self._retries.error(batch)
        kept_before, sampled_before = self._seen
        self._seen = (KEPT_DECAY * (kept_before + batch.num_kept), KEPT_DECAY * (sampled_before + len(batch.verified)))
        batch.groups, surplus = groups[:per_step], groups[per_step:]
        with self.clock("training"):
            self._carried = tuple(self.with_old_logprobs(surplus))
        self._attempts = 0
        batch.num_carried = len(self._carried)
        return batch

    def _round(self, step: int, batch: Batch, missing: int) -> list[Group]:
        """Sample and verify as many prompts as the step is expected to need."""
        num_prompts = missing
        if self.config.dynamic_sampling.enabled:
            kept_before, sampled_before = self._seen
            kept, sampled = kept_before + batch.num_kept, sampled_before + len(batch.verified)
            num_prompts = int(num_prompts_for_round(self.config.prompts_per_step, missing, kept, sampled))
        prompts = self.stream.take(num_prompts)
        trees = self._sample(prompts, step, batch)
        with self.clock("verification"):
            verified = self.grader.verify(prompts, trees)
        groups = [replace(self.grader.rewarded(g, step), version=self.engine.version) for g in verified]
        batch.sampled += groups
        return groups

    def _sample(self, prompts: Sequence[Prompt], step: int, batch: Batch) -> list[RolloutTree]:
        """Call the engine with a new seed."""
        batch.rounds += 1
        draw = (batch.attempt << _ROUND_BITS) + batch.rounds
        seed = derived_seed(self.config.seed, step, draw)
        token_ids = [prompt.token_ids for prompt in prompts]
        with self.clock("generation"):
            return self.engine.sample(SampleTask(token_ids, self.config.rollouts_per_prompt, self._sampling, seed))
