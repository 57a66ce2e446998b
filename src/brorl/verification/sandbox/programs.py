"""A pool of sandboxed processes for untrusted programs.

In: judges, each of which asks programs for their output or for values of their functions, and decides. Out: their
decisions. Programs run in confined processes with limits of time, memory and output. Expected values stay in this
process. A judge is run once more if the machine ended one of its programs, and is `Lost` if that happens again.

The pool has no threads of its own. It starts one fork server per worker, by exec, when there is work.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

from brorl.errors import UserError
from brorl.verification.sandbox.conversation import Judge, Lost, T
from brorl.verification.sandbox.judging import Judging
from brorl.verification.sandbox.level import WISHES, Level, choose_level
from brorl.verification.sandbox.process_pool import ProcessPool
from brorl.verification.sandbox.server import PreloadError, Server, ServerSettings


class ProgramPool(ProcessPool[Server]):
    """Runs judges of untrusted programs.

    Args:
        num_workers: Number of judges at once, 1 or more; None for one per core of this process.
        sandbox: `auto` for the strongest confinement that holds on this machine, or `landlock`, `seccomp`, `unsafe`.
        preload: Modules that every program finds imported, in addition to parts of the standard library.
        packages: Whether programs can import installed packages, not the standard library alone.
        batch_timeout_s: Longest wall time of one `run` in seconds, above 0.

    Raises:
        ValueError: If an argument is out of its range.
    """

    files_per_worker = 6  # socket and lifeline of a server, pipes of an answer and of its test code
    files_when_idle = 2  # without the pipes

    def __init__(
        self,
        num_workers: int | None = None,
        sandbox: str = "auto",
        preload: tuple[str, ...] = (),
        packages: bool = False,
        batch_timeout_s: float = 3600.0,
    ) -> None:
        super().__init__(num_workers)
        if not batch_timeout_s > 0:
            raise ValueError(f"batch_timeout_s must be above 0, got {batch_timeout_s}")
        if sandbox not in WISHES:
            raise ValueError(f"sandbox must be one of {', '.join(WISHES)}, got {sandbox!r}")
        self.sandbox = sandbox
        self._preload = preload
        self._packages = packages
        self._batch_timeout_s = batch_timeout_s
        self._preloading: dict[tuple[str, ...], ProgramPool] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Kill all servers, those of `preloading` too, and wait for their end; a later `run` starts new ones."""
        for pool in self._preloading.values():
            pool.close()
        super().close()

    def preloading(self, *modules: str) -> ProgramPool:
        """Return the pool like this one whose programs find these installed modules imported; `close` closes it too."""
        if modules not in self._preloading:
            self._preloading[modules] = ProgramPool(
                self.num_workers, self.sandbox, modules, packages=True, batch_timeout_s=self._batch_timeout_s
            )
        return self._preloading[modules]

    def require(self) -> Level:
        """Return the level of confinement in force; the first call of a process tries attacks on it.

        Raises:
            UserError: If none holds on this machine and `unsafe` was not chosen.
        """
        return choose_level(self.sandbox)

    def run(self, judges: Sequence[Callable[[], Judge[T]]]) -> list[T | Lost]:
        """Run judges, one per worker at once, and wait for all of them, or until the time of the batch is over.

        Each judge first gets an equal part of half of that time, which its programs use also when they sleep, but not
        while others keep them from their core. Judges that need more run again after all others.

        Args:
            judges: Functions that make a judge; one is called again if the machine ended a program of its judge.

        Returns:
            For each its decision, or `Lost`, in the same order. A judge without a decision at the end of the time is
            `CutOff` if its programs have used their part, which is their own fault, and else `Lost`.

        Raises:
            UserError: If no confinement holds on this machine, a module cannot be preloaded, or this process cannot
                open enough files for all workers.
            Exception: Any exception of a judge.
        """
        self._prepare()
        packages = tuple(path for path in sys.path if path) if self._packages else ()
        settings = ServerSettings(self.require().name, self._preload, packages)
        with self._lock:
            try:
                return Judging(judges, settings, self._idle, self.num_workers, self._batch_timeout_s).results()
            except PreloadError as error:
                raise UserError(f"the sandbox cannot be started: {error}; install or repair the package") from None
