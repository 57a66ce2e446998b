"""Verifier of scientific answers: multiple choice, numbers with units, formulas.

A reference is the text of `Choices`, the text of `MeasuredAnswer`, or the answer as LaTeX or plain text. Options are
compared here, and so are numbers that are written with digits, exactly, with their units converted. A worker compares
anything else as the verifier of mathematics does.

Two numbers agree if their difference is at most the tolerance times the reference; the tolerance is at least a
millionth. Whole numbers without a unit and a tolerance must be equal. An answer without a unit is read in the unit of
the reference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from brorl.prompts.prompt import Prompt
from brorl.prompts.science import Choices, MeasuredAnswer, read_science_reference
from brorl.verdict import CORRECT, NO_ANSWER, TOO_LONG, WRONG, Verdict, verdict_of
from brorl.verification.domains.chemistry import same_chemistry
from brorl.verification.domains.choice import choose
from brorl.verification.domains.math import MAX_ANSWER, MathVerifier, worker_verdict
from brorl.verification.domains.math_extraction import extract_answer, tidy
from brorl.verification.domains.quantity import Quantity, read_quantity, sides_of_quantity
from brorl.verification.domains.single_answer import SEVERAL_ANSWERS, is_several, plain
from brorl.verification.domains.units import Conversion, conversions, parse_unit, without_markup
from brorl.verification.domains.wording import (
    as_one_answer,
    beside_the_value,
    in_figures,
    is_direction,
    same_words,
    with_whole_box,
)
from brorl.verification.sandbox.pool import WorkerPool
from brorl.verification.verdict_cache import Pair, VerdictCache
from brorl.verification.verifier import TrialResponses, malformed

ROUNDING = Fraction(1, 1_000_000)
"""The least relative tolerance of numbers that are not both whole."""

_DEGREE, _RADIAN = parse_unit("°"), parse_unit("rad")
_TEMPERATURE = {"C": parse_unit("°C"), "F": parse_unit("°F")}
_COMMAND = re.compile(r"\\(?!text|mathrm|rm\b)[a-zA-Z]+")
_CONSTANT = re.compile(r"(?<![a-zA-Z])(?:pi|e|sqrt|exp|ln|log)(?![a-zA-Z])")
_RATIO = re.compile(r"\s*(?::|\bto\b|\\colon\b)\s*")
_RANGE = re.compile(r"\s*(?:\bto\b|--?|\u2013|\u2014)\s*|\s+and\s+")
_BOUNDS = re.compile(r"^(?:from|between)\s+", re.IGNORECASE)


def same_kind(right: Quantity, given: Quantity) -> bool:
    """Whether an answer has a unit that converts to the reference's, or none, and no other words."""
    if right.words is not None:
        # `15` answers `15 apples`, and `40 g` answers `40 g of NaOH`, but `5 m/s` does not answer `5 m/s east`.
        bare = given.words is None and (given.unit is None) == (right.unit is None) and not is_direction(right.words)
        if given.words != right.words and not bare:
            return False
    elif given.words is not None:
        counted = right.unit is None and given.unit is None and given.words.replace(" ", "").isalpha()
        if not counted and not beside_the_value(given.words):
            return False
    if right.unit is None or given.unit is None:
        words = _CONSTANT.sub("", _COMMAND.sub("", given.text))
        return right.unit is None or not any(character.isalpha() for character in words)
    return bool(_conversions(right, given))


def agree(right: Quantity, given: Quantity, tolerance: float) -> bool:
    """Whether two numbers agree after a conversion, within a relative tolerance."""
    if right.number is None or given.number is None:
        return False
    whole = right.number.denominator == given.number.denominator == 1
    if whole and tolerance == 0 and right.unit is None and given.unit is None:
        return right.number == given.number
    for conversion in _conversions(right, given):
        relative = max(Fraction(tolerance), ROUNDING, conversion.slack)
        if abs(conversion.of(given.number) - right.number) <= relative * abs(right.number):
            return True
    return False


def factor_of(right: Quantity, given: Quantity) -> Fraction | None:
    r"""Return the factor of an expression's value in the reference's unit; None if it cannot be converted by one.

    An angle without a unit is in radians if it has a `\pi`.
    """
    unit = right.unit or given.unit
    if unit in (_DEGREE, _RADIAN) and (right.unit is None or given.unit is None):
        assert unit is not None
        if right.unit is None:
            return unit.factor if "\\pi" in right.text else Fraction(1)
        return 1 / unit.factor if "\\pi" in given.text else Fraction(1)
    found = _conversions(right, given)[0]
    return None if found.shift else found.factor


def _conversions(right: Quantity, given: Quantity) -> list[Conversion]:
    """Return how the number of an answer can be read in the unit of the reference."""
    if right.unit is None or given.unit is None:
        unit, found = right.unit or given.unit, [Conversion(Fraction(1))]
        if unit is not None and not any(unit.dimension):  # `50%` is 50 and 0.5
            found.append(Conversion(1 / unit.factor if right.unit else unit.factor))
        return found
    if _TEMPERATURE.get(given.unit_text) in right.units:  # `25 C`
        return [Conversion(Fraction(1))]
    return [found for unit in given.units for wanted in right.units for found in conversions(unit, wanted)]


class _Ends(NamedTuple):
    """The parts of a ratio, or the two ends of a range."""

    is_ratio: bool
    parts: list[Quantity]


def same_range(reference: str, answer: str) -> bool | None:
    """Whether an answer is the range or the ratio of a reference that is one; None for another reference."""
    right = _ends(reference, is_ratio=":" in reference)
    if right is None:
        return None
    given = _ends(answer, right.is_ratio)
    if given is None or len(right.parts) != len(given.parts):
        return False
    pairs = list(zip(right.parts, given.parts, strict=True))
    if not right.is_ratio:
        return all(same_kind(*pair) and agree(*pair, 0.0) for pair in pairs)
    numbers = [(a.number, b.number) for a, b in pairs if a.number is not None and b.number is not None]
    first = numbers[0]
    return len(numbers) == len(pairs) and all(a * first[1] == b * first[0] for a, b in numbers)


def _ends(text: str, is_ratio: bool) -> _Ends | None:
    """Return the parts of a ratio or a range; a unit at its end is that of both ends."""
    plain = _BOUNDS.sub("", without_markup(text))
    texts = (_RATIO if is_ratio else _RANGE).split(plain)
    if (
        len(texts) < 2
        or (len(texts) > 2 and not is_ratio)
        or not all(part[:1].isdigit() or part[:1] == "." for part in texts)
    ):
        return None
    parts = [read_quantity(part) for part in texts]
    if is_ratio:
        return _Ends(is_ratio, parts) if all(part.unit is None and part.words is None for part in parts) else None
    low, high = parts
    if low.number is None or high.number is None or (low.number >= high.number and low.unit is None):
        return None
    low = low._replace(units=low.units or high.units, unit_text=low.unit_text or high.unit_text)
    return _Ends(is_ratio, [low, high._replace(units=high.units or low.units)])


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
