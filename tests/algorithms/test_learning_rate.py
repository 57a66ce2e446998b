"""The square-root rule at values worked out by hand; `test_learner` tests the warm-up."""

import pytest

from brorl.training.settings import OptimizerSettings


@pytest.mark.parametrize(
    ("batch", "reference", "factor"),
    [(8192, 8192, 1.0), (32_768, 8192, 2.0), (65_536, 8192, 2.8284271247461903), (72, 8, 3.0), (72, None, 1.0)],
)
def test_learning_rate_grows_with_the_square_root_of_the_batch(batch: int, reference: int, factor: float) -> None:
    optimizer = OptimizerSettings(learning_rate=3e-6, reference_batch=reference)
    assert optimizer.scaled_rate(batch) == pytest.approx(3e-6 * factor, rel=1e-14)
