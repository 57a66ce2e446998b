"""Settings of the algorithms: rewards, advantages, policy loss, importance weights, KL penalty."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self, TypeAlias, assert_never

from pydantic import Field, field_validator, model_validator

from brorl.section import Section
from brorl.storage import function_path

Aggregation: TypeAlias = Literal["token_mean", "sequence_mean", "constant"]
ImportanceMode: TypeAlias = Literal["none", "truncate", "mask", "sequence_mask"]
KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]
LossKind: TypeAlias = Literal["ppo", "cispo", "gspo"]


class CosineLength(Section):
    """The scheduled cosine length reward; off while `every_steps` is 0.

    By default, a correct response earns from 1 (length 0) down to 0.5 (maximum length), and an incorrect one earns 0:
    the length penalty of ProRL v2, which does not publish its values.
    """

    every_steps: int = Field(0, ge=0, description="period of the schedule, in steps; 0 switches it off")
    on_steps: int = Field(
        100, ge=1, description="the length reward applies in this many steps at the start of each period"
    )
    correct_short: float = Field(1.0, description="reward of a correct response of length 0")
    correct_long: float = Field(0.5, description="reward of a correct response of maximum length")
    wrong_short: float = Field(0.0, description="reward of an incorrect response of length 0")
    wrong_long: float = Field(0.0, description="reward of an incorrect response of maximum length")

    def in_force(self, step: int) -> bool:
        """Whether a step uses the cosine reward; steps count from 1.

        It applies in the first `on_steps` of every `every_steps` steps, so a run that ends later in a period ends on
        the plain reward.

        Source: ProRL v2 applies its penalty at intervals ("scheduled"), without specifying which part of a period.
        """
        return self.every_steps > 0 and (step - 1) % self.every_steps < self.on_steps

    @model_validator(mode="after")
    def _fits_its_period(self) -> Self:
        """Reject `on_steps` longer than the period, and periodic rewards that favor an incorrect response."""
        at = "rewards.cosine_length"
        if 0 < self.every_steps < self.on_steps:
            raise ValueError(
                f"{at}.on_steps = {self.on_steps} is more than {at}.every_steps = {self.every_steps}; lower on_steps"
            )
        for end in ("short", "long") if self.every_steps else ():
            correct, wrong = getattr(self, f"correct_{end}"), getattr(self, f"wrong_{end}")
            if correct < wrong:
                raise ValueError(
                    f"{at}.correct_{end} is {correct} and {at}.wrong_{end} is {wrong}: a correct response would earn "
                    "less than an incorrect one; raise the first or lower the second"
                )
        return self


class RewardTerm(Section):
    """A function whose value, times a weight, is added to the reward of a verified response."""

    function: str = Field(
        min_length=1, description="package.module:function or path/to/file.py:function, which returns a number"
    )
    weight: float = Field(1.0, ge=-1e6, le=1e6, description="factor on its value; negative for a penalty")

    @field_validator("function")
    @classmethod
    def _absolute(cls, function: str) -> str:
        """Make the path of a local file absolute, so that a run can be resumed from any directory."""
        return function_path(function)


class RewardShaping(Section):
    """From verdicts to rewards; dynamic sampling always uses the verdict."""

    partial_credit: bool = Field(False, description="use the verifier's score as the reward, not only 0 or 1")
    stop_properly: float = Field(
        0.0, ge=0, le=1, description="factor on the reward of truncated responses; above 0 they are verified too"
    )
    cosine_length: CosineLength = CosineLength()
    overlong_tokens: int = Field(
        0, ge=0, description="tokens before the length limit over which a penalty ramps up to 1; 0 switches it off"
    )
    format_pattern: str | None = Field(
        None, description="regular expression that the whole response must match for format_reward, such as "
        "'<think>.*</think>.*'; null switches the format reward off",
    )  # fmt: skip
    format_reward: float = Field(0.1, gt=0, lt=1, description="reward added to a response that matches format_pattern")
    terms: dict[str, RewardTerm] = Field(
        {}, description="additional reward terms by name: {brief: {function: rewards.py:brief, weight: 0.2}} "
        "(docs/how-to/reward_terms.md)",
    )  # fmt: skip
    domain_weights: dict[str, float] = Field({}, description="reward factors by domain, such as {math: 1.0}")

    @field_validator("format_pattern")
    @classmethod
    def _is_pattern(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            import regex

            try:
                regex.compile(pattern)
            except regex.error as error:
                raise ValueError(
                    f"rewards.format_pattern = {pattern!r} is not a valid regular expression: {error}"
                ) from None
        return pattern

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        """Reject conflicting base rewards, terms with invalid names or no effect, and nonpositive weights."""
        if self.partial_credit and self.cosine_length.every_steps:
            raise ValueError(
                "rewards.partial_credit and rewards.cosine_length both set the base reward, and the cosine reward has "
                "no partial credit; switch one of them off"
            )
        for name, term in self.terms.items():
            if not name.isidentifier():
                raise ValueError(f"rewards.terms: {name!r} names a term in the metrics; use letters, digits and _")
            if not term.weight:
                raise ValueError(f"rewards.terms.{name}.weight = 0 has no effect; remove the term")
        for domain, weight in self.domain_weights.items():
            if not 0 < weight <= 1e3:
                raise ValueError(
                    f"rewards.domain_weights.{domain} must be a number above 0, at most 1000, got {weight}; to "
                    "exclude a domain, remove its prompts from the data"
                )
        return self


class AdvantageSettings(Section):
    """How advantages are estimated from verdicts and rewards."""

    estimator: Literal["reinforce_pp_baseline", "grpo", "rloo", "maxrl", "pass_at_k"] = Field(
        "reinforce_pp_baseline",
        description="reward minus group mean, normalized over the batch (as in the paper) | GRPO | RLOO | MaxRL, times "
        "1/mean | for pass@k",
    )
    normalize_over: Literal["trajectories", "tokens"] = Field(
        "trajectories", description="unit of the batch statistics of reinforce_pp_baseline and of batch_scale"
    )
    order: int | None = Field(
        None, ge=1, description="maxrl: order T of the objective, the sum of pass@k / k for k up to T; null uses N - 1"
    )
    final_order: int | None = Field(
        None, ge=1, description="maxrl: anneal the order geometrically from `order` to this by `final_order_at`; null "
        "keeps it constant",
    )  # fmt: skip
    final_order_at: float = Field(
        1.0, gt=0, le=1, description="maxrl: fraction of the run or phase at which the order reaches `final_order`; "
        "it is constant afterwards",
    )  # fmt: skip
    k: int = Field(16, ge=1, description="pass_at_k: k, below N")
    batch_scale: bool = Field(
        False,
        description="normalize the advantages over the batch to mean 0 and standard deviation 1, as "
        "reinforce_pp_baseline does",
    )

    @property
    def title(self) -> str:
        """The estimator and its parameter in a few words."""
        match self.estimator:
            case "maxrl":
                last = "" if self.final_order is None else f" to {self.final_order}"
                where = "" if self.final_order_at == 1 else f" at {self.final_order_at:.0%}"
                return f"maxrl, order {self.order or 'N-1'}{last}{where}"
            case "pass_at_k":
                return f"pass_at_k, k {self.k}"
            case "reinforce_pp_baseline" | "grpo" | "rloo":
                return self.estimator
            case _:
                assert_never(self.estimator)

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        """Reject options that would have no effect."""
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        changed = {name: getattr(self, name) for name in defaults if getattr(self, name) != defaults[name]}
        for name, estimator in (("order", "maxrl"), ("final_order", "maxrl"), ("k", "pass_at_k")):
            if name in changed and self.estimator != estimator:
                raise ValueError(
                    f"advantage.{name} = {changed[name]} works only with advantage.estimator = {estimator}, not with "
                    f"{self.estimator}; remove it"
                )
        if "final_order_at" in changed and self.final_order is None:
            raise ValueError(
                f"advantage.final_order_at = {self.final_order_at:g} has no effect without "
                "advantage.final_order; set it, or remove final_order_at"
            )
        has_statistics = self.estimator == "reinforce_pp_baseline" or self.batch_scale
        if self.normalize_over == "tokens" and not has_statistics:
            raise ValueError(
                "advantage.normalize_over = tokens works only with batch statistics, not with "
                f"advantage.estimator = {self.estimator}; remove it, or set advantage.batch_scale: true"
            )
        return self


class Clip(NamedTuple):
    """Bounds on a ratio."""

    low: float  # how far it may fall below 1
    high: float  # how far it may rise above 1


DEFAULT_CLIP: dict[LossKind, Clip] = {
    "ppo": Clip(0.2, 0.28),  # DAPO (arXiv 2503.14476)
    "cispo": Clip(1.0, 4.0),  # no lower bound: MiniMax-M1 (arXiv 2506.13585); a weight of 5: ScaleRL (arXiv 2510.13786)
    "gspo": Clip(3e-4, 4e-4),  # GSPO (arXiv 2507.18071): its ratio is a geometric mean over a response
}


class PolicyLossSettings(Section):
    """The policy loss."""

    kind: LossKind = Field(
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
        None, gt=1, description="ppo: largest ratio of tokens with a negative advantage, usually 3; null for no bound"
    )
    entropy_coefficient: float = Field(
        0.0,
        ge=0,
        description="weight of the entropy bonus, the mean next-token entropy over tokens, regardless of "
        "`aggregation`; 0 switches it off",
    )
    mask_truncated: bool = Field(
        False,
        description="remove truncated responses from the loss (overlong filtering); the group mean and the "
        "denominators of sequence_mean and constant still count them",
    )
    aggregation: Aggregation = Field(
        "token_mean", description="mean over all tokens | mean over responses of their token means | fixed denominator"
    )

    @property
    def clip(self) -> Clip:
        """Bounds on the ratio; the loss kind's defaults where unset."""
        low, high = DEFAULT_CLIP[self.kind]
        return Clip(low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high)

    @property
    def is_sequence_level(self) -> bool:
        """Whether the policy term is a function of whole responses, so the log-probs of all nodes are needed first."""
        return self.kind == "gspo"

    @model_validator(mode="after")
    def _clips_fit_the_kind(self) -> Self:
        if self.dual_clip is not None and self.kind != "ppo":
            raise ValueError(f"loss.dual_clip works only with loss.kind = ppo, not with {self.kind}; remove it")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip.high:
            raise ValueError(
                f"loss.dual_clip must be above 1 + loss.clip_high = {1 + self.clip.high:g}, got {self.dual_clip:g}; "
                "3 is usual"
            )
        return self


class ImportanceCorrection(Section):
    """Correction for the difference between the sampling engine and the learner.

    A token's ratio is w = exp(old - sampler). "truncate" weights the token by min(w, high). "mask" weights it by w if
    low <= w <= high, else by 0. "sequence_mask" drops responses where the geometric mean of w is outside [low, high],
    and weights the tokens of the others by w.

    Source: truncated importance sampling (TIS) as in BroRL (arXiv 2510.01180), section 3.1; the mask is IcePop, with
        [0.5, 5] in ProRL v2's public configurations; "sequence_mask" is their `seq-mask-tis`, with [.999, 1.002] in
        ProRL v2.1's. One deviation: OpenRLHF's `tis` also raises weights below `low` to `low`. "truncate" has no lower
        bound, as in the definition of TIS.
    """

    correction: ImportanceMode = Field(
        "none", description="weight tokens by learner over engine probability: no | cut at `high` | 0 outside `low` to "
        "`high` | 0 for whole responses whose geometric mean is outside",
    )  # fmt: skip
    low: float = Field(0.5, ge=0, lt=1, description="smallest weight or geometric mean that a mask keeps")
    high: float = Field(5.0, ge=1, description="largest weight, or largest geometric mean of a response")


class KLPenalty(Section):
    """Penalty on the KL divergence from the reference policy.

    "loss" adds coefficient * sum_k (weighted count_k) kl_k / denominator to the loss, with the current policy.
    "reward" subtracts coefficient * (sum of the estimates of a response's tokens at sampling time) from its reward.

    Source: Schulman, "Approximating KL divergence" (2020); ProRL v2 (k2 in the loss, its log-ratio clamped to +-10; its
        public configurations use the coefficient 1e-4). Their code clamps the estimate at 10 instead: for k2, this
        clamps the log-ratio to +-sqrt(20) = 4.4721.
    """

    coefficient: float = Field(
        0.0, ge=0, description="weight of the penalty; 0 switches the penalty and the reference off"
    )
    estimator: KLEstimator = Field("k2", description="estimator of the divergence, per token")
    placement: Literal["loss", "reward"] = Field(
        "loss", description="add the penalty to the loss | subtract it from the reward"
    )
    clamp: float = Field(10.0, gt=0, le=50, description="largest absolute log-ratio, in nats; larger ones are clamped")

    @property
    def is_in_reward(self) -> bool:
        """Whether there is a penalty and it is part of the rewards."""
        return self.coefficient > 0 and self.placement == "reward"
