"""Verifier of mathematical answers, in killable workers.

`math_extraction` extracts the answer. Equal strings, two integers, two choices, and a word with an integer are compared
here. `formula` reads and compares anything else in workers, once per distinct reference and answer, many in a call: a
message costs more than a comparison. Answers of more than 2,000 characters are incorrect.
"""

import re
from collections.abc import Sequence
from math import inf
from pathlib import Path

from brorl.prompts.prompt import Prompt
from brorl.verdict import CORRECT, NO_ANSWER, TOO_LONG, WRONG, Verdict, is_unverified, verdict_of
from brorl.verification.domains.marked_answer import denial_after
from brorl.verification.domains.math_extraction import extract_answer, tidy
from brorl.verification.sandbox.pool import LoadError, WorkerPool
from brorl.verification.sandbox.replies import Reply
from brorl.verification.verdict_cache import Pair, VerdictCache
from brorl.verification.verifier import TrialResponses

SEVERAL_ANSWERS = "no single answer"
MAX_ANSWER = 2_000
"""Characters of the longest answer that is compared."""
_COMPARE, _CHECK = (f"{Path(__file__).with_name('math_worker.py')}:{name}" for name in ("compare", "check"))
_COMPARING = "brorl.verification.domains.formula.agreement"  # what they import

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_WORD = re.compile(r"(?![iI]+$)[A-Za-z]{1,40}")  # a product of variables; `II` may be i times i
_CHOICE = re.compile(r"[A-J]")
# One letter alone, or one that a bracket, period or colon sets off from what follows; in \text{...} and its kin.
_CHOSEN = re.compile(
    r"(?:\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|boldsymbol)\s*\{)?\s*"
    r"(?:\(([A-Ja-j])\)|([A-Ja-j])[.):]|([A-Ja-j]))(?:(?<=[.):])[\s\\}].*|\s*\}?)"
)
_ANOTHER = re.compile(r"[).:\s]*(?:and\b|or\b|[,/;&])[\s(]*[A-Ja-j](?![A-Za-z])")


class MathVerifier:
    """Accepts answers that are mathematically equal to the reference.

    Args:
        pool: The workers that compare, with a limit of wall time for calls that do not stop on their own.
        cache_size: Number of distinct pairs of reference and answer whose verdicts are kept, 1 or more.
        limit_s: CPU seconds of a comparison, above 0; None for half of the pool's timeout. Unlike wall time it does not
            depend on the load of the machine.
    """

    def __init__(self, pool: WorkerPool, cache_size: int = 200_000, limit_s: float | None = None) -> None:
        self._cache = VerdictCache(cache_size)
        self._pool = pool
        pool.expect(_COMPARING)
        self._limit_s = pool.timeout_s / 2 if limit_s is None else limit_s
        if not self._limit_s > 0:
            raise ValueError(f"limit_s must be above 0, got {limit_s}")

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses. The verdicts of workers are kept, with the timeouts of their CPU time.

        The reasons are `correct`, `wrong answer`, `no answer`, `answer too long`, `no single answer`, `not parsed`,
        `timeout`, `out of memory`, `verifier crashed` and `unverified: ...`.
        """

        def find(prompt: Prompt, response: str) -> Verdict | str:
            answer = extract_answer(response)
            return verify_by_form(prompt.reference, answer) or answer or ""

        def decide(pairs: Sequence[Pair]) -> list[tuple[Verdict, float]]:
            replies = self.compare([(tidy(reference), answer, None) for reference, answer in pairs])
            return [worker_verdict(answer, reply) for (_, answer), reply in zip(pairs, replies, strict=True)]

        return self._cache.verify_all(items, find, decide)

    def compare(self, pairs: Sequence[tuple[str, str, float | None]]) -> list[Reply]:
        """Compare references and answers with a tolerance in workers; see `math_worker.compare`."""
        return self._pool.map(_COMPARE, pairs, self._limit_s)

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find the references that cannot be read, each distinct one once; a LoadError says that workers were lost."""
        doubtful = [r for r in dict.fromkeys(references) if not (_INTEGER.fullmatch(r) or _CHOICE.fullmatch(r))]
        unchecked = [r for r in doubtful if len(r) <= MAX_ANSWER]
        good: set[str] = set()
        for _ in range(2):  # a second time for those that failed on a busy machine
            results = self._pool.map(_CHECK, [tidy(r) for r in unchecked], self._limit_s)
            good |= {reference for reference, result in zip(unchecked, results, strict=True) if result.value is True}
            if lost := [result.failure for result in results if is_unverified(result.failure or "")]:
                raise LoadError(f"cannot check reference answers ({lost[0]}); free memory and processes, then rerun")
            unchecked = [reference for reference, result in zip(unchecked, results, strict=True) if result.failure]
        problem = "cannot be read as a mathematical expression"
        return {reference: problem for reference in doubtful if reference not in good}

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return the references, each in a box."""
        right, *wrong = (text if "\\boxed" in text else f"\\boxed{{{text}}}" for text in (reference, *others))
        return TrialResponses(right, wrong)


def worker_verdict(answer: str, reply: Reply) -> tuple[Verdict, float]:
    """Return the verdict of a worker, and how long to keep it in seconds; failures are not kept."""
    if reply.failure is not None:
        return verdict_of(reply.failure, answer, reply.seconds), 0.0
    return verdict_of(str(reply.value), answer, reply.seconds), inf


def verify_by_form(reference: str, answer: str | None) -> Verdict | None:
    """Return the verdict on a missing or long answer, equal strings, integers, or choices, without mathematics."""
    if answer is None:
        return verdict_of(NO_ANSWER)
    if len(answer) > MAX_ANSWER:
        return verdict_of(TOO_LONG)
    reference = reference.strip()
    equal = answer == reference and any(c.isalnum() for c in answer)
    differ = _INTEGER.fullmatch(reference) and (_INTEGER.fullmatch(answer) or _WORD.fullmatch(answer))
    if not equal and not differ:
        chosen = _CHOSEN.fullmatch(answer) if _CHOICE.fullmatch(reference) else None
        if chosen is None:
            return None
        letter = 1 if chosen[1] else 2 if chosen[2] else 3
        if _ANOTHER.match(answer, chosen.end(letter)) or denial_after(answer[chosen.end(letter) :]):
            return verdict_of(SEVERAL_ANSWERS, answer)
        equal = chosen[letter].upper() == reference
    return verdict_of(CORRECT if equal else WRONG, answer)
