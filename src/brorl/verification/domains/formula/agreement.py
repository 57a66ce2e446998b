r"""Decides whether an answer says the same as its reference: `x = 0.5` and `\frac{1}{2}`, not `[0, 1]` and `(0, 1)`.

A value may have a name before it (`x = 42`, `AB = 42`) and a unit after it. A list without brackets is a set. Texts are
equal word by word. Everything else differs.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from types import FrameType

from brorl.prompts.decimal_commas import is_decimal as is_decimal_comma
from brorl.prompts.decimal_commas import with_points
from brorl.verification.domains.formula.expressions import (
    Apply,
    Based,
    Bracketed,
    Combined,
    Expression,
    Form,
    Listing,
    Number,
    Quantity,
    Relation,
    Residue,
    Symbol,
    Text,
    UndefinedError,
    as_quantity,
    exact,
    is_decimal,
    product_of,
    to_expression,
    variables,
    walk,
)
from brorl.verification.domains.formula.grammar import read
from brorl.verification.domains.formula.names import (
    EQUAL,
    are_choices,
    assigned,
    is_call,
    is_name,
    modulus_of,
    same_name,
    solved,
    vector_of,
    with_argument,
    with_letters,
)
from brorl.verification.domains.formula.normal import (
    along_axes,
    converted,
    have_other_units,
    is_equation,
    members_of,
    normal,
    percent_of,
    region_of,
    turned,
)
from brorl.verification.domains.formula.tokens import UnreadableError
from brorl.verification.domains.formula.values import IMAGINARY, is_multiple, is_rounded, same_value, within
from brorl.verification.domains.formula.words import are_two_factors, labeled, same_beside, same_words, units_of
from brorl.verification.domains.units import conversions

CORRECT, WRONG, SEVERAL, OTHER_UNIT = "correct", "wrong answer", "no single answer", "another unit"
UNREAD, UNREAD_REFERENCE = "not parsed", "reference not parsed"
_SPACE = re.compile(r"\\[,;! ]|[\s$]")
_PI = Symbol("\\pi")
_MAX_MEMBERS = 500
_REFIRE_S = 0.1  # the alarm repeats, because a bare `except` or a destructor may swallow its exception
_ROUNDING = Fraction(1, 1_000_000)  # the least tolerance, unless both numbers are whole


class _OverrunError(BaseException):
    """The time is up; not an Exception, which libraries catch in many places."""


def compare(pairs: Sequence[tuple[str, str, float | None]], limit_s: float) -> list[str]:
    """Return for each (reference, answer, tolerance) the reason that `agree` gives, or `timeout`.

    Only workers call this, because the alarm needs the main thread. Each comparison may take `limit_s` of CPU time,
    above 0; C code may exceed it.
    """
    return [str(_within(limit_s, partial(agree, *pair)) or "timeout") for pair in pairs]


def are_readable(references: Sequence[str], limit_s: float) -> list[bool]:
    """Whether each reference can be read within the CPU time, and has a value unless it is a text."""
    return [bool(_within(limit_s, partial(is_readable, reference))) for reference in references]


def _within(limit_s: float, call: Callable[[], object]) -> object:
    """Return the value of a call; None if it does not end in time."""
    try:
        signal.signal(signal.SIGPROF, _ring)
        signal.setitimer(signal.ITIMER_PROF, limit_s, _REFIRE_S)
        try:
            return call()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _OverrunError:
        signal.setitimer(signal.ITIMER_PROF, 0)  # the alarm went off again before it was stopped
        return None


def _ring(_number: int, _frame: FrameType | None) -> None:
    raise _OverrunError


def agree(reference: str, answer: str, tolerance: float | None = None) -> str:
    """Return the verdict's reason for an answer; reference and answer are LaTeX or plain text.

    `tolerance` is the accepted difference of two measured numbers, relative to the reference. It is at least a
    millionth, unless both numbers are whole. None compares decimals in the digits that they have. A comma between digits
    may be a decimal comma (`decimal_commas`): each reading counts, unless the reference is surely one number.
    """
    if choice := labeled(reference):
        return _agree_with_choice(*choice, answer, tolerance)
    if (reading := with_points(reference)) and (is_decimal_comma(reference) or agree(reading, answer, tolerance) == CORRECT):
        is_same_list = _SPACE.sub("", reference) == _SPACE.sub("", answer)
        return CORRECT if is_same_list else agree(reading, answer, tolerance)
    reason = _agree(reference, answer, tolerance)
    if reason != CORRECT and (reading := with_points(answer)) and _agree(reference, reading, tolerance) == CORRECT:
        return CORRECT
    return reason


def _agree(reference: str, answer: str, tolerance: float | None) -> str:
    right, given = read(reference), read(answer)
    if isinstance(right, Text) and not any(map(str.isalnum, right.words)):
        return UNREAD_REFERENCE
    names = variables(right)
    is_complex = IMAGINARY in names and "j" not in names
    is_complex = is_complex or (not names and variables(given) == {IMAGINARY})
    comparison = Comparison(is_complex, None if tolerance is None else Fraction(tolerance))
    if comparison.agrees(right, given):
        return CORRECT
    if isinstance(given, Text) and not isinstance(right, Text):
        return UNREAD
    if tolerance is not None and have_other_units(right, given):
        return OTHER_UNIT
    several = isinstance(given, Listing) and not isinstance(right, Listing | Bracketed)
    return SEVERAL if several or isinstance(given, Relation) else WRONG


def _agree_with_choice(letter: str, value: str, answer: str, tolerance: float | None) -> str:
    """Return the verdict's reason if the reference is a choice with its value, `(B) 12`: `B` or `12` is correct."""
    if choice := labeled(answer):
        reasons = [agree(letter, choice[0]), agree(value, choice[1], tolerance)]
        return next((reason for reason in reasons if reason != CORRECT), CORRECT)
    return CORRECT if agree(letter, answer) == CORRECT else agree(value, answer, tolerance)


def is_readable(reference: str) -> bool:
    """Whether any answer can agree with a reference: the reference has a value, or is words or balanced notation."""
    if choice := labeled(reference):
        return is_readable(choice[1])
    form = read(reference)
    if isinstance(form, Text):
        is_balanced = all(reference.count(a) == reference.count(b) for a, b in ("{}", ("\\begin", "\\end")))
        return is_balanced and any(map(str.isalnum, form.words))
    return Comparison(False, None).agrees(form, form)


class Comparison:
    """Compares forms, with the tolerance of `agree`; `is_complex` says whether the letter i is the imaginary unit."""

    def __init__(self, is_complex: bool, tolerance: Fraction | None) -> None:
        self._is_complex, self._tolerance = is_complex, tolerance

    def agrees(self, right: Form, given: Form) -> bool:
        """Whether an answer says the same as the reference; false if a value cannot be computed."""
        try:
            return self.same(right, given)
        except (UnreadableError, UndefinedError, RecursionError):
            return False

    def same(self, right: Form, given: Form) -> bool:
        """Whether an answer says the same as the reference."""
        right, given = self._single(normal(right)), self._single(normal(given))
        is_text = isinstance(right, Text) or isinstance(given, Text)
        if is_text and (region_of(right) is None or region_of(given) is None):
            return self._same_text(right, given)
        if (sets := self._same_regions(right, given)) is not None:
            return sets
        if (assignments := self._same_assignments(right, given)) is not None:
            return assignments
        if isinstance(right, Relation):
            return self._same_relation(right, given)
        if isinstance(given, Relation):
            return self._says(right, given)
        members = members_of(right), members_of(given)
        joints = {form.joint for form in (right, given) if isinstance(form, Listing)}
        if joints == {"and", "or"} and any(isinstance(item, Text) for item in members[0] or ()):
            return False
        if members[0] is not None and members[1] is not None:
            return self._same_members(members[0], members[1])
        return self._same_kind(right, given)

    def _single(self, form: Form) -> Form:
        r"""Return `\frac{1}{2}` for `\frac{1}{2} or 0.5`, which says one value twice; any other form unchanged."""
        if isinstance(form, Listing) and form.joint == "or" and not any(variables(item) for item in form.items[1:]):
            first = normal(form.items[0])
            if not isinstance(first, Listing) and all(self.same(first, item) for item in form.items[1:]):
                return first
        return form

    def _same_text(self, right: Form, given: Form) -> bool:
        """Compare words. A few letters may be a product: `ab` is a times b."""
        if isinstance(right, Text) and isinstance(given, Text):
            return same_words(right.words, given.words) or are_two_factors(right.words, given.words)
        if isinstance(right, Text) and isinstance(given, Relation):
            return self._says(right, given)
        if isinstance(right, Relation):
            return self._same_relation(right, given)
        text, other = (right, given) if isinstance(right, Text) else (given, right)
        assert isinstance(text, Text)
        if text.words == "no solution":
            return other == Bracketed("\\{", (), "\\}")
        if are_choices(right, text.words):
            return True
        is_product = isinstance(other, Expression) and re.fullmatch("[A-Za-z]{2,6}", text.words)
        return bool(is_product) and self._same_value(product_of(text.words), to_expression(other))

    def _same_kind(self, right: Form, given: Form) -> bool:
        """Compare tuples, intervals, matrices and values."""
        vectors = vector_of(right) or along_axes(right, given), vector_of(given) or along_axes(given, right)
        if vectors[0] is not None and vectors[1] is not None:
            return self._same_in_order(vectors[0], vectors[1])
        match right, given:
            case Residue(one, modulus), Residue(other, other_modulus):
                return self._same_value(modulus, other_modulus) and self._is_congruent(one, other, modulus)
            case (Residue(one, _), Number() as other) | (Number() as other, Residue(one, _)):
                return self._same_value(one, other)
            case Combined(sign, parts), Combined(other_sign, other_parts):
                return sign == other_sign and self._same_members(parts, other_parts)
            case Bracketed(opening, items, closing), Bracketed(other_opening, other_items, other_closing):
                are_alike = (opening, closing) == (other_opening, other_closing)
                return are_alike and self._same_in_order(items, other_items)
            case _:
                pass
        if isinstance(right, Expression) and isinstance(given, Expression):
            return self._same_value(right, given)
        one, other = as_quantity(right), as_quantity(given)
        return right == given if one is None or other is None else self._same_quantity(one, other)

    def _is_congruent(self, right: Expression, given: Expression, modulus: Expression) -> bool:
        """Whether the difference of two numbers is a multiple of a modulus."""
        values = exact(right), exact(given), exact(modulus)
        if None in values or not values[2]:
            return self._same_value(right, given)
        return (values[0] - values[1]) % values[2] == 0

    def _same_quantity(self, right: Quantity, given: Quantity) -> bool:
        """Compare values with units; if only one side has a unit, the unit is dropped."""
        products = [one for one in (right.product, given.product) if one is not None]
        if len(products) == 2 and any(map(variables, products)) and self._same_value(products[0], products[1]):
            return True
        if right.words != given.words and not same_beside(right.words, given.words):
            return False
        is_measured = self._tolerance is not None
        if (
            "" in (right.unit, given.unit)
            or right.unit == given.unit
            or (is_measured and right.unit == f"°{given.unit}")
        ):
            slack = Fraction(0) if right.unit or given.unit else None
            return self._same_value(right.value, given.value, slack) or self._same_angle(right, given)
        return any(
            self._same_value(right.value, converted(given.value, way), way.slack)
            for other in units_of(given.unit)
            for one in units_of(right.unit)
            for way in conversions(other, one)
            if is_measured or not way.slack
        )

    def _same_angle(self, right: Quantity, given: Quantity) -> bool:
        """Compare degrees with a multiple of pi."""
        if {right.unit, given.unit} != {"", "°"} or _PI not in (*walk(right.value), *walk(given.value)):
            return False
        one, other = (Apply("degree", (form.value,)) if form.unit else form.value for form in (right, given))
        return self._same_value(one, other)

    def _same_value(self, right: Expression, given: Expression, slack: Fraction | None = None) -> bool:
        """Compare expressions; 50% equals a half, and also 50. `slack` is the error of a unit's conversion."""
        given = with_letters(right, given)
        pairs = [(right, given)]
        one, other = percent_of(right), percent_of(given)
        if slack is None and (one is None) != (other is None):
            pairs.append((one or right, other or given))
        return any(self._same_number(*pair, slack) for pair in pairs)

    def _same_number(self, right: Expression, given: Expression, slack: Fraction | None) -> bool:
        if self._tolerance is not None:
            least = max(self._tolerance, _ROUNDING, slack or _ROUNDING)
            near = within(right, given, least, are_counts=slack is None and not self._tolerance)
            if near is not None:
                return near
        return same_value(right, given, self._is_complex)

    def _same_in_order(self, right: Sequence[Form], given: Sequence[Form]) -> bool:
        return len(right) == len(given) and all(map(self.same, right, given))

    def _same_members(self, right: Sequence[Form], given: Sequence[Form]) -> bool:
        """Whether two lists have the same members in any order; one member may not match two."""
        if not len(right) == len(given) <= _MAX_MEMBERS:
            right, given = self._distinct(right), self._distinct(given)
        left = list(given)
        for member in right:
            found = next((at for at, other in enumerate(left) if self.same(member, other)), None)
            if found is None:
                return False
            del left[found]
        return not left

    def _distinct(self, members: Sequence[Form]) -> list[Form]:
        kept: list[Form] = []
        for member in members[:_MAX_MEMBERS]:
            if not any(self.same(other, member) for other in kept):
                kept.append(member)
        return kept

    def _same_regions(self, right: Form, given: Form) -> bool | None:
        """Compare sets of real numbers; None if a form is no set of real numbers, or if both are pairs in brackets."""
        if all(isinstance(form, Bracketed) and form.opening != "\\{:" for form in (right, given)):
            return None
        one, other = region_of(right), region_of(given)
        if one is None or other is None or not any((*one.holds, *other.holds)):
            return None
        if is_equation(right) or is_equation(given):
            return None
        if one.variable and other.variable and one.variable != other.variable:
            return False
        return one.holds == other.holds and all(map(self._same_value, one.ends, other.ends))

    def _says(self, right: Form, given: Relation) -> bool:
        """Whether a chain such as `x = 6 * 7 = 42` says a value: each other side is a name, or equals the value."""
        if not set(given.signs) <= EQUAL:
            return False
        is_open, sides, signs = bool(variables(right)), given.sides, given.signs
        if is_open and is_call(sides[0]) and not variables(sides[0].arguments[1:]) <= variables(right):
            return False  # `f(t) = ...`, but the reference has another variable
        is_value = is_open and isinstance(sides[0], Expression) and self.same(right, sides[0])
        if is_name(sides[0], wide=not is_open) and not is_value:
            return self._chain_says(right, sides[1:], signs[1:], after_name=True)
        if is_name(sides[-1], wide=False):
            return self._chain_says(right, sides[:-1], signs[:-1])
        return self._chain_says(right, sides, signs)

    def _chain_says(self, right: Form, sides: Sequence[Form], signs: Sequence[str], after_name: bool = False) -> bool:
        """Whether equal sides say a value; after a name, formulas with variables are skipped: `A = r h = 42`."""
        while after_name and not variables(right) and sides and variables(sides[0]):
            sides, signs = sides[1:], signs[1:]
        if not sides or not self._is_chain(sides, signs):
            return False
        exacts = [side for side, sign in zip(sides, ("=", *signs), strict=True) if sign != "\\approx"]
        said = sides if isinstance(right, Expression) and is_decimal(right) else exacts
        return any(self.same(right, side) for side in said)

    def _is_chain(self, sides: Sequence[Form], signs: Sequence[str]) -> bool:
        r"""Whether all sides of a chain are equal, or rounded after `\approx`."""
        for one, other, sign in zip(sides, sides[1:], signs, strict=False):
            if sign == "\\approx":
                one, other = (side.value if isinstance(side, Quantity) else side for side in (one, other))
                if not (isinstance(one, Expression) and isinstance(other, Expression) and is_rounded(one, other)):
                    return False
            elif not self.same(one, other):
                return False
        return True

    def _same_relation(self, right: Relation, given: Form) -> bool:
        """Compare an equation or inequality with an answer; for `x = 42` the answer may be `42`."""
        if modulus_of(right) and not modulus_of(given):
            return False  # one of its solutions
        if set(right.signs) <= EQUAL and (pair := solved(right)):
            name, value = pair
            if not isinstance(given, Relation):
                return self.same(value, given)
            given = with_argument(right.sides[0], given)
            if not set(given.signs) <= EQUAL:
                return False
            if same_name(name, given.sides[0]) and self._chain_says(value, given.sides[1:], given.signs[1:], True):
                return True
            if same_name(name, given.sides[-1]) and self._chain_says(value, given.sides[:-1], given.signs[:-1]):
                return True
            return bool(variables(value)) and self._same_equation(right, given)
        if set(right.signs) <= EQUAL and not any(variables(side) for side in right.sides):
            return self._is_chain(right.sides, right.signs) and any(self.same(side, given) for side in right.sides)
        return isinstance(given, Relation) and self._same_equation(right, given)

    def _same_equation(self, right: Relation, given: Relation) -> bool:
        """Whether two relations are the same up to a factor and the order of sides: `2x = 4y` and `2y = x`."""
        are_expressions = all(isinstance(side, Expression) for side in (*right.sides, *given.sides))
        if not len(right.signs) == len(given.signs) == 1 or not are_expressions:
            return any(
                right.signs == one.signs and self._same_in_order(right.sides, one.sides)
                for one in (given, turned(given))
            )
        sides, signs = [], []
        for relation in (right, given):
            greater = turned(relation) if relation.signs[0] in ("<", "\\le") else relation
            one, other = map(to_expression, greater.sides)
            sides.append(Apply("+", (one, Apply("-", (other,)))))
            signs.append(greater.signs[0])
        if signs[0] != signs[1] or variables(sides[0]) != variables(sides[1]):
            return False
        return is_multiple(sides[0], sides[1], is_positive=signs[0] in (">", "\\ge"), is_complex=self._is_complex)

    def _same_assignments(self, right: Form, given: Form) -> bool | None:
        """Compare `x = 1, y = 2` with a list like it, or with `1, 2`; None if neither form names several values."""
        one, other = assigned(right), assigned(given)
        if one is not None and other is not None:
            return one.keys() == other.keys() and all(self.same(one[name], other[name]) for name in one)
        if one is not None:
            parts = given.items if isinstance(given, Listing) else vector_of(given)
            if parts is None and isinstance(right, Relation) and len(right.sides) > 2:
                return None  # `x = y = 1` also answers a question for x alone
            return parts is not None and self._same_in_order(list(one.values()), parts)
        if other is None:
            return None
        parts = vector_of(right)
        if parts is None and isinstance(given, Relation) and len(given.sides) > 2:
            return None
        return parts is not None and self._same_in_order(parts, [other[name] for name in sorted(other)])
