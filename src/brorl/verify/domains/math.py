r"""Verifier of mathematical answers, by math-verify in killable workers.

In: prompts whose reference is the right answer, as LaTeX or plain text, and responses. Out: verdicts. The answer is
extracted by `math_extraction`; equal strings, two integers and two choices are compared here, anything else by
math-verify in a worker, once per distinct reference and answer. It refuses answers that are longer than 2,000
characters, and judges no derivation.
"""

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from brorl.prompts.prompt import Prompt
from brorl.verify.domains.math_extraction import extract_answer, tidy
from brorl.verify.sandbox.pool import Job, WorkerPool
from brorl.verify.verifier import CORRECT, NO_ANSWER, WRONG, Verdict

MATH_DOMAIN = "math"
TOO_LONG = "answer too long"

_MAX_ANSWER = 2_000
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_CHOICE = re.compile(r"[A-J]")
# One letter alone, or one that a bracket, full stop or colon sets off from what follows; in \text{...} and its kin.
_CHOSEN = re.compile(
    r"(?:\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|boldsymbol)\s*\{)?\s*"
    r"(?:\(([A-Ja-j])\)|([A-Ja-j])[.):]|([A-Ja-j]))(?:(?<=[.):])[\s\\}].*|\s*\}?)"
)
_JUDGE, _CHECK = (f"{Path(__file__).with_name('math_worker.py')}:{name}" for name in ("judge", "check"))


class MathVerifier:
    """Judges answers by mathematical equality.

    Args:
        pool: Where math-verify runs. Its own limit, in wall time, is for what does not stop by itself.
        cache_size: Number of distinct pairs of reference and answer whose verdicts are remembered, 1 or more.
        limit_s: Time of a core after which math-verify stops by itself in seconds, above 0; None for half of the
            pool's timeout. Other than wall time it does not depend on what else the machine does.

    Raises:
        ValueError: If there is no room for a verdict, or no time for one.
    """

    def __init__(self, pool: WorkerPool, cache_size: int = 200_000, limit_s: float | None = None) -> None:
        if cache_size < 1:
            raise ValueError(f"cache_size must be 1 or more, got {cache_size}")
        self._pool = pool
        self._limit_s = pool.timeout_s / 2 if limit_s is None else limit_s
        if not self._limit_s > 0:
            raise ValueError(f"limit_s must be above 0, got {limit_s}")
        self._cache_size = cache_size
        self._remembered: OrderedDict[tuple[str, str], Verdict] = OrderedDict()

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Judge responses.

        Args:
            items: Pairs of a prompt, whose reference is the right answer, and a response.

        Returns:
            One verdict per pair, in the same order, with the reason `correct`, `wrong answer`, `no answer`, `answer too
            long`, `not parsed`, `timeout`, `out of memory` or `verifier crashed`. What math-verify said is
            remembered, its running out of its own time included; what a busy machine did to a worker is not.
        """
        verdicts: list[Verdict | None] = []
        unknown: dict[tuple[str, str], list[int]] = {}
        for place, (prompt, response) in enumerate(items):
            answer = extract_answer(response)
            verdict = judge_by_form(prompt.reference, answer) or self._recall(prompt.reference, answer)
            verdicts.append(verdict)
            if verdict is None and answer is not None:
                unknown.setdefault((prompt.reference, answer), []).append(place)
        for pair, (verdict, lasting) in zip(unknown, self._ask(list(unknown)), strict=True):
            again = replace(verdict, seconds=0.0)
            if lasting:
                self._remember(pair, again)
            for place in unknown[pair]:
                verdicts[place] = verdict if place == unknown[pair][0] else again
        return [verdict for verdict in verdicts if verdict is not None]

    def check_references(self, references: Sequence[str]) -> list[str]:
        """Find the references with which no answer can be compared.

        Args:
            references: Right answers, of any number; each distinct one is looked at once.

        Returns:
            Those that math-verify cannot parse, in order and without repetition.
        """
        doubtful = [r for r in dict.fromkeys(references) if not (_INTEGER.fullmatch(r) or _CHOICE.fullmatch(r))]
        short = [r for r in doubtful if len(r) <= _MAX_ANSWER]
        good: set[str] = set()
        for _ in range(2):  # again for those that a busy machine did not let finish
            results = self._pool.run([Job(_CHECK, (tidy(r), self._limit_s)) for r in short])
            good |= {reference for reference, result in zip(short, results, strict=True) if result.value is True}
            short = [reference for reference, result in zip(short, results, strict=True) if result.failure]
        return [reference for reference in doubtful if reference not in good]

    def _ask(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[Verdict, bool]]:
        """Have workers compare references and answers; tell for each verdict whether it would be the same next time."""
        jobs = [Job(_JUDGE, (tidy(reference), answer, self._limit_s)) for reference, answer in pairs]
        verdicts = []
        for (_, answer), result in zip(pairs, self._pool.run(jobs), strict=True):
            correct = result.failure is None and bool(result.value["correct"])
            reason = result.failure or str(result.value["reason"])
            verdict = Verdict(correct, float(correct), answer, reason, result.seconds)
            verdicts.append((verdict, result.failure is None))
        return verdicts

    def _recall(self, reference: str, answer: str | None) -> Verdict | None:
        if answer is None or (reference, answer) not in self._remembered:
            return None
        self._remembered.move_to_end((reference, answer))
        return self._remembered[reference, answer]

    def _remember(self, pair: tuple[str, str], verdict: Verdict) -> None:
        """Keep a verdict for the next time, when it costs nothing."""
        self._remembered[pair] = verdict
        if len(self._remembered) > self._cache_size:
            self._remembered.popitem(last=False)


def judge_by_form(reference: str, answer: str | None) -> Verdict | None:
    """Judge what needs no mathematics, always as math-verify would.

    Args:
        reference: The right answer.
        answer: The extracted answer, None if there is none.

    Returns:
        A verdict for a missing or too long answer, for equal strings, for two integers and for two choices; else None.
    """
    if answer is None:
        return Verdict(False, 0.0, None, NO_ANSWER, 0.0)
    if len(answer) > _MAX_ANSWER:
        return Verdict(False, 0.0, None, TOO_LONG, 0.0)
    reference = reference.strip()
    equal = answer == reference and any(c.isalnum() for c in answer)
    if not equal and not (_INTEGER.fullmatch(reference) and _INTEGER.fullmatch(answer)):
        chosen = _CHOSEN.fullmatch(answer) if _CHOICE.fullmatch(reference) else None
        if chosen is None:
            return None
        equal = (chosen[1] or chosen[2] or chosen[3]).upper() == reference
    return Verdict(equal, float(equal), answer, CORRECT if equal else WRONG, 0.0)
