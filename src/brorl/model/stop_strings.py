"""Texts that end a response: for any tokenizer, the token that completes one, and where the response's text ends.

A text of `sampling.stop` that is a special token is a stop token, because special tokens are not part of a response's
text. All others are stop strings. They can begin and end inside tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from brorl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode: TypeAlias = Callable[[Sequence[int]], str]  # from the tokens of a response to its text
_PART = "\N{REPLACEMENT CHARACTER}"  # the text of bytes that are no character yet


class StopStrings:
    """The stop strings of a run: the texts in `stop` that are no special tokens of the tokenizer.

    A response ends with the first token that completes a stop string: one in its decoded text that ends in the part of
    the text that the token added or changed. The text of the response is what precedes the stop string, or the first
    one if the token completes several. The prompt's text does not count.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self.texts = tuple(text for text in stop if special_token(tokenizer, text) is None)
        # Tokenizers add and remove spaces between tokens. Without them, the texts of tokens add up.
        parts = [text.replace(" ", "") for text in self.texts]
        self.pieces = _Pieces(tokenizer)
        self.longest = max((len(part.encode()) for part in parts), default=0) or 1
        # A character that is split over tokens is one replacement character or more in their texts.
        patterns = ["".join(re.escape(c) if c.isascii() else f"(?:{c}|{_PART}+)" for c in part) for part in parts]
        self.likely_in = re.compile("|".join(patterns)).search

    def __bool__(self) -> bool:
        return bool(self.texts)

    def text(self, token_ids: Sequence[int], decode: Decode | None = None) -> str:
        """Return the text of a response without the stop string at its end; by default without special tokens."""
        decode = decode or self._decode
        text = decode(token_ids)
        return text[: self._end(text, token_ids, decode)]

    def end_with(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of at least one token completes a stop string."""
        return self._end(self._decode(token_ids), token_ids, self._decode) is not None

    def length(self, token_ids: Sequence[int], minimum: int) -> int | None:
        """Return the number of tokens up to the first that completes a stop string, after the first `minimum`."""
        tail = ""
        for number, token in enumerate(token_ids, 1):
            text = tail + self.pieces[token]
            if number > minimum and self.likely_in(text) and self.end_with(token_ids[:number]):
                return number
            tail = text[-self.longest :]
        return None

    def _end(self, text: str, token_ids: Sequence[int], decode: Decode) -> int | None:
        """Return where the first stop string begins that the last token completes."""
        if not any(stop in text for stop in self.texts):
            return None
        before = decode(token_ids[:-1])
        unchanged = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
        found = [text.find(stop, max(0, unchanged - len(stop) + 1)) for stop in self.texts]
        return min((place for place in found if place >= 0), default=None)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


class _Pieces(dict[int, str]):
    """What a token adds to a text, without spaces; found when the token occurs first."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        # The text of a single token can be another than inside a text; what a second copy adds is not.
        once, twice = (str(self._tokenizer.decode([token] * n, skip_special_tokens=True)) for n in (1, 2))
        self[token] = (twice[len(once) :] if twice.startswith(once) else once).replace(" ", "")
        return self[token]


def special_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """Return the special token with this text, if there is one: a token that the text of a response leaves out."""
    token = tokenizer.get_added_vocab().get(text)
    return None if token is None or not _is_left_out(tokenizer, token) else int(token)


def _is_left_out(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    return not tokenizer.decode([token], skip_special_tokens=True)


def stop_tokens(tokenizer: PreTrainedTokenizerBase, stop: Iterable[str]) -> tuple[int, ...]:
    """Return the texts of `sampling.stop` that are special tokens, as tokens."""
    return tuple(token for text in stop if (token := special_token(tokenizer, text)) is not None)


def check_stop(name: str, tokenizer: PreTrainedTokenizerBase, stop: Iterable[str]) -> None:
    """Check that a response of a model can end with each of the texts of `sampling.stop`."""
    if not (stop := tuple(stop)):
        return
    special = [text for text, token in tokenizer.get_added_vocab().items() if _is_left_out(tokenizer, token)]
    for text in stop:
        if text in special:
            continue
        if inside := next((token for token in special if token in text), None):
            raise UserError(
                f"sampling.stop has {text!r}, and {inside!r} is a special token of {name}, which is not part of a "
                f"response's text; set sampling.stop to {inside!r} alone"
            )
        # At the start of a text a tokenizer can drop a space, and it can have a token that it never makes of a text.
        spelled = [tokenizer.encode(before + text, add_special_tokens=False) for before in ("", "a")]
        own = tokenizer.get_vocab().get(text)
        decoded = [tokenizer.decode(tokens) for tokens in [*spelled, [] if own is None else [own]]]
        if not any(text in back for back in decoded):
            raise UserError(
                f"sampling.stop has {text!r}, which no response of {name} can contain: its tokenizer turns this text "
                f"into {decoded[0]!r}; set sampling.stop to a text that it keeps, or to a special token (special "
                f"tokens: {', '.join(special) or 'none'})"
            )
