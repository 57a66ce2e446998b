"""Settings of the loss: advantages, policy loss, importance weights, KL penalty and its reference."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from brorl.config.section import Section


class AdvantageConfig(Section):
    """How advantages are estimated from verdicts and rewards."""

    estimator: Literal["reinforce_pp_baseline", "grpo", "rloo", "maxrl", "pass_at_k", "power"] = Field(
        "reinforce_pp_baseline",
        description="reward minus group mean, normalized over the batch (as in the paper) | GRPO | RLOO | MaxRL, times "
        "1/mean | for pass@k | times about 1/mean^alpha",
    )
    normalize_over: Literal["trajectories", "tokens"] = Field(
        "trajectories", description="unit of the batch statistics of reinforce_pp_baseline and of batch_scale"
    )
    order: int | None = Field(
        None, ge=1, description="maxrl: order T of the objective, the sum of pass@k / k for k up to T; null uses N - 1"
    )
    final_order: int | None = Field(
        None, ge=1, description="maxrl: the order goes from `order` to this, geometrically, until the run or its phase "
        "ends; null keeps it",
    )  # fmt: skip
    k: int = Field(16, ge=1, description="pass_at_k: k, below N")
    alpha: float = Field(0.5, ge=0, le=2, description="power: exponent; 0 is RLOO, 1 is MaxRL")
    batch_scale: bool = Field(
        False,
        description="normalize the advantages over the batch to mean 0 and standard deviation 1, as "
        "reinforce_pp_baseline does",
    )
    rarity: float = Field(
        0.0, ge=0, le=2, description="exponent of the rarity weights: correct rollouts of a class of n are weighted by "
        "n^-rarity, scaled to the mean 1 in their group; 0 switches them off, 1 gives all classes the same sum",
    )  # fmt: skip
    rarity_by: Literal["response", "answer"] = Field(
        "response", description="class of a correct rollout: its response | its answer, as the verifier normalizes it"
    )
    rarity_clip: float = Field(5.0, gt=1, description="largest rarity weight")
    rarity_shuffled: bool = Field(
        False, description="control: assign the rarity weights to the classes of each group at random"
    )

    @model_validator(mode="after")
    def _options_fit_the_estimator(self) -> Self:
        only = {"order": "maxrl", "final_order": "maxrl", "k": "pass_at_k", "alpha": "power"}
        wrong = next((name for name in only if name in self.model_fields_set and self._unused(name, only[name])), None)
        if wrong:
            raise ValueError(
                f"advantage.{wrong} = {getattr(self, wrong)} works only with advantage.estimator = {only[wrong]}, not "
                f"with {self.estimator}; remove it"
            )
        return self

    def _unused(self, name: str, estimator: str) -> bool:
        return self.estimator != estimator and getattr(self, name) != type(self).model_fields[name].default

    @model_validator(mode="after")
    def _rarity_options_need_rarity(self) -> Self:
        fields = type(self).model_fields
        changed = [n for n in fields if n.startswith("rarity_") and getattr(self, n) != fields[n].default]
        if changed and not self.rarity:
            raise ValueError(
                f"advantage.{changed[0]} = {getattr(self, changed[0])} has no effect with advantage.rarity = 0; remove "
                "it, or set advantage.rarity, for example 1"
            )
        return self

    @model_validator(mode="after")
    def _tokens_need_batch_statistics(self) -> Self:
        has_statistics = self.estimator == "reinforce_pp_baseline" or self.batch_scale
        if self.normalize_over == "tokens" and not has_statistics:
            raise ValueError(
                "advantage.normalize_over = tokens works only with batch statistics, not with "
                f"advantage.estimator = {self.estimator}; remove it, or set advantage.batch_scale: true"
            )
        return self


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
        None, gt=1, description="ppo: largest ratio of tokens with a negative advantage, usually 3; null for no bound"
    )
    entropy_coefficient: float = Field(
        0.0, ge=0, description="weight of the entropy bonus, the mean next-token entropy; 0 switches it off"
    )
    mask_truncated: bool = Field(
        False,
        description="remove truncated responses from the loss (overlong filtering); the group mean still counts them",
    )
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean", description="mean over all tokens | mean over responses of their token means | fixed denominator"
    )

    @model_validator(mode="after")
    def _sequence_clip_is_narrow(self) -> Self:
        if self.kind == "gspo" and (self.clip_low or 0) > 0.1:
            raise ValueError(
                "loss.kind = gspo clips the ratio of whole responses, which stays close to 1, and "
                f"loss.clip_low = {self.clip_low} has no effect; set loss.clip_low: 3e-4 and loss.clip_high: 4e-4"
            )
        return self


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

    @property
    def first_reset(self) -> str | None:
        """Name of the first setting that makes resets; None if there are none."""
        off = {"reset_every": 0, "reset_kl_above": None, "reset_patience": None}
        return next((name for name, value in off.items() if getattr(self, name) != value), None)

    @model_validator(mode="after")
    def _optimizer_needs_resets(self) -> Self:
        if self.reset_optimizer and not self.first_reset:
            raise ValueError(
                "reference.reset_optimizer clears AdamW at every reset, but no reset is set; set "
                "reference.reset_every, or reference.reset_optimizer: false"
            )
        return self
