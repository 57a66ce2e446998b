"""Grading: trees in, one verdict per distinct response out.

A text is verified once per prompt, however many rollouts, token sequences and trees contain it. Each domain's verifier
is called once, with all texts of its prompts, and once more with those that it could not verify because of an
infrastructure failure. A `Grader` also turns verdicts into rewards and groups, of the verified rollouts only.
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
from brorl.tree import FloatArray, RolloutTree
from brorl.verification.verifier import TRUNCATED, Verdict, Verifier, verdict_of, verify_distinct

_FORMAT_TIMEOUT_S = 0.5  # a pattern can take exponential time on some texts


@dataclass(frozen=True)
class Grader:
    """Verifies each distinct response once, for one thread at a time, and turns verdicts into rewards."""

    verifiers: Mapping[str, Verifier]  # verifier of each domain
    decode: Callable[[Sequence[int]], str]  # token ids of a response to its text
    shaping: RewardShaping  # from verdicts to rewards
    max_new_tokens: int | None = None  # length limit of a response, for rewards that depend on the length
    lock: Lock = field(default_factory=Lock, repr=False, compare=False)  # verifiers share caches and worker processes

    def verdicts(self, prompts: Sequence[Prompt], trees: Sequence[RolloutTree]) -> list[list[Verdict]]:
        """Return the verdicts of all distinct responses; truncated ones are verified only if they can earn a reward."""
        accept_truncated = self.shaping.stop_properly > 0
        with self.lock:
            return grade(prompts, trees, self.verifiers, self.decode, accept_truncated=accept_truncated)

    def texts(self, tree: RolloutTree) -> list[str]:
        """Return the text of each distinct response."""
        return [self.decode(tokens) for tokens, _ in tree.responses()]

    def group(self, prompt: Prompt, tree: RolloutTree, verdicts: Sequence[Verdict], step: int) -> Group | None:
        """Return the verified rollouts of a prompt with their rewards; steps count from 1.

        Unverified responses leave the tree with all of their rollouts, and N of the group is smaller. None if no
        rollout was verified, or only one of several: a single rollout has no other rollouts to be compared with.
        """
        kept = verified(verdicts)
        if len(kept) < len(verdicts):
            if not kept:
                return None
            tree, _ = tree.select(np.flatnonzero([not v.unverified for v in verdicts]))
            if tree.num_rollouts < 2:
                return None
        return self._rewarded(prompt, tree, kept, step)

    def stored_group(self, prompt: Prompt, tree: RolloutTree, verdicts: Sequence[Verdict], step: int) -> Group:
        """Return all rollouts of a prompt, to be stored and shown; see `group` for the arguments.

        The reward of an unverified response is NaN.
        """
        group = self._rewarded(prompt, tree, verdicts, step)
        reward_L = np.where([v.unverified for v in verdicts], np.nan, group.reward_L)
        return replace(group, reward_L=reward_L)

    def _rewarded(self, prompt: Prompt, tree: RolloutTree, verdicts: Sequence[Verdict], step: int) -> Group:
        correct_L = np.array([v.correct for v in verdicts])
        pattern = self.shaping.format_pattern
        reward_L = shaped_rewards(
            correct_L=correct_L,
            score_L=np.array([v.score for v in verdicts]),
            length_L=tree.length,
            truncated_L=~tree.finished,
            domain=prompt.domain,
            step=step,
            shaping=self.shaping,
            formatted_L=None if pattern is None else np.array([has_format(text, pattern) for text in self.texts(tree)]),
            max_new_tokens=self.max_new_tokens,
            terms_L=term_values(verdicts, self.shaping),
        )
        return Group(prompt, tree, correct_L, reward_L)

    def groups(self, prompts: Sequence[Prompt], trees: Sequence[RolloutTree], step: int) -> list[Group | None]:
        """Verify and reward all rollouts of P prompts; see `group`."""
        graded = zip(prompts, trees, self.verdicts(prompts, trees), strict=True)
        return [self.group(prompt, tree, verdicts, step) for prompt, tree, verdicts in graded]


def verified(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts that were reached."""
    return [verdict for verdict in verdicts if not verdict.unverified]


def term_values(verdicts: Sequence[Verdict], shaping: RewardShaping) -> dict[str, FloatArray]:
    """Return the values of each further term of the reward, shape [L]; NaN where a verdict has none."""
    none = (None,) * len(shaping.terms)
    values_LK = np.array([verdict.terms or none for verdict in verdicts], np.float64).reshape(len(verdicts), len(none))
    return dict(zip(shaping.terms, values_LK.T, strict=True))


def num_unverified(tree: RolloutTree, verdicts: Sequence[Verdict]) -> int:
    """Return the number of rollouts whose response could not be verified because of an infrastructure failure."""
    return int(tree.leaf_count[[v.unverified for v in verdicts]].sum())


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
    """Verify every distinct response of every tree; return the L verdicts of each, aligned with its leaves.

    A response that could not be verified is verified again after all others; if that fails too, its verdict is
    `unverified`.

    Args:
        prompts: P prompts.
        trees: P trees, of these prompts.
        verifiers: The verifier of each domain that occurs.
        decode: Token ids of a response, end token included, to its text without special tokens.
        accept_truncated: Verify unfinished responses too. By default they are incorrect with the reason `truncated`.

    Raises:
        ValueError: If the numbers of trees and prompts differ, a tree belongs to another prompt, or a domain has no
            verifier.
    """
    _check(prompts, trees, verifiers)
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


def _check(prompts: Sequence[Prompt], trees: Sequence[RolloutTree], verifiers: Mapping[str, Verifier]) -> None:
    if len(prompts) != len(trees):
        raise ValueError(f"got {len(prompts)} prompts and {len(trees)} trees; pass one tree per prompt, in order")
    for index, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        if tuple(tree.prompt_ids) != prompt.token_ids:
            raise ValueError(
                f"tree {index} does not have the tokens of prompt {prompt.id!r}; pass both in the same order"
            )
        if prompt.domain not in verifiers:
            raise ValueError(
                f"prompt {prompt.id!r} is of the domain {prompt.domain!r}, which has no verifier "
                f"(verifiers: {', '.join(sorted(verifiers)) or 'none'}); add one"
            )
