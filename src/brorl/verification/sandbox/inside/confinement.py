"""What confines a process of the sandbox: limits, another user, no privileges, Landlock, and a filter of system calls.

Landlock and seccomp each deny files, the network and other processes. The level UNSAFE has only limits of time and
memory, and a session. TRUSTED, for the user's own functions, has only a session. At these two levels the server
inherits the orphans of its processes. The filter is a list of allowed system calls in classic BPF, some with conditions
on their arguments. Any other call fails with EPERM. A call with another architecture's numbers kills the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import stat
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# fmt: off
# Calls that are missing here fail with EPERM. Among them are fork, execve, kill, tgkill, ptrace, socket, connect,
# sendmsg, prctl, chmod, rename, unlink, mount, io_uring_setup, bpf, memfd_create and timer_create.
ALWAYS: dict[str, tuple[int | None, int | None]] = {
    # name: (x86-64, ARM64) or None. Calls on descriptors that the program has:
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "preadv": (295, 69), "lseek": (8, 62), "close": (3, 57), "dup": (32, 23), "dup2": (33, None),
    "dup3": (292, 24), "fstat": (5, 80), "fsync": (74, 82), "fadvise64": (221, 223),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "pipe": (22, None),
    "pipe2": (293, 59), "eventfd2": (290, 19), "recvfrom": (45, 207), "shutdown": (48, 210),
    "getsockname": (51, 204),
    # Names of files: imports ask whether a file exists, never for its content.
    "newfstatat": (262, 79), "stat": (4, None), "lstat": (6, None), "statx": (332, 291), "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "getcwd": (79, 17), "getdents64": (217, 61),
    # Memory.
    "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233), "brk": (12, 214),
    "membarrier": (324, 283),
    # Signals within the process.
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigsuspend": (130, 133),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "pause": (34, None), "alarm": (37, None), "setitimer": (38, 103),
    "getitimer": (36, 102),
    # Time.
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165),
    # The process itself.
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158), "getpgrp": (111, None), "uname": (63, 160),
    "sysinfo": (99, 179), "getcpu": (309, 168), "getrandom": (318, 278), "getrlimit": (97, 163),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "futex": (202, 98), "set_robust_list": (273, 99),
    "rseq": (334, 293), "exit": (60, 93), "exit_group": (231, 94),
}

SOMETIMES: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None), "openat": (257, 56), "clone": (56, 220), "clone3": (435, 435), "fcntl": (72, 25),
    "ioctl": (16, 29), "prlimit64": (302, 261), "setrlimit": (160, 164), "socketpair": (53, 199),
    "sendto": (44, 206), "close_range": (436, 436), "mmap": (9, 222),
}
# fmt: on


_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # (column of the tables, AUDIT_ARCH)
_X32 = 0x40000000  # calls of the x32 ABI, which x86-64 kernels also answer

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_AT_LEAST = 0x15, 0x35
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_FAIL = 0x00050000  # the error number is added
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in `struct seccomp_data`
_EVERY_BIT = 0xFFFFFFFF

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


class Condition(NamedTuple):
    """A condition on one argument: argument & mask == value."""

    argument: int  # the argument's index
    value: int  # 32 bits
    mask: int = _EVERY_BIT  # the bits to compare
    high: bool = False  # compare the argument's high 32 bits instead of the low ones; for pointers


def _null(argument: int) -> tuple[Condition, ...]:
    return Condition(argument, 0), Condition(argument, 0, high=True)


# Threads share the memory and the descriptors, and end with the process: each thread with a table of descriptors of its
# own could hold as many full sockets again. No new process, no namespace, no descriptor of a process.
_CLONE_SHARED = 0x00010000 | 0x00000100 | 0x00000400  # CLONE_THREAD, CLONE_VM, CLONE_FILES
_CLONE_OTHERS = 0x7E020000 | 0x00000080 | 0x00001000 | 0x00002000 | 0x00004000 | 0x00800000
_CLOSE_RANGE_UNSHARE = 2  # gives the thread a table of its own, too
# Shared anonymous pages stay when most of their mapping is gone, so that no limit of the address space counts them. An
# open file, such as standard input, can be mapped.
_MAP_TYPE, _MAP_SHARED, _MAP_PRIVATE, _MAP_ANONYMOUS = 0xF, 0x01, 0x02, 0x20
# O_WRONLY, O_RDWR, O_CREAT and O_TRUNC (O_TMPFILE needs one of the first two).
_OPEN_FOR_WRITING = 0o1 | 0o2 | 0o100 | 0o1000
_DUPFD, _GETFD, _SETFD, _GETFL, _SETFL, _DUPFD_CLOEXEC = 0, 1, 2, 3, 4, 1030
_O_ASYNC = 0o20000  # with this flag the kernel would send signals
_TCGETS, _TIOCGWINSZ, _FIONREAD, _FIONBIO, _FIONCLEX, _FIOCLEX = 0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451
_RLIMIT_STACK = 3
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF

_CONDITIONAL: list[tuple[str, tuple[Condition, ...]]] = [
    ("clone", (Condition(0, _CLONE_SHARED, _CLONE_SHARED | _CLONE_OTHERS),)),
    ("close_range", (Condition(2, 0, _CLOSE_RANGE_UNSHARE),)),
    ("mmap", (Condition(3, _MAP_PRIVATE, _MAP_TYPE),)),
    ("mmap", (Condition(3, _MAP_SHARED, _MAP_TYPE | _MAP_ANONYMOUS),)),
    *(("fcntl", (Condition(1, command),)) for command in (_DUPFD, _GETFD, _SETFD, _GETFL, _DUPFD_CLOEXEC)),
    ("fcntl", (Condition(1, _SETFL), Condition(2, 0, _O_ASYNC))),
    *(
        ("ioctl", (Condition(1, request),))
        for request in (_TCGETS, _TIOCGWINSZ, _FIONREAD, _FIONBIO, _FIONCLEX, _FIOCLEX)
    ),
    # All limits can be read. Only the stack's can be changed: others could feign an infrastructure failure.
    ("prlimit64", (Condition(0, 0), *_null(2))),
    ("prlimit64", (Condition(0, 0), Condition(1, _RLIMIT_STACK))),
    ("setrlimit", (Condition(0, _RLIMIT_STACK),)),
    # A pair of sockets within the process, which event loops need; nothing can be sent to an address.
    ("socketpair", (Condition(0, _AF_UNIX), Condition(1, _SOCK_STREAM, _SOCK_TYPE))),
    ("sendto", _null(4)),
]
_READING = [
    ("open", (Condition(1, 0, _OPEN_FOR_WRITING),)),
    ("openat", (Condition(2, 0, _OPEN_FOR_WRITING),)),
]
_UNKNOWN = "clone3"  # fails as unknown: a filter cannot see its flags in memory; the C library then uses `clone`


def make_filter(reading: bool, machine: str | None = None) -> bytes:
    """Return the filter as an array of `struct sock_filter`; with `reading`, files can be opened for reading.

    `machine` is a name as from `platform.machine`, by default this machine's. Raises an OSError for an architecture
    without a table of system calls.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine!r}")
    column, architecture = _ARCHITECTURES[machine]
    steps_of = {numbers[column]: [_step(_RETURN, _ALLOW)] for numbers in ALWAYS.values()}
    for name, conditions in _CONDITIONAL + (_READING if reading else []):
        steps_of.setdefault(SOMETIMES[name][column], []).extend(_rule(conditions))
    for name in {name for name, _ in _CONDITIONAL + _READING}:
        steps_of.setdefault(SOMETIMES[name][column], []).append(_step(_RETURN, _FAIL | errno.EPERM))
    steps_of[SOMETIMES[_UNKNOWN][column]] = [_step(_RETURN, _FAIL | errno.ENOSYS)]
    numbers = {number: steps for number, steps in steps_of.items() if number is not None}
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_JUMP_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        *_search(_ranges(numbers)),
    ]
    return b"".join(program)


def _ranges(steps_of: dict[int, list[bytes]]) -> list[tuple[int, list[bytes]]]:
    """Return (first call number, steps) of each range of calls with equal steps, in order; other calls fail."""
    fail, kill = [_step(_RETURN, _FAIL | errno.EPERM)], [_step(_RETURN, _KILL)]
    ranges: list[tuple[int, list[bytes]]] = []
    for number in range(max(steps_of) + 2):
        steps = steps_of.get(number, fail)
        if not ranges or steps != ranges[-1][1]:
            ranges.append((number, steps))
    return [*ranges, (_X32, kill)]


def _search(ranges: list[tuple[int, list[bytes]]]) -> list[bytes]:
    """Return a binary search for the range of the loaded number: the kernel runs the filter for each call number."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    return [_step(_JUMP_AT_LEAST, ranges[middle][0], len(below), 0), *below, *above]


def _rule(conditions: tuple[Condition, ...]) -> list[bytes]:
    """Return steps that allow a call if all conditions hold, and otherwise fall through to the next steps."""
    body = [_step(_RETURN, _ALLOW)]
    for condition in reversed(conditions):  # a failed comparison skips the rest
        compare = _step(_JUMP_EQUAL, condition.value, 0, len(body))
        mask = [] if condition.mask == _EVERY_BIT else [_step(_AND, condition.mask)]
        offset = _ARGUMENTS + 8 * condition.argument + 4 * condition.high
        body = [_step(_LOAD, offset), *mask, compare, *body]
    return body


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on all architectures
_CREATE_RULESET_VERSION, _RULE_PATH_BENEATH = 1, 1
_LOG_SAME_EXEC_OFF = 1  # a program must not flood the audit log
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_RIGHTS_OF = {1: 13, 2: 14, 3: 15, 5: 16}  # version -> number of rights to files from this version on
_BIND_TCP, _CONNECT_TCP = 1, 2  # exist since version 4
_SCOPE_SOCKETS, _SCOPE_SIGNALS = 1, 2  # exist since version 6
_PACKAGES = ("site-packages", "dist-packages")


def landlock_version() -> int:
    """Return the version of the kernel's Landlock interface; 0 if there is none."""
    ask = ctypes.CDLL(None, use_errno=True).syscall
    return max(0, int(ask(_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION)))


class Ruleset:
    """A ruleset that allows only reading in some directories; OSError if the kernel rejects it.

    Packages below a directory stay closed. The fork server makes the ruleset once, and each fork enforces it. It works
    with version 1 of the interface, and uses what later versions add; seccomp covers what older versions lack.

    Source: `Documentation/userspace-api/landlock.rst` of Linux.
    """

    def __init__(self, directories: Sequence[str]) -> None:
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
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
    """Yield the paths below a directory that can be read: all but packages, or a directory of packages itself."""
    if os.path.basename(directory) in _PACKAGES:
        yield directory
        return
    for entry in os.scandir(directory):
        if entry.name not in _PACKAGES:
            yield entry.path


LANDLOCK, SECCOMP, UNSAFE, TRUSTED = "landlock", "seccomp", "unsafe", "trusted"
MAX_DESCRIPTORS = 64
MAX_THREADS = 64
_BUFFERS = "/proc/sys/net/core/wmem_default"  # bytes that a socket's buffer holds, its last packet aside
_BUFFER_BYTES, _PACKET_BYTES = 212_992, 32 << 10
_PIPE_PAGES = 16
_STACK_BYTES = 120 << 20  # the kernel keeps 128 MiB free below the stack
_FIRST_USER = 0x60000000  # far from the users of a system and from the ranges of user namespaces

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 4, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_PR_SET_CHILD_SUBREAPER = 36
_CAP_KILL, _CAP_SETGID, _CAP_SETUID = 5, 6, 7
_CAP_VERSION = 0x20080522  # version 3: two words per set


class Confinement:
    """The confinement of one level. At LANDLOCK programs can read the directories. OSError if it cannot be set up."""

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
            with open("/proc/self/statm", encoding="ascii") as file:
                self._address_space = int(file.read().split()[0]) * resource.getpagesize()
            _prefer_for_killing()
        elif self.confined:
            raise OSError(f"no confinement on {sys.platform}")
        if self.confined:
            self._address_space -= _descriptor_bytes()
            self._prepare(level, directories)

    def _prepare(self, level: str, directories: Sequence[str]) -> None:
        """Set up in the server everything that its forks inherit."""
        _limit(resource.RLIMIT_NOFILE, MAX_DESCRIPTORS)
        _limit(resource.RLIMIT_FSIZE, 0)
        _limit(resource.RLIMIT_MEMLOCK, 0)
        able = {_CAP_KILL, _CAP_SETGID, _CAP_SETUID} <= _capabilities()
        self._user_can_change = able and (level == SECCOMP or all(map(_open_to_all, directories)))
        for capability in range(64):  # unknown numbers fail, which does not matter
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
        """Confine this fork before any untrusted code. If the kernel rejects a part, an OSError keeps it from running.

        The program may use `memory_bytes` beyond the server's address space; what its descriptors can hold in the
        kernel is a part of them. Its threads share `core`, if one is given.
        """
        os.setsid()
        if core is not None:
            with contextlib.suppress(OSError):  # the core may have been taken from this process since
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
        filtered = (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER)
        if self.confined and self._prctl(*filtered, ctypes.addressof(self._filter), 0, 0):
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")

    def _change_user(self) -> None:
        """Become a user that no file and no other process has."""
        user = _FIRST_USER + os.getpid()
        with contextlib.suppress(OSError):  # a user namespace may lack this user
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


def _descriptor_bytes() -> int:
    """Return the most memory that full sockets or pipes on all descriptors of a program hold in the kernel."""
    buffer = _BUFFER_BYTES
    with contextlib.suppress(OSError, ValueError), open(_BUFFERS, encoding="ascii") as file:
        buffer = int(file.read())
    return MAX_DESCRIPTORS * max(buffer + _PACKET_BYTES, _PIPE_PAGES * resource.getpagesize())


def _limit(which: int, soft: int, hard: int | None = None) -> None:
    """Lower a limit, soft and hard; never raise a hard limit."""
    maximum = resource.getrlimit(which)[1]
    hard = soft if hard is None else hard
    hard = hard if maximum == resource.RLIM_INFINITY else min(hard, maximum)
    resource.setrlimit(which, (min(soft, hard), hard))


def _open_to_all(directory: str) -> bool:
    """Whether every user can read a directory. A Python in root's home, for instance, is open only to root."""
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
    """Make the kernel end the sandbox's processes first when the machine is out of memory."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
