r"""Names of values, such as `x`, `f(x)`, `AB` and `\text{Area}`, and the equations that assign them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TypeGuard, TypeVar

from brorl.verification.domains.formula.expressions import (
    FUNCTIONS,
    Apply,
    Bracketed,
    Combined,
    Expression,
    Form,
    Listing,
    Matrix,
    Number,
    Ratio,
    Relation,
    Residue,
    Symbol,
    Text,
    variables,
    walk,
)
from brorl.verification.domains.formula.points import WHOLE_NUMBERS
from brorl.verification.domains.formula.tokens import UnreadableError
from brorl.verification.domains.formula.words import are_names

EQUAL = frozenset({"=", "\\approx", "\\equiv"})


def vector_of(form: Form) -> Sequence[Form] | None:
    """Return the parts of a tuple, row or column; None for any other form."""
    if isinstance(form, Bracketed) and (form.opening, form.closing) in (("(", ")"), ("\\langle", "\\rangle")):
        return form.items
    match form:
        case Apply("call", (Symbol(name), *parts)) if name[0].isupper() and len(parts) > 1:
            return parts  # the point A(3, 4)
    if isinstance(form, Matrix) and form.is_array and len(form.rows[0]) == 1 and len(form.rows) > 1:
        return [row[0] for row in form.rows]
    return None


def name_of(form: Form) -> str | None:
    r"""Return the name if a side is only a name: `x`, `f(x)`, `AB`, `\text{Area}`; None for other sides."""
    match form:
        case Symbol(name):
            return name if variables(form) else None
        case Apply("call", (Symbol(name), *parts)):
            return f"{name}({', '.join(map(str, parts))})"
        case Apply(operation, (inner,)) if operation in FUNCTIONS and variables(form):
            return f"{operation}({inner})"
        case Apply("log", (inner, _)) if variables(form):
            return f"log({inner})"
        case Text(words):
            return words if are_names(words) else None
        case Apply("/", parts) if _are_measures(parts):
            return str(parts)
        case Apply("+", parts) if _are_measures(parts) and all(name[0].isupper() for name in variables(form)):
            return str(parts)
        case Ratio(parts, _) | Apply("*", parts) | Combined(_, parts) if len({*parts}) > 1 and _are_letters(parts):
            sign = ":" if isinstance(form, Ratio) else form.sign if isinstance(form, Combined) else ""
            return sign.join(str(part.name) for part in parts if isinstance(part, Symbol))
    return None


def _are_letters(parts: Sequence[Form]) -> bool:
    return all(isinstance(part, Symbol) and variables(part) for part in parts)


def _is_formula(form: Form) -> bool:
    """Return whether a side is a quotient or sum: `NO/BO = 2` names a number, but `NO/BO = x` is an equation."""
    return isinstance(form, Apply) and form.operation in ("/", "+")


def _are_measures(parts: Sequence[Form]) -> bool:
    """Return whether parts are letters or products of letters, as in the quotient `NO/BO`."""
    products = (part.arguments if isinstance(part, Apply) and part.operation == "*" else (part,) for part in parts)
    return all(map(_are_letters, products))


def is_call(form: Form) -> TypeGuard[Apply]:
    """Return whether a form is a function call, such as `f(x)`."""
    return isinstance(form, Apply) and form.operation == "call"


def is_name(form: Form, wide: bool) -> bool:
    """Return whether a side names a value. With `wide`, so does a formula of several variables without numbers."""
    if name_of(form) is not None:
        return wide or not _is_formula(form)
    if isinstance(form, Apply) and form.operation in ("sum", "prod"):
        return wide
    if not wide or not isinstance(form, Expression) or len(variables(form)) < 2:
        return False
    if isinstance(form, Apply) and form.operation == "-":
        return False
    exponents = [part.arguments[1] for part in walk(form) if isinstance(part, Apply) and part.operation == "^"]
    numbers = [part for part in walk(form) if isinstance(part, Number)]
    return all(any(number is exponent for exponent in exponents) for number in numbers)


def solved(form: Form) -> tuple[str, Form] | None:
    """Return (name, value) of a solved equation, `x = 42`; None for any other form."""
    if not isinstance(form, Relation) or not set(form.signs) <= EQUAL:
        return None
    first, last = form.sides[0], form.sides[-1]
    for side, value in ((first, last), (last, first)):
        name = name_of(side)
        if name is None or isinstance(value, Relation) or (_is_formula(side) and variables(value)):
            continue
        if is_call(side) or not variables(side) & variables(value):
            return name, value
    return None


def are_choices(form: Form, words: str) -> bool:
    """Return whether a word consists of a list's choices in any order: `DAC` for `A, C, D`."""
    if not isinstance(form, Listing):
        return False
    letters = [item.name for item in form.items if isinstance(item, Symbol) and re.fullmatch("[A-J]", item.name)]
    return len(letters) == len(form.items) and sorted(letters) == sorted(words)


def same_name(reference: str, answer: Form) -> bool:
    """Return whether a side has this name. `y` and `f(x)` mean the same graph."""
    name = name_of(answer)
    if name is None:
        return False
    is_graph = "y" in (name, reference) and any(side.startswith(("f(", "g(")) for side in (name, reference))
    return name == reference or is_graph or (len(name) > 2 and name.casefold() == reference.casefold())


def assigned(form: Form) -> dict[str, Form] | None:
    """Return the values by name in `x = 1, y = 2`, `(x,y) = (1,2)` or `x = y = 1`; None for any other form."""
    if isinstance(form, Relation) and len(form.sides) > 2 and set(form.signs) == {"="}:
        *names, value = form.sides
        form = Listing(tuple(Relation((name, value), ("=",)) for name in names if isinstance(name, Symbol)), ",")
        return assigned(form) if len(form.items) == len(names) else None
    if isinstance(form, Relation):
        heads, parts = map(vector_of, (form.sides[0], form.sides[-1]))
        if len(form.sides) != 2 or heads is None or parts is None or len(heads) != len(parts):
            return None
        form = Listing(tuple(Relation(pair, ("=",)) for pair in zip(heads, parts, strict=True)), ",")
    pairs = [solved(item) for item in form.items] if isinstance(form, Listing) else []
    values = {pair[0]: pair[1] for pair in pairs if pair is not None}
    return values if len(values) == len(pairs) > 1 else None


_WHOLE, _REAL = "n\N{ELEMENT OF}", "t\N{ELEMENT OF}"  # names for bound variables; no answer can contain them
_MAX_PROGRESSION = 500

T = TypeVar("T")


def renamed(form: T, old: str, new: str) -> T:
    """Return a form, or part of one, with a variable renamed."""
    if isinstance(form, Symbol):
        return Symbol(new) if form.name == old else form  # type: ignore[return-value]
    if not isinstance(form, tuple):
        return form
    parts = (renamed(part, old, new) for part in form)
    return type(form)(*parts) if hasattr(form, "_fields") else tuple(parts)  # type: ignore[return-value]


def without_conditions(form: Listing) -> list[Form]:
    r"""Return `2k\pi, k \in \mathbb{Z}` as `2n\pi` with a fixed name n, but keep the name if an item is `k = 3`."""
    domains: dict[int, tuple[str, str]] = {}  # index of each condition -> its variable and its number set
    for at, item in enumerate(form.items):
        match item:
            case Relation((Symbol(name), Symbol(domain)), ("\\in",)):
                letter = domain.removeprefix("\\mathbb{").removesuffix("}")
                others = (*form.items[:at], *form.items[at + 1 :])
                if letter in ("Z", "N", "Q", "R", "C") and name in variables(others):
                    domains[at] = name, letter
            case _:
                pass
    kept = [item for at, item in enumerate(form.items) if at not in domains]
    if len(domains) != 1:
        return kept
    ((variable, numbers),) = domains.values()
    heads = [name for item in kept if isinstance(item, Relation) for name in variables(item.sides[0])]
    is_real = numbers == "R" and all(isinstance(item, Bracketed) for item in kept)
    if not (is_real or numbers in ("Z", "N")) or any(variable in (name, *name.split("_")[1:]) for name in heads):
        return kept
    return [renamed(item, variable, _REAL if is_real else _WHOLE) for item in kept]


def with_letters(reference: Expression, answer: Expression) -> Expression:
    """Rename an answer's whole-number variable (`2k`, `2n`) or integration constant to the reference's letter."""
    letters, answer_letters = variables(reference) - variables(answer), variables(answer) - variables(reference)
    if len(letters) != 1 or len(answer_letters) != 1:
        return answer
    (letter,) = letters
    (answer_letter,) = answer_letters
    is_bound = _WHOLE in (letter, answer_letter) and not WHOLE_NUMBERS.isdisjoint((letter, answer_letter))
    is_constant = letter == "C" and answer_letter in ("c", "K", "k")
    is_constant = is_constant and _has_term(reference, letter) and _has_term(answer, answer_letter)
    return renamed(answer, answer_letter, letter) if is_bound or is_constant else answer


def _has_term(form: Expression, letter: str) -> bool:
    return isinstance(form, Apply) and form.operation == "+" and Symbol(letter) in form.arguments


def with_argument(reference: Form, answer: Relation) -> Relation:
    """Return `f(t) = 2t` as `f(x) = 2x` if the reference's argument is x."""
    match reference, answer.sides[0]:
        case Apply("call", (head, Symbol(letter))), Apply("call", (answer_head, Symbol(answer_letter))):
            if head == answer_head and letter != answer_letter and letter not in variables(answer):
                return renamed(answer, answer_letter, letter)
        case _:
            pass
    return answer


def between(items: Sequence[Form], last: Form) -> list[Form]:
    r"""Return the numbers that dots stand for: 3 to 9 in `1, 2, \ldots, 10`. Only for whole numbers in equal steps."""
    numbers = [item.value for item in (*items, last) if isinstance(item, Number) and item.value.denominator == 1]
    steps = {high - low for low, high in pairwise(numbers[:-1])} or {Fraction(1)}
    step = steps.pop()
    if len(numbers) != len(items) + 1 or steps or (len(items) < 3 and abs(step) != 1) or step == 0:
        raise UnreadableError("dots between items other than whole numbers in equal steps")
    count = (numbers[-1] - numbers[-2]) / step
    if count.denominator != 1 or not 1 < count <= _MAX_PROGRESSION:
        raise UnreadableError("dots up to a number that the steps do not reach")
    return [Number(numbers[-2] + step * k) for k in range(1, int(count))]


def modulo(form: Form, modulus: Expression) -> Form:
    r"""Return a form with each value, the 3 in `3` or `x \equiv 3`, as a residue of the modulus. Names are kept."""
    if isinstance(form, Relation) and set(form.signs) <= EQUAL:
        return form._replace(sides=tuple(modulo(side, modulus) for side in form.sides))
    return Residue(form, modulus) if isinstance(form, Expression) and not isinstance(form, Symbol) else form


def modulus_of(form: Form) -> Expression | None:
    """Return the modulus of a residue, or of an equation that ends in one; None for any other form."""
    last = form.sides[-1] if isinstance(form, Relation) else form
    return last.modulus if isinstance(last, Residue) else None
