"""The `Verifier` protocol, the verdict cache, and the trial of a verifier before a run.

A verifier returns a verdict for any string within bounded time. A response never makes it raise and is never evaluated
as code in this process.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from math import inf
from time import monotonic
from typing import NamedTuple, Protocol, TypeVar

from brorl.errors import UserError, source_setting
from brorl.format import counted, listed
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import CODE_DOMAIN, GYM_DOMAIN, INSTRUCTIONS_DOMAIN, MATH_DOMAIN, Question
from brorl.verdict import Verdict

Key = TypeVar("Key", bound=Hashable)


def malformed(references: Sequence[str], read: Callable[[str], object]) -> dict[str, str]:
    """Return the ValueError message for each reference that `read` rejects."""
    problems: dict[str, str] = {}
    for reference in references:
        try:
            read(reference)
        except ValueError as error:
            problems[reference] = str(error)
    return problems


class TrialResponses(NamedTuple):
    """Responses to one prompt that test whether a verifier works."""

    right: str  # contains the reference answer
    wrong: Sequence[str]  # contain other answers, at least one of which should be incorrect
    # Whether the verifier must accept `right`. A user's function may expect a different form of response.
    certain: bool = True


class Verifier(Protocol):
    """Verifies the responses of one domain."""

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify distinct (prompt, response text) pairs and return one verdict per pair, in order.

        A verifier may distribute the pairs among workers. A response that took too long gets the reason `timeout`. One
        hit by an infrastructure failure gets an `unverified_verdict`; the caller may pass it again later.

        Raises:
            ValueError: If a prompt's reference is malformed; never because of a response.
        """
        ...

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Return, in order, the problem with each reference answer that no response can match.

        Example: `{"4": "is not a countdown puzzle"}`. Error messages put it after "the reference answer ..., which".
        """
        ...

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Make responses for a trial of this verifier. `others` are other prompts' reference answers."""
        ...


def verify_distinct(
    items: Mapping[Key, tuple[Prompt, str]],
    verifiers: Mapping[str, Verifier],
    observe: Callable[[int], None] = lambda _: None,
    at_once: int | None = None,
) -> dict[Key, Verdict]:
    """Verify distinct items by domain, at most `at_once` per call, and retry the unverified ones once."""
    verdict_of: dict[Key, Verdict] = {}
    for _ in range(2):
        keys_of: dict[str, list[Key]] = {}
        for key, (prompt, _text) in items.items():
            if key not in verdict_of or verdict_of[key].unverified:
                keys_of.setdefault(prompt.domain, []).append(key)
        for domain, keys in keys_of.items():
            size = at_once or len(keys)
            for start in range(0, len(keys), size):
                batch = keys[start : start + size]
                verdicts = verifiers[domain].verify_all([items[key] for key in batch])
                verdict_of.update(zip(batch, verdicts, strict=True))
                observe(len(verdict_of))
    return verdict_of


Pair = tuple[str, str]  # a reference and an answer

KEEP_TIMEOUT_S = 3600.0  # keep a timeout for about one step; later the machine may be faster


class VerdictCache:
    """Remembers the `size` most recently used verdicts, by reference and answer."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"cache_size must be 1 or more, got {size}")
        self._size = size
        # digest -> (correct, score, reason, monotonic time at which the entry expires)
        self._entries: OrderedDict[bytes, tuple[bool, float, str, float]] = OrderedDict()
        self._reference = ""  # the latest reference; answers to one prompt arrive together
        self._digest = _digest("")  # digest of the latest reference

    def verify_all(
        self,
        items: Sequence[tuple[Prompt, str]],
        find: Callable[[Prompt, str], Verdict | str],
        decide: Callable[[list[Pair]], Sequence[tuple[Verdict, float]]],
    ) -> list[Verdict]:
        """Return the verdict on each response, in order. Each distinct (reference, answer) pair is decided once.

        `find` returns the answer in a response, or the verdict if the response's form alone decides it. For each pair
        that is not in the cache, `decide` returns the verdict and how many seconds to keep it (0: do not keep it).
        """
        verdicts: list[Verdict | None] = []
        extraction_s: list[float] = []
        unknown: dict[Pair, list[int]] = {}
        for index, (prompt, response) in enumerate(items):
            start = time.perf_counter()
            answer = find(prompt, response)
            verdict = self.get(prompt.reference, answer) if isinstance(answer, str) else answer
            if isinstance(answer, str) and verdict is None:
                unknown.setdefault((prompt.reference, answer), []).append(index)
            verdicts.append(verdict)
            extraction_s.append(time.perf_counter() - start)
        for ((reference, _), indices), (decided, keep_s) in zip(unknown.items(), decide([*unknown]), strict=True):
            if keep_s:
                self.put(reference, decided, keep_s)
            for index in indices:
                verdicts[index] = decided if index == indices[0] else replace(decided, seconds=0.0)
        timed = zip(verdicts, extraction_s, strict=True)
        return [
            replace(verdict, seconds=verdict.seconds + extra_s) for verdict, extra_s in timed if verdict is not None
        ]

    def get(self, reference: str, answer: str) -> Verdict | None:
        """Return the stored verdict on an extracted answer; None if there is none."""
        key = self._key(reference, answer)
        if key not in self._entries or monotonic() >= self._entries[key][-1]:
            return None
        self._entries.move_to_end(key)
        correct, score, reason, _ = self._entries[key]
        return Verdict(correct, score, answer, reason, 0.0)

    def put(self, reference: str, verdict: Verdict, keep_s: float = inf) -> None:
        """Keep a verdict for `keep_s` seconds. ValueError if it has no extracted answer or is unverified."""
        if verdict.extracted is None or verdict.unverified:
            raise ValueError(f"only verdicts on extracted answers can be kept, got reason {verdict.reason!r}")
        key = self._key(reference, verdict.extracted)
        self._entries[key] = verdict.correct, verdict.score, verdict.reason, monotonic() + keep_s
        if len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def _key(self, reference: str, answer: str) -> bytes:
        if reference != self._reference:
            self._reference = reference
            self._digest = _digest(reference)
        return self._digest + _digest(answer)


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


_MAX_WRONG = 4  # maximum number of other prompts' references to try as wrong answers
_MAX_TRIED = 32  # maximum number of prompts whose right response is tried
_NO_ANSWER = "I do not know."


class Trial(NamedTuple):
    """The verdicts on two responses to a prompt."""

    prompt: Prompt
    right: str  # a response with the reference answer
    right_verdict: Verdict
    wrong: str  # a response with a different answer, preferably one judged incorrect
    wrong_verdict: Verdict
    certain: bool  # whether the verifier must accept `right`
    # Verdicts on responses that must be accepted, one per prompt, for prompts spread evenly over the data. Prompts
    # without such a response are left out.
    answers: Sequence[tuple[Prompt, Verdict]]


def try_verifier(verifier: Verifier, prompts: Sequence[Prompt]) -> Trial:
    """Verify a right and a wrong response to the first prompt, and right responses to others.

    The responses contain no thoughts. They answer the bare questions, because a prompt may end with an opening tag.
    """
    prompts = [replace(prompt, text=prompt.question or prompt.text) for prompt in prompts]
    prompt = prompts[0]
    other_references = dict.fromkeys(p.reference for p in prompts[1:] if p.reference != prompt.reference)
    made = verifier.trial_responses(prompt.reference, list(other_references)[:_MAX_WRONG])
    responses = [made.right, *dict.fromkeys(r for r in (*made.wrong, _NO_ANSWER) if r != made.right)]
    right_verdict, *wrong_verdicts = verifier.verify_all([(prompt, response) for response in responses])
    wrong = list(zip(responses[1:], wrong_verdicts, strict=True))
    response, verdict = next((pair for pair in wrong if not pair[1].correct), wrong[0])
    answers = _verdicts_on_references(verifier, prompts)
    return Trial(prompt, made.right, right_verdict, response, verdict, made.certain, answers)


def _verdicts_on_references(verifier: Verifier, prompts: Sequence[Prompt]) -> list[tuple[Prompt, Verdict]]:
    """Verify responses that must be accepted, for prompts spread evenly over the data."""
    items: list[tuple[Prompt, str]] = []
    for prompt in dict.fromkeys(prompts[index * len(prompts) // _MAX_TRIED] for index in range(_MAX_TRIED)):
        made = verifier.trial_responses(prompt.reference, ())
        if made.certain:
            items.append((prompt, made.right))
    verdicts = verifier.verify_all(items)
    return [(prompt, verdict) for (prompt, _), verdict in zip(items, verdicts, strict=True)]


_ONLY_JSON = (CODE_DOMAIN, GYM_DOMAIN, INSTRUCTIONS_DOMAIN)


def unreadable_references(
    verifiers: Mapping[str, Verifier], questions: Sequence[Question]
) -> list[tuple[Question, str]]:
    """Return each question whose reference answer no response can match, with the problem, grouped by domain."""
    unreadable: list[tuple[Question, str]] = []
    for domain, verifier in verifiers.items():
        in_domain = [question for question in questions if question.domain == domain]
        problems = verifier.check_references(sorted({question.reference for question in in_domain}))
        unreadable += [
            (question, problems[question.reference]) for question in in_domain if question.reference in problems
        ]
    return unreadable


def check_references(verifiers: Mapping[str, Verifier], questions: Sequence[Question]) -> None:
    """Raise a UserError for the first question whose reference answer no response can match."""
    unreadable = unreadable_references(verifiers, questions)
    if unreadable:
        question, problem = unreadable[0]
        num_references = len({other.reference for other, _ in unreadable})
        raise UserError(
            f"question {question.name} has the reference answer {question.reference[:80]!r}, which {problem} "
            f"({counted(num_references, 'such answer')}); {_advice(question)}{_others(unreadable[1:])}"
        )


_NAMED = 9  # maximum number of additional questions named in a message


def _others(unreadable: Sequence[tuple[Question, str]]) -> str:
    """Return the names of the other questions whose references no response can match."""
    names = [question.name for question, _ in unreadable[:_NAMED]]
    more = [f"{len(unreadable) - _NAMED:,} more"] if len(unreadable) > _NAMED else []
    return f". The others: {listed([*names, *more])}" if names else ""


def _advice(question: Question) -> str:
    """Return how to fix a reference that no response can match."""
    is_object = question.domain != MATH_DOMAIN and question.reference.lstrip().startswith("{")  # in math, a set
    if is_object or question.domain in _ONLY_JSON:  # the whole answer is JSON: `answer_after` cannot help
        return (
            f"fix or delete the row, set {source_setting('layout')} if it comes from a public dataset, or set a "
            "different domain or your own verifier in verification.functions"
        )
    return (
        f"fix or delete the row, set {source_setting('answer_after')} to the text before the answer, or set a "
        "different domain or your own verifier in verification.functions"
    )
