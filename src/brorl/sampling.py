"""How a response is sampled and what ends it: temperature, top-p, top-k, length limits, stop tokens and stop strings.

An entry of `sampling.stop` that is a special token becomes a stop token, because special tokens are not part of a
response's text. Every other entry becomes a stop string, which can begin and end inside tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from brorl.errors import UserError
from brorl.section import Names, Section

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_TEMPERATURE = 1e-6
"""Lowest temperature above 0: logits divided by it stay finite in float32."""


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one sampling run."""

    temperature: float = 1.0  # divisor of the logits; 0 is greedy decoding (all rollouts of a prompt are equal)
    # Keep the smallest set of most probable tokens whose mass reaches top_p, plus ties with the last one; 1 keeps all.
    top_p: float = 1.0
    top_k: int = 0  # applied first: keep the k most probable tokens, plus ties with the last one; 0 keeps all
    # Maximum tokens per response, including the end token. A response that reaches the limit unfinished is truncated.
    max_new_tokens: int = 256
    # These tokens end a response, in addition to the engine's end-of-sequence tokens.
    stop_token_ids: tuple[int, ...] = ()
    # No stop token is sampled before a response has this many tokens. Until then, the distribution and the log-probs
    # exclude stop tokens.
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < float("inf")):
            raise ValueError(
                f"temperature must be 0 for greedy decoding, or a finite number of at least {MIN_TEMPERATURE:g}, "
                f"got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 switches it off), got {self.top_k}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens < self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be at least 0 and below max_new_tokens = {self.max_new_tokens}, got "
                f"{self.min_new_tokens}: otherwise no response could end with a stop token"
            )


class SamplingSettings(Section):
    """How rollouts are sampled."""

    temperature: float = Field(1.0, ge=MIN_TEMPERATURE, description="sampling temperature")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; the trained policy is the truncated one")
    top_k: int = Field(0, ge=0, description="sample from the k most likely tokens, 0 for all; see `top_p`")
    max_new_tokens: int = Field(256, ge=1, description="maximum length of a response, in tokens")
    min_new_tokens: int = Field(0, ge=0, description="minimum length of a response, in tokens")
    stop: Names = Field(
        (), description="texts that end a response in addition to the tokenizer's end token: its other special tokens, "
        'or any text, such as ["\\n\\n", "Question:"]; verifiers do not see them',
    )  # fmt: skip

    @model_validator(mode="after")
    def _responses_can_end(self) -> Self:
        if self.min_new_tokens >= self.max_new_tokens:
            raise ValueError(
                f"sampling.min_new_tokens = {self.min_new_tokens} must be below sampling.max_new_tokens = "
                f"{self.max_new_tokens}, or every response is truncated; lower it"
            )
        return self

    @field_validator("stop")
    @classmethod
    def _stops_are_texts(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        for text in stop:
            if not text or "\N{REPLACEMENT CHARACTER}" in text:
                raise ValueError(
                    f"a response cannot end with {text!r}, which is {'empty' if not text else 'not readable text'}; "
                    "remove it from sampling.stop"
                )
        return stop

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of the training rollouts."""
        return SamplingParams(**self.model_dump(exclude={"stop"}))


def decode_tokens(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], special: bool = False) -> str:
    """Decode tokens to text, with or without special tokens.

    The tokenizer's `clean_up_tokenization_spaces` is ignored, because it would turn "3 !" into "3!".
    """
    text = tokenizer.decode(list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    return str(text)


Decode: TypeAlias = Callable[[Sequence[int]], str]  # maps a response's tokens to its text
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # tokenizers decode the bytes of an incomplete character to this


class StopStrings:
    """The stop strings of a run: the entries of `stop` that are not special tokens of the tokenizer.

    A response ends with the first token that completes a stop string, even if the string ends inside the token. Its
    text ends before the stop string, or before the first one if the token completes several. With the stop string
    "###", a response with the tokens "12", " #", "##." ends at the third, and its text is "12 ". Stop strings in the
    prompt are ignored.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self.texts = tuple(text for text in stop if special_token(tokenizer, text) is None)
        # Tokenizers add and remove spaces between tokens. Without spaces, the tokens' text can be concatenated.
        texts = [text.replace(" ", "") for text in self.texts]
        self.pieces = _Pieces(tokenizer)
        self.longest = max((len(text.encode()) for text in texts), default=0) or 1
        # If a character is split between tokens, their text has one or more replacement characters in its place.
        patterns = [
            "".join(re.escape(c) if c.isascii() else f"(?:{c}|{_REPLACEMENT}+)" for c in text) for text in texts
        ]
        self.likely_in = re.compile("|".join(patterns)).search

    def __bool__(self) -> bool:
        return bool(self.texts)

    def text(self, token_ids: Sequence[int], decode: Decode | None = None) -> str:
        """Return a response's text without its final stop string and, by default, without special tokens."""
        decode = decode or self._decode
        text = decode(token_ids)
        return text[: self._end(text, token_ids, decode)]

    def end_with(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last token completes a stop string. `token_ids` must not be empty."""
        return self._end(self._decode(token_ids), token_ids, self._decode) is not None

    def length(self, token_ids: Sequence[int], minimum: int) -> int | None:
        """Return the number of tokens through the first one after `minimum` that completes a stop string, if any."""
        tail = ""
        for num_tokens, token in enumerate(token_ids, 1):
            text = tail + self.pieces[token]
            if num_tokens > minimum and self.likely_in(text) and self.end_with(token_ids[:num_tokens]):
                return num_tokens
            tail = text[-self.longest :]
        return None

    def _end(self, text: str, token_ids: Sequence[int], decode: Decode) -> int | None:
        """Return the start of the first stop string that the last token completes, if any."""
        if not any(stop in text for stop in self.texts):
            return None
        before = decode(token_ids[:-1])
        unchanged = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
        places = [text.find(stop, max(0, unchanged - len(stop) + 1)) for stop in self.texts]
        return min((place for place in places if place >= 0), default=None)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return decode_tokens(self._tokenizer, token_ids)


class _Pieces(dict[int, str]):
    """Maps a token to the text it adds, without spaces; computed on first use."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        # A token can decode differently alone than after other tokens. A second copy shows what it adds after a token.
        once, twice = (decode_tokens(self._tokenizer, [token] * n) for n in (1, 2))
        self[token] = (twice[len(once) :] if twice.startswith(once) else once).replace(" ", "")
        return self[token]


def special_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """Return the id of the special token with this text, or None. A response's text omits special tokens."""
    token = tokenizer.get_added_vocab().get(text)
    return None if token is None or not _is_left_out(tokenizer, token) else int(token)


def _is_left_out(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    return not decode_tokens(tokenizer, [token])


def stop_tokens(tokenizer: PreTrainedTokenizerBase, stop: Iterable[str]) -> tuple[int, ...]:
    """Return the ids of the special tokens in `sampling.stop`."""
    return tuple(token for text in stop if (token := special_token(tokenizer, text)) is not None)


def check_stop(name: str, tokenizer: PreTrainedTokenizerBase, stop: Iterable[str]) -> None:
    """Check that the model's responses can end with every entry of `sampling.stop`."""
    if not (stop := tuple(stop)):
        return
    special = [text for text, token in tokenizer.get_added_vocab().items() if _is_left_out(tokenizer, token)]
    for text in stop:
        if text in special:
            continue
        if inside := next((token for token in special if token in text), None):
            raise UserError(
                f"sampling.stop has {text!r}, but {inside!r} is a special token of {name}, which never appears in a "
                f"response's text; set sampling.stop to {inside!r} alone"
            )
        # Try three spellings: a tokenizer can drop a leading space, or have tokens that encoding never produces.
        spelled = [tokenizer.encode(before + text, add_special_tokens=False) for before in ("", "a")]
        own = tokenizer.get_vocab().get(text)
        spellings = [*spelled, [] if own is None else [own]]
        decoded = [decode_tokens(tokenizer, tokens, special=True) for tokens in spellings]
        if not any(text in spelling for spelling in decoded):
            raise UserError(
                f"sampling.stop has {text!r}, which no response of {name} can contain: its tokenizer turns this text "
                f"into {decoded[0]!r}; set sampling.stop to a text that it keeps, or to a special token (special "
                f"tokens: {', '.join(special) or 'none'})"
            )
