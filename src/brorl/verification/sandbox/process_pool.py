"""The common part of both pools: a number of processes that end with the pool, or with the process that made it.

In: the number of workers. Out: a context manager with a list of idle processes. The processes start with the first
work, in the process that made the pool and in no fork of it. Before that the soft limit of open files is raised to the
need of all pools in use.
"""

from __future__ import annotations

import os
import sys
import weakref
from types import TracebackType
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from brorl.errors import UserError

_STARTING_FILES = 16  # the other ends of pipes, while one process starts
_SPARE_FILES = 256  # that the trainer opens later


class Closable(Protocol):
    """A process, or a group of processes."""

    def close(self) -> object:
        """Kill it and wait for its end."""


P = TypeVar("P", bound=Closable)


class ProcessPool(Generic[P]):
    """A number of workers.

    Args:
        num_workers: Number of workers, 1 or more; None for the cores of this process.

    Attributes:
        num_workers: Number of workers.
        files_per_worker: Most descriptors that this process holds for one worker.
        files_when_idle: Descriptors that this process holds for an idle worker.

    Raises:
        ValueError: If the number is below 1.
    """

    files_per_worker: ClassVar[int]
    files_when_idle: ClassVar[int]

    def __init__(self, num_workers: int | None) -> None:
        if num_workers is not None and num_workers < 1:
            raise ValueError(f"num_workers must be 1 or more, got {num_workers}")
        self.num_workers = num_workers or num_cores()
        self._idle: list[P] = []
        self._pid = os.getpid()
        weakref.finalize(self, _close_all, self._idle, self._pid)  # runs also at exit

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes and wait for their end; a later `run` starts new ones."""
        _close_all(self._idle, self._pid)
        _IN_USE.discard(self)

    def _prepare(self) -> None:
        """Check that processes can be started here; call it before every `run`.

        Raises:
            RuntimeError: If this process is a fork of the one that made the pool.
            UserError: If this process cannot open enough files for the workers of all pools in use.
        """
        if self._pid != os.getpid():
            name = type(self).__name__
            raise RuntimeError(f"a {name} cannot be used in a fork of the process that made it; make another one")
        if self not in _IN_USE:
            pools = [self, *(pool for pool in _IN_USE if pool._pid == self._pid)]
            _allow_open_files(sum(pool.num_workers for pool in pools), sum(pool._files_to_open() for pool in pools))
            _IN_USE.add(self)

    def _files_to_open(self) -> int:
        """Return the number of descriptors that all workers need, without those that are open."""
        return self.num_workers * self.files_per_worker - len(self._idle) * self.files_when_idle


_IN_USE: weakref.WeakSet[ProcessPool[Any]] = weakref.WeakSet()
"""The pools that have run and were not closed."""


def num_cores() -> int:
    """Return the number of cores that this process can use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _allow_open_files(num_workers: int, more: int) -> None:
    """Raise the soft limit of open files of this process, if it is too low for more of them.

    Raises:
        UserError: If the hard limit is too low.
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/dev/fd")) + more + _STARTING_FILES  # noqa: PTH208 (names are enough)
    if soft == resource.RLIM_INFINITY or needed + _SPARE_FILES <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UserError(
            f"{num_workers:,} verification workers need {needed:,} open files, but this process can open {hard:,}; "
            f"raise the hard limit with `ulimit -n {needed + _SPARE_FILES}` as root, or set verification.workers to a "
            "smaller number"
        )
    wanted = needed + _SPARE_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _close_all(idle: list[P], pid: int) -> None:
    """Close idle processes, unless this process is a fork of the one that started them."""
    while idle and pid == os.getpid():
        idle.pop().close()
