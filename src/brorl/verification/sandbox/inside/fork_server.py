"""The fork server: a small process that loads the standard library and forks to start a worker's processes.

Over a socket, the parent sends the descriptors for a new process or the number of a process to kill. The server reports
when a process has ended. The server is started by exec, never as a fork of a process that may hold a GPU. It inherits
no other descriptors from its parent, and it inherits the parent's environment only if it is trusted.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType
from typing import Any

from brorl.verification.sandbox.inside.confinement import (
    LANDLOCK,
    MAX_DESCRIPTORS,
    MAX_THREADS,
    SECCOMP,
    TRUSTED,
    Confinement,
)
from brorl.verification.sandbox.inside.functions import Functions
from brorl.verification.sandbox.inside.program import (
    OUT_OF_MEMORY,
    READY,
    TOO_MANY_THREADS,
    UNCONFINED,
    Frame,
    serve,
    write_frame,
)
from brorl.verification.sandbox.request import denied_s

_PRELOADED = (
    *("abc", "array", "bisect", "calendar", "cmath", "collections.abc", "contextlib", "copy", "dataclasses"),
    *("datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "math"),
    *("numbers", "operator", "queue", "random", "re", "statistics", "string", "struct", "textwrap", "threading"),
    *("time", "types", "typing", "unicodedata"),
)
_LEFT_OUT = frozenset({"_tkinter", "nis"})
_INSTALLED = ("site-packages", "dist-packages")
_TESTS = ("test", "tests", "idle_test")
_FOLDER = os.path.dirname(os.__file__)
_EXTENSIONS = os.path.join(_FOLDER, "lib-dynload")


def _load_library(level: str, modules: Sequence[str]) -> None:
    """Before any fork, import whatever programs at this level cannot import themselves or would lose time importing."""
    for module in (*_PRELOADED, *modules):
        importlib.import_module(module)
    if level == LANDLOCK:
        _load_libraries()
    if level == SECCOMP:
        for path in _extension_files().values():
            _load(path)
        sys.meta_path.insert(sys.meta_path.index(PathFinder), _Memory())


def library_folders() -> list[str]:
    """Return the directories that programs can import from: the standard library and installed packages."""
    folders = [path for path in sys.path if path in (_FOLDER, _EXTENSIONS) or path.endswith(_INSTALLED)]
    return [path for path in folders if os.path.isdir(path)]


def _extension_files() -> dict[str, str]:
    """Return the standard library's extension modules: name -> path."""
    with contextlib.suppress(OSError):  # without the folder, all modules are built in
        files = [file for file in sorted(os.listdir(_EXTENSIONS)) if file.endswith(tuple(EXTENSION_SUFFIXES))]
        paths = {file.partition(".")[0]: os.path.join(_EXTENSIONS, file) for file in files}
        return {name: paths[name] for name in paths if name in sys.stdlib_module_names - _LEFT_OUT}
    return {}


def _load(path: str) -> int | None:
    """Load a library without running module code, and return its handle, or None if it cannot be loaded."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL(path)._handle
    return None


def _load_libraries() -> None:
    """Load the libraries that extension modules link to, but not the modules: fewer mappings make forks faster."""
    extensions = [*_extension_files().values()]
    handles = [_load(path) for path in extensions]
    for path in _mapped() - {os.path.realpath(path) for path in extensions}:
        _load(path)
    for handle in handles:
        if handle is not None:
            _ctypes.dlclose(handle)


def _mapped() -> set[str]:
    """Return the paths of the libraries that this process has loaded."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        lines = [line.rstrip("\n").split(maxsplit=5) for line in file]
    return {fields[5] for fields in lines if len(fields) == 6 and "x" in fields[1] and fields[5].startswith("/")}


class _Memory:
    """Finds standard-library modules without opening a file."""

    def __init__(self) -> None:
        self._extensions = _extension_files()
        self._sources = dict(_sources(_FOLDER, ""))

    def find_spec(self, name: str, _path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        """Return the spec of a standard-library module; None for any other module."""
        if name in self._extensions:
            path = self._extensions[name]
            return spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
        if name not in self._sources:
            return None
        loader = self._sources[name]
        folders = [os.path.dirname(loader.path)] if os.path.basename(loader.path) == "__init__.py" else None
        return spec_from_file_location(name, loader.path, loader=loader, submodule_search_locations=folders)


class _KeptLoader(SourceFileLoader):
    """Loads a module from code that was read when the loader was created."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, path)
        self._code = super().get_code(name)

    def get_code(self, _name: str) -> CodeType | None:
        """Return the code without opening a file."""
        return self._code


def _sources(folder: str, package: str) -> Iterator[tuple[str, _KeptLoader]]:
    """Yield the name and loader of each module in a standard-library folder and its subfolders."""
    for entry in os.scandir(folder):
        name = entry.name.removesuffix(".py")
        if entry.is_dir() and name.isidentifier() and name not in (*_INSTALLED, *_TESTS):
            yield from _sources(entry.path, f"{package}{name}.")
        elif name != entry.name:
            full = package.removesuffix(".") if name == "__init__" else package + name
            with contextlib.suppress(OSError, SyntaxError):
                yield full, _KeptLoader(full, entry.path)


_WATCH_S = 0.02  # interval between counts of the processes' threads and page tables
_MIN_TABLES, _BYTES_PER_TABLE_BYTE = 16 << 20, 256  # contiguous memory needs half as much
_ORPHANS_S = 5.0  # killed orphans must end within this time
_BETWEEN_LOOKS_S = 0.001  # interval between searches for orphans
_PARENT = 1  # index of a field in /proc/PID/stat, counting from 0 after the name
_COUNTED = re.compile(r"^(?:Threads|VmPTE):\s+(\d+)", re.MULTILINE)  # in /proc/PID/status, which lists VmPTE first
# A process's two pipes use the last descriptors that its limit allows, out of the way of the program's descriptors.
_REQUESTS, _REPLIES = MAX_DESCRIPTORS - 2, MAX_DESCRIPTORS - 1
_C = ctypes.PyDLL(None, use_errno=True)


def main() -> None:
    """Serve the parent until it ends.

    Descriptor 0 is the lifeline, descriptor 1 the socket. `sys.argv` contains a path to drop from `sys.path`, and the
    settings as JSON.
    """
    lifeline, control = os.dup(0), socket.socket(fileno=os.dup(1))
    os.dup2(2, 0)
    os.dup2(2, 1)
    settings = json.loads(sys.argv[2])
    trusted = settings["level"] == TRUSTED
    if not trusted:  # a trusted server always sees the lifeline close
        _die_with_parent(lifeline)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        _preload(settings)
        confinement = Confinement(settings["level"], [] if trusted else library_folders())
    except BaseException as error:
        control.send(json.dumps({"failed": f"{type(error).__name__}: {error}"[:1000]}).encode())
        while control.recv(4096):  # if messages stay unread, the parent sees the server end before the report
            pass
        return
    if not trusted:
        sys.argv[:] = ["answer.py"]
        os.environ.clear()
        random.seed(0)  # every program starts from the same state
    gc.collect()
    gc.freeze()
    _Server(lifeline, control, confinement).run()
    os._exit(0)


def _die_with_parent(lifeline: int) -> None:
    """Make the kernel kill this process when its parent closes the lifeline. Exit now if the parent has ended.

    PDEATHSIG does not help: the kernel sends it as soon as the thread that started this process ends.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # readable only when closed: nothing is ever written to it
        os._exit(0)


def _preload(settings: dict[str, Any]) -> None:
    """Import modules before any fork, so programs need not import them, which they may be unable to do."""
    if settings["packages"]:
        sys.path[:] = settings["packages"]
    else:
        sys.path.remove(sys.argv[1])
    if settings["level"] == TRUSTED:
        for module in settings["preload"]:
            importlib.import_module(module)
        return
    _load_library(settings["level"], settings["preload"])


class _Server:
    """The server loop: starts and kills processes, and reports when they end."""

    def __init__(self, lifeline: int, control: socket.socket, confinement: Confinement) -> None:
        self._lifeline = lifeline
        self._control = control
        self._confinement = confinement
        self._trusted = confinement.level == TRUSTED
        self._number_of: dict[int, int] = {}  # pid -> the parent's number for the process
        self._tables_of: dict[int, int] = {}  # pid -> page-table limit in bytes
        self._stopped_for: dict[int, str] = {}  # pid -> why this process killed it
        self._watched = 0.0
        self._wakeup, write_end = os.pipe2(os.O_NONBLOCK) if hasattr(os, "pipe2") else os.pipe()
        os.set_blocking(write_end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve until the parent closes its end of the socket."""
        while True:
            sources = [self._lifeline, self._control.fileno(), self._wakeup]
            readable, _, _ = select.select(sources, [], [], _WATCH_S if self._number_of else None)
            if self._lifeline in readable:
                break
            if self._wakeup in readable:
                os.read(self._wakeup, 4096)
                self._reap()
            if self._control.fileno() in readable and not self._receive():
                break
            if not self._trusted:
                self._watch()
        for pid in self._number_of:
            _signal(pid, signal.SIGKILL)
        self._number_of.clear()
        self._end_orphans()

    def _watch(self) -> None:
        """Kill processes with too many threads or page tables: the system has no per-process limit for these."""
        if time.monotonic() < self._watched + _WATCH_S:
            return
        self._watched = time.monotonic()
        for pid in self._number_of:
            table_bytes, num_threads = _counts(pid)
            if num_threads > MAX_THREADS:
                self._stop(pid, TOO_MANY_THREADS)
            elif table_bytes > self._tables_of[pid]:
                self._stop(pid, OUT_OF_MEMORY)

    def _stop(self, pid: int, why: str) -> None:
        self._stopped_for[pid] = why
        _signal(pid, signal.SIGKILL)

    def _receive(self) -> bool:
        """Handle one message and return False if the parent has closed the socket."""
        data, descriptors, _, _ = socket.recv_fds(self._control, 4096, 8)
        if not data:
            return False
        message = json.loads(data)
        if "kill" in message:
            for pid, number in self._number_of.items():
                if number == message["kill"]:
                    _signal(pid, signal.SIGKILL)
        elif "wake" in message:
            self._wake(message["wake"])
        else:
            self._start(message, descriptors)
            self._wake(message["start"])
        return True

    def _wake(self, number: int) -> None:
        """Let one process run, and pause all others."""
        for pid, other in self._number_of.items():
            _signal(pid, signal.SIGCONT if other == number else signal.SIGSTOP)

    def _start(self, message: dict[str, Any], descriptors: list[int]) -> None:
        number = message["start"]
        try:
            pid = os.fork() if self._trusted else _fork()
        except OSError as error:
            self._send({"unstarted": number, "why": str(error)})
        else:
            if pid == 0:
                self._become(message, descriptors)
            self._number_of[pid] = number
            self._tables_of[pid] = _MIN_TABLES + message["memory_bytes"] // _BYTES_PER_TABLE_BYTE
        for descriptor in descriptors:
            os.close(descriptor)

    def _become(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Confine this fork, and serve requests until there are no more."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests, replies, *streams = descriptors
            for descriptor, target in zip((requests, replies, *streams), (_REQUESTS, _REPLIES, 0, 1), strict=False):
                os.dup2(descriptor, target, inheritable=target < 2)
            try:
                self._confinement.enter(message["memory_bytes"], message["cpu_seconds"], message["core"])
            except OSError as error:
                write_frame(_REPLIES, Frame(UNCONFINED, 0, str(error).encode()))
                os._exit(0)
            write_frame(_REPLIES, Frame(READY, 0, str(os.getpid()).encode()))
            functions = Functions(message["memory_bytes"]) if self._trusted else None
            serve(_REQUESTS, _REPLIES, {"load": functions.load, "call": functions.call} if functions else {})
        finally:
            os._exit(1)

    def _reap(self) -> None:
        while self._number_of:
            can_look = hasattr(os, "waitid")  # look first: a reaped process has no counts
            child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) if can_look else None
            denied = denied_s(child.si_pid) if child else None
            pid, status, usage = os.wait4(child.si_pid if child else -1, os.WNOHANG)
            if pid == 0:
                return
            number = self._number_of.pop(pid, None)
            self._tables_of.pop(pid, None)
            if number is None:
                continue
            self._end_group(pid)
            self._send(
                {
                    "ended": number,
                    "status": status,
                    "cpu_seconds": usage.ru_utime + usage.ru_stime,
                    "denied_seconds": denied,
                    "memory_bytes": usage.ru_maxrss * 1024,
                    "stopped_for": self._stopped_for.pop(pid, None),
                }
            )

    def _end_group(self, pid: int) -> None:
        """Kill whatever an unconfined process leaves behind. Confined processes cannot start others."""
        if not self._confinement.confined:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self._end_orphans()

    def _end_orphans(self) -> None:
        """Kill all orphans that this process has inherited, and any orphans they leave in turn, in any session."""
        end = time.monotonic() + _ORPHANS_S
        while (orphans := [pid for pid in _children() if pid not in self._number_of]) and time.monotonic() < end:
            for pid in orphans:
                _signal(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(_BETWEEN_LOOKS_S)

    def _send(self, message: dict[str, object]) -> None:
        self._control.send(json.dumps(message).encode())


def _fork() -> int:
    """Fork faster than `os.fork`, without resetting locks and seeds: with no other threads, no lock can be held."""
    if threading.active_count() > 1:
        return os.fork()
    pid: int = _C.fork()
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pid


def _counts(pid: int) -> tuple[int, int]:
    """Return a process's page-table bytes and thread count; zeros if the system does not report them."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            kib, num_threads = map(int, _COUNTED.findall(file.read()))
    except (OSError, ValueError):  # the process has just ended
        return 0, 0
    return kib << 10, num_threads


def _stat(pid: int, field: int) -> int:
    """Return a field of /proc/PID/stat, where field 0 is the process state; 0 if the system does not report it."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[field])
    except (OSError, IndexError, ValueError):
        return 0


def _signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that has not been reaped, and to its group."""
    for kill in (os.killpg, os.kill):  # a new process has no group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, number)


def _children() -> list[int]:
    """Return this process's children, including inherited ones; none if the system does not list them."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]
    with contextlib.suppress(OSError):  # a kernel without this file
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if _stat(pid, _PARENT) == os.getpid()]
    return []
