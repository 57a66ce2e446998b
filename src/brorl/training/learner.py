"""The learner protocol: groups in, an updated model out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from brorl.algorithms.advantages import EstimateAdvantages
from brorl.algorithms.groups import Group
from brorl.arrays import FloatArray
from brorl.tree import RolloutTree


@dataclass(frozen=True)
class StepMetrics:
    """The measurements of a step of the learner; means over its mini-batches unless noted."""

    loss: float  # policy loss, without the KL penalty
    grad_norm: float  # global gradient norm before clipping
    clip_fraction: float  # fraction of the summed |advantage| whose gradient the clip removed (CISPO: bounded)
    # mean over sampled tokens of old minus new log-prob, during the updates (the k1 estimate, nats)
    old_policy_kl: float
    entropy: float  # minus the mean log-prob of the sampled tokens when they were sampled, nats per token
    learning_rate: float  # of the last mini-batch
    trained_nodes: int  # tree nodes that went through the loss
    clip_low_fraction: float  # the part of `clip_fraction` at the lower bound
    clip_high_fraction: float  # the part of it at the upper bound
    # mean over sampled tokens of the penalty's estimate, during the updates (nats); None without a reference
    reference_kl: float | None
    # mean over sampled tokens of the entropy of the distribution that each was drawn from, during the updates (nats);
    # None without an entropy bonus
    bonus_entropy: float | None
    # mean of exp(old - sampler) over the trained tokens that this step sampled; None if it trained on none of them, if
    # old log-probs are not recomputed, or if the engine returns no log-probs
    mismatch_mean: float | None
    mismatch_max: float | None  # the largest one
    mismatch_kl: float | None  # estimate of KL(sampler || old), nats per token
    masked_fraction: float  # fraction of the step's trained tokens whose weight the importance correction set to 0
    nodes_per_pass: int  # most nodes of a forward pass, after the step
    out_of_memory_retries: int  # how often it was halved since the last step's end


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
        """Return the log-prob (nats) of every node under the current weights, of the distribution of the draw."""
        ...

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the trained weights by name, whole and one by one; every rank iterates to the end."""
        ...

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Return the number of the model's parameters, or of those that are trained."""
        ...

    def save_pretrained(self, folder: Path) -> None:
        """Write weights and config in Hugging Face format to a folder that all ranks reach, averages below it in `ema`.

        A learner with several ranks writes its shards of the optimizer, the reference and the average too.
        """
        ...

    def exchange_average(self) -> None:
        """Exchange the current weights and their average; a second call restores both. Nothing may learn between."""
        ...

    def reset_reference(self, clear_optimizer: bool) -> None:
        """Take the current weights as the reference."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the next step, without weights; of several ranks `shards` names the tensors' folder."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`, of a learner with any number of ranks; `shards` is the folder's path."""
        ...

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load the moments of another run's optimizer from the state of its learner."""
        ...
