"""Grading: trees in, one verdict per distinct response out.

The same text is verified once per prompt, however many rollouts, token sequences and trees spell it, and each
domain's verifier is called once, with all of them. The tree shows which responses were truncated. A `Grader` turns the
verdicts into rewards and groups too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from brorl.algorithms.groups import Group
from brorl.algorithms.rewards import RewardShaping, shaped_rewards
from brorl.prompts.prompt import Prompt
from brorl.tree import RolloutTree
from brorl.verify.response_format import ResponseFormat
from brorl.verify.verifier import TRUNCATED, Verdict, Verifier


@dataclass(frozen=True)
class Grader:
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
        graded = zip(prompts, trees, self.verdicts(prompts, trees), strict=True)
        return [self.group(prompt, tree, verdicts, step) for prompt, tree, verdicts in graded]


def grade(
    prompts: Sequence[Prompt],
    trees: Sequence[RolloutTree],
    verifiers: Mapping[str, Verifier],
    decode: Callable[[tuple[int, ...]], str],
    accept_truncated: bool = False,
) -> list[list[Verdict]]:
    """Judge every distinct response of every tree.

    Args:
        prompts: P prompts.
        trees: P trees, of these prompts.
        verifiers: The verifier of each domain that occurs.
        decode: Token ids of a response, end token included, to its text without special tokens.
        accept_truncated: Ask the verifier about unfinished responses too, in place of calling them
            incorrect.

    Returns:
        For each tree L verdicts, aligned with its leaves. An unfinished response has the reason
        `truncated`.

    Raises:
        ValueError: If there are not as many trees as prompts, a tree belongs to another prompt, or
            a domain has no verifier.
    """
    if len(prompts) != len(trees):
        raise ValueError(
            f"got {len(prompts)} prompts and {len(trees)} trees; pass one tree per prompt, in the same order"
        )
    _check(prompts, trees, verifiers)
    number_of: dict[Prompt, int] = {}  # a prompt's many tokens are hashed once, not once per response
    number_P = [number_of.setdefault(prompt, len(number_of)) for prompt in prompts]
    texts_PL = [_texts(tree, decode, accept_truncated) for tree in trees]
    asked: dict[str, dict[tuple[int, str], tuple[Prompt, str]]] = {}  # what is asked of each domain, in order
    for prompt, number, text_L in zip(prompts, number_P, texts_PL, strict=True):
        items = asked.setdefault(prompt.domain, {})
        items.update(((number, text), (prompt, text)) for text in text_L if text is not None)
    verdict_of: dict[tuple[int, str], Verdict] = {}
    for domain, items in asked.items():
        if items:
            verdict_of.update(zip(items, verifiers[domain].verify_all(list(items.values())), strict=True))
    truncated = Verdict(False, 0.0, None, TRUNCATED, 0.0)
    return [
        [truncated if text is None else verdict_of[number, text] for text in text_L]
        for number, text_L in zip(number_P, texts_PL, strict=True)
    ]


def _check(prompts: Sequence[Prompt], trees: Sequence[RolloutTree], verifiers: Mapping[str, Verifier]) -> None:
    for place, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        if tuple(tree.prompt_ids) != prompt.token_ids:
            raise ValueError(
                f"the tree at place {place} was grown from other tokens than prompt "
                f"{prompt.id!r} has; pass prompts and trees in the same order"
            )
        if prompt.domain not in verifiers:
            raise ValueError(
                f"prompt {prompt.id!r} is of the domain {prompt.domain!r}, which has no verifier "
                f"(there are: {', '.join(sorted(verifiers)) or 'none'}); add one to verifiers"
            )


def _texts(tree: RolloutTree, decode: Callable[[tuple[int, ...]], str], accept_truncated: bool) -> list[str | None]:
    """Return the text of each distinct response, None for those that are incorrect because they did not end."""
    return [
        decode(response) if finished or accept_truncated else None
        for (response, _), finished in zip(tree.responses(), tree.finished.tolist(), strict=True)
    ]
