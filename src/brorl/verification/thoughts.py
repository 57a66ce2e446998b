"""Thoughts in responses: built-in verifiers judge only the answer, which is the text after the last thought.

    `<think> 2 + 2 ... </think> The answer is 4.`  ->  ` The answer is 4.`

A thought begins with an opening tag, in the response or at the end of the prompt, and ends with a closing tag. A tag
inside a code block or code span is plain text; it neither begins nor ends a thought.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from brorl.sampling import Decode, StopStrings, decode_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FENCE = r"(?P<fence>(?<!`)`{3,}+|(?<!~)~{3,}+)(?=(?P<info>[^`~\n]*+)$)"
_LANGUAGE = re.compile(r"[ \t]*\w.*")  # after a fence that opens a block: ```python
_LOOK_BACK = 200  # how far before a tag, in characters, a code span around it can begin
_SPAN = r"(?P<ticks>(?<!`)`++)[^`\n]++(?P=ticks)(?!`)"


@dataclass(frozen=True)
class ThoughtTags:
    """The tags around a thought."""

    opening: str = "<think>"
    closing: str = "</think>"

    def opened_by(self, prompt: str) -> bool:
        """Return whether the prompt opens a thought by ending with the opening tag, as some chat templates do."""
        return prompt.rstrip().endswith(self.opening)

    def contained_in(self, response: str) -> bool:
        """Return whether a response contains a tag."""
        return self.opening in response or self.closing in response

    def answer(self, prompt: str, response: str) -> str | None:
        """Return a response's text after its last thought; None if the response ends inside a thought.

        Examples:
            >>> ThoughtTags().answer("2+2?", "<think>easy</think>4")
            '4'
        """
        start = 0
        is_open = False
        if self.opened_by(prompt) or response.lstrip().startswith(self.opening):
            end = self._first_end(response)
            if end is None:
                return None
            start = end
        for tag in self._used_tags(response, start):
            is_open = tag[0] == self.opening
            start = start if is_open else tag.end()
        return None if is_open else response[start:]

    def _first_end(self, response: str) -> int | None:
        """Return the end of the first thought: its first closing tag that is not alone between backticks."""
        start = -1
        while (start := response.find(self.closing, start + 1)) >= 0:
            end = start + len(self.closing)
            before = response[max(start - _LOOK_BACK, 0) : start].rpartition("\n")[2]
            after = response[end : end + 2]
            between_ticks = before.endswith("`") and not before.endswith("``") and after[:1] == "`" and after != "``"
            if not between_ticks or before.count("`") % 2 == 0:  # an even number: the tag is between two spans
                return end
        return None

    def _used_tags(self, response: str, start: int) -> Iterator[re.Match[str]]:
        """Yield the tags outside code spans and complete code blocks."""
        if not self.contained_in(response[start:]):  # the usual case; avoids the slow search below
            return
        block = None  # the fence of the open code block
        inside: list[re.Match[str]] = []  # tags inside that block, which count if it never ends
        for match in self._token.finditer(response, start):
            fence = match["fence"]
            if fence and block is None and not self.contained_in(match["info"]):
                block = fence
            elif fence and block is not None and fence.startswith(block) and not _LANGUAGE.fullmatch(match["info"]):
                block = None
                inside = []
            elif match["tag"] and block is not None:
                inside.append(match)
            elif match["tag"]:
                yield match
        yield from inside

    @cached_property
    def _token(self) -> re.Pattern[str]:
        tag = f"{re.escape(self.opening)}|{re.escape(self.closing)}"
        return re.compile(rf"{_SPAN}|{_FENCE}|(?P<tag>{tag})", re.MULTILINE)


THINK = ThoughtTags()


def make_decode(tokenizer: PreTrainedTokenizerBase, tags: ThoughtTags | None, stop: Iterable[str] = ()) -> Decode:
    """Return a function that turns a response's token ids into the text that a verifier sees.

    Special tokens other than the tags are removed, as is a `sampling.stop` string at the end.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = {token_id: token.content for token_id, token in added if token.special}
    kept = {token_id for token_id, text in special.items() if tags and text in (tags.opening, tags.closing)}
    removed = special.keys() - kept

    def decode(token_ids: Sequence[int]) -> str:
        if kept.isdisjoint(token_ids):
            return decode_tokens(tokenizer, token_ids)
        ids = [token_id for token_id in token_ids if token_id not in removed]
        return decode_tokens(tokenizer, ids, special=True)

    return partial(StopStrings(tokenizer, stop).text, decode=decode)
