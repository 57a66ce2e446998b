"""The source protocol: where the groups of a step come from.

The training loop calls `next_groups(step)`. A source may sample when it is called, as `Collector` does, or
return groups that it sampled earlier: each group carries the version of the weights that sampled it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from brorl.algorithms.groups import Group
from brorl.rollout.engine import Sampler
from brorl.verification.grade import verified
from brorl.verification.verifier import CUT_OFF, TRUNCATED, Verdict, is_failure, is_timeout


class Incomplete(NamedTuple):
    """A sampled prompt with rollouts that could not be verified because of the machine.

    Attributes:
        place: Place of the group of its verified rollouts; None if there is no such group.
        whole: All of its rollouts; the reward of unverified responses is NaN.
        verdicts: The verdict of each distinct response of `whole`.
    """

    place: int | None
    whole: Group
    verdicts: list[Verdict]


class Lead(NamedTuple):
    """How far sampling runs ahead of the learner, at one step of asynchronous training.

    Attributes:
        staleness: Of each trained group, the updates between the weights that sampled its first token and those that
            it trains.
        num_late: Trained groups whose staleness is above the bound.
        num_ready: Finished groups that wait for a later step.
        num_under_way: Prompts that are being sampled.
        late_at: Prompts that became too stale for the bound since the last step, by the tokens of their longest
            response so far: 0, 1, 2 to 3, 4 to 7, ...; the key is the first number. It is 0 where no task of the
            prompt was done.
        most_late: Largest number of times in a row that a prompt became too stale.
    """

    staleness: tuple[int, ...]
    num_late: int
    num_ready: int
    num_under_way: int
    late_at: dict[int, int]
    most_late: int


@dataclass
class Collected:
    """Everything that was sampled for one step.

    Attributes:
        groups: Every sampled group, kept or not, without unverified rollouts.
        verdicts: For each of them the verdict of each distinct response.
        incomplete: The sampled prompts with unverified rollouts.
        rounds: Number of calls of the engine.
        attempt: How often the step had found no mixed group before.
        pilot_rollouts: First rollouts of every prompt under adaptive allocation; None where N is fixed.
        pilots: Number of verified ones among them and of correct ones among these, for each group.
        keeps_all: Whether groups that are not mixed are trained on too; dynamic sampling drops them.
        worker_seconds: Seconds that the workers of an asynchronous source spent on the prompts.
        lead: How far sampling was ahead; None in synchronous training.
        trained: The groups of the step. If nothing was sampled for it, their outcomes are those of the step.
    """

    groups: list[Group] = field(default_factory=list)
    verdicts: list[list[Verdict]] = field(default_factory=list)
    incomplete: list[Incomplete] = field(default_factory=list)
    rounds: int = 0
    attempt: int = 0
    pilot_rollouts: int | None = None
    pilots: list[tuple[int, int]] = field(default_factory=list)
    keeps_all: bool = False
    worker_seconds: float = 0.0
    lead: Lead | None = None
    trained: Sequence[Group] = ()

    @property
    def num_mixed(self) -> int:
        """Number of mixed groups."""
        return sum(g.is_mixed for g in self.groups)

    @property
    def complete(self) -> list[Group]:
        """The groups all of whose rollouts were verified."""
        smaller = {place for place, _, _ in self.incomplete}
        return [g for place, g in enumerate(self.groups) if place not in smaller]

    def add(self, group: Group | None, whole: Group, verdicts: list[Verdict]) -> None:
        """Add a sampled prompt.

        Args:
            group: Its verified rollouts; None if there are too few.
            whole: All of its rollouts.
            verdicts: The verdict of each distinct response of `whole`.
        """
        kept = verified(verdicts)
        if len(kept) < len(verdicts):
            self.incomplete.append(Incomplete(None if group is None else len(self.groups), whole, verdicts))
        if group is not None:
            self.groups.append(group)
            self.verdicts.append(kept)

    def with_unverified(self) -> tuple[list[Group], list[list[Verdict]]]:
        """Return all sampled prompts with all of their rollouts and verdicts; those without a group come last."""
        groups, verdicts = list(self.groups), list(self.verdicts)
        for place, whole, found in self.incomplete:
            if place is None:
                groups.append(whole)
                verdicts.append(found)
            else:
                groups[place], verdicts[place] = whole, found
        return groups, verdicts

    def summary(self) -> dict[str, Any]:
        """Return the sums over the sampled groups, for the metrics.

        Costs and lengths are those of all rollouts. Outcomes are those of the verified ones; if there are none, because
        groups that had waited filled the step, those of the step's groups.
        """
        whole, verdicts = self.with_unverified()
        trees = [g.tree for g in whole]
        rollouts = sum(t.num_rollouts for t in trees)
        of_outcomes = self.groups or self.trained
        scored = max(sum(g.tree.num_rollouts for g in of_outcomes), 1)
        reasons = [v.reason for vs in verdicts for v in vs]
        return {
            "rounds": self.rounds,
            "groups": len(self.groups),
            "groups_mixed": self.num_mixed,
            "groups_all_correct": sum(g.num_correct == g.tree.num_rollouts for g in self.groups),
            "samples": rollouts,
            "sampled_tokens": sum(t.num_sampled_tokens for t in trees),
            "unique_tokens": sum(t.num_unique_tokens for t in trees),
            "distinct_responses": sum(t.num_responses for t in trees),
            "mean_length": sum(int((t.leaf_count * t.length).sum()) for t in trees) / max(rollouts, 1),
            "reward": sum(float((g.tree.leaf_count * g.reward_L).sum()) for g in of_outcomes) / scored,
            "accuracy": sum(g.num_correct for g in of_outcomes) / scored,
            "truncation_rate": sum(int(t.leaf_count[~t.finished].sum()) for t in trees) / max(rollouts, 1),
            "responses_truncated": reasons.count(TRUNCATED),
            "verifier_timeouts": sum(map(is_timeout, reasons)),
            "verifier_cut_offs": reasons.count(CUT_OFF),
            "verifier_failures": sum(is_failure(reason) for reason in reasons),
            **self._unverified(),
            **self._dropped(),
            **self._by_source(),
            **self._allocation(),
            **self._ahead(),
        }

    def _unverified(self) -> dict[str, Any]:
        """Return the rollouts without a verdict and their reasons; nothing if all rollouts were verified."""
        if not self.incomplete:
            return {}
        counts: Counter[str] = Counter()
        for _, whole, verdicts in self.incomplete:
            for verdict, count in zip(verdicts, whole.tree.leaf_count.tolist(), strict=True):
                if verdict.unverified:
                    counts[verdict.reason] += count
        return {
            "samples_unverified": counts.total(),
            "groups_unverified": sum(place is None for place, _, _ in self.incomplete),
            "unverified_reasons": dict(counts.most_common()),
        }

    def _dropped(self) -> dict[str, int]:
        """Return the rollouts and tokens that dynamic sampling dropped; surplus groups wait and do not count."""
        trees = [g.tree for g in self.groups if not (self.keeps_all or g.is_mixed)]
        return {
            "samples_dropped": sum(t.num_rollouts for t in trees),
            "sampled_tokens_dropped": sum(t.num_sampled_tokens for t in trees),
            "unique_tokens_dropped": sum(t.num_unique_tokens for t in trees),
        }

    def _by_source(self) -> dict[str, Any]:
        """Return the outcomes by source of the prompts; nothing where there is one source."""
        sources = sorted({g.prompt.source for g in self.groups})
        if len(sources) < 2:
            return {}
        return {"by_source": {name: _outcomes([g for g in self.groups if g.prompt.source == name]) for name in sources}}

    def _allocation(self) -> dict[str, float]:
        """Return how adaptive allocation spread the rollouts over prompts; nothing where N is fixed."""
        if self.pilot_rollouts is None:
            return {}
        whole, _ = self.with_unverified()
        rollouts_G = [g.tree.num_rollouts for g in whole]
        extended = [g for g, n in zip(self.groups, rollouts_G, strict=False) if n > self.pilot_rollouts]
        pilots = self.pilot_rollouts * len(whole)
        return {
            "adaptive": True,
            "pilot_rollouts": self.pilot_rollouts,
            "groups_pilot_mixed": sum(0 < k < n for n, k in self.pilots),
            "groups_widened": len(extended),
            "groups_widened_mixed": sum(g.is_mixed for g in extended),
            "samples_pilot": pilots,
            "samples_widening": sum(rollouts_G) - pilots,
            "mean_rollouts": sum(rollouts_G) / max(len(rollouts_G), 1),
            "max_rollouts": max(rollouts_G, default=0),
        }

    def _ahead(self) -> dict[str, Any]:
        """Return how far asynchronous sampling was ahead; nothing in synchronous training."""
        if self.lead is None:
            return {}
        staleness = self.lead.staleness
        return {
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": max(staleness),
            "groups_late": self.lead.num_late,
            "groups_ready": self.lead.num_ready,
            "prompts_under_way": self.lead.num_under_way,
            "prompts_late": sum(self.lead.late_at.values()),
            "prompts_late_at": dict(sorted(self.lead.late_at.items())),
            "most_late": self.lead.most_late,
            "worker_seconds": self.worker_seconds,
        }


@dataclass(frozen=True)
class Batch:
    """The groups of one step.

    Attributes:
        groups: The groups that the step trains on.
        sampled: Everything that was sampled for the step, dropped and surplus groups included.
        num_waiting: Surplus groups that wait for a later step.
    """

    groups: list[Group]
    sampled: Collected
    num_waiting: int


class SourceState(NamedTuple):
    """The state from which a source continues exactly.

    Attributes:
        stream: Position of the prompt stream; None at the start of a run.
        waiting: Groups that were sampled but not trained on.
        attempts: How often the next step has found no mixed group.
        ahead: State of an asynchronous source, plain values; None for others.
    """

    stream: dict[str, Any] | None = None
    waiting: tuple[Group, ...] = ()
    attempts: int = 0
    ahead: dict[str, Any] | None = None


class NoGroupsError(RuntimeError):
    """A step cannot get its groups.

    Mixed groups that were found before wait in the source for the next attempt.

    Attributes:
        collected: Everything that was sampled for the step.
    """

    def __init__(self, message: str, collected: Collected) -> None:
        super().__init__(message)
        self.collected = collected


class NoMixedGroupsError(NoGroupsError):
    """No group was mixed for as many rounds as the config allows."""


class UnverifiedError(NoGroupsError):
    """Most rollouts could not be verified because of the machine, in several rounds in a row."""


class GroupSource(Protocol):
    """Gives each step its groups."""

    def next_groups(self, step: int) -> Batch:
        """Return the groups of a step.

        Raises:
            NoMixedGroupsError: If the source finds no mixed group.
            UnverifiedError: If most rollouts cannot be verified.
        """
        ...

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights from now on.

        Args:
            weights: The weights by name.
            version: Number of the step whose update made them.
        """
        ...

    @property
    def sampler(self) -> Sampler:
        """Samples other prompts with the published weights, for evaluation and diagnostics."""
        ...

    @property
    def num_prompts(self) -> int:
        """Number of training prompts."""
        ...

    def rewind(self) -> None:
        """Undo the last `next_groups` if its weights have not been replaced since; its groups are sampled again."""
        ...

    def state(self) -> SourceState:
        """Return the state for a checkpoint."""
        ...

    def load_state(self, state: SourceState) -> None:
        """Restore a state.

        Raises:
            ValueError: If the prompts are others than those of the state.
        """
        ...


def _outcomes(groups: Sequence[Group]) -> dict[str, float]:
    samples = sum(g.tree.num_rollouts for g in groups)
    return {
        "groups": len(groups),
        "groups_mixed": sum(g.is_mixed for g in groups),
        "accuracy": sum(g.num_correct for g in groups) / samples,
    }
