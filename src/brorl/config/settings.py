"""Every setting of a training recipe: typed, documented, and checked before any work starts.

Each section validates its settings. `TrainConfig` combines the sections and checks for conflicts between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
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
from brorl.cost import Budget
from brorl.distributed.settings import ClusterSettings
from brorl.evaluation.settings import EvaluationSettings
from brorl.model.settings import LoraSettings
from brorl.prompts.settings import DataSettings, PromptFormat
from brorl.rollout.settings import VLLM_RANKS, EngineSettings
from brorl.sampling import SamplingParams, SamplingSettings
from brorl.section import AsList, Section
from brorl.storage import followed, is_folder
from brorl.tools.settings import ToolSettings
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
        description="model to train: the shipped `quickstart`, `plateau` or `calculator`, a local folder or "
        "checkpoint, a hub id, or id@revision",
    )
    rollouts_per_prompt: int = Field(512, ge=2, description="N, rollouts per prompt")
    prompts_per_step: int = Field(16, ge=1, description="prompts (groups of rollouts) per training step")
    steps: int | None = Field(
        100, ge=1, description="maximum number of steps; null leaves it to budget.limit to end the run, and is the "
        "default if budget.limit is set",
    )  # fmt: skip
    checkpoint_every: int = Field(50, ge=1, description="steps between checkpoints; the last step always saves one")
    keep_checkpoints: int = Field(3, ge=0, description="regular checkpoints to keep besides the best one; 0 keeps all")
    store_rollouts_every: int = Field(1, ge=0, description="steps between stored rollouts; 0 stores none")
    report: bool = Field(True, description="write report.html, with charts and rollouts, at the end of the run")
    seed: int = Field(0, ge=0, lt=2**63, description="random seed")
    output_dir: str | None = Field(None, description="run directory, new or empty; null creates one under runs/")
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto (cuda or else cpu), cpu, cuda, or cuda:N",
    )
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="compute dtype; with bfloat16, the trained weights stay float32"
    )
    data: DataSettings = DataSettings()
    prompt: PromptFormat = PromptFormat()
    sampling: SamplingSettings = SamplingSettings()
    tools: ToolSettings = ToolSettings()
    verification: VerificationSettings = VerificationSettings()
    rewards: RewardShaping = RewardShaping()
    advantage: AdvantageSettings = AdvantageSettings()
    phases: Annotated[tuple[PhaseSettings, ...], AsList, Field(strict=False)] = Field(
        (), description="a sequence of objectives that replaces `advantage`, such as broaden, then sharpen "
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
        """Rollouts per step, P x N."""
        return self.prompts_per_step * self.rollouts_per_prompt

    @property
    def advantages(self) -> tuple[AdvantageSettings, ...]:
        """The advantage settings of each phase; a single entry for a run without phases."""
        return tuple(phase.advantage for phase in self.phases) or (self.advantage,)

    @property
    def scaled_learning_rate(self) -> float:
        """The learning rate, scaled with the batch size if `optimizer.reference_batch` is set."""
        return self.optimizer.scaled_rate(self.samples_per_step)

    @property
    def total_budget(self) -> Budget:
        """The run's budget, or its number of steps if no budget is set."""
        if self.budget.limit is not None:
            return Budget(self.budget.unit, self.budget.limit, self.budget.eval_points)
        assert self.steps is not None  # `conflicts` has checked it
        return Budget("steps", self.steps)

    @property
    def autocasts(self) -> bool:
        """Whether the learner computes in bfloat16 with float32 weights. With adapters, the base itself is bfloat16."""
        return self.dtype == "bfloat16" and not self.lora.rank

    @property
    def adapters(self) -> LoraSettings | None:
        """The adapters to train; None if the run trains all weights."""
        return self.lora if self.lora.rank else None

    @property
    def own_functions(self) -> dict[str, str]:
        """Paths of the user's verifiers, reward terms and tools, by setting."""
        functions = {f"verification.functions.{domain}": path for domain, path in self.verification.functions.items()}
        functions |= {f"rewards.terms.{name}": term.function for name, term in self.rewards.terms.items()}
        functions |= {f"tools.functions.{name}": path for name, path in self.tools.functions.items()}
        if self.tools.environment:
            functions["tools.environment"] = self.tools.environment
        return functions | ({"tools.format": f"{self.tools.format}:parse"} if self.tools.has_own_format else {})

    @property
    def response_limits(self) -> dict[str, int]:
        """Maximum response length in tokens, tool results included, by setting; 0 if the evaluation sets none."""
        limits = {
            "sampling.max_new_tokens": self.sampling.max_new_tokens,
            "evaluation.max_new_tokens": self.evaluation.max_new_tokens or 0,
        }
        if not self.tools.enabled:
            return limits
        return {"tools.max_response_tokens": self.tools.total_tokens(max(limits.values()))}

    @property
    def longest_response(self) -> int:
        """Maximum number of tokens that the model samples per response in training."""
        turns = self.tools.max_turns if self.tools.enabled else 1
        return min(turns * self.sampling.max_new_tokens, self.tools.total_tokens(self.sampling.max_new_tokens))

    @property
    def evaluated_sampling(self) -> SamplingParams:
        """Sampling parameters for evaluations. Those that `evaluation` does not set come from `sampling`."""
        own = self.evaluation.model_dump(include={"temperature", "top_p", "top_k", "min_new_tokens", "max_new_tokens"})
        return replace(self.sampling.params, **{name: value for name, value in own.items() if value is not None})

    @property
    def recompute_old_logprobs(self) -> bool:
        """Whether the learner recomputes old log-probs, on request or because the engine's numerics differ."""
        differs = "bfloat16" in (self.dtype, self.engine.dtype) or self.engine.kind == "vllm"
        return differs or self.optimizer.old_logprobs == "recompute"

    @field_validator("model")
    @classmethod
    def _resolved(cls, model: str) -> str:
        """Resolve a local folder, so a run resumes from any directory and keeps its model if the link `best` moves."""
        folder = followed(Path(model).expanduser())
        return str(folder.resolve()) if is_folder(folder) else model

    @model_validator(mode="before")
    @classmethod
    def _budget_alone(cls, settings: Any) -> Any:
        """If a budget is given without a number of steps, let the budget alone end the run."""
        if not isinstance(settings, dict) or "steps" in settings:
            return settings
        budget = settings.get("budget")
        limit = budget.get("limit") if isinstance(budget, dict) else getattr(budget, "limit", None)
        return settings if limit is None else {**settings, "steps": None}

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for conflict in conflicts(self):
            raise ValueError(conflict)
        return self


# (setting, value, setting, value, fix): incompatible values; `...` means any value except 0.
_APART: tuple[tuple[str, Any, str, Any, str], ...] = (
    ("engine.clock", "cpu", "cluster.nodes", ..., "it measures the time of one process; set engine.clock: wall"),
    ("engine.clock", "cpu", "engine.kind", "vllm", "it does not see vLLM's process; set engine.clock: wall"),
    ("engine.dtype", "bfloat16", "engine.kind", "vllm", "vLLM computes in dtype; remove engine.dtype"),
    ("engine.dtype", "bfloat16", "importance.correction", "none",
     "sampling from rounded weights needs a correction; set importance.correction: truncate"),
    ("lora.quantization", "nf4", "lora.rank", 0, "rounded weights are frozen; set lora.rank, such as 16"),
    ("lora.quantization", "nf4", "dtype", "float64", "it computes in float32 or bfloat16; set dtype: float32"),
    ("lora.quantization", "nf4", "cluster.nodes", ...,
     "it needs a single-process run; set cluster.nodes: 0, or lora.quantization: none"),
    ("engine.kind", "vllm", "lora.quantization", "nf4",
     "vLLM samples with unquantized weights; set lora.quantization: none, or engine.kind: native"),
    ("engine.kind", "vllm", "dtype", "float64", "vLLM does not support float64; set dtype: float32 or bfloat16"),
    ("optimizer.states", "8bit", "dtype", "float64",
     "it rounds AdamW's moments; set dtype: float32, or optimizer.states: device"),
    ("optimizer.ema_decay", ..., "cluster.mode", "async",
     "the rollout workers are busy sampling and cannot evaluate averaged weights; set cluster.mode: sync"),
)  # fmt: skip


def conflicts(config: TrainConfig) -> Iterator[str]:
    """Yield conflicts between settings in different sections, the most basic first."""
    if config.steps is None and config.budget.limit is None:
        yield "steps = null needs a budget to end the run; set budget.limit, or a number of steps"
    yield from _phase_conflicts(config)
    yield from _group_conflicts(config)
    yield from _engine_conflicts(config)
    if config.cluster.enabled:
        yield from _cluster_conflicts(config)
    yield from _learner_conflicts(config)
    yield from _evaluation_conflicts(config)
    yield from _tool_conflicts(config)


def _tool_conflicts(config: TrainConfig) -> Iterator[str]:
    tools = config.tools
    if not tools.enabled:
        return
    if config.prompt.chat == "never" and not tools.has_own_format:
        yield (
            f"tools.format = {tools.format} needs a chat template, but prompt.chat = never uses none; set prompt.chat: "
            "auto, or set tools.format to your own file with parse and render (docs/how-to/tools.md)"
        )
    for name in ("sampling", "evaluation"):
        if minimum := getattr(config, name).min_new_tokens:
            yield (
                f"{name}.min_new_tokens = {minimum} would prevent a turn from ending after a short call; remove it, "
                "or remove the tools"
            )
        turn = getattr(config, name).max_new_tokens
        response = tools.max_response_tokens
        if turn and response and response <= turn + 1:
            yield (
                f"tools.max_response_tokens = {response} leaves no room for a turn after a call, because "
                f"{name}.max_new_tokens = {turn}; raise the former or lower the latter"
            )


def _evaluation_conflicts(config: TrainConfig) -> Iterator[str]:
    evaluation = config.evaluation
    patience = config.reference.reset_patience
    minimum, maximum = (
        ("evaluation" if getattr(evaluation, name) is not None else "sampling", name)
        for name in ("min_new_tokens", "max_new_tokens")
    )
    least, most = (getattr(getattr(config, section), name) for section, name in (minimum, maximum))
    if least >= most:
        yield (
            f"{'.'.join(minimum)} = {least} must be below {'.'.join(maximum)} = {most} in an evaluation, or every "
            "response is truncated; lower evaluation.min_new_tokens"
        )
    if not evaluation.num_prompts and evaluation.sources:
        yield "evaluation.sources needs evaluations, but evaluation.num_prompts = 0 turns them off; raise it"
    for name, wanted in (("reference.reset_patience", patience), ("evaluation.patience", evaluation.patience)):
        if wanted and not (evaluation.every and evaluation.num_prompts):
            off = "evaluation.num_prompts" if evaluation.every else "evaluation.every"
            yield f"{name} counts regular evaluations, but {off} = 0 turns them off; set it above 0"


def _phase_conflicts(config: TrainConfig) -> Iterator[str]:
    if not config.phases:
        return
    ends = [phase.until for phase in config.phases]
    if ends[-1] != 1 or ends != sorted({*ends}):
        yield f"phases: `until` must increase from phase to phase and end at 1, got {ends}"
    if config.advantage != AdvantageSettings():
        yield (
            "phases replace `advantage`, but both are set; move the settings of `advantage` into the phases, or set "
            "phases: []"
        )
    if config.phases[-1].until_coverage_stalls:
        yield (
            f"phases: {config.phases[-1].name} is the last phase, and only the budget ends it; remove its "
            "until_coverage_stalls"
        )
    waiting = next((phase.name for phase in config.phases if phase.until_coverage_stalls), None)
    if waiting is not None and max(config.evaluation.ks) == 1:
        yield f"phases: {waiting} ends when coverage stalls, but evaluation.ks has only pass@1; add a larger k"
    if waiting is not None and not (config.evaluation.every and config.evaluation.num_prompts):
        yield (
            f"phases: {waiting} ends when coverage stalls, which needs regular evaluations; set evaluation.every and "
            "evaluation.num_prompts above 0"
        )


def _group_conflicts(config: TrainConfig) -> Iterator[str]:
    num_rollouts = config.rollouts_per_prompt
    rule = config.dynamic_sampling
    if rule.max_pass_rate < 1 and not rule.enabled:
        yield (
            f"dynamic_sampling.max_pass_rate = {rule.max_pass_rate:g} needs dynamic_sampling.enabled, which is false; "
            "set it to true, or remove dynamic_sampling.max_pass_rate"
        )
    if not rule.max_correct(num_rollouts):
        yield (
            f"dynamic_sampling.max_pass_rate = {rule.max_pass_rate:g} keeps no group, because one correct rollout in "
            f"rollouts_per_prompt = {num_rollouts} is a larger fraction; raise one of them"
        )
    for advantage in config.advantages:
        if advantage.estimator == "pass_at_k" and advantage.k >= num_rollouts:
            yield (
                f"advantage.k = {advantage.k} needs more than {advantage.k} rollouts per prompt, but "
                f"rollouts_per_prompt = {num_rollouts}; raise it, or lower advantage.k"
            )
    if config.rewards.overlong_tokens > config.longest_response:
        limit = "the limit over all turns" if config.tools.enabled else "sampling.max_new_tokens"
        yield (
            f"rewards.overlong_tokens = {config.rewards.overlong_tokens} exceeds {limit} = "
            f"{config.longest_response}; lower rewards.overlong_tokens"
        )


def _engine_conflicts(config: TrainConfig) -> Iterator[str]:
    engine = config.engine
    on_a_cpu = config.device in ("auto", "cpu")
    if engine.clock == "cpu" and (engine.threads != 1 or not on_a_cpu):
        yield (
            "engine.clock = cpu measures the CPU time of one thread; set engine.threads: 1 and device: cpu, or "
            "engine.clock: wall"
        )
    if engine.dtype == "bfloat16" and (config.dtype != "float32" or not on_a_cpu):
        yield (
            f"engine.dtype = bfloat16 is for a float32 model on a CPU, but dtype = {config.dtype} and device = "
            f"{config.device}; set engine.dtype: auto, or dtype: float32 and device: cpu"
        )
    if engine.kind == "vllm" and config.lora.rank > VLLM_RANKS[-1]:
        yield (
            f"engine.kind = vllm supports adapters up to rank {VLLM_RANKS[-1]}, but lora.rank = {config.lora.rank}; "
            "lower it, or set engine.kind: native"
        )
    if engine.kind == "vllm" and engine.vllm.placement == "apart" and config.cluster.enabled:
        yield (
            f"engine.vllm.placement = apart needs a single-process run, but cluster.nodes = {config.cluster.nodes}; "
            "remove it and set cluster.placement: apart"
        )
    for name, value, other, unfit, advice in _APART:
        first, second = (reduce(getattr, setting.split("."), config) for setting in (name, other))
        if (first if value is ... else first == value) and (second if unfit is ... else second == unfit):
            yield f"{name} = {first} and {other} = {second} are incompatible: {advice}"


def _cluster_conflicts(config: TrainConfig) -> Iterator[str]:
    cluster = config.cluster
    engine = config.engine
    gpus = cluster.gpus_per_rollout_worker
    parallel = engine.vllm.tensor_parallel
    if engine.kind == "native" and gpus > 1:
        yield (
            f"cluster.gpus_per_rollout_worker = {gpus}, but engine.kind = native samples on one GPU; set "
            "cluster.gpus_per_rollout_worker: 1 with more cluster.rollout_workers, or engine.kind: vllm"
        )
    if engine.kind == "vllm" and gpus and gpus != parallel:
        yield (
            f"cluster.gpus_per_rollout_worker = {gpus}, but an engine uses engine.vllm.tensor_parallel = {parallel} "
            "GPUs; set both to the same number"
        )
    if config.device == "cpu" and gpus + cluster.gpus_per_learner_rank:
        yield (
            "device = cpu does not use GPUs, but the cluster's workers reserve some; set device: auto, or "
            "cluster.gpus_per_rollout_worker: 0 and cluster.gpus_per_learner_rank: 0"
        )
    if config.device.startswith("cuda") and not gpus:
        yield (
            f"device = {config.device} needs GPUs, but cluster.gpus_per_rollout_worker = 0 samples on CPUs; set "
            "cluster.gpus_per_rollout_worker: 1, or device: auto"
        )
    if cluster.mode == "async" and cluster.max_staleness and config.importance.correction == "none":
        yield (
            f"cluster.mode = async trains on rollouts from weights up to {cluster.max_staleness} updates old, but "
            "importance.correction = none does not correct for that; set importance.correction: truncate and "
            "optimizer.old_logprobs: recompute, or cluster.max_staleness: 0"
        )


def _learner_conflicts(config: TrainConfig) -> Iterator[str]:
    optimizer = config.optimizer
    loss = config.loss
    correction = config.importance.correction
    if optimizer.mini_batches > config.prompts_per_step:
        yield (
            f"optimizer.mini_batches = {optimizer.mini_batches} exceeds prompts_per_step = "
            f"{config.prompts_per_step}, but every mini-batch needs at least one prompt; set "
            f"optimizer.mini_batches: {config.prompts_per_step}"
        )
    wide = [name for name in ("clip_low", "clip_high") if (getattr(loss, name) or 0) > 0.1]
    if loss.kind == "gspo" and wide:
        yield (
            "loss.kind = gspo clips the ratio of whole responses, which stays close to 1, so "
            f"loss.{wide[0]} = {getattr(loss, wide[0])} has no effect; set loss.clip_low: 3e-4 and loss.clip_high: 4e-4"
        )
    if correction != "none" and not config.recompute_old_logprobs:
        yield (
            f"importance.correction = {correction} needs the learner's own log-probs, but optimizer.old_logprobs = "
            "engine; set optimizer.old_logprobs: recompute"
        )
    reset = config.reference.first_reset
    if reset and not config.kl.coefficient:
        yield (
            f"reference.{reset} = {getattr(config.reference, reset)} resets the reference of the KL penalty, but "
            "kl.coefficient = 0 turns that penalty off; set kl.coefficient above 0"
        )
