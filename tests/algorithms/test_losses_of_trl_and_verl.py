"""Losses under the settings that docs/how-to/from_trl_or_verl.md names, against the formulas of TRL and verl."""

from typing import Any

import pytest
import torch
from torch import Tensor

from brorl.algorithms.losses import cispo_loss, clipped_policy_loss, kl_estimates
from brorl.algorithms.settings import KLEstimator
from each_row import each_row


def ppo_of_trl(ratio: Tensor, advantage: Tensor, low: float, high: float, delta: float | None) -> Tensor:
    bounded = ratio.clamp(1 - low, 1 + high)
    ratio = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.min(ratio * advantage, bounded * advantage)


def ppo_of_verl(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float) -> Tensor:
    worse = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    return torch.where(advantage < 0, torch.min(-advantage * dual, worse), worse)


@each_row(
    ("low", "high", "dual", "loss_of"),
    [
        (0.2, 0.2, None, lambda r, a, _: ppo_of_trl(r, a, 0.2, 0.2, None)),
        (0.1, 0.3, 2.0, lambda r, a, _: ppo_of_trl(r, a, 0.1, 0.3, 2.0)),
        (0.2, 0.28, 3.0, lambda r, a, _: ppo_of_verl(r, a, 0.2, 0.28, 3.0)),
        (1.0, 0.5, "cispo", lambda r, a, new: -r.clamp(max=1.5).detach() * a * new),  # epsilon_high = 1.5 of TRL
        (0.2, 0.5, "cispo", lambda r, a, new: -r.clamp(0.8, 1.5).detach() * a * new),  # of verl
    ],
)
def test_the_gradient_of_the_policy_loss(low: float, high: float, dual: Any, loss_of: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(500, generator=generator, dtype=torch.float64)
    new = (old + torch.randn(500, generator=generator, dtype=torch.float64)).requires_grad_()
    advantage = torch.randn(500, generator=generator, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(loss_of((new - old).exp(), advantage, new).mean(), new)
    weights = (advantage.clamp(min=0), advantage.clamp(max=0))
    bounds: dict[str, Any] = {"clip_low": low, "clip_high": high, "denominator": 500}
    if dual == "cispo":
        got = cispo_loss(new, old, *weights, **bounds)
    else:
        got = clipped_policy_loss(new, old, *weights, dual_clip=dual, **bounds)
    torch.testing.assert_close(torch.autograd.grad(got.loss, new)[0], wanted)


@pytest.mark.parametrize(("corrected", "estimator"), [(True, "k2"), (False, "k3")])
def test_the_expected_gradient_of_the_kl_penalty_of_trl(corrected: bool, estimator: KLEstimator) -> None:
    """`use_bias_correction_kl` multiplies k3 by the ratio of the policy, which gives the gradient of k2."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    log_reference = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    log_policy = logits.log_softmax(0)
    sampled = log_policy.detach().exp()  # of every token, which stands for the expectation
    log_ratio = log_reference - log_policy
    of_token = log_ratio.exp() - log_ratio - 1
    if corrected:
        of_token = of_token * (log_policy - log_policy.detach()).exp()
    (wanted,) = torch.autograd.grad((sampled * of_token).sum(), logits, retain_graph=True)
    estimates = kl_estimates(log_policy, log_reference, estimator, clamp=10.0)
    (got,) = torch.autograd.grad((sampled * estimates).sum(), logits)
    torch.testing.assert_close(got, wanted)
