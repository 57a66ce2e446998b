"""Instructions about amounts: keywords, letters, words, sentences and paragraphs.

In: a response's text and the arguments of the instruction. Out: whether the text follows it. All checks are linear in
the length of the text. Keywords are literal. The original reads them as regular expressions, so that `C++` stops it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, assert_never

from brorl.prompts.instructions import Relation
from brorl.verification.domains.instructions.tokens import count_capital_words, count_sentences, count_words

Arguments = Mapping[str, Any]

_DIVIDER = "***"
_QUOTES_AND_MARKS = frozenset(".,?!'\"")


def holds(count: int, relation: Relation, bound: int) -> bool:
    """Return whether a count fulfils a relation; `around` allows a tenth of the bound, at least 1."""
    match relation:
        case "less than":
            return count < bound
        case "at least":
            return count >= bound
        case "at most":
            return count <= bound
        case "exactly":
            return count == bound
        case "around":
            return abs(count - bound) <= max(round(bound / 10), 1)
        case _:
            assert_never(relation)


def existence(text: str, arguments: Arguments) -> bool:
    """Every keyword occurs, in upper or lower case, also within a word."""
    return all(re.search(re.escape(keyword), text, re.IGNORECASE) for keyword in arguments["keywords"])


def frequency(text: str, arguments: Arguments) -> bool:
    """The keyword occurs as often as wanted, in upper or lower case, also within a word."""
    found = re.finditer(re.escape(arguments["keyword"]), text, re.IGNORECASE)
    return holds(sum(1 for _ in found), arguments["relation"], arguments["frequency"])


def forbidden_words(text: str, arguments: Arguments) -> bool:
    """No forbidden word occurs as a whole word, in upper or lower case."""
    return not any(re.search(_whole_word(word), text, re.IGNORECASE) for word in arguments["forbidden_words"])


def _whole_word(word: str) -> str:
    """Return a pattern with a boundary at each end that is a letter, digit or underscore: `C++` has none at its end."""
    left, right = (r"\b" if re.match(r"\w", end) else "" for end in (word[0], word[-1]))
    return f"{left}{re.escape(word)}{right}"


def letter_frequency(text: str, arguments: Arguments) -> bool:
    """The letter, or any other character, occurs as often as wanted, in upper or lower case."""
    count = text.lower().count(arguments["letter"].lower())
    return holds(count, arguments["let_relation"], arguments["let_frequency"])


def number_words(text: str, arguments: Arguments) -> bool:
    """The number of runs of letters, digits and underscores is as wanted."""
    return holds(count_words(text), arguments["relation"], arguments["num_words"])


def number_sentences(text: str, arguments: Arguments) -> bool:
    """The number of sentences is as wanted; see `tokens`."""
    return holds(count_sentences(text), arguments["relation"], arguments["num_sentences"])


def capital_word_frequency(text: str, arguments: Arguments) -> bool:
    """The number of words in capitals is as wanted; see `tokens`."""
    return holds(count_capital_words(text), arguments["capital_relation"], arguments["capital_frequency"])


def number_paragraphs(text: str, arguments: Arguments) -> bool:
    """There are exactly as many paragraphs between dividers as wanted; only the first and the last may be empty."""
    paragraphs = [part.strip() for part in text.split(arguments.get("divider", _DIVIDER))]
    return all(paragraphs[1:-1]) and len(list(filter(None, paragraphs))) == arguments["num_paragraphs"]


def nth_paragraph_first_word(text: str, arguments: Arguments) -> bool:
    """There are as many paragraphs between empty lines as wanted, and the n-th starts with the word.

    As in the original, empty paragraphs are not counted but have a place: after three line ends, text is in place 2.
    """
    paragraphs = [part.strip() for part in text.split("\n\n")]
    if len(list(filter(None, paragraphs))) != arguments["num_paragraphs"]:
        return False
    words = paragraphs[arguments["nth_paragraph"] - 1].split(maxsplit=1)
    return bool(words) and _until_mark(words[0].lstrip("'").lstrip('"')) == arguments["first_word"].lower()


def _until_mark(word: str) -> str:
    end = next((place for place, character in enumerate(word) if character in _QUOTES_AND_MARKS), len(word))
    return word[:end].lower()
