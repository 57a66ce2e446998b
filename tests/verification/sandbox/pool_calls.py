"""Functions that workers call in the tests of the pool. Only the standard library."""

import contextlib
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

KEPT: list[object] = []


def pid() -> int:
    return os.getpid()


def slow_pid(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def slow_hash(word: str) -> list[int]:
    time.sleep(0.1)
    return [os.getpid(), hash(word)]


def nested(depth: int) -> object:
    sys.setrecursionlimit(10 * depth)  # the worker can write it
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def echo(value: object) -> object:
    return value


def echo_each(values: list[object], nasty: object) -> list[object]:
    """Return the values; a nasty one ends the process."""
    if nasty in values:
        os._exit(3)
    return values


def is_imported(module: str) -> bool:
    return module in sys.modules


def sleepy_echo(seconds: float, value: object) -> object:
    time.sleep(seconds)
    return value


def hang_in_c() -> int:
    """Never returns, and never lets another thread of Python run."""
    return pow(7, 10**8) % 10


def hang_with_child(path: str) -> None:
    child = subprocess.Popen(["sleep", "300"])
    Path(path).write_text(f"{os.getpid()} {child.pid}", "ascii")
    hang_in_c()


def _leave(how: str) -> int:
    """Start a process that leaves the group of its worker; its id."""
    if how == "daemon":  # its parent ends at once
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.setsid()
            child = subprocess.Popen(["sleep", "300"], start_new_session=True)
            os.write(writer, str(child.pid).encode())
            os._exit(0)
        return int(os.read(reader, 32))
    if how == "grandchild":
        source = (
            "from subprocess import Popen; print(Popen(['sleep', '300'], process_group=0).pid, flush=True); input()"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert child.stdout
        KEPT.append(child)
        return int(child.stdout.readline())
    options = {"session": {"start_new_session": True}, "group": {"process_group": 0}}[how]
    return subprocess.Popen(["sleep", "300"], **options).pid  # type: ignore[call-overload,no-any-return]


def leave(how: str) -> int:
    return _leave(how)


def leave_and_hang(how: str, path: str) -> None:
    Path(path).write_text(str(_leave(how)), "ascii")
    hang()


def hang() -> None:
    time.sleep(300)


def hang_for_good() -> None:
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(100)


def fill_memory() -> int:
    blocks = []
    while True:
        blocks.append(bytearray(1 << 23))


def keep_memory(num_bytes: int) -> int:
    KEPT.append(bytearray(num_bytes))
    return os.getpid()


def set_alarms() -> int:
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0.15)
    return os.getpid()


def spin(seconds: float) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return os.getpid()


def crash() -> None:
    os.abort()


def leave_without_a_word() -> None:
    os._exit(0)


def print_a_forgery() -> str:
    """Writes an answer, as the protocol has it, to where programs write."""
    body = b'{"job": 0, "value": "forged", "retire": false}'
    frame = struct.pack(">I", len(body)) + body
    print("forged")
    for descriptor in (0, 1, 2):
        os.write(descriptor, frame)
    sys.stdout.buffer.write(frame)
    sys.stdout.flush()
    os.system("echo forged; cat")
    return f"honest {sys.stdin.read()!r}"


def write_everywhere() -> None:
    for descriptor in range(64):
        try:
            os.write(descriptor, b"\0\0\0\5no JSON")
        except OSError:
            continue


def close_everything() -> None:
    os.closerange(0, 256)


def fork() -> int:
    return os.fork()


def exit_in_a_thread_of_itself() -> None:
    raise SystemExit(3)


def raise_unprintable() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    raise UnprintableError


def return_a_set() -> object:
    return {1, 2}


def return_numpy() -> object:
    import numpy as np

    return {"flag": np.bool_(True), "score": np.float32(0.5)}


def big_reply() -> str:
    return "x" * (1 << 24)


def end_by_signal(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(300)


def end_once_by_signal(number: int, path: str) -> int:
    """Returns the process id if the file exists; else makes it and ends."""
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        return os.getpid()
    os.kill(os.getpid(), number)
    return -1


def end_with_child_that_holds_the_pipes(path: str) -> None:
    child = os.fork()
    if child:
        Path(path).write_text(str(child), "ascii")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)


def leave_a_file_and_end(folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)
