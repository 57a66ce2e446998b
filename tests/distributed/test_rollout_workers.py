"""Rollout workers on Ray give the trees of a local engine, bit for bit, whatever happens to the workers."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worker_engines import HUNG, LARGE, Fatal, NativeInBothPrecisions, unbuildable

from brorl.activity import Activity, Decoding
from brorl.errors import LearnerLostError, OutOfMemoryError, WorkersLostError
from brorl.rollout.engine import Engine, PooledEngine, SampleTask, TaskResult, prompt_seed
from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree
from small_models import small_model

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.linux,
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves the log files of its processes open
]

_SAMPLING = SamplingParams(max_new_tokens=20)


def make_pool(
    build: Callable[[], Engine], number: int, timeout_s: float = 600.0, max_restarts: int = 50
) -> tuple[Any, list[str]]:
    from brorl.distributed.actors import RolloutActors
    from brorl.distributed.supervisor import PoolConfig

    lines: list[str] = []
    pool_config = PoolConfig("rollout worker", number, lambda _: {"num_cpus": 1}, timeout_s, max_restarts)
    return RolloutActors(build, pool_config, echo=lines.append), lines


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, list[str], Path]]:
    """Two workers with the weights of seed 0, their messages, and the file that makes them hang."""
    hang = tmp_path_factory.mktemp("workers") / "hang"
    pool, lines = make_pool(partial(NativeInBothPrecisions, 0, hang), 2, timeout_s=10.0)
    yield pool, lines, hang
    pool.close()


def random_tasks(rng: np.random.Generator, number: int) -> list[SampleTask]:
    return [
        SampleTask(
            [rng.integers(1, 17, rng.integers(2, 12)).tolist() for _ in range(rng.integers(1, 4))],
            int(rng.integers(2, 40)),
            _SAMPLING,
            int(rng.integers(2**40)),
        )
        for _ in range(number)
    ]


def sampled(local: NativeInBothPrecisions, task: SampleTask) -> list[RolloutTree]:
    return local.sample(task)


def all_done(pool: Any, tickets: Iterable[int]) -> dict[int, TaskResult]:
    results: dict[int, TaskResult] = {}
    while not results.keys() >= set(tickets):
        results.update((result.ticket, result) for result in pool.done())
    return results


def random_weights(seed: int) -> list[tuple[str, Tensor]]:
    return list(small_model(seed=seed, dtype=torch.float64, scale=0.4).named_parameters())


@pytest.mark.slow
def test_trees_do_not_depend_on_the_number_of_workers(rng: np.random.Generator, shared: Any) -> None:
    draw = int(rng.integers(2**30))
    prompts = [rng.integers(1, 17, rng.integers(2, 12)).tolist() for _ in range(9)]
    rollouts = rng.integers(1, 60, 9).tolist()
    weights, local = random_weights(seed=int(rng.integers(2**30))), NativeInBothPrecisions(0)
    local.load_weights(weights, version=1)
    two_workers, _, _ = shared
    pools = [two_workers, make_pool(partial(NativeInBothPrecisions, 0), 1)[0]]
    try:
        assert [len(pool.supervisor.started) for pool in pools] == [2, 1]
        for pool in pools:
            pooled = PooledEngine(pool, prompts_per_task=2)
            pooled.load_weights(weights, version=1)
            for seed in (2 * draw, 2 * draw + 1):
                cuts, seeds = (
                    [slice(i, i + 2) for i in range(0, 9, 2)],
                    [prompt_seed(seed, number) for number in range(9)],
                )
                parts = [local.sample(SampleTask(prompts[cut], rollouts[cut], _SAMPLING, seeds[cut])) for cut in cuts]
                assert pooled.sample(SampleTask(prompts, rollouts, _SAMPLING, seed)) == [
                    tree for part in parts for tree in part
                ]
        assert pooled.sample(SampleTask([], 3, _SAMPLING, draw)) == []
    finally:
        for pool in pools[1:]:
            pool.close()


class Owner:
    """Another process that puts weights."""

    def put(self, seed: int) -> Any:
        from brorl.distributed.actors import RemoteWeights

        return RemoteWeights.put(random_weights(seed))


def read_until_lost(ref: Any) -> None:
    import ray

    while True:  # Ray takes a moment to notice the death of the owner
        ray.get(ref)


@pytest.mark.slow
def test_weights_that_are_lost_are_a_loss_of_the_learner(rng: np.random.Generator) -> None:
    """Another worker could not load them either."""
    import ray
    from ray.exceptions import ObjectLostError

    owner = ray.remote(num_cpus=0)(Owner).remote()
    weights = ray.get(owner.put.remote(int(rng.integers(2**30))))
    pool, lines = make_pool(partial(NativeInBothPrecisions, 0), 1, max_restarts=1)
    try:
        ray.kill(owner)
        with pytest.raises(ObjectLostError):
            read_until_lost(weights.ref)
        pool.publish(weights, version=1)
        pool.submit(random_tasks(rng, 1)[0])
        with pytest.raises(LearnerLostError, match="the learner's weights were lost with its machine"):
            pool.done()
        assert lines == []
    finally:
        pool.close()


@pytest.mark.slow
def test_killed_workers_are_replaced_and_their_tasks_sampled_again(rng: np.random.Generator, shared: Any) -> None:
    pool, lines, _ = shared
    weights, tasks = random_weights(seed=int(rng.integers(2**30))), random_tasks(rng, 24)
    kill_after = set(rng.choice(20, 2, replace=False).tolist())
    local, results = NativeInBothPrecisions(0), {}
    local.load_weights(weights, version=3)
    pool.publish(weights, version=3)
    tickets = [pool.submit(task) for task in tasks]
    assert tickets == sorted(tickets)
    while len(results) < len(tickets):
        if kill_after and len(results) >= min(kill_after):
            kill_after.remove(min(kill_after))
            sleep(rng.random() * 0.05)
            _, pid = pool.supervisor.started[rng.integers(len(pool.supervisor.started))]
            os.kill(pid, signal.SIGKILL)
            killed = pid
        results.update((result.ticket, result) for result in pool.done())
    for ticket, task in zip(tickets, tasks, strict=True):
        assert results[ticket].trees == sampled(local, task)
        assert results[ticket].version == 3
        assert results[ticket].seconds > 0
    while not any(f"process {killed})" in line for line in lines):
        pool.done(0.1)
        all_done(pool, [pool.submit(random_tasks(rng, 1)[0])])


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced(rng: np.random.Generator, shared: Any) -> None:
    pool, lines, hang = shared
    weights = random_weights(seed=int(rng.integers(2**30)))
    pool.publish(weights, version=4)
    hang.touch()
    lines.clear()
    tasks = [*random_tasks(rng, 3), SampleTask([HUNG], 5, _SAMPLING, seed=[prompt_seed(11, 7)]), *random_tasks(rng, 3)]
    tickets = [pool.submit(task) for task in tasks]
    results = all_done(pool, set(tickets) - {tickets[3]})
    while not lines:
        assert not pool.done(timeout_s=0.1)
    hang.unlink()
    results.update(all_done(pool, [tickets[3]]))
    local = NativeInBothPrecisions(0)
    local.load_weights(weights, version=4)
    assert [results[ticket].trees for ticket in tickets] == [sampled(local, task) for task in tasks]
    assert "was lost while sampling prompt 7 with seed 11: it did not answer for 10 seconds" in lines[0]


@pytest.mark.slow
def test_tasks_carry_the_version_of_their_weights(rng: np.random.Generator, shared: Any) -> None:
    from brorl.distributed.actors import RemoteWeights

    pool, _, _ = shared
    task, local = random_tasks(rng, 1)[0], NativeInBothPrecisions(0)
    tickets: list[tuple[int, int, list[tuple[str, Tensor]]]] = []
    for version in (11, 12, 13):  # tasks of the version before are queued and in progress when the weights change
        weights = random_weights(seed=int(rng.integers(2**30)))
        pool.publish(RemoteWeights.put(weights) if version == 12 else iter(weights), version)
        tickets += [(pool.submit(task), version, weights) for _ in range(4)]
    results = all_done(pool, [ticket for ticket, _, _ in tickets])
    weights_of = {version: weights for _, version, weights in tickets}
    for ticket, at_least, _ in tickets:
        assert results[ticket].version >= at_least
        local.load_weights(weights_of[results[ticket].version], results[ticket].version)
        assert results[ticket].trees == sampled(local, task)
    assert results[tickets[-1][0]].version == 13


@pytest.mark.slow
def test_an_error_of_the_engine_reaches_the_caller_and_ends_nothing_else(rng: np.random.Generator, shared: Any) -> None:
    pool, lines, _ = shared
    lines.clear()
    pooled = PooledEngine(pool)
    with pytest.raises(OutOfMemoryError, match=r"no row of prompt [23] fits") as caught:
        pooled.sample(SampleTask([[1, 2], [3, 4], LARGE, LARGE, [5, 6]], 4, _SAMPLING, seed=5))
    assert str(caught.value) in ("no row of prompt 2 fits", "no row of prompt 3 fits")
    assert "In an actor on" in caught.value.__notes__[0]
    assert "raise OutOfMemoryError" in caught.value.__notes__[0]
    assert pool.done() == []  # the other tasks of the call are discarded
    good = random_tasks(rng, 2)
    bad = pool.submit(SampleTask([LARGE], 4, _SAMPLING, seed=5))
    tickets, results = [pool.submit(task) for task in good], {}
    errors = 0
    while len(results) < 2 or not errors:
        try:
            results.update((result.ticket, result) for result in pool.done())
        except OutOfMemoryError:
            errors += 1
    assert (errors, bad in results, sorted(results)) == (1, False, tickets)
    assert not lines


@pytest.mark.slow
def test_discarded_tasks_are_not_returned(rng: np.random.Generator, shared: Any) -> None:
    pool, _, _ = shared
    tasks = random_tasks(rng, 12)
    tickets = [pool.submit(task) for task in tasks]
    discarded = set(rng.choice(tickets, 5, replace=False).tolist())
    pool.discard(discarded)
    results = all_done(pool, set(tickets) - discarded)
    assert results.keys() == set(tickets) - discarded
    assert pool.done() == []


@pytest.mark.slow
def test_a_result_that_was_lost_with_its_machine_is_sampled_again(
    rng: np.random.Generator, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker is taken for lost too."""
    import ray
    from ray.exceptions import ObjectLostError

    pool, _, _ = shared
    get, lost = ray.get, []

    def get_after_a_loss(ref: Any) -> Any:
        if len(lost) < 2:
            lost.append(ref)
            raise ObjectLostError(ref[0].hex(), None, "")
        return get(ref)

    weights, tasks = random_weights(seed=int(rng.integers(2**30))), random_tasks(rng, 4)
    pool.publish(weights, version=20)
    tickets = [pool.submit(task) for task in tasks]
    monkeypatch.setattr(ray, "get", get_after_a_loss)
    results = all_done(pool, tickets)
    local = NativeInBothPrecisions(0)
    local.load_weights(weights, version=20)
    assert [results[ticket].trees for ticket in tickets] == [sampled(local, task) for task in tasks]
    assert len(lost) == 2
    assert pool.done() == []


@pytest.mark.slow
def test_an_observer_can_end_a_call(rng: np.random.Generator, shared: Any) -> None:
    pool, _, hang = shared
    prompts = [rng.integers(1, 17, 5).tolist() for _ in range(4)]
    seen: list[Decoding] = []

    class StoppedError(Exception):
        pass

    def stop_after_three(activity: Activity) -> None:
        assert isinstance(activity, Decoding)
        seen.append(activity)
        if activity.finished >= 18:
            raise StoppedError

    hang.touch()
    engine = PooledEngine(pool, observe=stop_after_three)
    with pytest.raises(StoppedError):
        engine.sample(SampleTask([*prompts, HUNG], 6, _SAMPLING, seed=1))  # the last task never ends
    hang.unlink()
    assert [progress.finished for progress in seen] == sorted(progress.finished for progress in seen)
    assert {progress.rollouts for progress in seen} == {30}
    assert pool.done() == []
    whole: list[Decoding] = []
    trees = PooledEngine(pool, prompts_per_task=3, observe=whole.append).sample(
        SampleTask(prompts, 6, _SAMPLING, seed=1)
    )
    last = whole[-1]
    assert (last.finished, last.rollouts) == (24, 24)
    assert last.tokens == sum(len(tree.token) for tree in trees)
    assert last.depth == max(len(tokens) for tree in trees for tokens, _ in tree.responses())


@pytest.mark.slow
def test_too_many_losses_end_the_pool_with_the_last_cause() -> None:
    pool, lines = make_pool(Fatal, 1, max_restarts=1)
    try:
        pool.submit(SampleTask([[5, 6]], 4, _SAMPLING, seed=[prompt_seed(21, 3)]))
        with pytest.raises(WorkersLostError, match=r"while sampling prompt 3 with seed 21: .*max_restarts = 1 .*raise"):
            pool.done()
        with pytest.raises(WorkersLostError):
            pool.submit(SampleTask([[1, 2]], 4, _SAMPLING, seed=21))
    finally:
        pool.close()
    (line,) = lines
    assert "(restart 1 of at most 1)" in line


@pytest.mark.slow
def test_an_engine_that_cannot_be_built_is_an_error_at_once() -> None:
    with pytest.raises(OutOfMemoryError, match="the model does not fit"):
        make_pool(unbuildable, 2)


@pytest.mark.slow
def test_weights_are_equal_after_the_object_store(rng: np.random.Generator) -> None:
    from brorl.distributed.actors import RemoteWeights

    weights = [
        (str(dtype), torch.from_numpy(rng.normal(size=shape)).to(dtype))
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        for shape in ((), (3,), (4, 5), (2, 0))
    ]
    weights.append(("transposed", torch.from_numpy(rng.normal(size=(6, 3))).T))
    remote = RemoteWeights.put(weights)
    for _ in range(2):
        for (name, tensor), (other, expected) in zip(remote, weights, strict=True):
            assert (name, tensor.dtype, tensor.shape) == (other, expected.dtype, expected.shape)
            assert torch.equal(tensor, expected)
