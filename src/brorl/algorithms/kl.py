"""The KL penalty against a reference policy, estimated on the sampled tokens.

With x = log pi - log ref at a token that pi sampled, the estimators of KL(pi || ref) are

    k1 = x        k2 = x^2 / 2        k3 = exp(-x) - 1 + x

Each is a function of (prefix, token), hence of the node: exact on the tree, weighted by counts. k1 and k3 have the
right mean, k2 only to second order in x. In a *loss* the mean gradient matters, which is on-policy that of KL(pi ||
ref) for k2 and that of KL(ref || pi) for k3. For k1 it is zero, E[grad log pi] = 0: k1 in the loss only adds noise, and
is there for comparisons. k1 in the reward gives the gradient of KL(pi || ref) of whole responses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

import numpy as np
import torch
from torch import Tensor

from brorl.algorithms.groups import Group, known
from brorl.algorithms.settings import KLEstimator, KLPenalty


def kl_estimates(logprob_K: Tensor, reference_logprob_K: Tensor, estimator: KLEstimator, clamp: float) -> Tensor:
    """Estimate KL(policy || reference) at each node in nats, shape [K], differentiable in `logprob_K`.

    `clamp` is the largest log-ratio either way, in nats.

    Source: Schulman, "Approximating KL divergence" (2020).
    """
    log_ratio_K = (logprob_K - reference_logprob_K).clamp(-clamp, clamp)
    match estimator:
        case "k1":
            return log_ratio_K
        case "k2":
            return log_ratio_K.square() / 2
        case "k3":
            return torch.expm1(-log_ratio_K) + log_ratio_K
        case _:
            assert_never(estimator)


def penalized_group(group: Group, penalty: KLPenalty) -> Group:
    """Subtract the KL penalty of each response from its reward; verdicts do not change.

    The group has the log-probs of the policy that sampled, and of the reference. The penalty is coefficient * (sum of
    the estimates over the response's tokens).

    Source: the KL reward of InstructGPT (arXiv 2203.02155, Eq. 2), per response as in RLOO (arXiv 2402.14740).
    """
    estimate_M = kl_estimates(
        torch.from_numpy(np.array(known(group.old_logprob_M))),
        torch.from_numpy(np.array(known(group.reference_logprob_M))),
        penalty.estimator,
        penalty.clamp,
    ).numpy()
    penalty_L = penalty.coefficient * group.tree.sum_along_paths(estimate_M)[group.tree.leaf]
    return replace(group, reward_L=group.reward_L - penalty_L)
