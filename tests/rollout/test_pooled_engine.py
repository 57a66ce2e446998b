"""An engine over a pool gives the trees of its tasks in order, in whichever order they are done."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from brorl.activity import Activity, Decoding
from brorl.rollout.engine import PooledEngine, SampleTask, prompt_seed
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree
from small_models import small_model
from virtual_pool import VirtualPool

_SAMPLING = SamplingParams(max_new_tokens=10)


def pool_of(rng: np.random.Generator, started: list[int] | None = None) -> tuple[VirtualPool, NativeEngine]:
    """Return a pool of which tasks end in random order, and its engine; `started` gets the first seed of each task."""
    engine = NativeEngine(small_model(seed=int(rng.integers(2**30)), dtype=torch.float64, scale=0.4), eos_token_id=0)

    def seconds(task: SampleTask, _trees: Sequence[RolloutTree]) -> float:
        if started is not None:
            started.append(task.seed_P[0])
        return float(rng.uniform(0.01, 1.0))

    return VirtualPool(engine, 3, seconds), engine


def assert_nothing_left(pool: VirtualPool) -> None:
    with pytest.raises(RuntimeError, match="no task is in progress"):
        pool.done()


def random_prompts(rng: np.random.Generator, count: int) -> list[list[int]]:
    return [rng.integers(1, 17, rng.integers(1, 9)).tolist() for _ in range(count)]


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 20))])
def test_trees_are_those_of_the_tasks_in_order(rng: np.random.Generator, size: int) -> None:
    started: list[int] = []
    (pool, engine), prompts = pool_of(rng, started), random_prompts(rng, 8)
    rollouts, seeds = rng.integers(1, 30, 8).tolist(), [prompt_seed(4, index) for index in range(8)]
    trees = PooledEngine(pool, size).sample(SampleTask(prompts, rollouts, _SAMPLING, seed=4))
    cuts = [slice(i, i + size) for i in range(0, 8, size)]
    assert started == [seeds[cut.start] for cut in cuts]
    expected = [engine.sample(SampleTask(prompts[cut], rollouts[cut], _SAMPLING, seeds[cut])) for cut in cuts]
    assert trees == [tree for task_trees in expected for tree in task_trees]
    seeds_P = [int(word) << 40 for word in rng.integers(0, 2**50, 8)]
    of_given = PooledEngine(pool, size).sample(SampleTask(prompts, rollouts, _SAMPLING, seeds_P))
    assert of_given == [
        tree for cut in cuts for tree in engine.sample(SampleTask(prompts[cut], rollouts[cut], _SAMPLING, seeds_P[cut]))
    ]
    assert of_given != trees
    counts = [tree.num_rollouts for tree in trees]
    assert counts == rollouts
    same = PooledEngine(pool, size).sample(SampleTask(prompts, 7, _SAMPLING, seed=4))
    assert [tree.num_rollouts for tree in same] == [7] * 8
    assert_nothing_left(pool)


def test_weights_are_published_with_their_version(rng: np.random.Generator) -> None:
    (pool, own), prompts = pool_of(rng), random_prompts(rng, 3)
    engine = PooledEngine(pool, 2)
    assert engine.version == 0
    weights = small_model(seed=int(rng.integers(2**30)), dtype=torch.float64, scale=0.4)
    engine.load_weights(iter(weights.named_parameters()), version=6)
    local = NativeEngine(weights, eos_token_id=0)
    assert engine.version == own.version == 6
    seeds = [prompt_seed(1, index) for index in range(3)]
    expected = [
        tree
        for cut in (slice(2), slice(2, 3))
        for tree in local.sample(SampleTask(prompts[cut], 9, _SAMPLING, seeds[cut]))
    ]
    assert engine.sample(SampleTask(prompts, 9, _SAMPLING, seed=1)) == expected


def test_an_observer_that_raises_discards_the_rest(rng: np.random.Generator) -> None:
    class StoppedError(Exception):
        pass

    reports: list[Decoding] = []

    def stop(activity: Activity) -> None:
        assert isinstance(activity, Decoding)
        reports.append(activity)
        if activity.finished >= 12:
            raise StoppedError

    pool, _ = pool_of(rng)
    with pytest.raises(StoppedError):
        PooledEngine(pool, 1, stop).sample(SampleTask(random_prompts(rng, 9), 4, _SAMPLING, seed=1))
    assert_nothing_left(pool)
    assert all(a.finished <= b.finished and b.rollouts == 36 for a, b in pairwise(reports))


def test_a_task_needs_tokens_and_a_number_of_rollouts_and_a_seed_for_each_prompt() -> None:
    with pytest.raises(ValueError, match="3 rollout counts for 2 prompts"):
        SampleTask([[1], [2]], [1, 2, 3], _SAMPLING, seed=0)
    with pytest.raises(ValueError, match="1 seeds for 2 prompts"):
        SampleTask([[1], [2]], 4, _SAMPLING, seed=[0])
    for prompts, num_rollouts in ([[1], []], 4), ([[1]], 0), ([[1], [2]], [4, -1]):
        with pytest.raises(ValueError, match="at least one token and num_rollouts must be >= 1"):
            SampleTask(prompts, num_rollouts, _SAMPLING, seed=0)
