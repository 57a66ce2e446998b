r"""Detects whether the text after an answer takes the answer back, in linear time.

    `\boxed{34}. Nope, that's not right: 36.`  ->  `36`        `\boxed{34}. Check: 2 * 17 = 34.`  ->  None

Each sentence becomes a shape, one letter per word: `S` for the answer, `O` for a different value, and for other words
the letter for their meaning in retraction.txt. `That's not right: 36` is `PBNR:O`. A sentence takes the answer back if
its shape denies the answer or names a different value as the answer. The last such sentence decides, unless a later one
affirms the answer. A hypothetical sentence (`if`, `would`) or a question never takes the answer back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from brorl.verification.domains.lexicon import Lexicon

_READ = 1_000  # characters read after an answer, and at the end
_SHOWN = 80
_LEAD = 4  # words before an answer that may name it: `the total is`
_LEXICON = Lexicon(Path(__file__).with_name("retraction.txt").read_text("utf-8"))
_VERDICTS = frozenset("WRYn")  # the letters of `false`, `true`, `yes`, `no`

_CJK = "\u3040-\u30ff\u3400-\u9fff"
_NUMBER = r"[-\u2212]?\$?(?:\d[\d.,/]{0,40})?\d(?:\\?%)?"
_OPERATOR = r"\s{0,4}[-+*/^=\u00d7\u00b7\u2212]\s{0,4}"
_OPERAND = rf"(?:{_NUMBER}[a-zA-Z]?|[a-zA-Z])(?![^\W\d_{_CJK}])"
_VALUES = (
    r"\$\$[^$]{1,200}\$\$",  # $$36$$
    r"\$[^$\n]{1,200}\$(?!\d)",  # $36$, but not the price in `$36 of $40`
    r"\\\(.{1,200}?\\\)",  # \(36\)
    r"\\\[(?s:.{1,200}?)\\\]",  # \[36\]
    r"-?\\[dt]?frac\s*\{[^{}]{1,40}\}\s*\{[^{}]{1,40}\}",  # \frac{1}{4}
    r"[(\[{]\s{0,4}-?[\w./]{1,12}(?:\s{0,4},\s{0,4}-?[\w./]{1,12}){1,9}\s{0,4}[)\]}]",  # (3, 2)
    rf"{_NUMBER}(?:{_OPERATOR}{_OPERAND}){{0,9}}",  # 36, 2 * 18 = 36
    rf"(?<![^\W\d_])(?!\w/){_OPERAND}(?:{_OPERATOR}{_OPERAND}){{1,9}}(?![^\W\d_{_CJK}])",  # x = 36
)
_KINDS = {
    "item": r"(?<=\n)[ \t]*+(?:\(?\d{1,2}[.)]|[-*+\u2022])\s",  # the `2. ` before an item of a list
    "value": "|".join(_VALUES),
    "word": rf"[^\W\d_{_CJK}]++(?:['\u2019]t\b)?|[{_CJK}]|[\u2713\u2705]",  # isn't, 错, a check mark
    "answer": "####",
    "command": r"\\[a-zA-Z]+",
    "is": r"['\u2019](?:s|re|m|ve)\b",  # that's
    "stop": r"[.!](?!\w)|[\u3002\uff01]",
    "question": r"\?(?!\w)|\uff1f",
    "line": r"\n",
    "comma": r"[,;\uff0c\uff1b\u3001()\u2013\u2014]|\s-\s",
    "colon": "[:\uff1a]",
    "equal": "=",
    "unequal": "\u2260",
}
_TOKEN = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _KINDS.items()))
_LETTERS = {
    "item": "x", "answer": "A:", "is": "B", "stop": ".", "question": "?", "line": "\n", "comma": ",", "colon": ":",
    "equal": "=", "unequal": "N",
}  # fmt: skip
_ENDS = frozenset(".?\n")


def _any_of(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns))


_CLOSES = r"(?=[,:=J]|$|x?A)"  # follows `that is wrong`; `it is wrong to assume` is not a retraction
_DENIES = _any_of(
    r"(?:^|,)[CyFMB,:n]*x?[Cy]*T",  # I miscounted
    r"(?:S|Ax?)[Cy]*B[BCyx]{0,2}[WV]",  # my answer was off
    r"S[BCy]*[WV]",  # 34 fails
    r"^S,[Nn][yx]{0,2}[RA]",  # 34, not the answer
    r"F[CyBM]{1,4}x{0,2}W|FW|MFx{0,2}W",  # I made a mistake, my mistake
    r"^[C,yB]*MB?[yx]{0,2}W",  # there is an error
    r"[SA][BCyx]{0,2}[Nn](?:[BCyxP]{0,3}[RQ]|y?R?A)",  # 34 does not work, 34 is not the answer
    r"^S,*B?[Nn](?:P?$|,)",  # 34 is not
    r"[SPA][Cy]?Q[yxC]{0,2}[Nn](?!x)",  # das stimmt nicht
    r"(?:N|nB)S",  # it is not 34
    r"^[ny,]*C[^NnOS]{0,8}W(?=[,:=J]|$)",  # wait, the sign is wrong
    r"^y*C:[^S]*$",  # correction: add 2
)
_DENIES_THIS = _any_of(
    rf"P[BCyx]{{0,3}}W{_CLOSES}",  # that is wrong
    rf"P[BCyx]{{0,2}}[Nn](?:[BCyx]{{0,2}}R|yA){_CLOSES}",  # this cannot be right
    r"P[BCyx]{0,2}[Nn][yx]?Q(?!.*O)",  # it does not satisfy the equation
    rf"[Nn]F?x[xFP]{{0,2}}P[BCy]{{0,2}}R{_CLOSES}",  # I don't think that's correct
    rf"^S?(?:[C,:y]|n[,:])*B?(?:W|[Nn]B?y?R){_CLOSES}",  # Incorrect!
)
_NO = re.compile(r"(?:S(?=C))?[Cy,:]*[nN][CPnNy,:]*")  # No., wait, no
_CUE = r"(?:^|,)[yF]*(?:n*C[Cn,:y]*|n+[,:][Cn,:y]*)"  # no, ...
_NAMES = _any_of(
    r"(?<!W)A[Cy]*[BD:=][BDC:=y,]*([OS])",  # the answer is 36
    r"(?<![Nn])R[yx]?A?[BD:][BDC:y,]*([OS])",  # the correct value is 36
    r"(?:(?:^|[,PAC])[BCy,]*|^[ny,]*C[^Nn]{0,40})D[BCMy]*([OS])",  # it should be 36
    rf"{_CUE}(?:[PB][yPB]*([OS])x{{0,2}}|([OS])|[xyPAFM]{{0,4}}B[BC:y]*([OS]))(?=[,J]|$)",  # no, it is 36
    r"([OS])[yxC]{0,2}B[yC]{0,2}(?:R?A|R(?=[,J]|$))",  # 36 is the right answer
    r"([OS])x{0,2}C$",  # the total is 36 instead
)
_NOT_OTHER = re.compile(r"NB?O")  # not 35, but 36
_LAST_VALUE = re.compile(r"[OS]x?$")  # the total is 36
_AFFIRMS = _any_of(
    r"^[Cy,]*Y",  # yes
    r"[SPA][BCyx]{0,3}[RQ]",  # that is right, 34 works
    r"^[C,y]*R(?:,|$)",  # correct
    r"[nN][yx]{0,2}W",  # no mistake
)
_COMES_TO_ANSWER = re.compile(r"S[^OWNnC]*$")  # so the total is 34


class _Sentence(NamedTuple):
    shape: str
    words: list[str]  # one per letter of the shape
    asks: bool


def retraction(before: str, answer: str, after: str) -> str | None:
    """Return the words after an answer that take it back, or the different value they name; None if the answer stands.

    Args:
        before: The text before the answer; its last words may name the answer: `the total is`.
        answer: The answer as it is written.
        after: The text after the answer.
    """
    if len(answer) > _READ:
        return None  # no verifier reads an answer this long
    lead = _lead(before)
    taken_back = None  # the words, or the value if `is_value`
    is_value = False
    other_value = False  # whether the last value differs from the answer
    question = ""  # the shape of a question directly before this sentence
    for shape, words, asks in _sentences(answer, after):
        if asks:
            question = shape
            continue
        named = _named(shape, words, lead)
        if _denies(shape, question, other_value):
            taken_back = " ".join(words)[:_SHOWN]
            is_value = False
        elif named is not None and shape[named] == "O":
            taken_back = words[named]
            is_value = True
        elif named is not None or _AFFIRMS.search(shape) or (is_value and _COMES_TO_ANSWER.search(shape)):
            taken_back = None
        question = ""
        other_value = _ends_with_other(shape, other_value)
    return taken_back


def _ends_with_other(shape: str, default: bool) -> bool:
    """Return whether the last value in a shape differs from the answer."""
    same, other = shape.rfind("S"), shape.rfind("O")
    return default if same == other else other > same


def _denies(shape: str, question: str, other_value: bool) -> bool:
    """Return whether a sentence denies the answer. `this` refers to the last value before it."""
    if _NO.fullmatch(shape):
        return not question or (set("WO").isdisjoint(question) and not set("SRQ").isdisjoint(question))
    this = _DENIES_THIS.search(shape)
    if this and _ends_with_other(shape[: this.start()], other_value):
        this = None
    return any(match is not None and "I" not in shape[: match.end()] for match in (this, _DENIES.search(shape)))


def _named(shape: str, words: list[str], lead: list[str]) -> int | None:
    """Return the position of the value that a sentence names as the answer."""
    match = _NAMES.search(shape)
    if match and "I" not in shape[: match.end()] and not _NOT_OTHER.search(shape, 0, match.end()):
        return match.start(match.lastindex or 0)
    value = _LAST_VALUE.search(shape)
    if value is None or not lead:
        return None
    start = len(shape) - len(shape.lstrip("CynN,"))
    name = [word.casefold() for word in words[start : value.start()]]
    return value.start() if len(name) > 1 and lead[-len(name) :] == name else None


def _lead(before: str) -> list[str]:
    """Return the words directly before an answer that name it, in lower case."""
    line = re.split(r"[.,;:!?()\n]", before[-_READ:].rstrip(" \t\n$*_([{\\"))[-1]
    words = [word.casefold() for word in re.findall(rf"[^\W\d_{_CJK}]+|[{_CJK}]|\S", line)][-_LEAD:]
    while words and _LEXICON.letter(words[0]) in ("y", "C", "F"):
        words = words[1:]
    return words if len(words) > 1 and all(map(str.isalpha, words)) else []


def _sentences(answer: str, after: str) -> Iterator[_Sentence]:
    """Yield the sentences after an answer. The first begins with the answer itself."""
    text = after if len(after) <= 2 * _READ else f"{after[:_READ]}\n{after[-_READ:]}"
    shape, words = "S", [answer]
    for letter, word in _lettered(answer, text):
        if letter not in _ENDS:
            shape += letter
            words += [word] * len(letter)
        elif shape and (letter != "\n" or shape[-1] not in "B:="):  # `it is`, then a line with the value
            yield _Sentence(shape, words, letter == "?")
            shape, words = "", []
    if shape:
        yield _Sentence(shape, words, asks=False)


def _lettered(answer: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the letter and the text of each value, phrase and mark in a string."""
    tokens = [token for token in _TOKEN.finditer(text) if token.lastgroup != "command"]
    folded = [token[0].casefold().replace("\u2019", "'") for token in tokens]
    right = _skeleton(answer)
    option = _OPTION.fullmatch(right[:4])
    is_verdict = _LEXICON.letter(right.casefold()) in _VERDICTS
    at = 0
    while at < len(tokens):
        kind = tokens[at].lastgroup
        word = tokens[at][0]
        length = 1
        if kind == "value":
            letter = "x" if option or is_verdict else "S" if _is_same(right, _skeleton(word)) else "O"
        elif kind != "word":
            letter = _LETTERS[str(kind)]
        elif option and _OPTION.fullmatch(word):
            letter = "S" if word == option[1] else "O"
        else:
            letter, length = _LEXICON.phrase(folded, at)
            word = " ".join(token[0] for token in tokens[at : at + length])
            if is_verdict and letter in _VERDICTS:
                letter = "S" if word.casefold() == right.casefold() else "O"
        yield letter, word
        at += length


_OPTION = re.compile(r"\(?([A-HJ])\)?")  # B, (B)
_LETTER_IN_BRACKETS = re.compile(r"^\(([A-Ja-j])\)")  # the start of `(B) neon`
_FONT = r"\\(?:text|textbf|mathrm|mathbf|boldsymbol|left|right|displaystyle)(?![a-zA-Z])"
_MARKUP = re.compile(rf"{_FONT}|\\[,;:! ()\[\]]|[\s${{}}*]")
_CONTINUES = re.compile(r"[\d.,/^!]")  # `4` does not begin `42`, `4.5` or `4!`


def _skeleton(text: str) -> str:
    r"""Return an answer without markup: `\text{(B)} $4$.` -> `B4`."""
    return _LETTER_IN_BRACKETS.sub(r"\1", _MARKUP.sub("", text).rstrip(".,;:!"))


def _is_same(answer: str, later: str) -> bool:
    """Return whether answers are equal, ignoring words after or a name before either: `4`, `x = 4`, `4 apples`."""
    short, long = sorted((answer, later), key=len)
    begins = long.startswith(short) and not _CONTINUES.match(long, len(short))
    return begins or long.endswith(f"={short}") or later in answer.strip("()[]{}\\").split(",")
