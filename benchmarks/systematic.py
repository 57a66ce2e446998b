"""Systematic against independent sampling at one policy: coverage, and the variance of rewards and gradients.

In: a model of the recipe `quickstart` (the shipped one, or a checkpoint). Out: a table and a JSON file, with
95% bootstrap intervals over prompts. Every training prompt is sampled many times with each scheme; variances are over
these repeats, prompt by prompt, and then averaged over prompts.

The gradient is that of the group-mean baseline for one prompt, sum over rollouts of (reward - group mean) times the
score, divided by N, through the package's own tree log-probs. `within` is the trace of its covariance over repeats,
`between` that of the covariance over prompts of the mean gradient: a step's gradient over P random prompts has variance
(within + between) / P, and only the first part depends on how rollouts are drawn.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brorl.algorithms.policy_loss import node_weights
from brorl.assemble.engine import build_engine
from brorl.assemble.inputs import prepare
from brorl.assemble.learner import build_model
from brorl.config.reading import make_config, read_recipe
from brorl.model.logprobs import tree_logprobs
from brorl.prompts.prompt import Prompt
from brorl.rollout.native.engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree
from brorl.verification.domains.countdown import CountdownVerifier
from brorl.verification.grade import grade

FloatArray = NDArray[np.float64]
SCHEMES = ("iid", "systematic")
# Titles of the rows, and the per-prompt numbers that they average.
QUANTITIES = {
    "unsampled response mass": "unsampled",
    "distinct correct responses": "distinct_correct",
    "unique tokens": "unique_tokens",
    "mixed fraction": "informative",
    "variance of the group's mean reward": "reward_variance",
    "variance of the gradient, within": "gradient_variance",
}
RESAMPLES = 2000


class Workload(NamedTuple):
    """The model, the prompts, and how responses are decoded."""

    engine: NativeEngine
    prompts: list[Prompt]
    decode: Any
    max_new_tokens: int


class Outcome(NamedTuple):
    """One scheme at one N; means or variances over the repeats of each prompt."""

    per_prompt: dict[str, FloatArray]
    between: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="quickstart")
    parser.add_argument("--num-rollouts", type=int, nargs="+", default=[16, 64, 512])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=64)
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    workload = load(options.model, options.prompts)
    results = []
    for num_rollouts in options.num_rollouts:
        outcomes = {s: measure(workload, num_rollouts, s, options.repeats) for s in SCHEMES}
        results.append({"num_rollouts": num_rollouts, **summary(outcomes)})
        settings = {k: str(v) for k, v in vars(options).items()}
        options.output.write_text(json.dumps({"settings": settings, "results": results}, indent=1) + "\n")
    print(table(results))


def load(model: str, num_prompts: int) -> Workload:
    """Load the model and choose training prompts of the recipe at random."""
    config = make_config(read_recipe("quickstart"), {"device": "cpu"}, "quickstart")
    ready = prepare(config, model)
    engine = build_engine(config, ready.source, build_model(config, ready), ready.tokenizer)
    train = ready.prompts.train.take(ready.prompts.train.num_prompts)
    chosen = np.random.default_rng(0).choice(len(train), num_prompts, replace=False)
    return Workload(engine, [train[i] for i in chosen], ready.grader.decode, config.sampling.max_new_tokens)


def measure(workload: Workload, num_rollouts: int, scheme: Any, repeats: int) -> Outcome:
    """Sample every prompt `repeats` times."""
    sampling = SamplingParams(max_new_tokens=workload.max_new_tokens, scheme=scheme)
    prompts = workload.prompts
    names = ("unsampled", "distinct_correct", "unique_tokens", "informative", "reward")
    value = {name: np.zeros((repeats, len(prompts))) for name in names}
    size = sum(p.numel() for p in workload.engine.model.parameters())
    gradient_sum_PD = torch.zeros(len(prompts), size, dtype=torch.float64)
    square_sum_P = np.zeros(len(prompts))
    for repeat in range(repeats):
        print(f"\rN = {num_rollouts}, {scheme}: {repeat + 1}/{repeats}", end="", file=sys.stderr, flush=True)
        trees = workload.engine.sample([p.token_ids for p in prompts], num_rollouts, sampling, seed=repeat)
        verdicts = grade(prompts, trees, {"countdown": CountdownVerifier()}, workload.decode)
        for i, (tree, tree_verdicts) in enumerate(zip(trees, verdicts, strict=True)):
            reward_L = np.array([float(v.correct) for v in tree_verdicts])
            mean = float((tree.leaf_count * reward_L).sum()) / num_rollouts
            value["unsampled"][repeat, i] = 1 - np.exp(tree.sum_along_paths(tree.logprob)[tree.leaf]).sum()
            value["distinct_correct"][repeat, i] = reward_L.sum()
            value["unique_tokens"][repeat, i] = tree.num_unique_tokens
            value["informative"][repeat, i] = 0 < mean < 1
            value["reward"][repeat, i] = mean
            if 0 < mean < 1:  # otherwise the gradient is zero
                gradient_D = policy_gradient(workload.engine, tree, reward_L - mean)
                gradient_sum_PD[i] += gradient_D
                square_sum_P[i] += float(gradient_D @ gradient_D)
    print(file=sys.stderr)
    mean_PD = gradient_sum_PD / repeats
    norm_P = (mean_PD**2).sum(1).numpy()
    variance_P = (square_sum_P - repeats * norm_P) / (repeats - 1)
    spread = float(((mean_PD - mean_PD.mean(0)) ** 2).sum()) / (len(prompts) - 1)
    per_prompt = {name: v.mean(0) for name, v in value.items()}
    per_prompt["reward_variance"] = value["reward"].var(0, ddof=1)
    per_prompt["gradient_variance"] = variance_P
    per_prompt["squared_norm"] = norm_P - variance_P / repeats
    return Outcome(per_prompt, spread - float(variance_P.mean()) / repeats)


def policy_gradient(engine: NativeEngine, tree: RolloutTree, advantage_L: FloatArray) -> Tensor:
    """Return the flat gradient of the mean over rollouts of advantage times log-prob."""
    weights = node_weights(tree, advantage_L)
    weight_M = torch.from_numpy(weights.positive_M + weights.negative_M) / tree.num_rollouts
    (logprob_M,) = tree_logprobs(engine.model, [tree])
    gradients = torch.autograd.grad((weight_M * logprob_M).sum(), list(engine.model.parameters()))
    return torch.cat([g.flatten() for g in gradients]).double()


def summary(outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """Return means over prompts, and ratios of them, with bootstrap intervals over prompts."""
    iid, systematic = (outcomes[s].per_prompt for s in SCHEMES)
    num_prompts = iid["reward"].size
    choice = np.random.default_rng(1).integers(0, num_prompts, (RESAMPLES, num_prompts))
    result: dict[str, Any] = {}
    for title, name in QUANTITIES.items():
        result[title] = {s: ratio(o.per_prompt[name], np.ones(num_prompts), choice) for s, o in outcomes.items()}
        result[title]["ratio"] = ratio(systematic[name], iid[name], choice)
    result["the same, relative to the mean's squared norm"] = {
        s: ratio(o.per_prompt["gradient_variance"], o.per_prompt["squared_norm"], choice) for s, o in outcomes.items()
    }
    result["variance of the gradient, between prompts"] = {s: [o.between] for s, o in outcomes.items()}
    within = {s: float(o.per_prompt["gradient_variance"].mean()) for s, o in outcomes.items()}
    result["within / (within + between)"] = {s: [within[s] / (within[s] + outcomes[s].between)] for s in SCHEMES}
    return result


def ratio(above_P: FloatArray, below_P: FloatArray, choice: NDArray[np.int64]) -> list[float]:
    """Return a ratio of sums over prompts, and the ends of its 95% interval."""
    low, high = np.quantile(above_P[choice].sum(1) / below_P[choice].sum(1), [0.025, 0.975])
    return [float(above_P.sum() / below_P.sum()), float(low), float(high)]


def table(results: list[dict[str, Any]]) -> str:
    """Write the results as a Markdown table."""
    lines = ["| N | quantity | iid | systematic | ratio |", "| --- | --- | --- | --- | --- |"]
    for result in results:
        for title, entry in result.items():
            if title != "num_rollouts":
                cells = [interval(entry.get(s)) for s in (*SCHEMES, "ratio")]
                lines.append(f"| {result['num_rollouts']} | {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(numbers: list[float] | None) -> str:
    if numbers is None:
        return "-"
    value, *ends = (f"{x:.3g}" for x in numbers)
    return f"{value} ({ends[0]} to {ends[1]})" if ends else value


if __name__ == "__main__":
    main()
