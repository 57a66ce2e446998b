r"""Answers of words, and the words around a value: `seat` is not `east`, and `10 m/s, since ...` is 10 m/s.

A run of letters is a word if it can be pronounced: it has a vowel and three letters. Other runs, such as `mgh`, are
products of variables.
"""

from __future__ import annotations

import re

from brorl.prompts.answer_forms import find_last_box
from brorl.verification.domains.math_extraction import tidy
from brorl.verification.domains.quantity import read_quantity
from brorl.verification.domains.units import parse_units

_MAX_CHARACTERS = 300
_MAX_BESIDE = 60
_FONT = r"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mathbf|mathit|mbox|operatorname|rm|bf|it)(?![a-zA-Z])"
_MARKUP = re.compile(rf"{_FONT}|[{{}}$]|\\[,;:! ()]|~")
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
_BESIDE = re.compile(
    r"(?:of|in|from|since|because|as|which|where|so|when|for|to|toward|towards|at|on|by|with|after|before|away)\b|"
    r"(?:(?:up|down|for|back|in|out|left|right|north|south|east|west)(?:wards?)?|(?:north|south)(?:east|west)|"
    r"long|deep|high|tall|wide|thick|old|apart|each|total|approx\w*|rounded|clockwise|counterclockwise|anticlockwise)\b"
)
_LABEL = r"(?:the )?(?:(?:final|correct) )?answer(?: is)?\s*[:=]?\s*"
_LABELED = (
    re.compile(rf"^(?:{_FONT}\s*\{{\s*)?{_LABEL}\}}\s*(?=\S)|^{_LABEL}(?=\S)", re.IGNORECASE),
    re.compile(rf"^({_FONT}\s*\{{\s*){_LABEL}(?=[^\s}}])", re.IGNORECASE),
)
_THOUSANDS = re.compile(r"(?<![\d.,] )(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d/])")
_WHOLE_FONT = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|text|textbf|mathrm|mathit|mathsf|mbox|displaystyle)\s*\{\s*([-+.\d][^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
)
_ACIDITY = re.compile(rf"^(?:{_FONT}\s*\{{)?pO?H\}}?(?:\s*(?:is|of|:))?\s+(?=\d)")
_POWER_OF = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_LARGE = re.compile(rf"(?<=\d)(?:\s|\\[,; ])*({_FONT}\s*\{{)?\s*({'|'.join(_POWER_OF)})\b(?! of)")
_PARTS = re.compile(r"\bparts per (m|b)illion\b", re.IGNORECASE)
_DIRECTION = re.compile(
    r"\b(?:(?:up|down|for|back|in|out|left|right|north|south|east|west)(?:wards?|erly)?|(?:north|south)(?:east|west)|clockwise|"
    r"counterclockwise|anticlockwise|increased?|decreased?|rise|drop|gain|loss|more|less|above|below|before|after|ago)\b"
)
_COMMA_WORDS = re.compile(r"(?<=[\w})°%]),\s+(?=[a-z]{2,}[^\d,;=]*$)")
_LEFT = re.compile(r"(?:^|[\s=$(:≈\[])(?:([-\u2212]\$?)|(\d+(?:\.\d+)?))$")
_RIGHT = re.compile(
    r"\s*(?:\^|/\s*\d|!|\d|[-+*]\s?\d|\\(?:times|cdot|pm)(?![a-z])|(?:thousand|million|billion|trillion)\b)[^$]*?(?=\$|\\[)\]]|[.,;](?:\s|$)|$)"
)


def same_words(reference: str, answer: str) -> bool | None:
    """Whether an answer has the words of a reference that has words alone; None for another reference."""
    right = _words(reference)
    return None if right is None else right == _words(answer)


def _words(text: str) -> str | None:
    r"""Return text of words alone in small letters, without markup, articles and space; None for other text.

    In `\text{...}`, every run of two or more letters is a word.
    """
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


def as_one_answer(answer: str) -> str:
    """Return an answer without the comma before the words that follow it, and without a second notation in parentheses.

    `36 km/h (10 m/s)` becomes `36 km/h = 10 m/s`, so that both count.
    """
    answer = _COMMA_WORDS.sub(" ", answer)
    if answer.endswith(")") and (at := answer.rfind(" (")) > 0:
        inner = answer[at + 2 : -1]
        if read_quantity(inner).unit is not None and re.match(r"[^a-z]*\d", inner):
            return f"{answer[:at]} = {inner}"
    return answer


def in_figures(answer: str) -> str:
    r"""Return an answer without `Answer:` before it, and with `\times 10^6` for a million."""
    whole = _WHOLE_FONT.fullmatch(answer)
    answer = whole[1] if whole else answer
    answer = _ACIDITY.sub("", _THOUSANDS.sub(lambda digits: digits[0].replace(" ", ""), answer))
    answer = _LABELED[1].sub(r"\1", _LABELED[0].sub("", answer))
    answer = _LARGE.sub(
        lambda large: rf" \times 10^{{{_POWER_OF[large[2]]}}} {large[1] or ''}", _PARTS.sub(r"pp\1", answer)
    )
    return answer.replace("\\text{}", "").strip()


def is_direction(words: str) -> bool:
    """Whether words after a value belong to it as a sign does: `east`, `downward`, `increase`."""
    return _DIRECTION.search(words) is not None


def beside_the_value(words: str) -> bool:
    """Whether words after a value belong to the sentence: `since it falls`, `downward`, `of water`."""
    return _BESIDE.match(words) is not None and not any(map(str.isdigit, words))


def with_whole_box(response: str) -> str:
    r"""Return a response whose last box has the sign, factor and unit that stand beside it: `-\boxed{5} km`."""
    box = find_last_box(response)
    if box is None or not box.content.strip():
        return response
    before = _LEFT.search(response[max(box.start - _MAX_BESIDE, 0) : box.start])
    after = response[box.end : box.end + _MAX_BESIDE].partition("\n")[0]
    content, start, end = box.content, box.start, box.end
    if before and (before[1] or before[2]):
        start -= len(before[1] or before[2])
        content = f"-{content}" if before[1] else f"{before[2]} \\cdot {content}"
    more = _RIGHT.match(after)
    quantity = read_quantity(tidy(content))
    unit = "" if quantity.units or quantity.words is not None else _unit_at_start(after)
    if more:
        content, end = f"{content}{more[0]}", end + more.end()
    elif unit:
        content, end = f"{content} {unit}", end + after.index(unit) + len(unit)
    return f"{response[:start]}\\boxed{{{content}}}{response[end:]}" if content != box.content else response


def _unit_at_start(text: str) -> str:
    """Return the unit at the start of the text after a box, an empty string if there is none."""
    line = text.partition("\n")[0]
    start = re.match(r"(?:[\s$]|\\[)\],;: !])*", line)
    rest = line[start.end() :] if start else line
    found = ""
    for match in re.finditer(r"(?=[\s.,;!?$)]|\\[\])]|$)", rest):
        unit = rest[: match.start()]
        if (
            unit.strip()
            and parse_units(unit)
            and not (re.fullmatch(r"in|as|am|pm|a|at", unit) and rest[len(unit) : len(unit) + 2].strip(" $.,;"))
        ):
            found = unit
    return found
