"""The source of a run: it gives each step its batch of groups.

A source may sample when it is called, as `Collector` does, or return groups that it sampled earlier, as `AsyncSource`
does: each group carries the version of the weights that sampled it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from brorl.activity import Observe, Stopwatch, unobserved
from brorl.algorithms.groups import Group
from brorl.config.settings import TrainConfig
from brorl.prompts.stream import PromptStream
from brorl.rollout.engine import Sampler
from brorl.runs.checkpoint import SourceState
from brorl.training.settings import DynamicSamplingSettings
from brorl.tree import fraction_cut
from brorl.verdict import CUT_OFF, NO_ANSWER, NO_CODE, TRUNCATED, UNFINISHED, is_failure, is_timeout
from brorl.verification.grade import Grader


class Staleness(NamedTuple):
    """How far sampling runs ahead of the learner, at one step of asynchronous training."""

    # of each trained group, the updates between the weights that sampled it and those that it trains
    updates: tuple[int, ...]
    num_late: int  # trained groups whose staleness is above the bound
    num_ready: int  # finished groups that are carried to a later step
    num_under_way: int  # prompts that are being sampled
    num_became_late: int  # prompts that became too stale for the bound since the last step


@dataclass
class Batch:
    """The groups of a step, and everything that was sampled for them."""

    groups: list[Group] = field(default_factory=list)  # the groups that the step trains on
    # the group of every sampled prompt, trained on, carried, or dropped, with its unverified rollouts
    sampled: list[Group] = field(default_factory=list)
    num_carried: int = 0  # groups that are carried to a later step
    rounds: int = 0  # number of calls of the engine
    attempt: int = 0  # how often the step had found no mixed group before
    keeps_all: bool = False  # whether groups that are not mixed are trained on too; dynamic sampling drops them
    worker_seconds: float = 0.0  # seconds that the workers of an asynchronous source spent on the prompts
    staleness: Staleness | None = None  # how far sampling was ahead; None in synchronous training

    @property
    def verified(self) -> list[Group]:
        """The verified rollouts of each sampled prompt that has enough of them."""
        return [group.verified for group in self.sampled if group.verified]

    @property
    def complete(self) -> list[Group]:
        """The sampled groups all of whose rollouts were verified."""
        return [group for group in self.sampled if group.verified is group]

    @property
    def num_mixed(self) -> int:
        """Number of mixed groups."""
        return sum(g.is_mixed for g in self.verified)

    @property
    def fraction_cut(self) -> float:
        """The sampled rollouts that were cut at the length limit, as a fraction; 0 without a rollout."""
        return fraction_cut([group.tree for group in self.sampled])

    def summary(self) -> dict[str, Any]:
        """Return the sums over the sampled groups, for the metrics.

        Costs and lengths are those of all rollouts. Outcomes are those of the verified ones; if there are none, because
        carried groups filled the step, those of the step's groups.
        """
        trees = [group.tree for group in self.sampled]
        groups = self.verified
        rollouts = sum(t.num_rollouts for t in trees)
        of_outcomes = groups or self.groups
        scored = max(sum(g.tree.num_rollouts for g in of_outcomes), 1)
        reasons = [verdict.reason for group in self.sampled for verdict in group.verdicts]
        return {
            "rounds": self.rounds,
            "groups": len(groups),
            "groups_mixed": self.num_mixed,
            "groups_all_correct": sum(g.num_correct == g.tree.num_rollouts for g in groups),
            "samples": rollouts,
            "sampled_tokens": sum(t.num_sampled_tokens for t in trees),
            "unique_tokens": sum(t.num_unique_tokens for t in trees),
            "distinct_responses": sum(t.num_responses for t in trees),
            "mean_length": sum(int((t.leaf_count * t.length).sum()) for t in trees) / max(rollouts, 1),
            "reward": sum(float((g.tree.leaf_count * g.reward_L).sum()) for g in of_outcomes) / scored,
            "accuracy": sum(g.num_correct for g in of_outcomes) / scored,
            "truncation_rate": self.fraction_cut,
            "responses_truncated": reasons.count(TRUNCATED),
            "verifier_timeouts": sum(map(is_timeout, reasons)),
            "verifier_cut_offs": reasons.count(CUT_OFF),
            "verifier_failures": sum(is_failure(reason) for reason in reasons),
            **self._terms(),
            **self._unverified(),
            **self._dropped(),
            **self._by_data_source(),
            **self._ahead(),
        }

    def _terms(self) -> dict[str, Any]:
        """Return the mean value of each further term of the reward, over the rollouts that have one; none if none."""
        sums: dict[str, list[float]] = {}
        for group in self.sampled:
            for name, value_L in group.terms_L.items():
                count_L = group.tree.leaf_count * ~np.isnan(value_L)
                both = sums.setdefault(name, [0.0, 0.0])
                both[0] += float((count_L * np.nan_to_num(value_L)).sum())
                both[1] += float(count_L.sum())
        means = {name: total / count if count else None for name, (total, count) in sums.items()}
        return {"terms": means} if means else {}

    def _unverified(self) -> dict[str, Any]:
        """Return the rollouts without a verdict and their reasons; nothing if all rollouts were verified."""
        counts: Counter[str] = Counter()
        for group in self.sampled:
            for verdict, count in zip(group.verdicts, group.tree.leaf_count.tolist(), strict=True):
                if verdict.unverified:
                    counts[verdict.reason] += count
        if not counts:
            return {}
        return {
            "samples_unverified": counts.total(),
            "groups_unverified": sum(group.verified is None for group in self.sampled),
            "unverified_reasons": dict(counts.most_common()),
        }

    def _dropped(self) -> dict[str, int]:
        """Return the rollouts and tokens that dynamic sampling dropped; carried groups do not count."""
        trees = [g.tree for g in self.verified if not (self.keeps_all or g.is_mixed)]
        return {
            "samples_dropped": sum(t.num_rollouts for t in trees),
            "sampled_tokens_dropped": sum(t.num_sampled_tokens for t in trees),
            "unique_tokens_dropped": sum(t.num_unique_tokens for t in trees),
        }

    def _by_data_source(self) -> dict[str, Any]:
        """Return the outcomes by source of the prompts; nothing where there is one source."""
        groups = self.verified
        sources = sorted({g.prompt.source for g in groups})
        if len(sources) < 2:
            return {}
        return {"by_source": {name: _outcomes([g for g in groups if g.prompt.source == name]) for name in sources}}

    def _ahead(self) -> dict[str, Any]:
        """Return how far asynchronous sampling was ahead; nothing in synchronous training."""
        if self.staleness is None:
            return {}
        updates = self.staleness.updates
        return {
            "staleness_mean": sum(updates) / len(updates),
            "staleness_max": max(updates),
            "groups_late": self.staleness.num_late,
            "groups_ready": self.staleness.num_ready,
            "prompts_under_way": self.staleness.num_under_way,
            "prompts_late": self.staleness.num_became_late,
            "worker_seconds": self.worker_seconds,
        }


class NoGroupsError(RuntimeError):
    """A step cannot get its groups; `batch` has all that was sampled for it. Its mixed groups are carried on."""

    def __init__(self, message: str, batch: Batch) -> None:
        super().__init__(message)
        self.batch = batch


class NoMixedGroupsError(NoGroupsError):
    """No group was mixed for as many rounds as the config allows."""


class UnverifiedError(NoGroupsError):
    """Most rollouts could not be verified, in several rounds in a row: the infrastructure failed."""


@dataclass(kw_only=True)
class GroupSource(ABC):
    """Gives each step its groups."""

    config: TrainConfig  # the recipe
    stream: PromptStream  # the training prompts
    grader: Grader  # verifies and rewards responses
    clock: Stopwatch = field(default_factory=Stopwatch)  # adds up the seconds of generation, verification and training
    observe: Observe = unobserved  # receives the progress of sampling

    def __post_init__(self) -> None:
        self._sampling = self.config.sampling.params
        self._attempts = 0
        self._before: SourceState | None = None

    @abstractmethod
    def next_batch(self, step: int) -> Batch:
        """Return the groups of a step.

        Raises:
            NoGroupsError: If the source finds no mixed group, or if most rollouts cannot be verified.
        """

    @abstractmethod
    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights from now on; `version` is the step whose update made them."""

    @property
    @abstractmethod
    def sampler(self) -> Sampler:
        """Samples other prompts with the published weights, for evaluation and diagnostics."""

    @abstractmethod
    def state(self) -> SourceState:
        """Return the state for a checkpoint."""

    @abstractmethod
    def load_state(self, state: SourceState) -> None:
        """Restore a state.

        Raises:
            ValueError: If the prompts are others than those of the state.
        """

    def rewind(self) -> None:
        """Undo the last `next_batch` if its weights have not been replaced since; its prompts are sampled again."""
        if self._before is not None:
            self.load_state(self._before)


def _outcomes(groups: Sequence[Group]) -> dict[str, float]:
    samples = sum(g.tree.num_rollouts for g in groups)
    return {
        "groups": len(groups),
        "groups_mixed": sum(g.is_mixed for g in groups),
        "accuracy": sum(g.num_correct for g in groups) / samples,
    }


_MAX_LOST_ROUNDS = 3


class RetryPolicy:
    """Counts the rounds in a row without a group to train on, and those in which most verdicts were lost."""

    def __init__(self, settings: DynamicSamplingSettings) -> None:
        self._max_tries, self._mixed_only = settings.max_tries, settings.enabled
        self._failed = self._lost = 0
        self._last: Sequence[Group] = ()

    def restart(self) -> None:
        """Begin a step: rounds without a group are counted from zero."""
        self._failed = 0

    def kept(self, groups: Sequence[Group]) -> list[Group]:
        """Return the verified rollouts of the groups that are trained on."""
        enough = [group.verified for group in groups if group.verified]
        return [group for group in enough if group.is_mixed or not self._mixed_only]

    def add(self, groups: Sequence[Group]) -> None:
        """Count a round."""
        self._last = groups
        self._failed = 0 if self.kept(groups) else self._failed + 1
        self._lost = self._lost + 1 if 2 * _num_unverified(groups) > _num_rollouts(groups) else 0

    @property
    def is_over(self) -> bool:
        """Whether there were too many such rounds in a row."""
        return self._lost >= _MAX_LOST_ROUNDS or self._failed >= self._max_tries

    def error(self, batch: Batch) -> NoGroupsError:
        """Return the error that ends the run, from the last round, and begin again."""
        if self._lost >= _MAX_LOST_ROUNDS:
            self._lost = 0
            return UnverifiedError(_why_unverified(self._last), batch)
        self._failed = 0
        return NoMixedGroupsError(why_not_mixed(self._last, self._max_tries), batch)


def _num_rollouts(groups: Sequence[Group]) -> int:
    return sum(group.tree.num_rollouts for group in groups)


def _num_unverified(groups: Sequence[Group]) -> int:
    return sum(group.num_unverified for group in groups)


def _why_unverified(groups: Sequence[Group]) -> str:
    reasons = Counter(v.reason for group in groups for v in group.verdicts if v.unverified)
    return (
        f"most rollouts could not be verified because of infrastructure failures in {_MAX_LOST_ROUNDS} rounds in a row "
        f"(in the last one {_num_unverified(groups):,} of {_num_rollouts(groups):,}, most often: "
        f"{reasons.most_common(1)[0][0]}); free memory and processes, or lower verification.workers, and resume the run"
    )


def why_not_mixed(sampled: Sequence[Group], max_tries: int) -> str:
    """Explain why no group of the last round is mixed, and name a fix: silent failures first, difficulty last."""
    groups = [group.verified for group in sampled if group.verified]
    solved = sum(g.num_correct > 0 for g in groups)
    state = "all rollouts were correct" if groups and solved == len(groups) else "no rollout was correct"
    if 0 < solved < len(groups):
        state = f"in {solved} of the last {len(groups)} groups all rollouts were correct, in the others none"
    cause = _silent_cause(sampled, groups, solved) or _difficulty(solved, len(groups))
    return f"no group was mixed (correct and incorrect rollouts) in {max_tries} rounds in a row ({state}): {cause}"


def _silent_cause(sampled: Sequence[Group], groups: Sequence[Group], solved: int) -> str | None:
    """Return a cause outside the model: more than half of what was sampled failed because of it."""
    every = [verdict for group in sampled for verdict in group.verdicts]
    lost = Counter(v.reason for v in every if is_timeout(v.reason) or is_failure(v.reason) or v.unverified)
    if 2 * lost.total() > len(every):
        reason, _ = lost.most_common(1)[0]
        return f"{lost.total()} of {len(every)} verifications failed (most often: {reason}); fix the verifier"
    rollouts, cut = _num_rollouts(groups), sum(g.tree.num_truncated for g in groups)
    if 2 * cut > rollouts:
        return f"{cut:,} of {rollouts:,} rollouts were cut off at sampling.max_new_tokens; raise it"
    if solved:
        return None
    if any(0 < v.score < 1 for v in every):
        return (
            "the verifier gives partial scores, but dynamic sampling counts correct responses only; set "
            "rewards.partial_credit: true and dynamic_sampling.enabled: false"
        )
    unfinished = sum(v.reason == UNFINISHED for v in every)
    if 2 * unfinished > len(every):
        return (
            f"{unfinished:,} of {len(every):,} distinct responses end inside a thought; use a prompt after which the "
            "model closes its thoughts, or set verification.thought_tags to its tags"
        )
    unanswered = sum(v.reason in (NO_ANSWER, NO_CODE) for v in every)
    if 2 * unanswered > len(every):
        return (
            f"the verifier found no answer in {unanswered:,} of {len(every):,} distinct responses; set prompt.template "
            "to a text that requests the answer format of the verifier"
        )
    return None


def _difficulty(solved: int, num_groups: int) -> str:
    if solved == num_groups:
        return "there is nothing left to learn from these prompts; choose harder ones"
    help_ = (
        "try more rollouts_per_prompt, a higher sampling.temperature, or other prompts (or a lower "
        "optimizer.learning_rate, if they were solved before)"
    )
    if solved:
        return f"there is nothing left to learn from these prompts with this N; {help_}"
    return (
        "check the format and the verifier first: compare the extracted answers with the reference answers. If both "
        f"are right, the prompts are too hard for the model: {help_}"
    )
