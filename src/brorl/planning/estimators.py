"""The estimators at each N, for the pilot's pass rates: where the gradient goes, its noise, and the choice for an aim.

The rule of each aim is in `_choices` and the constants above.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from brorl.algorithms import outcome_weights
from brorl.algorithms.outcome_weights import OutcomeWeight
from brorl.planning import Aim
from brorl.planning.recommendation import RolloutPlan
from brorl.theory.outcome_weights import (
    gradient_coefficient,
    gradient_fraction,
    gradient_weight,
    noise_to_known_rates,
    noise_to_rloo,
    prompt_fraction,
    rate_cells,
)
from brorl.tree import FloatArray

FOR_PASS_1 = ("reinforce_pp_baseline", "grpo", "rloo")  # a recipe's own one of these is kept
K = 16  # of pass_at_k
RARE = 1 / 16  # pass rates below this are out of the reach of N = 16
_FAR = 2048  # coverage: the N that a group is compared with
_MIN_REACH = 0.5  # coverage: least fraction of the rare prompts' gradient at _FAR
_MAX_NOISE = 1.25  # pass@k: largest noise, relative to known pass rates

# The order of MaxRL at the end of a long run from N - 1 on, as docs/explanation/study.md found; None for no fall.
FINAL_ORDERS: Mapping[Aim, int | None] = {"pass@1": 1, "pass@k": K, "coverage": None}

_WEIGHTS: Mapping[str, OutcomeWeight] = {
    "reinforce_pp_baseline": outcome_weights.reinforce_pp_baseline,
    "grpo": outcome_weights.grpo,
    "maxrl": outcome_weights.maxrl,
    "pass_at_k": partial(outcome_weights.pass_at_k, k=K),
}


@dataclass(frozen=True)
class EstimatorRow:
    """One estimator at one N."""

    estimator: str  # its name, a value of `advantage.estimator`
    num_rollouts: int
    fractions: tuple[float, ...]  # fraction of the gradient in each bin of difficulty, from the hardest; sum 1
    rare: float  # fraction of the gradient that goes to prompts with a pass rate below `RARE`
    noise: float  # relative gradient noise divided by that of RLOO at the same N, >= 1
    noise_to_known: float  # the same divided by that of an estimator that knows the pass rates, >= 1
    # the rare prompts' gradient divided by theirs at N = 2048 with the same estimator; 1 without rare prompts
    reach: float


@dataclass(frozen=True)
class Choice:
    """The recommendation for one aim."""

    aim: Aim
    estimator: str  # a value of `advantage.estimator`
    index: int | None  # index of the recommended row of the plan; None if no N fits
    reason: str  # the rule and its numbers, as a sentence


@dataclass(frozen=True)
class EstimatorGuide:
    """The estimators at every N of a plan."""

    prompts: tuple[float, ...]  # fraction of the prompts in each bin of difficulty, from the hardest; sum 1
    rows: list[EstimatorRow]  # one per estimator and N, by N; pass_at_k only where N > 16
    choices: dict[Aim, Choice]  # the choice for each aim

    @classmethod
    def of(cls, plan: RolloutPlan, own: str = FOR_PASS_1[0]) -> EstimatorGuide:
        """Compute the guide from the plan's fitted pass rates."""
        rate_G, share_G = rate_cells(plan.pass_rates)
        far_EG = gradient_coefficient(_tabulated(list(_WEIGHTS), _FAR), rate_G)
        far = dict(
            zip(_WEIGHTS, gradient_weight(far_EG, rate_G)[:, rate_G < RARE] @ share_G[rate_G < RARE], strict=True)
        )
        rows = [row for r in plan.rows for row in _rows(r.num_rollouts, rate_G, share_G, far)]
        choices = {choice.aim: choice for choice in _choices(plan, rows, own)}
        return cls(tuple(prompt_fraction(rate_G, share_G).tolist()), rows, choices)

    def at(self, num_rollouts: int) -> dict[str, EstimatorRow]:
        """Return the rows of one N by the name of the estimator."""
        return {row.estimator: row for row in self.rows if row.num_rollouts == num_rollouts}


def _rows(
    num_rollouts: int, rate_G: FloatArray, share_G: FloatArray, far: Mapping[str, float]
) -> Iterator[EstimatorRow]:
    """Yield the estimators at one N; `far` is the rare prompts' gradient of each at N = 2048."""
    names = [name for name in _WEIGHTS if name != "pass_at_k" or num_rollouts > K]
    weight_EC = _tabulated(names, num_rollouts)
    coefficient_EG = gradient_coefficient(weight_EC, rate_G)
    fractions = gradient_fraction(coefficient_EG, rate_G, share_G)
    amount_EG = gradient_weight(coefficient_EG, rate_G) * share_G
    rare_E = amount_EG[:, rate_G < RARE].sum(1)
    noise_E = noise_to_rloo(weight_EC, rate_G, share_G)
    known_E = noise_to_known_rates(weight_EC, rate_G, share_G)
    for e, name in enumerate(names):
        yield EstimatorRow(
            estimator=name,
            num_rollouts=num_rollouts,
            fractions=tuple(fractions[e].tolist()),
            rare=float(rare_E[e] / amount_EG[e].sum()),
            noise=float(noise_E[e]),
            noise_to_known=float(known_E[e]),
            reach=float(rare_E[e] / far[name]) if far[name] > 0 else 1.0,
        )


def _tabulated(names: list[str], num_rollouts: int) -> FloatArray:
    """Return w(N, c) of some estimators, shape [E, N + 1]."""
    counts = range(num_rollouts + 1)
    return np.array([[_WEIGHTS[name](num_rollouts, c) for c in counts] for name in names])


def _choices(plan: RolloutPlan, rows: list[EstimatorRow], own: str) -> Iterator[Choice]:
    """Yield the choice for each aim. This is the only place with a rule."""
    for_pass_1 = own if own in FOR_PASS_1 else FOR_PASS_1[0]
    yield Choice("pass@1", for_pass_1, plan.chosen, "It has the least noise for the gradient of pass@1.")
    at = {(row.estimator, row.num_rollouts): row for row in rows}
    feasible = [(i, r.num_rollouts) for i, r in enumerate(plan.rows) if r.budget_prompts]
    above_k = [(i, at["pass_at_k", n]) for i, n in feasible if n > K]
    quiet = [i for i, row in above_k if row.noise_to_known <= _MAX_NOISE]
    reason = (
        f"For pass@{K} the rule is the smallest N above {K} whose gradient noise is at most {_MAX_NOISE} times that "
        "with known pass rates"
    )
    if any(row.num_rollouts > K for row in plan.rows):
        yield _choice("pass@k", "pass_at_k", quiet, [i for i, _ in above_k], reason)
    else:
        none_above = f"{reason}. No N above {K} was compared; --rollouts sets the numbers."
        yield Choice("pass@k", "pass_at_k", None, none_above)
    reaching = [i for i, n in feasible if at["maxrl", n].reach >= _MIN_REACH]
    reason = (
        f"For coverage the rule is the smallest N that gives prompts with a pass rate below 1/{1 / RARE:.0f} at least "
        f"{_MIN_REACH:.0%} of their gradient at N = {_FAR}"
    )
    yield _choice("coverage", "maxrl", reaching, [i for i, _ in feasible], reason)


def _choice(aim: Aim, estimator: str, allowed: list[int], feasible: list[int], reason: str) -> Choice:
    """Choose the smallest allowed N, or else the largest that fits."""
    if allowed:
        return Choice(aim, estimator, allowed[0], f"{reason}.")
    if feasible:
        return Choice(aim, estimator, feasible[-1], f"{reason}. No N that fits reaches it; this is the largest.")
    return Choice(aim, estimator, None, f"{reason}. No such N fits in the budget; raise --seconds-per-step.")
