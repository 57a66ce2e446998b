"""The simulated queue against token-by-token loops, closed forms, and the conservation of work."""

from collections import deque
from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from numpy.typing import NDArray

from brorl.planning.cluster.queue_simulation import DecodingWorker, Queue, simulate_queue

FloatArray = NDArray[np.float64]


def equal(length: float):  # type: ignore[no-untyped-def]
    return lambda number, _: np.full(number, float(length))


def exponential(mean: float):  # type: ignore[no-untyped-def]
    return lambda number, generator: generator.exponential(mean, number)


def token_by_token(lengths: list[int], seconds_B: FloatArray) -> float:
    """Decode one token of each running row per step, and fill free slots from the queue before each step."""
    waiting, running, time = deque(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < seconds_B.size - 1:
            running.append(waiting.popleft())
        time += seconds_B[len(running)]
        running = [left - 1 for left in running if left > 1]
    return time


@pytest.mark.parametrize("slots", [1, 3, 8, 40])
def test_a_worker_takes_the_time_of_a_loop_over_tokens(slots: int) -> None:
    generator = np.random.default_rng()
    seconds_B = np.cumsum(generator.random(slots + 1))
    lengths = generator.integers(1, 30, 25)
    worker: DecodingWorker[int] = DecodingWorker(seconds_B)
    worker.add(0.0, lengths.astype(np.float64), 0)
    time, ended = 0.0, 0
    while ended < lengths.size:
        time = worker.next_end()
        ended += len(worker.finish(time))
    assert time == pytest.approx(token_by_token(lengths.tolist(), seconds_B))


def test_a_synchronous_step_of_equal_lengths() -> None:
    """2 workers, 4 groups of 3 rows, 4 slots: each worker runs 2 groups, 6 rows, as 4 rows and then 2."""
    queue = Queue(
        workers=2, step_seconds_B=np.array([0.0, 1.0, 1.5, 1.75, 2.0]), group_rows=3, groups=4, learn_seconds=11.0,
        publish_seconds=5.0, verify_seconds=0.25,
    )  # fmt: skip
    result = simulate_queue(queue, equal(10), seed=0, steps=3)
    assert result.seconds == pytest.approx(10 * 2.0 + 10 * 1.5 + 4 * 0.25 + 11 + 5)
    assert result.sampled_tokens == pytest.approx(4 * 3 * 10)
    assert result.learner_busy == pytest.approx(11 / result.seconds)
    assert result.staleness == 0


def test_a_synchronous_step_waits_for_the_longest_response() -> None:
    """With a slot for every row and constant steps: the mean of the maximum of exponentials is a harmonic number."""
    rows = 64
    queue = Queue(1, np.full(rows + 1, 0.5), group_rows=16, groups=4, learn_seconds=0.0)
    result = simulate_queue(queue, exponential(10.0), seed=int(np.random.default_rng().integers(2**31)), steps=1000)
    harmonic = (1 / np.arange(1, rows + 1)).sum()
    assert result.seconds == pytest.approx(0.5 * 10 * harmonic, rel=0.05)


def test_more_workers_shorten_sampling_alone() -> None:
    """Amdahl: learning and publishing stay; equal lengths and constant steps divide sampling exactly."""
    queue = Queue(1, np.full(9, 0.1), group_rows=8, groups=16, learn_seconds=3.0, publish_seconds=0.5)
    for workers in (1, 2, 4, 8, 16, 64):
        seconds = simulate_queue(replace(queue, workers=workers), equal(20), seed=1, steps=2).seconds
        assert seconds == pytest.approx(ceil(16 / workers) * 20 * 0.1 + 3.5)


def test_whole_groups_bound_the_useful_workers() -> None:
    """A group of 8 rows in 4 tasks runs on 4 workers."""
    queue = Queue(32, np.arange(9) * 0.1, group_rows=8, groups=4, learn_seconds=0.0)
    assert simulate_queue(queue, equal(10), seed=0, steps=2).seconds == pytest.approx(10 * 0.8)
    assert simulate_queue(replace(queue, parts=4), equal(10), seed=0, steps=2).seconds == pytest.approx(10 * 0.2)


def test_an_asynchronous_step_takes_its_longest_side() -> None:
    sampling = Queue(1, np.full(5, 0.1), 4, groups=10, learn_seconds=2.0, publish_seconds=0.0, mode="async")
    slow = simulate_queue(sampling, equal(10), seed=0, steps=20)
    assert slow.seconds == pytest.approx(10 * 10 * 0.1, rel=0.02)
    learning = replace(sampling, learn_seconds=30.0)
    fast = simulate_queue(learning, equal(10), seed=0, steps=20)
    assert fast.seconds == pytest.approx(30.0, rel=1e-6)
    assert fast.learner_busy == pytest.approx(1.0)


def test_verification_is_an_m_d_1_queue() -> None:
    """One slot, one row per group, exponential lengths: departures are a Poisson process, and service is constant."""
    mean, service = 10.0, 5.0
    queue = Queue(
        1, np.array([0.0, 1.0]), 1, groups=50, learn_seconds=0.0, verify_seconds=service, mode="async", max_staleness=64
    )  # fmt: skip
    result = simulate_queue(queue, exponential(mean), seed=int(np.random.default_rng().integers(2**31)), steps=400)
    load = service / mean
    assert result.verify_wait == pytest.approx(service * load / (2 * (1 - load)), rel=0.17)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_staleness_is_bounded(staleness: int) -> None:
    queue = Queue(
        4, np.linspace(0, 1, 9), 4, groups=6, learn_seconds=25.0, publish_seconds=1.0, kept_fraction=0.6, mode="async",
        max_staleness=staleness,
    )  # fmt: skip
    seed = int(np.random.default_rng().integers(2**31))
    result = simulate_queue(queue, exponential(30.0), seed=seed, steps=60)
    assert 0 <= result.staleness <= staleness
    assert result == simulate_queue(queue, exponential(30.0), seed=seed, steps=60)
    if staleness:
        on_policy = simulate_queue(replace(queue, max_staleness=0), exponential(30.0), seed=seed, steps=60)
        assert result.seconds < on_policy.seconds


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_work_is_conserved(mode: str) -> None:
    """Kept groups are the fraction of the sampled ones; no worker decodes faster than with all slots busy."""
    seconds_B = 0.02 + 0.001 * np.arange(17)
    queue = Queue(3, seconds_B, 8, groups=20, learn_seconds=1.0, kept_fraction=0.5, mode=mode)  # type: ignore[arg-type]
    result = simulate_queue(queue, exponential(50.0), seed=int(np.random.default_rng().integers(2**31)), steps=100)
    assert result.sampled_groups == pytest.approx(20 / 0.5, rel=0.1)
    assert result.sampled_tokens / result.sampled_groups == pytest.approx(8 * 50, rel=0.05)
    assert result.sampled_tokens <= 1.02 * result.seconds * 3 * 16 / seconds_B[16]


def test_impossible_queues() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Queue(0, np.ones(2), 1, 1, 1.0)
    with pytest.raises(ValueError, match="parts must be at most group_rows"):
        Queue(1, np.ones(2), 2, 1, 1.0, parts=3)
