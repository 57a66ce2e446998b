"""A group: one prompt's rollout tree with verdicts, rewards, log-probs and advantages, from verifier to gradient.

A response is unverified if an infrastructure failure kept the verifier from reaching a verdict. It is neither correct
nor incorrect, has no reward, and is not trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from brorl.arrays import BoolArray, FloatArray, IntArray
from brorl.prompts.prompt import Prompt
from brorl.tree import RolloutTree
from brorl.verdict import Verdict


@dataclass(frozen=True, eq=False)
class Group:
    """N rollouts of one prompt (L distinct responses, M nodes). Later stages add the arrays that are None at first."""

    prompt: Prompt
    tree: RolloutTree  # the N rollouts
    correct_L: BoolArray  # raw verdicts, before reward shaping, shape [L]
    reward_L: FloatArray  # reward of each distinct response, shape [L]; NaN if unverified
    # log-probs (nats) of the nodes, computed by the learner with the weights that sampled them, shape [M]. None if the
    # learner still has those weights, if the engine's log-probs serve as the old ones, or in asynchronous training,
    # where the policy before the step is the old policy.
    old_logprob_M: FloatArray | None = None
    version: int = 0  # version of the weights that sampled the tree; 3 means after step 3's update
    # one verdict per distinct response (L entries); empty after a checkpoint is loaded: checkpoints omit verdicts,
    # which were already reported in the step that sampled the group
    verdicts: Sequence[Verdict] = ()
    # additional reward terms: name -> values, shape [L]; NaN if a response has none
    terms_L: Mapping[str, FloatArray] = field(default_factory=dict)
    reference_logprob_M: FloatArray | None = None  # log-probs (nats) of the nodes under the reference, shape [M]
    advantage_L: FloatArray | None = None  # advantage of each distinct response, shape [L]
    # 1 / probability that the response was chosen for back-propagation, shape [L]; None if all responses are used
    factor_L: FloatArray | None = None
    texts: Sequence[str] = ()  # decoded text of each distinct response (L entries); only for stored rollouts

    def __post_init__(self) -> None:
        expected = (self.tree.num_responses,)
        if self.correct_L.shape != expected or self.reward_L.shape != expected:
            raise ValueError(
                f"correct_L and reward_L need one entry for each of {expected[0]} distinct responses, "
                f"got shapes {self.correct_L.shape} and {self.reward_L.shape}"
            )
        for name in ("old_logprob_M", "reference_logprob_M"):
            value_M = getattr(self, name)
            if value_M is not None and value_M.shape != self.tree.token.shape:
                raise ValueError(
                    f"{name} needs one entry for each of {self.tree.token.size} nodes, got shape {value_M.shape}"
                )

    @classmethod
    def from_verdicts(cls, prompt: Prompt, tree: RolloutTree, verdicts: Sequence[Verdict]) -> Group:
        """Build a prompt's group from its verdicts. Rewards are 1 if correct, 0 if incorrect, NaN if unverified."""
        correct_L = np.array([verdict.correct for verdict in verdicts], np.bool_)
        group = cls(prompt, tree, correct_L, correct_L.astype(np.float64), verdicts=verdicts)
        return group.with_rewards(group.reward_L)

    def with_rewards(self, reward_L: FloatArray) -> Group:
        """Return the group with these rewards, shape [L], and NaN for unverified responses."""
        return replace(self, reward_L=np.where(self.unverified_L, np.nan, reward_L))

    @cached_property
    def unverified_L(self) -> BoolArray:
        """Whether each distinct response is unverified, shape [L]; all False for a group without verdicts."""
        if not self.verdicts:
            return np.zeros(self.tree.num_responses, np.bool_)
        return np.array([verdict.unverified for verdict in self.verdicts], np.bool_)

    @property
    def num_correct(self) -> int:
        """Number of correct rollouts, duplicates counted."""
        return int(self.tree.leaf_count[self.correct_L].sum())

    @property
    def num_unverified(self) -> int:
        """Number of unverified rollouts."""
        return int(self.tree.leaf_count[self.unverified_L].sum())

    @property
    def num_verified(self) -> int:
        """Number of verified rollouts."""
        return self.tree.num_rollouts - self.num_unverified

    @property
    def is_mixed(self) -> bool:
        """Whether some verified rollouts are correct and others are not: 0 < number correct < number verified.

        Dynamic sampling trains on mixed groups only. Raw verdicts decide this, not shaped rewards.

        Source: BroRL (arXiv 2510.01180), after DAPO (arXiv 2503.14476, Eq. 11).
        """
        return 0 < self.num_correct < self.num_verified

    @cached_property
    def verified(self) -> Group | None:
        """The group reduced to its verified rollouts; N shrinks if some are unverified.

        None if no rollout was verified, or only one of several was, which leaves nothing to compare it with.
        """
        if not self.unverified_L.any():
            return self
        return self.select(np.flatnonzero(~self.unverified_L)) if self.num_verified > 1 else None

    def select(self, leaf_K: IntArray) -> Group:
        """Keep only K distinct responses, in ascending order, K >= 1."""
        tree, node_K = self.tree.select(leaf_K)
        leaf_fields = ("correct_L", "reward_L", "advantage_L", "factor_L")
        kept: dict[str, Any] = {name: _entries(getattr(self, name), leaf_K) for name in leaf_fields}
        kept |= {name: _entries(getattr(self, name), node_K) for name in ("old_logprob_M", "reference_logprob_M")}
        return replace(
            self,
            tree=tree,
            verdicts=[self.verdicts[i] for i in leaf_K] if self.verdicts else (),
            texts=[self.texts[i] for i in leaf_K] if self.texts else (),
            terms_L={name: value_L[leaf_K] for name, value_L in self.terms_L.items()},
            **kept,
        )


def main_failure(groups: Sequence[Group]) -> str:
    """Return the most common reason why these groups' responses are unverified; at least one must be."""
    reasons = Counter(verdict.reason for group in groups for verdict in group.verdicts if verdict.unverified)
    return reasons.most_common(1)[0][0]


def required(array: FloatArray | None) -> FloatArray:
    """Return `array`, which an earlier stage must have added to the group."""
    assert array is not None
    return array


def _entries(values: FloatArray | BoolArray | None, index_K: IntArray) -> FloatArray | BoolArray | None:
    return None if values is None else values[index_K]
