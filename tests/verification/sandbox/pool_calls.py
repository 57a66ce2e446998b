"""Functions that workers call in the tests of the pool. Only the standard library."""

import os
import subprocess
import sys
import time
from pathlib import Path

KEPT: list[object] = []


def execute(source: str, *arguments: object) -> object:
    """Execute a source that finds `arguments`; return the `value` that it sets."""
    names: dict[str, object] = {"arguments": arguments, "os": os, "time": time, "KEPT": KEPT}
    exec(source, names)
    return names.get("value")


def echo(value: object) -> object:
    return value


def echo_each(values: list[object], nasty: object) -> list[object]:
    """Return the values; a nasty one ends the process."""
    if nasty in values:
        os._exit(3)
    return values


def slow_pid(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def hang(path: str = "") -> int:
    """Never return, and never let another thread of Python run; with a path, start a process first."""
    if path:
        child = subprocess.Popen(["sleep", "300"])
        Path(path).write_text(f"{os.getpid()} {child.pid}", "ascii")
    return pow(7, 10**8) % 10


def leave(how: str, path: str = "") -> int:
    """Start a process that leaves the group of its worker, and return its id; with a path, write the id and hang."""
    child = _daemon() if how == "daemon" else _grandchild() if how == "grandchild" else _child(how)
    if path:
        Path(path).write_text(str(child), "ascii")
        time.sleep(300)
    return child


def _child(how: str) -> int:
    options = {"session": {"start_new_session": True}, "group": {"process_group": 0}}[how]
    return subprocess.Popen(["sleep", "300"], **options).pid  # type: ignore[call-overload,no-any-return]


def _daemon() -> int:
    """Its parent ends at once."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        os.write(writer, str(child.pid).encode())
        os._exit(0)
    return int(os.read(reader, 32))


def _grandchild() -> int:
    source = "from subprocess import Popen; print(Popen(['sleep', '300'], process_group=0).pid, flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout
    KEPT.append(child)
    return int(child.stdout.readline())
