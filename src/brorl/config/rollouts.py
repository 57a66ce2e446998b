"""Settings of the rollouts: sampling, adaptive numbers, dynamic sampling."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from brorl.config.section import Section


class SamplingConfig(Section):
    """How rollouts are sampled."""

    temperature: float = Field(1.0, gt=0, description="sampling temperature")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; below 1 the gradient is biased")
    top_k: int = Field(
        0, ge=0, description="sample from the k most likely tokens, 0 for all; above 0 the gradient is biased"
    )
    max_new_tokens: int = Field(256, ge=1, description="maximum length of a response, in tokens")
    min_new_tokens: int = Field(0, ge=0, description="minimum length of a response, in tokens")
    end_token: str | None = Field(None, description="token that ends a response, if the tokenizer does not define one")

    @model_validator(mode="after")
    def _responses_can_end(self) -> Self:
        if self.min_new_tokens >= self.max_new_tokens:
            raise ValueError(
                f"sampling.min_new_tokens = {self.min_new_tokens} must be below sampling.max_new_tokens = "
                f"{self.max_new_tokens}, or every response is cut off; lower it"
            )
        return self


class AdaptiveConfig(Section):
    """Adaptive rollouts: more for prompts without a mixed group, on average at most `rollouts_per_prompt`."""

    enabled: bool = Field(
        False, description="adapt the number of rollouts to the prompt (docs/explanation/adaptive_rollouts.md)"
    )
    pilot_rollouts: int = Field(16, ge=2, description="rollouts of every prompt in the first pass")
    max_rollouts: int = Field(
        512,
        ge=2,
        description="maximum number of rollouts of a prompt; prompts without a mixed group are doubled up to this",
    )


class DynamicSamplingConfig(Section):
    """Train on mixed groups only: groups with correct and incorrect rollouts."""

    enabled: bool = Field(
        True, description="train on groups with 0 < number correct < N only, and sample more prompts to replace others"
    )
    max_tries: int = Field(10, ge=1, description="end the run after this many rounds in a row without a mixed group")
