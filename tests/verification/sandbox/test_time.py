"""The time of programs: one core each, what counts as their time, and the time of a batch."""

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from judges import LIMITS, call_judge, ended, gone, returned, run_judge, wait_until

from brorl.verification.sandbox import request
from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.sandbox.request import JudgeTimeout, Limits, Reply, Undecided
from brorl.verification.sandbox.worker import Worker

pytestmark = pytest.mark.linux
SHORT = Limits(seconds=0.02)
ASLEEP = "import time\ntime.sleep(1000)"
HASHING = """
import hashlib, threading, time
data = bytes(1 << 20)
def spin(seconds):
    begun = time.thread_time()
    while time.thread_time() < begun + seconds: hashlib.sha256(data)
def spin_all(number, seconds):
    threads = [threading.Thread(target=spin, args=(seconds,)) for _ in range(number)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[ProgramPool]:
    with ProgramPool(num_workers=2) as pool:
        yield pool


def test_a_program_has_one_core_and_cannot_widen_it(pool: ProgramPool) -> None:
    source = """
import ctypes, os, threading
def widen():
    try: os.sched_setaffinity(0, range(os.cpu_count()))
    except PermissionError: pass
    mask = (1 << os.cpu_count()) - 1
    buffer = mask.to_bytes(128, 'little')
    for number in (203, 122):  # of x86-64 and of 64-bit ARM
        ctypes.CDLL(None).syscall(number, 0, 128, buffer)
    cores_of_thread = []
    thread = threading.Thread(target=lambda: cores_of_thread.append(sorted(os.sched_getaffinity(0))))
    thread.start(); thread.join()
    return [sorted(os.sched_getaffinity(0)), *cores_of_thread]
"""
    (reply,) = returned(pool, source, ("widen", ()))
    own, of_thread = reply.value  # type: ignore[misc]
    assert own == of_thread
    assert len(own) == 1
    assert set(own) <= os.sched_getaffinity(0)


@pytest.mark.slow
def test_workers_share_the_cores_of_the_trainer_evenly() -> None:
    cores = sorted(os.sched_getaffinity(0))

    def taken(number: int) -> list[int]:
        with ProgramPool(number, "unsafe") as own:
            replies = own.run([run_judge("import os\nprint(*os.sched_getaffinity(0))", limits=LIMITS)] * number)
            assert {int(reply.value) for reply in replies if isinstance(reply, Reply)} <= {*cores}
            return [worker.server.core for worker in own._idle]  # type: ignore[misc]

    taken_cores = taken(2 * len(cores) + 1)
    counts = [taken_cores.count(core) for core in cores]
    assert max(counts) - min(counts) <= 1
    os.sched_setaffinity(0, cores[-1:])
    try:
        assert taken(2) == cores[-1:] * 2
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.slow
def test_the_time_of_all_threads_counts(pool: ProgramPool) -> None:
    """Eight threads that take 1.3 s of a core together; threads that wait for each other are not denied their core."""
    limits = Limits(1.0)
    reply = ended(pool, f"{HASHING}spin_all(8, 0.16)", limits=limits)
    assert reply.failure == "timeout"
    (call,) = returned(pool, HASHING, ("spin_all", (8, 0.16)), limits=limits)
    assert call.failure == "timeout"


def test_only_others_deny_a_core(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Against a simulated core: each tick, one of the threads that are ready has it, or another process."""
    counts: list[tuple[float, float]] = []
    monkeypatch.setattr(request, "_threads", lambda _pid: iter(counts))
    monkeypatch.setattr(request.time, "clock_gettime", lambda _clock: sum(ran for ran, _ in counts))
    for _ in range(10):
        num_threads = int(rng.integers(1, 6))
        born = np.sort(rng.integers(0, 100, size=num_threads)) * (np.arange(num_threads) > 0)
        ran, waited, denied = np.zeros(num_threads), np.zeros(num_threads), 0
        seen: list[tuple[float, int]] = []
        for tick in range(300):
            ready = np.flatnonzero((born <= tick) & (rng.random(num_threads) < 0.7))
            others = bool(rng.random() < 0.3)
            if len(ready):
                has_it = -1 if others else int(rng.choice(ready))
                denied += others
                ran[ready] += ready == has_it
                waited[ready] += ready != has_it
            counts[:] = [*zip(ran[born <= tick].tolist(), waited[born <= tick].tolist(), strict=True)]
            counted = request.denied_s(1)
            assert counted is not None
            assert all(counted - before <= denied - so_far for before, so_far in seen)
            assert num_threads > 1 or counted == denied
            seen.append((counted, denied))


@pytest.mark.slow
def test_a_program_without_its_core_is_unverified(pool: ProgramPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wall time is over, and others had the core for most of it."""
    monkeypatch.setattr(request, "denied_s", lambda _pid: 0.99 * time.monotonic())
    assert pool.run([run_judge(ASLEEP, limits=SHORT)]) == [Undecided("the machine was overloaded")]
    assert pool.run([call_judge(f"def f():\n  {ASLEEP.replace(chr(10), ';')}", ("f", ()), limits=SHORT)]) == [
        Undecided("the machine was overloaded")
    ]


def test_time_without_a_core_does_not_count(pool: ProgramPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says how long others had it; here a constant part of the time."""
    source, limits = "import time\ntime.sleep(0.3)\nprint('done')", Limits(0.2)
    monkeypatch.setattr(request, "denied_s", lambda _pid: 0.0)
    assert ended(pool, source, limits=limits).failure == "timeout"
    monkeypatch.setattr(request, "denied_s", lambda _pid: 0.6 * time.monotonic())
    began = time.monotonic()
    reply = ended(pool, source, limits=limits)
    assert reply.value == "done\n"
    assert reply.seconds <= 0.41 * (time.monotonic() - began)
    began = time.monotonic()
    assert ended(pool, "while True: pass", limits=Limits(0.15)).failure == "timeout"
    assert time.monotonic() - began >= 0.3


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("level", ["auto", "unsafe"])
def test_of_the_programs_of_a_judge_only_the_one_that_is_asked_runs(level: str) -> None:
    """The threads of an answer would otherwise take the core from its test code."""
    source = "import os, threading, time\ndef pid(): return os.getpid()\n"
    threads = "for _ in range(5): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"

    def judge(worker: Worker) -> list[int]:
        pids: list[int] = []
        for name in ("answer", "tests"):
            assert worker.load(source + threads, LIMITS, name).failure is None
            pids.append(worker.call("pid", (), LIMITS, name).value)
        for asked, other in ((0, 1), (1, 0), (0, 1)):
            worker.call("pid", (), LIMITS, ("answer", "tests")[asked])
            wait_until(lambda other=other: state(pids[other]) == "T", 10)  # type: ignore[misc]
            assert state(pids[asked]) in "RS"
        return pids

    with ProgramPool(1, level) as own:
        (pids,) = own.run([judge])
    assert isinstance(pids, list), pids
    assert all(gone(pid) for pid in pids)


def test_what_threads_take_between_two_requests_counts(pool: ProgramPool) -> None:
    source = """
import hashlib, threading, time
def start():
    threading.Thread(target=hashlib.pbkdf2_hmac, args=('sha256', b'', b'', 10**9), daemon=True).start()
    return time.process_time()
def used(): return time.process_time()
"""

    def judge(worker: Worker) -> tuple[float, float]:
        worker.load(source, LIMITS)
        started = worker.call("start", (), LIMITS)
        time.sleep(0.3)  # the trainer compares values
        reply = worker.call("used", (), LIMITS)
        return reply.seconds, reply.value - started.value

    (outcome,) = pool.run([judge])
    assert isinstance(outcome, tuple), outcome
    charged, used = outcome
    assert charged > 0.5 * used


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 300_000], ids=["short", "long"])
def test_the_work_for_others_is_no_time_of_a_program(length: int) -> None:
    """The judges of other programs compare while a reply arrives: that is hardly any time of its program."""

    def judge(worker: Worker) -> float:
        worker.load(f"def f(): return 'a' * {length}", LIMITS)
        seconds = 0.0
        for _ in range(5):
            reply = worker.call("f", (), LIMITS)
            assert reply.failure is None
            seconds += reply.seconds
            compared = time.thread_time() + 0.1
            while time.thread_time() < compared:
                pass
        return seconds

    with ProgramPool(6) as own:
        own.run([run_judge("")] * 6)  # starts the servers
        began = time.monotonic()
        seconds = own.run([judge] * 6)
        took = time.monotonic() - began
    assert all(isinstance(value, float) and value < took / 2 for value in seconds), (seconds, took)


@pytest.mark.slow
def test_programs_that_sleep_take_no_more_than_the_time_of_a_batch() -> None:
    """They have used their part, and are graded; programs that need little are correct, wherever they stand."""
    batch_s, sleepers = 8.0, 24
    judges = [run_judge(ASLEEP, limits=LIMITS)] * sleepers
    for place in (0, 10, len(judges) + 2):
        judges.insert(place, run_judge("print(1)"))
    with ProgramPool(2, batch_timeout_s=batch_s) as own:
        ended(own, "")
        began = time.monotonic()
        replies = own.run(judges)
        took = time.monotonic() - began
        assert ended(own, "print(2)").value == "2\n"
    assert took < 4 * batch_s
    assert [reply.value for reply in replies if isinstance(reply, Reply)] == ["1\n"] * 3
    assert sum(isinstance(reply, JudgeTimeout) for reply in replies) == sleepers


@pytest.mark.slow
def test_cheap_programs_are_decided_first() -> None:
    """A program that needs more than its part of the time runs again after all others."""
    begun: list[str] = []

    def judge(name: str, source: str, worker: Worker) -> Reply:
        begun.append(name)
        return worker.run(source, "", LIMITS)

    slow = "import time\ntime.sleep(1.5)\nprint(1)"
    with ProgramPool(1, batch_timeout_s=10.0) as own:
        replies = own.run([partial(judge, "slow", slow)] + [partial(judge, "cheap", "print(1)")] * 4)
    assert begun == ["slow", *["cheap"] * 4, "slow"]
    assert [reply.value for reply in replies if isinstance(reply, Reply)] == ["1\n"] * 5


@pytest.mark.slow
def test_programs_that_never_ran_are_unverified() -> None:
    def judge(worker: Worker) -> Reply:
        time.sleep(0.5)  # the trainer is busy
        return worker.run("print(1)", "", LIMITS)

    with ProgramPool(1, batch_timeout_s=0.2) as own:
        outcomes = own.run([judge, run_judge("print(1)")])
    assert [type(outcome) for outcome in outcomes] == [Undecided, Undecided]
    assert "verification.batch_timeout_s" in outcomes[0].reason  # type: ignore[union-attr]
