"""Judges for tests: they return every reply. And the processes of the sandbox, as the system lists them."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from brorl.verification.sandbox.pool import ProgramPool, VerifierCall
from brorl.verification.sandbox.request import Limits, Reply
from brorl.verification.sandbox.worker import Judge, OutsideError, Worker

CALLS = str(Path(__file__).parent / "pool_calls.py")
Call = tuple[str, tuple[object, ...]]
LIMITS = Limits(seconds=60.0)  # never reached, however busy the machine is


def run_judge(source: str, stdin: str = "", limits: Limits = LIMITS) -> Judge[Reply]:
    return lambda worker: worker.run(source, stdin, limits)


def call_judge(source: str, *calls: Call, limits: Limits = LIMITS) -> Judge[list[Reply]]:
    """Load a program and call functions; the replies to the calls, or the one to a failed load."""

    def judge(worker: Worker) -> list[Reply]:
        loaded = worker.load(source, LIMITS)
        if loaded.failure:
            return [loaded]
        return [worker.call(function, arguments, limits) for function, arguments in calls]

    return judge


def outside_judge(source: str, function: str, *arguments: object) -> Judge[list[object]]:
    """Call a function that calls the outside functions `add` and `fail`; its calls, then its value or failure."""

    def judge(worker: Worker) -> list[object]:
        log: list[object] = []

        def add(*numbers: int) -> int:
            log.append(("add", *numbers))
            return sum(numbers)

        def fail(text: str) -> None:
            log.append(("fail", text))
            raise OutsideError(text)

        worker.load(source, LIMITS, "tests", {"add": add, "fail": fail})
        reply = worker.call(function, arguments, LIMITS, "tests")
        return [*log, reply.failure or reply.value]

    return judge


def ended(pool: ProgramPool, source: str, stdin: str = "", limits: Limits = LIMITS) -> Reply:
    (reply,) = pool.run([run_judge(source, stdin, limits)])
    assert isinstance(reply, Reply), reply
    return reply


def returned(
    pool: ProgramPool, source: str, *calls: tuple[str, tuple[object, ...]], limits: Limits = LIMITS
) -> list[Reply]:
    (replies,) = pool.run([call_judge(source, *calls, limits=limits)])
    assert isinstance(replies, list), replies
    assert all(isinstance(reply, Reply) for reply in replies), replies
    return replies  # type: ignore[return-value]


def descendants(pid: int) -> set[int]:
    """Return the processes below one that have not ended."""
    parent_of = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parent_of[int(entry.name)] = int(parent)
    pids = {pid}
    while more := {child for child, parent in parent_of.items() if parent in pids} - pids:
        pids |= more
    return pids - {pid}


def servers() -> set[int]:
    """Return the fork servers of this process."""
    return {pid for pid in descendants(os.getpid()) if b"fork_server" in command_line(pid)} - programs()


def programs() -> set[int]:
    """Return the sandboxed processes of this process: they are below another process of the same command line."""
    return {
        pid
        for parent in descendants(os.getpid())
        if b"fork_server" in command_line(parent)
        for pid in descendants(parent)
    }


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def call(name: str, *arguments: object) -> VerifierCall:
    """Return a call of one of the functions of `pool_calls`."""
    return VerifierCall(f"{CALLS}:{name}", arguments)


def execute(source: str, *arguments: object) -> VerifierCall:
    """Return a call that executes a source, which finds `arguments` and sets `value`."""
    return call("execute", source, *arguments)


END_BY = "os.kill(os.getpid(), arguments[0]); time.sleep(300)"
PID = execute("value = os.getpid()")


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Whether a process ends; a zombie that nobody has buried has ended."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not is_running(pid):
            return True
        time.sleep(0.01)
    return False


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(holds: Callable[[], bool], within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
