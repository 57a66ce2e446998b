r"""The expression grammar: numbers, letters, functions, fractions, powers, products, sums, and matrices of these.

Each method reads the rule in its docstring: `?` means at most once, `*` any number of times, `+` at least once.
Adjacent letters are a product: `ab`. A number must follow an operator, except in mixed numbers: `1 1/2`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import TypeGuard

from brorl.verification.domains.formula.expressions import (
    LOG,
    Apply,
    Bracketed,
    Expression,
    Form,
    Matrix,
    Number,
    Symbol,
    exact_value,
    to_expression,
)
from brorl.verification.domains.formula.numerals import MAGNITUDES, based_of, number_of, ordinal_of, repeating_of
from brorl.verification.domains.formula.operations import arguments_in, multiplied, scaled, signed_form
from brorl.verification.domains.formula.reader import CONSTANT_NAMES, FUNCTION_NAMES, TokenReader
from brorl.verification.domains.formula.tokens import ORDINAL_ENDINGS, Token, UnreadableError, word_list, written

CURRENCY_OF = {"\\$": "dollar", "\\euro": "euro", "\\pounds": "pound", "\\yen": "yen", "\\rupee": "rupee"}
MODULO = frozenset({"mod", "\\mod"})
_MINUS_ONE = Number(Fraction(-1))
_MAX_DEPTH = 40  # nested brackets, roots and functions
_SIGNS = ("+", "-", "\\pm", "\\mp")
_SIGN_WORDS = frozenset({"negative", "minus"})
_GREEK = frozenset(
    word_list(
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi "
        "omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega pi infty ell hbar Re Im aleph partial nabla"
    )
)
_ACCENTS = frozenset(
    word_list("hat vec overline tilde dot ddot angle triangle widehat odot overleftrightarrow overset measuredangle")
)
_FACTORS = (  # commands that begin a factor
    _GREEK | _ACCENTS | FUNCTION_NAMES | frozenset(word_list("frac sqrt binom lfloor lceil begin sum prod langle"))
)
_NO_FACTORS = frozenset(word_list("and or to mod percent pct if"))
_TRANSPOSED = frozenset({"T", "\\top", "\\intercal"})
_MATRICES = frozenset(word_list("pmatrix bmatrix Bmatrix matrix smallmatrix vmatrix array cases"))
_CELL_ENDS = ("&", "\\\\", "\\end")
_CONDITION_WORDS = ("if", "for", "when", "where")
_SEVERAL = frozenset({"max", "min", "gcd", "lcm"})  # functions with several arguments
_PERIOD = re.compile(r"\.\d{0,30}?(\d{1,6}?)\1{1,30}$")  # digits that repeat before dots: `0.333...`
_WHOLE_FRACTION = re.compile(r"\\frac(?: *(?:\{ *\d+ *\}|\d)){2}(?!\d*\.)")


class ExpressionReader(TokenReader):
    """Reads expressions. `AnswerReader` adds the rules shared by expressions and answers."""

    listing: Callable[[], Form]  # all items up to a closing bracket
    bracketed: Callable[[], Form]  # a tuple, an interval, a set, or an expression in brackets
    starts_unit: Callable[[], bool]  # whether the rest of this item is a unit

    def __init__(self, tokens: Sequence[Token], has_units: bool = True) -> None:
        super().__init__(tokens)
        self.has_units = has_units  # whether a unit may end an expression here
        self.in_bars = False  # whether `|` closes an absolute value
        self._depth = 0

    def sum(self) -> Form:
        r"""Sum: (sign* product)+. A single product may be any form. A `-` before `\{` is a set difference instead."""
        terms = [self._signed(self._product)]
        while self.peek().text in _SIGNS and self.peek(1).text != "\\{":
            terms.append(self._signed(self._product))
        return terms[0] if len(terms) == 1 else Apply("+", tuple(map(to_expression, terms)))

    def _signed(self, read: Callable[[], Form]) -> Form:
        """Signed: sign* form."""
        signs = [*iter(self._sign, None)]
        form = read()
        for sign in reversed(signs):
            form = signed_form(sign, form)
        return form

    def _sign(self) -> str | None:
        r"""Sign: `+` | `-` | `\pm` | `\mp` | `minus` | `negative`. Before another word, `minus` is just a word."""
        token = self.peek()
        if token.kind == "name" and token.text.lower() in _SIGN_WORDS and self.peek(1).kind != "name":
            self.take()
            return "-"
        return self.take().text if token.text in _SIGNS else None

    def _product(self) -> Form:
        """Product: power ((`*` | `/` | `mod`) sign* power | magnitude | power)*. A single factor may be any form."""
        factors = [self._power()]
        while True:
            token = self.peek()
            if token.text in ("*", "/") or (token.text in MODULO and not token.is_upright):
                self.take()
                other = self._signed(self._power)
                if token.text == "*":
                    factors.append(other)
                else:
                    factors = [Apply("/" if token.text == "/" else "mod", (multiplied(factors), to_expression(other)))]
            elif token.text in MAGNITUDES and token.kind == "name" and isinstance(number := factors[-1], Number):
                self.take()
                factors[-1] = number._replace(value=number.value * MAGNITUDES[token.text])
            elif self._starts_factor() and not self.starts_unit():
                head = factors[0]
                factor = self._power()
                is_call = token.text == "(" and not token.is_spaced and self.is_after(")") and len(factors) == 1
                if is_call and isinstance(head, Symbol):  # `f(x)`; for most letters this is a product
                    factors = [Apply("call", (head, *arguments_in(factor)))]
                else:
                    factors.append(factor)
            else:
                return factors[0] if len(factors) == 1 else scaled(factors)

    def _starts_factor(self) -> bool:
        """Return whether the next token continues a product without an operator."""
        token = self.peek()
        if token.kind == "name":
            return token.text not in _NO_FACTORS
        if token.kind == "command":
            return token.text[1:] in _FACTORS
        if token.kind == "number":  # `3!2!`
            return self.is_after("!")
        if token.text == "(":
            return self.peek(1).text not in MODULO
        return token.text in ("[", "{") or (token.text == "|" and not self.in_bars)

    def _power(self) -> Form:
        r"""Power: primary (`^` exponent | `!` | `%` | `\degree` | `_` base)*."""
        base = self._primary()
        while True:
            text = self.peek().text
            if text == "\\degree":
                if self.starts_unit():
                    return base
                self.take()
                base = Apply("degree", (to_expression(base),))
            elif text == "^":
                self.take()
                base = self._raised(base)
            elif text in ("!", "%", "percent", "pct") and (text, self.peek(1).text) != ("!", "!"):
                self.take()
                base = Apply("!" if text == "!" else "%", (to_expression(base),))
            elif text == "_" and _is_whole(base):
                self.take()
                return based_of(str(base.value), self.raw(whole=True))
            elif text in ("'", "_", "!"):
                raise UnreadableError("a mark that cannot follow a value")
            else:
                return base

    def _raised(self, base: Form) -> Form:
        """Return a base with its exponent, which may mean an ordinal, a transpose, or an inverse function."""
        is_group = self.peek().text == "{"
        mark = self.peek(1 if is_group else 0).text
        is_alone = not is_group or self.peek(2).text == "}"
        if is_alone and mark in _TRANSPOSED and not isinstance(base, Number | Apply):
            self.raw(whole=True)
            if isinstance(base, Symbol):
                return Symbol(f"{base.name}^T")
            return Matrix(tuple(zip(*base.rows, strict=True)), base.is_array) if isinstance(base, Matrix) else base
        if is_alone and mark in ORDINAL_ENDINGS and isinstance(base, Number):
            return ordinal_of(base, self.raw(whole=True))
        exponent = self._exponent()
        if isinstance(base, Symbol) and base.name[0] in "fgh" and self.peek().text == "(" and exponent == _MINUS_ONE:
            return Symbol(f"{base.name}^{{-1}}")
        return Apply("^", (to_expression(base), exponent))

    def _exponent(self) -> Expression:
        """Exponent: sign* argument."""
        return to_expression(self._signed(partial(self.argument, whole=True)))

    def argument(self, whole: bool = False) -> Expression:
        """Argument: `{` sum `}` | digit | letter | primary. With `whole`, a number is taken whole."""
        if self.accept("{"):
            return self.group("}")
        token = self.peek()
        if token.kind == "number":
            return number_of(self.take(1 if token.text.isdigit() and not whole else None).text)
        if token.kind == "name" and token.text not in CONSTANT_NAMES:
            return Symbol(self.take(1).text)
        return to_expression(self._primary())

    def group(self, closing: str, in_bars: bool = False) -> Expression:
        """Group: sum closing. A unit never ends an expression inside a group."""
        before = self.has_units, self.in_bars
        self.has_units, self.in_bars = False, in_bars
        inner = to_expression(self.sum())
        self.has_units, self.in_bars = before
        self.expect(closing)
        return inner

    def _primary(self) -> Form:
        """Primary: currency? (number | name | command | bracketed | braces | bars)."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnreadableError("nested too deeply")
        self.accept(*CURRENCY_OF)
        token = self.peek()
        if token.kind == "number":
            form = self._number()
        elif token.kind == "name":
            form = self._name()
        elif token.text in ("(", "[", "\\{", "\\langle"):
            form = self.bracketed()
        elif token.kind == "command":
            form = self._command()
        elif self.accept("{"):
            form = self._braces()
        elif self.accept("|"):
            form = Apply("abs", (self.group("|", in_bars=True),))
        else:
            raise UnreadableError(f"not a factor: {token.text}")
        self._depth -= 1
        return form

    def _braces(self) -> Form:
        r"""Braces: `{` listing ((`\over` | `\choose`) listing)? `}`."""
        form = self.listing()
        operator = self.expect("}", "\\over", "\\choose").text
        if operator == "}":
            return form
        under = self.listing()
        self.expect("}")
        return Apply("/" if operator == "\\over" else "binom", (to_expression(form), to_expression(under)))

    def _number(self) -> Form:
        r"""Number: digits | digits `_` base | `0.\overline{3}` | `0.333...` | `5th` | `1 1/2` | `1\frac{1}{2}`."""
        token = self.take()
        if self.accept("_"):
            return based_of(token.text, self.raw())
        if self.accept("\\overline", "\\dot"):
            return repeating_of(token.text, self.raw())
        following = self.peek()
        if following.text == "\\ldots" and (period := _PERIOD.search(token.text)):
            self.take()
            return repeating_of(token.text[: period.start(1)], period[1])
        number = number_of(token.text)
        if following.text in ORDINAL_ENDINGS and (following.is_upright or not following.is_spaced):
            return ordinal_of(number, self.take().text)
        if token.text.isdigit() and self._starts_fraction():
            return number._replace(value=number.value + self._whole_fraction())
        return number

    def _starts_fraction(self) -> bool:
        r"""Return whether a fraction of whole numbers follows a number: `\frac{1}{2}`, or ` 1/2` after a space."""
        first, slash, under = (self.peek(ahead) for ahead in range(3))
        if first.text == "\\frac":
            return _WHOLE_FRACTION.match(written(self.tokens[self.at : self.at + 7])) is not None
        return first.is_spaced and first.text.isdigit() and slash.text == "/" and under.text.isdigit()

    def _whole_fraction(self) -> Fraction:
        r"""Whole fraction: `\frac` argument argument | digits `/` digits. It must be below 1."""
        if self.accept("\\frac"):
            parts = (self.argument(), self.argument())
        else:
            top, _, under = (self.take() for _ in range(3))
            parts = (number_of(top.text), number_of(under.text))
        value = exact_value(Apply("/", parts))
        if value is None or value >= 1:
            raise UnreadableError("not a proper fraction")
        return value

    def _name(self) -> Form:
        """Name: function | constant | symbol."""
        name = self.take_letter().text
        if name in FUNCTION_NAMES:
            return self._function(name)
        return Symbol(CONSTANT_NAMES[name]) if name in CONSTANT_NAMES else self._symbol(name)

    def _symbol(self, name: str) -> Expression:
        """Symbol: letter (`_` subscript | `'` | `^` primes)*."""
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
        """Read the form that begins with a LaTeX command."""
        command = self.take().text
        name = command[1:]
        match name:
            case "frac":
                return self._fraction()
            case "sqrt" if self.accept("["):
                degree = self.group("]")
                return Apply("root", (self.argument(), degree))
            case "sqrt":
                return Apply("sqrt", (self.argument(),))
            case "binom":
                return Apply("binom", (self.argument(), self.argument()))
            case "lfloor" | "lceil":
                return Apply(name[1:], (self.group(f"\\r{name[1:]}"),))
            case "emptyset":
                return Bracketed("\\{", (), "\\}")
            case "mathbb":
                return Symbol(f"\\mathbb{{{self.raw()}}}")
            case "sum" | "prod":
                return self._series(name)
            case "begin":
                return self._matrix()
            case "Delta" | "delta" if self.peek().kind == "name" and len(self.peek().text) == 1:
                return self._symbol(f"{command} {self.take().text}")  # a difference such as \Delta x is one symbol
        if name in FUNCTION_NAMES:
            return self._function(name)
        if name in _ACCENTS:
            return self._accented(name)
        if name in _GREEK:
            return self._symbol(command)
        raise UnreadableError(f"the command {command}")

    def _fraction(self) -> Form:
        r"""Fraction: `\frac` argument argument. A derivative such as `\frac{dy}{dx}` is one symbol."""
        top, under = self.argument(), self.argument()
        match top, under:
            case Symbol("d"), _:
                raise UnreadableError("a derivative")
            case Apply("*", (Symbol("d"), Symbol(y))), Apply("*", (Symbol("d"), Symbol(x))) if len(x) == len(y) == 1:
                return Symbol(f"d{y}/d{x}")
            case _:
                return Apply("/", (top, under))

    def _accented(self, accent: str) -> Expression:
        r"""Accented: accent argument: `\vec{v}`, `\angle ABC`."""
        text = self.raw(whole=True).strip("{}")
        return self._symbol(text if accent in ("hat", "vec") and len(text) == 1 else f"\\{accent}{{{text}}}")

    def _series(self, name: str) -> Form:
        r"""Series: (`\sum` | `\prod`) `_` `{` symbol `=` sum `}` `^` exponent product."""
        self.expect("_")
        self.expect("{")
        variable = self._symbol(self.take().text)
        self.expect("=")
        low = self.group("}")
        self.expect("^")
        high = self._exponent()
        return Apply(name, (variable, low, high, to_expression(self._product())))

    def _matrix(self) -> Form:
        r"""Matrix: `{` kind `}` listing? ((`&` | `\\`) listing?)* `\end` `{` kind `}`."""
        kind = self.raw(whole=True).rstrip("*")
        if kind == "array":
            self.raw(whole=True)  # the column alignment
        if kind not in _MATRICES:
            raise UnreadableError(f"the environment {kind}")
        rows: list[list[Form]] = [[]]
        end = ""
        while end != "\\end":
            while kind == "cases" and self.peek().text in _CONDITION_WORDS:
                self.take()
            if self.peek().text not in _CELL_ENDS:
                rows[-1].append(self.listing())
            end = self.expect(*_CELL_ENDS).text
            if end == "\\\\":
                rows.append([])
        self.raw(whole=True)
        cells = tuple(tuple(row) for row in rows if row)
        if not cells or (kind != "cases" and len(set(map(len, cells))) > 1):
            raise UnreadableError("rows of different lengths")
        return Matrix(cells, is_array=kind not in ("vmatrix", "cases"))

    def _function(self, name: str) -> Form:
        """Function: name (`_` argument | `^` exponent)* arguments."""
        base = exponent = None
        while mark := self.accept("_", "^"):
            if mark.text == "_":
                base = self.argument(whole=True)
            else:
                exponent = self._exponent()
        if exponent == _MINUS_ONE:
            name = f"arc{name}"
            exponent = None
        arguments = self._several() if name in _SEVERAL else (self._function_argument(),)
        if name == "log":
            arguments = (*arguments, base or Symbol(LOG))
        elif base is not None or name not in FUNCTION_NAMES:
            raise UnreadableError("a base or an inverse that the function does not have")
        applied = Apply(name, arguments)
        return applied if exponent is None else Apply("^", (applied, exponent))

    def _several(self) -> tuple[Expression, ...]:
        """Several: bracketed, whose items are the arguments of a function such as `max`."""
        if not self._opens():
            raise UnreadableError("no arguments in brackets")
        return arguments_in(self._primary())

    def _opens(self) -> bool:
        return self.peek().text in ("(", "\\{", "{", "|", "[")

    def _function_argument(self) -> Expression:
        r"""Function argument: bracketed | sign? power+ (`/` number)?. The powers end before the next function."""
        if self._opens():
            return to_expression(self._primary())
        sign = self.accept("-", "+")
        factors = [self._power()]
        while self._continues_argument():
            factors.append(self._power())
        if self.peek().text == "/" and self.peek(1).kind == "number" and not self.peek().is_spaced:
            self.take()
            factors = [Apply("/", (multiplied(factors), to_expression(self._primary())))]
        product = multiplied(factors)
        return Apply("-", (product,)) if sign and sign.text == "-" else product

    def _continues_argument(self) -> bool:
        text = self.peek().text
        is_function = text.lstrip("\\") in FUNCTION_NAMES - {"sqrt"}
        return self._starts_factor() and text not in ("(", "[", "|") and not is_function and not self.starts_unit()


def _is_whole(form: Form) -> TypeGuard[Number]:
    return isinstance(form, Number) and form.value.denominator == 1
