"""Grading: trees in, one verdict per distinct response out.

A text is verified once per prompt, however many rollouts, token sequences and trees contain it. Each domain's verifier
is called once, with all texts of its prompts, and once more with those that it could not verify because of an
infrastructure failure. A `Grader` makes groups of them, with rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

import numpy as np
import regex

from brorl.algorithms.groups import Group
from brorl.algorithms.rewards import shaped_rewards
from brorl.algorithms.settings import RewardShaping
from brorl.prompts.prompt import Prompt
from brorl.tree import RolloutTree
from brorl.verdict import TRUNCATED, Verdict, verdict_of
from brorl.verification.verifier import Verifier, verify_distinct

_FORMAT_TIMEOUT_S = 0.5  # a pattern can take exponential time on some texts


@dataclass(frozen=True)
class Grader:
    """Verifies each distinct response once, for one thread at a time, and turns verdicts into rewards."""

    verifiers: Mapping[str, Verifier]  # verifier of each domain
    decode: Callable[[Sequence[int]], str]  # token ids of a response to its text
    shaping: RewardShaping  # from verdicts to rewards
    max_new_tokens: int | None = None  # length limit of a response, for rewards that depend on the length
    lock: Lock = field(default_factory=Lock, repr=False, compare=False)  # verifiers share caches and worker processes

    def verify(self, prompts: Sequence[Prompt], trees: Sequence[RolloutTree]) -> list[Group]:
        """Verify all rollouts of P prompts; truncated ones only if they can earn a reward. Rewards are 1 and 0."""
        accept_truncated = self.shaping.stop_properly > 0
        with self.lock:
            verdicts = grade(prompts, trees, self.verifiers, self.decode, accept_truncated=accept_truncated)
        return list(map(Group.of_verdicts, prompts, trees, verdicts))

    def rewarded(self, group: Group, step: int) -> Group:
        """Return a verified group with the rewards of a step, from 1 on; unverified responses have the reward NaN."""
        tree, pattern, names = group.tree, self.shaping.format_pattern, self.shaping.terms
        values = [verdict.terms or (None,) * len(names) for verdict in group.verdicts]
        value_LK = np.array(values, np.float64).reshape(len(values), len(names))
        terms_L = dict(zip(names, value_LK.T, strict=True))
        reward_L = shaped_rewards(
            correct_L=group.correct_L,
            score_L=np.array([v.score for v in group.verdicts]),
            length_L=tree.length,
            truncated_L=~tree.finished,
            domain=group.prompt.domain,
            step=step,
            shaping=self.shaping,
            formatted_L=None if pattern is None else np.array([has_format(text, pattern) for text in self.texts(tree)]),
            max_new_tokens=self.max_new_tokens,
            terms_L=terms_L,
        )
        return replace(group, reward_L=np.where(np.isnan(group.reward_L), np.nan, reward_L), terms_L=terms_L)

    def texts(self, tree: RolloutTree) -> list[str]:
        """Return the text of each distinct response."""
        return [self.decode(tokens) for tokens, _ in tree.responses()]


def has_format(text: str, pattern: str) -> bool:
    """Return whether a pattern of the package `regex` matches the whole stripped text within half a second."""
    try:
        return regex.fullmatch(pattern, text.strip(), regex.DOTALL, timeout=_FORMAT_TIMEOUT_S) is not None
    except TimeoutError:
        return False


def grade(
    prompts: Sequence[Prompt],
    trees: Sequence[RolloutTree],
    verifiers: Mapping[str, Verifier],
    decode: Callable[[tuple[int, ...]], str],
    accept_truncated: bool = False,
) -> list[list[Verdict]]:
    """Verify every distinct response of P trees; return the L verdicts of each, aligned with its leaves.

    A response that could not be verified is verified again after all others; if that fails too, its verdict is
    `unverified`. Unfinished responses are incorrect with the reason `truncated`, unless they are accepted. `decode`
    turns token ids, the end token included, into text without special tokens. A ValueError says that trees and prompts
    do not match.
    """
    if any(tuple(tree.prompt_ids) != prompt.token_ids for prompt, tree in zip(prompts, trees, strict=True)):
        raise ValueError("a tree does not have the tokens of its prompt; pass both in the same order")
    number_of: dict[Prompt, int] = {}  # a prompt's many tokens are hashed once, not once per response
    number_P = [number_of.setdefault(prompt, len(number_of)) for prompt in prompts]
    texts_PL = [
        [
            decode(response) if finished or accept_truncated else None
            for (response, _), finished in zip(tree.responses(), tree.finished.tolist(), strict=True)
        ]
        for tree in trees
    ]
    items = {
        (number, text): (prompt, text)
        for prompt, number, text_L in zip(prompts, number_P, texts_PL, strict=True)
        for text in text_L
        if text is not None
    }
    found = verify_distinct(items, verifiers)
    return [
        [verdict_of(TRUNCATED) if text is None else found[number, text] for text in text_L]
        for number, text_L in zip(number_P, texts_PL, strict=True)
    ]
