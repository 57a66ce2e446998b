"""The square-root rule and the warm-up at values worked out by hand."""

import pytest

from brorl.algorithms.learning_rate import scaled_learning_rate, warmed_up


@pytest.mark.parametrize(
    ("batch", "reference", "factor"),
    [(8192, 8192, 1.0), (32_768, 8192, 2.0), (65_536, 8192, 2.8284271247461903), (2048, 8192, 0.5), (72, 8, 3.0)],
)
def test_learning_rate_grows_with_the_square_root_of_the_batch(batch: int, reference: int, factor: float) -> None:
    assert scaled_learning_rate(3e-6, batch, reference) == pytest.approx(3e-6 * factor, rel=1e-14)


def test_warm_up_is_linear_and_then_constant() -> None:
    rates = [warmed_up(0.8, update, 4) for update in range(1, 8)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8], rel=1e-15)
    assert [warmed_up(0.8, update, 0) for update in (0, 1, 9)] == [0.8, 0.8, 0.8]
    assert warmed_up(0.8, 1, 1) == 0.8
