"""Sampling parameters: the one definition of temperature, top-p, top-k, length limits and what ends a response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pydantic import Field, field_validator, model_validator

from brorl.section import Names, Section

LOWEST_TEMPERATURE = 1e-6
"""Lowest temperature above 0: logits that are divided by it are finite in float32."""


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one sampling run."""

    temperature: float = 1.0  # divisor of the logits; 0 is greedy decoding (all rollouts of a prompt agree)
    # keep the smallest set of most probable tokens whose mass reaches this, and ties with the last of them; 1 keeps all
    top_p: float = 1.0
    top_k: int = 0  # before that, keep this many most probable tokens, and ties likewise; 0 keeps all
    # length limit of a response in tokens, those of its end included; a response that reaches it is cut
    max_new_tokens: int = 256
    # tokens that end a response, in addition to the engine's end-of-sequence tokens
    stop_token_ids: tuple[int, ...] = ()
    # No stop token is drawn before a response has this many tokens. The distribution is then that of the other
    # tokens, and so are the log-probs.
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature < float("inf")):
            raise ValueError(
                f"temperature must be 0 for greedy decoding, or a finite number of at least {LOWEST_TEMPERATURE:g}, "
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

    temperature: float = Field(1.0, ge=LOWEST_TEMPERATURE, description="sampling temperature")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; the trained policy is the truncated one")
    top_k: int = Field(0, ge=0, description="sample from the k most likely tokens, 0 for all; as with `top_p`")
    max_new_tokens: int = Field(256, ge=1, description="maximum length of a response, in tokens")
    min_new_tokens: int = Field(0, ge=0, description="minimum length of a response, in tokens")
    stop: Names = Field(
        (), description="texts that end a response, beside the tokenizer's end token: its other special tokens, or any "
        'text, such as ["\\n\\n", "Question:"], which verifiers do not see',
    )  # fmt: skip

    @model_validator(mode="after")
    def _responses_can_end(self) -> Self:
        if self.min_new_tokens >= self.max_new_tokens:
            raise ValueError(
                f"sampling.min_new_tokens = {self.min_new_tokens} must be below sampling.max_new_tokens = "
                f"{self.max_new_tokens}, or every response is cut off; lower it"
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
        """How the rollouts of training are drawn."""
        return SamplingParams(**self.model_dump(exclude={"stop"}))
