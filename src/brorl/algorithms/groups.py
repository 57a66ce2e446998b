"""A group: one prompt's rollout tree with its verdicts and rewards, the unit that all algorithms work on."""

from __future__ import annotations

from dataclasses import dataclass

from brorl.prompts.prompt import Prompt
from brorl.tree import BoolArray, FloatArray, RolloutTree


@dataclass(frozen=True, eq=False)
class Group:
    """N rollouts of one prompt with their verdicts and rewards (L distinct responses)."""

    prompt: Prompt  # the prompt
    tree: RolloutTree  # its rollouts
    correct_L: BoolArray  # raw verdict of each distinct response, before any shaping of rewards, shape [L]
    reward_L: FloatArray  # reward of each distinct response, shape [L]
    # Log-probs (nats) of the tree's nodes under the learner with the weights that sampled them, shape [M]. None while
    # the learner still holds these weights, where old log-probs are the engine's, and in asynchronous training, where
    # the old policy is that before the step.
    old_logprob_M: FloatArray | None = None
    # version of the weights that sampled the first tokens of the tree, and all tokens unless they were sampled in
    # segments: the number of the step whose update made them
    version: int = 0

    def __post_init__(self) -> None:
        expected = (self.tree.num_responses,)
        if self.correct_L.shape != expected or self.reward_L.shape != expected:
            raise ValueError(
                f"correct_L and reward_L need one entry for each of {expected[0]} distinct responses, "
                f"got shapes {self.correct_L.shape} and {self.reward_L.shape}"
            )
        if self.old_logprob_M is not None and self.old_logprob_M.shape != self.tree.token.shape:
            raise ValueError(
                f"old_logprob_M needs one entry for each of {self.tree.token.size} nodes, got shape "
                f"{self.old_logprob_M.shape}"
            )

    @property
    def num_correct(self) -> int:
        """Number of correct rollouts, duplicates counted."""
        return int(self.tree.leaf_count[self.correct_L].sum())

    @property
    def is_mixed(self) -> bool:
        """Whether some rollouts are correct and some are not: 0 < number correct < N.

        Dynamic sampling trains on mixed groups only. The raw verdict decides, before any shaping of rewards.

        Source: BroRL (arXiv 2510.01180), after DAPO (arXiv 2503.14476, Eq. 11).
        """
        return 0 < self.num_correct < self.tree.num_rollouts
