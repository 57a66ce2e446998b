"""Tokenizes results so that they cannot forge special tokens.

In: the text after a turn, including tool output. Out: its tokens, as the tokenizer produces them after the turn's end
token; an added token inside tool output, such as `<|im_end|>`, is split.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING

from brorl.sampling import decode_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ResultTokens:
    """Converts text around and inside results to tokens, and a turn's tokens to text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop = frozenset(stop_token_ids)
        ends = {decode_tokens(tokenizer, [token], special=True): token for token in stop_token_ids}
        self.ends = {text: token for text, token in ends.items() if text}
        added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        # Pure white-space tokens, as in Gemma's vocabulary, cannot forge anything and occur in ordinary text.
        self.added = {i: text for i, text in added.items() if len(text) > 1 and text.replace("▁", "").strip()}

    @cached_property
    def _begins_added(self) -> re.Pattern[str]:
        """A pattern that matches the first character of every added token, even if added tokens overlap."""
        texts = "|".join(map(re.escape, self.added.values()))
        return re.compile(rf"(?s:(?={texts})(.))" if texts else "(?!)")

    def turn_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn, with special tokens but without its end token."""
        is_ended = len(token_ids) > 0 and token_ids[-1] in self._stop
        return decode_tokens(self._tokenizer, token_ids[:-1] if is_ended else token_ids, special=True)

    def broken(self, contents: Sequence[str]) -> tuple[str, list[str]]:
        """Return a word that does not occur in the contents, and the contents with that word in every added token."""
        readable = [content.encode("utf-8", "replace").decode() for content in contents]
        word = next(word for n in count() if not any((word := f"xQ{n}Zk4Wm") in content for content in readable))
        texts = [self._begins_added.sub(lambda match: match[1] + word, content) for content in readable]
        for place, (content, text) in enumerate(zip(readable, texts, strict=True)):
            # a tokenizer that normalizes text may find added tokens in other spellings
            if not self.added.keys().isdisjoint(self.tokens("", text.split(word))):
                texts[place] = word.join(content)
        return word, texts

    def tokens(self, end: str, pieces: Sequence[str]) -> tuple[int, ...]:
        """Tokenize the pieces of a text so that no token spans two pieces. `end` is the preceding end token."""
        token_ids: list[int] = []
        for piece in pieces:
            after_end = self._ids(end + piece)
            # a stop token that is not an added token can merge with what follows
            is_apart = after_end[:1] == [self.ends.get(end)]
            token_ids += after_end[1:] if is_apart else self._ids(piece)
        return tuple(token_ids)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
