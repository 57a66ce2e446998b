"""Judges answers to Reasoning Gym tasks whose scorer is too lenient or too strict. Never evaluates an answer as code.

Most datasets have one right answer, which is compared by value in any common notation: `5`, `5 times`, `2 + 3 = 5`. If
several answers are right, a guard rejects wrong answers that the scorer alone would accept.
`scripts/make_gym_table.py` tests every dataset.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from itertools import chain, product
from typing import Any

from brorl.verification.domains.marked_answer import writings
from brorl.verification.gym.task import GymTask

_NUMBER = re.compile(r"[-+]?(?:\$|\u00a3|\u20ac|\\\$)?(\d{1,3}(?:,\d{3})+|\d+)(\.\d*)?([eE][-+]?\d{1,3})?")
_STATEMENT = re.compile(
    r"(?:(?P<left>[\w\s+*/().,'\u00d7\u00b7\u00f7-]{1,80}?)\s*(?:=|\bis\b:?|\bare\b|\bequals\b)\s*)?"
    r"(?P<number>[-+$\u2212\d][\d.,]*(?:[eE][-+]?\d+)?)(?:\s+[A-Za-z]{2,20})?"
)
_NO_STATEMENT = re.compile(
    r"\b(?:not|no|never|nor|neither|may|might|could|would|should|can|cannot|maybe|perhaps|possibly|probably|likely|unlikely|doubt|"
    r"think|guess|or|and|but|if|unless|wrong|incorrect|false|hardly|either|whether|less|more|than|least|most|between|except|"
    r"hundreds?|thousands?|millions?|billions?|dozens?|half|halves|percent|plus|minus|over|ish|about|nearly|almost|"
    r"approximately|around|untrue|invalid|mod|squared|cubed|factorial)\b|n['\u2019]t\b",
    re.IGNORECASE,
)
_OWN_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?")
_MAX_STATEMENT_LENGTH, _MAX_JSON_LENGTH = 200, 20_000  # characters


def is_own_answer(answer: str, task: GymTask) -> bool:
    """Return whether an answer, in any of its notations, matches the dataset's."""
    if task.answer is None or not task.answer.strip():
        return False
    same = _SAME.get(task.data_set, _same)
    return any(same(form, task.answer.strip()) for form in writings(answer))


def _same(answer: str, right: str) -> bool:
    """Return whether two strings are equal as words, a number, JSON or rows."""
    if _folded(answer, right) == _folded(right, right):
        return True
    if _OWN_NUMBER.fullmatch(right):
        number = _stated_number(answer)
        return number is not None and number == Decimal(right)
    if right[:1] in "[{":
        right_value, value = _json(right), _json(answer)
        return right_value is not None and value is not None and _equal(value, right_value)
    return False


def _folded(text: str, right: str) -> str:
    """Collapse the spaces in each row, and lowercase unless the right answer has a letter in both cases."""
    rows = (re.sub(r" ?, ?", ", ", " ".join(row.split())) for row in text.splitlines())
    joined = "\n".join(row for row in rows if row)
    both = any(letter.isupper() and letter.lower() in right for letter in set(right))
    return joined if both else joined.casefold()


def _stated_number(text: str) -> Decimal | None:
    """Return the number in `5`, `5 times`, `2 + 3 = 5` or `The sum is 5`; None for anything else."""
    if len(text) > _MAX_STATEMENT_LENGTH:
        return None
    stated = _STATEMENT.fullmatch(text) if not _NO_STATEMENT.search(text) else None
    if stated is None:
        return _number(text)
    number = _number(stated["number"])
    return None if stated["left"] and _number(stated["left"].strip()) not in (None, number) else number


def _number(text: str) -> Decimal | None:
    match = _NUMBER.fullmatch(text.replace("\N{MINUS SIGN}", "-").strip())
    with suppress(InvalidOperation):
        return Decimal(re.sub(r"[^-+\d.eE]", "", match[0])) if match else None
    return None


def _json(text: str) -> Any:
    """Parse JSON, even with single quotes or Python's True, False and None; None for anything else."""
    if len(text) > _MAX_JSON_LENGTH:
        return None
    plain = text.replace("'", '"').replace("True", "true").replace("False", "false").replace("None", "null")
    for version in (text, plain):
        try:
            return json.loads(version)
        except (ValueError, RecursionError):
            continue
    return None


def _equal(value: Any, right: Any) -> bool:
    """Return whether two JSON values are equal. 5 equals "5"."""
    if isinstance(right, list) and isinstance(value, list):
        return len(right) == len(value) and all(map(_equal, value, right))
    if isinstance(right, dict) and isinstance(value, dict):
        return right.keys() == value.keys() and all(_equal(value[key], right[key]) for key in right)
    if isinstance(right, bool) or isinstance(value, bool) or right is None or value is None:
        return type(right) is type(value) and right == value
    if isinstance(right, list | dict) or isinstance(value, list | dict):
        return False
    number, right_number = _number(str(value)), _number(str(right))
    return number == right_number if number is not None and right_number is not None else str(value) == str(right)


def _equal_as(read: Callable[[str], Any]) -> Callable[[str, str], bool]:
    """Return a test that compares two strings by the values that `read` returns. Unreadable strings never match."""
    return lambda answer, right: (value := read(right)) is not None and read(answer) == value


def _lists(key: Callable[[Any], Any]) -> Callable[[str], list[Any] | None]:
    """Return a reader for a list of lists whose order does not matter. `key` normalizes each inner list."""

    def read(text: str) -> list[Any] | None:
        value = _json(text)
        is_read = isinstance(value, list) and all(isinstance(item, list) for item in value)
        return sorted(map(key, value)) if is_read else None

    return read


def _rounded_to(decimals: int, in_order: bool = True) -> Callable[[str, str], bool]:
    """Return a test that compares numbers, in rows or a list, rounded to this many decimal places."""

    def numbers(text: str) -> list[list[Fraction]] | None:
        rows = [re.split(r"[\s,]+", row.strip(" ()\u00b0")) for row in text.strip().splitlines()]
        read = [[_number(cell.rstrip("\u00b0")) for cell in row] for row in rows]
        if any(value is None for row in read for value in row):
            return None
        return [[Fraction(value) for value in row if value is not None] for row in read]

    def same(answer: str, right: str) -> bool:
        rows, right_rows = numbers(re.sub(r"\^?\{?\\(?:circ|degree)\}?|degrees?", "", answer)), numbers(right)
        if rows is None or right_rows is None or list(map(len, rows)) != list(map(len, right_rows)):
            return False
        if not in_order:
            rows, right_rows = list(map(sorted, rows)), list(map(sorted, right_rows))
        pairs = zip(chain.from_iterable(rows), chain.from_iterable(right_rows), strict=True)
        return all(abs(a - b) <= Fraction(501, 1000 * 10**decimals) for a, b in pairs)

    return same


def _same_probability(answer: str, right: str) -> bool:
    """Return whether an answer is the right fraction, or that fraction as a decimal rounded to four or more digits."""
    right_value = Fraction(right)
    fraction = re.fullmatch(r"(?:\\d?frac\{)?(\d{1,40})(?:/|\}\{)(\d{1,40})\}?", answer.replace(" ", ""))
    if fraction:
        return int(fraction[2]) > 0 and Fraction(int(fraction[1]), int(fraction[2])) == right_value
    percent = answer.endswith("%")
    bare = answer.removesuffix("%").removesuffix("\\").strip()
    number = _number(f"0{bare}" if bare.startswith(".") else bare)
    if number is None:
        return False
    value = Fraction(number) / (100 if percent else 1)
    digits = len(number.as_tuple().digits)
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    unit = Fraction(10) ** (exponent - (2 if percent else 0))
    return value == right_value or (digits >= 4 and abs(value - right_value) <= unit * 501 / 1000)


def _three_digits(text: str) -> str | None:
    number = _number(re.sub(r" ?(?:\\times|\u00d7|x) ?10\^\{?([-+]?\d{1,3})\}?$", r"e\1", text))
    return None if number is None else f"{number:.2e}"


def _complex(text: str) -> complex | None:
    """Parse `3 - 2i`, `(3-2*j)`, or only one of the two parts; None for anything else."""
    if len(text) > _MAX_STATEMENT_LENGTH or re.search(r"[\d.]\s+[\d.]", text):  # `1 2` is not 12
        return None
    bare = re.sub(r"\*?[ij](?=\)?$)", "j", "".join(text.split())).replace("\N{MINUS SIGN}", "-")
    with suppress(ValueError):
        return complex(bare)
    return None


def _factors(text: str) -> list[str]:
    text = re.sub(r"^\s*\d+\s*=", "", text) if len(text) <= _MAX_STATEMENT_LENGTH else ""
    return sorted(re.split(r"\s*(?:\u00d7|\*|\bx\b|\\times|\\cdot|\u00b7)\s*", text.strip()))


def _fraction(text: str) -> tuple[str, str] | None:
    match = re.fullmatch(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+)", re.sub(r"[\s$]", "", text))
    return (match[1] or match[3], match[2] or match[4]) if match else None


def _roles(text: str) -> list[tuple[str, str]] | None:
    """Parse (name, role) pairs in any order: `Ann is a knight and Bob is a knave`; None for anything else."""
    words = [
        word for word in re.sub(r"[.,;:()=\n]", " ", text.casefold()).split() if word not in ("is", "a", "an", "and")
    ]
    return sorted(zip(words[::2], words[1::2], strict=True)) if len(words) % 2 == 0 else None


_DURATION = re.compile(
    r"(?:(?P<days>[-+]?\d{1,9})(?:\s*days?|$))?(?:(?<=s),\s*|(?<=y),\s*)?(?P<clock>\d{1,6}:\d{1,2}(?::\d{1,2}(?:\.\d{1,9})?)?)?"
)


def _duration(text: str) -> tuple[bool, bool, int, list[Fraction]] | None:
    """Parse `2 days, 03:15:00` or a part of it into (no days, no clock, days, [hours, minutes, seconds]), else None."""
    match = _DURATION.fullmatch(text.strip())
    days, clock = (match["days"], match["clock"]) if match else (None, None)
    if not (days or clock) or (days and clock and "," not in text):
        return None
    parts = [Fraction(part) for part in (clock or "0").split(":")]
    return days is None, clock is None, int(days or 0), [*parts, *[Fraction(0)] * (3 - len(parts))]


_SAME: Mapping[str, Callable[[str, str], bool]] = {
    "advanced_geometry": _rounded_to(3),
    "coin_flip": _same_probability,
    "complex_arithmetic": _equal_as(_complex),
    "fraction_simplification": _equal_as(_fraction),
    "group_anagrams": _equal_as(_lists(lambda words: sorted(map(str, words)))),
    "knights_knaves": _equal_as(_roles),
    "palindrome_partitioning": _equal_as(_lists(json.dumps)),
    "polynomial_equations": _rounded_to(4, in_order=False),
    "pool_matrix": _rounded_to(2),
    "power_function": _equal_as(_three_digits),
    "prime_factorization": _equal_as(_factors),
    "time_intervals": _equal_as(_duration),
}
"""Tests for answers to datasets with special notation or rounding."""


Entry = Mapping[str, Any]
Test = Callable[[str, Entry], bool]

_MAX_FORMULA, _MAX_CONCLUSION = 2_000, 400  # characters; parsing a conclusion takes quadratic time
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_FORMULA = re.compile(r"[-+*/()\s0-9A-Za-z.]*")
_ACCESS = re.compile(r"\.[A-Za-z.]|(?<![0-9])\.(?![0-9])")  # a dot outside a number: `x.y`
_NAME = re.compile(r"[A-Za-z]+")
_FUNCTIONS = {*_NAME.findall("sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt Abs pi E")}
_JUG_MOVE = re.compile(r"(?:fill|empty) [A-Z]|pour [A-Z]->[A-Z]")
_HANOI_MOVE = r"(?:\d{1,6}[.)]\s)?\s*Move disk \d{1,6} from Peg \d{1,6} to Peg \d{1,6}\.?"


@dataclass(frozen=True)
class Guard:
    """A test that an answer must pass before the dataset's scorer sees it."""

    why: str  # the wrong answers that the scorer alone would accept
    admits: Test  # (answer, entry) -> whether the answer goes to the scorer; otherwise its score is 0


def _characters(allowed: str) -> Test:
    """Admit answers made up only of these characters, which cannot call or access anything."""
    pattern = re.compile(f"[{allowed}]*")
    return lambda answer, _entry: pattern.fullmatch(answer) is not None


def _form(pattern: str) -> Test:
    """Admit answers that match a pattern, ignoring surrounding space."""
    compiled = re.compile(pattern, re.IGNORECASE)
    return lambda answer, _entry: compiled.fullmatch(answer.strip()) is not None


def _tokens(pattern: str, separator: str = r"\s+") -> Test:
    """Admit answers in which every token matches a pattern."""
    token, between = re.compile(pattern), re.compile(separator)
    return lambda answer, _entry: all(map(token.fullmatch, between.split(answer.strip())))


def _formula(names_of: Callable[[Entry], set[str]]) -> Test:
    """Admit formulas made up of numbers, the given names, arithmetic and parentheses."""

    def admits(answer: str, entry: Entry) -> bool:
        if len(answer) > _MAX_FORMULA or not _FORMULA.fullmatch(answer) or _ACCESS.search(answer):
            return False
        return set(_NAME.findall(answer)) <= names_of(entry)

    return admits


def _value(node: ast.AST, numbers: list[int]) -> Fraction:
    """Return the value of an arithmetic expression, and collect its numbers; ValueError for other syntax."""
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


def _makes(target: int | None = None) -> Test:
    """Admit expressions that use each of the entry's numbers once and equal the target (None: the entry's)."""

    def admits(answer: str, entry: Entry) -> bool:
        numbers: list[int] = []
        try:
            tree = ast.parse(answer.strip()[: _MAX_FORMULA + 1], mode="eval")
            value = _value(tree.body, numbers)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return False
        return (
            len(answer) <= _MAX_FORMULA
            and value == (entry["metadata"]["target"] if target is None else target)
            and sorted(numbers) == sorted(entry["metadata"]["numbers"])
        )

    return admits


def _assigns_each_name_once(answer: str, entry: Entry) -> bool:
    """Return whether an answer such as `A=1,B=2` names each letter of the right answer exactly once."""
    texts = (answer, str(entry["answer"]))
    names, right_names = (sorted(pair.partition("=")[0].strip() for pair in text.split(",")) for text in texts)
    return names == right_names


def _jug_moves(answer: str, _entry: Entry) -> bool:
    """Return whether an answer is a JSON list of moves and nothing else: `["fill A", "pour A->B"]`."""
    try:
        moves = json.loads(answer)
    except (ValueError, RecursionError):
        return False
    return isinstance(moves, list) and all(isinstance(move, str) and _JUG_MOVE.fullmatch(move) for move in moves)


def _new_conclusion(answer: str, entry: Entry) -> bool:
    """Return whether a conclusion is not equivalent to any of its premises."""
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


_WORDS = "the right answer mixed with other words scores 1"
_CODE = "the scorer evaluates the answer as code"

_INTEGRAL = _formula(lambda entry: {entry["metadata"]["variable"], "C", *_FUNCTIONS})

GUARDS: dict[str, Guard] = {
    "binary_matrix": Guard(_CODE, _characters(r"-0-9\s,\[\]")),
    "countdown": Guard(f"{_CODE}; functions are accepted, and values near the target", _makes()),
    "cryptarithm": Guard("if a letter has several digits, the last one counts", _assigns_each_name_once),
    "intermediate_integration": Guard(f"{_CODE}; an unevaluated Integral(f, x) scores 1", _INTEGRAL),
    "jugs": Guard("words after a move are ignored", _jug_moves),
    "kakurasu": Guard(_WORDS, _characters(r"01\s,\[\]")),
    "n_queens": Guard(_CODE, _characters(r"Q_\s,'\"\[\]")),
    "polynomial_multiplication": Guard(
        f"{_CODE}; an unevaluated expand(...) scores 1",
        _formula(lambda entry: set(_NAME.findall(str(entry["answer"])))),
    ),
    "propositional_logic": Guard("a copied premise scores 1", _new_conclusion),
    "puzzle24": Guard(f"{_CODE}; the given numbers need not be used", _makes(24)),
    "quantum_lock": Guard(_WORDS, _form(r"[A-C](?:[\s,>→-]*[A-C])*")),
    "rubiks_cube": Guard(_WORDS, _tokens(r"[A-Za-z]{1,2}'?[0-9]{0,6}")),
    "rush_hour": Guard(_WORDS, _tokens(r"[A-Z][-+][0-9]{1,6}", r"[\s,]+")),
    "simple_integration": Guard(f"{_CODE}; an unevaluated Integral(f, x) scores 1", _INTEGRAL),
    "sokoban": Guard(_WORDS, _form(r"[UDLR]+")),
    "spell_backward": Guard(
        "the right answer with anything after it scores 0.8 or 1",
        lambda answer, entry: len(answer.strip()) <= len(entry["answer"]),
    ),
    "spiral_matrix": Guard(_CODE, _characters(r"-0-9\s,\[\]")),
    "string_insertion": Guard(_CODE, _characters(r"A-Z\s,'\"\[\]")),
    "tower_of_hanoi": Guard(_WORDS, _tokens(_HANOI_MOVE, r"\s*\n\s*")),
}

EVALUATED = frozenset(name for name, guard in GUARDS.items() if guard.why.startswith(_CODE))
"""Datasets whose scorers evaluate answers as code."""
