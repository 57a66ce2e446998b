"""An engine over a pool gives the trees of its tasks in order, in whichever order they are done."""

from collections.abc import Iterable
from itertools import count, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from brorl.activity import Activity, Decoding
from brorl.rollout.engine import PooledEngine, SampledTask, SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from small_models import small_model

_SAMPLING = SamplingParams(max_new_tokens=10)


class LocalPool:
    """Samples in this process: `done` returns open tasks in random order, and now and then none."""

    num_workers = 1

    def __init__(self, engine: NativeEngine, rng: np.random.Generator) -> None:
        self.engine = engine
        self.open: dict[int, SampleTask] = {}
        self.submitted: list[SampleTask] = []
        self._tickets = count(int(rng.integers(100)))
        self._rng = rng

    def submit(self, task: SampleTask) -> int:
        ticket = next(self._tickets)
        self.open[ticket] = task
        self.submitted.append(task)
        return ticket

    def done(self, timeout_s: float | None = None) -> list[SampledTask]:
        assert timeout_s is not None  # the observer must see time pass
        tickets = self._rng.permutation(list(self.open))[: self._rng.integers(3)].tolist()
        found = []
        for ticket in tickets:
            task = self.open.pop(ticket)
            trees = self.engine.sample(task.prompts, task.num_rollouts, task.sampling, task.seed, task.first)
            found.append(SampledTask(ticket, trees, self.engine.version, 0.1))
        return found

    def discard(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            self.open.pop(ticket, None)

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.engine.load_weights(weights, version)

    def close(self) -> None:
        pass


def local_pool(rng: np.random.Generator) -> LocalPool:
    model = small_model(seed=int(rng.integers(2**30)), dtype=torch.float64, scale=0.4)
    return LocalPool(NativeEngine(model, eos_token_id=0), rng)


def random_prompts(rng: np.random.Generator, number: int) -> list[list[int]]:
    return [rng.integers(1, 17, rng.integers(1, 9)).tolist() for _ in range(number)]


@pytest.mark.parametrize("size", [1, 3, 20])
def test_trees_are_those_of_the_tasks_in_order(rng: np.random.Generator, size: int) -> None:
    pool, prompts = local_pool(rng), random_prompts(rng, 8)
    rollouts, first = rng.integers(1, 30, 8).tolist(), int(rng.integers(1000))
    trees = PooledEngine(pool, size).sample(prompts, rollouts, _SAMPLING, seed=4, first=first)
    cuts = range(0, 8, size)
    assert [task.first for task in pool.submitted] == [first + i for i in cuts]
    expected = [
        pool.engine.sample(prompts[i : i + size], rollouts[i : i + size], _SAMPLING, 4, first + i) for i in cuts
    ]
    assert trees == [tree for part in expected for tree in part]
    counts = [tree.num_rollouts for tree in trees]
    assert counts == rollouts
    same = PooledEngine(pool, size).sample(prompts, 7, _SAMPLING, seed=4)
    assert [tree.num_rollouts for tree in same] == [7] * 8
    assert not pool.open


def test_weights_are_published_with_their_version(rng: np.random.Generator) -> None:
    pool, prompts = local_pool(rng), random_prompts(rng, 3)
    engine = PooledEngine(pool, 2)
    assert engine.version == 0
    weights = small_model(seed=int(rng.integers(2**30)), dtype=torch.float64, scale=0.4)
    engine.load_weights(iter(weights.named_parameters()), version=6)
    local = NativeEngine(weights, eos_token_id=0)
    assert engine.version == pool.engine.version == 6
    expected = local.sample(prompts[:2], 9, _SAMPLING, 1) + local.sample(prompts[2:], 9, _SAMPLING, 1, first=2)
    assert engine.sample(prompts, 9, _SAMPLING, seed=1) == expected


def test_an_observer_that_raises_discards_the_rest(rng: np.random.Generator) -> None:
    class StoppedError(Exception):
        pass

    reports: list[Decoding] = []

    def stop(activity: Activity) -> None:
        assert isinstance(activity, Decoding)
        reports.append(activity)
        if activity.finished >= 12:
            raise StoppedError

    pool = local_pool(rng)
    with pytest.raises(StoppedError):
        PooledEngine(pool, 1, stop).sample(random_prompts(rng, 9), 4, _SAMPLING, seed=1)
    assert not pool.open
    assert all(a.finished <= b.finished and b.rollouts == 36 for a, b in pairwise(reports))


def test_there_is_one_number_of_rollouts_for_each_prompt(rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="3 rollout counts for 2 prompts"):
        PooledEngine(local_pool(rng)).sample([[1], [2]], [1, 2, 3], _SAMPLING, seed=0)
