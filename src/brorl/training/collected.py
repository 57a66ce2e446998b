"""The groups that were sampled for a step, with their verdicts and the sums for the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from brorl.algorithms.groups import Group
from brorl.verify.verifier import TIMEOUT, TRUNCATED, Verdict, is_failure


@dataclass
class Collected:
    """Everything that was sampled for one step.

    Attributes:
        groups: Every sampled group, kept or not.
        verdicts: For each of them the verdict of each distinct response.
        rounds: Number of calls of the engine.
        attempt: How often the step had found no mixed group before.
        pilot_rollouts: First rollouts of every prompt under adaptive allocation; None where N is fixed.
        pilot_correct: Number of correct ones among them, for each group.
        keeps_all: Whether groups that are not mixed are trained on too; dynamic sampling drops them.
    """

    groups: list[Group] = field(default_factory=list)
    verdicts: list[list[Verdict]] = field(default_factory=list)
    rounds: int = 0
    attempt: int = 0
    pilot_rollouts: int | None = None
    pilot_correct: list[int] = field(default_factory=list)
    keeps_all: bool = False

    @property
    def num_mixed(self) -> int:
        """Number of mixed groups."""
        return sum(g.is_mixed for g in self.groups)

    def summary(self) -> dict[str, Any]:
        """Return the sums over the sampled groups, for the metrics."""
        trees = [g.tree for g in self.groups]
        rollouts = sum(t.num_rollouts for t in trees)
        reasons = [v.reason for vs in self.verdicts for v in vs]
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
            "reward": sum(float((g.tree.leaf_count * g.reward_L).sum()) for g in self.groups) / max(rollouts, 1),
            "share_correct": sum(g.num_correct for g in self.groups) / max(rollouts, 1),
            "share_truncated": sum(int(t.leaf_count[~t.finished].sum()) for t in trees) / max(rollouts, 1),
            "responses_truncated": reasons.count(TRUNCATED),
            "verifier_timeouts": reasons.count(TIMEOUT),
            "verifier_failures": sum(is_failure(reason) for reason in reasons),
            **self._dropped(),
            **self._by_source(),
            **self._allocation(),
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
        rollouts_G = [g.tree.num_rollouts for g in self.groups]
        extended = [g for g in self.groups if g.tree.num_rollouts > self.pilot_rollouts]
        pilots = self.pilot_rollouts * len(self.groups)
        return {
            "adaptive": True,
            "pilot_rollouts": self.pilot_rollouts,
            "groups_pilot_mixed": sum(0 < k < self.pilot_rollouts for k in self.pilot_correct),
            "groups_widened": len(extended),
            "groups_widened_mixed": sum(g.is_mixed for g in extended),
            "samples_pilot": pilots,
            "samples_widening": sum(rollouts_G) - pilots,
            "mean_rollouts": sum(rollouts_G) / max(len(rollouts_G), 1),
            "max_rollouts": max(rollouts_G, default=0),
        }


def _outcomes(groups: Sequence[Group]) -> dict[str, float]:
    samples = sum(g.tree.num_rollouts for g in groups)
    return {
        "groups": len(groups),
        "groups_mixed": sum(g.is_mixed for g in groups),
        "share_correct": sum(g.num_correct for g in groups) / samples,
    }
