"""The pool: every accident ends in a reason, and nothing else notices."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from judges import CALLS, PID, call, execute, gone

from brorl.verification.sandbox import server
from brorl.verification.sandbox.inside.confinement import TRUSTED, UNSAFE
from brorl.verification.sandbox.pool import LoadError, VerifierCall, WorkerPool
from brorl.verification.sandbox.request import Reply
from brorl.verification.sandbox.server import ServerSettings

pytestmark = pytest.mark.linux


def alone(result: Reply) -> str | None:
    """The failure of a result that is one."""
    assert result.value is None
    return result.failure


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(num_workers=2, timeout_s=1.5, memory_bytes=96 << 20) as pool:
        yield pool


def test_values_come_back_in_order_from_several_processes(pool: WorkerPool, rng: np.random.Generator) -> None:
    values = rng.integers(0, 1000, size=200).tolist()
    results = pool.run([call("echo", value) for value in values])
    assert [result.value for result in results] == values
    assert all(result.failure is None and 0 <= result.seconds < 60 for result in results)
    pids = {result.value for result in pool.run([call("slow_pid", 0.1)] * 4)}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert pids == {result.value for result in pool.run([call("slow_pid", 0.1)] * 4)}  # the same ones again
    assert pool.run([]) == []


def test_items_share_calls_and_one_that_fails_costs_no_other(
    pool: WorkerPool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = rng.permutation(100).tolist()
    good = pool.map(f"{CALLS}:echo_each", values, -1)
    assert [(reply.value, reply.failure) for reply in good] == [(value, None) for value in values]
    assert all(0 <= reply.seconds < 60 for reply in good)
    nasty = int(rng.integers(100))
    for at_once in (1, 7, 32):
        replies = pool.map(f"{CALLS}:echo_each", values, nasty, at_once=at_once)
        expected = [(None, "verifier crashed") if value == nasty else (value, None) for value in values]
        assert [(reply.value, reply.failure) for reply in replies] == expected
    assert pool.map(f"{CALLS}:echo_each", [], nasty) == []
    calls: list[VerifierCall] = []
    monkeypatch.setattr(WorkerPool, "run", lambda _self, some: calls.extend(some) or [])
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        pool.map(f"{CALLS}:echo_each", list(range(100)), -1)
    assert [len(call.arguments[0]) for call in calls] == [32, 32, 32, 4]  # type: ignore[arg-type,index]


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text("ascii").split()}


@pytest.mark.slow
def test_workers_start_before_there_is_work() -> None:
    """They have imported what is expected when their first call arrives, and none starts where nothing is expected."""
    module = "brorl.verification.domains.units"
    before = children()
    with WorkerPool(2) as pool:
        pool.start()
        assert children() == before
        pool.expect(module)
        pool.start()
        early = children() - before
        assert len(early) == 2
        pool.start()
        imported = execute(f"import sys; value = {module!r} in sys.modules")
        assert [reply.value for reply in pool.run([imported] * 4)] == [True] * 4
        assert children() - before == early
    assert children() == before
    with WorkerPool(1) as pool:
        assert [reply.value for reply in pool.run([imported])] == [False]


@pytest.mark.parametrize(
    "value",
    ["", "\x00", "\ud800 alone", "\u202e", "x" * 3_000_000, [1, [2.5, None]], {"a": True}, 10**30, -0.0],
    ids=range(9),
)
def test_any_json_passes_unchanged(pool: WorkerPool, value: object) -> None:
    (result,) = pool.run([call("echo", value)])
    assert (repr(result.value), result.failure) == (repr(value), None)


STUBBORN = """
import contextlib
while True:
    with contextlib.suppress(BaseException): time.sleep(100)
"""
WRITING = """
for descriptor in range(64):
    try: os.write(descriptor, b"\\0\\0\\0\\5no JSON")
    except OSError: continue
"""
UNPRINTABLE = """
class UnprintableError(Exception):
    def __str__(self): raise RuntimeError
raise UnprintableError
"""


@pytest.mark.parametrize(
    ("accident", "reason"),
    [
        (call("slow_pid", 300), "timeout"),
        pytest.param(call("hang"), "timeout", marks=pytest.mark.slow),
        pytest.param(execute(STUBBORN), "timeout", marks=pytest.mark.slow),
        (execute("while True: KEPT.append(bytearray(1 << 23))"), "out of memory"),
        (execute("bytearray(1 << 40)"), "out of memory"),
        (execute("os.abort()"), "verifier crashed"),
        (execute("os._exit(0)"), "verifier crashed"),
        (execute(WRITING), "verifier crashed"),
        (execute("os.closerange(0, 256)"), "verifier crashed"),
        *(
            (execute(source), f"verifier raised {raised}")
            for source, raised in (
                ("value = 'x' * (1 << 24)", "ValueError: returned 16777218 bytes, more than 16777216"),
                ("raise SystemExit(3)", "SystemExit: 3"),
                (UNPRINTABLE, "UnprintableError: (its message cannot be shown)"),
                ("value = {1}", "TypeError: returned a value of type set; return bools, numbers, text, lists or dicts"),
            )
        ),
        (call("echo", 1, 2), "verifier raised TypeError: echo() takes 1 positional argument but 2 were given"),
    ],
)
def test_an_accident_has_its_reason_and_no_neighbour_notices(
    pool: WorkerPool, accident: VerifierCall, reason: str
) -> None:
    others = [call("echo", i) for i in range(6)]
    results = pool.run([*others[:3], accident, *others[3:]])
    assert alone(results.pop(3)) == reason
    assert [(result.value, result.failure) for result in results] == [(i, None) for i in range(6)]


def test_a_value_too_deep_for_this_process_is_a_crash(pool: WorkerPool) -> None:
    """The worker can write a value that this process cannot read; other calls go on."""
    nest = "import sys; sys.setrecursionlimit(30_000)\nvalue = 1\nfor _ in range(3_000): value = [value]"
    deep, other = pool.run([execute(nest), call("echo", 1)])
    assert alone(deep) == "verifier crashed"
    assert other.value == 1


FORGERY = """
import struct, sys
body = b'{"job": 0, "value": "forged", "retire": false}'
frame = struct.pack(">I", len(body)) + body
print("forged")
for descriptor in (0, 1, 2): os.write(descriptor, frame)
sys.stdout.buffer.write(frame)
sys.stdout.flush()
os.system("echo forged; cat")
value = f"honest {sys.stdin.read()!r}"
"""


def test_what_a_call_prints_is_no_answer(pool: WorkerPool, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor is a reply, as the protocol has it, that a call writes to where programs write."""
    results = pool.run([execute(FORGERY)] * 3)
    assert [result.value for result in results] == ["honest ''"] * 3
    assert capfd.readouterr() == ("", "")


def test_a_child_that_a_call_forks_does_not_answer(pool: WorkerPool) -> None:
    fork = execute("value = os.fork()")
    results = pool.run([fork, fork, call("slow_pid", 0.2), call("slow_pid", 0.2), call("echo", 1)])
    assert [result.failure for result in results] == [None] * 5
    assert all(result.value > 0 and gone(result.value) for result in results[:2])


def test_sets_have_the_same_order_in_every_worker(pool: WorkerPool) -> None:
    hashing = execute("time.sleep(0.1); value = [os.getpid(), hash('a word')]")
    hashes = {tuple(result.value) for result in pool.run([hashing] * 4)}
    assert len({pid for pid, _ in hashes}) == 2
    assert len({value for _, value in hashes}) == 1


def test_scalars_of_numpy_are_values(pool: WorkerPool) -> None:
    source = "import numpy as np; value = {'flag': np.bool_(True), 'score': np.float32(0.5)}"
    (result,) = pool.run([execute(source)])
    assert result.value == {"flag": True, "score": 0.5}


def test_a_worker_that_keeps_memory_is_replaced() -> None:
    """After 150 of 256 MiB the next call would have less than half."""
    keep = "KEPT.append(bytearray(arguments[0])); value = os.getpid()"
    with WorkerPool(num_workers=1, memory_bytes=256 << 20) as own:
        small = [result.value for result in own.run([execute(keep, 1 << 20)] * 3)]
        assert len(set(small)) == 1
        (big,) = own.run([execute(keep, 150 << 20)])
        assert big.value == small[0]
        assert own.run([PID])[0].value != small[0]


def test_loading_is_not_counted_as_the_time_of_a_call(pool: WorkerPool, tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(1.6)\ndef f(): return 1\n", "utf-8")
    (result,) = pool.run([VerifierCall(f"{slow}:f", ())])
    assert result.value == 1
    assert result.seconds < pool.timeout_s < 1.6


@pytest.mark.slow
def test_what_cannot_be_loaded_is_named(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = 1\nraise KeyError('at import')", "utf-8")
    (tmp_path / "exits.py").write_text("import os; os._exit(5)", "utf-8")
    (tmp_path / "bloated.py").write_text("x = bytearray(1 << 40)", "utf-8")
    for function, message in (
        ("no_such_module:f", "cannot load 'no_such_module:f': ModuleNotFoundError: No module named 'no_such_module'"),
        ("os:no_such_function", "has no attribute 'no_such_function'"),
        ("os:sep", "sep has type str, which is not callable"),
        ("os.getpid", "not of the form package.module:function"),
        (":f", "not of the form package.module:function"),
        (f"{tmp_path}/missing.py:f", "FileNotFoundError: no such file: .*missing.py"),
        (f"{tmp_path}/bad.py:f", "KeyError: 'at import'"),
        (f"{tmp_path}/exits.py:f", "3 new workers ended while loading it \\(exited with code 5\\)"),
        (f"{tmp_path}/bloated.py:f", "3 new workers ended while loading it \\(out of memory\\)"),
    ):
        with pytest.raises(LoadError, match=message):
            pool.run([VerifierCall(function, None)])
    with pytest.raises(LoadError, match=message):
        pool.run([call("echo", 1), VerifierCall(function, ()), call("echo", 2)])
    assert pool.run([call("echo", 3)])[0].value == 3


@pytest.mark.slow
def test_an_import_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("while True: pass", "utf-8")
    with WorkerPool(1, start_timeout_s=0.2) as pool, pytest.raises(LoadError, match="it took too long to start"):
        pool.run([VerifierCall(f"{tmp_path}/endless.py:f", None)])


def test_a_call_without_arguments_returns_what_a_function_takes(pool: WorkerPool, tmp_path: Path) -> None:
    source = "def f(a, b): ...\ndef g(a): ...\nclass H:\n  def __call__(self, a, b, prompt): ...\nh = H()\n"
    (tmp_path / "taking.py").write_text(source, "utf-8")
    results = pool.run([VerifierCall(f"{tmp_path}/taking.py:{name}", None) for name in "fgh"])
    assert [result.failure for result in results] == [None] * 3
    assert [result.value for result in results] == [
        {"takes": ["response", "reference"]},
        {"problem": "its parameters do not name a response and a reference"},
        {"takes": ["response", "reference", "prompt"]},
    ]


def test_an_alarm_that_a_call_left_does_not_strike_the_next() -> None:
    timers = "import signal\nfor timer in range(3): signal.setitimer(timer, 0.15)\nvalue = os.getpid()"
    spin = "end = time.monotonic() + 0.3\nwhile time.monotonic() < end: value = os.getpid()"
    with WorkerPool(num_workers=1) as pool:
        first, second = pool.run([execute(timers), execute(spin)])
    assert first.value == second.value


@pytest.mark.slow
def test_workers_killed_while_idle_cost_nothing() -> None:
    with WorkerPool(num_workers=4) as pool:
        for pid in {result.value for result in pool.run([call("slow_pid", 0.1)] * 4)}:
            os.kill(pid, signal.SIGKILL)
        assert [result.value for result in pool.run([call("echo", i) for i in range(5)])] == [0, 1, 2, 3, 4]


def test_a_timeout_kills_what_the_call_had_started(pool: WorkerPool, tmp_path: Path) -> None:
    (result,) = pool.run([call("hang", str(tmp_path / "pids"))])
    assert alone(result) == "timeout"
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text("ascii").split())


def test_close_ends_the_workers_and_a_forgotten_pool_closes() -> None:
    pool = WorkerPool(num_workers=1)
    (first,) = pool.run([PID])
    pool.close()
    pool.close()
    assert gone(first.value, 0.1)
    (second,) = pool.run([PID])
    assert second.value != first.value
    del pool
    assert gone(second.value, 0.1)


def test_a_fork_of_the_trainer_cannot_use_or_close_the_pool(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    (before,) = pool.run([PID])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        pool.close()
        with pytest.raises(RuntimeError, match="in a fork"):
            pool.run([PID])
    assert pool.run([PID])[0].value == before.value


# A trainer of its own: it starts its workers, tells their ids, and has them work for longer than the test.
TRAINER = """
import os, signal, sys, threading, time
from brorl.verification.sandbox.pool import VerifierCall, WorkerPool

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it

def train():
    pool = WorkerPool(num_workers=2, timeout_s=600)
    print(*{r.value for r in pool.run([VerifierCall(f"{calls}:slow_pid", (0.2,))] * 2)}, flush=True)
    if where == "fork" and os.fork() == 0:  # it inherits the lifeline's write end
        time.sleep(60)
        os._exit(0)
    if name != "idle":
        pool.run([VerifierCall(f"{calls}:{name}", tuple(arguments))] * 2)
    else:
        threading.Event().wait()

calls, where, name, *arguments = sys.argv[1:]
for _ in range(16):  # a killed process's threads end in any order, and its files close with the last
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
try:
    if where != "thread":
        train()
    else:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def start_trainer(where: str, name: str, *arguments: str) -> tuple["subprocess.Popen[str]", list[int]]:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, CALLS, where, name, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert trainer.stdout
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 2
    return trainer, pids


@pytest.mark.parametrize(
    ("where", "name"),
    [
        pytest.param("main", "idle", marks=pytest.mark.slow),
        pytest.param("main", "hang", marks=pytest.mark.slow),
        ("main", "hang with child"),
        pytest.param("thread", "idle", marks=pytest.mark.slow),
        ("thread", "hang"),
        pytest.param("fork", "hang", marks=pytest.mark.slow),
    ],
)
def test_no_worker_outlives_a_killed_trainer(where: str, name: str, tmp_path: Path) -> None:
    pids_file = tmp_path / "pids"
    has_child = name.endswith("child")
    trainer, pids = start_trainer(where, name.split()[0], *([str(pids_file)] if has_child else []))
    with trainer:
        while has_child and not (pids_file.exists() and " " in pids_file.read_text("ascii")):
            time.sleep(0.01)
        time.sleep(0.1)  # let them begin; whether they have does not matter
        assert not any(gone(pid, 0.01) for pid in pids)
        trainer.kill()
    if has_child:
        pids += [int(pid) for pid in pids_file.read_text("ascii").split()]
    assert all(gone(pid) for pid in pids)
    if where == "fork":
        os.killpg(trainer.pid, signal.SIGKILL)


@pytest.mark.slow
def test_an_interrupt_of_the_terminal_ends_the_trainer_without_a_word_of_the_workers() -> None:
    trainer, pids = start_trainer("main", "hang")
    with trainer:
        time.sleep(0.2)
        for pid in pids:  # a terminal does not even reach them
            os.kill(pid, signal.SIGINT)
        time.sleep(0.1)
        assert not any(gone(pid, 0.01) for pid in pids)
        os.killpg(trainer.pid, signal.SIGINT)
        output, errors = trainer.communicate(timeout=30)
    assert (output, errors) == ("interrupted\n", "")
    assert all(gone(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize("level", [TRUSTED, UNSAFE])
def test_a_server_started_after_its_trainer_has_ended_exits(level: str) -> None:
    """The trainer may die between the fork and the server's request for the lifeline's signal."""
    lifeline, write_end = os.pipe()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    settings = json.dumps(asdict(ServerSettings(level, packages=tuple(sys.path))))

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-c", server._BOOT, server._ROOT, settings],
            stdin=lifeline,
            stdout=theirs,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    with ours, theirs:
        with start() as process:
            assert not gone(process.pid, 0.2)  # it waits for work
            process.kill()
        os.close(write_end)
        with start() as process:
            _, errors = process.communicate(timeout=30)
            assert (process.returncode, errors) == (0, b"")
    os.close(lifeline)
