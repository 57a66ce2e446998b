"""The judge: rollout trees in, groups with verdicts and rewards out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from brorl.algorithms.groups import Group
from brorl.algorithms.rewards import RewardShaping, shaped_rewards
from brorl.prompts.prompt import Prompt
from brorl.tree import RolloutTree
from brorl.verify.grade import grade
from brorl.verify.response_format import ResponseFormat
from brorl.verify.verifier import Verdict, Verifier


@dataclass(frozen=True)
class Judge:
    """Verifies each distinct response once, and turns verdicts into rewards.

    Attributes:
        verifiers: Verifier of each domain.
        decode: Token ids of a response to its text.
        shaping: From verdicts to rewards.
        response_format: The format that `shaping.format_reward` is for; None where there is no such reward.
    """

    verifiers: Mapping[str, Verifier]
    decode: Callable[[Sequence[int]], str]
    shaping: RewardShaping
    response_format: ResponseFormat | None = None

    def verdicts(self, prompts: Sequence[Prompt], trees: Sequence[RolloutTree]) -> list[list[Verdict]]:
        """Return the verdict of each distinct response; truncated ones are verified only if they can earn something."""
        accept_truncated = self.shaping.stop_properly > 0
        return grade(prompts, trees, self.verifiers, self.decode, accept_truncated=accept_truncated)

    def texts(self, tree: RolloutTree) -> list[str]:
        """Return the text of each distinct response."""
        return [self.decode(tokens) for tokens, _ in tree.responses()]

    def group(self, prompt: Prompt, tree: RolloutTree, verdicts: Sequence[Verdict], step: int) -> Group:
        """Return rollouts with what they earn at a step."""
        correct_L = np.array([v.correct for v in verdicts])
        wanted = self.response_format
        formatted_L = None if wanted is None else np.array([wanted.matches(text) for text in self.texts(tree)])
        reward_L = shaped_rewards(
            correct_L=correct_L,
            score_L=np.array([v.score for v in verdicts]),
            length_L=tree.length,
            truncated_L=~tree.finished,
            domain=prompt.domain,
            step=step,
            shaping=self.shaping,
            formatted_L=formatted_L,
        )
        return Group(prompt, tree, correct_L, reward_L)

    def groups(self, prompts: Sequence[Prompt], trees: Sequence[RolloutTree], step: int) -> list[Group]:
        """Verify and reward."""
        judged = zip(prompts, trees, self.verdicts(prompts, trees), strict=True)
        return [self.group(prompt, tree, verdicts, step) for prompt, tree, verdicts in judged]
