"""Verifier of scientific answers: multiple choice, numbers with units, formulas.

A reference is the text of `Choices`, the text of `MeasuredAnswer`, or the answer as LaTeX or plain text. Options are
compared here, and so are numbers that are written with digits, exactly, with their units converted. A worker compares
anything else as the verifier of mathematics does.

Two numbers agree if their difference is at most the tolerance times the reference; the tolerance is at least a
millionth. Whole numbers without a unit and a tolerance must be equal. An answer without a unit is read in the unit of
the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from brorl.prompts.prompt import Prompt
from brorl.prompts.science import Choices, MeasuredAnswer, read_science_reference
from brorl.verdict import CORRECT, NO_ANSWER, TOO_LONG, WRONG, Verdict, verdict_of
from brorl.verification.domains.chemistry import same_chemistry
from brorl.verification.domains.choice import choose
from brorl.verification.domains.math import MAX_ANSWER, MathVerifier, worker_verdict
from brorl.verification.domains.math_extraction import extract_answer, tidy
from brorl.verification.domains.measured import ROUNDING, agree, factor_of, same_kind, same_range
from brorl.verification.domains.quantity import Quantity, read_quantity, sides_of_quantity
from brorl.verification.domains.single_answer import SEVERAL_ANSWERS, is_several, plain
from brorl.verification.domains.wording import (
    as_one_answer,
    in_figures,
    same_words,
    with_whole_box,
)
from brorl.verification.sandbox.pool import WorkerPool
from brorl.verification.verdict_cache import Pair, VerdictCache
from brorl.verification.verifier import TrialResponses, malformed

OTHER_UNIT = "another unit"

Call = tuple[str, str, float]  # reference, answer, tolerance


class ScienceVerifier:
    """Accepts the right option, or an answer that equals the reference.

    Args:
        pool: The workers that compare formulas.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._math = MathVerifier(pool)
        self._cache = VerdictCache(200_000)

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses. The verdicts of workers are kept, with the timeouts of their CPU time.

        The reasons of multiple choice are `correct`, `wrong answer`, `no answer`, `not an option` and `several
        options`. Those of other answers are the first three, `no single answer`, `another unit`, `answer too long`,
        `not parsed`, `timeout`, `out of memory` and `verifier crashed`.
        """
        calls: dict[Pair, Call] = {}

        def find(prompt: Prompt, response: str) -> Verdict | str:
            reference = read_science_reference(prompt.reference)
            if isinstance(reference, Choices):
                return _choose(reference, response)
            measured = _read(reference.value)
            answer = extract_answer(with_whole_box(response), with_unit=bool(measured.units or measured.words))
            if answer is None or len(answer) > MAX_ANSWER:
                return verdict_of(NO_ANSWER if answer is None else TOO_LONG)
            compared = _compare(reference, answer)
            if isinstance(compared, str):
                return verdict_of(compared, answer)
            calls[prompt.reference, answer] = compared
            return answer

        def decide(pairs: Sequence[Pair]) -> list[tuple[Verdict, float]]:
            replies = self._math.compare([calls[pair] for pair in pairs])
            return [worker_verdict(answer, reply) for (_, answer), reply in zip(pairs, replies, strict=True)]

        return self._cache.verify_all(items, find, decide)

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find references that are malformed, or that cannot be read as an expression."""
        problems = malformed(references, read_science_reference)
        expressions: dict[str, str] = {}
        for reference in (text for text in references if text not in problems):
            read = read_science_reference(reference)
            if isinstance(read, MeasuredAnswer) and _read(read.value).number is None:
                expressions[reference] = _read(read.value).text
        unread = self._math.check_references(list(expressions.values()))
        problems |= {reference: unread[text] for reference, text in expressions.items() if text in unread}
        return {reference: problems[reference] for reference in references if reference in problems}

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return the right answer in a box, and other answers."""
        read = read_science_reference(reference)
        if isinstance(read, Choices):
            right, wrong = read.letter, [letter for letter in read.letters if letter != read.letter]
        else:
            answers = [other for other in map(read_science_reference, others) if isinstance(other, MeasuredAnswer)]
            right, wrong = read.value, [other.value for other in answers]
        return TrialResponses(f"\\boxed{{{right}}}", [f"\\boxed{{{text}}}" for text in wrong])


def _choose(choices: Choices, response: str) -> Verdict:
    option, text, problem = choose(response, choices)
    return verdict_of(problem or (NO_ANSWER if option is None else CORRECT if option == choices.right else WRONG), text)


@lru_cache(maxsize=4096)
def _read(value: str) -> Quantity:
    return read_quantity(in_figures(tidy(value)))


def _compare(reference: MeasuredAnswer, answer: str) -> str | Call:
    """Return the reason of the verdict, or the call of a worker."""
    value, answer = in_figures(tidy(reference.value)), in_figures(answer)
    if answer == value and any(character.isalnum() for character in answer):
        return CORRECT
    same = same_chemistry(value, answer)
    same = same_words(value, answer) if same is None else same
    same = same_range(value, answer) if same is None else same
    if same is not None:
        return CORRECT if same else WRONG
    answer = as_one_answer(answer)
    if is_several(plain(value), plain(answer)):
        return SEVERAL_ANSWERS
    right, given = _read(value), [read_quantity(side) for side in sides_of_quantity(answer)]
    if not all(same_kind(right, side) for side in given):
        return OTHER_UNIT
    if right.number is not None and all(side.number is not None for side in given):
        return CORRECT if all(agree(right, side, reference.tolerance) for side in given) else WRONG
    factor = factor_of(right, given[-1])
    if factor is None:
        return WRONG
    text = "=".join(side.text for side in given)
    if factor != 1:
        text = f"({given[-1].text}) \\cdot \\frac{{{factor.numerator}}}{{{factor.denominator}}}"
    return right.text, text, max(reference.tolerance, float(ROUNDING))
