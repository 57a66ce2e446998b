"""Every setting of a training recipe: typed, documented, checked before any work starts.

Each section checks its own settings; `TrainConfig` composes the sections, and checks them against each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from brorl.algorithms.settings import (
    AdvantageSettings,
    ImportanceCorrection,
    KLPenalty,
    PolicyLossSettings,
    RewardShaping,
)
from brorl.config.conflicts import conflicts
from brorl.cost import Budget
from brorl.distributed.settings import ClusterSettings
from brorl.evaluation.settings import EvaluationSettings
from brorl.model.settings import LoraSettings
from brorl.paths import is_folder
from brorl.prompts.settings import DataSettings, PromptFormat
from brorl.rollout.settings import EngineSettings
from brorl.sampling import SamplingSettings
from brorl.section import AsList, Section
from brorl.trackers import TrackingSettings
from brorl.training.settings import (
    BudgetSettings,
    CollapseLimits,
    DiagnosticsSettings,
    DynamicSamplingSettings,
    OptimizerSettings,
    PhaseSettings,
    ReferenceSettings,
)
from brorl.verification.settings import VerificationSettings


class TrainConfig(Section):
    """A training recipe."""

    model: str = Field(
        "quickstart",
        description="model to train: the shipped `quickstart` or `plateau`, a local folder or checkpoint, a hub id, or "
        "id@revision",
    )
    rollouts_per_prompt: int = Field(512, ge=2, description="N, rollouts per prompt")
    prompts_per_step: int = Field(16, ge=1, description="prompts (groups of rollouts) that a step trains on")
    steps: int | None = Field(
        100, ge=1, description="maximum number of steps; null lets budget.limit alone end the run, and is the default "
        "where budget.limit is set",
    )  # fmt: skip
    checkpoint_every: int = Field(50, ge=1, description="steps between checkpoints; the last step is always saved")
    keep_checkpoints: int = Field(3, ge=0, description="regular checkpoints to keep in addition to the best; 0 for all")
    store_rollouts_every: int = Field(1, ge=0, description="steps between stored rollouts; 0 stores no responses")
    report: bool = Field(True, description="write report.html, with charts and rollouts, at the end of the run")
    seed: int = Field(0, ge=0, lt=2**63, description="random seed")
    output_dir: str | None = Field(None, description="run directory, new or empty; null creates one under runs/")
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$",
        description="auto (cuda or else cpu), cpu, cuda, cuda:N, or mps",
    )
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="dtype of the computation; with bfloat16 the trained weights stay float32"
    )
    data: DataSettings = DataSettings()
    prompt: PromptFormat = PromptFormat()
    sampling: SamplingSettings = SamplingSettings()
    verification: VerificationSettings = VerificationSettings()
    rewards: RewardShaping = RewardShaping()
    advantage: AdvantageSettings = AdvantageSettings()
    phases: Annotated[tuple[PhaseSettings, ...], AsList, Field(strict=False)] = Field(
        (), description="objectives that follow one another instead of `advantage`, such as broaden and sharpen "
        "(docs/how-to/broaden.md)",
    )  # fmt: skip
    dynamic_sampling: DynamicSamplingSettings = DynamicSamplingSettings()
    loss: PolicyLossSettings = PolicyLossSettings()
    importance: ImportanceCorrection = ImportanceCorrection()
    kl: KLPenalty = KLPenalty()
    reference: ReferenceSettings = ReferenceSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    lora: LoraSettings = LoraSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    budget: BudgetSettings = BudgetSettings()
    collapse: CollapseLimits = CollapseLimits()
    diagnostics: DiagnosticsSettings = DiagnosticsSettings()
    engine: EngineSettings = EngineSettings()
    cluster: ClusterSettings = ClusterSettings()
    tracking: TrackingSettings = TrackingSettings()

    @property
    def samples_per_step(self) -> int:
        """Rollouts that a step trains on, P x N."""
        return self.prompts_per_step * self.rollouts_per_prompt

    @property
    def advantages(self) -> tuple[AdvantageSettings, ...]:
        """The advantages of every phase, or the one of the whole run."""
        return tuple(phase.advantage for phase in self.phases) or (self.advantage,)

    @property
    def learning_rate(self) -> float:
        """The learning rate, scaled for the batch."""
        return self.optimizer.scaled_rate(self.samples_per_step)

    @property
    def total_budget(self) -> Budget:
        """The budget of the run: its number of steps if no budget is set."""
        if self.budget.limit is not None:
            return Budget(self.budget.unit, self.budget.limit, self.budget.marks)
        assert self.steps is not None  # `conflicts` has checked it
        return Budget("steps", self.steps)

    @property
    def autocasts(self) -> bool:
        """Whether the learner computes in bfloat16 with float32 weights; adapters go with a base in bfloat16."""
        return self.dtype == "bfloat16" and not self.lora.rank

    @property
    def adapters(self) -> LoraSettings | None:
        """The adapters to train; None if all weights are trained."""
        return self.lora if self.lora.rank else None

    @property
    def response_limits(self) -> dict[str, int]:
        """Length limits of responses in training and evaluation by setting; 0 where the evaluation has none."""
        return {
            "sampling.max_new_tokens": self.sampling.max_new_tokens,
            "evaluation.max_new_tokens": self.evaluation.max_new_tokens or 0,
        }

    @property
    def max_evaluated_tokens(self) -> int:
        """Length limit of a response in an evaluation."""
        return self.evaluation.max_new_tokens or self.sampling.max_new_tokens

    @property
    def recompute_old_logprobs(self) -> bool:
        """Whether the learner recomputes the old log-probs: on request, or because the engine's numerics differ."""
        differs = "bfloat16" in (self.dtype, self.engine.dtype) or self.engine.kind == "vllm"
        return differs or self.optimizer.old_logprobs == "recompute"

    @field_validator("model")
    @classmethod
    def _resolved(cls, model: str) -> str:
        """Make a local folder absolute, so that a run can be resumed from any folder; `best` is a link that moves."""
        folder = Path(model).expanduser()
        return str(folder.resolve()) if is_folder(folder) else model

    @model_validator(mode="before")
    @classmethod
    def _budget_alone(cls, given: Any) -> Any:
        """Let a budget alone end the run where no number of steps is given."""
        if not isinstance(given, dict) or "steps" in given:
            return given
        budget = given.get("budget")
        limit = budget.get("limit") if isinstance(budget, dict) else getattr(budget, "limit", None)
        return given if limit is None else {**given, "steps": None}

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for conflict in conflicts(self):
            raise ValueError(conflict)
        return self
