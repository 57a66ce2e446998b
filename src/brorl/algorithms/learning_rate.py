"""The learning rate: BroRL's square-root rule and a linear warm-up."""

from __future__ import annotations

from math import sqrt


def scaled_learning_rate(learning_rate: float, batch: int, reference_batch: int) -> float:
    """Scale a learning rate with the square root of the batch: eta * sqrt(B / B_0).

    Args:
        learning_rate: eta, tuned at the reference batch.
        batch: B, samples (rollouts) kept per step.
        reference_batch: B_0, samples per step that eta was tuned at.

    Returns:
        The learning rate for B; from 8,192 to 65,536 samples, 2.83 times eta.

    Source: BroRL (arXiv 2510.01180), section 4 (the rule).
    """
    return learning_rate * sqrt(batch / reference_batch)


def warmed_up(learning_rate: float, update: int, warmup_updates: int) -> float:
    """Return the learning rate of update 1, 2, ...: rising linearly to its full value at `warmup_updates`."""
    return learning_rate * min(1.0, update / warmup_updates) if warmup_updates else learning_rate
