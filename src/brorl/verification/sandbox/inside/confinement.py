"""What confines a process of the sandbox: limits, another user, no privileges, Landlock, seccomp.

`enter` is called in each fork before any untrusted code. It raises OSError if the kernel rejects a part, and the fork
then runs nothing. Landlock and seccomp each deny the files, the network and the other processes. A program at the level
UNSAFE has a limit of memory and its own session, and otherwise everything that the user has. The level TRUSTED is for
functions of the user: it adds nothing but a session and the end with the server. At these two levels processes can
start others, and the server inherits their orphans.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Sequence

from brorl.verification.sandbox.inside.landlock import Ruleset, landlock_version
from brorl.verification.sandbox.inside.seccomp import Filter

LANDLOCK, SECCOMP, UNSAFE, TRUSTED = "landlock", "seccomp", "unsafe", "trusted"
MAX_DESCRIPTORS = 64
MAX_THREADS = 64
_STACK_BYTES = 120 << 20  # the kernel keeps 128 MiB free below the stack
_FIRST_USER = 0x60000000  # far from the users of a system and from the ranges of user namespaces

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 4, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_PR_SET_CHILD_SUBREAPER = 36
_CAP_KILL, _CAP_SETGID, _CAP_SETUID = 5, 6, 7
_CAP_VERSION = 0x20080522  # version 3: two words per set


class Confinement:
    """The confinement of one level; at the level LANDLOCK, programs can read the given directories.

    Raises:
        OSError: If this machine cannot do it.
    """

    def __init__(self, level: str, directories: Sequence[str]) -> None:
        self._server = os.getpid()
        self.level = level
        self.confined = level not in (UNSAFE, TRUSTED)
        self._linux = sys.platform == "linux"
        _limit(resource.RLIMIT_CORE, 0)
        if self._linux:
            libc = ctypes.CDLL(None, use_errno=True)
            self._prctl, self._capset = libc.prctl, libc.capset
            self._prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
        if self._linux and not self.confined:
            self._must(_PR_SET_CHILD_SUBREAPER, 1)  # the server inherits what its processes leave behind
        if level == TRUSTED:
            return
        with contextlib.suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        if self._linux:
            self._address_space = _address_space()
            _prefer_for_killing()
        elif self.confined:
            raise OSError(f"no confinement on {sys.platform}")
        if self.confined:
            self._prepare(level, directories)

    def _prepare(self, level: str, directories: Sequence[str]) -> None:
        """Do once in the server everything that its forks inherit."""
        _limit(resource.RLIMIT_NOFILE, MAX_DESCRIPTORS)
        _limit(resource.RLIMIT_FSIZE, 0)
        _limit(resource.RLIMIT_MEMLOCK, 0)
        able = {_CAP_KILL, _CAP_SETGID, _CAP_SETUID} <= _capabilities()
        self._user_can_change = able and (level == SECCOMP or all(map(_open_to_all, directories)))
        for capability in range(64):  # unknown ones fail
            self._prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        if not self._user_can_change:
            self._drop_capabilities()
        self._must(_PR_SET_NO_NEW_PRIVS, 1)
        self._must(_PR_SET_DUMPABLE, 0)
        self._filter = Filter(reading=level == LANDLOCK)
        self._ruleset = None
        if level == LANDLOCK:
            if not landlock_version():
                raise OSError("the kernel has no Landlock")
            self._ruleset = Ruleset(directories)

    def enter(self, memory_bytes: int, cpu_seconds: int, core: int | None) -> None:
        """Confine this process; OSError if the kernel rejects a part.

        Args:
            memory_bytes: Address space that it can use beyond that of the server.
            cpu_seconds: CPU time after which the kernel kills it; the parent bounds the wall time.
            core: The one core that its threads can use; None for all.
        """
        os.setsid()
        if core is not None:
            with contextlib.suppress(OSError):  # it was taken from this machine's processes since
                os.sched_setaffinity(0, {core})
        if self.level != TRUSTED:
            _limit(resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1)
        if self._linux:
            if self.level != TRUSTED:
                _limit(resource.RLIMIT_AS, self._address_space + memory_bytes)
            if self.confined and self._user_can_change:
                self._change_user()
            self._must(_PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which resets it
            if os.getppid() != self._server:
                os._exit(0)
        if self.confined and self._ruleset:
            self._ruleset.enforce()
        os.closerange(3, MAX_DESCRIPTORS - 2)
        if self.confined:
            self._filter.install()

    def _change_user(self) -> None:
        """Become a user that no file and no other process has."""
        user = _FIRST_USER + os.getpid()
        with contextlib.suppress(OSError):  # a user namespace may know few users
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            _limit(resource.RLIMIT_NPROC, MAX_THREADS)
        self._drop_capabilities()
        self._must(_PR_SET_DUMPABLE, 0)  # the change of user resets it to a setting of the system

    def _drop_capabilities(self) -> None:
        self._prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
        if self._capset(struct.pack("=Ii", _CAP_VERSION, 0), bytes(24)):
            raise OSError(ctypes.get_errno(), "capset")

    def _must(self, option: int, value: int) -> None:
        if self._prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl {option}")


def _limit(which: int, soft: int, hard: int | None = None) -> None:
    """Lower a limit; a hard limit that is lower already stays."""
    maximum = resource.getrlimit(which)[1]
    hard = soft if hard is None else hard
    hard = hard if maximum == resource.RLIM_INFINITY else min(hard, maximum)
    resource.setrlimit(which, (min(soft, hard), hard))


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _open_to_all(directory: str) -> bool:
    """Whether every user can read a directory; a Python below the home of root is open to root alone."""
    modes = [os.stat(directory).st_mode]
    while directory != os.path.dirname(directory):
        directory = os.path.dirname(directory)
        modes.append(os.stat(directory).st_mode)
    return modes[0] & 0o5 == 0o5 and all(mode & 0o1 for mode in modes)


def _capabilities() -> set[int]:
    """Return the effective capabilities of this process."""
    header, sets = struct.pack("=Ii", _CAP_VERSION, 0), ctypes.create_string_buffer(24)
    if ctypes.CDLL(None, use_errno=True).capget(header, sets):
        return set()
    low, _, _, high, _, _ = struct.unpack("=6I", sets.raw)
    return {bit for bit in range(64) if (high << 32 | low) >> bit & 1}


def _prefer_for_killing() -> None:
    """Have the kernel end the processes of the sandbox first when the machine is out of memory."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
