"""A step's batch: the groups that it trains on, everything it sampled to get them, and sums for the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from brorl.algorithms.groups import Group
from brorl.runs.step_record import SamplingRecord, SourceRecord
from brorl.training.settings import DynamicSamplingSettings
from brorl.tree import truncation_rate
from brorl.verdict import BATCH_TIMEOUT, TRUNCATED, is_failure, is_timeout


@dataclass
class Batch:
    """The groups of a step, and everything it sampled to get them."""

    groups: list[Group] = field(default_factory=list)  # the groups that the step trains on
    # the groups of all sampled prompts, whether trained on, carried or dropped, including unverified rollouts
    sampled: list[Group] = field(default_factory=list)
    num_carried: int = 0  # groups left for a later step
    rounds: int = 0  # engine calls
    attempt: int = 0  # number of earlier attempts at this step; they found no mixed group
    # decides which groups to train on
    dynamic_sampling: DynamicSamplingSettings = field(default_factory=DynamicSamplingSettings)
    worker_seconds: float = 0.0  # total sampling time of all asynchronous workers
    ahead: Mapping[str, float] = field(default_factory=dict)  # metrics of asynchronous training; see `Backlog.take`

    @property
    def verified(self) -> list[Group]:
        """The verified rollouts of each sampled prompt that has enough of them."""
        return [group.verified for group in self.sampled if group.verified]

    @property
    def complete(self) -> list[Group]:
        """The sampled groups without unverified rollouts."""
        return [group for group in self.sampled if not group.num_unverified]

    @property
    def num_kept(self) -> int:
        """Number of sampled groups to train on, in this step or a later one."""
        return sum(map(self.dynamic_sampling.keeps, self.verified))

    @property
    def truncation_rate(self) -> float:
        """Fraction of the sampled rollouts truncated at the length limit; 0 without rollouts."""
        return truncation_rate([group.tree for group in self.sampled])

    def summary(self) -> SamplingRecord:
        """Return sums over the sampled groups, for the metrics.

        Costs and lengths cover all rollouts. Outcomes cover verified rollouts, or the step's groups if carried groups
        filled the step and nothing was sampled.
        """
        trees = [group.tree for group in self.sampled]
        groups = self.verified
        rollouts = sum(t.num_rollouts for t in trees)
        scored_groups = groups or self.groups
        scored = max(sum(g.tree.num_rollouts for g in scored_groups), 1)
        reasons = [verdict.reason for group in self.sampled for verdict in group.verdicts]
        return SamplingRecord(
            rounds=self.rounds,
            groups=len(groups),
            groups_mixed=sum(g.is_mixed for g in groups),
            groups_all_correct=sum(g.num_correct == g.tree.num_rollouts for g in groups),
            samples=rollouts,
            sampled_tokens=sum(t.num_sampled_tokens for t in trees),
            unique_tokens=sum(t.num_unique_tokens for t in trees),
            distinct_responses=sum(t.num_responses for t in trees),
            mean_length=sum(int((t.leaf_count * t.length).sum()) for t in trees) / max(rollouts, 1),
            reward=sum(float((g.tree.leaf_count * g.reward_L).sum()) for g in scored_groups) / scored,
            accuracy=sum(g.num_correct for g in scored_groups) / scored,
            truncation_rate=self.truncation_rate,
            responses_truncated=reasons.count(TRUNCATED),
            verifier_timeouts=sum(map(is_timeout, reasons)),
            verifier_batch_timeouts=reasons.count(BATCH_TIMEOUT),
            verifier_failures=sum(is_failure(reason) for reason in reasons),
            **self._terms(),
            **self._unverified(),
            **self._dropped(),
            **self._by_data_source(),
            **self._ahead(),
        )

    def _terms(self) -> dict[str, Any]:
        """Return the mean of each additional reward term, over the rollouts that have a value."""
        sums: dict[str, list[float]] = {}
        for group in self.sampled:
            for name, value_L in group.terms_L.items():
                count_L = group.tree.leaf_count * ~np.isnan(value_L)
                total_and_count = sums.setdefault(name, [0.0, 0.0])
                total_and_count[0] += float((count_L * np.nan_to_num(value_L)).sum())
                total_and_count[1] += float(count_L.sum())
        means = {name: total / count if count else None for name, (total, count) in sums.items()}
        return {"terms": means} if means else {}

    def _unverified(self) -> dict[str, Any]:
        """Count the rollouts without a verdict, by reason; empty if all rollouts were verified."""
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

    def _dropped(self) -> dict[str, Any]:
        """Count the rollouts and tokens that dynamic sampling dropped. Carried groups are not dropped."""
        trees = [group.tree for group in self.verified if not self.dynamic_sampling.keeps(group)]
        return {
            "samples_dropped": sum(t.num_rollouts for t in trees),
            "sampled_tokens_dropped": sum(t.num_sampled_tokens for t in trees),
            "unique_tokens_dropped": sum(t.num_unique_tokens for t in trees),
        }

    def _by_data_source(self) -> dict[str, Any]:
        """Return the outcomes by prompt source; empty if there is only one."""
        groups = self.verified
        sources = sorted({g.prompt.source for g in groups})
        if len(sources) < 2:
            return {}
        return {"by_source": {name: _outcomes([g for g in groups if g.prompt.source == name]) for name in sources}}

    def _ahead(self) -> dict[str, Any]:
        """Return how far ahead asynchronous sampling was; empty in synchronous training."""
        return {**self.ahead, "worker_seconds": self.worker_seconds} if self.ahead else {}


def _outcomes(groups: Sequence[Group]) -> SourceRecord:
    samples = sum(g.tree.num_rollouts for g in groups)
    return SourceRecord(
        groups=len(groups),
        groups_mixed=sum(g.is_mixed for g in groups),
        accuracy=sum(g.num_correct for g in groups) / samples,
    )
