"""Guards: tests that an answer must pass beside the scorer of its dataset in Reasoning Gym; none evaluates it as code.

`scripts/make_gym_table.py` tests every dataset for more.
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
from typing import Any

Entry = Mapping[str, Any]
Test = Callable[[str, Entry], bool]

_MAX_FORMULA = 2_000  # characters
_MAX_CONCLUSION = 400  # the parser takes time quadratic in its length
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_FORMULA = re.compile(r"[-+*/()\s0-9A-Za-z.]*")
_ACCESS = re.compile(r"\.[A-Za-z.]|(?<![0-9])\.(?![0-9])")  # a dot that is not of a number
_NAME = re.compile(r"[A-Za-z]+")
_FUNCTIONS = {*_NAME.findall("sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt Abs pi E")}
_JUG_MOVE = re.compile(r"(?:fill|empty) [A-Z]|pour [A-Z]->[A-Z]")
_HANOI_MOVE = r"(?:\d{1,6}[.)]\s)?\s*Move disk \d{1,6} from Peg \d{1,6} to Peg \d{1,6}\.?"


@dataclass(frozen=True)
class Guard:
    """What an answer to a dataset must pass beside its scorer."""

    why: str  # the wrong answers that the scorer alone accepts
    admits: Test = lambda _answer, _entry: True  # false for an answer that gets no score; it does not reach the scorer


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


def _assigns_each_name_once(answer: str, entry: Entry) -> bool:
    """Whether an answer of the form `A=1,B=2` names the letters of the right one, each once."""

    def names(text: str) -> list[str]:
        return sorted(pair.partition("=")[0].strip() for pair in text.split(","))

    return names(answer) == names(str(entry["answer"]))


def _jug_moves(answer: str, _entry: Entry) -> bool:
    """Whether an answer is a list of moves without other words."""
    try:
        moves = json.loads(answer)
    except (ValueError, RecursionError):
        return False
    return isinstance(moves, list) and all(isinstance(move, str) and _JUG_MOVE.fullmatch(move) for move in moves)


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


_WORDS = "the right answer with other words in it scores 1"
_CODE = "the scorer evaluates the answer as code"

GUARDS: dict[str, Guard] = {
    "binary_matrix": Guard(_CODE, _characters(r"-0-9\s,\[\]")),
    "countdown": Guard(
        f"{_CODE}; functions are accepted, and values near the target",
        _makes(lambda entry: int(entry["metadata"]["target"])),
    ),
    "cryptarithm": Guard("of several digits of a letter the last one counts", _assigns_each_name_once),
    "intermediate_integration": Guard(f"{_CODE}; Integral(f, x) of the question scores 1", _formula(_variables)),
    "jugs": Guard("words after a move are not read", _jug_moves),
    "kakurasu": Guard(_WORDS, _characters(r"01\s,\[\]")),
    "n_queens": Guard(_CODE, _characters(r"Q_\s,'\"\[\]")),
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
        lambda answer, entry: len(answer.strip()) <= len(entry["answer"]),
    ),
    "spiral_matrix": Guard(_CODE, _characters(r"-0-9\s,\[\]")),
    "string_insertion": Guard(_CODE, _characters(r"A-Z\s,'\"\[\]")),
    "tower_of_hanoi": Guard(_WORDS, _tokens(_HANOI_MOVE, r"\s*\n\s*")),
}

EVALUATED = frozenset(name for name, guard in GUARDS.items() if guard.why.startswith(_CODE))
"""Datasets whose scorers evaluate answers as code."""
