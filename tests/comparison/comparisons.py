"""Comparisons made from plain numbers, and made-up ones whose pass rates rise with what the runs spend and with N."""

from collections.abc import Mapping, Sequence
from math import comb, exp, log
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from brorl.comparison.arm_recipes import short_names
from brorl.comparison.figure import make_figure
from brorl.comparison.findings import Finding, answer_of, caveats_of
from brorl.comparison.results import results_of
from brorl.comparison.scores import Arm, Comparison, FinishedRun, RunEvaluation
from brorl.cost import Cost, Unit


def score_of(
    cost: Cost, num_correct_P: Sequence[int] | NDArray[np.int64], tokens_P: Sequence[int] | None = None
) -> RunEvaluation:
    correct = np.asarray(num_correct_P, np.int64)
    tokens = np.full(correct.size, 100) if tokens_P is None else np.asarray(tokens_P, np.int64)
    return RunEvaluation(cost, correct, tokens, 0.0)


def run_of(
    seed: int,
    scores: Sequence[RunEvaluation],
    *,
    end_reason: str | None = None,
    cost: Cost | None = None,
    phases: Mapping[str, float] | None = None,
    groups: tuple[int, int] = (10, 5),
    path: str | None = None,
) -> FinishedRun:
    cost = (scores[-1].cost if scores else Cost()) if cost is None else cost
    path = f"runs/{seed}" if path is None else path
    return FinishedRun(seed, tuple(scores), cost, phases or {}, groups[0], groups[1], end_reason, path)


def figure_of(comparison: Comparison) -> Figure:
    results = results_of(comparison)
    return make_figure(results, str(answer_of(results)[0]))


def arm_of(name: str, runs: Sequence[FinishedRun], num_rollouts: int = 16) -> Arm:
    return Arm(name, "", num_rollouts, 8, {}, tuple(runs))


def comparison_of(
    arms: Sequence[Arm],
    eval_points: Sequence[float],
    num_samples: int,
    *,
    sources: Sequence[str] | None = None,
    unit: Unit = "seconds",
    ks: tuple[int, ...] = (1,),
) -> Comparison:
    sources = sources or ["source"] * arms[0].runs[0].scores[0].num_correct_P.size
    prompts = tuple(f"held-{i}" for i in range(len(sources)))
    points = tuple(eval_points)
    return Comparison(
        "quickstart", unit, points[-1], points, prompts, tuple(sources), num_samples, ks, tuple(arms), "a machine"
    )


def _arms(numbers: Sequence[int], names: Sequence[str] | None, runs: Sequence[Sequence[FinishedRun]]) -> list[Arm]:
    """Arms of so many rollouts, whose name is N unless names are given."""
    labels = short_names(names or [f"N={number}" for number in numbers])
    return [
        Arm(name, title, n, 16, {"rollouts_per_prompt": str(n)}, tuple(of_arm))
        for (name, title), n, of_arm in zip(labels, numbers, runs, strict=True)
    ]


def _sources(num_prompts: int, num_sources: int) -> list[str]:
    return [f"source-{i * num_sources // num_prompts}" for i in range(num_prompts)]


def cost_at(num_rollouts: int, seconds: float, more_steps: int = 0) -> Cost:
    """What a run with N rollouts per prompt has spent after so many seconds: larger trees, fewer steps."""
    steps = max(1, round(seconds * 8 / num_rollouts**0.3)) + more_steps
    samples = steps * 16 * num_rollouts
    return Cost(steps, seconds, samples, samples * 8, round(samples * 8 / num_rollouts**0.35))


def gain_at(num_rollouts: int, spent: float, budget: float) -> float:
    """Rise of the logits: small N is quick and soon at its end, large N slow and goes on."""
    ceiling = 0.5 * log(num_rollouts) - 0.6
    speed = 2.5e3 / num_rollouts / budget
    return ceiling * (1 - exp(-spent * speed)) + 0.4 * (1 - exp(-30 * spent / budget))


def synthetic(
    rng: np.random.Generator,
    *,
    numbers: Sequence[int] = (16, 512),
    num_seeds: int = 3,
    num_sources: int = 2,
    num_prompts: int = 40,
    num_samples: int = 32,
    ks: tuple[int, ...] = (1, 4, 16),
    unit: Unit = "seconds",
    eval_points: tuple[float, ...] = (10.0, 20.0, 40.0),
    lift: Mapping[int, float] | None = None,
    overshoot: Mapping[int, float] | None = None,
    ended_early: Mapping[tuple[int, int], int] | None = None,
    names: Sequence[str] | None = None,
) -> Comparison:
    """Make a comparison.

    Args:
        rng: Randomness.
        numbers: N of each arm.
        num_seeds: Runs of each arm.
        num_sources: Sources of the prompts.
        num_prompts: Held-out prompts, spread evenly over the sources.
        num_samples: Responses per prompt.
        ks: Which pass@k.
        unit: What the budget counts.
        eval_points: Amounts at which runs are evaluated; the last is the budget.
        lift: By arm's index, what is added to the logit of every pass rate at all evaluation points.
        overshoot: By arm's index, how much its runs spend beyond each evaluation point, as a fraction of it.
        ended_early: By (arm's index, run's index), the number of evaluation points after which it collapsed.
        names: What the arms are called.
    """
    logit_P = rng.normal(-2.5, 1.8, num_prompts)
    start = _score(rng, Cost(), logit_P, num_samples)
    runs_A: list[list[FinishedRun]] = []
    for index, number in enumerate(numbers):
        runs_A.append([])
        for run in range(num_seeds):
            reached = (ended_early or {}).get((index, run), len(eval_points))
            drift_P = logit_P + rng.normal(0, 0.3, num_prompts)
            scores = [start]
            for eval_point in eval_points[:reached]:
                spent = eval_point * (1 + (overshoot or {}).get(index, 0.0))
                gain = (lift or {}).get(index, gain_at(number or 64, eval_point, eval_points[-1]) + rng.normal(0, 0.05))
                scores.append(_score(rng, _cost(number or 64, unit, spent, run), drift_P + gain, num_samples))
            why = "collapsed: pass@1 fell below a tenth of its best" if reached < len(eval_points) else None
            groups, seconds = int(rng.integers(200, 400)), scores[-1].cost.seconds
            phases = {"generation": 0.3 * seconds, "verification": 0.05 * seconds, "training": 0.6 * seconds}
            mixed = int(groups * rng.uniform(0.3, 0.9))
            path = f"runs/seed-{run}"
            runs_A[-1].append(run_of(run, scores, end_reason=why, phases=phases, groups=(groups, mixed), path=path))
    sources = _sources(num_prompts, num_sources)
    arms = _arms(numbers, names, runs_A)
    return comparison_of(arms, eval_points, num_samples, sources=sources, unit=unit, ks=ks)


def levels(
    level_AM: Sequence[Sequence[int]],
    *,
    numbers: Sequence[int] = (16, 512),
    num_seeds: int = 3,
    num_prompts: int = 12,
    num_samples: int = 32,
    num_sources: int = 1,
    names: Sequence[str] | None = None,
    ks: tuple[int, ...] = (1, 16),
) -> Comparison:
    """Make a comparison without chance: at the start 4, at evaluation point m of arm a `level_AM[a][m]` responses to
    each prompt are correct, and one more for every other prompt. Evaluation points are 10, 20, 40, ... seconds."""
    points = (0.0, *(10.0 * 2**m for m in range(len(level_AM[0]))))
    runs_A = []
    for number, level_M in zip(numbers, level_AM, strict=True):
        costs = [cost_at(number or 64, point) if point else Cost() for point in points]
        counts = [level + np.arange(num_prompts) % 2 for level in (4, *level_M)]
        tokens = [8 * num_samples] * num_prompts
        scores = [score_of(cost, count, tokens) for cost, count in zip(costs, counts, strict=True)]
        runs = [
            run_of(s, scores, phases={"generation": 1.0}, groups=(100, 50), path=f"runs/N={number}-{s}")
            for s in range(num_seeds)
        ]
        runs_A.append(runs)
    arms, sources = _arms(numbers, names, runs_A), _sources(num_prompts, num_sources)
    return comparison_of(arms, points[1:], num_samples, sources=sources, ks=ks)


def evaluation_at(comparison: Comparison, arm: Arm, run: int, eval_point: float) -> RunEvaluation:
    """The first evaluation at which a run had spent an evaluation point, or its last."""
    scores = arm.runs[run].scores
    return next((s for s in scores if getattr(s.cost, comparison.unit) >= eval_point), scores[-1])


def pass_at(count: int, n: int, k: int) -> float:
    """pass@k from binomial coefficients."""
    return 1 - comb(n - count, k) / comb(n, k)


def score_SP(comparison: Comparison, arm: Arm, eval_point: float, k: int = 1) -> np.ndarray:
    """pass@k of each run and prompt, by a loop over both."""
    n = comparison.num_samples
    return np.array(
        [
            [pass_at(int(c), n, k) for c in evaluation_at(comparison, arm, run, eval_point).num_correct_P]
            for run in range(len(arm.runs))
        ]
    )


def _cost(number: int, unit: Unit, spent: float, run: int) -> Cost:
    """Find the cost of which `unit` is what was spent; later runs took a few steps more."""
    if unit == "seconds":
        return cost_at(number, spent, run)
    per_second = cost_at(number, 1000.0).of(unit) / 1000
    cost = cost_at(number, spent / per_second, run)
    whole = {f: getattr(cost, f) for f in ("steps", "seconds", "samples", "sampled_tokens", "unique_tokens")}
    return Cost(**{**whole, unit: round(spent)})


def _score(rng: np.random.Generator, cost: Cost, logit_P: np.ndarray, num_samples: int) -> RunEvaluation:
    num_correct_P = rng.binomial(num_samples, 1 / (1 + np.exp(-logit_P)))
    tokens_P = rng.integers(5, 12, (num_samples, len(logit_P))).sum(0)
    return RunEvaluation(cost, num_correct_P, tokens_P, float(rng.uniform(0, 0.05)))


def findings(comparison: Comparison) -> list[Finding]:
    """The answer, and everything that limits it."""
    results = results_of(comparison)
    return [*answer_of(results), *(finding for topic in caveats_of(results) for finding in topic)]


def values_of(template: str, found: Sequence[Finding]) -> dict[str, Any]:
    """What the only finding of a template is about."""
    (finding,) = (finding for finding in found if finding.template == template)
    return dict(finding.values)


def templates(found: Sequence[Finding]) -> set[str]:
    return {finding.template for finding in found}
