r"""Verifier for math answers: compares the answer in a response with the reference.

    `So \boxed{\frac{1}{2}} km.`  ->  `\frac{1}{2} km`  ->  equal to the reference `0.5 km`?

This process compares equal strings, two integers, two choices, and a word with an integer. `formula` parses and
compares everything else, in killable workers, once per distinct reference and answer. One call takes many pairs,
because a message costs more than a comparison. Answers longer than 2,000 characters are incorrect.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf

from brorl.prompts.answer_forms import surrounds_answer
from brorl.prompts.prompt import Prompt
from brorl.verdict import CORRECT, NO_ANSWER, TOO_LONG, WRONG, Verdict, is_unverified, verdict_of
from brorl.verification.domains.denial import denial_after
from brorl.verification.domains.math_answer import extract_answer, tidy
from brorl.verification.domains.retraction import retraction
from brorl.verification.sandbox.pool import LoadError, WorkerPool
from brorl.verification.sandbox.request import Reply
from brorl.verification.verifier import Pair, TrialResponses, VerdictCache

SEVERAL_ANSWERS = "no single answer"
MAX_ANSWER = 2_000
"""Maximum length of an answer, in characters; longer ones are not compared."""
_AGREEMENT = "brorl.verification.domains.formula.agreement"  # only workers import it

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # -42
_WORD = re.compile(r"(?![iI]+$)[A-Za-z]{1,40}")  # a word or a product of variables; `II` may be the integer i times i
_CHOICE = re.compile(r"[A-J]")  # B
_CHOSEN = re.compile(  # B, (B), `B. because ...`, \text{(B) neon}
    r"""(?: \\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|boldsymbol)\s*\{ )? \s*
        (\()? (?P<letter>[A-Ja-j]) (?P<rest> (?(1)\)|[.):]?) (?: (?<=[.):])[\s\\}].* | \s*\}? ) )""",
    re.VERBOSE,
)
_SECOND_CHOICE = re.compile(r"[).:\s]*(?:and\b|or\b|[,/;&])[\s(]*[A-Ja-j](?![A-Za-z])")  # `) or (C`


class MathVerifier:
    """Accepts answers that are mathematically equal to the reference. Numbers must be evaluated.

    Args:
        pool: Workers for the comparisons, with a wall-time limit for calls that never return.
        cache_size: Number of (reference, answer) pairs whose verdicts are cached, 1 or more.
        limit_s: CPU seconds per comparison, above 0; None for half of the pool's timeout. Unlike wall time, CPU time
            does not depend on the machine's load.
    """

    def __init__(self, pool: WorkerPool, cache_size: int = 200_000, limit_s: float | None = None) -> None:
        self._cache = VerdictCache(cache_size)
        self._pool = pool
        pool.expect(_AGREEMENT)
        self._limit_s = pool.timeout_s / 2 if limit_s is None else limit_s
        if not self._limit_s > 0:
            raise ValueError(f"limit_s must be above 0, got {limit_s}")

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses. Workers' verdicts are cached, including CPU timeouts.

        The reasons are `correct`, `wrong answer`, `not evaluated`, `no answer`, `answer too long`, `no single answer`,
        `not parsed`, `timeout`, `out of memory`, `verifier crashed` and `unverified: ...`.
        """

        def find(prompt: Prompt, response: str) -> Verdict | str:
            answer = extract_answer(response)
            return verify_by_form(prompt.reference, answer) or answer or ""

        def decide(pairs: Sequence[Pair]) -> list[tuple[Verdict, float]]:
            replies = self.compare([(tidy(reference), answer, None) for reference, answer in pairs])
            return [worker_verdict(answer, reply) for (_, answer), reply in zip(pairs, replies, strict=True)]

        return self._cache.verify_all(items, find, decide)

    def compare(self, pairs: Sequence[tuple[str, str, float | None]]) -> list[Reply]:
        """Compare references and answers with a tolerance, in workers. See `agreement.agree_each`."""
        return self._pool.map(f"{_AGREEMENT}:agree_each", pairs, self._limit_s)

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find references that cannot be read, checking duplicates once. Raises a LoadError if workers were lost."""
        doubtful = [r for r in dict.fromkeys(references) if not (_INTEGER.fullmatch(r) or _CHOICE.fullmatch(r))]
        around = set(filter(surrounds_answer, doubtful))
        unchecked = [r for r in doubtful if len(r) <= MAX_ANSWER and r not in around]
        good: set[str] = set()
        for _ in range(2):  # the second pass retries what failed on a busy machine
            results = self._pool.map(f"{_AGREEMENT}:are_readable", [tidy(r) for r in unchecked], self._limit_s)
            good |= {reference for reference, result in zip(unchecked, results, strict=True) if result.value is True}
            if lost := [result.failure for result in results if is_unverified(result.failure or "")]:
                raise LoadError(f"cannot check reference answers ({lost[0]}); free up memory, then rerun")
            unchecked = [reference for reference, result in zip(unchecked, results, strict=True) if result.failure]
        unread = "cannot be read as a mathematical expression"
        no_answer = "contains an answer but is not one itself"
        return {r: no_answer if r in around else unread for r in doubtful if r not in good}

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return each reference in a box."""
        right, *wrong = (text if "\\boxed" in text else f"\\boxed{{{text}}}" for text in (reference, *others))
        return TrialResponses(right, wrong)


def worker_verdict(answer: str, reply: Reply) -> tuple[Verdict, float]:
    """Return the verdict in a worker's reply and how many seconds to cache it: 0 for failures."""
    if reply.failure is not None:
        return verdict_of(reply.failure, answer, reply.seconds), 0.0
    return verdict_of(str(reply.value), answer, reply.seconds), inf


def verify_by_form(reference: str, answer: str | None) -> Verdict | None:
    """Return the verdict if the answer's form (equal strings, integers, choices) decides it; None to ask a worker."""
    if answer is None:
        return verdict_of(NO_ANSWER)
    if len(answer) > MAX_ANSWER:
        return verdict_of(TOO_LONG)
    reference = reference.strip()
    if answer == reference and any(c.isalnum() for c in answer):
        return verdict_of(CORRECT, answer)
    if _INTEGER.fullmatch(reference) and (_INTEGER.fullmatch(answer) or _WORD.fullmatch(answer)):
        return verdict_of(WRONG, answer)
    chosen = _CHOSEN.fullmatch(answer) if _CHOICE.fullmatch(reference) else None
    return verdict_of(_reason_of_choice(reference, chosen), answer) if chosen else None


def _reason_of_choice(reference: str, chosen: re.Match[str]) -> str:
    """Return the verdict's reason for a letter and the words after it."""
    letter, rest = chosen["letter"].upper(), chosen["rest"]
    if _SECOND_CHOICE.match(rest) or denial_after(rest) or retraction("", letter, rest):
        return SEVERAL_ANSWERS
    return CORRECT if letter == reference else WRONG
