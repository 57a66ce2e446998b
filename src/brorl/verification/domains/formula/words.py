"""Words beside a number: units (`3 cm`), counted nouns (`3 apples`), magnitudes (`3 million`), spelled numbers."""

from __future__ import annotations

import re
from fractions import Fraction

from brorl.verification.domains.formula.tokens import END, Token, word_list, written
from brorl.verification.domains.marked_answer import LABEL
from brorl.verification.domains.units import Unit, parse_units

MAGNITUDES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip
ABOUT = frozenset(word_list("about approximately roughly around approx exactly precisely"))
_ONES = word_list(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = word_list("zero ten twenty thirty forty fifty sixty seventy eighty ninety")
NUMERALS = {word: number for number, word in enumerate(_ONES)} | {word: 10 * n for n, word in enumerate(_TENS) if n > 1}
_DENOMINATORS = {
    "half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "hundredth": 100, "thousandth": 1_000,
}  # fmt: skip
ORDINAL_ENDINGS = frozenset({"st", "nd", "rd", "th"})
CURRENCIES = {"USD": "dollar", "EUR": "euro", "GBP": "pound", "INR": "rupee"}
# These words are no counted nouns: operators, numerals, times, hedges, parts of sentences.
_OTHER_WORDS = word_list(
    "plus minus times divided over squared cubed mod modulo choose factorial power powers percent pct root "
    "roots half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh eighth "
    "eighths ninth tenth tenths hundredth hundredths thousandth thousandths millionth millionths score double "
    "triple twice am pm noon midnight oclock january february march april may june july august september "
    "october november december monday tuesday wednesday thursday friday saturday sunday bc ad bce no not nor "
    "neither never none nothing nobody cannot without except but if unless else otherwise sometimes usually "
    "rarely seldom or and either versus vs maybe perhaps possible probable likely unlikely doubt doubtful "
    "unsure uncertain guess think believe hardly nearly almost between than least most more less fewer below "
    "above under wrong incorrect false untrue invalid mistaken rejected excluded right correct true is are was "
    "were be isn aren wasn can could may might would should does do don doesn instead rather other another any "
    "anything some something everything all both to from through until since because so as the this that it "
    "its which what where when who whom whose we you they he she then there here also too however remainder "
    "mins infinity pi positive negative even odd prime base binary hex hexadecimal octal inclusive exclusive "
    "reciprocal inverse opposite complex imaginary undefined unknown approximately about roughly around "
    "rounded error sure certain definitely surely guessing impossible fake not nope yes inf nan st nd rd th "
    "off hundreds thousands dozens tens"
)
_NO_NOUNS = frozenset(_OTHER_WORDS) | NUMERALS.keys() | MAGNITUDES.keys()
_NO_NAMES = _NO_NOUNS - frozenset(
    word_list(
        "the this that and to of from all both root roots positive negative even odd prime base between power score "
        "remainder so is true correct right it or sure certain half third quarter least most reciprocal inverse "
        "complex error"
    )
)
_NO_SUFFIX = re.compile(r".*(?:ly|illions?|fold|teen|n't)")
_NOUNS = frozenset(word_list("half-life half-lives family fly lily bully jelly assembly supply anomaly"))
_ADJECTIVES = frozenset(word_list("possible positive negative even odd prime complex other more imaginary whole"))
_NO_UNITS = frozenset({"M", "G", "k"})
_FILLERS = frozenset({"total", "in total", "in all", "altogether", "overall", "only", "exactly", "precisely"})
_GENERIC = frozenset(word_list("unit square sq cubic cube"))
_POWER = re.compile(r"\^\{?[23]\}?$")
_NOUN = re.compile(r"[^\W\d_]{2,}(?:[-'][^\W\d_]+)*\.?")
_SMALL_WORDS = frozenset(word_list("of per a an in the on by each for out at"))
_SHOUTED = frozenset(word_list("YES NO TRUE FALSE NONE EVEN ODD DNE NEITHER BOTH AM PM"))
_ARTICLES = frozenset({"a", "an", "the"})
_PLURALS = {"ies": "y", "sses": "ss", "ches": "ch", "xes": "x", "people": "person", "men": "man", "children": "child"}
_MAX_WORDS = 6


def noun_of(text: str) -> str | None:
    """Return a counted noun in the singular: `red apples` -> `apple`, `square units` -> ""; None for other words."""
    if text in CURRENCIES:
        return CURRENCIES[text]
    base = _POWER.sub("", text)
    words = base.split()
    if not 1 <= len(words) <= _MAX_WORDS or not all(_NOUN.fullmatch(word) or word == "a" for word in words):
        return None
    stems = [word.rstrip(".") for word in words]
    folded = [word.casefold() for word in stems]
    if base == text and " ".join(folded) in _FILLERS:
        return ""
    head = [word for word in folded if word not in _SMALL_WORDS or len(folded) == 1]
    if folded[0] in _SMALL_WORDS or not head:
        return None
    for at, word in enumerate(head):
        if word in _ADJECTIVES and at < len(head) - 1:
            continue
        parts = [word] if word in _NOUNS else re.split(r"[-']", word)
        if not _NO_NOUNS.isdisjoint(parts) or (_NO_SUFFIX.fullmatch(word) and word not in _NOUNS):
            return None
    if any(len(word) < 3 and word not in _GENERIC for word in head) or any(word.isupper() for word in stems):
        return None
    phrase = folded[: next((at for at, word in enumerate(folded) if word in _SMALL_WORDS), len(folded))] or folded
    singular = _singular(phrase[-1])
    return "" if singular in _GENERIC else singular if base == text else None


def _singular(word: str) -> str:
    for ending, stem in _PLURALS.items():
        if word.endswith(ending):
            return word.removesuffix(ending) + stem
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word


def units_of(text: str) -> tuple[Unit, ...]:
    """Return the units of measurement that a text can mean."""
    is_word = "%" in text or text in _NO_UNITS or text.replace(".", "").casefold() in _NO_NOUNS
    return () if is_word else parse_units(text)


_FILLERS_OF_UNITS = frozenset(word_list("the a an of in to due toward towards is direction directed and"))
_WORD_AFTER_UNIT = re.compile(r"(?=.*[aeiouy])[^\W\d_]{3,}|up|in|to|of|it|is|at|on|by|as|so|an?", re.IGNORECASE)
# Directions belong to a value like a sign: `5 m up`, `a loss of 3`.
_DIRECTION = re.compile(
    r"\b(?:(?:up|down|for|back|in|out|left|right|north|south|east|west)(?:wards?|erly)?|(?:north|south)(?:east|west)|clockwise|"
    r"counterclockwise|anticlockwise|increased?|decreased?|rise|drop|gain|loss|more|less|above|below|before|after|ago)\b"
)
# These words belong to the sentence, not to the value: `since it falls`, `downward`, `of water`.
_BESIDE = re.compile(
    r"(?:of|in|from|since|because|as|which|where|so|when|for|to|toward|towards|at|on|by|with|after|before|away)\b|"
    r"(?:(?:up|down|for|back|in|out|left|right|north|south|east|west)(?:wards?)?|(?:north|south)(?:east|west)|"
    r"long|deep|high|tall|wide|thick|old|apart|each|total|approx\w*|rounded|clockwise|counterclockwise|anticlockwise)\b"
)


def is_beside_unit(token: Token) -> bool:
    """Whether a token is a word that can follow a unit."""
    return token.kind == "name" and (token.is_upright or _WORD_AFTER_UNIT.fullmatch(token.text) is not None)


def same_beside(right: str, given: str) -> bool:
    """Whether the words after two measured values say the same; a direction in the reference must not be missing."""
    one, other = (
        [word.rstrip("s") for word in text.casefold().split() if word not in _FILLERS_OF_UNITS]
        for text in (right, given)
    )
    if right:
        return one == other or (not given and not _DIRECTION.search(right.casefold()))
    return _BESIDE.match(given) is not None


def are_names(text: str) -> bool:
    """Whether words can name a value: `Area = 42`, but not `not = 42`."""
    return _NO_NAMES.isdisjoint(text.casefold().replace("'", " ").split())


def spelled_number(words: str) -> Fraction | None:
    """Return the number that words spell: `forty-two`, `negative three`, `one and a half`, `three quarters`."""
    parts = words.casefold().replace("-", " ").split()
    if parts[:1] in (["negative"], ["minus"]):
        value = spelled_number(" ".join(parts[1:]))
        return None if value is None else -value
    under = _DENOMINATORS.get(parts[-1].removesuffix("s")) if parts else None
    if under is None:
        return _whole(parts)
    *whole, above = parts[:-1] or ["a"]
    if "and" in whole:
        at = whole.index("and")
        whole, above = whole[:at], " ".join([*whole[at + 1 :], above])
    elif whole:
        return None
    top, rest = _whole(above.split()), _whole(whole) if whole else Fraction(0)
    return None if top is None or rest is None else rest + top / under


def _whole(words: list[str]) -> Fraction | None:
    """Return the whole number that words spell; None for other words."""
    total = part = 0
    last, largest = 1_000, 10**15
    for at, word in enumerate(words):
        number = 1 if at == 0 and word in ("a", "an") else NUMERALS.get(word)
        scale = MAGNITUDES.get(word)
        if number is not None and number < last and not 10 <= last < 20 and (number < 10 or last >= 100):
            part, last = part + number, max(number, 1)
        elif word == "hundred" and 0 < part < 100:
            part, last = part * 100, 100
        elif scale and word != "hundred" and part and scale < largest:
            total, part, last, largest = total + part * scale, 0, 1_000, scale
        elif not (word == "and" and 0 < at < len(words) - 1):
            return None
    return Fraction(total + part) if (words and words[-1] not in ("a", "an")) or words in (["a"], ["an"]) else None


def same_words(right: str, given: str) -> bool:
    """Whether texts are equal word by word; case counts in letters that are no word, such as `BDAC`."""
    if "\\" in right:
        return right == given
    words = [text.split() for text in (right, given)]
    words = [text[1:] if text[0].casefold() in _ARTICLES and len(text) > 1 else text for text in words if text]
    if len(words) < 2:
        return right == given
    return len(words[0]) == len(words[1]) and all(
        one == other or (one.casefold() == other.casefold() and (one in _SHOUTED or one[1:] != one[1:].upper()))
        for one, other in zip(*words, strict=True)
    )


def are_two_factors(right: str, given: str) -> bool:
    """Whether two capitals stand in two orders: `IR` and `RI` are one product, and `AB` and `BA` one segment."""
    return re.fullmatch("[A-Z]{2}", right) is not None and right not in _SHOUTED and right == given[::-1]


_CHOICE = re.compile(
    r"\\(?:text(?:bf|rm|sf|it)?|mathrm|mathbf|mbox) ?\{ ?\(([A-J])\)(?:\\?[ ~])*\}(?:\\[ ,;:]|\\q?quad\b|[ ~:])*"
    r"([^ ].*)",
    re.DOTALL,
)
_ARROWS = frozenset({"\\therefore", "\\Rightarrow", "\\to"})
_DONE = frozenset({"\\blacksquare", "\\square", "\\qed", "\\Box", "\\checkmark"})
_DOMAINS = frozenset({"\\mathbb", "Z", "N", "Q", "R"})
_HYPHEN = re.compile(r"(?<=\w)-(?=\w)")
_END_MARKS = frozenset({".", ",", ";", ":"})


def labeled(text: str) -> tuple[str, str] | None:
    r"""Return the letter of a choice and the value after it, as in `\textbf{(B)}\ 12`; None for any other text."""
    match = _CHOICE.fullmatch(text)
    return (match[1], match[2]) if match else None


def without_frame(tokens: list[Token]) -> list[Token]:
    """Remove braces around an answer, `Answer:` before the answer, and marks after it."""
    infix = {"\\over", "\\choose"}
    while len(tokens) > 2 and _closing(tokens) == len(tokens) - 1 and not any(one.text in infix for one in tokens):
        tokens = tokens[1:-1]
    while tokens and tokens[-1].kind == "mark" and tokens[-1].text in _END_MARKS:
        tokens = tokens[:-1]
    while tokens and tokens[-1].text in _DONE:
        tokens = tokens[:-1]
    tokens = tokens[1:] if tokens and tokens[0].text in _ARROWS else tokens
    tokens = _with_condition(tokens)
    for length in range(min(len(tokens), 6), 0, -1):
        if LABEL.fullmatch(written(tokens[:length]).strip() + " ") and len(tokens) > length:
            return tokens[length:]
    return tokens


def _with_condition(tokens: list[Token]) -> list[Token]:
    r"""Return tokens with a comma before a condition in brackets at their end, as in `2k\pi (k \in \mathbb{Z})`."""
    start = max((at for at, token in enumerate(tokens) if token.text == "("), default=0)
    is_condition = [token.text for token in tokens[start + 2 : start + 3]] == ["\\in"]
    is_condition = is_condition and any(token.text in _DOMAINS for token in tokens[start + 3 : start + 4])
    if not (start and is_condition and tokens[start + 1].kind == "name" and tokens[-1].text == ")"):
        return tokens
    return [*tokens[:start], Token("mark", ","), *tokens[start + 1 : -1]]


def _closing(tokens: list[Token]) -> int | None:
    """Return the place of the brace that closes the first token; None if the first token is no brace."""
    depth = 0
    for at, token in enumerate(tokens):
        depth += (token.text == "{") - (token.text == "}")
        if depth == 0:
            return at if at else None
    return None


def words_of(tokens: list[Token]) -> str:
    """Return tokens as words with one space between them; formulas have no space."""
    kept = [token for token in tokens if token.text not in ("{", "}", '"')]
    pairs = zip([END, *kept], kept, strict=False)
    kept = [one for before, one in pairs if before.kind != "number" or one.text not in ORDINAL_ENDINGS]
    if all(token.kind in ("name", "number") or token.text in "-'.,!?():" for token in kept):
        text = _HYPHEN.sub(" ", written(kept)).replace("(", " ").replace(")", " ")
        text = " ".join(text.split()).strip(" .,!?")
        return text[1:-1] if text[:1] == text[-1:] == "'" else text
    return "".join(token.text + (" " if token.kind == "command" else "") for token in tokens)
