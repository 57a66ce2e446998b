r"""Whether an answer to a task of Reasoning Gym is the dataset's own, in any of the usual ways of writing it.

Most datasets have one right answer, compared by value. Nothing is evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from brorl.verification.domains.marked_answer import writings
from brorl.verification.gym.task import GymTask

SEVERAL = frozenset(
    (
        "boxnet", "countdown", "cryptarithm", "graph_color", "intermediate_integration", "jugs", "kakurasu",
        "knight_swap", "n_queens", "palindrome_generation", "polynomial_multiplication", "propositional_logic",
        "puzzle24", "quantum_lock", "rubiks_cube", "rush_hour", "shortest_path", "simple_integration", "sokoban",
        "tower_of_hanoi", "word_ladder",
    )
)  # fmt: skip
"""Datasets whose questions have several right answers."""

_SIGNS = {
    "\N{MULTIPLICATION SIGN}": "*", "\N{MIDDLE DOT}": "*", "\\times": "*", "\\cdot": "*", "\N{DIVISION SIGN}": "/",
    "\\div": "/", "\N{MINUS SIGN}": "-", "^": "**", "->": "\u2192", "\\rightarrow": "\u2192", "\\to": "\u2192",
}  # fmt: skip
_DECIMAL = re.compile(r"(?<![\w.])(\d{1,20})\.(\d{1,20})(?![\w.])")
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
_COMMA = re.compile(r" ?, ?")
_LONGEST_STATEMENT = 200
_LONGEST = 20_000  # characters of JSON


def in_plain_notation(text: str) -> str:
    """Return an answer with single spaces in its rows, and formulas in the notation of Python, without decimals."""
    text = _DECIMAL.sub(lambda number: f"({number[1]}{number[2]}/1{'0' * len(number[2])})", text)
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    return "\n".join(" ".join(row.split()) for row in text.strip().splitlines())


def is_own_answer(answer: str, task: GymTask) -> bool:
    """Whether an answer, in one of its writings, is the dataset's own."""
    if task.answer is None or not task.answer.strip():
        return False
    same = _SAME.get(task.data_set, _same)
    return any(same(form, task.answer.strip()) for form in writings(answer))


def _same(answer: str, right: str) -> bool:
    """Whether two texts are equal in their words, their number, their JSON or their rows."""
    if _folded(answer, right) == _folded(right, right):
        return True
    if _OWN_NUMBER.fullmatch(right):
        number = _stated_number(answer)
        return number is not None and number == Decimal(right)
    if right[:1] in "[{":
        own, given = _json(right), _json(answer)
        return own is not None and given is not None and _equal(given, own)
    return False


def _folded(text: str, right: str) -> str:
    """Return a text with single spaces in its rows, and in small letters unless the right one needs both cases."""
    rows = (_COMMA.sub(", ", " ".join(row.split())) for row in text.splitlines())
    joined = "\n".join(row for row in rows if row)
    both = any(letter.isupper() and letter.lower() in right for letter in set(right))
    return joined if both else joined.casefold()


def _stated_number(text: str) -> Decimal | None:
    """Return the number of `5`, `5 times`, `2 + 3 = 5` and `The sum is 5`; None for any other text."""
    if len(text) > _LONGEST_STATEMENT:
        return None
    stated = _STATEMENT.fullmatch(text) if not _NO_STATEMENT.search(text) else None
    if stated is None:
        return _number(text)
    number = _number(stated["number"])
    return None if stated["left"] and _number(stated["left"].strip()) not in (None, number) else number


def _number(text: str) -> Decimal | None:
    match = _NUMBER.fullmatch(text.replace("\N{MINUS SIGN}", "-").strip())
    if match is None:
        return None
    try:
        return Decimal(re.sub(r"[^-+\d.eE]", "", match[0]))
    except InvalidOperation:
        return None


def _json(text: str) -> Any:
    """Return the value of JSON text, also with single quotes; None if it is none."""
    if len(text) > _LONGEST:
        return None
    for one in (text, text.replace("'", '"').replace("True", "true").replace("False", "false").replace("None", "null")):
        try:
            return json.loads(one)
        except (ValueError, RecursionError):
            continue
    return None


def _equal(given: Any, own: Any) -> bool:
    """Whether two JSON values are equal; a number equals the text of it."""
    if isinstance(own, list) and isinstance(given, list):
        return len(own) == len(given) and all(map(_equal, given, own))
    if isinstance(own, dict) and isinstance(given, dict):
        return own.keys() == given.keys() and all(_equal(given[key], own[key]) for key in own)
    if isinstance(own, bool) or isinstance(given, bool) or own is None or given is None:
        return type(own) is type(given) and own == given
    if isinstance(own, list | dict) or isinstance(given, list | dict):
        return False
    one, other = _number(str(given)), _number(str(own))
    return one == other if one is not None and other is not None else str(given) == str(own)


def _equal_as(read: Callable[[str], Any]) -> Callable[[str, str], bool]:
    """Compare what is read of two texts; None, for a text that cannot be read, equals nothing."""
    return lambda answer, right: (own := read(right)) is not None and read(answer) == own


def _lists(key: Callable[[Any], Any]) -> Callable[[str], list[Any] | None]:
    """Read lists of lists in any order, each by its key."""

    def read(text: str) -> list[Any] | None:
        value = _json(text)
        is_read = isinstance(value, list) and all(isinstance(one, list) for one in value)
        return sorted(map(key, value)) if is_read else None

    return read


def _rounded_to(decimals: int, in_order: bool = True) -> Callable[[str, str], bool]:
    """Compare the numbers of rows or a list when they are rounded to some decimals."""

    def numbers(text: str) -> list[list[Fraction]] | None:
        rows = [re.split(r"[\s,]+", row.strip(" ()\u00b0")) for row in text.strip().splitlines()]
        read = [[_number(one.rstrip("\u00b0")) for one in row] for row in rows]
        if any(one is None for row in read for one in row):
            return None
        return [[Fraction(one) for one in row if one is not None] for row in read]

    def same(answer: str, right: str) -> bool:
        given, own = numbers(re.sub(r"\^?\{?\\(?:circ|degree)\}?|degrees?", "", answer)), numbers(right)
        if given is None or own is None or list(map(len, given)) != list(map(len, own)):
            return False
        pairs = [
            pair
            for one, other in zip(given, own, strict=True)
            for pair in zip(*((one, other) if in_order else (sorted(one), sorted(other))), strict=True)
        ]
        return all(abs(a - b) <= Fraction(501, 1000 * 10**decimals) for a, b in pairs)

    return same


def _same_probability(answer: str, right: str) -> bool:
    """Whether a fraction is equal, or a decimal is the right one rounded to four digits or more."""
    own = Fraction(right)
    fraction = re.fullmatch(r"(?:\\d?frac\{)?(\d{1,40})(?:/|\}\{)(\d{1,40})\}?", answer.replace(" ", ""))
    if fraction:
        return int(fraction[2]) > 0 and Fraction(int(fraction[1]), int(fraction[2])) == own
    percent = answer.endswith("%")
    bare = answer.removesuffix("%").removesuffix("\\").strip()
    number = _number(f"0{bare}" if bare.startswith(".") else bare)
    if number is None:
        return False
    given = Fraction(number) / (100 if percent else 1)
    digits = len(number.as_tuple().digits)
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    unit = Fraction(10) ** (exponent - (2 if percent else 0))
    return given == own or (digits >= 4 and abs(given - own) <= unit * 501 / 1000)


def _three_digits(text: str) -> str | None:
    number = _number(re.sub(r" ?(?:\\times|\u00d7|x) ?10\^\{?([-+]?\d{1,3})\}?$", r"e\1", text))
    return None if number is None else f"{number:.2e}"


_TWO_NUMBERS = re.compile(r"[\d.]\s+[\d.]")


def _complex(text: str) -> tuple[Decimal, Decimal] | None:
    text = "".join(text.split()).replace("\N{MINUS SIGN}", "-") if not _TWO_NUMBERS.search(text) else ""
    text = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    match = re.fullmatch(
        r"(?P<real>[-+]?\d{1,40}(?:\.\d{1,40})?)?(?:(?P<sign>[-+]?)(?P<imaginary>\d{1,40}(?:\.\d{1,40})?)?\*?[ij])?",
        text,
    )
    if match is None or not text:
        return None
    if match["real"] is not None and not match["sign"] and text.endswith(("i", "j")):
        return (Decimal(0), Decimal(match["real"])) if match["imaginary"] is None else None
    imaginary = Decimal(match["imaginary"] or 1) if text.endswith(("i", "j")) else Decimal(0)
    return Decimal(match["real"] or 0), -imaginary if match["sign"] == "-" else imaginary


def _factors(text: str) -> list[str]:
    text = re.sub(r"^\s*\d+\s*=", "", text) if len(text) <= _LONGEST_STATEMENT else ""
    return sorted(re.split(r"\s*(?:\u00d7|\*|\bx\b|\\times|\\cdot|\u00b7)\s*", text.strip()))


def _fraction(text: str) -> tuple[str, str] | None:
    match = re.fullmatch(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+)", re.sub(r"[\s$]", "", text))
    return (match[1] or match[3], match[2] or match[4]) if match else None


def _roles(text: str) -> list[tuple[str, str]] | None:
    """Read the role of each name, in any order and in no other words."""
    words = [word for word in re.sub(r"[.,;:()=\n]", " ", text.casefold()).split() if word not in _ROLE_WORDS]
    return sorted(zip(words[::2], words[1::2], strict=True)) if len(words) % 2 == 0 else None


_ROLE_WORDS = frozenset(["is", "a", "an", "and"])
_DURATION = re.compile(
    r"(?:(?P<days>[-+]?\d{1,9})(?:\s*days?|$))?(?:(?<=s),\s*|(?<=y),\s*)?(?P<clock>\d{1,6}:\d{1,2}(?::\d{1,2}(?:\.\d{1,9})?)?)?"
)


def _duration(text: str) -> tuple[bool, bool, int, list[Fraction]] | None:
    """Read whether a duration has days and a clock time, and how long it is."""
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
"""Datasets whose one right answer has notations or roundings of its own."""
