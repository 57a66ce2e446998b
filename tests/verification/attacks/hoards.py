"""Programs that hoard memory which no limit of the address space counts, and honest programs beside them in a cgroup.

In: `python -m attacks.hoards LEVEL [NAME ...] [--cgroup MIB]`, as root, in the environment of the tests. Out: a JSON
object on standard output, by the name of a hoard: `held_mib`, the most that its cgroup held beyond an idle worker;
`failures` of the programs that hoard; `honest`, how many programs beside them had which outcome. It runs in a process of
its own, which joins the cgroup.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.sandbox.request import Limits, Undecided
from brorl.verification.sandbox.worker import Worker

MIB = 1 << 20
MEMORY = 256 * MIB  # the limit of each program
_HOARD = Limits(3.0, MEMORY)
_HONEST = Limits(60.0, MEMORY)
_HONEST_PROGRAM = """
import time
block = bytearray(120 << 20)
for place in range(0, len(block), 4096): block[place] = 1
time.sleep(0.5)
print(sum(block[::4096]))
"""
_HONEST_OUTPUT = f"{120 * 256}\n"
_NUM_HOARDS, _NUM_HONEST = 4, 8
_ROOT = Path("/sys/fs/cgroup")
_OLD_ROOT = _ROOT / "memory"  # of version 1
_WATCH_S, _TRIES = 0.01, 500

_FILL = """
import os, socket, sys, time
def fill():
    kept = []
    while True:
        try:
            kept.extend(socket.socketpair())
        except OSError:
            break
    for one in kept:
        one.setblocking(False)
        for size in (1 << 16, 4096, 1):
            try:
                while True: one.send(bytes(size))
            except OSError:
                pass
    return kept
"""
_LIBC = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"

HOARDS: dict[str, str] = {
    "sockets in one descriptor table": f"{_FILL}kept = fill()\ntime.sleep(60)",
    "sockets in a descriptor table per thread (clone)": f"""{_FILL}{_LIBC}
kept, stacks, wait = None, [], ctypes.cast(libc.pause, ctypes.c_void_p)
for _ in range(60):
    kept = fill()
    stacks.append(ctypes.create_string_buffer(1 << 16))
    top = ctypes.c_void_p(ctypes.addressof(stacks[-1]) + (1 << 16) - 64 & ~15)
    if libc.clone(wait, top, 0x100 | 0x200 | 0x800 | 0x10000 | 0x40000, None) < 0: break
    for one in kept: one.close()
time.sleep(60)
""",
    "sockets in a descriptor table per thread (close_range)": f"""{_FILL}{_LIBC}
import threading
def own():
    if libc.syscall(ctypes.c_long(436), ctypes.c_uint(1000), ctypes.c_uint(1001), ctypes.c_uint(2)) < 0: return
    kept = fill()
    time.sleep(60)
threading.stack_size(1 << 16)
for _ in range(60): threading.Thread(target=own, daemon=True).start()
time.sleep(60)
""",
    "shared pages without a mapping": """
import mmap, time
kept = []
while True:
    one = mmap.mmap(-1, 64 << 20)
    for place in range(0, len(one), 4096): one[place] = 1
    one.resize(4096)
    kept.append(one)
""",
    "tables of pages far apart": f"""{_LIBC}
import os, time
mmap = libc.mmap
mmap.restype, mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
for number in range(60_000):
    at = mmap(0x100000000000 + (number << 30), 4096, 1, 0x22, -1, 0)
    if at in (None, 2**64 - 1): break
    ctypes.string_at(at, 1)
time.sleep(60)
""",
    "full pipes": """
import os, time
while True:
    try:
        reader, writer = os.pipe()
        os.write(writer, bytes(1 << 16))
        os.close(writer)
    except OSError:
        break
time.sleep(60)
""",
    "watched descriptors": """
import os, select, time
pollers, pairs = [], []
for _ in range(24): pollers.append(select.epoll())
for _ in range(12): pairs += os.pipe()
for other in range(64):
    for one in pairs:
        if other in pairs or other < 3 or any(other == poller.fileno() for poller in pollers): continue
        try:
            os.dup2(one, other)
            for poller in pollers: poller.register(other, select.EPOLLIN)
        except OSError:
            pass
time.sleep(60)
""",
}
"""What a program hoards, and its source."""


def hoard(source: str, worker: Worker) -> str:
    """Run a program that hoards memory, and return its failure."""
    return str(worker.run(source, "", _HOARD).failure)


def honest(worker: Worker) -> str:
    """Run an honest program that needs half of its memory; return `correct`, or what it was judged."""
    reply = worker.run(_HONEST_PROGRAM, "", _HONEST)
    return "correct" if reply.value == _HONEST_OUTPUT and reply.failure is None else str(reply.failure)


class Cgroup:
    """A cgroup with a limit of memory; an OSError where none can be made."""

    def __init__(self, limit_bytes: int | None) -> None:
        is_old = (_OLD_ROOT / "memory.limit_in_bytes").exists()
        self._root = _OLD_ROOT if is_old else _ROOT
        if not is_old:
            (self._root / "cgroup.subtree_control").write_text("+memory")
        self._group = self._root / f"brorl-{os.getpid()}-{time.monotonic_ns()}"
        self._group.mkdir()
        if limit_bytes is not None:
            (self._group / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(limit_bytes))
        self._usage = self._group / ("memory.usage_in_bytes" if is_old else "memory.current")

    def join(self) -> None:
        """Move this process into the cgroup, and what it will start."""
        (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def held(self) -> int:
        """Return the bytes that the cgroup holds."""
        return int(self._usage.read_text())

    @contextmanager
    def peak(self) -> Iterator[Callable[[], int]]:
        """Watch the cgroup; yield a function that returns the most bytes that it has held."""
        most, is_over = [self.held()], threading.Event()

        def watch() -> None:
            while not is_over.wait(_WATCH_S):
                most[0] = max(most[0], self.held())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield lambda: most[0]
        finally:
            is_over.set()
            thread.join()

    def leave(self) -> None:
        """Move this process to the root."""
        (self._root / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Remove the cgroup, which this process has left."""
        for _ in range(_TRIES):  # killed processes are still in it for a moment
            with suppress(OSError):
                self._group.rmdir()
                break
            time.sleep(_WATCH_S)


def run(level: str, name: str, limit_mib: int | None) -> dict[str, object]:
    """Run a program that hoards, alone without a limit of the cgroup, or four with eight honest ones beside them."""
    hoards = [partial(hoard, HOARDS[name])] * (1 if limit_mib is None else _NUM_HOARDS)
    beside = [honest] * (0 if limit_mib is None else _NUM_HONEST)
    cgroup = Cgroup(None if limit_mib is None else limit_mib * MIB)
    try:
        cgroup.join()
        with ProgramPool(num_workers=2, sandbox=level) as pool:
            pool.run([lambda worker: worker.run("import ctypes, mmap, socket, threading", "", _HONEST)] * 2)
            idle = cgroup.held()
            with cgroup.peak() as peak:
                outcomes = pool.run([*hoards[:2], *beside, *hoards[2:]])
    finally:
        cgroup.leave()
        cgroup.remove()
    shown = [f"unverified: {outcome.reason}" if isinstance(outcome, Undecided) else outcome for outcome in outcomes]
    first, last = len(hoards[:2]), len(hoards[:2]) + len(beside)
    return {
        "held_mib": round((peak() - idle) / MIB),
        "failures": dict(Counter(shown[:first] + shown[last:])),
        "honest": dict(Counter(shown[first:last])),
    }


def main() -> None:
    """Run the programs that the command line names, by default all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("level")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--cgroup", type=int, help="limit in MiB; honest programs run beside")
    arguments = parser.parse_args()
    names = arguments.names or [*HOARDS]
    json.dump({name: run(arguments.level, name, arguments.cgroup) for name in names}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
