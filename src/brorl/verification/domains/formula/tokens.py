r"""Splits an answer, in LaTeX or plain text, into tokens in a uniform notation.

    `x\leq 2.5\,\text{cm}`  ->  name `x`, command `\le`, number `2.5`, upright name `cm`

Fonts, colors and spacing are dropped, and each symbol has one name: `\leq`, `\leqslant` and `<=` become `\le`. Takes
linear time.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from brorl.verification.domains.marked_answer import LABEL

_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi phi chi psi omega "
    "Delta Gamma Sigma Phi Omega"
)
_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "∙": "\\cdot ", "÷": "/",
        "≤": "\\le ", "≥": "\\ge ", "⩽": "\\le ", "⩾": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "≡": "\\equiv ",
        "∞": "\\infty ", "π": "\\pi ", "°": "\\degree ", "º": "\\degree ", "±": "\\pm ", "∓": "\\mp ", "∪": "\\cup ",
        "∩": "\\cap ", "∈": "\\in ", "∉": "\\notin ", "∅": "\\emptyset ", "∖": "\\setminus ",
        "⟨": "\\langle ", "⟩": "\\rangle ", "′": "'", "’": "'", "‘": "'", "″": "''", "“": '"', "”": '"', "∣": "|",
        "∠": "\\angle ", "∨": "\\lor ", "∧": "\\land ", "¬": "\\neg ", "→": "\\to ", "⇒": "\\Rightarrow ",
        "…": "\\ldots ", "⁄": "/", "∕": "/", "∶": ":", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}",
        "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}", "€": "\\euro ", "£": "\\pounds ", "¥": "\\yen ", "₹": "\\rupee ",
        "¢": "\\text{ cents}", "µ": "\\mu ", "~": " ", "\N{NO-BREAK SPACE}": " ", "\N{THIN SPACE}": " ",
        "\N{NARROW NO-BREAK SPACE}": " ", "℃": "\\degree C", "℉": "\\degree F",
        "\N{ARABIC DECIMAL SEPARATOR}": ".", "\N{ARABIC THOUSANDS SEPARATOR}": ",", "\N{ARABIC COMMA}": ",",
        "\N{ARABIC SEMICOLON}": ";", "\N{ARABIC PERCENT SIGN}": "%", "\N{IDEOGRAPHIC COMMA}": ",",
        "•": "\\cdot ", "\N{OHM SIGN}": "\\Omega ", "\N{ANGSTROM SIGN}": "Å", "\N{KELVIN SIGN}": "K",
        "\N{HYPHEN}": "-", "\N{NON-BREAKING HYPHEN}": "-",
        **{char: f"\\frac{{{top}}}{{{under}}}" for char, top, under in zip(
            "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑", "11213123415113571", "23344555566788889", strict=True)},
        **{char: f"\\{name} " for char, name in zip("αβγδεζηθκλμνξρστφϕχψωΔΓΣΦΩ", _GREEK.split(), strict=True)},
    }
)  # fmt: skip
_STYLED = re.compile("[\U0001d400-\U0001d7ff\uff01-\uff5e]+")  # bold and full-width letters, digits and marks
_DIGIT = re.compile(r"(?![0-9])\d")  # a digit from a different script: `٦`, `६`
_RADICAL = re.compile(r"([√∛∜]) ?(\d+(?:\.\d+)?)?")  # takes a whole number, unlike `\sqrt`
_DEGREE_OF = {"√": "", "∛": "[3]", "∜": "[4]"}
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+"), re.compile("[₀₁₂₃₄₅₆₇₈₉ₙ]+")
_RAISED_TO, _LOWERED_TO = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n"), str.maketrans("₀₁₂₃₄₅₆₇₈₉ₙ", "0123456789n")


def in_latex(text: str) -> str:
    r"""Replace special characters with LaTeX: `½` -> `\frac{1}{2}`, `x²` -> `x^{2}`, `≤` -> `\le `."""
    if text.isascii():
        return text.translate(_CHARACTERS) if "~" in text else text
    text = _STYLED.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    text = _DIGIT.sub(lambda match: str(unicodedata.decimal(match[0])), text)
    text = _RADICAL.sub(_with_radical, text)
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_RAISED_TO)}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{match[0].translate(_LOWERED_TO)}}}", text)
    return text.translate(_CHARACTERS)


def _with_radical(match: re.Match[str]) -> str:
    return rf"\sqrt{_DEGREE_OF[match[1]]}" + (f"{{{match[2]}}}" if match[2] else " ")


word_list = re.compile(r"\S+").findall
"""Return the words in a string."""


class UnreadableError(ValueError):
    """The answer grammar cannot read this string."""


class Token(NamedTuple):
    r"""A number, a word, a command such as `\frac`, or a mark such as `+`."""

    kind: str  # number, name, command, mark
    text: str
    is_spaced: bool = False  # whether space precedes it
    is_upright: bool = False  # whether it is in \text{} or similar


END = Token("end", "")
ORDINAL_ENDINGS = frozenset({"st", "nd", "rd", "th"})

_SAME = {
    name: same
    for same, names in {
        "le": "leq leqslant leqq", "ge": "geq geqslant geqq", "ne": "neq", "frac": "dfrac tfrac cfrac",
        "binom": "dbinom tbinom", "emptyset": "varnothing", "approx": "simeq cong approxeq thickapprox doteq",
        "ldots": "cdots dots dotsc dotsb", "lor": "vee", "land": "wedge", "cup": "bigcup", "cap": "bigcap",
        "setminus": "backslash smallsetminus", "epsilon": "varepsilon", "phi": "varphi", "theta": "vartheta",
        "degree": "textdegree", "overline": "bar", "Rightarrow": "implies", "to": "rightarrow longrightarrow",
        "infty": "infin", "vec": "overrightarrow", "hat": "widehat", "tilde": "widetilde", "in": "isin",
        "triangle": "bigtriangleup", "mod": "bmod", "pmod": "pod",
    }.items()
    for name in names.split()
}  # fmt: skip
_AS_MARK = {
    "lt": "<", "gt": ">", "lvert": "|", "rvert": "|", "vert": "|", "lbrace": "\\{", "rbrace": "\\}", "{": "\\{",
    "}": "\\}", "lbrack": "[", "rbrack": "]", "colon": ":", "ast": "*", "star": "*", "cdot": "*", "times": "*",
    "div": "/", "%": "%", "prime": "'", "coloneqq": "=", "$": "\\$", "#": "#", "_": "_", "&": "and", "Vert": "\\|",
    "|": "\\|", "lVert": "\\|", "rVert": "\\|",
}  # fmt: skip
_SPACES = frozenset(
    word_list(
        ", ; : > ! quad qquad enspace thinspace hfill displaystyle textstyle scriptstyle limits nolimits left right "
        "middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr bigm bf it bfseries itshape rm "
        "normalsize large Large tiny small huge newline par null"
    )
) | {" "}
_SIZES = re.compile(r"(?:left|right|middle|[bB]igg?[lrm]?)")
_UPRIGHT = frozenset(
    word_list(
        "text textbf textit textrm textsf texttt textup textnormal textmd mbox hbox emph mathrm operatorname mathop "
        "mathsf mathtt"
    )
)
_FONTS = frozenset(
    word_list(
        "mathbf mathit mathnormal mathcal mathscr mathfrak boldsymbol bm pmb symbf ensuremath underline boxed fbox"
    )
)
_DROPPED = frozenset({"phantom", "hphantom", "vphantom", "hspace", "vspace", "color", "tag", "label"})

_NUMBER = re.compile(r"(?:\d+(?:\.\d+|\.(?!\.))?|\.\d+)(?:[eE][-+]?\d+(?![\w.]))?")
_GROUPED = re.compile(r"[1-9]\d{0,2}(?:(?:,|\{,\}|\\[,;:! ]| )\d{3})+(?:\.\d+)?(?![\d,]|\.\d|[ ]\d|/)")
_CLEAR = r"(?:,(?: ?\\!)+ ?| ?\{ ?, ?\} ?)"  # a comma that can only group digits: `1{,}000`
_CLEARLY_GROUPED = re.compile(rf"[1-9]\d{{0,2}}(?:{_CLEAR}\d{{3}})+(?:\.\d+)?(?!\d|{_CLEAR}\d|,\d)")
_NAME = re.compile(r"[A-Za-zÀ-ÖØ-öø-ÿ]+")
_COMMAND = re.compile(r"\\([a-zA-Z]+)\*?|\\(.)", re.DOTALL)
_MARKS = (("!=", "\\ne"), ("<=", "\\le"), (">=", "\\ge"), (":=", "="), ("**", "^"), ("...", "\\ldots"), ("->", "\\to"))
_CHOSEN = re.compile(  # a binomial coefficient: `^5C_2`, `5C2`
    r"(?:(?:\{\}\s*)?[\^_]\s*(?:\{\s*(\d{1,4})\s*\}|(\d{1,4}))|\b(\d{1,3}))\s?(?:C|\\mathrm\s*\{\s*C\s*\})\s?_?\s*"
    r"(?:\{(\d{1,4})\}|(\d{1,4})\b)"
)
_UPRIGHT_O = r"\\(?:text|textrm|mathrm|mbox)\s*\{\s*o\s*\}"
# Patterns to replace before splitting the text: `\\quadx`, `5C2`, `triangle ABC`, `7 p. m.`, `{:}`, `\\[4pt]`,
# `60^o`, `i4`, `60^\\circ`.
_REWRITTEN = (
    (re.compile(r"\\q?quad(?=[a-zA-Z])"), r"\\quad "),
    (_CHOSEN, r"\\binom{\1\2\3}{\4\5}"),
    (re.compile(r"(?<![\\a-zA-Z])(triangle|angle)(?=[\s}]+[A-Z]{1,4}(?![a-zA-Z]))"), r"\\\1 "),
    (re.compile(r"(?<![\\a-zA-Z])segment(?=[\s}]+[A-Z]{1,4}(?![a-zA-Z]))"), r"\\overline "),
    (re.compile(r"\b([apAP])\.\s?([mM])\b\.?"), r"\1\2"),
    (re.compile(r"\{([:=<>])\}"), r"\1"),
    (re.compile(r"\\\\\*?\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\]"), r"\\\\ "),
    (
        re.compile(rf"(?<=\d)\s*\^\s*(?:o(?![a-zA-Z])|{_UPRIGHT_O}|\{{\s*(?:o|{_UPRIGHT_O}|\\rm\s+o)\s*\}})"),
        r"\\degree ",
    ),
    (re.compile(r"(?<![\\_A-Za-z])(?<!_\{)([ij])(?=\d)"), r"\1*"),
    (re.compile(r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})"), r"\\degree "),
)
_MAX_TOKENS = 4_000


def tokenize(text: str) -> list[Token]:
    """Return the tokens in a string; UnreadableError if a text group is not closed or the string is too long."""
    text = in_latex(text)
    for pattern, same in _REWRITTEN:
        text = pattern.sub(same, text)
    return _Lexer(text).tokens


class _Lexer:
    """Reads a string once, from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.tokens = text, 0, list[Token]()
        self.is_spaced = False
        self.upright: list[int] = []  # brace depth of each open \text{
        self.depth = 0  # open braces
        self.brackets = 0  # open ( and [ and \{
        while self.at < len(text) and len(self.tokens) < _MAX_TOKENS:
            self._read()
        if self.upright or len(self.tokens) >= _MAX_TOKENS:
            raise UnreadableError("a group of text does not close, or the answer is too long")

    def _add(self, kind: str, text: str) -> None:
        self.tokens.append(Token(kind, text, self.is_spaced, bool(self.upright)))
        self.is_spaced = False
        self.brackets += (text in ("(", "[", "\\{")) - (text in (")", "]", "\\}"))

    def _read(self) -> None:
        text, at = self.text, self.at
        char = text[at]
        if char.isspace() or char == "$":
            self.is_spaced = True
            self.at += 1
        elif char == "\\":
            self._command()
        elif char.isascii() and (char.isdigit() or (char == "." and text[at + 1 : at + 2].isdigit())):
            self._number()
        elif name := _NAME.match(text, at):
            self.at = name.end()
            self._add("name", name[0])
        else:
            self._mark(char)

    def _number(self) -> None:
        grouped = _CLEARLY_GROUPED.match(self.text, self.at)
        grouped = grouped or (None if self.brackets else _GROUPED.match(self.text, self.at))
        match = grouped or _NUMBER.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        self._add("number", re.sub(r"[^\d.]", "", match[0]) if grouped else match[0])

    def _mark(self, char: str) -> None:
        for written, same in _MARKS:
            if self.text.startswith(written, self.at) and not (
                written == ">=" and self.text[self.at - 1 : self.at] == "="
            ):
                self.at += len(written)
                self._add("command" if same[0] == "\\" else "mark", same)
                return
        self.at += 1
        if char == "{":
            self.depth += 1
        elif char == "}":
            self.depth -= 1
            if self.upright and self.depth < self.upright[-1]:
                self.upright.pop()
                self.is_spaced = self.is_spaced or self.text[self.at - 2 : self.at - 1].isspace()
                return
        self._add("mark", char)

    def _command(self) -> None:
        match = _COMMAND.match(self.text, self.at)
        if match is None:  # the space after it was stripped
            self.at += 1
            return
        self.at = match.end()
        name = match[1] or match[2]
        name = _SAME.get(name, name)
        if name == "not" and (after := re.compile(r"\s*(=|\\in(?![a-zA-Z]))").match(self.text, self.at)):
            self.at = after.end()
            self._add("command", "\\ne" if after[1] == "=" else "\\notin")
        elif name in _SPACES:
            self.is_spaced = self.is_spaced or not (name == "!" or _SIZES.fullmatch(name))
            if _SIZES.fullmatch(name) and (dot := re.compile(r"\s*\.").match(self.text, self.at)):
                self.at = dot.end()
        elif name in _UPRIGHT or name in _FONTS:
            self._font(name in _UPRIGHT)
        elif name in ("textcolor", "colorbox") or name in _DROPPED:
            if group := re.compile(r"\s*(?:\[[^][{}]*\]\s*)?\{[^{}]*\}").match(self.text, self.at):
                self.at = group.end()
        elif name in _AS_MARK:
            self._add("mark", _AS_MARK[name])
        else:
            self._add("command", f"\\{name}")

    def _font(self, is_upright: bool) -> None:
        r"""Begin an upright text group. After other fonts such as `\mathbf`, the group is ordinary."""
        brace = re.compile(r"\s*\{").match(self.text, self.at)
        if is_upright and brace:
            self.at = brace.end()
            self.depth += 1
            self.upright.append(self.depth)


def written(tokens: Sequence[Token]) -> str:
    """Join tokens into a string in the uniform notation."""
    return "".join(
        (" " if token.is_spaced else "") + token.text + (" " if token.kind == "command" else "") for token in tokens
    ).strip()


_HYPHEN = re.compile(r"(?<=\w)-(?=\w)")


def words_of(tokens: Sequence[Token]) -> str:
    """Return tokens as words separated by single spaces. Formulas have no spaces."""
    kept = [token for token in tokens if token.text not in ("{", "}", '"')]
    pairs = zip([END, *kept], kept, strict=False)
    kept = [token for before, token in pairs if before.kind != "number" or token.text not in ORDINAL_ENDINGS]
    if all(token.kind in ("name", "number") or token.text in "-'.,!?():" for token in kept):
        text = _HYPHEN.sub(" ", written(kept)).replace("(", " ").replace(")", " ")
        text = " ".join(text.split()).strip(" .,!")
        return text[1:-1] if text[:1] == text[-1:] == "'" else text
    return "".join(token.text + (" " if token.kind == "command" else "") for token in tokens)


_INFIX = frozenset({"\\over", "\\choose"})
_ARROWS = frozenset({"\\therefore", "\\Rightarrow", "\\to"})
_END_MARKS = frozenset({".", ",", ";", ":"})
_DONE = frozenset({"\\blacksquare", "\\square", "\\qed", "\\Box", "\\checkmark"})
_NUMBER_SETS = frozenset({"\\mathbb", "Z", "N", "Q", "R"})
_MAX_LABEL_LENGTH = 6  # tokens


def without_frame(tokens: list[Token]) -> list[Token]:
    """Remove braces around an answer, `Answer:` before the answer, and marks after it."""
    while len(tokens) > 2 and closing_brace(tokens) == len(tokens) - 1 and not any(t.text in _INFIX for t in tokens):
        tokens = tokens[1:-1]
    while tokens and tokens[-1].kind == "mark" and tokens[-1].text in _END_MARKS:
        tokens = tokens[:-1]
    while tokens and tokens[-1].text in _DONE:
        tokens = tokens[:-1]
    tokens = tokens[1:] if tokens and tokens[0].text in _ARROWS else tokens
    tokens = _with_condition(tokens)
    for length in range(min(len(tokens) - 1, _MAX_LABEL_LENGTH), 0, -1):
        if LABEL.fullmatch(written(tokens[:length]).strip() + " "):
            return tokens[length:]
    return tokens


def _with_condition(tokens: list[Token]) -> list[Token]:
    r"""Insert a comma before a condition in brackets at the end of tokens, as in `2k\pi (k \in \mathbb{Z})`."""
    start = max((at for at, token in enumerate(tokens) if token.text == "("), default=0)
    match [token.text for token in tokens[start + 1 :]]:
        case [_, "\\in", numbers, *_, ")"] if start and numbers in _NUMBER_SETS and tokens[start + 1].kind == "name":
            return [*tokens[:start], Token("mark", ","), *tokens[start + 1 : -1]]
        case _:
            return tokens


def closing_brace(tokens: Sequence[Token], start: int = 0) -> int | None:
    """Return the index of the brace that closes the brace at `start`; None if there is no pair."""
    depth = 0
    for at in range(start, len(tokens)):
        depth += (tokens[at].text == "{") - (tokens[at].text == "}")
        if depth == 0:
            return at if at > start else None
    return None
