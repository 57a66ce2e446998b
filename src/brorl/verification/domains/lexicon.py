"""A lexicon: words and phrases in several languages, each with a letter for its meaning.

    N = not
    not, never, cannot, *n't

With one letter per word, a sentence becomes a short string, so one pattern matches many wordings. Each paragraph gives
a letter, its meaning and its phrases. `*` stands for any beginning or ending. If a phrase is in two paragraphs, the
first applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

_MIN_STEM_LENGTH = 3
_CJK = "\u3000"  # Chinese and Japanese characters sort after it; each counts as a word


class Lexicon:
    r"""The letters of words and phrases.

    Args:
        text: The paragraphs. Words not in them get the letter `x`.

    Examples:
        >>> lexicon = Lexicon("N = not\nnot, *n't\n\nC = correction\nhold on")
        >>> lexicon.letter("isn't"), lexicon.phrase(["hold", "on", "!"], 0), lexicon.phrase(["hold", "it"], 0)
        ('N', ('C', 2), ('x', 1))
    """

    def __init__(self, text: str) -> None:
        letter_of: dict[str, str] = {}
        self._longest: dict[str, int] = {}  # first word -> number of words in its longest phrase
        for paragraph in text.strip().split("\n\n"):
            heading, _, phrases = paragraph.partition("\n")
            for phrase in map(str.strip, phrases.replace("\n", " ").split(",")):
                letter_of.setdefault(phrase, heading[0])
                words = phrase if phrase > _CJK else phrase.split()
                self._longest[words[0]] = max(len(words), self._longest.get(words[0], 1))
        self._phrases = {phrase.replace(" ", ""): letter for phrase, letter in letter_of.items()}
        self._stems = {phrase[:-1]: letter for phrase, letter in letter_of.items() if phrase[-1] == "*"}
        self._endings = {phrase[1:]: letter for phrase, letter in letter_of.items() if phrase[0] == "*"}
        self.letter = lru_cache(maxsize=4096)(self._letter)

    def phrase(self, words: Sequence[str], at: int) -> tuple[str, int]:
        """Return the letter of the longest phrase that begins at word `at`, and the number of words in it."""
        for length in range(self._longest.get(words[at], 1), 1, -1):
            letter = self._phrases.get("".join(words[at : at + length]))
            if letter:
                return letter, length
        return self.letter(words[at]), 1

    def _letter(self, word: str) -> str:
        if word in self._phrases:
            return self._phrases[word]
        for end in range(len(word), _MIN_STEM_LENGTH - 1, -1):
            if word[:end] in self._stems:
                return self._stems[word[:end]]
        return next((letter for ending, letter in self._endings.items() if word.endswith(ending)), "x")
