"""Samples per second of rollout workers on Ray: two workers, one worker, and the engine of this process.

In: the recipe `quickstart` with its shipped model. Out: a table of medians over interleaved rounds, and the ratio of
two workers to one. Every worker has one thread. All samplers get the same tasks and seeds, and their trees must be
equal, log-probs included.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from statistics import median

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "RAY_worker_niceness": "0",  # by default workers give way to all other processes
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

import ray
import torch
from harness import Turn, table, timed

from brorl.config.reading import make_config, read_recipe
from brorl.distributed.actors import RolloutActors
from brorl.distributed.supervisor import PoolConfig
from brorl.model.forward import choose_forward
from brorl.rollout.chosen_engine import build_engine
from brorl.rollout.engine import Engine, PooledEngine, SampleTask
from brorl.sampling import SamplingParams
from brorl.training.inputs import prepare_run
from brorl.training.local_parts import build_model
from brorl.tree import RolloutTree

Sample = Callable[[int], list[RolloutTree]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-rollouts", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompts-per-task", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = make_config(read_recipe("quickstart"), {"device": "cpu"}, "quickstart")
    prompts = [p.token_ids for p in prepare_run(config, config.model).prompts.train.take(options.prompts)]
    sampling = SamplingParams(max_new_tokens=config.sampling.max_new_tokens)
    size, num_rollouts = options.prompts_per_task, options.num_rollouts

    def in_tasks(engine: Engine, seed: int) -> list[RolloutTree]:
        whole = SampleTask(prompts, num_rollouts, sampling, seed)
        return [tree for task in whole.split(size) for tree in engine.sample(task)]

    def in_one_call(engine: Engine, seed: int) -> list[RolloutTree]:
        return engine.sample(SampleTask(prompts, num_rollouts, sampling, seed))

    local = quickstart_engine()
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        ray.init(num_cpus=3, include_dashboard=False, _temp_dir=folder, log_to_driver=False, configure_logging=False)
        pools = [pool_of(1), pool_of(2)]
        try:
            one, two = (PooledEngine(pool, size) for pool in pools)
            samplers: dict[str, Sample] = {
                "this process, task by task": partial(in_tasks, local),
                "1 worker": partial(in_one_call, one),
                "2 workers": partial(in_one_call, two),
            }
            timings = measure(samplers, options.rounds)
        finally:
            for pool in pools:
                pool.close()
            ray.shutdown()
    report(timings, options.prompts * num_rollouts)


def quickstart_engine() -> Engine:
    """Make the engine of the recipe."""
    config = make_config(read_recipe("quickstart"), {"device": "cpu"}, "quickstart")
    ready = prepare_run(config, config.model)
    model = build_model(config, ready)
    forward = choose_forward(model, config.engine.forward, ready.context)
    return build_engine(config, ready.model_path, model, ready.tokenizer, forward, ready.context)


def pool_of(number: int) -> RolloutActors:
    """Start rollout workers."""
    pool_config = PoolConfig("rollout worker", number, lambda _: {"num_cpus": 1}, timeout_s=600.0, max_restarts=0)
    return RolloutActors(quickstart_engine, pool_config, threads=1, echo=lambda line: print(line, file=sys.stderr))


def measure(samplers: dict[str, Sample], rounds: int) -> dict[str, list[Turn]]:
    """Call all samplers in turn, with one seed per round; the first round warms up.

    Raises:
        SystemExit: If two samplers return different trees.
    """
    done: dict[str, list[Turn]] = {name: [] for name in samplers}
    for number in range(rounds + 1):
        trees: list[list[RolloutTree]] = []
        for name, sample in samplers.items():
            done[name].append(timed(lambda sample=sample, seed=number, to=trees: to.append(sample(seed))))
        if any(other != trees[0] for other in trees):
            raise SystemExit(f"round {number}: the samplers returned different trees")
        print(f"\rround {number} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {name: turns[1:] for name, turns in done.items()}


def report(done: dict[str, list[Turn]], samples: int) -> None:
    """Print medians, and the ratio of two workers to one."""
    rows = []
    for name, turns in done.items():
        seconds, cpu = (median(values) for values in zip(*turns, strict=True))
        rows.append((name, f"{samples / seconds:,.0f}", f"{seconds:.3f}", f"{cpu:.3f}"))
    print(table(("sampler", "samples/s", "seconds per call", "CPU seconds of this process"), rows))
    ratios = [a.seconds / b.seconds for a, b in zip(done["1 worker"], done["2 workers"], strict=True)]
    print(f"\n2 workers against 1: {median(ratios):.2f} times (rounds: {min(ratios):.2f} to {max(ratios):.2f})")
    print("The trees of all samplers were equal in every round, log-probs included.")


if __name__ == "__main__":
    main()
