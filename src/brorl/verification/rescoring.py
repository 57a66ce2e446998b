"""Stored responses verified again: their questions, new verdicts, and the agreement with stored verdicts.

A response without a known question is returned as such, never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from brorl.prompts.prompt import Prompt, Question
from brorl.verdict import TRUNCATED, Verdict, verdict_of
from brorl.verification.verifier import Verifier, verify_distinct

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
    """Stored verdicts against new ones. Truncated and unverified responses are left out."""

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

    The id decides if it is that of a question. Otherwise the text decides, with differences of white space ignored, and
    then the part of an id after the name of its source. A text or part of an id that several questions share decides
    nothing.
    """
    by_id = {question.id: question for question in questions}
    by_text = _unambiguous([(question.asked, question) for question in questions])
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
    """Return a question for a verifier, which does not read tokens; a prompt needs at least one."""
    asked = question.last_turn
    return Prompt(question.id, text or asked, (0,), question.reference, question.domain, question.source, asked)


def _unambiguous(pairs: Sequence[tuple[str, Question]]) -> dict[str, Question]:
    """Return the questions by keys that one question alone has."""
    counts = Counter(key for key, _ in pairs)
    return {key: question for key, question in pairs if counts[key] == 1}
