"""The estimators against sums over a whole vocabulary (their means are exact) and the reward against loops."""

import math

import numpy as np
import pytest
import torch

from brorl.algorithms.losses import kl_estimates
from brorl.algorithms.settings import KLPenalty

NO_CLAMP = 50.0


def policies(rng: np.random.Generator, size: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy, with gradient, and log-probs of a reference."""
    logits = torch.from_numpy(rng.normal(size=size)).requires_grad_()
    return logits, torch.log_softmax(torch.from_numpy(rng.normal(size=size)), 0)


def divergence(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first.exp() * (first - second)).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_k1_and_k3_is_the_divergence(estimator: str, rng: np.random.Generator) -> None:
    logits, reference = policies(rng)
    policy = torch.log_softmax(logits, 0).detach()
    mean = float((policy.exp() * kl_estimates(policy, reference, estimator, NO_CLAMP)).sum())
    assert mean == pytest.approx(float(divergence(policy, reference)), rel=1e-10)


def test_the_mean_of_k2_is_the_divergence_only_to_second_order(rng: np.random.Generator) -> None:
    """Ten times closer, its error is a thousand times smaller."""
    direction, centre = rng.normal(size=11), rng.normal(size=11)
    errors = []
    for size in (1e-1, 1e-2):
        policy = torch.log_softmax(torch.from_numpy(centre + size * direction), 0)
        reference = torch.log_softmax(torch.from_numpy(centre), 0)
        mean = (policy.exp() * kl_estimates(policy, reference, "k2", NO_CLAMP)).sum()
        errors.append(abs(float(mean - divergence(policy, reference))))
    assert errors[1] < errors[0] / 100
    assert errors[0] > 0


def test_a_clamp_of_the_square_root_of_20_is_k2_bounded_at_10(rng: np.random.Generator) -> None:
    """The rule of public code, which bounds the log-ratio at 20 and the estimate at 10: values and gradients."""
    log_ratio = torch.from_numpy(rng.normal(size=500) * 8).requires_grad_()
    own = kl_estimates(log_ratio, torch.zeros(500), "k2", math.sqrt(20))
    public = (log_ratio.clamp(-20, 20) ** 2 / 2).clamp(-10, 10)
    assert 0 < int((public == 10).sum()) < 500
    assert own.tolist() == pytest.approx(public.tolist(), rel=1e-12)
    gradients = [torch.autograd.grad(values.sum(), log_ratio)[0].tolist() for values in (own, public)]
    assert gradients[0] == gradients[1]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_mean_gradient_of_each_as_a_loss_on_policy(estimator: str, rng: np.random.Generator) -> None:
    """k2 has the gradient of KL(pi || ref), k3 that of KL(ref || pi), k1 none."""
    logits, reference = policies(rng)
    policy = torch.log_softmax(logits, 0)
    weight = policy.detach().exp()  # draws do not depend on the parameters
    (got,) = torch.autograd.grad((weight * kl_estimates(policy, reference, estimator, NO_CLAMP)).sum(), logits)
    policy = torch.log_softmax(logits, 0)
    target = {"k1": 0 * policy.sum(), "k2": divergence(policy, reference), "k3": divergence(reference, policy)}[
        estimator
    ]
    (expected,) = torch.autograd.grad(target, logits)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_senseless_settings_are_refused() -> None:
    for wrong, message in (
        ({"coefficient": -1.0}, "greater than or equal to 0"),
        ({"coefficient": math.nan}, "finite number"),
        ({"coefficient": 1.0, "estimator": "k4"}, "'k1', 'k2' or 'k3'"),
        ({"coefficient": 1.0, "placement": "advantage"}, "'loss' or 'reward'"),
        ({"coefficient": 1.0, "clamp": 0.0}, "greater than 0"),
    ):
        with pytest.raises(ValueError, match=message):
            KLPenalty(**wrong)  # type: ignore[arg-type]
