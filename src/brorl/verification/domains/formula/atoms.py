r"""The grammar of the smallest parts: numbers, letters with their marks, functions, fractions, roots, matrices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from brorl.verification.domains.formula.expressions import (
    FUNCTIONS,
    INTEGER_FUNCTIONS,
    Apply,
    Based,
    Bracketed,
    Expression,
    Form,
    Matrix,
    Number,
    Symbol,
    to_expression,
)
from brorl.verification.domains.formula.tokens import END, Token, UnreadableError, word_list, written
from brorl.verification.domains.formula.words import NUMERALS, ORDINAL_ENDINGS


class Cursor:
    """Moves through tokens. Subclasses read forms; the methods declared here let lower classes call higher ones."""

    listing: Callable[..., Form]  # all items up to a closing bracket
    bracketed: Callable[[], Form]  # a tuple, an interval, a set, or an expression in brackets
    sum: Callable[[], Form]
    product: Callable[[], Form]
    power: Callable[[], Form]  # a factor with its exponent
    exponent: Callable[[], Expression]
    mixed_number: Callable[[], Form]  # a factor, or a mixed number
    starts_factor: Callable[[Token], bool]  # whether a token continues a product without an operator
    starts_unit: Callable[[], bool]  # whether the rest of this item is a unit

    def __init__(self, tokens: Sequence[Token], has_units: bool = True) -> None:
        self.tokens, self.at, self.depth, self.bars = list(tokens), 0, 0, 0
        self.has_units = has_units

    def peek(self, ahead: int = 0) -> Token:
        """Return a token without taking it."""
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else END

    def take(self) -> Token:
        """Return the next token, and move past it."""
        token = self.peek()
        self.at += 1
        return token

    def accept(self, *texts: str) -> Token | None:
        """Take the next token if it is one of these marks or commands."""
        return self.take() if self.peek().text in texts and self.peek().kind in ("mark", "command") else None

    def expect(self, *texts: str) -> Token:
        """Take the next token, which must be one of these."""
        token = self.accept(*texts)
        if token is None:
            raise UnreadableError(f"expected {' or '.join(texts)}, got {self.peek().text}")
        return token

    def outside_brackets(self, most: int | None = None) -> Iterator[tuple[int, Token]]:
        """Yield (place, token) from here on, without the tokens inside brackets that open after here."""
        depth = 0
        for at in range(self.at, len(self.tokens) if most is None else min(self.at + most, len(self.tokens))):
            text = self.tokens[at].text
            if depth == 0:
                yield at, self.tokens[at]
            depth += (text in ("{", "(", "[", "\\{")) - (text in ("}", ")", "]", "\\}"))

    def braced(self) -> str:
        """Return the content of a group of braces, without spaces."""
        self.expect("{")
        start, depth = self.at, 1
        while depth:
            token = self.take()
            if token is END:
                raise UnreadableError("a group does not close")
            depth += (token.text == "{") - (token.text == "}")
        return written(self.tokens[start : self.at - 1]).replace(" ", "")


NAMES = frozenset(FUNCTIONS) | frozenset(INTEGER_FUNCTIONS) | {"log"}
_CONSTANTS = {"pi": "\\pi", "infinity": "\\infty", "inf": "\\infty", "infty": "\\infty"}
_SHORT = {"pi"} | NAMES - set(word_list("Re Im abs lg sec max min sign floor ceil"))
_PIECE = re.compile("|".join([*sorted(_SHORT, key=len, reverse=True), "."]))
WORDS_OF_FORMULAS = frozenset(NAMES | _CONSTANTS.keys())
GREEK = frozenset(
    word_list(
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi "
        "omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar Re Im aleph partial nabla"
    )
)
MARKS = frozenset(
    word_list("hat vec overline tilde dot ddot angle triangle widehat odot overleftrightarrow overset measuredangle")
)
CURRENCY_OF = {"\\$": "dollar", "\\euro": "euro", "\\pounds": "pound", "\\yen": "yen", "\\rupee": "rupee"}
_PAIRS = (("(", ")"), ("\\{", "\\}"))
_PERIOD = re.compile(r"\.\d{0,30}?(\d{1,6}?)\1{1,30}$")  # the repeating digits before dots: `0.333...`


class AtomReader(Cursor):
    """Reads numbers, letters, functions, and groups in brackets."""

    def argument(self, whole: bool = False) -> Expression:
        """Read one argument: a group, or one character; with `whole` a number keeps all its digits."""
        token = self.peek()
        if self.accept("{"):
            before, self.has_units = self.has_units, False
            inner = to_expression(self.sum())
            self.has_units = before
            self.expect("}")
            return inner
        if token.kind == "number" and not whole and len(token.text) > 1 and token.text.isdigit():
            self.tokens[self.at : self.at + 1] = [Token("number", token.text[0]), Token("number", token.text[1:])]
        if token.kind == "name" and len(token.text) > 1 and token.text not in _CONSTANTS:
            self.tokens[self.at : self.at + 1] = [Token("name", token.text[0]), Token("name", token.text[1:])]
        token = self.peek()
        if token.kind == "number" or (token.kind == "name" and len(token.text) == 1):
            self.take()
            return _number(token.text) if token.kind == "number" else Symbol(token.text)
        return to_expression(self.primary())

    def primary(self) -> Form:
        """Read a number, a letter, a function, or a group in brackets, after the sign of a currency."""
        self.accept(*CURRENCY_OF)
        token = self.peek()
        if token.kind == "number":
            return self.number()
        if token.kind == "name":
            return self.name()
        if token.kind == "command":
            return self.command()
        if token.text in ("(", "[", "\\{"):
            return self.bracketed()
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

    def number(self) -> Form:
        r"""Read a number: `0.\overline{3}`, `5th`, `1011_2`, or plain digits."""
        token = self.take()
        if self.accept("_"):
            return based(token.text, self.braced() if self.peek().text == "{" else self._one_character())
        if self.peek().text in ("\\overline", "\\dot"):
            self.take()
            return _repeating(token.text, self.braced() if self.peek().text == "{" else self._one_character())
        if self.peek().text == "\\ldots" and (period := _PERIOD.search(token.text)):
            self.take()
            return _repeating(token.text[: period.start(1)], period[1])
        suffix = self.peek()
        if suffix.text in ORDINAL_ENDINGS and (suffix.is_upright or not suffix.is_spaced):
            self.take()
            return ordinal(_number(token.text), suffix.text)
        return _number(token.text)

    def name(self) -> Form:
        """Read a word: a function, a constant, or letters."""
        token = self.take()
        if token.text in NAMES:
            return self.function(token.text)
        if token.text in _CONSTANTS:
            return Symbol(_CONSTANTS[token.text])
        if len(token.text) == 1:
            return self.symbol(token.text)
        if token.is_upright or token.text in ("AM", "PM"):
            raise UnreadableError("words in a formula")
        pieces = [
            Token("name", piece, is_spaced=at == 0 and token.is_spaced)
            for at, piece in enumerate(_PIECE.findall(token.text))
        ]
        self.at -= 1
        self.tokens[self.at : self.at + 1] = pieces
        return self.name()

    def symbol(self, name: str) -> Expression:
        """Return a symbol with the subscript and the primes that follow."""
        while True:
            if self.accept("_"):
                token = self.peek()
                name += "_" + (self.braced() if token.text == "{" else self._one_character())
            elif self.accept("'"):
                name += "'"
            elif self.peek().text == "^" and "'" in (self.peek(1).text, self.peek(2).text):
                self.take()
                name += self.braced() if self.peek().text == "{" else self.take().text
            else:
                return Symbol(name)

    def _one_character(self) -> str:
        token = self.take()
        if token.kind not in ("name", "number", "command"):
            raise UnreadableError("no subscript")
        if token.kind == "command" or len(token.text) == 1:
            return token.text
        self.at -= 1
        self.tokens[self.at] = Token(token.kind, token.text[1:])
        return token.text[0]

    def command(self) -> Form:
        """Read the form that a LaTeX command begins."""
        token = self.take()
        name = token.text[1:]
        match name:
            case "frac":
                return self._fraction()
            case "sqrt":
                return self._root()
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
            case "langle":
                self.at -= 1
                return self.bracketed()
            case "mathbb":
                return Symbol(f"\\mathbb{{{self.braced() if self.peek().text == '{' else self._one_character()}}}")
            case "sum" | "prod":
                return self._series(name)
            case "begin":
                return self._matrix()
            case _:
                return self._named_command(token)

    def _named_command(self, token: Token) -> Form:
        name = token.text[1:]
        if name in NAMES:
            return self.function(name)
        if name in MARKS:
            return self._marked(name)
        if name in ("Delta", "delta") and self.peek().kind == "name" and len(self.peek().text) == 1:
            return self.symbol(f"{token.text} {self.take().text}")  # a difference is one symbol
        if name in GREEK:
            return self.symbol(token.text)
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

    def _root(self) -> Form:
        if self.accept("["):
            degree = to_expression(self.sum())
            self.expect("]")
            return Apply("root", (self.argument(), degree))
        return Apply("sqrt", (self.argument(),))

    def _marked(self, name: str) -> Form:
        """Read a symbol with a mark, such as a vector or an angle."""
        inner = self.braced().strip("{}") if self.peek().text == "{" else self.take().text
        if name in ("hat", "vec") and len(inner) == 1:
            return self.symbol(inner)
        return self.symbol(f"\\{name}{{{inner}}}")

    def _series(self, name: str) -> Form:
        self.expect("_")
        self.expect("{")
        variable = self.symbol(self.take().text)
        self.expect("=")
        low = to_expression(self.sum())
        self.expect("}")
        self.expect("^")
        high = self.exponent()
        return Apply(name, (variable, low, high, to_expression(self.product())))

    def _matrix(self) -> Form:
        kind = self.braced().rstrip("*")
        if kind == "array":
            self.braced()
        if kind not in ("pmatrix", "bmatrix", "Bmatrix", "matrix", "smallmatrix", "vmatrix", "array", "cases"):
            raise UnreadableError(f"the environment {kind}")
        rows: list[tuple[Form, ...]] = [()]
        while not self.accept("\\end"):
            if self.accept("\\\\"):
                rows.append(())
            elif not self.accept("&"):
                while kind == "cases" and self.peek().text in ("if", "for", "when", "where", "\\text"):
                    self.take()
                rows[-1] = (*rows[-1], self.listing("&", "\\\\", "\\end"))
                self.at -= 1
        self.braced()
        rows = [row for row in rows if row]
        if not rows or (kind != "cases" and len({len(row) for row in rows}) > 1):
            raise UnreadableError("rows of different lengths")
        return Matrix(tuple(rows), kind not in ("vmatrix", "cases"))

    def function(self, name: str) -> Form:
        """Read the power, the base and the argument of a function."""
        base = exponent = None
        while self.peek().text in ("_", "^"):
            if self.take().text == "_":
                base = self.argument(whole=True)
            else:
                exponent = self.exponent()
        if exponent is not None and is_minus_one(exponent):
            name, exponent = f"arc{name}", None
        arguments = self._arguments(several=name in ("max", "min", "gcd", "lcm"))
        if name == "log":
            arguments = (*arguments, base or Symbol("\\log"))
        elif base is not None or name not in FUNCTIONS.keys() | INTEGER_FUNCTIONS.keys():
            raise UnreadableError("a base of another function, or an inverse of one that has none")
        applied = Apply(name, arguments)
        return applied if exponent is None else Apply("^", (applied, exponent))

    def _arguments(self, several: bool) -> tuple[Expression, ...]:
        opening = self.peek().text
        if opening in ("(", "\\{", "{", "|", "["):
            form = self.primary()
            if several and isinstance(form, Bracketed) and form.items and (form.opening, form.closing) in _PAIRS:
                return tuple(map(to_expression, form.items))
            return (to_expression(form),)
        if several:
            raise UnreadableError("no arguments in brackets")
        sign = self.accept("-", "+")
        factors: list[Form] = [self.mixed_number()]
        while (
            self.starts_factor(self.peek())
            and self.peek().text not in ("(", "[", "|")
            and not self.is_function(self.peek())
            and not self.starts_unit()
        ):
            factors.append(self.power())
        if factors[-1:] and self.peek().text == "/" and self.peek(1).kind == "number" and not self.peek().is_spaced:
            self.take()
            factors = [Apply("/", (multiply(factors), to_expression(self.primary())))]
        product = multiply(factors)
        return (Apply("-", (product,)) if sign and sign.text == "-" else product,)

    def is_function(self, token: Token) -> bool:
        """Whether a token is a function, apart from a root."""
        return token.text.lstrip("\\") in NAMES - {"sqrt"}


def _number(text: str) -> Number:
    mantissa, _, power = text.lower().partition("e")
    if abs(int(power or 0)) > 4_000:
        raise UnreadableError("too large")
    mantissa = mantissa.removesuffix(".")
    return Number(Fraction(mantissa) * Fraction(10) ** int(power or 0), not text.removesuffix(".").isdigit())


def based(digits: str, base: str) -> Form:
    """Return a number in a base, `1011_2` or `1011_{two}`."""
    base = base.strip("()").removeprefix("base")
    if not (base.isdigit() or base in NUMERALS) or not digits.isdigit():
        raise UnreadableError("no base")
    radix = int(base[:3]) if base.isdigit() else NUMERALS[base]
    return _number(digits) if radix == 10 else Based(digits, radix)


def ordinal(number: Number, suffix: str) -> Number:
    """Return the number of `5th`."""
    last = int(number.value) % 100
    if number.value.denominator != 1 or suffix != (
        "th" if 10 < last < 14 else {1: "st", 2: "nd", 3: "rd"}.get(last % 10, "th")
    ):
        raise UnreadableError("no ordinal")
    return Number(number.value)


def _repeating(text: str, period: str) -> Number:
    whole, _, fixed = text.partition(".")
    if not period.isdigit() or "e" in text.lower():
        raise UnreadableError("no period of digits")
    under = (10 ** len(period) - 1) * 10 ** len(fixed)
    return Number(Fraction(int(whole + fixed + period) - int(whole + fixed), under))


def is_minus_one(expression: Expression) -> bool:
    """Whether an exponent is -1."""
    return expression in (Number(Fraction(-1)), Apply("-", (Number(Fraction(1)),)))


def multiply(factors: Sequence[Form]) -> Expression:
    """Return the product of expressions."""
    expressions = tuple(map(to_expression, factors))
    return expressions[0] if len(expressions) == 1 else Apply("*", expressions)
