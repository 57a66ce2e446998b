"""Objectives proposed elsewhere, as factors on an outcome weight; and the brorl command with one of them.

    python examples/plateau/objectives.py focal:2 train examples/plateau/three.yaml --advantage.estimator=maxrl

| objective | factor on the weight w(N, c) | source |
|---|---|---|
| `focal:GAMMA` | (1 - c/N)^GAMMA | F-GRPO (arXiv 2602.06717) |
| `spread:SIZE` | N^2 k (n - k) / (n^2 c (N - c)), for a subset of n = SIZE rollouts | PODS (arXiv 2504.13818) |
| `solved:VISITS` | replaces a prompt whose pass rate was above 1/2 in its last visits | arXiv 2606.15455 |

A maximum-variance subset has k correct rollouts, as near to n/2 as c correct and N - c incorrect ones allow. Its mean
gradient, over the draw of the subset, is that of all N rollouts with this factor. `optimizer.max_responses_per_outcome`
then saves the work, with a correction for what it leaves out.

The factors depend only on counts, so docs/explanation/theory.md says what each objective is. `solved` depends on
earlier steps only, which weights prompts and biases nothing. Its visits are forgotten when a run is resumed. The pass
rate of the visit itself decides with `dynamic_sampling.max_pass_rate`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence

from brorl.algorithms import advantages
from brorl.algorithms.advantages import OutcomeWeight, outcome_weighted
from brorl.algorithms.groups import Group
from brorl.arrays import FloatArray
from brorl.cli import main
from brorl.training.settings import DynamicSamplingSettings


def focal(num_rollouts: int, num_correct: int, gamma: float) -> float:
    """Return (1 - c/N)^gamma."""
    return float((1 - num_correct / num_rollouts) ** gamma)


def spread(num_rollouts: int, num_correct: int, size: float) -> float:
    """Return the factor of a maximum-variance subset of `size` rollouts, 2 or more; 0 if all are correct or none is."""
    num_wrong = num_rollouts - num_correct
    if not (num_correct and num_wrong):
        return 0.0
    size = min(int(size), num_rollouts)
    chosen = max(min(size // 2, num_correct), size - num_wrong)
    return num_rollouts**2 * chosen * (size - chosen) / (size**2 * num_correct * num_wrong)


FACTORS: dict[str, Callable[[int, int, float], float]] = {"focal": focal, "spread": spread}


class Visits:
    """The pass rates of prompts in the steps so far."""

    def __init__(self, num_visits: int) -> None:
        self._num_visits = num_visits
        self._rates: dict[str, dict[int, float]] = defaultdict(dict)  # by prompt and version of the weights

    def is_open(self, group: Group) -> bool:
        """Whether any of the last visits before this one had a pass rate of at most 1/2."""
        rates = self._rates[group.prompt.id]
        rates[group.version] = group.num_correct / max(group.num_verified, 1)
        earlier = [rate for version, rate in rates.items() if version < group.version][-self._num_visits :]
        return len(earlier) < self._num_visits or min(earlier) <= 0.5


def use(objective: str) -> None:
    """Make this process train with an objective such as `focal:2`."""
    name, _, value = objective.partition(":")
    if (
        name not in (*FACTORS, "solved")
        or not value.replace(".", "", 1).isdigit()
        or (name == "solved" and "." in value)
    ):
        sys.exit(f"the objective must be focal:GAMMA, spread:SIZE or solved:VISITS, got {objective}")
    if name == "solved":
        keeps, visits = DynamicSamplingSettings.keeps, Visits(int(value))
        DynamicSamplingSettings.keeps = lambda self, group: keeps(self, group) and visits.is_open(group)
        return
    factor, parameter = FACTORS[name], float(value)

    def weighted(groups: Sequence[Group], weight: OutcomeWeight) -> list[FloatArray]:
        return outcome_weighted(groups, lambda n, c: weight(n, c) * factor(n, c, parameter))

    advantages.outcome_weighted = weighted


if __name__ == "__main__":
    use(sys.argv.pop(1) if len(sys.argv) > 1 else "nothing")
    sys.exit(main())
