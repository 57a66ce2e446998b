"""Settings of what is measured of a run on the way, and of when it ends: evaluation, budget, collapse."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from brorl.config.sources import FileConfig, Section, as_sources


class EvaluationConfig(Section):
    """Held-out evaluation during training."""

    every: int = Field(
        10, ge=0, description="steps between evaluations, 0 for none; the start and the end are always evaluated"
    )
    num_prompts: int = Field(
        128, ge=0, description="held-out prompts of each source, at most; 0 switches evaluation off"
    )
    num_samples: int = Field(256, ge=1, description="responses per prompt")
    ks: Annotated[tuple[int, ...], Field(strict=False)] = Field((1, 16, 256), description="which pass@k to report")
    temperature: float = Field(1.0, ge=0, description="divisor of the logits; 0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus mass")
    max_new_tokens: int | None = Field(
        None, ge=1, description="length limit of a response; null takes that of sampling"
    )
    sources: Annotated[tuple[FileConfig, ...], BeforeValidator(as_sources), Field(strict=False)] = Field(
        (), description="files or Hugging Face data sets that are only evaluated on"
    )
    keep_best: bool = Field(True, description="keep the checkpoint with the best held-out pass@k of the smallest k")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.ks or min(self.ks) < 1 or max(self.ks) > self.num_samples:
            raise ValueError(
                f"evaluation.ks must lie between 1 and evaluation.num_samples = {self.num_samples}, not {self.ks}"
            )
        return self


class BudgetConfig(Section):
    """What a run may cost. Evaluations cost nothing. A run with a budget and `steps` ends at the first of the two."""

    unit: Literal["steps", "seconds", "samples", "unique_tokens"] = Field(
        "samples", description="what is counted: steps | wall time | rollouts | tokens computed, a shared prefix once"
    )
    limit: float | None = Field(
        None, gt=0, description="the run ends with the step that reaches this; on the command line it also replaces "
        "the recipe's `steps`, unless --steps is given too; null sets no budget",
    )  # fmt: skip
    marks: Annotated[tuple[float, ...], Field(strict=False)] = Field(
        (), description="amounts at which the run is evaluated, besides evaluation.every"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        wrong = [m for m in self.marks if self.limit is None or not 0 < m <= self.limit]
        if wrong:
            raise ValueError(
                f"budget.marks must lie above 0 and up to budget.limit = {self.limit}, not at {wrong[0]:g}; leave it "
                "out"
            )
        return self


class CollapseConfig(Section):
    """When to warn that the model collapses; see `training/collapse.py` for why these numbers."""

    entropy_share: float = Field(
        0.1, ge=0, lt=1, description="entropy below this share of that of the first steps; 0 switches it off"
    )
    reference_kl: float | None = Field(
        1.0, gt=0, description="divergence from the reference beyond this, in nats per token; null switches it off"
    )
    patience: int = Field(3, ge=1, description="evaluations in a row in which pass@k is lost and pass@1 not gained")
    stop: bool = Field(False, description="end the run, with a checkpoint, at the first sign")
