r"""The grammar of expressions: sums, products, powers, functions and brackets.

Letters side by side are a product: `ab`. Before a number there must be an operator, except in mixed numbers: `1 1/2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from brorl.verification.domains.formula.atoms import (
    CURRENCY_OF,
    GREEK,
    MARKS,
    NAMES,
    AtomReader,
    based,
    is_minus_one,
    multiply,
    ordinal,
)
from brorl.verification.domains.formula.expressions import (
    Apply,
    Bracketed,
    Expression,
    Form,
    Matrix,
    Number,
    Quantity,
    Symbol,
    to_expression,
)
from brorl.verification.domains.formula.tokens import Token, UnreadableError, word_list
from brorl.verification.domains.formula.words import MAGNITUDES, ORDINAL_ENDINGS

_MAX_DEPTH = 60
_SIGNS = ("+", "-", "\\pm", "\\mp")
_TRANSPOSED = frozenset({"T", "\\top", "\\intercal"})
_ENDS_TERM = frozenset(word_list("and or to mod percent pct if"))
_FACTORS = GREEK | MARKS | NAMES | frozenset(word_list("frac sqrt binom pi infty lfloor lceil begin sum prod langle"))


class FactorReader(AtomReader):
    """Reads expressions from tokens."""

    def sum(self) -> Form:
        """Read a sum; a single term may be any form."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise UnreadableError("too deep")
        terms: list[Form] = []
        while True:
            signs = [token.text for token in iter(lambda: self.accept(*_SIGNS), None)]
            if terms and not signs:
                break
            if self.peek().text == "\\{" and terms:
                self.at -= 1
                break
            term = self.product()
            for sign in reversed(signs):
                term = _signed(sign, term)
            terms.append(term)
            if self.peek().text not in _SIGNS or self.starts_unit():
                break
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Apply("+", tuple(map(to_expression, terms)))

    def product(self) -> Form:
        """Read a product; a single factor may be any form."""
        factors: list[Form] = [self.mixed_number()]
        while True:
            token = self.peek()
            if self.accept("*"):
                factors.append(self.signed_power())
            elif self.accept("/"):
                factors = [Apply("/", (multiply(factors), to_expression(self.signed_power())))]
            elif token.text in ("mod", "\\bmod") and not token.is_upright:
                self.take()
                factors = [Apply("mod", (multiply(factors), to_expression(self.signed_power())))]
            elif token.text in MAGNITUDES and token.kind == "name" and isinstance(factors[-1], Number):
                self.take()
                factors.append(Number(Fraction(MAGNITUDES[token.text])))
            elif self.starts_factor(token) and not self.starts_unit():
                is_call = token.text == "(" and not token.is_spaced and len(factors) == 1
                factors.append(self.power())
                if is_call and isinstance(factors[0], Symbol) and self.tokens[self.at - 1].text == ")":
                    factors = [_call(factors[0], factors[1])]
            else:
                break
        return factors[0] if len(factors) == 1 else _scale(factors)

    def signed_power(self) -> Form:
        """Read a factor after an operator, which may have a sign."""
        signs = [token.text for token in iter(lambda: self.accept("+", "-"), None)]
        factor: Form = self.power()
        return _signed("-", factor) if signs.count("-") % 2 else factor

    def starts_factor(self, token: Token) -> bool:
        """Whether a token continues a product without an operator."""
        if token.kind == "name":
            return token.text not in _ENDS_TERM
        if token.kind == "command":
            return token.text[1:] in _FACTORS
        if token.kind == "number":
            return self.tokens[self.at - 1].text == "!"
        return token.text in ("(", "[", "{") or (token.text == "|" and not self.bars)

    def mixed_number(self) -> Form:
        r"""Read a factor, or a mixed number such as `1\frac{1}{2}` and `1 1/2`."""
        self.accept(*CURRENCY_OF)
        first, start = self.peek(), self.at
        whole = self.power()
        if not (first.kind == "number" and first.text.isdigit() and self.at == start + 1 and isinstance(whole, Number)):
            return whole
        three = [self.peek(ahead) for ahead in range(3)]
        if three[0].text == "\\frac":
            before = self.at
            part = self.power()
            is_percent = isinstance(part, Apply) and part.operation == "%"
            part = part.arguments[0] if is_percent and isinstance(part, Apply) else part
            if isinstance(part, Apply) and part.operation == "/" and all(_is_whole(one) for one in part.arguments):
                mixed = Apply("+", (whole, part))
                return Apply("%", (mixed,)) if is_percent else mixed
            self.at = before
        elif three[0].text.isdigit() and three[0].is_spaced and three[1].text == "/" and three[2].text.isdigit():
            self.at += 3
            parts = [Number(Fraction(int(token.text))) for token in (three[0], three[2])]
            return Apply("+", (whole, Apply("/", tuple(parts))))
        return whole

    def power(self) -> Form:
        """Read a factor with its exponent and the marks after it."""
        base = self.primary()
        while True:
            token = self.peek()
            if token.text == "^" or token.text == "\\degree":
                texts = [self.peek(ahead).text for ahead in range(1, 4)]
                if token.text == "^" and not (texts[0] == "\\circ" or texts == ["{", "\\circ", "}"]):
                    self.take()
                    base = self._raised(base)
                    continue
                if self.starts_unit():
                    return base
                self.at += 1 if token.text == "\\degree" else 2 if self.peek(1).text == "\\circ" else 4
                base = Apply("degree", (to_expression(base),))
            elif token.text == "!" and self.peek(1).text != "!":
                self.take()
                base = Apply("!", (to_expression(base),))
            elif token.text in ("%", "percent", "pct"):
                self.take()
                base = Apply("%", (to_expression(base),))
            elif token.text == "_" and isinstance(base, Number) and base.value.denominator == 1:
                self.take()
                return based(str(base.value), self.braced() if self.peek().text == "{" else self.take().text)
            elif token.text in ("'", "_", "!"):
                raise UnreadableError("a mark that no value has")
            else:
                return base

    def _raised(self, base: Form) -> Form:
        """Return a base with its exponent, which may say an ordinal, a transpose, or the inverse of a function."""
        is_group = self.peek().text == "{"
        inner, length = self.peek(1 if is_group else 0).text, 3 if is_group else 1
        is_alone = not is_group or self.peek(2).text == "}"
        if inner in _TRANSPOSED and is_alone and not isinstance(base, Number | Apply):
            self.at += length
            if isinstance(base, Symbol):
                return Symbol(f"{base.name}^T")
            return Matrix(tuple(zip(*base.rows, strict=True)), base.is_array) if isinstance(base, Matrix) else base
        if isinstance(base, Number) and inner in ORDINAL_ENDINGS:
            self.at += length
            return ordinal(base, inner)
        exponent = self.exponent()
        if isinstance(base, Symbol) and base.name[0] in "fgh" and self.peek().text == "(" and is_minus_one(exponent):
            return Symbol(f"{base.name}^{{-1}}")
        return Apply("^", (to_expression(base), exponent))

    def exponent(self) -> Expression:
        """Read what follows `^`."""
        token = self.peek()
        if token.text in ("+", "-"):
            self.take()
            inner = self.exponent()
            return Apply("-", (inner,)) if token.text == "-" else inner
        return self.argument(whole=True)


def _is_whole(expression: Expression) -> bool:
    return isinstance(expression, Number) and expression.value.denominator == 1 and not expression.is_decimal


def _signed(sign: str, form: Form) -> Form:
    if sign == "+":
        return form
    if sign == "-":
        if isinstance(form, Number):
            return Number(-form.value, form.is_decimal)
        if isinstance(form, Quantity):
            return form._replace(value=Apply("-", (form.value,)), product=form.product and Apply("-", (form.product,)))
        return Apply("-", (form,)) if isinstance(form, Expression) else _scale([Number(Fraction(-1)), form])
    return Apply(sign, (to_expression(form),))


def _scale(factors: Sequence[Form]) -> Form:
    """Return a product, which may have one matrix or vector among its factors."""
    others = [factor for factor in factors if not isinstance(factor, Expression)]
    if not others:
        return multiply(factors)
    scalar = multiply([factor for factor in factors if isinstance(factor, Expression)] or [Number(Fraction(1))])
    (form, *more) = others
    if more:
        raise UnreadableError("a product of matrices")
    if isinstance(form, Matrix) and form.is_array:
        return Matrix(
            tuple(tuple(Apply("*", (scalar, to_expression(cell))) for cell in row) for row in form.rows), True
        )
    if (
        isinstance(form, Bracketed)
        and form.closing in (")", "\\rangle")
        and form.opening != "["
        and factors[-1] is form
    ):
        return form._replace(items=tuple(Apply("*", (scalar, to_expression(item))) for item in form.items))
    raise UnreadableError("a product with a form that is no expression")


def _call(head: Symbol, form: Form) -> Form:
    """Return a call such as `f(x)`; its value is a product for most letters, see `expressions`."""
    if isinstance(form, Bracketed) and form.items:
        return Apply("call", (head, *map(to_expression, form.items)))
    return Apply("call", (head, to_expression(form)))
