"""The system-call filter: a list of allowed calls in classic BPF, some with conditions on their arguments.

Any other call fails with EPERM. A call that uses a different architecture's numbers kills the process.

Sources: `Documentation/userspace-api/seccomp_filter.rst` in Linux, and for each constant a header in `include/uapi/`.
"""

from __future__ import annotations

import errno
import platform
import struct
from typing import NamedTuple

# fmt: off
# System call numbers on x86-64 and ARM64; None if the architecture lacks the call. From the Linux source:
# arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
#
# Calls that are not listed here fail with EPERM. Among them are fork, execve, kill, tgkill, ptrace, socket, connect,
# sendmsg, prctl, chmod, rename, unlink, mount, io_uring_setup, bpf, memfd_create and timer_create.
ALWAYS: dict[str, tuple[int | None, int | None]] = {
    # The program's own descriptors.
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "preadv": (295, 69), "lseek": (8, 62), "close": (3, 57), "dup": (32, 23), "dup2": (33, None),
    "dup3": (292, 24), "fstat": (5, 80), "fsync": (74, 82), "fadvise64": (221, 223),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "pipe": (22, None),
    "pipe2": (293, 59), "eventfd2": (290, 19), "recvfrom": (45, 207), "shutdown": (48, 210),
    "getsockname": (51, 204),
    # File names: imports check whether a file exists, without reading it.
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

SOMETIMES: dict[str, tuple[int | None, int | None]] = {  # allowed under the conditions in `_RULES`
    "open": (2, None), "openat": (257, 56), "clone": (56, 220), "clone3": (435, 435), "fcntl": (72, 25),
    "ioctl": (16, 29), "prlimit64": (302, 261), "setrlimit": (160, 164), "socketpair": (53, 199),
    "sendto": (44, 206), "close_range": (436, 436), "mmap": (9, 222),
}
# fmt: on

# linux/audit.h: (column in the tables, AUDIT_ARCH_X86_64 or AUDIT_ARCH_AARCH64).
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000  # asm/unistd.h: __X32_SYSCALL_BIT; x86-64 kernels also accept x32 ABI calls

# linux/bpf_common.h: BPF_LD | BPF_W | BPF_ABS, BPF_ALU | BPF_AND, BPF_RET, BPF_JMP | BPF_JEQ and BPF_JMP | BPF_JGE.
_LOAD, _AND, _RETURN, _JUMP_EQUAL, _JUMP_AT_LEAST = 0x20, 0x54, 0x06, 0x15, 0x35
# linux/seccomp.h: SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS and SECCOMP_RET_ERRNO, to which an error number is added.
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # linux/seccomp.h: offsets in `struct seccomp_data`
_EVERY_BIT = 0xFFFFFFFF


class Condition(NamedTuple):
    """A condition on one argument: argument & mask == value."""

    argument: int  # the argument's index
    value: int  # 32 bits
    mask: int = _EVERY_BIT  # the bits to compare
    high: bool = False  # compare the argument's high 32 bits instead of the low ones; for pointers


def _null(argument: int) -> tuple[Condition, ...]:
    return Condition(argument, 0), Condition(argument, 0, high=True)


# linux/sched.h: CLONE_THREAD, CLONE_VM and CLONE_FILES. Threads must share memory and descriptors, and end with the
# process: every additional descriptor table could hold as many full sockets again.
_CLONE_SHARED = 0x00010000 | 0x00000100 | 0x00000400
# linux/sched.h: CLONE_NEW*, CLONE_NEWTIME, CLONE_PIDFD, CLONE_PTRACE, CLONE_VFORK and CLONE_UNTRACED.
_CLONE_OTHERS = 0x7E020000 | 0x00000080 | 0x00001000 | 0x00002000 | 0x00004000 | 0x00800000
_CLOSE_RANGE_UNSHARE = 2  # linux/close_range.h; also gives the thread its own table
# linux/mman.h and asm-generic/mman-common.h. Shared anonymous pages survive when most of their mapping is gone, so no
# address-space limit counts them. An open file, such as standard input, can be mapped.
_MAP_TYPE, _MAP_SHARED, _MAP_PRIVATE, _MAP_ANONYMOUS = 0xF, 0x01, 0x02, 0x20
# asm-generic/fcntl.h: O_WRONLY, O_RDWR, O_CREAT and O_TRUNC (O_TMPFILE needs one of the first two).
_OPEN_FOR_WRITING = 0o1 | 0o2 | 0o100 | 0o1000
_SETFL, _ASYNC = 4, 0o20000  # asm-generic/fcntl.h: F_SETFL; with O_ASYNC the kernel would send signals
# asm-generic/fcntl.h and linux/fcntl.h: F_DUPFD, F_GETFD, F_SETFD, F_GETFL and F_DUPFD_CLOEXEC.
_FCNTL_COMMANDS = (0, 1, 2, 3, 1030)
# asm-generic/ioctls.h: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX and FIOCLEX.
_IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_RLIMIT_STACK = 3  # asm-generic/resource.h
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF  # include/linux/socket.h and include/linux/net.h

# A call is allowed if all conditions in one of its rows hold.
_RULES: list[tuple[str, tuple[Condition, ...]]] = [
    # No new processes, namespaces or process descriptors.
    ("clone", (Condition(0, _CLONE_SHARED, _CLONE_SHARED | _CLONE_OTHERS),)),
    ("close_range", (Condition(2, 0, _CLOSE_RANGE_UNSHARE),)),
    ("mmap", (Condition(3, _MAP_PRIVATE, _MAP_TYPE),)),
    ("mmap", (Condition(3, _MAP_SHARED, _MAP_TYPE | _MAP_ANONYMOUS),)),
    *(("fcntl", (Condition(1, command),)) for command in _FCNTL_COMMANDS),
    ("fcntl", (Condition(1, _SETFL), Condition(2, 0, _ASYNC))),
    *(("ioctl", (Condition(1, request),)) for request in _IOCTL_REQUESTS),
    # All limits can be read. Only the stack limit can be changed: changing others could fake an infrastructure failure.
    ("prlimit64", (Condition(0, 0), *_null(2))),
    ("prlimit64", (Condition(0, 0), Condition(1, _RLIMIT_STACK))),
    ("setrlimit", (Condition(0, _RLIMIT_STACK),)),
    # A pair of sockets within the process, which event loops need; nothing can be sent to an address.
    ("socketpair", (Condition(0, _AF_UNIX), Condition(1, _SOCK_STREAM, _SOCK_TYPE))),
    ("sendto", _null(4)),
]
_READING_RULES: list[tuple[str, tuple[Condition, ...]]] = [
    ("open", (Condition(1, 0, _OPEN_FOR_WRITING),)),
    ("openat", (Condition(2, 0, _OPEN_FOR_WRITING),)),
]
_UNKNOWN = "clone3"  # fails as unknown: its flags are in memory, hidden from a filter; libc then uses `clone`


def make_filter(reading: bool, machine: str | None = None) -> bytes:
    """Return the filter as an array of `struct sock_filter`. With `reading`, files can be opened for reading.

    `machine` is a `platform.machine` name, by default this machine's. Raises an OSError for an architecture that is not
    in the tables.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system-call table for {machine!r}")
    column, architecture = _ARCHITECTURES[machine]
    steps_of = {numbers[column]: [_step(_RETURN, _ALLOW)] for numbers in ALWAYS.values()}
    steps_of |= {numbers[column]: [_step(_RETURN, _FAIL | errno.EPERM)] for numbers in SOMETIMES.values()}
    for name, conditions in reversed(_RULES + (_READING_RULES if reading else [])):
        steps_of[SOMETIMES[name][column]][:0] = _rule(conditions)
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
    """Return (first call number, steps) for each range of calls with equal steps, in order. Other calls fail."""
    fail, kill = [_step(_RETURN, _FAIL | errno.EPERM)], [_step(_RETURN, _KILL)]
    ranges: list[tuple[int, list[bytes]]] = []
    for number in range(max(steps_of) + 2):
        steps = steps_of.get(number, fail)
        if not ranges or steps != ranges[-1][1]:
            ranges.append((number, steps))
    return [*ranges, (_X32, kill)]


def _search(ranges: list[tuple[int, list[bytes]]]) -> list[bytes]:
    """Return a binary search for the loaded number's range, because the kernel runs the filter on every call."""
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
