"""Every setting of a training recipe: typed, documented, checked before any work starts.

In: nested values, from YAML and the command line (`brorl.config.reading`). Out: a frozen `TrainConfig`. Sources of
prompts are in `brorl.config.sources`, evaluation, budget and collapse in `brorl.config.evaluation`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from brorl.config.evaluation import BudgetConfig, CollapseConfig, EvaluationConfig
from brorl.config.sources import CountdownConfig, Section, SourceConfig, as_sources, listed

DecayRate = Annotated[float, Field(ge=0, lt=1)]
Names = Annotated[tuple[str, ...], Field(strict=False)]


class DataConfig(Section):
    """The prompts."""

    sources: Annotated[tuple[SourceConfig, ...], BeforeValidator(as_sources), Field(strict=False)] = Field(
        (CountdownConfig(),), min_length=1, description="training data: files, Hugging Face data sets or "
        "built-in puzzles; one, or a list with weights (docs/how-to/data.md)",
    )  # fmt: skip
    held_out_share: float = Field(0.1, ge=0, lt=1, description="share of the prompts held out for evaluation")
    split_seed: int = Field(0, ge=0, lt=2**63, description="seed that decides which prompts are held out")
    max_prompt_tokens: int = Field(0, ge=0, description="drop prompts with more tokens than this; 0 keeps all")


class PromptConfig(Section):
    """From a question to what the model reads."""

    template: str = Field("{prompt}", description="text around the question; {prompt} marks its place")
    system_prompt: str | None = Field(None, description="system prompt before every question; null for none")
    chat: Literal["auto", "always", "never"] = Field(
        "auto", description="use the tokenizer's chat template: if it has one | always, an error if it has none | never"
    )
    chat_template_options: dict[str, Any] = Field(
        {}, description="variables for the chat template, such as {enable_thinking: false}"
    )


class SamplingConfig(Section):
    """How rollouts are drawn."""

    temperature: float = Field(1.0, gt=0, description="sampling temperature")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; below 1 the gradient is biased")
    top_k: int = Field(
        0, ge=0, description="sample from the k most likely tokens, 0 for all; above 0 the gradient is biased"
    )
    max_new_tokens: int = Field(256, ge=1, description="maximum length of a response, in tokens")
    min_new_tokens: int = Field(0, ge=0, description="minimum length of a response, in tokens")
    end_token: str | None = Field(None, description="token that ends a response, if the tokenizer does not define one")
    scheme: Literal["iid", "systematic"] = Field(
        "iid", description="draw the rollouts of a prompt independently | spread them evenly over its tree"
    )


class AdaptiveConfig(Section):
    """How `rollouts_per_prompt: adaptive` spends rollouts; unused otherwise."""

    pilot_rollouts: int = Field(16, ge=2, description="rollouts that every prompt gets first")
    max_rollouts: int = Field(
        512, ge=2, description="most rollouts of a prompt; prompts without both outcomes are doubled up to this"
    )
    samples_per_prompt: int = Field(
        64, ge=2, description="average rollouts per prompt that a round may spend, including the first ones"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.pilot_rollouts < self.samples_per_prompt <= self.max_rollouts:
            raise ValueError(
                f"adaptive.pilot_rollouts = {self.pilot_rollouts}, adaptive.samples_per_prompt = "
                f"{self.samples_per_prompt} and adaptive.max_rollouts = {self.max_rollouts} must be in ascending "
                "order (the last two may be equal)"
            )
        return self


class VerificationConfig(Section):
    """Worker processes for verifiers that could hang or crash, and your own verifiers."""

    workers: int = Field(0, ge=0, le=1024, description="worker processes; 0 for one less than the number of cores")
    timeout_s: float = Field(
        4.0,
        gt=0,
        description="time limit of one verification, in seconds; a longer one is stopped and counted as timed out",
    )
    memory_mib: int = Field(1024, ge=256, description="memory limit of a worker process, in MiB")
    functions: dict[str, str] = Field(
        {}, description="your verifiers by domain: {my_domain: package.module:function} (docs/how-to/verifiers.md)"
    )

    @field_validator("functions")
    @classmethod
    def _absolute(cls, functions: dict[str, str]) -> dict[str, str]:
        """Make the path of a local file absolute, so that a run goes on from any folder."""
        files = {domain: Path(path.rpartition(":")[0]).expanduser() for domain, path in functions.items()}
        return {
            domain: f"{files[domain].absolute()}:{path.rpartition(':')[2]}" if files[domain].is_file() else path
            for domain, path in functions.items()
        }


class CosineLengthConfig(Section):
    """The scheduled cosine length reward; off while `every_steps` is 0."""

    every_steps: int = Field(0, ge=0, description="period of the schedule, in steps; 0 switches it off")
    on_steps: int = Field(
        100, ge=1, description="the length reward applies in this many steps at the start of each period"
    )
    correct_short: float = Field(1.0, description="reward of a correct response of length 0")
    correct_long: float = Field(0.5, description="reward of a correct response of maximum length")
    wrong_short: float = Field(0.0, description="reward of a wrong response of length 0")
    wrong_long: float = Field(0.0, description="reward of a wrong response of maximum length")


class RewardsConfig(Section):
    """From verdicts to rewards; dynamic sampling always uses the raw verdict."""

    partial_credit: bool = Field(False, description="use the verifier's score as the reward, not just 0 or 1")
    stop_properly: float = Field(
        0.0, ge=0, le=1, description="factor on the reward of truncated responses; above 0 they are verified too"
    )
    cosine_length: CosineLengthConfig = CosineLengthConfig()
    overlong_tokens: int = Field(
        0, ge=0, description="number of tokens before the length limit in which a penalty grows to 1; 0 switches it off"
    )
    format_pattern: str | None = Field(
        None, description="regular expression that the whole response must match for format_reward, such as "
        "'<think>.*</think>.*'; null switches the format reward off",
    )  # fmt: skip
    format_reward: float = Field(0.1, gt=0, lt=1, description="reward added to a response that matches format_pattern")
    domain_weights: dict[str, float] = Field({}, description="reward factors by domain, such as {math: 1.0}")

    @field_validator("format_pattern")
    @classmethod
    def _is_pattern(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            import regex

            try:
                regex.compile(pattern)
            except regex.error as error:
                raise ValueError(f"rewards.format_pattern = {pattern!r} is not a regular expression: {error}") from None
        return pattern


class AdvantageConfig(Section):
    """How advantages are estimated from rewards."""

    estimator: Literal["reinforce_pp_baseline", "grpo", "rloo"] = Field(
        "reinforce_pp_baseline",
        description="reward minus group mean, normalized over the batch (as in the paper) | GRPO | RLOO",
    )
    normalise_over: Literal["trajectories", "tokens"] = Field(
        "trajectories", description="what reinforce_pp_baseline averages over in its batch statistics"
    )


class DynamicSamplingConfig(Section):
    """Keep only groups with both correct and incorrect rollouts."""

    enabled: bool = Field(
        True, description="train only on groups with 0 < number correct < N, and sample more prompts to replace others"
    )
    max_tries: int = Field(10, ge=1, description="stop the run after this many rounds in a row without a mixed group")


class LossConfig(Section):
    """The policy loss."""

    kind: Literal["ppo", "cispo", "gspo"] = Field(
        "ppo", description="clip per token | clip the weight only | clip per sequence (one more forward pass)"
    )
    clip_low: float | None = Field(
        None, gt=0, le=1, description="clip the ratio below 1 - clip_low; null uses 0.2 for ppo, 1 for cispo (no "
        "bound), 3e-4 for gspo",
    )  # fmt: skip
    clip_high: float | None = Field(
        None, gt=0, description="clip the ratio above 1 + clip_high; null uses 0.28 for ppo, 4 for cispo, 4e-4 for gspo"
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="ppo: largest ratio of tokens with a negative advantage, usually 3; null for no bound",
    )
    entropy_coefficient: float = Field(
        0.0,
        ge=0,
        description="weight of the entropy bonus, the mean next-token entropy; 0 switches it off",
    )
    mask_truncated: bool = Field(
        False,
        description="remove truncated responses from the loss (overlong filtering); the group mean still counts them",
    )
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean", description="mean over all tokens | mean over responses of their token means | fixed denominator"
    )


class ImportanceConfig(Section):
    """Correction for the difference between the sampling engine and the learner."""

    correction: Literal["none", "truncate", "mask", "sequence_mask"] = Field(
        "none", description="weight tokens by learner over engine probability: no | cut at `high` | 0 outside `low` to "
        "`high` | 0 for whole responses whose geometric mean is outside",
    )  # fmt: skip
    low: float = Field(0.5, ge=0, lt=1, description="smallest weight that a mask keeps")
    high: float = Field(5.0, ge=1, description="largest weight")


class KLConfig(Section):
    """Penalty on the KL divergence from the reference policy."""

    coefficient: float = Field(
        0.0, ge=0, description="weight of the penalty; 0 switches the penalty and the reference off"
    )
    estimator: Literal["k1", "k2", "k3"] = Field("k2", description="estimator of the divergence, per token")
    placement: Literal["loss", "reward"] = Field(
        "loss", description="add the penalty to the loss | subtract it from the reward"
    )
    clamp: float = Field(10.0, gt=0, le=50, description="largest absolute log-ratio, in nats; larger ones are clamped")


class ReferenceConfig(Section):
    """The reference policy of the KL penalty: the policy at the start, or at the last reset."""

    offload: bool = Field(False, description="keep its weights in CPU memory while unused")
    reset_every: int = Field(0, ge=0, description="steps between resets to the current policy; 0 for never")
    reset_kl_above: float | None = Field(
        None, gt=0, description="reset when the KL divergence stays above this, in nats; null for never"
    )
    reset_patience: int | None = Field(
        None, ge=1, description="reset after this many evaluations without a new best pass@k; null for never. Neither "
        "this nor reset_kl_above resets within 20 steps of the last reset",
    )  # fmt: skip
    reset_optimizer: bool = Field(False, description="clear AdamW's moments at every reset")


class OptimizerConfig(Section):
    """AdamW, and how it uses the batch."""

    learning_rate: float = Field(
        2e-6, gt=0, description="learning rate; scaled with the batch if reference_batch is set"
    )
    reference_batch: int | None = Field(
        None, ge=1, description="rollouts per step at which learning_rate was tuned; the rate used is "
        "learning_rate * sqrt(rollouts per step / reference_batch); null uses learning_rate as it is",
    )  # fmt: skip
    mini_batches: int = Field(4, ge=1, description="mini-batches per step, one update each")
    betas: Annotated[tuple[DecayRate, DecayRate], Field(strict=False)] = Field(
        (0.9, 0.95), description="AdamW's decay rates"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="clip the gradient to this norm")
    warmup_updates: int = Field(0, ge=0, description="updates of linear learning-rate warmup")
    responses_per_verdict: int = Field(
        0, ge=0, description="train on at most this many correct and this many incorrect distinct responses per group, "
        "weighted to stay unbiased; 0 for all",
    )  # fmt: skip
    old_logprobs: Literal["engine", "recompute"] = Field(
        "engine",
        description="old-policy log-probs: from sampling | from a forward pass of the learner",
    )
    from_checkpoint: bool = Field(False, description="start with the optimizer state of the checkpoint in `model`")


class LoraConfig(Section):
    """Train low-rank adapters instead of all weights (needs the extra `peft`)."""

    rank: int = Field(0, ge=0, description="rank of the adapters; 0 trains all weights instead")
    alpha: float = Field(32.0, gt=0, description="the adapters are scaled by alpha / rank")
    target_modules: Annotated[tuple[str, ...], BeforeValidator(listed), Field(strict=False)] = Field(
        ("all-linear",), min_length=1, description="names of the layers that get an adapter"
    )


class DiagnosticsConfig(Section):
    """What is measured in addition to the sampled and unsampled mass of every step."""

    certificate_every: int = Field(
        25, ge=0, description="steps between certificates of an update, on held-out rollouts; 0 for none"
    )
    held_out_rollouts: int = Field(32, ge=2, description="extra rollouts per prompt for a certificate")


class EngineConfig(Section):
    """Memory and threads of the engine and the learner; results stay the same up to rounding."""

    memory_gib: float = Field(
        4.0, gt=0, description="memory for the KV cache and logits while sampling, in GiB; more rows wait their turn"
    )
    nodes_per_pass: int | None = Field(
        None, ge=16, description="tree nodes per forward pass of the learner; null chooses automatically"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass to save memory")
    threads: int = Field(0, ge=0, le=1024, description="number of CPU threads; 0 for the default of torch")


class TrackingConfig(Section):
    """Where the metrics go besides metrics.jsonl."""

    to: Annotated[
        tuple[Literal["wandb", "tensorboard", "trackio"], ...], BeforeValidator(listed), Field(strict=False)
    ] = Field((), description="wandb, tensorboard or trackio (each an extra of the package), or a list")
    project: str = Field("brorl", min_length=1, description="project of the run in the tracker")
    run_name: str | None = Field(
        None, description="name of the run in the tracker; null uses the name of the run directory"
    )


def _number_or_adaptive(value: Any) -> Any:
    """Refuse what is not N: pydantic would complain of every member of the union by itself."""
    if value == "adaptive" or (type(value) is int and value >= 2):
        return value
    raise ValueError(
        f"rollouts_per_prompt: the value should be a whole number of at least 2, or adaptive, not {value!r}"
    )


class TrainConfig(Section):
    """A training recipe."""

    model: str = Field(
        "quickstart",
        description="model to train: the built-in `quickstart`, a local folder or checkpoint, or a Hugging Face hub id",
    )
    rollouts_per_prompt: Annotated[int | Literal["adaptive"], BeforeValidator(_number_or_adaptive)] = Field(
        512, description="N, rollouts per prompt; adaptive gives more to prompts without both outcomes"
    )
    prompts_per_step: int = Field(16, ge=1, description="prompts (groups of rollouts) that a step trains on")
    steps: int | None = Field(
        100, ge=1, description="number of steps, at most; null lets budget.limit alone end the run, and is the default "
        "where budget.limit is set",
    )  # fmt: skip
    checkpoint_every: int = Field(50, ge=1, description="steps between checkpoints; the last step is always saved")
    keep_checkpoints: int = Field(3, ge=0, description="regular checkpoints to keep, besides the best; 0 keeps all")
    store_rollouts_every: int = Field(1, ge=0, description="steps between stored rollouts; 0 stores no responses")
    report: bool = Field(True, description="write report.html, with charts and rollouts, at the end of the run")
    seed: int = Field(0, ge=0, lt=2**63, description="random seed")
    output_dir: str | None = Field(None, description="run directory, new or empty; null creates one under runs/")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="number format of the computation; with bfloat16 the trained weights stay float32"
    )
    data: DataConfig = DataConfig()
    prompt: PromptConfig = PromptConfig()
    sampling: SamplingConfig = SamplingConfig()
    adaptive: AdaptiveConfig = AdaptiveConfig()
    verification: VerificationConfig = VerificationConfig()
    rewards: RewardsConfig = RewardsConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    loss: LossConfig = LossConfig()
    importance: ImportanceConfig = ImportanceConfig()
    kl: KLConfig = KLConfig()
    reference: ReferenceConfig = ReferenceConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    budget: BudgetConfig = BudgetConfig()
    collapse: CollapseConfig = CollapseConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    engine: EngineConfig = EngineConfig()
    tracking: TrackingConfig = TrackingConfig()

    @field_validator("model")
    @classmethod
    def _resolved(cls, model: str) -> str:
        """Make a local folder absolute and follow links, so that a run goes on from any folder; `best` moves."""
        folder = Path(model).expanduser()
        return str(folder.resolve()) if folder.is_dir() else model

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
    def _check(self) -> Self:
        if self.steps is None and self.budget.limit is None:
            raise ValueError("steps = null needs a budget to end the run; set budget.limit, or a number of steps")
        if self.optimizer.mini_batches > self.prompts_per_step:
            raise ValueError(
                f"optimizer.mini_batches = {self.optimizer.mini_batches} is more than prompts_per_step = "
                f"{self.prompts_per_step}, and every mini-batch needs at least one prompt; set "
                f"--optimizer.mini_batches {self.prompts_per_step}"
            )
        if self.importance.correction != "none" and not self.recompute_old_logprobs:
            raise ValueError(
                f"importance.correction = {self.importance.correction} needs the learner's own log-probs, but "
                "optimizer.old_logprobs = engine; set --optimizer.old_logprobs recompute"
            )
        resets = {"reset_every": 0, "reset_kl_above": None, "reset_patience": None}
        asked = [n for n, off in resets.items() if getattr(self.reference, n) != off]
        if asked and not self.kl.coefficient:
            raise ValueError(
                f"reference.{asked[0]} = {getattr(self.reference, asked[0])} resets the reference of the KL penalty, "
                "but kl.coefficient = 0 switches that penalty off; set kl.coefficient above 0"
            )
        if self.reference.reset_optimizer and not asked:
            raise ValueError(
                "reference.reset_optimizer clears AdamW at every reset, but no reset is set; set "
                "reference.reset_every, or reference.reset_optimizer: false"
            )
        if not self.evaluation.num_prompts and (self.reference.reset_patience or self.evaluation.sources):
            setting = "reference.reset_patience" if self.reference.reset_patience else "evaluation.sources"
            raise ValueError(f"{setting} needs evaluations, but evaluation.num_prompts = 0 switches them off; raise it")
        if self.reference.reset_patience and not self.evaluation.every:
            raise ValueError(
                "reference.reset_patience counts regular evaluations, but evaluation.every = 0 switches them off; "
                "set evaluation.every to a number of steps"
            )
        if self.advantage.normalise_over == "tokens" and self.advantage.estimator != "reinforce_pp_baseline":
            raise ValueError(
                "advantage.normalise_over = tokens works only with reinforce_pp_baseline, not with "
                f"advantage.estimator = {self.advantage.estimator}; remove it"
            )
        if self.sampling.min_new_tokens >= self.sampling.max_new_tokens:
            raise ValueError(
                f"sampling.min_new_tokens = {self.sampling.min_new_tokens} must be below sampling.max_new_tokens = "
                f"{self.sampling.max_new_tokens}, or no response could end by itself; lower it"
            )
        if self.loss.kind == "gspo" and (self.loss.clip_low or 0) > 0.1:
            raise ValueError(
                f"loss.kind = gspo clips the ratio of whole responses, which stays close to 1, so that "
                f"loss.clip_low = {self.loss.clip_low} has no effect; set loss.clip_low: 3e-4 and loss.clip_high: 4e-4"
            )
        if self.rewards.overlong_tokens > self.sampling.max_new_tokens:
            raise ValueError(
                f"rewards.overlong_tokens = {self.rewards.overlong_tokens} is more than sampling.max_new_tokens = "
                f"{self.sampling.max_new_tokens}; lower rewards.overlong_tokens"
            )
        if self.rewards.cosine_length.every_steps and (
            self.rewards.cosine_length.on_steps > self.rewards.cosine_length.every_steps
        ):
            raise ValueError(
                f"rewards.cosine_length.on_steps = {self.rewards.cosine_length.on_steps} is more than "
                f"rewards.cosine_length.every_steps = {self.rewards.cosine_length.every_steps}; lower it"
            )
        return self

    @property
    def samples_per_step(self) -> int:
        """Rollouts that a step trains on, P x N; with adaptive N the mean that the budget allows."""
        n = self.rollouts_per_prompt
        return self.prompts_per_step * (n if isinstance(n, int) else self.adaptive.samples_per_prompt)

    @property
    def recompute_old_logprobs(self) -> bool:
        """Whether the old log-probs are the learner's own: asked for, or because the engine computes in bfloat16."""
        return self.optimizer.old_logprobs == "recompute" or self.dtype == "bfloat16"
