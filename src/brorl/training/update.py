"""An update: what the learner reports of a step, for the metrics.

In: numbers that the learner measured. Out: a value that goes into the metrics as it is. None means not measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Update:
    """What a step did; means over its mini-batches, if nothing else is said.

    Attributes:
        loss: Policy loss, without the KL penalty.
        grad_norm: Global gradient norm before clipping.
        clip_share: Share of the summed |advantage| whose gradient the clip removed (CISPO: bounded).
        old_policy_kl: Mean over sampled tokens of old minus new log-prob, during the updates (the k1 estimate, nats).
        entropy: Minus the mean log-prob of the sampled tokens when they were sampled, nats per token.
        learning_rate: Of the last mini-batch.
        trained_nodes: Tree nodes that went through the loss.
        clip_low_share: The part of `clip_share` at the lower bound.
        clip_high_share: The part of it at the upper bound.
        reference_kl: Mean over sampled tokens of the penalty's estimate, during the updates (nats); None without a
            reference.
        bonus_entropy: Mean over sampled tokens of the entropy of the distribution that each was drawn from, during the
            updates (nats); None without an entropy bonus.
        mismatch_mean: Mean of exp(old - sampler) over the trained tokens that this step sampled; None if it trained on
            none of them, if old log-probs are not recomputed, or if the engine returns no log-probs.
        mismatch_max: The largest one.
        mismatch_kl: Estimate of KL(sampler || old), nats per token.
        masked_share: Share of the step's trained tokens whose weight the importance correction set to 0.
        nodes_per_pass: Most nodes of a forward pass, after the step.
        out_of_memory_retries: How often it was halved since the last step's end.
    """

    loss: float
    grad_norm: float
    clip_share: float
    old_policy_kl: float
    entropy: float
    learning_rate: float
    trained_nodes: int
    clip_low_share: float
    clip_high_share: float
    reference_kl: float | None
    bonus_entropy: float | None
    mismatch_mean: float | None
    mismatch_max: float | None
    mismatch_kl: float | None
    masked_share: float
    nodes_per_pass: int
    out_of_memory_retries: int
