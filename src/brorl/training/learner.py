"""The learner protocol: groups in, an updated model out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from brorl.algorithms.advantages import EstimateAdvantages
from brorl.algorithms.groups import Group
from brorl.algorithms.settings import ImportanceCorrection, KLPenalty, PolicyLossSettings
from brorl.model.forward import Forward, TreeForward
from brorl.model.logits import NextToken
from brorl.tree import RolloutTree

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class LearnerSettings:
    """How the learner updates.

    Attributes:
        learning_rate: Full learning rate of AdamW, already scaled for the batch.
        mini_batches: Updates per step, M; groups are dealt out to them at random.
        next_token: From logits to the distribution that the rollouts are drawn from.
        betas: AdamW's decay rates.
        weight_decay: AdamW's weight decay.
        max_grad_norm: Gradients are scaled down to this global norm.
        warmup_updates: Updates over which the learning rate rises linearly.
        max_responses_per_outcome: Back-propagate at most this many correct and this many incorrect distinct responses
            per group, with weights that keep the gradient unbiased; 0 for all.
        recompute_old_logprobs: Take the old log-probs from the learner's own forward pass instead of the engine's.
        max_nodes: Nodes per forward pass; None for the default. Sets memory, not results.
        autocast: Compute in bfloat16 where that is safe; the weights stay as they are.
        loss: Kind, bounds and aggregation of the policy loss.
        kl: Penalty against a reference policy; None has no reference.
        importance: Correction for the policy that sampled; needs `recompute_old_logprobs`.
        max_new_tokens: Length limit of a response, which the constant aggregation of the loss needs.
        offload_reference: Keep the reference in the memory of the CPU between its uses.
        forward: How trees go through the model.
    """

    learning_rate: float
    mini_batches: int = 1
    next_token: NextToken = field(default_factory=NextToken)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_updates: int = 0
    max_responses_per_outcome: int = 0
    recompute_old_logprobs: bool = False
    max_nodes: int | None = None
    autocast: bool = False
    loss: PolicyLossSettings = field(default_factory=PolicyLossSettings)
    kl: KLPenalty | None = None
    importance: ImportanceCorrection = field(default_factory=ImportanceCorrection)
    max_new_tokens: int | None = None
    offload_reference: bool = False
    forward: Forward = field(default_factory=TreeForward)

    def __post_init__(self) -> None:
        if self.importance.correction != "none" and not self.recompute_old_logprobs:
            raise ValueError(
                f"the importance correction '{self.importance.correction}' compares the engine's log-probs with the "
                "learner's, and old log-probs are the engine's; set optimizer.old_logprobs: recompute, or "
                "importance.correction: none"
            )
        if self.loss.aggregation == "constant" and not self.max_new_tokens:
            raise ValueError(
                "the constant aggregation divides by rollouts times max_new_tokens; give max_new_tokens, at least 1"
            )


@dataclass(frozen=True)
class StepMetrics:
    """The measurements of a step of the learner; means over its mini-batches unless noted.

    Attributes:
        loss: Policy loss, without the KL penalty.
        grad_norm: Global gradient norm before clipping.
        clip_fraction: Fraction of the summed |advantage| whose gradient the clip removed (CISPO: bounded).
        old_policy_kl: Mean over sampled tokens of old minus new log-prob, during the updates (the k1 estimate, nats).
        entropy: Minus the mean log-prob of the sampled tokens when they were sampled, nats per token.
        learning_rate: Of the last mini-batch.
        trained_nodes: Tree nodes that went through the loss.
        clip_low_fraction: The part of `clip_fraction` at the lower bound.
        clip_high_fraction: The part of it at the upper bound.
        reference_kl: Mean over sampled tokens of the penalty's estimate, during the updates (nats); None without a
            reference.
        bonus_entropy: Mean over sampled tokens of the entropy of the distribution that each was drawn from, during the
            updates (nats); None without an entropy bonus.
        mismatch_mean: Mean of exp(old - sampler) over the trained tokens that this step sampled; None if it trained on
            none of them, if old log-probs are not recomputed, or if the engine returns no log-probs.
        mismatch_max: The largest one.
        mismatch_kl: Estimate of KL(sampler || old), nats per token.
        masked_fraction: Fraction of the step's trained tokens whose weight the importance correction set to 0.
        nodes_per_pass: Most nodes of a forward pass, after the step.
        out_of_memory_retries: How often it was halved since the last step's end.
    """

    loss: float
    grad_norm: float
    clip_fraction: float
    old_policy_kl: float
    entropy: float
    learning_rate: float
    trained_nodes: int
    clip_low_fraction: float
    clip_high_fraction: float
    reference_kl: float | None
    bonus_entropy: float | None
    mismatch_mean: float | None
    mismatch_max: float | None
    mismatch_kl: float | None
    masked_fraction: float
    nodes_per_pass: int
    out_of_memory_retries: int


class Learner(Protocol):
    """Updates a model from groups.

    A learner can have several ranks. Each rank then calls the same methods in the same order, with equal arguments:
    every method is collective, and returns the same on every rank.
    """

    def with_old_logprobs(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups that are carried to a later step, with the old log-probs that the later step needs."""
        ...

    def learn(
        self, groups: Sequence[Group], estimate_advantages: EstimateAdvantages, seed: int, lr_scale: float = 1.0
    ) -> StepMetrics:
        """Make the updates of one step.

        Args:
            groups: The batch.
            estimate_advantages: From the groups, after a KL penalty on their rewards, to the advantage of each distinct
                response of each group, shape [L].
            seed: Seed of all random choices of the step.
            lr_scale: Factor of the learning rate in this step.
        """
        ...

    def logprobs(self, trees: Sequence[RolloutTree]) -> list[FloatArray]:
        """Return the log-prob (nats) of every node under the current weights, at the sampling temperature."""
        ...

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the current weights by name, whole and one by one; every rank iterates to the end."""
        ...

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Return the number of the model's parameters, or of those that are trained."""
        ...

    def save_pretrained(self, folder: Path) -> None:
        """Write the weights and the model's config in Hugging Face format.

        A learner with several ranks writes its shards of the optimizer and the reference too.

        Args:
            folder: An existing folder, which all ranks can reach.
        """
        ...

    def reset_reference(self, clear_optimizer: bool) -> None:
        """Take the current weights as the reference."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next step depends on, without the weights.

        With several ranks `shards` names the subfolder into which `save_pretrained` writes the tensors.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`, of a learner with any number of ranks.

        Args:
            state: The state as `load_state` of a checkpoint returns it: `shards` is the path of the folder.
        """
        ...

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load the moments of another run's optimizer from the state of its learner."""
        ...
