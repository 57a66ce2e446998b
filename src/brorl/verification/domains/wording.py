r"""Answers of words, and measured values as they are written: `seat` is not `east`, `10 to 20 Hz` are two values."""

from __future__ import annotations

import re

from brorl.verification.domains.units import parse_unit, without_markup

_MAX_CHARACTERS = 300
_FONT = r"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mathbf|mathit|mbox|operatorname|rm|bf|it)(?![a-zA-Z])"
_MARKUP = re.compile(rf"{_FONT}|[{{}}$]|\\[,;:! ()]|~")
# A run of letters that can be pronounced; others, such as `mgh`, are products of variables.
_WORD = (
    r"(?:(?=[A-Za-z]*[aeiouyAEIOUY])(?:[A-Z]?[a-z]{2,}|[A-Z]{4,})|(?=[A-Z]*[AEOU])[A-Z]{3}|"
    r"(?i:up|no|on|we|us|ii|iv|vi))"
)
_IS_WORD = re.compile(rf"(?<![A-Za-z]){_WORD}(?![A-Za-z])")
_ARTICLE = re.compile(
    r"^(?:it|they)(?: is| are|'s|'re)?\b ?|^(?:to|towards?|due|in) (?=the\b|north|south|east|west|left|right)|"
    r"\b(?:the|an?)\b ?",
    re.IGNORECASE,
)
_FUNCTIONS = frozenset(
    re.findall(r"\S+", "sin cos tan exp log sqrt arcsin arccos arctan sinh cosh tanh csc sec cot max min mod")
)
_ACIDITY = re.compile(rf"^(?:{_FONT}\s*\{{)?pO?H\}}?(?:\s*(?:is|of|:))?\s+(?=\d)")
_MOLAR = re.compile(rf"(?<=[\d}}])\s*(?:{_FONT}\s*\{{\s*M\s*\}}|M)$")
_COMMA_WORDS = re.compile(r"(?<=[\w})°%]),\s+(?=[a-z]{2,}[^\d,;=]*$)")
_SECOND = re.compile(r"(.*\S) \(((?:[-+.,\d\s*^{}]|\\times)*\d[\s~]*)([^\d()].*)\)")
_RANGE = re.compile(
    r"(?:from )?(\d[^\u2013\u2014:]*?)(?: to |\s*[\u2013\u2014]\s*|(?<=\d)--?(?=\d)| --? )(\d[^\u2013\u2014:]*)|"
    r"between (\d.*?) and (\d.*)"
)
_WITH_UNIT = re.compile(r"(\d[\d,]*(?:\.\d+)?)((?: ?[x*] ?10 ?\^ ?[-(\d]+\)?)?) ?([^\W\d_].*|[°%].*|)")


def same_words(reference: str, answer: str) -> bool | None:
    """Whether an answer has the words of a reference that has words alone; None for another reference."""
    right = _words(reference)
    return None if right is None else right == _words(answer)


def _words(text: str) -> str | None:
    r"""Return words alone (in `\text{...}` any two letters) in small letters, without markup, articles and space."""
    if len(text) > _MAX_CHARACTERS:
        return None
    plain = " ".join(re.sub(r"[-\u2010\u2011\u2013/]", " ", _MARKUP.sub(" ", text)).split()).strip(" .,;!\"'")
    if not re.fullmatch(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*(?:,? [^\W\d_]+(?:['\u2019][^\W\d_]+)*)*", plain):
        return None
    runs = plain.replace(",", "").split()
    upright = re.search(_FONT, text) is not None and any(len(run) > 1 for run in runs)
    if not upright and not any(
        (_IS_WORD.fullmatch(run) and run not in _FUNCTIONS) or not run.isascii() for run in runs
    ):
        return None
    return _ARTICLE.sub("", plain.casefold()).replace("\u2019", "'").replace(" ", "")


def as_measured(text: str) -> str:
    """Return a value without `pH` before it and a comma before its words; `36 km/h (10 m/s)` becomes an equation."""
    text = _COMMA_WORDS.sub(" ", _MOLAR.sub(" mol/L", _ACIDITY.sub("", text)))
    second = _SECOND.fullmatch(text)
    return f"{second[1]} = {second[2]}{second[3]}" if second and parse_unit(second[3]) else text


def as_range(text: str) -> str | None:
    """Return both ends of a range with their unit, as the pair `(10 Hz, 20 Hz)`; None for other text."""
    ends = _RANGE.fullmatch(without_markup(text))
    low, high = (_WITH_UNIT.fullmatch(end) for end in ends.groups() if end) if ends else (None, None)
    if low is None or high is None or (len(high[3]) == 1 and parse_unit(high[3]) is None):
        return None
    if not (low[2] or high[2]) and float(low[1].replace(",", "")) >= float(high[1].replace(",", "")):
        return None
    return f"({low[1]}{low[2]} {low[3] or high[3]}, {high[1]}{high[2]} {high[3] or low[3]})"
