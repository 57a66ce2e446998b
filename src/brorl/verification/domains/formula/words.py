"""Words next to a number: units (`3 cm`), counted nouns (`3 apples`), directions (`5 m up`), and names (`Area = 3`).

The tables are lists of words. A word that is not in any table is a noun.
"""

from __future__ import annotations

import re
from itertools import takewhile

from brorl.verification.domains.formula.numerals import MAGNITUDES, NUMERALS
from brorl.verification.domains.formula.tokens import Token, word_list
from brorl.verification.domains.units import Unit, parse_units


def _words(*lines: str) -> frozenset[str]:
    return frozenset(word_list(" ".join(lines)))


ABOUT = _words("about approximately roughly around approx exactly precisely")
CURRENCIES = {"USD": "dollar", "EUR": "euro", "GBP": "pound", "INR": "rupee"}

# These words are not counted nouns. Those in the first table can still be part of a value's name.
_IN_NAMES = _words(
    "half third quarter score power root roots remainder reciprocal inverse error",  # numerals and operations
    "positive negative even odd prime base complex",  # kinds of numbers
    "the this that it both all least most from to between and or is so",  # grammar
    "true correct right sure certain",  # judgments
)
_NOT_NOUNS = (
    _IN_NAMES
    | NUMERALS.keys()
    | MAGNITUDES.keys()
    | _words(
        # Operators.
        "plus minus times divided over squared cubed mod modulo choose factorial powers percent pct off double triple "
        "twice opposite",
        # Numerals.
        "halves thirds quarters fourth fourths fifth fifths sixth sixths seventh eighth eighths ninth tenth tenths "
        "hundredth hundredths thousandth thousandths millionth millionths st nd rd th hundreds thousands dozens tens "
        "infinity inf nan pi",
        # Kinds of numbers.
        "binary hex hexadecimal octal inclusive exclusive imaginary undefined unknown rounded",
        # Times.
        "am pm noon midnight oclock january february march april may june july august september october november "
        "december monday tuesday wednesday thursday friday saturday sunday bc ad bce mins",
        # Denials and alternatives.
        "no not nor neither never none nothing nobody cannot without except but if unless else otherwise nope either "
        "versus vs instead rather",
        # Hedges and judgments.
        "sometimes usually rarely seldom maybe perhaps possible probable likely unlikely doubt doubtful unsure "
        "uncertain guess guessing think believe hardly nearly almost about approximately roughly around wrong "
        "incorrect false untrue invalid mistaken rejected excluded definitely surely impossible fake yes",
        # Comparisons.
        "than more less fewer below above under other another",
        # Parts of a sentence.
        "are was were be isn aren wasn can could may might would should does do don doesn any anything some something "
        "everything through until since because as its which what where when who whom whose we you they he she then "
        "there here also too however",
    )
)
_NOT_NAMES = _NOT_NOUNS - _IN_NAMES
_OTHER_ENDINGS = ("ly", "illion", "illions", "fold", "teen", "n't")  # endings of words that are not nouns
_NOUNS = _words("half-life half-lives family fly lily bully jelly assembly supply anomaly")  # exceptions to this rule
_ADJECTIVES = _words("possible positive negative even odd prime complex other more imaginary whole")  # before a noun
_GENERIC = _words("unit square sq cubic cube")  # nouns that do not describe the value
_FILLERS = frozenset({"total", "in total", "in all", "altogether", "overall", "only", "exactly", "precisely"})
_SMALL_WORDS = _words("of per a an in on the by each for out at")
_PLURALS = {"ies": "y", "sses": "ss", "ches": "ch", "xes": "x", "people": "person", "men": "man", "children": "child"}
_POWER = re.compile(r"\^\{?[23]\}?$")  # `units^2`
_NOUN = re.compile(r"a|[^\W\d_]{2,}(?:[-'][^\W\d_]+)*\.?")
_MAX_WORDS = 6


def noun_of(text: str) -> str | None:
    """Return a counted noun in the singular: `red apples` -> `apple`, `square units` -> ""; None for other words."""
    if text in CURRENCIES:
        return CURRENCIES[text]
    base = _POWER.sub("", text)
    written = [word.rstrip(".") if _NOUN.fullmatch(word) else "" for word in base.split()]
    words = [word.casefold() for word in written]
    if not (1 <= len(words) <= _MAX_WORDS and all(words)):
        return None
    if base == text and " ".join(words) in _FILLERS:
        return ""
    if words[0] in _SMALL_WORDS or any(word.isupper() for word in written):
        return None
    if not all(map(_is_noun, _nouns_of(words))):
        return None
    *_, head = takewhile(lambda word: word not in _SMALL_WORDS, words)
    noun = _singular(head)
    return "" if noun in _GENERIC else noun if base == text else None


def _nouns_of(words: list[str]) -> list[str]:
    """Return the words in a phrase that must be nouns: `other red apples in a box` -> `red apples box`."""
    *others, last = (word for word in words if word not in _SMALL_WORDS)
    return [*(word for word in others if word not in _ADJECTIVES), last]


def _is_noun(word: str) -> bool:
    if word in _NOUNS or word in _GENERIC:
        return True
    return len(word) > 2 and not word.endswith(_OTHER_ENDINGS) and _NOT_NOUNS.isdisjoint(re.split(r"[-']", word))


def _singular(word: str) -> str:
    for ending, stem in _PLURALS.items():
        if word.endswith(ending):
            return word.removesuffix(ending) + stem
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word


_NOT_UNITS = frozenset({"M", "G", "k"})


def units_of(text: str) -> tuple[Unit, ...]:
    """Return the units that a string can mean."""
    is_word = "%" in text or text in _NOT_UNITS or text.replace(".", "").casefold() in _NOT_NOUNS
    return () if is_word else parse_units(text)


_WORD_AFTER_UNIT = re.compile(r"(?=.*[aeiouy])[^\W\d_]{3,}|up|in|to|of|it|is|at|on|by|as|so|an?", re.IGNORECASE)
_WITHOUT_MEANING = _words("the a an of in to due toward towards is direction directed and")
_DIRECTIONS = {
    side + ending
    for side in word_list("up down for back in out left right north south east west")
    for ending in ("", "ward", "wards", "erly")
} | _words("northeast northwest southeast southwest clockwise counterclockwise anticlockwise")
# If the reference has one of these words, the answer needs it too, like a sign: `5 m up`, `a loss of 3`.
_SIGNS = _DIRECTIONS | _words(
    "increase increased decrease decreased rise drop gain loss more less above below before after ago"
)
# These words may follow a value even if its reference has none: they may come from the sentence around it.
_OF_SENTENCE = _DIRECTIONS | _words(
    "of from since because as which where so when to toward towards at on by with after before away",
    "long deep high tall wide thick old apart each total approx approximate approximately rounded",
)
_WORD = re.compile(r"\w+")


def is_beside_unit(token: Token) -> bool:
    """Return whether a token is a word that can follow a unit."""
    return token.kind == "name" and (token.is_upright or _WORD_AFTER_UNIT.fullmatch(token.text) is not None)


def same_beside(reference: str, answer: str) -> bool:
    """Return whether the words after two measured values agree. The answer must have the reference's direction."""
    if not reference:
        first = _WORD.match(answer)
        return first is not None and first[0] in _OF_SENTENCE
    words, answer_words = (
        [word.rstrip("s") for word in text.casefold().split() if word not in _WITHOUT_MEANING]
        for text in (reference, answer)
    )
    return words == answer_words or (not answer and _SIGNS.isdisjoint(_WORD.findall(reference.casefold())))


def are_names(text: str) -> bool:
    """Return whether words can name a value: `Area = 42`, but not `not = 42`."""
    return _NOT_NAMES.isdisjoint(text.casefold().replace("'", " ").split())


_ARTICLES = frozenset({"a", "an", "the"})
_SHOUTED = _words("YES NO TRUE FALSE NONE EVEN ODD DNE NEITHER BOTH AM PM")


def are_same_words(reference: str, answer: str) -> bool:
    """Return whether strings match word by word. Case matters only in letters that are not a word, such as `BDAC`."""
    if "\\" in reference:
        return reference == answer
    words, answer_words = (_without_article(text.split()) for text in (reference, answer))
    if not (words and answer_words):
        return reference == answer
    return len(words) == len(answer_words) and all(map(_is_same_word, words, answer_words))


def _without_article(words: list[str]) -> list[str]:
    return words[1:] if len(words) > 1 and words[0].casefold() in _ARTICLES else words


def _is_same_word(reference: str, answer: str) -> bool:
    is_word = reference in _SHOUTED or reference[1:] != reference[1:].upper()
    return reference == answer or (is_word and reference.casefold() == answer.casefold())


def are_two_factors(reference: str, answer: str) -> bool:
    """Return whether both strings are the same two capitals in either order: `IR` and `RI` are one product."""
    return re.fullmatch("[A-Z]{2}", reference) is not None and reference not in _SHOUTED and reference == answer[::-1]
