"""Words and sentences of a text, in time linear in its length.

The original counts with NLTK, whose model of sentences is a download. Words are the same here. Words in capitals follow
the Penn Treebank rules as far as they matter for capitals. Sentences follow rules of our own: a sentence ends with `.`,
`!` or `?` before white space, and it has a letter. NLTK counts `???` as three sentences and `1.` as one, which a policy
finds within a few steps.
"""

from __future__ import annotations

import re
from itertools import chain, pairwise

_WORD = re.compile(r"\w+")
_LETTER = re.compile(r"[^\W\d_]")

_OPENERS = "([{\"'“\u2018«*_"
_CLOSERS = ")]}\"'”\u2019»*_`"
# `sat` and `sun` are words, and `Sat` and `Sun` are days.
_ABBREVIATIONS = re.compile(
    "(?:[Mm]rs?|[Mm]s|[Mm]essrs|[Dd]r|[Pp]rof|[Jj]r|[Ss]r|[Ll]td|[Cc]orp|[Bb]ros|[Vv]s|[Dd]ept|[Uu]niv|[Aa]ssn|[Bb]lvd)|"
    "Rev|Gen|Col|Capt|Lt|Sgt|Sen|Rep|Gov|St|Mt|Ft|Inc|Co|Cos|"
    "Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec|Mon|Tues?|Wed|Thu|Thurs|Fri|Sat|Sun|Ave|Rd|Ext|Vol|Figs?|Eqs?|Eds?|"
    "approx|est|ext|figs?|vol|eqs?|ca|cf|eds|al"
)
_INNER_PERIODS = re.compile(r"[^\W\d_](?:\.[^\W\d_])+")  # `e.g`, `U.S.A`, without the last period
_STARTER = re.compile(
    r"(?:the|this|that|these|those|he|she|it|we|they|you|i|an?|in|on|at|as|if|but|and|so|however|there|here|when|while|"
    r"what|who|why|how|my|our|your|his|her|its|their|some|many|most|after|before|since|for)\b",
    re.IGNORECASE,
)

# What the Penn Treebank rules make a token of its own; a colon or comma before a digit belongs to a number.
_SEPARATOR = re.compile(r"""(?:[\s?!;@#$%&()\[\]{}<>"“”«»„\u2018\u2019`…]|--|\.\.\.|''|[:,](?!\d))+""")
_TWO_TOKENS = re.compile(
    r"(.*[^'])('S|'M|'D|'LL|'RE|'VE)|(.*)(N'T)|(CAN)(NOT)|(D')(YE)|(GIM|LEM)(ME)|(GON|WAN)(NA)|(GOT)(TA)|(MORE)('N)",
    re.DOTALL,
)


def count_words(text: str) -> int:
    """Return the number of runs of letters, digits and underscores."""
    return sum(1 for _ in _WORD.finditer(text))


def count_capital_words(text: str) -> int:
    """Return the number of tokens with letters and without a lower-case letter; `IT'S` is two."""
    return sum(map(str.isupper, chain.from_iterable(map(_tokens, _SEPARATOR.split(text)))))


def _tokens(piece: str) -> list[str]:
    if not piece.isupper():
        return []
    match = _TWO_TOKENS.fullmatch(piece.rstrip("."))
    return [token for token in match.groups() if token] if match else [piece]


def count_sentences(text: str) -> int:
    """Return the number of sentences; text after the last end of a sentence is one if it has a letter."""
    count, has_letter = 0, False
    for token, following in pairwise(chain(text.split(), [""])):
        has_letter = has_letter or _LETTER.search(token) is not None
        if has_letter and _ends_sentence(token, following):
            count, has_letter = count + 1, False
    return count + has_letter


def _ends_sentence(token: str, following: str) -> bool:
    closed = token.rstrip(_CLOSERS)
    word = closed.rstrip(".!?…")
    end = closed[len(word) :]
    if "!" in end or "?" in end:
        return True
    if not end or not word or not following:
        return bool(end and word)
    starts = following.lstrip(_OPENERS)
    if len(end) > 1 or end == "…":
        return starts[:1].isupper()
    word = word.lstrip(_OPENERS)
    if len(word) == 1:
        return not word.isalpha() or word == "I"
    if _ABBREVIATIONS.fullmatch(word) or _INNER_PERIODS.fullmatch(word):
        return starts[:1].isupper() and _STARTER.match(starts) is not None
    return True
