"""Whether a text is one value: no list, range, comparison, negation or hedge. A unit may follow the value.

Nothing is evaluated here. Every pattern takes time linear in the length of the text.
"""

from __future__ import annotations

import re

from brorl.verification.domains.units import parse_unit

SEVERAL_ANSWERS = "no single answer"

# Words of a hedge, a negation, a comparison or a sentence: an answer has none that its reference lacks.
_HEDGE = re.compile(
    r"(?<![\w\\])(?:no|not|nor|neither|never|none|nothing|nobody|cannot|can't|without|except|but|if|unless|else|"
    r"otherwise|sometimes|usually|rarely|seldom|or|and|either|versus|maybe|perhaps|possibl[ey]|probabl[ey]|presumably|apparently|supposedly|hopefully|"
    r"likely|unlikely|doubt(?:ful)?|unsure|uncertain|guess|think|believe|hardly|"
    r"hundred(?:th)?s?|thousand(?:th)?s?|tenths?|factorial|millions?|billions?|trillions?|dozens?|half|nearly|almost|between|than|least|most|below|above|under|over|wrong|incorrect|false|untrue|invalid|mistaken|"
    r"rejected|excluded|is|are|was|were|be|isn|aren|wasn|can|could|may|might|would|should|does|don|doesn|instead|rather|"
    r"alternatively|other|another|any|anything|some|something|everything|all|both|to(?=\s*[-\\$\d{}]))(?!\w)",
    re.IGNORECASE,
)
_JOINTS = frozenset({"or", "and", "both", "either"})
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_DENIAL = re.compile(
    r"\\(?:not|notin|neg|lnot|ne|neq|lor|vee|lxor|oplus|mid|[lc]?dots|wedge|land|to|rightarrow|longrightarrow|Rightarrow|leftrightarrow|"
    r"sim|[xb]?cancel|sout|gg|ll|nless|ngtr)(?![a-zA-Z])|\.\.\.|\u2026"
)
_LIMIT = re.compile(r"\\lim\s*_\s*\{[^{}]*\}")
_ORDER = re.compile(r"(?:(<)|(>)|\\(?:(le|leq|leqslant|leqq)|(ge|geq|geqslant|geqq)|(lt)|(gt))(?![a-zA-Z]))(=)?")
_LIST = re.compile(r",|;|&|\\cup(?![a-zA-Z])")
_MAY_BE_LIST = re.compile(r",|;|&|\\cup|\\pm|\\\{|\\emptyset|\\begin")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_BASE = re.compile(r"\d_\{?(\d+)")
_TWO_NUMBERS = re.compile(r"\d\s+[.\d]")
_MEMBER = re.compile(r"[^=<>\\,]{1,40}\\in(?![a-zA-Z])")
_NUMBER = re.compile(r"[-+]?[\d.,/]+")

_FONT = r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|boldsymbol|mbox|operatorname|rm)(?![a-zA-Z])"
_SYMBOLS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-", "\N{MULTIPLICATION SIGN}": "\\times ", "\N{MIDDLE DOT}": "\\cdot ",
        "\N{DOT OPERATOR}": "\\cdot ", "\N{LESS-THAN OR EQUAL TO}": "\\le ", "\N{GREATER-THAN OR EQUAL TO}": "\\ge ",
        "\N{NOT EQUAL TO}": "\\ne ", "\N{INFINITY}": "\\infty ", "\N{GREEK SMALL LETTER PI}": "\\pi ",
        "\N{DEGREE SIGN}": "^\\circ ", "\N{PLUS-MINUS SIGN}": "\\pm ", "\N{UNION}": "\\cup ", "~": " ",
        "\N{ELEMENT OF}": "\\in ", "\N{NO-BREAK SPACE}": " ",
    }
)  # fmt: skip
_WRITTEN = (
    (re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\s*"), ""),
    (re.compile(r"(?<=\d)(?:\\[,;:! ]|\{,\})(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<!\\)\\(?:(?:q?quad|displaystyle)(?![a-zA-Z])|[,;:!> ])"), " "),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"_\s*(\d)(?=\s)"), r"_{\1}"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(rf"{_FONT}\s*\{{([ie]|\s*[-+.\d]+\s*)\}}"), r"\1"),
    (re.compile(r"(?<![\w.}])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?\d+)(?![\w.])"), r"\1 \\times 10^{\2}"),
    (re.compile(r"(?<![\d./])(\d+)\s+(\d+)/(\d+)(?![\d./])"), r"\1\\frac{\2}{\3}"),  # a mixed number
)
_REPEATING = re.compile(r"(?<![\d.])(\d{1,15})\.(\d{0,15})\\overline\s*\{(\d{1,15})\}")
_PROSE = re.compile(rf"{_FONT}\s*\{{|(?<![\\A-Za-z])[A-Za-z]{{2,}}")
_WORDS_ALONE = re.compile(rf"(?:{_FONT}|\\cdot\b|\^\{{?-?\d\}}?|[^\d\\+=<>,;^])*")
_FUNCTION = re.compile(r"(?:pi|exp|sqrt|sin|cos|tan|cot|sec|csc|log|ln|infinity|percent)(?![a-z])", re.IGNORECASE)


def plain(text: str) -> str:
    """Return an answer in one notation: `1e5` as a power of ten, and one kind of space."""
    text = text.translate(_SYMBOLS).replace("\\$", "").replace("$", "")
    for pattern, replacement in _WRITTEN:
        text = pattern.sub(replacement, text)
    return " ".join(_REPEATING.sub(_fraction, text).split())


def _fraction(decimal: re.Match[str]) -> str:
    whole, fixed, period = decimal.groups()
    under = (10 ** len(period) - 1) * 10 ** len(fixed)
    return rf"\frac{{{int(whole + fixed + period) - int(whole + fixed)}}}{{{under}}}"


def is_several(reference: str, answer: str) -> bool:
    """Whether an answer is not a single one: a list, a range, a comparison, a negation or a hedge.

    Args:
        reference: The right answer, as `plain` returns it. What it has itself, an answer may have too.
        answer: The answer, as `plain` returns it.
    """
    extra = _hedges(answer) - _hedges(reference)
    listed = (
        _MAY_BE_LIST.search(_THOUSANDS.sub("0", reference)) is not None
        or (any(map(str.isdigit, reference)) and not _JOINTS.isdisjoint(_hedges(reference)))
        or (has_order(reference) and _is_interval(answer))
    )
    if listed:
        extra -= _JOINTS
    if extra or set(_DENIAL.findall(_LIMIT.sub("", answer))) - set(_DENIAL.findall(reference)):
        return True
    if not listed and _LIST.search(_THOUSANDS.sub("0", answer)):
        return True
    if has_order(answer) and not (has_order(reference) or _is_interval(reference)):
        return True
    bases = _BASE.findall(answer)
    if bases and bases != _BASE.findall(reference):
        return True
    if _TWO_NUMBERS.search(answer) and not _TWO_NUMBERS.search(reference):
        return True
    kinds = {_bracket(reference), _bracket(answer)}
    return len(kinds) == 2 and "" not in kinds


def _hedges(text: str) -> set[str]:
    return {word.lower() for word in _HEDGE.findall(_COMMAND.sub(" ", text))}


def _bracket(text: str) -> str:
    """Return the bracket that opens a text and closes at its end; an empty string if there is none."""
    text = _MEMBER.sub("", text, count=1).strip() if _MEMBER.match(text) else text
    opening = "\\{" if text.startswith("\\{") else text[:1] if text[:1] in ("(", "[") else ""
    depth = 0
    for at, character in enumerate(text if opening else ""):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and at >= len(opening):
            return opening if at == len(text) - 1 else ""
    return ""


def _is_interval(text: str) -> bool:
    return "\\infty" in text or "\\cup" in text or (text[:1] in "([" and text[-1:] in ")]" and "," in text)


def has_order(text: str) -> bool:
    """Whether a text says that something is less or greater."""
    return _ORDER.search(text) is not None


def without_unit(text: str, is_number: bool) -> str:
    r"""Remove the words after a value: `\text{ cm}`, and of a number also plain words that may be its unit."""
    for match in _PROSE.finditer(text):
        head, tail = text[: match.start()].rstrip(), text[match.start() :]
        if not head or not (head[-1].isalnum() or head[-1] in "}%)]") or _FUNCTION.match(tail):
            continue
        if not _WORDS_ALONE.fullmatch(tail):
            continue
        if match[0].startswith("\\"):
            return head
        counts = is_number or _NUMBER.fullmatch(head) is not None
        if counts and (parse_unit(tail) is not None or (head != text[: match.start()] and len(match[0]) > 2)):
            return head
    last = text.rpartition(" ")
    if is_number and last[0] and last[0].strip()[-1:].isdigit() and parse_unit(last[2]) is not None:
        return last[0].strip()
    return text
