"""Settings of the training loop: rollouts per prompt, updates, reference, phases, budget, warnings."""

from __future__ import annotations

from math import cos, pi, sqrt
from typing import TYPE_CHECKING, Annotated, Literal, Self, assert_never

from pydantic import Field, model_validator

from brorl.algorithms.settings import AdvantageSettings
from brorl.cost import Unit, check_within_limit
from brorl.model.settings import States
from brorl.section import Section

if TYPE_CHECKING:
    from brorl.algorithms.groups import Group

DecayRate = Annotated[float, Field(ge=0, lt=1)]


class DynamicSamplingSettings(Section):
    """Train only on mixed groups: groups with both correct and incorrect rollouts."""

    enabled: bool = Field(
        True, description="train only on groups with 0 < number correct < N, and sample more prompts to replace others"
    )
    max_pass_rate: float = Field(
        1.0, gt=0, le=1, description="train only on groups with at most this fraction of correct rollouts; 0.5 keeps "
        "more coverage (docs/how-to/broaden.md)",
    )  # fmt: skip
    max_tries: int = Field(
        10, ge=1, description="end the run after this many rounds in a row without a group to train on"
    )

    def keeps(self, group: Group) -> bool:
        """Whether to train on a group."""
        return not self.enabled or 0 < group.num_correct <= self.max_correct(group.num_verified)

    def max_correct(self, num_rollouts: int) -> int:
        """Return the largest number of correct rollouts in a group that is kept: at most N - 1."""
        return min(num_rollouts - 1, int(self.max_pass_rate * num_rollouts + 1e-9))


class OptimizerSettings(Section):
    """AdamW and the mini-batches of a step."""

    learning_rate: float = Field(
        2e-6, gt=0, description="learning rate; scaled with the batch if reference_batch is set"
    )
    reference_batch: int | None = Field(
        None, ge=1, description="rollouts per step at which learning_rate was tuned; the effective rate is "
        "learning_rate * sqrt(rollouts per step / reference_batch); null uses learning_rate unscaled",
    )  # fmt: skip
    mini_batches: int = Field(4, ge=1, description="mini-batches per step, one update each")
    betas: Annotated[tuple[DecayRate, DecayRate], Field(strict=False)] = Field(
        (0.9, 0.95), description="AdamW's decay rates"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay")
    states: States = Field(
        "device", description="where AdamW's moments are kept between updates: on the model's device | in CPU memory, "
        "which saves 8 bytes per trained weight on a GPU and does not change the updates | on the device in 8 bits, "
        "which saves 6 bytes per trained weight and rounds the moments",
    )  # fmt: skip
    max_grad_norm: float = Field(1.0, gt=0, description="maximum gradient norm; larger gradients are clipped")
    warmup_updates: int = Field(0, ge=0, description="updates of linear learning-rate warmup")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="learning rate after the warmup: constant | falls over the steps or the budget, "
        "linearly | along a cosine",
    )  # fmt: skip
    decay_from: float = Field(
        0.0, ge=0, lt=1, description="fraction of the steps or the budget at which the learning rate starts to fall"
    )
    final_rate: float = Field(
        0.1, ge=0, le=1, description="learning rate at the end, as a fraction of learning_rate, if `schedule` falls"
    )
    ema_decay: float | None = Field(
        None, gt=0, lt=1, description="also keep an average of the weights with this decay per update (EMA), evaluate "
        "it, and save it in the folder ema of each checkpoint; null for no average",
    )  # fmt: skip
    max_responses_per_outcome: int = Field(
        0, ge=0, description="train on at most this many correct and this many incorrect distinct responses per group, "
        "weighted to stay unbiased; 0 for all",
    )  # fmt: skip
    old_logprobs: Literal["engine", "recompute"] = Field(
        "engine", description="old-policy log-probs: from sampling | from a forward pass in the learner"
    )
    from_checkpoint: bool = Field(False, description="start with the optimizer state of the checkpoint in `model`")

    @model_validator(mode="after")
    def _decay_needs_a_schedule(self) -> Self:
        defaults = type(self).model_fields
        for name in ("decay_from", "final_rate"):
            if self.schedule == "constant" and getattr(self, name) != defaults[name].default:
                raise ValueError(
                    f"optimizer.{name} = {getattr(self, name):g} needs a falling learning rate, but "
                    "optimizer.schedule = constant; set optimizer.schedule: linear or cosine"
                )
        return self

    def decay(self, progress: float) -> float:
        """Return the factor for the learning rate at a given fraction of the steps or the budget, 0 to 1."""
        fallen = min(max((progress - self.decay_from) / (1 - self.decay_from), 0.0), 1.0)
        match self.schedule:
            case "constant":
                return 1.0
            case "linear":
                left = 1 - fallen
            case "cosine":
                left = (1 + cos(pi * fallen)) / 2
            case _:
                assert_never(self.schedule)
        return self.final_rate + (1 - self.final_rate) * left

    def scaled_rate(self, samples: int) -> float:
        """Return the learning rate for B samples per step, eta * sqrt(B / B_0).

        With B_0 = 8,192, it is 2.83 eta for 65,536 samples.

        Source: BroRL (arXiv 2510.01180), section 4.
        """
        return self.learning_rate * (1.0 if self.reference_batch is None else sqrt(samples / self.reference_batch))


class ReferenceSettings(Section):
    """The reference policy of the KL penalty: the policy at the start, or at the last reset."""

    offload: bool = Field(False, description="keep the reference's weights in CPU memory while unused")
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
        """Name of the first setting that causes resets, or None."""
        off = {"reset_every": 0, "reset_kl_above": None, "reset_patience": None}
        return next((name for name, value in off.items() if getattr(self, name) != value), None)

    @model_validator(mode="after")
    def _optimizer_needs_resets(self) -> Self:
        if self.reset_optimizer and not self.first_reset:
            raise ValueError(
                "reference.reset_optimizer clears AdamW's moments at every reset, but resets are not enabled; set "
                "reference.reset_every, or reference.reset_optimizer: false"
            )
        return self


class PhaseSettings(Section):
    """A part of a run with its own advantages and learning rate."""

    name: str = Field(min_length=1, description="name of the phase in the console and the report")
    until: float = Field(
        1.0, gt=0, le=1, description="fraction of the budget at which the phase ends; 1 for the last one"
    )
    until_coverage_stalls: int | None = Field(
        None, ge=1, description="end the phase after this many evaluations without a new best pass@k for the largest k"
    )
    advantage: AdvantageSettings = Field(AdvantageSettings(), description="advantage settings, as in `advantage`")
    learning_rate: float | None = Field(
        None, gt=0, description="replaces optimizer.learning_rate in the phase, before scaling by reference_batch"
    )

    @property
    def title(self) -> str:
        """A short description of the phase's advantages and learning rate."""
        rate = "" if self.learning_rate is None else f", learning rate {self.learning_rate:.1e}"
        return self.advantage.title + rate


class BudgetSettings(Section):
    """Limit on a run's cost, excluding evaluations. With both a budget and `steps`, the first reached ends the run."""

    unit: Unit = Field(
        "samples",
        description="unit of the budget: steps | seconds | samples | unique_tokens (a shared prefix counts once)",
    )
    limit: float | None = Field(
        None, gt=0, description="the run ends with the step that reaches this limit; as an override it also replaces "
        "the recipe's `steps`, unless `steps` is overridden too; null for no budget",
    )  # fmt: skip
    eval_points: Annotated[tuple[float, ...], Field(strict=False)] = Field(
        (), description="additional evaluation points, in the budget's unit"
    )
    pause_at: float | None = Field(
        None, description="the run pauses with the step that reaches this much of the budget: it is evaluated and "
        "saved, and `brorl resume` continues it; null for no pause"
    )  # fmt: skip

    @model_validator(mode="after")
    def _within_the_limit(self) -> Self:
        check_within_limit("budget.eval_points", self.eval_points, self.limit)
        check_within_limit("budget.pause_at", () if self.pause_at is None else (self.pause_at,), self.limit)
        return self


class CollapseLimits(Section):
    """Warnings of model collapse, produced by `training/collapse.py`.

    Why a tenth of the entropy: training sharpens every model (the quickstart keeps about half of its entropy while its
    pass@1 more than doubles), but a model that has lost 90% of it samples nearly the same response every time, so no
    group is mixed. Why a KL of one nat: the sampled tokens are then, in geometric mean, 2.7 times as likely as under
    the reference, and a response of 100 tokens is e^100 times as likely.
    """

    entropy_fraction: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="warn when the entropy is below this fraction of its first values; 0 for never",
    )
    reference_kl: float | None = Field(
        1.0, gt=0, description="warn when the KL from the reference exceeds this, in nats per token; null for never"
    )
    patience: int = Field(
        3, ge=1, description="warn after this many evaluations in a row with lower pass@k and no higher pass@1"
    )
    stop: bool = Field(False, description="end the run at the first warning, with a checkpoint")


class DiagnosticsSettings(Section):
    """Measurements in addition to the sampled and unsampled mass of every step."""

    held_out_check_every: int = Field(
        25, ge=0, description="steps between held-out checks of an update, on rollouts not trained on; 0 for none"
    )
    held_out_rollouts: int = Field(32, ge=2, description="extra rollouts per prompt for a held-out check")
