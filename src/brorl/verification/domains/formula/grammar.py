r"""The answer grammar: `read` turns a string into a form.

    answer   items joined by `,`, `and` or `or`       `x = 3 cm, y = 4`
    item     sides joined by `=`, `<`, `\in`, ...     `x = 3 cm`
    side     an expression (a unit may follow), a set, a matrix, a ratio, or words

If the grammar cannot read part of an answer, the whole answer becomes a `Text`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from brorl.verification.domains.formula.expression_grammar import CURRENCY_OF, MODULO, ExpressionReader
from brorl.verification.domains.formula.expressions import (
    Apply,
    Bracketed,
    Combined,
    Expression,
    Form,
    Listing,
    Number,
    Quantity,
    Ratio,
    Relation,
    Symbol,
    Text,
    to_expression,
    variables,
)
from brorl.verification.domains.formula.names import between, modulo, modulus_of
from brorl.verification.domains.formula.normal import total_of
from brorl.verification.domains.formula.numerals import spelled_number
from brorl.verification.domains.formula.reader import WORDS_OF_FORMULAS
from brorl.verification.domains.formula.tokens import (
    END,
    Token,
    UnreadableError,
    tokenize,
    without_frame,
    word_list,
    words_of,
    written,
)
from brorl.verification.domains.formula.words import ABOUT, is_beside_unit, noun_of, units_of
from brorl.verification.domains.units import unit_named

SIGNS = frozenset({"=", "\\approx", "<", ">", "\\le", "\\ge", "\\ne", "\\in", "\\notin", "\\equiv"})
_CLOSERS = frozenset({")", "]", "\\}", "}", "\\rangle", "|", "&", "\\\\", "\\end", "\\mid", "\\over", "\\choose"})
_SET_SIGNS = frozenset({"\\cup", "\\cap", "\\setminus"})
_JOINTS = {",": ",", ";": ",", "and": "and", "or": "or", "\\lor": "or", "\\land": "and"}
_ENDS = _CLOSERS | SIGNS | _JOINTS.keys() | _SET_SIGNS | {":"}
_UNIT_COMMANDS = frozenset({"\\frac", "\\degree", "\\Omega", "\\mu", "\\AA"})
_PRODUCT = re.compile(  # matches products of letters: `mgh`, `qvB`, `ab`, but not `east` or `PQR`
    r"(?=[A-Z]*[a-z])(?:(?![aeiou])[a-z]|(?![AEIOU])[A-Z])+|[a-z]{2}"
)
_SHORT_WORDS = frozenset(
    word_list("ad am an as at be by do go he hi if in is it me my no of oh ok on or ox so to up us we id ma pa")
)
_OPAQUE = frozenset(
    {"\\int", "\\iint", "\\iiint", "\\oint", "\\complement", "\\lim", "\\limsup", "\\liminf", "\\det", "\\dim", "\\Pr"}
)
_PROBABILITIES = frozenset({"P", "E", "Pr", "Var", "Cov", "\\mathbb"})
_SAME_WORDS = (
    (re.compile(r"(?:there (?:is|are) )?no (?:real )?solutions?(?: exists?)?", re.IGNORECASE), "no solution"),
    (re.compile(r"(?:it )?does not exist", re.IGNORECASE), "DNE"),
)
_MAX_TAIL = 24
_MAX_DEPTH = 200


@lru_cache(maxsize=4096)
def read(text: str) -> Form:
    """Return the form of any string. Notation that the grammar cannot read becomes a `Text`."""
    try:
        tokens = without_frame(tokenize(text))
    except UnreadableError:
        return Text(" ".join(text.split()))
    try:
        reader = AnswerReader(tokens)
        form = reader.listing()
        if reader.peek() is END and not _is_deep(form):
            return form
    except (UnreadableError, ZeroDivisionError):
        pass
    return Text(words_of(tokens))


def _is_deep(form: Form) -> bool:
    """Return whether a form is nested too deeply for recursive functions: `2^2^2^2...`."""
    level: list[tuple[object, ...]] = [form]
    for _ in range(_MAX_DEPTH):
        level = [part for parent in level for part in parent if isinstance(part, tuple)]
        if not level:
            return False
    return True


class AnswerReader(ExpressionReader):
    """Reads an answer from tokens."""

    def listing(self) -> Form:
        """Listing: item (joint item)*."""
        items, joints = [self.item()], []
        while joint := self._joint(isinstance(items[-1], Relation)):
            joints.append(joint)
            if self.accept("\\ldots"):
                self.expect(",")
                last = self.item()
                items += [*between(items, last), last]
            else:
                items.append(self.item())
        if len(items) == 1:
            return items[0]
        if modulus := modulus_of(items[-1]):  # `1, 3 \pmod 8`
            items = [item if modulus_of(item) else modulo(item, modulus) for item in items]
        kinds = {joint for joint in joints if joint != ","}
        if len(kinds) > 1:
            raise UnreadableError("both `and` and `or`")
        return Listing(tuple(items), kinds.pop() if kinds else ",")

    def _joint(self, after_relation: bool) -> str | None:
        r"""Joint: `,`* (`,` | `;` | `and` | `or` | `\lor` | `\land`); after a relation also `\cup` and `\cap`."""
        if after_relation and (sign := self.accept("\\cup", "\\cap")):
            return "or" if sign.text == "\\cup" else "and"
        joint = None
        while joint in (None, ",") and (after := self._next_joint()):
            joint = after
            self.take()
        return joint

    def _next_joint(self) -> str | None:
        token = self.peek()
        return _JOINTS.get(token.text.lower() if token.kind == "name" else token.text)

    def item(self) -> Form:
        """Item: side (sign side)* modulus?."""
        sides: list[Form] = []
        signs: list[str] = []
        self.accept("\\approx", "=")
        if left := self._left_side():
            sides, signs = [left], [self.take().text]
        while True:
            sides.append(self._side_of_words() or self.side())
            if self.peek().text not in SIGNS:
                break
            signs.append(self.take().text)
        form = sides[0] if len(sides) == 1 else Relation(tuple(sides), tuple(signs))
        modulus = self._modulus()
        match sides[-1]:
            case Apply("mod", (value, number)) if signs[-1:] == ["\\equiv"]:  # `x \equiv 3 \mod 7`
                form = Relation((*sides[:-1], value), tuple(signs))
                modulus = number
            case _:
                pass
        return form if modulus is None else modulo(form, modulus)

    def _modulus(self) -> Expression | None:
        r"""Modulus: `\pmod` argument | `(mod` sum `)`."""
        if self.accept("\\pmod"):
            return self.argument(whole=True)
        if self.peek().text == "(" and self.peek(1).text in MODULO:
            self.at += 2
            return self.group(")")
        return None

    def _left_side(self) -> Form | None:
        """Read a side before `=` that only names a value, such as an integral or `P(A > 1)`; None for other sides."""
        first = self.peek()
        if not (first.text in _OPAQUE or (first.text in _PROBABILITIES and self.peek(1).text in ("(", "["))):
            return None
        for at, token in self.outside_brackets():
            if token.text in _JOINTS:
                return None
            if token.text == "=":
                words, self.at = written(self.tokens[self.at : at]), at
                return Symbol(words.replace(" ", ""))
        return None

    def _boundary(self, in_unit: bool = False) -> int:
        """Return where this side ends: before a comma, a sign, `and`, or a closing bracket."""
        for at, token in self.outside_brackets(_MAX_TAIL):
            is_number = in_unit and token.kind == "number" and at > self.at and self.tokens[at - 1].kind == "name"
            if token.text in _ENDS or is_number:
                return at
        return min(len(self.tokens), self.at + _MAX_TAIL)

    def _side_of_words(self) -> Form | None:
        """Read a side that is only words: a spelled-out number or other text; None for other sides."""
        if (number := self._spelled_with_and()) is not None:
            return number
        end = self._boundary()
        tokens = self.tokens[self.at : end]
        if not _are_words(tokens):
            return None
        self.at = end
        text = words_of(tokens)
        if (value := spelled_number(text)) is not None:
            return Number(value)
        return Text(next((same for pattern, same in _SAME_WORDS if pattern.fullmatch(text)), text))

    def _set_sign(self, form: Form) -> str | None:
        r"""Take the sign between two sets. `-` before a set means `\setminus`. None if there is no such sign."""
        sign = self.peek().text
        if isinstance(form, Number | Apply):
            return None
        if sign in _SET_SIGNS:
            return self.take().text
        if sign == "-" and self.peek(1).text == "\\{":
            self.take()
            return "\\setminus"
        return None

    def _spelled_with_and(self) -> Form | None:
        """Read a spelled-out number with `and`, such as `one and a half`; None for other words."""
        if self.peek().kind != "name":
            return None
        end = self.at
        while end < len(self.tokens) and (self.tokens[end].kind == "name" or self.tokens[end].text == "-"):
            end += 1
        words = [token.text for token in self.tokens[self.at : min(end, self.at + _MAX_TAIL)]]
        number = spelled_number(" ".join(words)) if "and" in words and end - self.at <= _MAX_TAIL else None
        if number is None:
            return None
        self.at = end
        return Number(number)

    def side(self) -> Form:
        """Side: (value unit?)+ | set (set_sign set)* | ratio. Several quantities form one: `2 hours 30 minutes`."""
        first = self._value()
        if not (isinstance(first, Quantity) and self.peek().kind == "number"):
            return first
        quantities: list[Form] = [first]
        while self.peek().kind == "number":
            quantities.append(self._value())
        total = total_of(quantities)
        if total is None:
            raise UnreadableError("two adjacent numbers")
        return total

    def _value(self) -> Form:
        while self.peek().kind == "name" and self.peek().text.lower() in ABOUT:
            self.take()
        start = self.at
        first = self.tokens[self.at : self.at + 2]  # one of them may be a sign
        currency = next((CURRENCY_OF[token.text] for token in first if token.text in CURRENCY_OF), None)
        form = self.sum()
        while (sign := self._set_sign(form)) is not None:
            other = self.sum()
            parts = form.parts if isinstance(form, Combined) and form.sign == sign else (form,)
            form = Combined(sign, (*parts, other))
        if not isinstance(form, Expression):
            return form
        if self.peek().text in (":", "to"):
            return self._ratio(start, form)
        form = self._with_unit(start, form)
        if self.peek().text in CURRENCY_OF:
            currency = CURRENCY_OF[self.take().text]
        return Quantity(to_expression(form), currency, None) if currency and not isinstance(form, Quantity) else form

    def _ratio(self, start: int, first: Expression) -> Form:
        """Ratio: sum ((`:` | `to`) sum)+. A whole number and a two-digit number may be a time."""
        items = [first]
        while self.peek().text in (":", "to"):
            self.take()
            items.append(to_expression(self.sum()))
        match [token.text for token in self.tokens[start : self.at]]:
            case [hours, _, minutes] if hours.isdigit() and minutes.isdigit():
                return Ratio(tuple(items), is_time=int(hours[:4]) <= 24 and len(minutes) == 2)
            case _:
                return Ratio(tuple(items), is_time=False)

    def _with_unit(self, start: int, value: Expression) -> Form:
        """Return a value with the unit or degree sign that follows it."""
        if isinstance(value, Apply) and value.operation == "degree" and self._boundary() == self.at:
            return Quantity(value.arguments[0], "°", None)
        measure = self._measure()
        if measure is None:
            return value
        unit, words, end = measure
        product = None
        if not words and not any(token.is_upright for token in self.tokens[self.at : end]):
            product = _product(self.tokens[start:end])
        self.at = end
        return product if product is not None and variables(value) else Quantity(value, unit, product, words)

    def starts_unit(self) -> bool:
        """Return whether the rest of this side is a unit."""
        return self.has_units and self._measure() is not None

    def _measure(self) -> tuple[str, str, int] | None:
        """Return the next (unit or counted noun, words after it, end); None if there is neither."""
        if self.taken:
            return None
        end = self._boundary(in_unit=True)
        tail = _without_brackets(self.tokens[self.at : end])
        if not tail or not _may_begin_unit(tail):
            return None
        for length in range(len(tail), 0, -1):
            if length < len(tail) and not is_beside_unit(tail[length]):
                break
            if length < len(tail) and tail[length - 1].text in ("in", "at"):  # not inches: `5 N in the direction`
                continue
            if (unit := _unit(tail[:length])) is not None:
                return unit, words_of(tail[length:]), end
        noun = noun_of(written(tail)) if tail[0].kind == "name" and _is_apart(tail) else None
        return None if noun is None else (noun, "", end)

    def bracketed(self) -> Form:
        """Read a tuple, an interval, a set, or an expression in brackets."""
        opening = self.take().text
        closers = {"(": (")", "]"), "[": ("]", ")"), "\\{": ("\\}",), "\\langle": ("\\rangle",)}[opening]
        before, self.in_bars = self.in_bars, False
        condition = self._condition() if opening == "\\{" else None
        if condition is not None:
            form = condition
            opening = "\\{:"
        else:
            is_empty = opening == "\\{" and self.peek().text in closers
            form = Listing((), ",") if is_empty else self.listing()
        closing = self.expect(*closers).text
        self.in_bars = before
        items = form.items if isinstance(form, Listing) and condition is None else (form,)
        if len(items) == 1 and (opening, closing) in (("(", ")"), ("[", "]")):
            return items[0]
        if (opening, closing) in (("(", "]"), ("[", ")")) and len(items) != 2:
            raise UnreadableError("mismatched brackets")
        return Bracketed(opening, items, closing)

    def _condition(self) -> Form | None:
        r"""Read the condition of `x \in \mathbb{R} : x > 3` up to the bracket; None for any other set."""
        if not (self.peek().kind == "name" and self.peek(1).text in (":", "\\mid", "|", "\\in")):
            return None
        ends = (":", "\\mid", "|", "\\}")
        at = next((at for at, token in self.outside_brackets() if token.text in ends), len(self.tokens))
        if self.tokens[at : at + 1] and self.tokens[at].text == "\\}":
            return None
        variable, domain = self.peek().text, written(self.tokens[self.at + 1 : at]).replace(" ", "")
        self.at = at + 1
        condition = self.listing()
        if domain not in ("", "\\in\\mathbb{R}") or variable not in variables(condition):
            raise UnreadableError("not a set of real numbers, or a condition on a different variable")
        return condition


def _without_brackets(tokens: Sequence[Token]) -> Sequence[Token]:
    """Return the tokens of a unit in brackets, `(m/s)`, without them. Single letters in brackets are factors."""
    if len(tokens) > 2 and tokens[0].text == "(" and tokens[-1].text == ")":
        inner = tokens[1:-1]
        return (
            [inner[0]._replace(is_spaced=True), *inner[1:]] if all(len(token.text) > 1 for token in inner) else tokens
        )
    return tokens


def _may_begin_unit(tokens: Sequence[Token]) -> bool:
    first = tokens[0]
    if first.kind != "name":
        return first.text in _UNIT_COMMANDS
    are_mixed = any(
        a.kind == b.kind == "name" and a.is_upright != b.is_upright and not b.is_spaced for a, b in pairwise(tokens)
    )
    return not are_mixed and (len(first.text) > 1 or _is_apart(tokens))


def _is_apart(tokens: Sequence[Token]) -> bool:
    """Return whether the first token is separate from the value before it, rather than a letter joined to it."""
    return tokens[0].is_upright or tokens[0].is_spaced or _is_prefix(tokens, 0)


def _unit(tokens: Sequence[Token]) -> str | None:
    """Return the text of the unit that tokens name; None if they do not name a unit."""
    if tokens[0].text == "\\degree":
        return f"°{tokens[1].text}" if len(tokens) == 2 and tokens[1].text in ("C", "F", "K") else None
    text = written(tokens)
    letters = (
        t.text
        for at, t in enumerate(tokens)
        if t.kind == "name" and not t.is_upright and len(t.text) < 4 and not _is_prefix(tokens, at)
    )
    is_product = tokens[0].text == "\\Omega" and len(tokens) > 1
    are_units = all(unit_named(text) or text in ("per", "sq") for text in letters)  # `cm`, but not `gh`
    return text if are_units and not is_product and units_of(text) else None


def _is_prefix(tokens: Sequence[Token], at: int) -> bool:
    r"""Return whether a token is a letter joined to the ohm symbol, as in `k\Omega`."""
    after = tokens[at + 1 : at + 2]
    return len(tokens[at].text) == 1 and any(token.text == "\\Omega" and not token.is_spaced for token in after)


def _are_words(tokens: Sequence[Token]) -> bool:
    """Return whether tokens are words such as `east`, not letters in a formula such as `mgh`."""
    names = [token for token in tokens if token.kind == "name"]
    if not names or any(token.kind != "name" and token.text not in ("-", "'", ".", '"') for token in tokens):
        return False
    if tokens[0].kind != "name" and tokens[0].text != '"':
        return False
    return any(
        name.is_upright or name.text in _SHORT_WORDS or not _PRODUCT.fullmatch(name.text)
        for name in names
        if len(name.text) > 1 and name.text.lower() not in WORDS_OF_FORMULAS
    )


def _product(tokens: Sequence[Token]) -> Expression | None:
    """Return tokens as an expression with all letters as variables; None if they are not an expression."""
    reader = AnswerReader(tokens, has_units=False)
    try:
        form = reader.sum()
    except UnreadableError:
        return None
    return form if isinstance(form, Expression) and reader.peek() is END else None
