r"""Compares two forms: values at points, sets by members, equations up to a factor, texts word by word.

A value may have a name before it (`x = 42`, `AB = 42`) and a unit after it. A list without brackets is a set. All other
pairs of forms differ.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

from brorl.verification.domains.formula.expressions import (
    Apply,
    Bracketed,
    Combined,
    Expression,
    Form,
    Listing,
    Quantity,
    Relation,
    Residue,
    Symbol,
    Text,
    UndefinedError,
    as_quantity,
    exact_value,
    is_decimal,
    product_of,
    to_expression,
    variables,
    walk,
)
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
    is_equation,
    members_of,
    normal,
    percent_of,
    region_of,
    turned,
)
from brorl.verification.domains.formula.tokens import UnreadableError
from brorl.verification.domains.formula.values import (
    is_multiple,
    is_rounded,
    place_of,
    same_value,
    within,
)
from brorl.verification.domains.formula.words import are_same_words, are_two_factors, same_beside, units_of
from brorl.verification.domains.units import conversions

_PI = Symbol("\\pi")
_MAX_PAIRS = 5_000  # unsuccessful comparisons between members of two lists
_ROUNDING = Fraction(1, 1_000_000)  # the minimum tolerance, unless both numbers are whole


class FormComparison:
    """Compares forms with the tolerance of `agree`; `is_complex` says whether the letter i is the imaginary unit."""

    def __init__(self, is_complex: bool, tolerance: Fraction | None) -> None:
        self._is_complex, self._tolerance = is_complex, tolerance

    def agrees(self, right: Form, given: Form) -> bool:
        """Return whether an answer agrees with the reference; False if a value cannot be computed."""
        try:
            return self.same(right, given)
        except (UnreadableError, UndefinedError):
            return False

    def same(self, right: Form, given: Form) -> bool:
        """Return whether an answer agrees with the reference."""
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
        r"""Return `\frac{1}{2}` for `\frac{1}{2} or 0.5`, which gives one value twice; other forms unchanged."""
        if isinstance(form, Listing) and form.joint == "or" and not any(variables(item) for item in form.items[1:]):
            first = normal(form.items[0])
            if not isinstance(first, Listing) and all(self.same(first, item) for item in form.items[1:]):
                return first
        return form

    def _same_text(self, right: Form, given: Form) -> bool:
        """Compare words. A few letters may be a product: `ab` is a times b."""
        if isinstance(right, Text) and isinstance(given, Text):
            return are_same_words(right.words, given.words) or are_two_factors(right.words, given.words)
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
        if isinstance(right, Residue) or isinstance(given, Residue):
            return self._same_residue(right, given)
        vectors = vector_of(right) or along_axes(right, given), vector_of(given) or along_axes(given, right)
        if vectors[0] is not None and vectors[1] is not None:
            return self._same_in_order(vectors[0], vectors[1])
        match right, given:
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

    def _same_residue(self, right: Form, given: Form) -> bool:
        """Compare numbers up to multiples of a modulus; a plain number must equal the written one."""
        if isinstance(right, Residue) and isinstance(given, Residue):
            values = [exact_value(one) for one in (right.value, given.value, right.modulus)]
            numbers = [value for value in values if value is not None]
            if len(numbers) == len(values) and numbers[2]:
                is_congruent = (numbers[0] - numbers[1]) % numbers[2] == 0
                return is_congruent and self._same_value(right.modulus, given.modulus)
            return self._same_value(right.modulus, given.modulus) and self._same_value(right.value, given.value)
        one, other = (form.value if isinstance(form, Residue) else form for form in (right, given))
        return isinstance(one, Expression) and isinstance(other, Expression) and self._same_value(one, other)

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
        """Compare degrees to a multiple of pi."""
        if {right.unit, given.unit} != {"", "°"} or _PI not in (*walk(right.value), *walk(given.value)):
            return False
        one, other = (Apply("degree", (form.value,)) if form.unit else form.value for form in (right, given))
        return self._same_value(one, other)

    def _same_value(self, right: Expression, given: Expression, slack: Fraction | None = None) -> bool:
        """Compare expressions; 50% equals both 1/2 and 50. `slack` is the error of a unit conversion."""
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
        """Return whether two lists have the same members in any order; one member cannot match two.

        Both lists are sorted, so that equal members are found immediately; UnreadableError if too many pairs remain.
        """
        if len(right) == len(given):
            right, left = sorted(right, key=place_of), sorted(given, key=place_of)
        else:
            right, left = self._distinct(right), self._distinct(given)
        pairs = 0
        for member in right:
            found = next((at for at, other in enumerate(left) if self.same(member, other)), None)
            if found is None:
                return False
            del left[found]
            pairs += found
            if pairs > _MAX_PAIRS:
                raise UnreadableError("too many members")
        return not left

    def _distinct(self, members: Sequence[Form]) -> list[Form]:
        """Return the distinct members, ordered by value."""
        kept: list[Form] = []
        alike: dict[tuple[float, ...], list[Form]] = defaultdict(list)
        pairs = 0
        for member in sorted(members, key=place_of):
            at_place = alike[place_of(member)]
            pairs += len(at_place)
            if pairs > _MAX_PAIRS:
                raise UnreadableError("too many members")
            if not any(self.same(other, member) for other in (*kept[-1:], *at_place)):
                kept.append(member)
                at_place.append(member)
        return kept

    def _same_regions(self, right: Form, given: Form) -> bool | None:
        """Compare sets of real numbers; None if a form is not such a set, or if both are pairs in brackets."""
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
        """Return whether a chain such as `x = 6 * 7 = 42` gives a value: other sides are names or equal the value."""
        if not set(given.signs) <= EQUAL:
            return False
        is_open, sides, signs = bool(variables(right)), given.sides, given.signs
        if is_open and is_call(sides[0]) and not variables(sides[0].arguments[1:]) <= variables(right):
            return False  # `f(t) = ...`, but the reference has a different variable
        is_value = is_open and isinstance(sides[0], Expression) and self.same(right, sides[0])
        if is_name(sides[0], wide=not is_open) and not is_value:
            return self._chain_says(right, sides[1:], signs[1:], after_name=True)
        if is_name(sides[-1], wide=False):
            return self._chain_says(right, sides[:-1], signs[:-1])
        return self._chain_says(right, sides, signs)

    def _chain_says(self, right: Form, sides: Sequence[Form], signs: Sequence[str], after_name: bool = False) -> bool:
        """Return whether equal sides give a value; after a name, skip formulas with variables: `A = r h = 42`."""
        while after_name and not variables(right) and sides and variables(sides[0]):
            sides, signs = sides[1:], signs[1:]
        if not sides or not self._is_chain(sides, signs):
            return False
        exacts = [side for side, sign in zip(sides, ("=", *signs), strict=True) if sign != "\\approx"]
        said = sides if isinstance(right, Expression) and is_decimal(right) else exacts
        return any(self.same(right, side) for side in said)

    def _is_chain(self, sides: Sequence[Form], signs: Sequence[str]) -> bool:
        r"""Return whether all sides of a chain are equal, or rounded after `\approx`."""
        for one, other, sign in zip(sides, sides[1:], signs, strict=False):
            if sign == "\\approx":
                one, other = (side.value if isinstance(side, Quantity) else side for side in (one, other))
                if not (isinstance(one, Expression) and isinstance(other, Expression) and is_rounded(one, other)):
                    return False
            elif not self.same(one, other):
                return False
        return True

    def _same_relation(self, right: Relation, given: Form) -> bool:
        """Compare an equation or inequality to an answer; for `x = 42` the answer may be `42`."""
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
        """Return whether relations are equal up to a factor and the order of sides: `2x = 4y` and `2y = x`."""
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
        """Compare `x = 1, y = 2` to a similar list or to `1, 2`; None if neither form names several values."""
        one, other = assigned(right), assigned(given)
        if one is not None and other is not None:
            return one.keys() == other.keys() and all(self.same(one[name], other[name]) for name in one)
        if one is not None:
            parts = given.items if isinstance(given, Listing) else vector_of(given)
            if parts is None and isinstance(right, Relation) and len(right.sides) > 2:
                return None  # `x = y = 1` also answers a question about x alone
            return parts is not None and self._same_in_order(list(one.values()), parts)
        if other is None:
            return None
        parts = vector_of(right)
        if parts is None and isinstance(given, Relation) and len(given.sides) > 2:
            return None
        return parts is not None and self._same_in_order(parts, [other[name] for name in sorted(other)])
