"""Grading: rollout trees or stored responses in, one verdict per distinct response out.

A response text is verified once per prompt, no matter how many rollouts, token sequences and trees contain it. Each
domain's verifier is called once with all response texts for its prompts. After infrastructure failures, it is called
once more with those that are still unverified. A `Grader` turns the verdicts into groups with rewards. A stored
response whose question is unknown is returned as such; its question is never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from time import perf_counter
from typing import NamedTuple, TypeAlias

import numpy as np
import regex

from brorl.algorithms.groups import Group
from brorl.algorithms.rewards import shaped_rewards
from brorl.algorithms.settings import RewardShaping
from brorl.errors import BrokenVerifierError
from brorl.format import counted
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import ENVIRONMENT_DOMAIN, Question
from brorl.tree import RolloutTree
from brorl.verdict import RAISED, RETURNED, TRUNCATED, Verdict, verdict_of
from brorl.verification.settings import Sees
from brorl.verification.verifier import Verifier, verify_distinct

Turns: TypeAlias = Sequence[Sequence[int]]  # token ids of each turn of a response
CallsText: TypeAlias = Callable[[Turns], str]
_FORMAT_TIMEOUT_S = 0.5  # a pattern can take exponential time on some strings


@dataclass(frozen=True)
class Grader:
    """Verifies each distinct response once, one thread at a time, and turns verdicts into rewards."""

    verifiers: Mapping[str, Verifier]  # domain -> verifier
    decode: Callable[[Sequence[int]], str]  # token ids of a turn -> its text
    shaping: RewardShaping  # how verdicts become rewards
    max_new_tokens: int | None = None  # maximum sampled tokens per response; some rewards depend on it
    sees: Sees = "last"  # the turns that verifiers see
    calls_text: CallsText | None = None  # turns -> text of their calls, for environment questions
    lock: Lock = field(default_factory=Lock, repr=False, compare=False)  # verifiers share caches and worker processes
    # Domains whose verifier has judged a response; for the others, the number of prompts on which it has failed.
    judged: set[str] = field(default_factory=set, repr=False, compare=False)
    failed: Counter[str] = field(default_factory=Counter, repr=False, compare=False)

    def verify(self, prompts: Sequence[Prompt], trees: Sequence[RolloutTree]) -> list[Group]:
        """Verify all rollouts of P prompts, except truncated ones that cannot earn a reward. Rewards are 1 or 0.

        Raises a BrokenVerifierError if a domain's verifier has raised on every response so far, over 2 or more prompts.
        """
        accept_truncated = self.shaping.stop_properly > 0
        with self.lock:
            verdicts = grade(prompts, trees, self.verifiers, self._seen, accept_truncated)
            self._refuse_broken(prompts, verdicts)
        return list(map(Group.from_verdicts, prompts, trees, verdicts))

    def _refuse_broken(self, prompts: Sequence[Prompt], verdicts: Sequence[Sequence[Verdict]]) -> None:
        """End the run if a verifier has never worked: it would count every response as incorrect."""
        for prompt, verdict_L in zip(prompts, verdicts, strict=True):
            reasons = [
                verdict.reason for verdict in verdict_L if verdict.reason != TRUNCATED and not verdict.unverified
            ]
            if any(not reason.startswith((RAISED, RETURNED)) for reason in reasons):
                self.judged.add(prompt.domain)
            elif reasons:
                self.failed[prompt.domain] += 1
        for prompt, verdict_L in zip(prompts, verdicts, strict=True):
            domain = prompt.domain
            if domain not in self.judged and self.failed[domain] > 1:
                reason = next(verdict.reason for verdict in verdict_L if verdict.reason.startswith((RAISED, RETURNED)))
                raise BrokenVerifierError(
                    f"the verifier for the domain {domain!r} failed on every response to the first "
                    f"{counted(self.failed[domain], 'prompt')}, so none can be correct: {reason}; fix the function"
                )

    def rewarded(self, group: Group, step: int) -> Group:
        """Return a verified group with its rewards at a step (1 or more). Unverified responses get a NaN reward."""
        tree = group.tree
        pattern = self.shaping.format_pattern
        names = self.shaping.terms
        formatted = None if pattern is None else [has_format(text, pattern) for text in self.texts(group)]
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
            formatted_L=None if formatted is None else np.array(formatted),
            max_new_tokens=self.max_new_tokens,
            terms_L=terms_L,
        )
        return replace(group, terms_L=terms_L).with_rewards(reward_L)

    def texts(self, group: Group) -> list[str]:
        """Return the text that verifiers see for each distinct response."""
        return [self._seen(group.prompt, turns) for turns in group.tree.turns()]

    def _seen(self, prompt: Prompt, turns: Turns) -> str:
        return seen_text(prompt, turns, self.decode, self.sees, self.calls_text)


def has_format(text: str, pattern: str) -> bool:
    """Return whether a pattern (`regex` package syntax) matches the whole stripped text within half a second."""
    try:
        return regex.fullmatch(pattern, text.strip(), regex.DOTALL, timeout=_FORMAT_TIMEOUT_S) is not None
    except TimeoutError:
        return False


def seen_text(
    prompt: Prompt,
    turns: Turns,
    decode: Callable[[Sequence[int]], str],
    sees: Sees = "last",
    calls_text: CallsText | None = None,
) -> str:
    """Return the part of a response that verifiers see: its last turn, or all turns joined by newlines.

    For an environment question, this is the result of `calls_text`.
    """
    if prompt.domain == ENVIRONMENT_DOMAIN and calls_text is not None:
        return calls_text(turns)
    return "\n".join(map(decode, turns)) if sees == "all" else decode(turns[-1])


def grade(
    prompts: Sequence[Prompt],
    trees: Sequence[RolloutTree],
    verifiers: Mapping[str, Verifier],
    seen: Callable[[Prompt, Turns], str],
    accept_truncated: bool = False,
) -> list[list[Verdict]]:
    """Verify every distinct response in P trees and return L verdicts per tree, aligned with its leaves.

    A response hit by an infrastructure failure is verified again after all others; if that fails too, its verdict is
    `unverified`. Unless `accept_truncated` is set, unfinished responses are incorrect with reason `truncated`. Like
    `seen_text`, `seen` maps the token ids of a response's turns to the text that verifiers see. Raises a ValueError if
    trees and prompts do not match.
    """
    if any(tuple(tree.prompt_ids) != prompt.token_ids for prompt, tree in zip(prompts, trees, strict=True)):
        raise ValueError("a tree's prompt tokens differ from its prompt's; pass trees and prompts in the same order")
    index_of: dict[Prompt, int] = {}  # hash a prompt's tokens once, not once per response
    index_P = [index_of.setdefault(prompt, len(index_of)) for prompt in prompts]
    texts_PL: list[list[str | None]] = []
    items: dict[tuple[int, str], tuple[Prompt, str]] = {}
    for prompt, index, tree in zip(prompts, index_P, trees, strict=True):
        text_L = [
            seen(prompt, turns) if finished or accept_truncated else None
            for turns, finished in zip(tree.turns(), tree.finished.tolist(), strict=True)
        ]
        texts_PL.append(text_L)
        items |= {(index, text): (prompt, text) for text in text_L if text is not None}
    verdict_on = verify_distinct(items, verifiers)
    return [
        [verdict_of(TRUNCATED) if text is None else verdict_on[index, text] for text in text_L]
        for index, text_L in zip(index_P, texts_PL, strict=True)
    ]


UNREADABLE = "unreadable reference"
_AT_ONCE = 1024
_Key = tuple[str, str | None, str]  # (question id, prompt, response)


@dataclass(frozen=True)
class StoredResponse:
    """A response from a file."""

    location: str  # file and row
    question_id: str | None  # None, here and below, if the row lacks the value
    question: str | None  # the question's text
    text: str  # the response
    prompt: str | None = None  # the text given to the model
    correct: bool | None = None  # the stored verdict
    reason: str | None = None  # the stored reason


class RescoredResponse(NamedTuple):
    """A stored response with a new verdict."""

    response: StoredResponse
    question: Question
    verdict: Verdict


def match_questions(
    responses: Sequence[StoredResponse], questions: Sequence[Question]
) -> tuple[list[tuple[StoredResponse, Question]], list[StoredResponse]]:
    """Return the responses with their questions, and the responses whose question is unknown.

    Question ids, such as `gsm8k:17`, are distinct. A response is matched to the question with the same id; failing
    that, with the same text (ignoring whitespace); failing that, with the same id after the colon, such as `17`. Texts
    and partial ids shared by several questions are ignored.
    """
    by_id = {question.id: question for question in questions}
    by_text = _unambiguous([(question.words, question) for question in questions])
    by_partial_id = _unambiguous([(question.id.partition(":")[2], question) for question in questions])
    known: list[tuple[StoredResponse, Question]] = []
    unknown: list[StoredResponse] = []
    for response in responses:
        question_id, text = response.question_id, response.question
        question = by_id.get(question_id) if question_id is not None else None
        if question is None and text is not None:
            question = by_text.get(" ".join(text.split()))
        if question is None and question_id is not None:
            question = by_partial_id.get(question_id)
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
    """Verify each distinct stored response once and return the verdicts and the wall time in seconds.

    A response stored as truncated keeps that verdict, because it was never verified. A response hit by an
    infrastructure failure is verified a second time. One whose question has an unreadable reference is incorrect.
    """
    items: dict[_Key, tuple[Prompt, str]] = {}
    prompt_of: dict[tuple[str, str | None], Prompt] = {}
    for response, question in matched:
        if response.reason != TRUNCATED and question.id not in unreadable:
            prompt = prompt_of.setdefault((question.id, response.prompt), _prompt(question, response.prompt))
            items.setdefault(_key(response, question), (prompt, response.text))
    begin = perf_counter()
    verdict_on = verify_distinct(items, verifiers, observe, _AT_ONCE)
    seconds = perf_counter() - begin

    def verdict(response: StoredResponse, question: Question) -> Verdict:
        if response.reason == TRUNCATED:
            return verdict_of(TRUNCATED)
        return verdict_of(UNREADABLE) if question.id in unreadable else verdict_on[_key(response, question)]

    return [
        RescoredResponse(response, question, verdict(response, question)) for response, question in matched
    ], seconds


def _key(response: StoredResponse, question: Question) -> _Key:
    return question.id, response.prompt, response.text


def _prompt(question: Question, text: str | None) -> Prompt:
    """Return a question as a prompt without tokens, which verifiers do not read."""
    asked = question.last_turn
    return Prompt(question.id, text or asked, (), question.reference, question.domain, question.source, asked)


def _unambiguous(pairs: Sequence[tuple[str, Question]]) -> dict[str, Question]:
    """Return the questions by key, dropping keys that several questions share."""
    counts = Counter(key for key, _ in pairs)
    return {key: question for key, question in pairs if counts[key] == 1}
