r"""Compares two forms: values at points, sets by members, equations up to a factor, text word by word.

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
    is_numeral,
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
    is_evaluated,
    is_multiple,
    is_rounded,
    place_of,
    same_value,
    within,
)
from brorl.verification.domains.formula.words import are_same_words, are_two_factors, same_beside, units_of
from brorl.verification.domains.units import conversions

_PI = Symbol("\\pi")
_MAX_PAIRS = 5_000  # failed comparisons between members of two lists
_ROUNDING = Fraction(1, 1_000_000)  # the minimum tolerance, unless both numbers are whole


class FormComparison:
    """Compares forms with the tolerance of `agree`.

    With `is_complex`, the letter i is the imaginary unit. With `must_evaluate`, an answer with an operation to carry
    out does not agree with a number: `40 + 2` differs from `42`.
    """

    def __init__(self, is_complex: bool, tolerance: Fraction | None, must_evaluate: bool = False) -> None:
        self._is_complex = is_complex
        self._tolerance = tolerance
        self._must_evaluate = must_evaluate

    def agrees(self, reference: Form, answer: Form) -> bool:
        """Return whether an answer agrees with the reference; False if a value cannot be computed."""
        try:
            return self.same(reference, answer)
        except (UnreadableError, UndefinedError):
            return False

    def same(self, reference: Form, answer: Form) -> bool:
        """Return whether an answer agrees with the reference."""
        reference, answer = self._single(normal(reference)), self._single(normal(answer))
        is_text = isinstance(reference, Text) or isinstance(answer, Text)
        if is_text and (region_of(reference) is None or region_of(answer) is None):
            return self._same_text(reference, answer)
        if (sets := self._same_regions(reference, answer)) is not None:
            return sets
        if (assignments := self._same_assignments(reference, answer)) is not None:
            return assignments
        if isinstance(reference, Relation):
            return self._same_relation(reference, answer)
        if isinstance(answer, Relation):
            return self._gives(reference, answer)
        members = members_of(reference), members_of(answer)
        joints = {form.joint for form in (reference, answer) if isinstance(form, Listing)}
        if joints == {"and", "or"} and any(isinstance(item, Text) for item in members[0] or ()):
            return False
        if members[0] is not None and members[1] is not None:
            return self._same_members(members[0], members[1])
        return self._same_kind(reference, answer)

    def _single(self, form: Form) -> Form:
        r"""Reduce `\frac{1}{2} or 0.5`, one value given twice, to `\frac{1}{2}`; return other forms unchanged."""
        if isinstance(form, Listing) and form.joint == "or" and not any(variables(item) for item in form.items[1:]):
            first = normal(form.items[0])
            if not isinstance(first, Listing) and all(self.same(first, item) for item in form.items[1:]):
                return first
        return form

    def _same_text(self, reference: Form, answer: Form) -> bool:
        """Compare words. A few letters may be a product: `ab` is a times b."""
        if isinstance(reference, Text) and isinstance(answer, Text):
            return are_same_words(reference.words, answer.words) or are_two_factors(reference.words, answer.words)
        if isinstance(reference, Text) and isinstance(answer, Relation):
            return self._gives(reference, answer)
        if isinstance(reference, Relation):
            return self._same_relation(reference, answer)
        text, other = (reference, answer) if isinstance(reference, Text) else (answer, reference)
        assert isinstance(text, Text)
        if text.words == "no solution":
            return other == Bracketed("\\{", (), "\\}")
        if are_choices(reference, text.words):
            return True
        is_product = isinstance(other, Expression) and re.fullmatch("[A-Za-z]{2,6}", text.words)
        return bool(is_product) and self._same_value(product_of(text.words), to_expression(other))

    def _same_kind(self, reference: Form, answer: Form) -> bool:
        """Compare tuples, intervals, matrices and values."""
        if isinstance(reference, Residue) or isinstance(answer, Residue):
            return self._same_residue(reference, answer)
        vectors = (
            vector_of(reference) or along_axes(reference, answer),
            vector_of(answer) or along_axes(answer, reference),
        )
        if vectors[0] is not None and vectors[1] is not None:
            return self._same_in_order(vectors[0], vectors[1])
        match reference, answer:
            case Combined(sign, parts), Combined(other_sign, other_parts):
                return sign == other_sign and self._same_members(parts, other_parts)
            case Bracketed(opening, items, closing), Bracketed(other_opening, other_items, other_closing):
                are_alike = (opening, closing) == (other_opening, other_closing)
                return are_alike and self._same_in_order(items, other_items)
            case _:
                pass
        first, second = as_quantity(reference), as_quantity(answer)
        if first is None or second is None:
            return reference == answer
        if self._must_evaluate and is_numeral(first.value) and not self._is_evaluated(first, second):
            return False
        if isinstance(reference, Expression) and isinstance(answer, Expression):
            return self._same_value(reference, answer)
        return self._same_quantity(first, second)

    def _is_evaluated(self, reference: Quantity, answer: Quantity) -> bool:
        """Return whether an answer's number is evaluated. In `12V` for `12 V`, V is a unit read as a variable."""
        value = answer.value
        if reference.unit and isinstance(value, Apply) and value.operation == "*":
            numbers = tuple(part for part in value.arguments if not variables(part))
            value = numbers[0] if len(numbers) == 1 else Apply("*", numbers or value.arguments)
        return is_evaluated(reference.value, value, self._is_complex)

    def _same_residue(self, reference: Form, answer: Form) -> bool:
        """Compare numbers up to multiples of a modulus. A plain number must equal the number as written."""
        if isinstance(reference, Residue) and isinstance(answer, Residue):
            if self._must_evaluate and is_numeral(reference.value) and not is_numeral(answer.value):
                return False
            first, second, modulus = map(exact_value, (reference.value, answer.value, reference.modulus))
            if first is not None and second is not None and modulus:
                return (first - second) % modulus == 0 and self._same_value(reference.modulus, answer.modulus)
            same_modulus = self._same_value(reference.modulus, answer.modulus)
            return same_modulus and self._same_value(reference.value, answer.value)
        plain, other = (form.value if isinstance(form, Residue) else form for form in (reference, answer))
        return isinstance(plain, Expression) and isinstance(other, Expression) and self._same_kind(plain, other)

    def _same_quantity(self, reference: Quantity, answer: Quantity) -> bool:
        """Compare values with units. If only one side has a unit, the unit is dropped."""
        products = [product for product in (reference.product, answer.product) if product is not None]
        if len(products) == 2 and any(map(variables, products)) and self._same_value(products[0], products[1]):
            return True
        if reference.words != answer.words and not same_beside(reference.words, answer.words):
            return False
        is_measured = self._tolerance is not None
        if (
            "" in (reference.unit, answer.unit)
            or reference.unit == answer.unit
            or (is_measured and reference.unit == f"°{answer.unit}")
        ):
            slack = Fraction(0) if reference.unit or answer.unit else None
            return self._same_value(reference.value, answer.value, slack) or self._same_angle(reference, answer)
        return any(
            self._same_value(reference.value, converted(answer.value, way), way.slack)
            for answer_unit in units_of(answer.unit)
            for unit in units_of(reference.unit)
            for way in conversions(answer_unit, unit)
            if is_measured or not way.slack
        )

    def _same_angle(self, reference: Quantity, answer: Quantity) -> bool:
        """Compare degrees with a multiple of pi."""
        if {reference.unit, answer.unit} != {"", "°"} or _PI not in (*walk(reference.value), *walk(answer.value)):
            return False
        angles = [Apply("degree", (form.value,)) if form.unit else form.value for form in (reference, answer)]
        return self._same_value(angles[0], angles[1])

    def _same_value(self, reference: Expression, answer: Expression, slack: Fraction | None = None) -> bool:
        """Compare expressions. 50% equals both 1/2 and 50. `slack` is the error of a unit conversion."""
        answer = with_letters(reference, answer)
        pairs = [(reference, answer)]
        percent, answer_percent = percent_of(reference), percent_of(answer)
        if slack is None and (percent is None) != (answer_percent is None):
            pairs.append((percent or reference, answer_percent or answer))
        return any(self._same_number(*pair, slack) for pair in pairs)

    def _same_number(self, reference: Expression, answer: Expression, slack: Fraction | None) -> bool:
        if self._tolerance is not None:
            least = max(self._tolerance, _ROUNDING, slack or _ROUNDING)
            near = within(reference, answer, least, are_counts=slack is None and not self._tolerance)
            if near is not None:
                return near
        return same_value(reference, answer, self._is_complex)

    def _same_in_order(self, reference: Sequence[Form], answer: Sequence[Form]) -> bool:
        return len(reference) == len(answer) and all(map(self.same, reference, answer))

    def _same_members(self, reference: Sequence[Form], answer: Sequence[Form]) -> bool:
        """Return whether two lists have the same members in any order. Each member matches at most one other.

        Sorting both lists first finds equal members immediately. Raises an UnreadableError if too many pairs remain.
        """
        if len(reference) == len(answer):
            members, left = sorted(reference, key=place_of), sorted(answer, key=place_of)
        else:
            members, left = self._distinct(reference), self._distinct(answer)
        pairs = 0
        for member in members:
            place = next((place for place, other in enumerate(left) if self.same(member, other)), None)
            if place is None:
                return False
            del left[place]
            pairs += place
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

    def _same_regions(self, reference: Form, answer: Form) -> bool | None:
        """Compare sets of real numbers; None if a form is not such a set, or if both are pairs in brackets."""
        if all(isinstance(form, Bracketed) and form.opening != "\\{:" for form in (reference, answer)):
            return None
        region, answer_region = region_of(reference), region_of(answer)
        if region is None or answer_region is None or not any((*region.holds, *answer_region.holds)):
            return None
        if is_equation(reference) or is_equation(answer):
            return None
        if region.variable and answer_region.variable and region.variable != answer_region.variable:
            return False
        return region.holds == answer_region.holds and all(map(self._same_kind, region.ends, answer_region.ends))

    def _gives(self, reference: Form, answer: Relation) -> bool:
        """Return whether a chain such as `x = 6 * 7 = 42` gives a value: its other sides are names or equal it."""
        if not set(answer.signs) <= EQUAL:
            return False
        sides, signs = answer
        is_open = bool(variables(reference))
        if is_open and is_call(sides[0]) and not variables(sides[0].arguments[1:]) <= variables(reference):
            return False  # `f(t) = ...`, but the reference has a different variable
        is_value = is_open and isinstance(sides[0], Expression) and self.same(reference, sides[0])
        if is_name(sides[0], wide=not is_open) and not is_value:
            return self._chain_gives(reference, sides[1:], signs[1:], after_name=True)
        if is_name(sides[-1], wide=False):
            return self._chain_gives(reference, sides[:-1], signs[:-1])
        return self._chain_gives(reference, sides, signs)

    def _chain_gives(
        self, reference: Form, sides: Sequence[Form], signs: Sequence[str], after_name: bool = False
    ) -> bool:
        """Return whether a chain gives a value. After a name, skip formulas with variables: `A = r h = 42`."""
        while after_name and not variables(reference) and sides and variables(sides[0]):
            sides, signs = sides[1:], signs[1:]
        if not sides or not self._is_chain(sides, signs):
            return False
        if not (isinstance(reference, Expression) and is_decimal(reference)):
            sides = [side for side, sign in zip(sides, ("=", *signs), strict=True) if sign != "\\approx"]
        return any(self.same(reference, side) for side in sides)

    def _is_chain(self, sides: Sequence[Form], signs: Sequence[str]) -> bool:
        r"""Return whether all sides of a chain are equal, up to rounding after `\approx`."""
        values = FormComparison(self._is_complex, self._tolerance)  # `40 + 2 = 42` is a chain
        for side, following, sign in zip(sides, sides[1:], signs, strict=False):
            if sign == "\\approx":
                exact, rounded = (form.value if isinstance(form, Quantity) else form for form in (side, following))
                if not (
                    isinstance(exact, Expression) and isinstance(rounded, Expression) and is_rounded(exact, rounded)
                ):
                    return False
            elif not values.same(side, following):
                return False
        return True

    def _same_relation(self, reference: Relation, answer: Form) -> bool:
        """Compare an equation or inequality with an answer. For `x = 42`, the answer may be `42`."""
        if modulus_of(reference) and not modulus_of(answer):
            return False  # a single solution is not enough
        if set(reference.signs) <= EQUAL and (pair := solved(reference)):
            name, value = pair
            if not isinstance(answer, Relation):
                return self.same(value, answer)
            answer = with_argument(reference.sides[0], answer)
            if not set(answer.signs) <= EQUAL:
                return False
            if same_name(name, answer.sides[0]) and self._chain_gives(value, answer.sides[1:], answer.signs[1:], True):
                return True
            if same_name(name, answer.sides[-1]) and self._chain_gives(value, answer.sides[:-1], answer.signs[:-1]):
                return True
            return bool(variables(value)) and self._same_equation(reference, answer)
        if set(reference.signs) <= EQUAL and not any(variables(side) for side in reference.sides):
            return self._is_chain(reference.sides, reference.signs) and any(
                self.same(side, answer) for side in reference.sides
            )
        return isinstance(answer, Relation) and self._same_equation(reference, answer)

    def _same_equation(self, reference: Relation, answer: Relation) -> bool:
        """Return whether relations are equal up to a factor and the order of sides: `2x = 4y` and `2y = x`."""
        are_expressions = all(isinstance(side, Expression) for side in (*reference.sides, *answer.sides))
        if not len(reference.signs) == len(answer.signs) == 1 or not are_expressions:
            return any(
                reference.signs == relation.signs and self._same_in_order(reference.sides, relation.sides)
                for relation in (answer, turned(answer))
            )
        differences, signs = [], []  # `1 < x` is the difference x - 1 with the sign `>`
        for relation in (reference, answer):
            greater = turned(relation) if relation.signs[0] in ("<", "\\le") else relation
            left, right = map(to_expression, greater.sides)
            differences.append(Apply("+", (left, Apply("-", (right,)))))
            signs.append(greater.signs[0])
        if signs[0] != signs[1] or variables(differences[0]) != variables(differences[1]):
            return False
        return is_multiple(differences[0], differences[1], signs[0] in (">", "\\ge"), self._is_complex)

    def _same_assignments(self, reference: Form, answer: Form) -> bool | None:
        """Compare `x = 1, y = 2` with a similar list or with `1, 2`; None if neither form names several values."""
        values, answer_values = assigned(reference), assigned(answer)
        if values is not None and answer_values is not None:
            same_names = values.keys() == answer_values.keys()
            return same_names and all(self.same(values[name], answer_values[name]) for name in values)
        if values is not None:
            items = answer.items if isinstance(answer, Listing) else vector_of(answer)
            if items is None and isinstance(reference, Relation) and len(reference.sides) > 2:
                return None  # `x = y = 1` also answers a question about x alone
            return items is not None and self._same_in_order(list(values.values()), items)
        if answer_values is None:
            return None
        items = vector_of(reference)
        if items is None and isinstance(answer, Relation) and len(answer.sides) > 2:
            return None
        return items is not None and self._same_in_order(items, [answer_values[name] for name in sorted(answer_values)])
