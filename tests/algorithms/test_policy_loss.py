"""The edges of the policy losses; `training/test_learner_losses.py` compares them with loops over the N rollouts."""

import math

import numpy as np
import pytest

from brorl.algorithms.losses import gspo_loss
from brorl.algorithms.settings import PolicyLossSettings
from brorl.tree import RolloutTree

LOW, HIGH = 0.15, 0.3


def test_gspo_ratios_that_overflow_count_only_where_they_are_not_clipped() -> None:
    """A response that is clipped, or has no advantage, adds nothing infinite; another one's loss is infinite."""
    tree = RolloutTree.from_responses([1], [[1], [2], [3]])
    new, old = np.zeros(3), np.full(3, -1e4)
    for advantage_L, loss in (([0.0, 0.0, 0.0], 0.0), ([0.0, 2.0, 0.0], -2 * (1 + HIGH)), ([0.0, 0.0, -1.0], np.inf)):
        got = gspo_loss(tree, np.array(advantage_L), new, old, clip_low=LOW, clip_high=HIGH, denominator=1)
        assert got.loss == pytest.approx(loss)
        assert np.isfinite(got.coefficient_M).all() == np.isfinite(loss)


def test_senseless_settings_are_refused() -> None:
    for wrong, message in (
        ({"clip_low": 0.0}, "greater than 0"),
        ({"clip_low": 1.1}, "less than or equal to 1"),
        ({"clip_high": 0.0}, "greater than 0"),
        ({"dual_clip": 1.28}, r"above 1 \+ loss.clip_high = 1.28, got 1.28; 3 is usual"),
        ({"dual_clip": math.inf}, "finite number"),
        ({"dual_clip": 3.0, "kind": "cispo"}, "part of the ppo loss, and loss.kind = cispo"),
        ({"entropy_coefficient": -0.1}, "greater than or equal to 0"),
    ):
        with pytest.raises(ValueError, match=message):
            PolicyLossSettings(**wrong)  # type: ignore[arg-type]
