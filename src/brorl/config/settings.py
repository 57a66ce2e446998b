"""Every setting of a training recipe: typed, documented, checked before any work starts.

In: nested values, from YAML, the command line or Python (`brorl.config.reading`). Out: a frozen `TrainConfig`. Each
section checks its own settings; `TrainConfig` composes the sections, and checks them against each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from brorl.algorithms.learning_rate import scaled_learning_rate
from brorl.algorithms.settings import (
    AdvantageSettings,
    ImportanceCorrection,
    KLPenalty,
    PolicyLossSettings,
    RewardShaping,
)
from brorl.cost import Budget
from brorl.distributed.settings import ClusterSettings
from brorl.evaluation.settings import EvaluationSettings
from brorl.model.settings import LoraSettings
from brorl.paths import is_folder
from brorl.prompts.settings import DataSettings, PromptFormat
from brorl.rollout.settings import EngineSettings
from brorl.sampling import SamplingSettings
from brorl.section import Listed, Section
from brorl.trackers import TrackingSettings
from brorl.training.settings import (
    AdaptiveSettings,
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
        description="model to train: the shipped `quickstart` or `plateau`, a local folder or checkpoint, or a hub id",
    )
    rollouts_per_prompt: int = Field(
        512, ge=2, description="N, rollouts per prompt; with adaptive.enabled the largest average over prompts"
    )
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
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="number format of the computation; with bfloat16 the trained weights stay float32"
    )
    data: DataSettings = DataSettings()
    prompt: PromptFormat = PromptFormat()
    sampling: SamplingSettings = SamplingSettings()
    adaptive: AdaptiveSettings = AdaptiveSettings()
    verification: VerificationSettings = VerificationSettings()
    rewards: RewardShaping = RewardShaping()
    advantage: AdvantageSettings = AdvantageSettings()
    phases: Annotated[tuple[PhaseSettings, ...], Listed, Field(strict=False)] = Field(
        (), description="objectives that follow one another in place of `advantage`, such as broaden and sharpen "
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
        """Rollouts that a step trains on, P x N; with adaptive rollouts the largest average."""
        return self.prompts_per_step * self.rollouts_per_prompt

    @property
    def advantages(self) -> tuple[AdvantageSettings, ...]:
        """The advantages of every phase, or the one of the whole run."""
        return tuple(phase.advantage for phase in self.phases) or (self.advantage,)

    @property
    def needs_answers(self) -> bool:
        """Whether rarity counts canonical answers, which verifiers then compute."""
        return any(advantage.rarity and advantage.rarity_by == "answer" for advantage in self.advantages)

    @property
    def learning_rate(self) -> float:
        """The learning rate, scaled for the batch."""
        optimizer = self.optimizer
        if not optimizer.reference_batch:
            return optimizer.learning_rate
        return scaled_learning_rate(optimizer.learning_rate, self.samples_per_step, optimizer.reference_batch)

    @property
    def total_budget(self) -> Budget:
        """The budget of the run: its number of steps if no budget is set."""
        if self.budget.limit is not None:
            return Budget(self.budget.unit, self.budget.limit, self.budget.marks)
        assert self.steps is not None  # `_run_ends` has checked it
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
    def max_evaluated_tokens(self) -> int:
        """Length limit of a response in an evaluation."""
        return self.evaluation.max_new_tokens or self.sampling.max_new_tokens

    @property
    def recompute_old_logprobs(self) -> bool:
        """Whether the learner recomputes the old log-probs: on request, or because the engine's numerics differ."""
        return self.optimizer.old_logprobs == "recompute" or self.dtype == "bfloat16" or self.engine.kind == "vllm"

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
    def _run_ends(self) -> Self:
        if self.steps is None and self.budget.limit is None:
            raise ValueError("steps = null needs a budget to end the run; set budget.limit, or a number of steps")
        return self

    @model_validator(mode="after")
    def _phases_follow_one_another(self) -> Self:
        ends = [phase.until for phase in self.phases]
        if ends and (ends[-1] != 1 or ends != sorted({*ends})):
            raise ValueError(f"phases: `until` must rise from phase to phase, to 1 in the last one, not {ends}")
        if self.phases and self.advantage != AdvantageSettings():
            raise ValueError(
                "phases replace `advantage`, and both are set; move the settings of `advantage` into the phases, or "
                "set phases: []"
            )
        if self.phases and self.phases[-1].until_coverage_stalls:
            raise ValueError(
                f"phases: {self.phases[-1].name} is the last phase, which only the budget ends; remove its "
                "until_coverage_stalls"
            )
        waiting = next((phase.name for phase in self.phases if phase.until_coverage_stalls), None)
        if waiting is not None and max(self.evaluation.ks) == 1:
            raise ValueError(
                f"phases: {waiting} ends when coverage stalls, but evaluation.ks has only pass@1; add a larger k"
            )
        if waiting is not None and not (self.evaluation.every and self.evaluation.num_prompts):
            raise ValueError(
                f"phases: {waiting} ends when coverage stalls, which needs regular evaluations; set evaluation.every "
                "and evaluation.num_prompts above 0"
            )
        return self

    @model_validator(mode="after")
    def _groups_exceed_k(self) -> Self:
        smallest = self.adaptive.pilot_rollouts if self.adaptive.enabled else self.rollouts_per_prompt
        setting = "adaptive.pilot_rollouts" if self.adaptive.enabled else "rollouts_per_prompt"
        for advantage in self.advantages:
            if advantage.estimator == "pass_at_k" and advantage.k >= smallest:
                raise ValueError(
                    f"advantage.k = {advantage.k} needs more than {advantage.k} rollouts per prompt, but {setting} = "
                    f"{smallest}; raise it, or lower advantage.k"
                )
        return self

    @model_validator(mode="after")
    def _cpu_clock_sees_everything(self) -> Self:
        if self.engine.clock == "cpu" and (self.engine.threads != 1 or self.device not in ("auto", "cpu")):
            raise ValueError(
                "engine.clock = cpu counts the CPU time of one thread; set engine.threads: 1 and device: cpu, or "
                "engine.clock: wall"
            )
        return self

    @model_validator(mode="after")
    def _vllm_fits(self) -> Self:
        if self.engine.kind != "vllm":
            return self
        if self.dtype == "float64":
            raise ValueError("engine.kind = vllm has no float64; set dtype: float32 or bfloat16")
        if self.engine.clock == "cpu":
            raise ValueError(
                "engine.clock = cpu does not count the process of engine.kind = vllm; set engine.clock: wall"
            )
        return self

    @model_validator(mode="after")
    def _weights_reach_vllm(self) -> Self:
        vllm = self.engine.vllm
        if self.engine.kind != "vllm":
            return self
        if self.cluster.enabled and vllm.weight_transfer in ("ipc", "nccl"):
            raise ValueError(
                f"engine.vllm.weight_transfer = {vllm.weight_transfer} connects an engine with a learner in the same "
                f"process as the loop, and cluster.nodes = {self.cluster.nodes} places both elsewhere; set "
                "engine.vllm.weight_transfer: host"
            )
        if self.cluster.enabled and vllm.placement == "apart":
            raise ValueError(
                "engine.vllm.placement = apart is for a run of one process, and cluster.nodes = "
                f"{self.cluster.nodes}; remove it, and set cluster.placement: apart"
            )
        return self

    @model_validator(mode="after")
    def _workers_have_the_gpus_of_their_engine(self) -> Self:
        gpus, parallel = self.cluster.gpus_per_rollout_worker, self.engine.vllm.tensor_parallel
        if self.cluster.enabled and self.engine.kind == "native" and gpus > 1:
            raise ValueError(
                f"cluster.gpus_per_rollout_worker = {gpus}, and engine.kind = native samples on one GPU; set "
                "cluster.gpus_per_rollout_worker: 1 with more cluster.rollout_workers, or engine.kind: vllm"
            )
        if self.cluster.enabled and self.engine.kind == "vllm" and gpus and gpus != parallel:
            raise ValueError(
                f"cluster.gpus_per_rollout_worker = {gpus}, and engine.vllm.tensor_parallel = {parallel} is the number "
                "of GPUs that an engine uses; set both to the same number"
            )
        return self

    @model_validator(mode="after")
    def _cluster_has_its_own_clock_and_devices(self) -> Self:
        cluster = self.cluster
        if cluster.enabled and self.engine.clock == "cpu":
            raise ValueError(
                "engine.clock = cpu counts the time of one process, and a cluster has several; set engine.clock: wall"
            )
        if cluster.enabled and self.device == "cpu" and cluster.gpus_per_rollout_worker + cluster.gpus_per_learner_rank:
            raise ValueError(
                "device = cpu uses no GPU, and the workers of the cluster have some; set device: auto, or "
                "cluster.gpus_per_rollout_worker: 0 and cluster.gpus_per_learner_rank: 0"
            )
        if cluster.enabled and self.device.startswith("cuda") and not cluster.gpus_per_rollout_worker:
            raise ValueError(
                f"device = {self.device} needs GPUs, and cluster.gpus_per_rollout_worker = 0 samples on CPUs; set "
                "cluster.gpus_per_rollout_worker: 1, or device: auto"
            )
        return self

    @model_validator(mode="after")
    def _adaptive_numbers_ascend(self) -> Self:
        adaptive, average = self.adaptive, self.rollouts_per_prompt
        if adaptive.enabled and not adaptive.pilot_rollouts < average <= adaptive.max_rollouts:
            raise ValueError(
                f"adaptive.pilot_rollouts = {adaptive.pilot_rollouts}, rollouts_per_prompt = {average} and "
                f"adaptive.max_rollouts = {adaptive.max_rollouts} must ascend (the last two may be equal)"
            )
        return self

    @model_validator(mode="after")
    def _mini_batches_have_prompts(self) -> Self:
        if self.optimizer.mini_batches > self.prompts_per_step:
            raise ValueError(
                f"optimizer.mini_batches = {self.optimizer.mini_batches} is more than prompts_per_step = "
                f"{self.prompts_per_step}, and every mini-batch needs at least one prompt; set "
                f"optimizer.mini_batches: {self.prompts_per_step}"
            )
        return self

    @model_validator(mode="after")
    def _sequence_clip_is_narrow(self) -> Self:
        if self.loss.kind == "gspo" and (self.loss.clip_low or 0) > 0.1:
            raise ValueError(
                "loss.kind = gspo clips the ratio of whole responses, which stays close to 1, and "
                f"loss.clip_low = {self.loss.clip_low} has no effect; set loss.clip_low: 3e-4 and loss.clip_high: 4e-4"
            )
        return self

    @model_validator(mode="after")
    def _correction_has_logprobs(self) -> Self:
        if self.importance.correction != "none" and not self.recompute_old_logprobs:
            raise ValueError(
                f"importance.correction = {self.importance.correction} needs the learner's own log-probs, but "
                "optimizer.old_logprobs = engine; set optimizer.old_logprobs: recompute"
            )
        return self

    @model_validator(mode="after")
    def _async_fits(self) -> Self:
        if self.cluster.mode != "async":
            return self
        if self.adaptive.enabled:
            raise ValueError(
                "adaptive.enabled chooses the rollouts of a prompt after a round of pilots, and cluster.mode = async "
                "has no rounds; set adaptive.enabled: false, or cluster.mode: sync"
            )
        if self.cluster.max_staleness and self.importance.correction == "none":
            raise ValueError(
                f"cluster.mode = async trains on rollouts of weights that are up to {self.cluster.max_staleness} "
                "updates old, and importance.correction = none does not correct for that; set importance.correction: "
                "truncate and optimizer.old_logprobs: recompute, or cluster.max_staleness: 0"
            )
        return self

    @model_validator(mode="after")
    def _resets_have_a_reference(self) -> Self:
        reset = self.reference.first_reset
        if reset and not self.kl.coefficient:
            raise ValueError(
                f"reference.{reset} = {getattr(self.reference, reset)} resets the reference of the KL penalty, "
                "but kl.coefficient = 0 switches that penalty off; set kl.coefficient above 0"
            )
        return self

    @model_validator(mode="after")
    def _evaluations_are_on(self) -> Self:
        evaluation, patience = self.evaluation, self.reference.reset_patience
        if not evaluation.num_prompts and (patience or evaluation.sources):
            setting = "reference.reset_patience" if patience else "evaluation.sources"
            raise ValueError(f"{setting} needs evaluations, but evaluation.num_prompts = 0 switches them off; raise it")
        if patience and not evaluation.every:
            raise ValueError(
                "reference.reset_patience counts regular evaluations, but evaluation.every = 0 switches them off; "
                "set evaluation.every to a number of steps"
            )
        return self

    @model_validator(mode="after")
    def _penalty_fits_the_length(self) -> Self:
        if self.rewards.overlong_tokens > self.sampling.max_new_tokens:
            raise ValueError(
                f"rewards.overlong_tokens = {self.rewards.overlong_tokens} is more than sampling.max_new_tokens = "
                f"{self.sampling.max_new_tokens}; lower rewards.overlong_tokens"
            )
        return self
