"""The two process pools: `WorkerPool` for trusted functions, `ProgramPool` for sandboxed programs.

Fork servers start when there is work. They end with the pool, or with the process that created it. A fork of that
process cannot use the pool.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Self

from brorl.errors import UserError
from brorl.verdict import CRASHED, OUT_OF_MEMORY, RAISED, TIMEOUT, UNVERIFIED
from brorl.verification.sandbox.inside.confinement import TRUSTED
from brorl.verification.sandbox.inside.functions import MAX_REPLY_BYTES
from brorl.verification.sandbox.level import Level, choose_level
from brorl.verification.sandbox.request import Fault, Limits, LostError, Reply, Undecided
from brorl.verification.sandbox.server import PreloadError, ServerSettings
from brorl.verification.sandbox.worker import Judge, JudgeRun, T, Worker
from brorl.verification.settings import VerificationSettings

_MAX_LOADS = 3  # give up on loading a function after this many new workers have ended while loading it
_AT_ONCE = 32  # items per call: enough to spread the cost of a message, few enough that a slow item delays few others
_EARLY = 16  # maximum number of workers to start before there is work
_FILES_PER_WORKER = 6  # the server's socket and lifeline, and the pipes to an answer and to its test code
_STARTING_FILES = 16  # the other ends of the pipes, while one process starts
_SPARE_FILES = 256  # reserved for files that the trainer opens later


class LoadError(UserError):
    """A worker cannot load a function, so nothing can be verified."""


@dataclass(frozen=True)
class VerifierCall:
    """One function call in a worker."""

    function: str  # `package.module:function` or `path/to/file.py:function`
    # Positional JSON values, or values by role for a user's function (`inside.calling`). With None, the function is
    # only loaded; the reply is then {"takes": roles}, or {"problem": why it cannot be called}.
    arguments: tuple[object, ...] | Mapping[str, object] | None
    # `package.module:function` to call instead; `function` becomes its first argument.
    through: str | None = None
    timeout_s: float | None = None  # None for the pool's limit


class _Pool:
    """Keeps at most `num_workers` idle workers; None means one per core that this process can use."""

    def __init__(self, num_workers: int | None) -> None:
        self.num_workers = num_workers or num_cores()
        self._idle: list[Worker] = []
        self._pid = os.getpid()
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle, self._pid)  # runs at exit too

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes and wait until they end. A later `run` starts new ones."""
        _close_all(self._idle, self._pid)

    def _run_judges(
        self, judges: Sequence[Judge[T]], settings: ServerSettings, timeout_s: float = inf
    ) -> list[T | Undecided]:
        """Run judges, one per worker at a time."""
        self._enter()
        with self._lock:
            try:
                return JudgeRun(judges, settings, self._idle, self.num_workers, timeout_s).run()
            except PreloadError as error:
                raise UserError(f"the sandbox cannot be started: {error}; install or repair the package") from None

    def _enter(self) -> None:
        """Check that this process can use the pool and can open enough files for every worker."""
        if self._pid != os.getpid():
            name = type(self).__name__
            raise RuntimeError(f"a {name} cannot be used in a fork of the process that created it; create a new one")
        if not self._idle:
            _allow_open_files(self.num_workers)


class WorkerPool(_Pool):
    """Calls functions in worker processes within time and memory limits.

    A call may take `timeout_s`; loading its function may take an additional `start_timeout_s`. Time when other
    processes occupy its core does not count, up to ten times the limit. A call that runs out of time is killed along
    with every process it started. Its worker is replaced, and other calls continue. After an infrastructure failure, a
    call is repeated once. On Linux, the memory limit covers a worker's private memory, including libraries.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        timeout_s: float = 4.0,
        memory_bytes: int = 1 << 30,
        start_timeout_s: float = 120.0,
    ) -> None:
        super().__init__(num_workers)
        self.timeout_s, self.memory_bytes, self._start_timeout_s = timeout_s, memory_bytes, start_timeout_s
        self._loaded: set[str] = set()
        self._modules: set[str] = set()

    def expect(self, module: str) -> None:
        """Make workers started from now on import a module of this package before they take calls."""
        self._modules.add(module)

    def start(self) -> None:
        """Start workers without waiting for them, if a module is expected or a function has been loaded."""
        if not (self._modules or self._loaded):
            return
        self._enter()
        with self._lock, suppress(LostError):  # a later `run` reports it
            while len(self._idle) < min(self.num_workers, _EARLY):
                self._idle.append(Worker(self._settings()))

    def _settings(self) -> ServerSettings:
        packages = tuple(path or str(Path.cwd()) for path in sys.path)
        return ServerSettings(TRUSTED, tuple(sorted(self._modules)), packages)

    def run(self, calls: Sequence[VerifierCall]) -> list[Reply]:
        """Make calls, one per worker at a time, and return one reply per call, in order.

        A reply's value is the return value after a JSON round trip. A reply's failure is `timeout`, `out of
        memory`, `verifier crashed` or `verifier raised ...` if the call is at fault, and `unverified: ...` after two
        infrastructure failures. Raises a LoadError if a function cannot be loaded.
        """
        if not calls:
            return []
        problems: dict[str, list[str]] = defaultdict(list)
        judges = [partial(self._judge, call, problems[call.function]) for call in calls]
        results = self._run_judges(judges, self._settings())
        lost = next((result for result in results if isinstance(result, Undecided)), None)
        if lost and not self._loaded:
            raise LoadError(f"no verification worker can start: {lost.reason}; free memory or processes")
        return [
            Reply(None, f"{UNVERIFIED}: {result.reason}", 0.0) if isinstance(result, Undecided) else result
            for result in results
        ]

    def map(self, function: str, items: Sequence[object], *rest: object, at_once: int = _AT_ONCE) -> list[Reply]:
        """Call a function on lists of at most `at_once` items, and return one reply per item, in order.

        The function must return one value per item and limit its own time. If a call with several items fails, each
        item is retried by itself.
        """
        batches = [items[start : start + at_once] for start in range(0, len(items), at_once)]
        calls = [VerifierCall(function, ([*batch], *rest)) for batch in batches]
        replies: list[Reply] = []
        for batch, reply in zip(batches, self.run(calls), strict=True):
            if reply.failure is None:
                replies += [Reply(value, None, reply.seconds / len(batch)) for value in reply.value]
            else:
                replies += [reply] if len(batch) == 1 else self.map(function, batch, *rest, at_once=1)
        return replies

    def _judge(self, call: VerifierCall, problems: list[str], worker: Worker) -> Reply:
        """Load and call a function. `problems` collects the reasons why loading it failed in this run."""
        is_new = call.function not in self._loaded
        loading = Limits(self._start_timeout_s, self.memory_bytes)
        while True:
            if len(problems) >= _MAX_LOADS:
                return Reply(None, f"{UNVERIFIED}: a worker cannot start: {problems[-1]}", 0.0)
            worker.trust(loading)
            reply = worker.call("load", (call.function, call.through), loading)
            problem = reply.failure or reply.value
            if problem is None:
                break
            worker.end()
            problems.append("it took too long to start" if problem == Fault.TIMEOUT else str(problem))
            if is_new and reply.failure is None:
                raise LoadError(f"cannot load {call.function!r}: {problem}")
            if is_new and len(problems) >= _MAX_LOADS:
                ended = f"{_MAX_LOADS} new workers ended while loading it ({problems[-1]})"
                raise LoadError(f"cannot load {call.function!r}: {ended}")
        self._loaded.add(call.function)
        timeout_s = self.timeout_s if call.timeout_s is None else call.timeout_s
        limits = Limits(timeout_s, self.memory_bytes, 2 * MAX_REPLY_BYTES)  # JSON text inside JSON text
        reply = worker.call("call", (call.function, json.dumps(call.arguments), call.through), limits)
        try:
            text, problem, is_full = reply.value
            value = None if problem else json.loads(text)
        except (TypeError, ValueError, RecursionError):  # the process ended, or its reply is malformed or too deep
            worker.end()
            failure = reply.failure if reply.failure in (TIMEOUT, OUT_OF_MEMORY) else CRASHED
            return Reply(None, failure, reply.seconds)
        if is_full:
            worker.end()
        return Reply(value, f"{RAISED} {problem}" if problem else None, reply.seconds)


class ProgramPool(_Pool):
    """Runs judges of untrusted programs at a confinement level, for at most `batch_timeout_s` of wall time.

    A judge gets a program's output or its functions' return values, and decides. Expected values stay in this process.
    Programs start with the modules in `preload` imported. With `packages`, they can import installed packages.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        sandbox: str = "auto",
        preload: tuple[str, ...] = (),
        packages: bool = False,
        batch_timeout_s: float = 3600.0,
    ) -> None:
        super().__init__(num_workers)
        self.sandbox, self._preload, self._packages = sandbox, preload, packages
        self._batch_timeout_s = batch_timeout_s
        self._preloading: dict[tuple[str, ...], ProgramPool] = {}

    def close(self) -> None:
        """Kill all servers, including `preloading` pools', and wait until they end. A later `run` starts new ones."""
        for pool in self._preloading.values():
            pool.close()
        super().close()

    def preloading(self, *modules: str) -> ProgramPool:
        """Return a similar pool whose programs start with these installed modules imported. `close` closes it too."""
        if modules not in self._preloading:
            self._preloading[modules] = ProgramPool(
                self.num_workers, self.sandbox, modules, packages=True, batch_timeout_s=self._batch_timeout_s
            )
        return self._preloading[modules]

    def require(self) -> Level:
        """Return the active level. The first call tests it with attacks. Raises a UserError if no level holds here."""
        return choose_level(self.sandbox)

    def run(self, judges: Sequence[Judge[T]]) -> list[T | Undecided]:
        """Run judges, one per worker at a time, until all are done or the batch time limit is reached.

        Half of the batch time limit is divided equally among the judges. A program uses up its judge's share even while
        sleeping, but not while other processes occupy its core. Judges that need more run again after all others. A
        judge that never decides yields `JudgeTimeout` if its programs used up their share (their own fault), otherwise
        `Undecided`. After an infrastructure failure, a judge runs again. An exception in a judge ends the run.
        """
        packages = tuple(path for path in sys.path if path) if self._packages else ()
        settings = ServerSettings(self.require().name, self._preload, packages)
        return self._run_judges(judges, settings, self._batch_timeout_s)


@dataclass(frozen=True)
class Workers:
    """A run's two pools. Their processes start once there is work."""

    functions: WorkerPool = field(default_factory=WorkerPool)  # calls trusted functions
    programs: ProgramPool = field(default_factory=ProgramPool)  # runs untrusted code

    @classmethod
    def from_settings(cls, settings: VerificationSettings) -> Self:
        """Create both pools from the settings."""
        workers = settings.workers or None
        functions = WorkerPool(workers, settings.timeout_s, settings.memory_mib << 20)
        return cls(functions, ProgramPool(workers, settings.sandbox, batch_timeout_s=settings.batch_timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Later work starts new ones."""
        self.functions.close()
        self.programs.close()


def num_cores() -> int:
    """Return the number of cores that this process can use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _allow_open_files(num_workers: int) -> None:
    """Raise this process's soft limit on open files if it is too low; UserError if the hard limit is too low."""
    soft, hard = (sys.maxsize if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    needed = len(os.listdir("/dev/fd")) + _FILES_PER_WORKER * num_workers + _STARTING_FILES  # noqa: PTH208 (names)
    wanted = needed + _FILES_PER_WORKER * num_workers + _SPARE_FILES  # a run has a second pool of equal size
    if needed > hard:
        raise UserError(
            f"{num_workers:,} verification workers need {needed:,} open files, but this process can open {hard:,}; "
            f"raise the hard limit with `ulimit -n {wanted}` as root, or set verification.workers to a smaller number"
        )
    if wanted > soft:
        limits = (min(wanted, hard), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _close_all(idle: list[Worker], pid: int) -> None:
    """Close idle workers, unless this process is a fork of the process that started them."""
    while idle and pid == os.getpid():
        idle.pop().close()
