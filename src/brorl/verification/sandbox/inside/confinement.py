"""What confines a process of the sandbox: limits, another user, no privileges, Landlock, seccomp.

Landlock and seccomp each deny the files, the network and the other processes. The level UNSAFE adds a limit of memory
and a session, and TRUSTED, for functions of the user, a session: there, the server inherits the orphans of processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import stat
import struct
import sys
from collections.abc import Iterator, Sequence

from brorl.verification.sandbox.inside.seccomp import Filter

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on all architectures
_CREATE_RULESET_VERSION, _RULE_PATH_BENEATH = 1, 1
_LOG_SAME_EXEC_OFF = 1  # a program must not flood the audit log
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_RIGHTS_OF = {1: 13, 2: 14, 3: 15, 5: 16}  # number of rights to files by the version that brought the last one
_BIND_TCP, _CONNECT_TCP = 1, 2  # since version 4
_SCOPE_SOCKETS, _SCOPE_SIGNALS = 1, 2  # since version 6
_PACKAGES = ("site-packages", "dist-packages")


def landlock_version() -> int:
    """Return the version of the kernel's interface; 0 if there is none."""
    version: int = _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION)
    return max(0, version)


class Ruleset:
    """A ruleset that allows to read directories, without the packages below; OSError if the kernel rejects it.

    It is made once in the fork server and enforced in each fork. Every version of the interface from 1 on is used as
    far as it goes; seccomp denies again what older ones do not cover.

    Source: `Documentation/userspace-api/landlock.rst` of Linux.
    """

    def __init__(self, directories: Sequence[str]) -> None:
        self._syscall = _libc().syscall
        version = landlock_version()
        rights = (1 << max((n for since, n in _RIGHTS_OF.items() if since <= version), default=0)) - 1
        net = _BIND_TCP | _CONNECT_TCP if version >= 4 else 0
        scope = _SCOPE_SOCKETS | _SCOPE_SIGNALS if version >= 6 else 0
        attributes = struct.pack("=QQQ", rights, net, scope)
        size = 24 if version >= 6 else 16 if version >= 4 else 8
        self._descriptor = self._call(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
        self._flags = _LOG_SAME_EXEC_OFF if version >= 7 else 0
        for directory in directories:
            self._allow(directory, _READ_DIR)
            for path in _entries(directory):
                self._allow(path, _READ_FILE)

    def _allow(self, path: str, rights: int) -> None:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if rights == _READ_FILE and stat.S_ISDIR(os.fstat(descriptor).st_mode):
                rights |= _READ_DIR
            beneath = struct.pack("=Qi", rights, descriptor)
            self._call(_ADD_RULE, self._descriptor, _RULE_PATH_BENEATH, beneath, 0)
        finally:
            os.close(descriptor)

    def enforce(self) -> None:
        """Restrict this process from now on; OSError if the kernel rejects it."""
        self._call(_RESTRICT_SELF, self._descriptor, self._flags)

    def _call(self, *arguments: object) -> int:
        result: int = self._syscall(*arguments)
        if result < 0:
            raise OSError(ctypes.get_errno(), f"landlock: {os.strerror(ctypes.get_errno())}")
        return result


def _entries(directory: str) -> Iterator[str]:
    """Return what can be read below a directory."""
    if os.path.basename(directory) in _PACKAGES:
        yield directory
        return
    for entry in os.scandir(directory):
        if entry.name not in _PACKAGES:
            yield entry.path


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


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
    """The confinement of one level; at LANDLOCK programs can read the directories. OSError if it cannot be done."""

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
        """Confine this fork before any untrusted code; OSError if the kernel rejects a part, and it then runs nothing.

        The address space is counted beyond that of the server; the threads share one core, unless it is None.
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
