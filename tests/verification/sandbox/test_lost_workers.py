"""Calls that infrastructure failures ended: they are made once more and then have no verdict."""

import os
import signal
import threading
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from judges import END_BY, call, execute, gone, programs

from brorl.prompts.prompt import Prompt
from brorl.verification.domains.math import MathVerifier
from brorl.verification.domains.verifiers import FunctionVerifier
from brorl.verification.sandbox import request, worker
from brorl.verification.sandbox.pool import LoadError, VerifierCall, WorkerPool
from brorl.verification.sandbox.request import LostError
from brorl.verification.sandbox.server import Server, ServerSettings

pytestmark = pytest.mark.linux
LOST = "unverified: a worker was lost"


def prompt_with(reference: str) -> Prompt:
    return Prompt("0", "text", (1,), reference, "math", "source")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_twice_is_lost(number: int) -> None:
    with WorkerPool(num_workers=2) as pool:
        results = pool.run([call("echo", 1), *[execute(END_BY, number)] * 2, call("echo", 2)])
    assert [r.failure for r in results] == [None, LOST, LOST, None]
    assert [r.value for r in results] == [1, None, None, 2]


@pytest.mark.slow
def test_a_machine_that_ends_every_worker_is_given_up_soon(tmp_path: Path) -> None:
    """Each attempt leaves a file; 16 lost calls in a row are enough, and the pool works again in the next run."""
    leave = f"import pathlib; pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch(); {END_BY}"
    with WorkerPool(num_workers=2) as pool:
        results = pool.run([execute(leave, signal.SIGKILL)] * 500)
        assert [r.failure for r in results] == [LOST] * 500
        assert 16 <= len(list(tmp_path.iterdir())) <= 17
        assert [r.value for r in pool.run([call("echo", i) for i in range(5)])] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGXCPU])
def test_a_crash_of_the_call_is_its_own_fault(number: int) -> None:
    with WorkerPool(num_workers=1) as pool:
        (result,) = pool.run([execute(END_BY, number)])
    assert result.failure == "verifier crashed"


def test_a_lost_worker_whose_child_holds_the_pipes_is_lost_and_the_child_ends(tmp_path: Path) -> None:
    fork = "child = os.fork()\nif child: open(arguments[1], 'w').write(str(child)); os.kill(os.getpid(), arguments[0])"
    with WorkerPool(num_workers=1, timeout_s=1.5) as pool:
        (result,) = pool.run([execute(f"{fork}\ntime.sleep(300)", signal.SIGKILL, str(tmp_path / "pid"))])
    assert result.failure == LOST
    assert gone(int((tmp_path / "pid").read_text("ascii")))


@pytest.mark.slow
def test_workers_killed_from_outside_during_a_run_change_no_result(rng: np.random.Generator) -> None:
    """Every worker that runs is killed a few times; each call has its value, or was lost twice."""
    values = rng.integers(0, 1000, size=60).tolist()
    with WorkerPool(num_workers=2) as pool:
        pool.run([call("echo", 0)])
        ended = threading.Event()
        killed: set[int] = set()

        def kill() -> None:
            while not ended.wait(0.15):
                for worker in programs():
                    os.kill(worker, signal.SIGKILL)
                    killed.add(worker)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            results = pool.run([execute("time.sleep(0.02); value = arguments[0]", value) for value in values])
        finally:
            ended.set()
            killer.join()
    assert killed
    assert {r.failure for r in results} <= {None, LOST, "unverified: a process ended before it was confined"}
    assert all(r.value == value for r, value in zip(results, values, strict=True) if r.failure is None)


def failing_starts(monkeypatch: pytest.MonkeyPatch, fails: "list[bool]") -> None:
    """Starts of processes fail where the list says so, one entry per start; the last entry holds for all others."""

    def maybe(settings: ServerSettings) -> Server:
        if fails.pop(0) if len(fails) > 1 else fails[0]:
            raise LostError("a process could not be started: [Errno 11] Resource temporarily unavailable")
        return Server(settings)

    monkeypatch.setattr(worker, "Server", maybe)
    monkeypatch.setattr(worker, "_BETWEEN_STARTS_S", 0.01)


def test_the_first_process_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_starts(monkeypatch, [True])
    message = "no verification worker can start: .*Resource temporarily unavailable; free memory or processes"
    with WorkerPool(num_workers=2) as pool, pytest.raises(LoadError, match=message):
        pool.run([call("echo", 1)])


@pytest.mark.slow
def test_a_process_that_cannot_start_later_is_a_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerPool(num_workers=2) as pool:
        assert pool.run([call("echo", 1)])[0].value == 1
        pool.close()
        failing_starts(monkeypatch, [True])
        results = pool.run([call("echo", i) for i in range(3)])
        reason = "unverified: a process could not be started: [Errno 11] Resource temporarily unavailable"
        assert [r.failure for r in results] == [reason] * 3
        failing_starts(monkeypatch, [False])
        assert [r.value for r in pool.run([call("echo", i) for i in range(3)])] == [0, 1, 2]


@pytest.mark.slow
def test_a_run_continues_with_the_processes_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four processes starts, and a start that fails for a while succeeds later."""
    with WorkerPool(num_workers=4) as pool:
        failing_starts(monkeypatch, [False, True])
        assert [r.value for r in pool.run([call("echo", i) for i in range(5)])] == [0, 1, 2, 3, 4]
        pool.close()
        failing_starts(monkeypatch, [True, True, False])
        assert [r.value for r in pool.run([call("echo", i) for i in range(5)])] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_a_function_that_no_longer_loads_loses_its_calls_alone(tmp_path: Path) -> None:
    file = tmp_path / "changing.py"
    file.write_text("def f(x): return x\n", "utf-8")
    with WorkerPool(num_workers=1) as pool:
        assert pool.run([VerifierCall(f"{file}:f", (1,))])[0].value == 1
        pool.close()
        for source, why in (("def f(", "SyntaxError"), ("import os; os._exit(9)", "exited with code 9")):
            file.write_text(source, "utf-8")
            first, second, third = pool.run(
                [VerifierCall(f"{file}:f", (1,)), call("echo", 2), VerifierCall(f"{file}:f", (3,))]
            )
            assert second.value == 2
            for result in (first, third):
                assert result.failure is not None
                assert result.failure.startswith(f"unverified: a worker cannot start: {why}")
            pool.close()


def test_a_call_that_has_used_its_limit_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the kernel counts more waiting between the decision to stop it and the end of the worker."""
    counts = cycle([0.0, 0.0, 0.5])  # when the call begins, when its limit is reached, and later
    monkeypatch.setattr(request, "denied_s", lambda _pid: next(counts))
    with WorkerPool(num_workers=1, timeout_s=0.3) as pool:
        (result,) = pool.run([call("slow_pid", 300)])
    assert result.failure == "timeout"


@pytest.mark.slow
def test_verifiers_do_not_score_a_lost_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "import os, signal\ndef f(response, reference):\n"
        "    if response == 'lost': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    if response == 'gave up': return {'correct': False, 'reason': 'unverified: the server did not answer'}\n"
        "    if response == 'forged': return {'correct': True, 'reason': 'unverified: but correct'}\n"
        "    return response == reference\n",
        "utf-8",
    )
    with WorkerPool(num_workers=2) as pool:
        mine = FunctionVerifier(pool, f"{source}:f", "mine")
        texts = ["yes", "no", "lost", "gave up", "forged"]
        verdicts = mine.verify_all([(prompt_with("yes"), text) for text in texts])
        assert [(v.correct, v.score, v.unverified) for v in verdicts] == [
            (True, 1.0, False), (False, 0.0, False), (False, 0.0, True), (False, 0.0, True), (False, 0.0, False),
        ]  # fmt: skip
        assert verdicts[2].reason == LOST
        assert verdicts[3].reason == "unverified: the server did not answer"
        assert verdicts[4].reason.startswith("verifier returned ")

        math = MathVerifier(pool)
        items = [(prompt_with("1/2"), "\\boxed{0.5}"), (prompt_with("1/2"), "\\boxed{1/2}")]
        assert [v.correct for v in math.verify_all(items)] == [True, True]
        math = MathVerifier(pool)
        pool.close()
        failing_starts(monkeypatch, [True])
        worker, text = math.verify_all(items)
        assert (worker.unverified, worker.extracted) == (True, "0.5")
        assert text.correct
        with pytest.raises(LoadError, match="cannot check reference answers"):
            math.check_references(["1/2"])
        failing_starts(monkeypatch, [False])
        assert all(v.correct for v in math.verify_all(items))  # nothing was kept of the lost call
