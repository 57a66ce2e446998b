"""Made-up comparisons: runs whose pass rates rise with what they spend, faster or slower, higher or lower, with N."""

from collections.abc import Mapping, Sequence
from math import comb, exp, log

import numpy as np

from brorl.comparison.arms import Arm, Comparison, HeldOutPrompt, RunScores, Score, labelled
from brorl.comparison.results import results_of
from brorl.comparison.text import text_of
from brorl.cost import Cost, Unit


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
    numbers: Sequence[int | None] = (16, 512),
    num_seeds: int = 3,
    num_tasks: int = 2,
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
        numbers: N of each arm; None for an adaptive one.
        num_seeds: Runs of each arm.
        num_tasks: Sources of the prompts.
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
    prompts = tuple(
        HeldOutPrompt(f"held-{i}", f"task-{i * num_tasks // num_prompts}", "math", f"What is {i}?", str(i))
        for i in range(num_prompts)
    )
    logit_P = rng.normal(-2.5, 1.8, num_prompts)
    start = _score(rng, Cost(), logit_P, num_samples)
    arms = []
    labels = labelled(_names(numbers, names))
    for index, number in enumerate(numbers):
        runs = []
        for run in range(num_seeds):
            reached = (ended_early or {}).get((index, run), len(eval_points))
            drift_P = logit_P + rng.normal(0, 0.3, num_prompts)
            scores = [start]
            for eval_point in eval_points[:reached]:
                spent = eval_point * (1 + (overshoot or {}).get(index, 0.0))
                gain = (lift or {}).get(index, gain_at(number or 64, eval_point, eval_points[-1]) + rng.normal(0, 0.05))
                scores.append(_score(rng, _cost(number or 64, unit, spent, run), drift_P + gain, num_samples))
            runs.append(_run(rng, run, tuple(scores), reached < len(eval_points)))
        differs = {"rollouts_per_prompt": "adaptive" if number is None else str(number)}
        arms.append(Arm(*labels[index], number, 16, differs, tuple(runs)))
    return Comparison(
        "quickstart",
        unit,
        eval_points[-1],
        eval_points,
        prompts,
        num_samples,
        ks,
        tuple(arms),
        "cpu (2 threads), 1 run at a time",
    )


def levels(
    level_AM: Sequence[Sequence[int]],
    *,
    numbers: Sequence[int | None] = (16, 512),
    num_seeds: int = 3,
    num_prompts: int = 12,
    num_samples: int = 32,
    num_tasks: int = 1,
    names: Sequence[str] | None = None,
    ks: tuple[int, ...] = (1, 16),
) -> Comparison:
    """Make a comparison without chance: at the start 4, at evaluation point m of arm a `level_AM[a][m]` responses to
    each prompt are correct, and one more for every other prompt. Evaluation points are 10, 20, 40, ... seconds."""
    eval_points = tuple(10.0 * 2**m for m in range(len(level_AM[0])))
    prompts = tuple(
        HeldOutPrompt(f"held-{i}", f"task-{i * num_tasks // num_prompts}", "math", f"What is {i}?", str(i))
        for i in range(num_prompts)
    )
    arms = []
    labels = labelled(_names(numbers, names))
    for (name, title), number, level_M in zip(labels, numbers, level_AM, strict=True):
        scores = [
            Score(
                cost_at(number or 64, eval_point) if eval_point else Cost(),
                level + np.arange(num_prompts) % 2,
                np.full(num_prompts, 8 * num_samples),
                0.0,
            )
            for eval_point, level in zip((0.0, *eval_points), (4, *level_M), strict=True)
        ]
        cost = scores[-1].cost
        runs = tuple(
            RunScores(seed, tuple(scores), cost, {"generation": 1.0}, 100, 50, 50, None, f"runs/{name}-{seed}")
            for seed in range(num_seeds)
        )
        arms.append(Arm(name, title, number, 16, {"rollouts_per_prompt": str(number)}, runs))
    return Comparison(
        "quickstart", "seconds", eval_points[-1], eval_points, prompts, num_samples, ks, tuple(arms), "cpu"
    )


def score_of(comparison: Comparison, arm: Arm, run: int, eval_point: float) -> Score:
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
            [pass_at(int(c), n, k) for c in score_of(comparison, arm, run, eval_point).num_correct_P]
            for run in range(len(arm.runs))
        ]
    )


def _names(numbers: Sequence[int | None], names: Sequence[str] | None) -> Sequence[str]:
    return names or ["adaptive" if number is None else f"N={number}" for number in numbers]


def _cost(number: int, unit: Unit, spent: float, run: int) -> Cost:
    """Find the cost of which `unit` is what was spent; later runs took a few steps more."""
    if unit == "seconds":
        return cost_at(number, spent, run)
    per_second = cost_at(number, 1000.0).of(unit) / 1000
    cost = cost_at(number, spent / per_second, run)
    whole = {f: getattr(cost, f) for f in ("steps", "seconds", "samples", "sampled_tokens", "unique_tokens")}
    return Cost(**{**whole, unit: round(spent)})


def _score(rng: np.random.Generator, cost: Cost, logit_P: np.ndarray, num_samples: int) -> Score:
    num_correct_P = rng.binomial(num_samples, 1 / (1 + np.exp(-logit_P)))
    tokens_P = rng.integers(5, 12, (num_samples, len(logit_P))).sum(0)
    return Score(cost, num_correct_P, tokens_P, float(rng.uniform(0, 0.05)))


def _run(rng: np.random.Generator, seed: int, scores: tuple[Score, ...], ended_early: bool) -> RunScores:
    cost = scores[-1].cost
    groups = int(rng.integers(200, 400))
    generation, verification = 0.3 * cost.seconds, 0.05 * cost.seconds
    return RunScores(
        seed=seed,
        scores=scores,
        cost=cost,
        phase_seconds={"generation": generation, "verification": verification, "training": 0.6 * cost.seconds},
        groups=groups,
        groups_mixed=int(groups * rng.uniform(0.3, 0.9)),
        num_updated=groups // 2,
        ended_early="collapsed: pass@1 fell below a tenth of its best" if ended_early else None,
        path=f"runs/seed-{seed}",
    )


def sentences(comparison: Comparison) -> list[str]:
    """All sentences of a comparison, the answer first."""
    text = text_of(results_of(comparison))
    return [*text.answer, *text.remarks]
