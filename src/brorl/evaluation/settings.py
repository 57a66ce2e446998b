"""Settings of the evaluation."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from brorl.prompts.settings import EvaluationSource, as_sources
from brorl.section import Section


class EvaluationSettings(Section):
    """Held-out evaluation during training."""

    every: int = Field(10, ge=0, description="steps between evaluations; 0 evaluates at the start and the end only")
    num_prompts: int = Field(
        128, ge=0, description="maximum number of held-out prompts from each source; 0 turns evaluation off"
    )
    skip_prompts: int = Field(
        0,
        ge=0,
        description="held-out prompts of each source that evaluations during training skip, to keep them unused for a "
        "final comparison; `brorl eval` skips none",
    )
    rollouts_per_prompt: int = Field(
        256,
        ge=1,
        description="responses per prompt",
    )
    ks: Annotated[tuple[int, ...], Field(strict=False)] = Field(
        (1, 16, 256), description="values of k for which pass@k is reported"
    )
    temperature: float = Field(1.0, ge=0, description="sampling temperature; 0 is greedy")
    top_p: float | None = Field(None, gt=0, le=1, description="nucleus sampling; null uses sampling.top_p")
    top_k: int | None = Field(
        None, ge=0, description="sample from the k most likely tokens, 0 for all; null uses sampling.top_k"
    )
    min_new_tokens: int | None = Field(
        None, ge=0, description="minimum length of a response, in tokens; null uses sampling.min_new_tokens"
    )
    max_new_tokens: int | None = Field(
        None, ge=1, description="maximum length of a response, in tokens; null uses sampling.max_new_tokens"
    )
    sources: Annotated[tuple[EvaluationSource, ...], BeforeValidator(as_sources), Field(strict=False)] = Field(
        (), description="files, Hugging Face datasets or Reasoning Gym, for evaluation only"
    )
    keep_best: bool = Field(True, description="keep the checkpoint with the best held-out pass@k, where k is best_k")
    best_k: int | None = Field(
        None, ge=1, description="k of the pass@k that decides which evaluation is best; null uses the smallest of ks"
    )
    patience: int | None = Field(
        None, ge=1, description="end the run after this many regular evaluations without a new best; null for never"
    )

    @field_validator("ks")
    @classmethod
    def _ascending(cls, ks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(ks)))

    @model_validator(mode="after")
    def _samples_suffice(self) -> Self:
        if not self.ks or min(self.ks) < 1 or max(self.ks) > self.rollouts_per_prompt:
            raise ValueError(
                f"evaluation.ks must be between 1 and evaluation.rollouts_per_prompt = {self.rollouts_per_prompt}, got "
                f"{self.ks}"
            )
        if self.best_k is not None and self.best_k not in self.ks:
            raise ValueError(
                f"evaluation.best_k = {self.best_k} must be one of evaluation.ks = {self.ks}; add it there or choose "
                "one of them"
            )
        return self
