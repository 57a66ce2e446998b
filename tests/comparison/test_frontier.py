"""Which arm is best where: against plain sorting and plain resampling."""

import numpy as np
import pytest
from comparisons import arm_of, comparison_of, run_of, score_of

from brorl.comparison.arms import Comparison
from brorl.comparison.results import frontier
from brorl.cost import Cost
from brorl.evaluation.paired import paired_difference
from brorl.evaluation.pass_at_k import pass_at_k

_POINTS = (10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


def comparison_from(
    counts: np.ndarray,
    eval_points: tuple[float, ...],
    num_samples: int,
    numbers: tuple[int, ...],
    overshoot: dict | None = None,
) -> Comparison:
    """counts: [arms, seeds, evaluations, prompts], the first evaluation that of the start."""
    arms = []
    for a, of_arm in enumerate(counts):
        spent = [0.0, *(eval_point * (overshoot or {}).get((a, eval_point), 1.01) for eval_point in eval_points)]
        runs = [
            run_of(s, [score_of(Cost(seconds=c), row) for c, row in zip(spent, run, strict=True)])
            for s, run in enumerate(of_arm)
        ]
        arms.append(arm_of(f"arm {a}", runs, numbers[a]))
    return comparison_of(arms, eval_points, num_samples)


def crossing_counts(generator: np.random.Generator, seeds: int, prompts: int) -> np.ndarray:
    """Four arms: the larger, the slower and the higher; arms 0, 1, 2, 3 are best one after the other."""
    logit_P = generator.normal(-1, 1.5, prompts)
    counts = []
    for scale, top in ((6, 0.8), (40, 1.9), (130, 3.2), (300, 5.2)):
        lift_E = [0.0, *(top * (1 - np.exp(-eval_point / scale)) for eval_point in _POINTS)]
        chance_EP = 1 / (1 + np.exp(-logit_P - np.array(lift_E)[:, None]))
        counts.append(generator.binomial(32, chance_EP, (seeds, len(lift_E), prompts)))
    return np.array(counts)


@pytest.mark.parametrize("k", [1, 3])
def test_the_best_are_those_of_plain_sorting(rng: np.random.Generator, k: int) -> None:
    counts = rng.integers(0, 9, (3, 3, 3, 20))
    comparison = comparison_from(counts, (5.0, 9.0), 8, (4, 16, 64))
    found = frontier(comparison, k)
    assert [best.eval_point for best in found] == [5.0, 9.0]

    def scores(a: int, m: int) -> np.ndarray:
        return np.stack([pass_at_k(run[m + 1], 8, k) for run in counts[a]])

    for m, best in enumerate(found):
        means = [scores(a, m).mean() for a in range(3)]
        first, second, _ = sorted(range(3), key=lambda a: -means[a])
        assert (best.arm, best.second) == (f"arm {first}", f"arm {second}")
        difference = paired_difference(scores(second, m), scores(first, m), seeds_paired=True)
        assert best.lead == difference.difference
        assert best.lead_shown == (difference.conclusion == "B leads")


def test_slower_arms_are_best_later() -> None:
    counts = crossing_counts(np.random.default_rng(4), 5, 250)
    found = frontier(comparison_from(counts, _POINTS, 32, (4, 16, 64, 256)))
    means = counts.mean((1, 3))[:, 1:] / 32
    by_point = [f"arm {a}" for a in means.argmax(0)]
    assert [best.arm for best in found] == by_point
    assert list(dict.fromkeys(by_point)) == [f"arm {a}" for a in range(4)]


def test_what_is_not_matched_is_left_out_and_named() -> None:
    counts = crossing_counts(np.random.default_rng(5), 3, 60)
    overshoot = {(3, 10.0): 3.0, (3, 20.0): 1.5, (0, 320.0): 1.2, (1, 320.0): 1.2, (2, 320.0): 1.2}
    comparison = comparison_from(counts, _POINTS, 32, (4, 16, 64, 256), overshoot)
    found = frontier(comparison)
    # the best is left out: another is best of the rest
    without = frontier(comparison_from(counts, _POINTS, 32, (4, 16, 64, 256), {(0, 10.0): 1.2}))
    assert without[0].arm != "arm 0"
    # who alone is matched at an evaluation point has beaten nobody
    assert [best.eval_point for best in found] == [
        m for m in _POINTS if sum(eval_point == m for _, eval_point in overshoot) < 3
    ]
    assert len(found) < len(_POINTS)
    assert found[0].arm == "arm 0"
    # none matched at an evaluation point: no best there
    nowhere = comparison_from(counts, _POINTS, 32, (4, 16, 64, 256), {(a, 40.0): 1.6 for a in range(4)})
    assert 40.0 not in [best.eval_point for best in frontier(nowhere)]
