r"""The grammar of expressions: numbers, letters, functions, fractions, powers, products, sums, and matrices of these.

Letters side by side are a product: `ab`. Before a number there must be an operator, except in mixed numbers: `1 1/2`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from brorl.verification.domains.formula.expressions import (
    FUNCTIONS,
    INTEGER_FUNCTIONS,
    Apply,
    Bracketed,
    Expression,
    Form,
    Matrix,
    Number,
    Quantity,
    Symbol,
    Text,
    to_expression,
)
from brorl.verification.domains.formula.numerals import based_of, number_of, ordinal_of, repeating_of
from brorl.verification.domains.formula.tokens import Token, TokenReader, UnreadableError, word_list, written
from brorl.verification.domains.formula.words import MAGNITUDES, ORDINAL_ENDINGS

_MAX_DEPTH = 60
_SIGNS = ("+", "-", "\\pm", "\\mp")
_NAMES = frozenset(FUNCTIONS) | frozenset(INTEGER_FUNCTIONS) | {"log"}
_CONSTANTS = {"pi": "\\pi", "infinity": "\\infty", "inf": "\\infty", "infty": "\\infty"}
_SHORT = {"pi"} | _NAMES - set(word_list("Re Im abs lg sec max min sign floor ceil"))
_PIECE = re.compile("|".join([*sorted(_SHORT, key=len, reverse=True), "."]))
WORDS_OF_FORMULAS = frozenset(_NAMES | _CONSTANTS.keys())
_GREEK = frozenset(
    word_list(
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi "
        "omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar Re Im aleph partial nabla"
    )
)
_MARKS = frozenset(
    word_list("hat vec overline tilde dot ddot angle triangle widehat odot overleftrightarrow overset measuredangle")
)
_FACTORS = (
    _GREEK | _MARKS | _NAMES | frozenset(word_list("frac sqrt binom pi infty lfloor lceil begin sum prod langle"))
)
_ENDS_TERM = frozenset(word_list("and or to mod percent pct if"))
MODULO = frozenset({"mod", "\\mod"})
_TRANSPOSED = frozenset({"T", "\\top", "\\intercal"})
_MATRICES = frozenset(word_list("pmatrix bmatrix Bmatrix matrix smallmatrix vmatrix array cases"))
CURRENCY_OF = {"\\$": "dollar", "\\euro": "euro", "\\pounds": "pound", "\\yen": "yen", "\\rupee": "rupee"}
_PERIOD = re.compile(r"\.\d{0,30}?(\d{1,6}?)\1{1,30}$")  # the repeating digits before dots: `0.333...`


class ExpressionReader(TokenReader):
    """Reads expressions from tokens. A subclass reads what these share with answers: lists, brackets, units."""

    listing: Callable[..., Form]  # all items up to a closing bracket
    bracketed: Callable[[], Form]  # a tuple, an interval, a set, or an expression in brackets
    starts_unit: Callable[[], bool]  # whether the rest of this item is a unit

    def __init__(self, tokens: Sequence[Token], has_units: bool = True) -> None:
        super().__init__(tokens)
        self.depth, self.bars, self.has_units = 0, 0, has_units

    def argument(self, whole: bool = False) -> Expression:
        """Read one argument: a group, or one character; with `whole` a number keeps all its digits."""
        if self.accept("{"):
            before, self.has_units = self.has_units, False
            inner = to_expression(self.sum())
            self.has_units = before
            self.expect("}")
            return inner
        token = self.peek()
        if (token.text.isdigit() and not whole) or (token.kind == "name" and token.text not in _CONSTANTS):
            self.split()
        token = self.peek()
        if token.kind == "number" or (token.kind == "name" and len(token.text) == 1):
            self.take()
            return number_of(token.text) if token.kind == "number" else Symbol(token.text)
        return to_expression(self._primary())

    def sum(self) -> Form:
        """Read a sum; a single term may be any form."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise UnreadableError("too deep")
        terms: list[Form] = []
        while not terms or (self.peek().text in _SIGNS and self.peek(1).text != "\\{"):
            signs = [token.text for token in iter(lambda: self.accept(*_SIGNS), None)]
            term = self._product()
            for sign in reversed(signs):
                term = _signed(sign, term)
            terms.append(term)
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Apply("+", tuple(map(to_expression, terms)))

    def _product(self) -> Form:
        """Read a product; a single factor may be any form."""
        factors = [self._power()]
        while True:
            token = self.peek()
            if token.text in ("*", "/") or (token.text in MODULO and not token.is_upright):
                self.take()
                signs = [sign.text for sign in iter(lambda: self.accept("+", "-"), None)]
                other = _signed("-" if signs.count("-") % 2 else "+", self._power())
                if token.text == "*":
                    factors.append(other)
                else:
                    factors = [Apply("/" if token.text == "/" else "mod", (_multiplied(factors), to_expression(other)))]
            elif token.text in MAGNITUDES and token.kind == "name" and isinstance(factors[-1], Number):
                self.take()
                factors.append(Number(Fraction(MAGNITUDES[token.text])))
            elif self._starts_factor(token) and not self.starts_unit():
                head = factors[0] if token.text == "(" and not token.is_spaced and len(factors) == 1 else None
                factors.append(self._power())
                if isinstance(head, Symbol) and self.tokens[self.at - 1].text == ")":
                    inner = factors[1]  # of a call such as `f(x)`; for most letters its value is a product
                    parts = inner.items if isinstance(inner, Bracketed) and inner.items else (inner,)
                    factors = [Apply("call", (head, *map(to_expression, parts)))]
            else:
                return factors[0] if len(factors) == 1 else _scaled(factors)

    def _starts_factor(self, token: Token) -> bool:
        """Whether a token continues a product without an operator."""
        if token.kind == "name":
            return token.text not in _ENDS_TERM
        if token.kind == "command":
            return token.text[1:] in _FACTORS
        if token.kind == "number":
            return self.tokens[self.at - 1].text == "!" or self._follows_imaginary_unit()
        if token.text == "(" and self.peek(1).text in MODULO:
            return False
        return token.text in ("(", "[", "{") or (token.text == "|" and not self.bars)

    def _follows_imaginary_unit(self) -> bool:
        """Whether a number is glued to the letter i or j: `i4` is 4 times i."""
        before = self.tokens[max(self.at - 2, 0)].text
        return self.tokens[self.at - 1].text in ("i", "j") and not self.peek().is_spaced and before != "_"

    def _power(self) -> Form:
        """Read a factor with its exponent and the marks after it."""
        base = self._primary()
        while True:
            text, texts = self.peek().text, [self.peek(ahead).text for ahead in range(1, 4)]
            circle = (
                1 if text == "\\degree" else 2 if texts[0] == "\\circ" else 4 if texts[1:] == ["\\circ", "}"] else 0
            )
            if text == "\\degree" or (text == "^" and circle):
                if self.starts_unit():
                    return base
                self.at += circle
                base = Apply("degree", (to_expression(base),))
            elif text == "^":
                self.take()
                base = self._raised(base)
            elif text in ("!", "%", "percent", "pct") and (text, texts[0]) != ("!", "!"):
                self.take()
                base = Apply("!" if text == "!" else "%", (to_expression(base),))
            elif text == "_" and isinstance(base, Number) and base.value.denominator == 1:
                self.take()
                return based_of(str(base.value), self.raw(whole=True))
            elif text in ("'", "_", "!"):
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
            return ordinal_of(base, inner)
        exponent = self._exponent()
        if isinstance(base, Symbol) and base.name[0] in "fgh" and self.peek().text == "(" and _is_minus_one(exponent):
            return Symbol(f"{base.name}^{{-1}}")
        return Apply("^", (to_expression(base), exponent))

    def _exponent(self) -> Expression:
        """Read what follows `^`."""
        if sign := self.accept("+", "-"):
            inner = self._exponent()
            return Apply("-", (inner,)) if sign.text == "-" else inner
        return self.argument(whole=True)

    def _primary(self) -> Form:
        """Read a number, a letter, a function, or a group in brackets, after the sign of a currency."""
        self.accept(*CURRENCY_OF)
        token = self.peek()
        if token.kind == "number":
            return self._number()
        if token.kind == "name":
            return self._name()
        if token.text in ("(", "[", "\\{", "\\langle"):
            return self.bracketed()
        if token.kind == "command":
            return self._command()
        if self.accept("{"):
            form = self.listing("}", "\\over", "\\choose")
            operation = {"\\over": "/", "\\choose": "binom"}.get(self.tokens[self.at - 1].text)
            return Apply(operation, (to_expression(form), to_expression(self.listing("}")))) if operation else form
        if self.accept("|"):
            self.bars, before = 1, self.bars
            inner = to_expression(self.sum())
            self.bars = before
            self.expect("|")
            return Apply("abs", (inner,))
        raise UnreadableError(f"no factor: {token.text}")

    def _number(self) -> Form:
        r"""Read a number: plain digits, `0.\overline{3}`, `5th`, `1011_2`, or a mixed number such as `1\frac{1}{2}`."""
        token = self.take()
        if self.accept("_"):
            return based_of(token.text, self.raw())
        if self.accept("\\overline", "\\dot"):
            return repeating_of(token.text, self.raw())
        following = [self.peek(ahead) for ahead in range(3)]
        if following[0].text == "\\ldots" and (period := _PERIOD.search(token.text)):
            self.take()
            return repeating_of(token.text[: period.start(1)], period[1])
        number = number_of(token.text)
        if following[0].text in ORDINAL_ENDINGS and (following[0].is_upright or not following[0].is_spaced):
            self.take()
            return ordinal_of(number, following[0].text)
        if token.text.isdigit() and following[0].text == "\\frac" and not self.starts_unit():
            before, part = self.at, self._primary()
            if isinstance(part, Apply) and part.operation == "/" and all(map(_is_whole, part.arguments)):
                return Apply("+", (number, part))
            self.at = before
        is_part = following[0].text.isdigit() and following[0].is_spaced and following[1].text == "/"
        if token.text.isdigit() and is_part and following[2].text.isdigit():
            self.at += 3
            return Apply("+", (number, Apply("/", (number_of(following[0].text), number_of(following[2].text)))))
        return number

    def _name(self) -> Form:
        """Read a word: a function, a constant, or letters."""
        token = self.take()
        if token.text in _NAMES:
            return self._function(token.text)
        if token.text in _CONSTANTS:
            return Symbol(_CONSTANTS[token.text])
        if len(token.text) == 1:
            return self._symbol(token.text)
        if token.is_upright or token.text in ("AM", "PM"):
            raise UnreadableError("words in a formula")
        pieces = [
            Token("name", piece, is_spaced=at == 0 and token.is_spaced)
            for at, piece in enumerate(_PIECE.findall(token.text))
        ]
        self.at -= 1
        self.tokens[self.at : self.at + 1] = pieces
        return self._name()

    def _symbol(self, name: str) -> Expression:
        """Return a symbol with the subscript and the primes that follow."""
        while True:
            if self.accept("_"):
                name += "_" + self.raw()
            elif self.accept("'"):
                name += "'"
            elif self.peek().text == "^" and "'" in (self.peek(1).text, self.peek(2).text):
                self.take()
                name += self.raw(whole=True)
            else:
                return Symbol(name)

    def _command(self) -> Form:
        """Read the form that a LaTeX command begins."""
        token = self.take()
        name = token.text[1:]
        match name:
            case "frac":
                return self._fraction()
            case "sqrt" if self.accept("["):
                degree = to_expression(self.sum())
                self.expect("]")
                return Apply("root", (self.argument(), degree))
            case "sqrt":
                return Apply("sqrt", (self.argument(),))
            case "binom":
                return Apply("binom", (self.argument(), self.argument()))
            case "pi" | "infty":
                return Symbol(token.text)
            case "emptyset":
                return Bracketed("\\{", (), "\\}")
            case "lfloor" | "lceil":
                inner = to_expression(self.sum())
                self.expect("\\rfloor" if name == "lfloor" else "\\rceil")
                return Apply("floor" if name == "lfloor" else "ceil", (inner,))
            case "mathbb":
                return Symbol(f"\\mathbb{{{self.raw()}}}")
            case "sum" | "prod":
                return self._series(name)
            case "begin":
                return self._matrix()
            case _:
                pass
        if name in _NAMES:
            return self._function(name)
        if name in _MARKS:  # a symbol with a mark, such as a vector or an angle
            text = self.raw(whole=True).strip("{}")
            return self._symbol(text if name in ("hat", "vec") and len(text) == 1 else f"\\{name}{{{text}}}")
        if name in ("Delta", "delta") and self.peek().kind == "name" and len(self.peek().text) == 1:
            return self._symbol(f"{token.text} {self.take().text}")  # a difference is one symbol
        if name in _GREEK:
            return self._symbol(token.text)
        raise UnreadableError(f"the command {token.text}")

    def _fraction(self) -> Form:
        start = self.at
        top, under = self.argument(), self.argument()
        if isinstance(top, Symbol) and top.name == "d":
            raise UnreadableError("a derivative")
        text = written(self.tokens[start : self.at]).replace(" ", "")
        if match := re.fullmatch(r"\{d([a-zA-Z])\}\{d([a-zA-Z])\}", text):
            return Symbol(f"d{match[1]}/d{match[2]}")
        return Apply("/", (top, under))

    def _series(self, name: str) -> Form:
        self.expect("_")
        self.expect("{")
        variable = self._symbol(self.take().text)
        self.expect("=")
        low = to_expression(self.sum())
        self.expect("}")
        self.expect("^")
        high = self._exponent()
        return Apply(name, (variable, low, high, to_expression(self._product())))

    def _matrix(self) -> Form:
        kind = self.raw(whole=True).rstrip("*")
        if kind == "array":
            self.raw(whole=True)
        if kind not in _MATRICES:
            raise UnreadableError(f"the environment {kind}")
        rows: list[tuple[Form, ...]] = [()]
        while not self.accept("\\end"):
            if self.accept("\\\\"):
                rows.append(())
            elif not self.accept("&"):
                while kind == "cases" and self.peek().text in ("if", "for", "when", "where"):
                    self.take()
                rows[-1] = (*rows[-1], self.listing("&", "\\\\", "\\end"))
                self.at -= 1
        self.raw(whole=True)
        rows = [row for row in rows if row]
        if not rows or (kind != "cases" and len({len(row) for row in rows}) > 1):
            raise UnreadableError("rows of different lengths")
        return Matrix(tuple(rows), kind not in ("vmatrix", "cases"))

    def _function(self, name: str) -> Form:
        """Read the power, the base and the argument of a function."""
        base = exponent = None
        while sign := self.accept("_", "^"):
            if sign.text == "_":
                base = self.argument(whole=True)
            else:
                exponent = self._exponent()
        if exponent is not None and _is_minus_one(exponent):
            name, exponent = f"arc{name}", None
        arguments = self._arguments(several=name in ("max", "min", "gcd", "lcm"))
        if name == "log":
            arguments = (*arguments, base or Symbol("\\log"))
        elif base is not None or name not in _NAMES:
            raise UnreadableError("a base of another function, or an inverse of one that has none")
        applied = Apply(name, arguments)
        return applied if exponent is None else Apply("^", (applied, exponent))

    def _arguments(self, several: bool) -> tuple[Expression, ...]:
        if self.peek().text in ("(", "\\{", "{", "|", "["):
            form = self._primary()
            if several and isinstance(form, Bracketed) and form.items and form.closing in (")", "\\}"):
                return tuple(map(to_expression, form.items))
            return (to_expression(form),)
        if several:
            raise UnreadableError("no arguments in brackets")
        sign = self.accept("-", "+")
        factors = [self._power()]
        while (
            self._starts_factor(self.peek())
            and self.peek().text not in ("(", "[", "|")
            and self.peek().text.lstrip("\\") not in _NAMES - {"sqrt"}
            and not self.starts_unit()
        ):
            factors.append(self._power())
        if self.peek().text == "/" and self.peek(1).kind == "number" and not self.peek().is_spaced:
            self.take()
            factors = [Apply("/", (_multiplied(factors), to_expression(self._primary())))]
        product = _multiplied(factors)
        return (Apply("-", (product,)) if sign and sign.text == "-" else product,)


def _is_minus_one(expression: Expression) -> bool:
    return expression in (Number(Fraction(-1)), Apply("-", (Number(Fraction(1)),)))


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
        return Apply("-", (form,)) if isinstance(form, Expression) else _scaled([Number(Fraction(-1)), form])
    return Apply(sign, (to_expression(form),))


def _multiplied(factors: Sequence[Form]) -> Expression:
    expressions = tuple(map(to_expression, factors))
    return expressions[0] if len(expressions) == 1 else Apply("*", expressions)


def _scaled(factors: Sequence[Form]) -> Form:
    """Return a product, which may have one matrix or vector among its factors."""
    factors = [to_expression(factor) if isinstance(factor, Text) else factor for factor in factors]
    others = [factor for factor in factors if not isinstance(factor, Expression)]
    scalars = [factor for factor in factors if isinstance(factor, Expression)]
    if not others:
        return _multiplied(factors)
    scalar, (form, *more) = _multiplied(scalars or [Number(Fraction(1))]), others
    if isinstance(form, Matrix) and form.is_array and not more:
        return Matrix(
            tuple(tuple(Apply("*", (scalar, to_expression(cell))) for cell in row) for row in form.rows), True
        )
    is_vector = isinstance(form, Bracketed) and form.closing in (")", "\\rangle") and form.opening != "["
    if isinstance(form, Bracketed) and is_vector and factors[-1] is form and not more:
        return form._replace(items=tuple(Apply("*", (scalar, to_expression(item))) for item in form.items))
    raise UnreadableError("a product with a form that is no expression")
