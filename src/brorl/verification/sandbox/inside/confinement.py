"""Confines a sandbox process: limits, a different user, no privileges, Landlock, and a system-call filter.

Landlock and seccomp each deny access to files, the network and other processes. UNSAFE only sets time and memory limits
and starts a session. TRUSTED, for the user's functions, only starts a session. At these two levels, the server inherits
the orphans of its processes.

Sources: the Linux headers in `include/uapi/` named next to the constants.
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
from brorl.verification.sandbox.inside.seccomp import make_filter

LANDLOCK, SECCOMP, UNSAFE, TRUSTED = "landlock", "seccomp", "unsafe", "trusted"
MAX_DESCRIPTORS = 64
MAX_THREADS = 64
_BUFFERS = "/proc/sys/net/core/wmem_default"  # bytes in a full socket buffer, excluding its last packet
_BUFFER_BYTES, _PACKET_BYTES = 212_992, 32 << 10
_PIPE_PAGES = 16
_STACK_BYTES = 120 << 20  # the kernel keeps 128 MiB free below the stack
_FIRST_USER = 0x60000000  # far from system users and user-namespace ranges

# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 36, 38, 47, 4
_SECCOMP_MODE_FILTER = 2  # linux/seccomp.h
# linux/capability.h; version 3 has two words per set.
_CAP_KILL, _CAP_SETGID, _CAP_SETUID = 5, 6, 7
_CAP_VERSION = 0x20080522


class Confinement:
    """The confinement at one level. At LANDLOCK, programs can read the directories. OSError if setup fails."""

    def __init__(self, level: str, directories: Sequence[str]) -> None:
        self._server = os.getpid()
        self.level = level
        self.confined = level not in (UNSAFE, TRUSTED)
        self._linux = sys.platform == "linux"
        _limit(resource.RLIMIT_CORE, 0)
        if self._linux:
            libc = ctypes.CDLL(None, use_errno=True)
            self._prctl = libc.prctl
            self._capset = libc.capset
            self._prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
        if self._linux and not self.confined:
            self._must(_PR_SET_CHILD_SUBREAPER, 1)  # the server inherits what its processes leave behind
        if level == TRUSTED:
            return
        with contextlib.suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        if self._linux:
            with open("/proc/self/statm", encoding="ascii") as file:
                self._address_space = int(file.read().split()[0]) * resource.getpagesize()
            _prefer_for_killing()
        elif self.confined:
            raise OSError(f"confinement is not supported on {sys.platform}")
        if self.confined:
            self._address_space -= _descriptor_bytes()
            self._prepare(level, directories)

    def _prepare(self, level: str, directories: Sequence[str]) -> None:
        """Set up, in the server, everything that its forks inherit."""
        _limit(resource.RLIMIT_NOFILE, MAX_DESCRIPTORS)
        _limit(resource.RLIMIT_FSIZE, 0)
        _limit(resource.RLIMIT_MEMLOCK, 0)
        able = {_CAP_KILL, _CAP_SETGID, _CAP_SETUID} <= _capabilities()
        self._user_can_change = able and (level == SECCOMP or all(map(_open_to_all, directories)))
        for capability in range(64):  # unknown numbers fail, which is harmless
            self._prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        if not self._user_can_change:
            self._drop_capabilities()
        self._must(_PR_SET_NO_NEW_PRIVS, 1)
        self._must(_PR_SET_DUMPABLE, 0)
        program = make_filter(reading=level == LANDLOCK)
        self._steps = ctypes.create_string_buffer(program, len(program))
        # struct sock_fprog: the number of steps, padding, a pointer
        filter_program = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(self._steps))
        self._filter = ctypes.create_string_buffer(filter_program, len(filter_program))
        self._ruleset = None
        if level == LANDLOCK:
            if not landlock_version():
                raise OSError("the kernel has no Landlock")
            self._ruleset = Ruleset(directories)

    def enter(self, memory_bytes: int, cpu_seconds: int, core: int | None) -> None:
        """Confine this fork before any untrusted code runs. If the kernel rejects any step, an OSError is raised first.

        The program may use `memory_bytes` beyond the server's address space, including what its descriptors can hold in
        the kernel. Its threads share `core`, if given.
        """
        os.setsid()
        if core is not None:
            with contextlib.suppress(OSError):  # this process may have lost access to the core
                os.sched_setaffinity(0, {core})
        if self.level != TRUSTED:
            _limit(resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1)
        if self._linux:
            if self.level != TRUSTED:
                _limit(resource.RLIMIT_AS, self._address_space + memory_bytes)
            if self.confined and self._user_can_change:
                self._change_user()
            self._must(_PR_SET_PDEATHSIG, signal.SIGKILL)  # after changing the user, which resets it
            if os.getppid() != self._server:
                os._exit(0)
        if self.confined and self._ruleset:
            self._ruleset.enforce()
        os.closerange(3, MAX_DESCRIPTORS - 2)
        filtered = (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER)
        if self.confined and self._prctl(*filtered, ctypes.addressof(self._filter), 0, 0):
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")

    def _change_user(self) -> None:
        """Become a user that owns no file and no other process."""
        user = _FIRST_USER + os.getpid()
        with contextlib.suppress(OSError):  # a user namespace may lack this user
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            _limit(resource.RLIMIT_NPROC, MAX_THREADS)
        self._drop_capabilities()
        self._must(_PR_SET_DUMPABLE, 0)  # changing the user resets it to a system setting

    def _drop_capabilities(self) -> None:
        self._prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
        if self._capset(struct.pack("=Ii", _CAP_VERSION, 0), bytes(24)):
            raise OSError(ctypes.get_errno(), "capset")

    def _must(self, option: int, value: int) -> None:
        if self._prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl {option}")


def _descriptor_bytes() -> int:
    """Return the most kernel memory that full sockets or pipes on all of a program's descriptors can hold."""
    buffer = _BUFFER_BYTES
    with contextlib.suppress(OSError, ValueError), open(_BUFFERS, encoding="ascii") as file:
        buffer = int(file.read())
    return MAX_DESCRIPTORS * max(buffer + _PACKET_BYTES, _PIPE_PAGES * resource.getpagesize())


def _limit(which: int, soft: int, hard: int | None = None) -> None:
    """Lower the soft and hard limits of a resource. Never raise a hard limit."""
    maximum = resource.getrlimit(which)[1]
    hard = soft if hard is None else hard
    hard = hard if maximum == resource.RLIM_INFINITY else min(hard, maximum)
    resource.setrlimit(which, (min(soft, hard), hard))


def _open_to_all(directory: str) -> bool:
    """Return whether every user can read a directory. Only root can read a Python in root's home, for example."""
    modes = [os.stat(directory).st_mode]
    while directory != os.path.dirname(directory):
        directory = os.path.dirname(directory)
        modes.append(os.stat(directory).st_mode)
    return modes[0] & 0o5 == 0o5 and all(mode & 0o1 for mode in modes)


def _capabilities() -> set[int]:
    """Return this process's effective capabilities."""
    header, sets = struct.pack("=Ii", _CAP_VERSION, 0), ctypes.create_string_buffer(24)
    if ctypes.CDLL(None, use_errno=True).capget(header, sets):
        return set()
    low, _, _, high, _, _ = struct.unpack("=6I", sets.raw)
    return {bit for bit in range(64) if (high << 32 | low) >> bit & 1}


def _prefer_for_killing() -> None:
    """Make the kernel kill sandbox processes first when the machine runs out of memory."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
