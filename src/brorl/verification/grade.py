"""Grading: trees of rollouts or stored responses in, one verdict per distinct response out.

A text is verified once per prompt, however many rollouts, token sequences and trees contain it. Each domain's verifier
is called once, with all texts of its prompts, and once more with those that it could not verify because of an
infrastructure failure. A `Grader` makes groups of them, with rewards. A stored response without a known question is
returned as such, never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from time import perf_counter
from typing import NamedTuple

import numpy as np
import regex

from brorl.algorithms.groups import Group
from brorl.algorithms.rewards import shaped_rewards
from brorl.algorithms.settings import RewardShaping
from brorl.prompts.prompt import Prompt, Question
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


UNREADABLE = "unreadable reference"
_AT_ONCE = 1024
_Key = tuple[str, str | None, str]  # id of a question, prompt and response


@dataclass(frozen=True)
class StoredResponse:
    """A response from a file."""

    location: str  # its file and row
    question_id: str | None  # the id of its question, if the row has one
    question: str | None  # the text of its question, if the row has one
    text: str  # the response
    prompt: str | None = None  # the text that the model read, if the row has one
    correct: bool | None = None  # the stored verdict, if the row has one
    reason: str | None = None  # the stored reason, if the row has one


class RescoredResponse(NamedTuple):
    """A stored response with a new verdict."""

    response: StoredResponse
    question: Question
    verdict: Verdict


@dataclass(frozen=True)
class Agreement:
    """How stored verdicts agree with new ones. Truncated and unverified responses are left out."""

    both_correct: int  # number of responses that are correct in both
    both_incorrect: int  # number that are incorrect in both
    only_stored: int  # number that only the stored verdict calls correct
    only_new: int  # number that only the new verdict calls correct

    @property
    def number(self) -> int:
        """Number of compared responses."""
        return self.both_correct + self.both_incorrect + self.only_stored + self.only_new

    @property
    def fraction(self) -> float:
        """Fraction of the compared responses with equal verdicts, 0 to 1; NaN without any."""
        return (self.both_correct + self.both_incorrect) / self.number if self.number else float("nan")


def match_questions(
    responses: Sequence[StoredResponse], questions: Sequence[Question]
) -> tuple[list[tuple[StoredResponse, Question]], list[StoredResponse]]:
    """Return the responses with their questions, which have distinct ids, and the responses of unknown questions.

    The id decides if a question has it. Otherwise the text decides, apart from white space, and then the part of the id
    after the name of the source. A text or part of an id that several questions share decides nothing.
    """
    by_id = {question.id: question for question in questions}
    by_text = _unambiguous([(question.words, question) for question in questions])
    by_part = _unambiguous([(question.id.partition(":")[2], question) for question in questions])
    known: list[tuple[StoredResponse, Question]] = []
    unknown: list[StoredResponse] = []
    for response in responses:
        name, text = response.question_id, response.question
        question = by_id.get(name) if name is not None else None
        if question is None and text is not None:
            question = by_text.get(" ".join(text.split()))
        if question is None and name is not None:
            question = by_part.get(name)
        if question is None:
            unknown.append(response)
        else:
            known.append((response, question))
    return known, unknown


def rescore(
    matched: Sequence[tuple[StoredResponse, Question]],
    verifiers: Mapping[str, Verifier],
    observe: Callable[[int], None] = lambda _: None,
    unreadable: Collection[str] = (),
) -> tuple[list[RescoredResponse], float]:
    """Verify stored responses, each distinct one once; return their verdicts, and the wall time in seconds.

    A response that is stored as truncated keeps that verdict, because it was never verified. One that could not be
    verified is verified a second time. A response to a question with an unreadable reference is incorrect.
    """
    items: dict[_Key, tuple[Prompt, str]] = {}
    prompt_of: dict[tuple[str, str | None], Prompt] = {}
    for response, question in matched:
        if response.reason != TRUNCATED and question.id not in unreadable:
            prompt = prompt_of.setdefault((question.id, response.prompt), _prompt(question, response.prompt))
            items.setdefault(_key(response, question), (prompt, response.text))
    begin = perf_counter()
    found = verify_distinct(items, verifiers, observe, _AT_ONCE)
    seconds = perf_counter() - begin

    def verdict(response: StoredResponse, question: Question) -> Verdict:
        if response.reason == TRUNCATED:
            return verdict_of(TRUNCATED)
        return verdict_of(UNREADABLE) if question.id in unreadable else found[_key(response, question)]

    return [
        RescoredResponse(response, question, verdict(response, question)) for response, question in matched
    ], seconds


def is_compared(rescored: RescoredResponse) -> bool:
    """Whether a response has a stored verdict and a new one that can be compared."""
    response, _, verdict = rescored
    return response.correct is not None and verdict.reason != TRUNCATED and not verdict.unverified


def agreement(rescored: Sequence[RescoredResponse]) -> Agreement:
    """Compare the stored verdicts with the new ones."""
    pairs = Counter((bool(item.response.correct), item.verdict.correct) for item in rescored if is_compared(item))
    return Agreement(pairs[True, True], pairs[False, False], pairs[True, False], pairs[False, True])


def _key(response: StoredResponse, question: Question) -> _Key:
    return question.id, response.prompt, response.text


def _prompt(question: Question, text: str | None) -> Prompt:
    """Return a question as a prompt for a verifier, which reads no tokens; a prompt needs at least one."""
    asked = question.last_turn
    return Prompt(question.id, text or asked, (0,), question.reference, question.domain, question.source, asked)


def _unambiguous(pairs: Sequence[tuple[str, Question]]) -> dict[str, Question]:
    """Return the questions by their keys, without keys of several questions."""
    counts = Counter(key for key, _ in pairs)
    return {key: question for key, question in pairs if counts[key] == 1}
