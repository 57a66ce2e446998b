"""Asynchronous against synchronous training on a workload with a long tail, with a real engine and a real learner.

    python benchmarks/async_workload.py [--steps 60] [--seeds 5] [--json FILE]

The shipped model learns countdown puzzles. Engine, verifier and learner do their real work; only time is simulated, by
a pool with a virtual clock, so the result does not depend on the machine. A task takes `--token-s` for each position of
its longest response, times a factor that is log-normal over prompts (`--tail`, its sigma) and over tasks (a third of
it), and `--task-s` for its start. An update takes `--learn-s`. Publishing weights takes no time. The arm `sync` waits
for all prompts of a step before it learns, and samples nothing meanwhile.

Printed for each arm, as means over seeds with 95% t-intervals: seconds per step, fraction of the workers' time in use,
staleness, stragglers (late), and pass@1 on held-out prompts: at the last step of all arms, at the largest number of
samples that all arms reached, and at the time at which the first arm was done. The differences to `sync` are paired by
seed.
"""

import argparse
import copy
import json
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
import torch
from harness import table
from scipy.stats import t

from brorl.algorithms.advantages import advantage_estimator
from brorl.algorithms.settings import AdvantageSettings
from brorl.assemble import build_run
from brorl.config.reading import make_config, read_recipe
from brorl.evaluation.evaluator import evaluation_record
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.runs.run_directory import RunDirectory
from brorl.seeds import derived_seed
from brorl.training.collector import SyncCollector
from brorl.training.learner import TreeLearner
from brorl.tree import RolloutTree

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from foreground_collector import ForegroundCollector
from virtual_pool import VirtualPool


class Arm(NamedTuple):
    """A way to train: the bound of the staleness."""

    max_staleness: int


ARMS = {
    "sync": Arm(0),
    "async 1": Arm(1),
    "async 2": Arm(2),
}


@dataclass(frozen=True)
class Point:
    """The state after a step; pass@1 where it was evaluated."""

    step: int
    seconds: float
    samples: int
    pass_at_1: float


@dataclass(frozen=True)
class Result:
    """One run."""

    seconds_per_step: float
    in_use: float
    staleness_mean: float
    staleness_max: int
    prompts_late: int
    mismatch_kl: float
    points: list[Point]


def durations(args: argparse.Namespace, seed: int, prefix: int) -> Callable[[SampleTask, Sequence[RolloutTree]], float]:
    """Return the virtual seconds of a task; all tasks of a prompt have its factor."""

    def seconds(task: SampleTask, trees: Sequence[RolloutTree]) -> float:
        key = np.frombuffer(np.array(task.prompts[0][:prefix], np.int64).tobytes(), np.uint32)
        own = np.random.default_rng([seed, *key.tolist()]).normal()
        chance = np.random.default_rng([seed, *task.seed_P]).normal()
        factor = float(np.exp(args.tail * (own + chance / 3)))
        return args.task_s + args.token_s * factor * max(int(tree.length.max()) for tree in trees)

    return seconds


def train(arm: Arm, seed: int, args: argparse.Namespace) -> Result:
    """Train one arm from the shipped model."""
    overrides = {
        "rollouts_per_prompt": args.rollouts, "prompts_per_step": args.prompts, "seed": seed, "engine.threads": 1,
        "optimizer.old_logprobs": "recompute", "importance.correction": "truncate", "optimizer.mini_batches": 2,
        "optimizer.learning_rate": args.learning_rate, "optimizer.reference_batch": None,
        "sampling.max_new_tokens": 16, "evaluation.num_prompts": args.held_out, "evaluation.rollouts_per_prompt": 16,
        "evaluation.ks": [1], "report": False, "dynamic_sampling.max_tries": 1000,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(read_recipe("quickstart"), overrides, "quickstart")
        run, _ = build_run(config, RunDirectory(Path(folder)), lambda _: None)
    base, learner = run.collector, run.learner
    assert isinstance(base, SyncCollector)
    assert isinstance(base.engine, NativeEngine)
    assert isinstance(learner, TreeLearner)
    engine = NativeEngine(copy.deepcopy(learner.model), base.engine.stop_token_ids)
    prefix = min(len(prompt.token_ids) for prompt in base.stream.prompts)
    pool = VirtualPool(engine, args.workers, durations(args, seed, prefix))
    cluster = config.cluster.model_copy(update={"max_staleness": arm.max_staleness})
    collector = ForegroundCollector(
        config=config.model_copy(update={"cluster": cluster}), stream=base.stream, grader=base.grader, pool=pool
    )
    sampler = NativeEngine(learner.model, base.engine.stop_token_ids)  # outside of the pool: it takes no time
    staleness: list[int] = []
    mismatch: list[float] = []
    points, samples, late = [Point(0, 0.0, 0, score(run, sampler))], 0, 0
    collector.publish(learner.weights(), 0)
    for step in range(1, args.steps + 1):
        batch = collector.next_batch(step)
        staleness += [step - 1 - group.version for group in batch.groups]
        late += batch.ahead["prompts_late"]
        samples += batch.summary().samples
        update = learner.learn(batch.groups, advantage_estimator(AdvantageSettings()), derived_seed(seed, step))
        mismatch.append(update.mismatch_kl or 0.0)
        pool.advance(args.learn_s)
        collector.publish(learner.weights(), step)
        if step % args.every == 0 or step == args.steps:
            points.append(Point(step, pool.now, samples, score(run, sampler)))
    in_use = min(pool.busy_seconds / (pool.now * args.workers), 1.0)
    per_step = pool.now / args.steps
    return Result(per_step, in_use, mean(staleness), max(staleness), late, mean(mismatch), points)


def score(run, engine) -> float:
    """Return pass@1 on the held-out prompts."""
    counts = run.evaluator.evaluate(engine, run.held_out)
    return evaluation_record(counts, [1]).pass_at[1].value


def at(points: Sequence[Point], quantity: str, value: float) -> float:
    """Interpolate pass@1 where a quantity (seconds, samples) has a value."""
    values = [getattr(point, quantity) for point in points]
    right = min(max(bisect_right(values, value), 1), len(values) - 1)
    fraction = min((value - values[right - 1]) / (values[right] - values[right - 1]), 1.0)
    return points[right - 1].pass_at_1 + fraction * (points[right].pass_at_1 - points[right - 1].pass_at_1)


def interval(values: Sequence[float], digits: int = 3) -> str:
    """Return a mean with its 95% t-interval over seeds."""
    if len(values) < 2:
        return f"{mean(values):.{digits}f}"
    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return f"{mean(values):.{digits}f} [{mean(values) - half:.{digits}f}, {mean(values) + half:.{digits}f}]"


def tables(results: dict[str, list[Result]]) -> str:
    """Return the tables as Markdown."""
    seeds = range(len(results["sync"]))
    least = [min(runs[i].points[-1].samples for runs in results.values()) for i in seeds]
    soonest = [min(runs[i].points[-1].seconds for runs in results.values()) for i in seeds]

    def scores(runs: list[Result]) -> list[list[float]]:
        return [
            [runs[i].points[-1].pass_at_1 for i in seeds],
            [at(runs[i].points, "samples", least[i]) for i in seeds],
            [at(runs[i].points, "seconds", soonest[i]) for i in seeds],
        ]

    times, rates, reference = [], [], scores(results["sync"])
    for name, runs in results.items():
        times.append((
            name, interval([r.seconds_per_step for r in runs], 2), interval([r.in_use for r in runs], 2),
            interval([r.staleness_mean for r in runs], 2), max(r.staleness_max for r in runs),
            interval([float(r.prompts_late) for r in runs], 1), f"{mean(r.mismatch_kl for r in runs):.1e}",
        ))  # fmt: skip
        cells = []
        for own, other in zip(scores(runs), reference, strict=True):
            difference = interval([a - b for a, b in zip(own, other, strict=True)])
            cells += [interval(own), "" if name == "sync" else difference]
        rates.append((name, *cells))
    columns = ("s/step", "workers in use", "staleness, mean", "largest", "late", "KL(sampler, learner)")
    scored = ("pass@1 at the last step", "minus sync", "equal samples", "minus sync", "equal seconds", "minus sync")
    return table(("arm", *columns), times) + "\n\n" + table(("arm", *scored), rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind, default in (
        ("steps", int, 60), ("seeds", int, 5), ("every", int, 10), ("rollouts", int, 64), ("prompts", int, 8),
        ("workers", int, 4), ("held-out", int, 100), ("learning-rate", float, 3e-4), ("tail", float, 1.0),
        ("token-s", float, 1.0), ("task-s", float, 1.0), ("learn-s", float, 20.0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[Result]] = {name: [] for name in ARMS}
    for seed in range(args.seeds):
        for name, arm in ARMS.items():
            results[name].append(train(arm, seed, args))
            last = results[name][-1]
            print(
                f"seed {seed}, {name}: {last.seconds_per_step:.1f} s/step, {last.points[-1].pass_at_1:.3f}", flush=True
            )
    print(tables(results))
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        args.json.write_text(json.dumps({"settings": settings, "runs": {
            name: [asdict(run) for run in runs] for name, runs in results.items()
        }}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
