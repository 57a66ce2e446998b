"""Aggregation: how the losses of tokens become one number.

In: trees. Out: a weight for each distinct response's tokens, and one explicit denominator for the batch. All three
kinds are a weighted sum over tokens divided by a number that is known before any pass, so they are exact on the tree
and in any number of parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from brorl.algorithms.settings import Aggregation
from brorl.tree import RolloutTree


def response_weights(tree: RolloutTree, aggregation: Aggregation) -> NDArray[np.float64]:
    """Return the factor of the loss of each token of a distinct response.

    Args:
        tree: The rollouts.
        aggregation: "sequence_mean" gives 1 / T_l to the T_l tokens of response l, the others give 1.

    Returns:
        Weights, shape [L]; counts are not applied.
    """
    match aggregation:
        case "sequence_mean":
            return 1.0 / tree.length
        case "token_mean" | "constant":
            return np.ones(tree.num_responses)
        case _:
            assert_never(aggregation)


def loss_denominator(
    trees: Sequence[RolloutTree], aggregation: Aggregation, max_new_tokens: int | None, mask_truncated: bool = False
) -> int:
    """Return the denominator of the summed, weighted losses of all tokens of a batch.

    Args:
        trees: The whole batch: all of its rollouts, also those that are not back-propagated.
        aggregation: "token_mean": the sampled tokens; long responses have a larger weight. "sequence_mean": the
            rollouts; each has the same weight. "constant": rollouts times `max_new_tokens`; the weight of a token does
            not depend on the other samples.
        max_new_tokens: Most tokens of a response; "constant" needs it.
        mask_truncated: Count finished rollouts only.

    Returns:
        The denominator, at least 1.

    Source: token mean: DAPO (arXiv 2503.14476, Eq. 12); sequence mean: GRPO (DeepSeekMath, arXiv 2402.03300, Eq. 3);
        constant: Dr. GRPO (arXiv 2503.20783).
    """
    counts = [t.leaf_count * t.finished if mask_truncated else t.leaf_count for t in trees]
    num_rollouts = max(1, sum(int(count_L.sum()) for count_L in counts))
    match aggregation:
        case "token_mean":
            return max(1, sum(int(count_L @ t.length) for count_L, t in zip(counts, trees, strict=True)))
        case "sequence_mean":
            return num_rollouts
        case "constant":
            if max_new_tokens is None:
                raise ValueError(
                    "the constant aggregation divides by rollouts times max_new_tokens; give max_new_tokens"
                )
            return num_rollouts * max_new_tokens
        case _:
            assert_never(aggregation)
