"""Settings of measuring and ending a run: evaluation, held-out checks, trackers, budget, collapse."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from brorl.config.section import Listed, Section
from brorl.config.sources import EvaluationSourceConfig, as_sources


class EvaluationConfig(Section):
    """Held-out evaluation during training."""

    every: int = Field(10, ge=0, description="steps between evaluations; 0 evaluates at the start and the end only")
    num_prompts: int = Field(128, ge=0, description="most held-out prompts of each source; 0 switches evaluation off")
    skip_prompts: int = Field(
        0,
        ge=0,
        description="held-out prompts of each source to skip during training, to tune on other prompts than the final "
        "comparison; `brorl eval` skips none",
    )
    num_samples: int = Field(256, ge=1, description="responses per prompt")
    ks: Annotated[tuple[int, ...], Field(strict=False)] = Field(
        (1, 16, 256), description="values of k for which pass@k is reported"
    )
    temperature: float = Field(1.0, ge=0, description="sampling temperature; 0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling")
    max_new_tokens: int | None = Field(
        None, ge=1, description="maximum length of a response, in tokens; null uses sampling.max_new_tokens"
    )
    sources: Annotated[tuple[EvaluationSourceConfig, ...], BeforeValidator(as_sources), Field(strict=False)] = Field(
        (), description="files, Hugging Face data sets or Reasoning Gym, for evaluation only"
    )
    keep_best: bool = Field(True, description="keep the checkpoint with the best held-out pass@k, for the smallest k")

    @model_validator(mode="after")
    def _samples_suffice(self) -> Self:
        if not self.ks or min(self.ks) < 1 or max(self.ks) > self.num_samples:
            raise ValueError(
                f"evaluation.ks must be between 1 and evaluation.num_samples = {self.num_samples}, not {self.ks}"
            )
        return self


class BudgetConfig(Section):
    """Limit on the cost of a run, without evaluations. With a budget and `steps`, the first of the two ends the run."""

    unit: Literal["steps", "seconds", "samples", "unique_tokens"] = Field(
        "samples",
        description="unit of the budget: steps | seconds | rollouts | unique tokens (a shared prefix counts once)",
    )
    limit: float | None = Field(
        None, gt=0, description="the run ends with the step that reaches this; as an override it also replaces the "
        "recipe's `steps`, unless `steps` is overridden too; null sets no budget",
    )  # fmt: skip
    marks: Annotated[tuple[float, ...], Field(strict=False)] = Field(
        (), description="amounts of the budget at which the run is also evaluated"
    )

    @model_validator(mode="after")
    def _marks_are_within(self) -> Self:
        wrong = [m for m in self.marks if self.limit is None or not 0 < m <= self.limit]
        if wrong:
            raise ValueError(
                f"budget.marks must be above 0 and at most budget.limit = {self.limit}, not {wrong[0]:g}; remove it"
            )
        return self


class CollapseConfig(Section):
    """Warnings of a collapse of the model; `training/collapse.py` explains the numbers."""

    entropy_fraction: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="warn when the entropy is below this fraction of its first values; 0 switches it off",
    )
    reference_kl: float | None = Field(
        1.0, gt=0, description="warn when the KL from the reference exceeds this, in nats per token; null for never"
    )
    patience: int = Field(
        3, ge=1, description="warn after this many evaluations in a row with lower pass@k and no higher pass@1"
    )
    stop: bool = Field(False, description="end the run at the first warning, with a checkpoint")


class DiagnosticsConfig(Section):
    """Measurements in addition to the sampled and unsampled mass of every step."""

    held_out_check_every: int = Field(
        25, ge=0, description="steps between held-out checks of an update, on rollouts not trained on; 0 for none"
    )
    held_out_rollouts: int = Field(32, ge=2, description="extra rollouts per prompt for a held-out check")


class TrackingConfig(Section):
    """Trackers that get the metrics in addition to metrics.jsonl."""

    to: Annotated[tuple[Literal["wandb", "tensorboard", "trackio"], ...], Listed, Field(strict=False)] = Field(
        (), description="wandb, tensorboard or trackio (each an extra of the package), or a list"
    )
    project: str = Field("brorl", min_length=1, description="project of the run in the tracker")
    run_name: str | None = Field(
        None, description="name of the run in the tracker; null uses the name of the run directory"
    )
