"""Which learning rate won each tuning comparison, written as the value of a `--sweep`.

    python examples/plateau/rates.py runs/plateau/three/knee/rate-N16 runs/plateau/three/knee/rate-N512  # 1e-4,3e-5

In: folders of finished comparisons, each of one N with several learning rates, in the order of N. Out: for each the
rate with the highest held-out pass@1 at the budget, on stdout; how close it was on stderr.
"""

import sys
from pathlib import Path

from brorl.comparison.arms import scores_at
from brorl.comparison.reading import read_comparison


def best_rate(folder: Path) -> str:
    """Return the learning rate of the arm with the highest pass@1 at the budget."""
    comparison = read_comparison(folder)
    score = {
        arm.differs["optimizer.learning_rate"]: float(scores_at(comparison, arm, comparison.budget).mean())
        for arm in comparison.arms
    }
    told = ", ".join(f"{rate}: {value:.3f}" for rate, value in score.items())
    print(f"{folder.name}: pass@1 {told}", file=sys.stderr)
    return max(score, key=score.__getitem__)


if __name__ == "__main__":
    print(",".join(best_rate(Path(folder)) for folder in sys.argv[1:]))
