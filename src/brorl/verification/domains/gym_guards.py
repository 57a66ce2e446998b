"""Guards: tests that an answer must pass beside the scorer of its dataset in Reasoning Gym.

Some scorers accept wrong answers, some accept several answers in one, and some evaluate an answer as code. A policy
finds all three. A guard has the reason in one line; `scripts/make_gym_table.py` tests every dataset for more. No guard
evaluates an answer as code.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import isfinite
from typing import Any

from brorl.verification.domains.single_answer import is_several, plain, without_unit

Entry = Mapping[str, Any]
Test = Callable[[str, Entry], bool]

_MAX_FORMULA = 2_000  # characters
_MAX_CONCLUSION = 400  # the parser takes time quadratic in its length
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_FORMULA = re.compile(r"[-+*/()\s0-9A-Za-z.]*")
_ACCESS = re.compile(r"\.[A-Za-z.]|(?<![0-9])\.(?![0-9])")  # a dot that is not of a number
_NAME = re.compile(r"[A-Za-z]+")
_FUNCTIONS = {*_NAME.findall("sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt Abs pi E")}
_PROBABILITY = re.compile(r"[0-9]{1,20}/[0-9]{1,20}|(?:[0-9]{1,20}\.?[0-9]{0,20}|\.[0-9]{1,20})(?:[eE]-[0-9]{1,2})?")
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
_CLOCK = r"\d{1,6}:\d{1,2}(?::\d{1,2}(?:\.\d{1,9})?)?"
_DAYS = r"[-+]?\d{1,9}\s+days?"
_DURATIONS = [re.compile(form) for form in (rf"{_DAYS}|[-+]?\d{{1,9}}", _CLOCK, rf"{_DAYS},\s*{_CLOCK}")]
_SPLIT_NUMBER = re.compile(r"[\d.]\s+[\d.]")
_FRACTION = r"[\s$]*(?:\\d?frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}|[-+]?\d+\s*/\s*[-+]?\d+)[\s$]*"
_HANOI_MOVE = r"(?:\d{1,6}[.)]\s)?\s*Move disk \d{1,6} from Peg \d{1,6} to Peg \d{1,6}\.?"


def _always(_answer: str, _entry: Entry) -> bool:
    return True


@dataclass(frozen=True)
class Guard:
    """What an answer to a dataset must pass beside its scorer."""

    why: str  # the wrong answers that the scorer alone accepts
    admits: Test = _always  # false for an answer that gets no score; it does not reach the scorer
    # false for an answer that cannot be correct. It keeps partial credit, unless its score is that of a correct answer.
    confirms: Test = _always
    minimum: float = 0.99  # the least score of a correct answer


UNGUARDED = Guard("")


def _characters(allowed: str) -> Test:
    """Admit answers of some characters only, none of which can call or access anything."""
    pattern = re.compile(f"[{allowed}]*")
    return lambda answer, _entry: pattern.fullmatch(answer) is not None


def _form(pattern: str) -> Test:
    """Admit answers of one form, with space around it."""
    compiled = re.compile(pattern, re.IGNORECASE)
    return lambda answer, _entry: compiled.fullmatch(answer.strip()) is not None


def _tokens(pattern: str, separator: str = r"\s+") -> Test:
    """Admit answers of which every token has one form."""
    token, between = re.compile(pattern), re.compile(separator)
    return lambda answer, _entry: all(map(token.fullmatch, between.split(answer.strip())))


def _formula(names_of: Callable[[Entry], set[str]]) -> Test:
    """Admit formulas of numbers, the given names, arithmetic and parentheses."""

    def admits(answer: str, entry: Entry) -> bool:
        if len(answer) > _MAX_FORMULA or not _FORMULA.fullmatch(answer) or _ACCESS.search(answer):
            return False
        return set(_NAME.findall(answer)) <= names_of(entry)

    return admits


def _value(node: ast.AST, numbers: list[int]) -> Fraction:
    """Return the value of an arithmetic expression, and append its numbers; any other syntax is a ValueError."""
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            numbers.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, numbers)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            value: Fraction = _OPERATORS[type(sign)](_value(left, numbers), _value(right, numbers))
            return value
    raise ValueError("not an arithmetic expression")


def _makes(target_of: Callable[[Entry], int]) -> Test:
    """Admit expressions that use each given number once and have the target as their exact value."""

    def admits(answer: str, entry: Entry) -> bool:
        numbers: list[int] = []
        try:
            tree = ast.parse(answer.strip()[: _MAX_FORMULA + 1], mode="eval")
            value = _value(tree.body, numbers)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return False
        given = sorted(entry["metadata"]["numbers"])
        return len(answer) <= _MAX_FORMULA and value == target_of(entry) and sorted(numbers) == given

    return admits


def _same(normal: Callable[[str], object]) -> Test:
    """Confirm answers that equal the oracle's after a normalization."""
    return lambda answer, entry: normal(answer) == normal(str(entry["answer"]))


def _json_or_none(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _close_probability(answer: str, entry: Entry) -> bool:
    """Whether a probability is right to a hundredth of itself; the scorer's 0.0001 takes small ones for 0."""
    if not _PROBABILITY.fullmatch(answer.strip()):
        return False
    try:
        right = Fraction(entry["answer"])
        return abs(Fraction(answer.strip()) - right) <= right / 100
    except (ValueError, ZeroDivisionError):
        return False


def _finite(answer: str, _entry: Entry) -> bool:
    return "nan" not in answer.replace(" ", "").lower() and not _SPLIT_NUMBER.search(answer)


def _one_duration(answer: str, entry: Entry) -> bool:
    """Whether an answer is one duration of the oracle's form: days, a clock time, or both."""
    right = str(entry["answer"]).strip()
    return any(form.fullmatch(answer.strip()) and form.fullmatch(right) for form in _DURATIONS)


def _sorted_numbers(answer: str, entry: Entry) -> bool:
    listed = _json_or_none(answer.replace("'", '"'))
    try:
        values = [float(value) for value in listed] if isinstance(listed, list) else []
    except (TypeError, ValueError, OverflowError):
        return False
    return all(map(isfinite, values)) and values == [float(value) for value in entry["metadata"]["sorted_numbers"]]


def _one_number(answer: str, entry: Entry) -> bool:
    text = plain(answer.strip(" .*"))
    value = without_unit(text, is_number=True)
    if is_several("", text) or not _NUMBER.fullmatch(value):
        return False
    return float(value.replace(",", "")) == float(entry["answer"])


def _same_count_of_commas(answer: str, entry: Entry) -> bool:
    return answer.count(",") == str(entry["answer"]).count(",")


def _assigns_each_name_once(answer: str, _entry: Entry) -> bool:
    """Whether an answer of the form `A=1,B=2` names no letter twice."""
    names = [pair.partition("=")[0].strip() for pair in answer.split(",")]
    return len(set(names)) == len(names)


def _no_longer(answer: str, entry: Entry) -> bool:
    """Whether an answer has no more characters than the oracle's."""
    return len(answer.strip()) <= len(entry["answer"])


def _as_many_numbers(answer: str, entry: Entry) -> bool:
    """Whether a list has as many numbers as the oracle's, at least one, and nothing else."""
    try:
        numbers = [float(part) for part in answer.split(",")]
    except ValueError:
        return False
    right = str(entry["answer"] or "")
    return bool(right) and all(map(isfinite, numbers)) and len(numbers) == len(right.split(","))


def _states_roles_alone(answer: str, entry: Entry) -> bool:
    """Whether an answer has as many words as the oracle's, without `is`, `a`, `an` and `and`."""

    def words(text: str) -> list[str]:
        return [
            word for word in re.sub(r"[.,()]", " ", text.casefold()).split() if word not in ("is", "a", "an", "and")
        ]

    return len(words(answer)) == len(words(str(entry["answer"])))


def _new_conclusion(answer: str, entry: Entry) -> bool:
    """Whether a conclusion is not equivalent to one of its premises."""
    from reasoning_gym.logic.propositional_logic import Expression

    names = sorted(entry["metadata"]["variables"])
    if len(answer) > _MAX_CONCLUSION or not re.search("[A-Z]", answer):
        return False
    worlds = [dict(zip(names, values, strict=True)) for values in product((False, True), repeat=len(names))]

    def table(text: str) -> list[bool]:
        expression = Expression.from_string(text)
        return [bool(expression.evaluate(world)) for world in worlds]

    try:
        truth = table(answer)
    except (ValueError, KeyError, AttributeError, RecursionError):
        return False
    return all(truth != table(premise) for premise in entry["metadata"]["premises"])


def _variables(entry: Entry) -> set[str]:
    """Return the names of an integral's answer: its variable, the constant and elementary functions."""
    return {entry["metadata"]["variable"], "C", *_FUNCTIONS}


_NEAR = "an answer near the right one scores 0.99 or more"
_TAIL = "the right answer with anything after it scores 1"
_WORDS = "the right answer with other words in it scores 1"
_CODE = "the scorer evaluates the answer as code"

GUARDS: dict[str, Guard] = {
    "advanced_geometry": Guard(_TAIL, _same_count_of_commas),
    "binary_matrix": Guard(_CODE, _characters(r"-0-9\s,\[\]")),
    "calendar_arithmetic": Guard(_NEAR, minimum=1.0),
    "codeio": Guard(_NEAR, minimum=1.0),
    "coin_flip": Guard("0 and the first digits of the right answer score 1", _close_probability),
    "complex_arithmetic": Guard("nan scores 1, and spaces in a number are removed", _finite),
    "countdown": Guard(
        f"{_CODE}; functions are accepted, and values near the target",
        _makes(lambda entry: int(entry["metadata"]["target"])),
    ),
    "cryptarithm": Guard("of several digits of a letter the last one counts", _assigns_each_name_once),
    "emoji_mystery": Guard(_NEAR, minimum=1.0),
    "figlet_font": Guard(
        "ten right letters score 1, however many are wrong",
        confirms=_same(lambda text: text.replace(" ", "").strip().lower()),
    ),
    "fraction_simplification": Guard(_TAIL, _form(_FRACTION)),
    "game_of_life": Guard(_NEAR, confirms=_same(_json_or_none), minimum=1.0),
    "game_of_life_halting": Guard("any answer scores 1", _same(lambda text: text.strip().lower())),
    "gsm_symbolic": Guard(
        "the first number of an answer counts, without its sign and the words around it", confirms=_one_number
    ),
    "intermediate_integration": Guard(f"{_CODE}; Integral(f, x) of the question scores 1", _formula(_variables)),
    "kakurasu": Guard(_WORDS, _characters(r"01\s,\[\]")),
    "knights_knaves": Guard(_WORDS, _states_roles_alone),
    "letter_jumble": Guard(_TAIL, confirms=_same(lambda text: text.lower().split())),
    "n_queens": Guard(_CODE, _characters(r"Q_\s,'\"\[\]")),
    "number_sorting": Guard("numbers off by one score 1, and so does a list of NaN", _sorted_numbers),
    "polynomial_equations": Guard(
        f"without a real solution, any text without a number scores 1; {_WORDS}", _as_many_numbers
    ),
    "polynomial_multiplication": Guard(
        f"{_CODE}; expand(...) of the question scores 1",
        _formula(lambda entry: set(_NAME.findall(str(entry["answer"])))),
    ),
    "propositional_logic": Guard("a copied premise scores 1", _new_conclusion),
    "puzzle24": Guard(f"{_CODE}; the given numbers need not be used", _makes(lambda _entry: 24)),
    "quantum_lock": Guard(_WORDS, _form(r"[A-C](?:[\s,>→-]*[A-C])*")),
    "rubiks_cube": Guard(_WORDS, _tokens(r"[A-Za-z]{1,2}'?[0-9]{0,6}")),
    "rush_hour": Guard(_WORDS, _tokens(r"[A-Z][-+][0-9]{1,6}", r"[\s,]+")),
    "simple_integration": Guard(f"{_CODE}; Integral(f, x) of the question scores 1", _formula(_variables)),
    "sokoban": Guard(_WORDS, _form(r"[UDLR]+")),
    "spell_backward": Guard(
        "the right answer with anything after it scores 0.8 or 1",
        admits=_no_longer,
        confirms=_same(lambda text: text.lower()),
    ),
    "spiral_matrix": Guard(_CODE, _characters(r"-0-9\s,\[\]")),
    "string_insertion": Guard(_CODE, _characters(r"A-Z\s,'\"\[\]")),
    "survo": Guard(_WORDS, _characters(r"0-9\s")),
    "time_intervals": Guard(f"{_NEAR}; {_TAIL}", _one_duration, minimum=1.0),
    "tower_of_hanoi": Guard(_WORDS, _tokens(_HANOI_MOVE, r"\s*\n\s*")),
    "word_sorting": Guard(_TAIL, confirms=_same(lambda text: [word.strip() for word in text.split(",")])),
}

EVALUATED = frozenset(name for name, guard in GUARDS.items() if guard.why.startswith(_CODE))
"""Datasets whose scorers evaluate answers as code."""
