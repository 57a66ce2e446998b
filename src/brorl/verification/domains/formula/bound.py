r"""Letters that may be any other letter: the k of `2k\pi, k \in \mathbb{Z}`, and the x of `f(x) = 2x`."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TypeVar

from brorl.verification.domains.formula.expressions import Apply, Expression, Number, Symbol
from brorl.verification.domains.formula.forms import Bracketed, Form, Listing, Relation
from brorl.verification.domains.formula.names import variables_of
from brorl.verification.domains.formula.tokens import UnreadableError
from brorl.verification.domains.formula.values import WHOLE_NUMBERS, variables

_WHOLE, _REAL = "n\N{ELEMENT OF}", "t\N{ELEMENT OF}"  # bound letters; no text has these names
_MAX_PROGRESSION = 500

T = TypeVar("T")


def renamed(form: T, old: str, new: str) -> T:
    """Return a form, or a part of one, with another name for a variable."""
    if isinstance(form, Symbol):
        return Symbol(new) if form.name == old else form  # type: ignore[return-value]
    if not isinstance(form, tuple):
        return form
    parts = (renamed(part, old, new) for part in form)
    return type(form)(*parts) if hasattr(form, "_fields") else tuple(parts)  # type: ignore[return-value]


def domain_of(item: Form) -> tuple[str, str] | None:
    r"""Return the variable and the set of numbers of `k \in \mathbb{Z}`; None if an item is none."""
    match item:
        case Relation((Symbol(name), Symbol(domain)), ("\\in",)):
            letter = domain.removeprefix("\\mathbb{").removesuffix("}")
            return (name, letter) if letter in ("Z", "N", "Q", "R", "C") else None
        case _:
            return None


def without_conditions(form: Listing) -> list[Form]:
    """Return items without those that say where a variable of another one lies; that variable gets one name.

    It keeps its own name if an item is its value, as in `n = 3` and `f(n) = 2n`.
    """
    domains = [domain_of(item) for item in form.items]
    free = [variables_of(item) for item in form.items]
    dropped = [
        at
        for at, domain in enumerate(domains)
        if domain and any(domain[0] in names for other, names in enumerate(free) if other != at)
    ]
    kept = [item for at, item in enumerate(form.items) if at not in dropped]
    if len(dropped) != 1 or not (domain := domains[dropped[0]]):
        return kept
    variable, numbers = domain
    are_points = all(isinstance(item, Bracketed) for item in kept)
    if numbers not in ("Z", "N") and not (are_points and numbers == "R"):
        return kept
    if any(isinstance(item, Relation) and _names(item.sides[0], variable) for item in kept):
        return kept
    return [renamed(item, variable, _REAL if numbers == "R" else _WHOLE) for item in kept]


def _names(side: Form, variable: str) -> bool:
    """Whether a side has a variable, or a subscript with it."""
    return any(variable in (name, *name.split("_")[1:]) for name in variables_of(side))


def with_bound(right: Expression, given: Expression) -> Expression:
    """Return an answer with the letter of its reference for any whole number, if one of them says that it is bound."""
    names = variables(right), variables(given)
    if (_WHOLE in names[0]) == (_WHOLE in names[1]):
        return given
    others = [name for name in names[0] ^ names[1] if name != _WHOLE]
    is_bound_here = _WHOLE in names[1]
    if len(others) != 1 or others[0] not in WHOLE_NUMBERS or (others[0] in names[1]) == is_bound_here:
        return given
    return renamed(given, _WHOLE, others[0]) if is_bound_here else renamed(given, others[0], _WHOLE)


def with_argument(right: Form, given: Relation) -> Relation:
    """Return an equation of `f(t)` as one of `f(x)`, if x is the argument in the reference."""
    match right, given.sides[0]:
        case Apply("call", (head, Symbol(one))), Apply("call", (other_head, Symbol(other))):
            if head == other_head and one != other and one not in variables_of(given):
                return renamed(given, other, one)
        case _:
            pass
    return given


def between(items: Sequence[Form], last: Form) -> list[Form]:
    r"""Return what dots stand for in `1, 2, \ldots, 10`; two first numbers say a step of one alone.

    Raises:
        UnreadableError: If the items are no whole numbers with one step up to the last one.
    """
    numbers = [item.value for item in (*items, last) if isinstance(item, Number) and item.value.denominator == 1]
    steps = {other - one for one, other in pairwise(numbers[:-1])} or {Fraction(1)}
    step = steps.pop()
    if len(numbers) != len(items) + 1 or steps or (len(items) < 3 and abs(step) != 1) or step == 0:
        raise UnreadableError("dots between other items than whole numbers in steps")
    count = (numbers[-1] - numbers[-2]) / step
    if count.denominator != 1 or not 1 < count <= _MAX_PROGRESSION:
        raise UnreadableError("dots up to a number that no step reaches")
    return [Number(numbers[-2] + step * k) for k in range(1, int(count))]
