"""Which arm is best where: against plain sorting and plain resampling."""

import numpy as np
import pytest
from comparisons import arm_of, comparison_of, run_of, score_of

from brorl.comparison.results import frontier
from brorl.comparison.scores import Comparison
from brorl.cost import Cost
from brorl.evaluation.paired import paired_difference
from brorl.evaluation.pass_at_k import pass_at_k


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


def test_what_is_not_matched_is_left_out(rng: np.random.Generator) -> None:
    counts = np.sort(rng.integers(0, 9, (4, 3, 5, 20)), axis=0)  # the later, the better
    overshoot = {
        (3, 10.0): 3.0,
        (3, 20.0): 1.5,
        **{(a, 40.0): 1.6 for a in range(4)},
        **{(a, 80.0): 2 for a in range(3)},
    }
    found = frontier(comparison_from(counts, (10.0, 20.0, 40.0, 80.0), 32, (4, 16, 64, 256), overshoot))
    # without the best another is the best of the rest; who alone is matched has beaten nobody
    assert [(best.eval_point, best.arm) for best in found] == [(10.0, "arm 2"), (20.0, "arm 2")]
