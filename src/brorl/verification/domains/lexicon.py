"""A lexicon: words and phrases in several languages, each with one letter for its meaning.

    N = not
    not, never, cannot, *n't

A sentence whose words are letters is a short string, so one pattern reads it whatever its words are. Each paragraph has
a letter, what it means, and its phrases. `*` stands for any beginning or ending. If two paragraphs have a phrase, the
first counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

_SHORTEST_STEM = 3
_CJK = "\u3000"  # Chinese and Japanese characters come after it: each is a word


class Lexicon:
    r"""The letters of words and phrases.

    Args:
        text: The paragraphs.
        other: The letter of a word that the lexicon does not have.

    Example:
        >>> lexicon = Lexicon("N = not\nnot, *n't\n\nC = correction\nhold on")
        >>> lexicon.letter("isn't"), lexicon.phrase(["hold", "on", "!"], 0), lexicon.phrase(["hold", "it"], 0)
        ('N', ('C', 2), ('x', 1))
    """

    def __init__(self, text: str, other: str = "x") -> None:
        letter_of: dict[str, str] = {}
        for paragraph in text.strip().split("\n\n"):
            heading, _, phrases = paragraph.partition("\n")
            for phrase in phrases.replace("\n", " ").split(","):
                letter_of.setdefault(phrase.strip(), heading[0])
        self._other = other
        self._endings = {phrase[1:]: letter for phrase, letter in letter_of.items() if phrase[0] == "*"}
        self._stems = {phrase[:-1]: letter for phrase, letter in letter_of.items() if phrase[-1] == "*"}
        self._phrases = {phrase.replace(" ", ""): letter for phrase, letter in letter_of.items()}
        lengths = [_first_and_length(phrase) for phrase in letter_of]
        self._longest = {first: max(n for one, n in lengths if one == first) for first, length in lengths if length > 1}
        self.letter = lru_cache(maxsize=4096)(self._letter)

    def phrase(self, words: Sequence[str], at: int) -> tuple[str, int]:
        """Return the letter of the longest phrase that begins at a word, and how many words it has."""
        for length in range(self._longest.get(words[at], 1), 1, -1):
            letter = self._phrases.get("".join(words[at : at + length]))
            if letter:
                return letter, length
        return self.letter(words[at]), 1

    def _letter(self, word: str) -> str:
        if word in self._phrases:
            return self._phrases[word]
        for end in range(len(word), _SHORTEST_STEM - 1, -1):
            if word[:end] in self._stems:
                return self._stems[word[:end]]
        return next((letter for ending, letter in self._endings.items() if word.endswith(ending)), self._other)


def _first_and_length(phrase: str) -> tuple[str, int]:
    """Return the first word of a phrase, and how many words it has."""
    return (phrase[0], len(phrase)) if phrase > _CJK else (phrase.split()[0], phrase.count(" ") + 1)
