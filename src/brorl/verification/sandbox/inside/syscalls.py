"""The system calls that a sandboxed program can make, with their numbers on x86-64 and on 64-bit ARM.

Calls that are missing here fail with EPERM. Among them are fork, execve, kill, tgkill, ptrace, socket, connect,
sendmsg, prctl, chmod, rename, unlink, mount, io_uring_setup, bpf, memfd_create and timer_create. `ALWAYS` are allowed
with any arguments, `SOMETIMES` as `seccomp` states.
"""

# fmt: off
ALWAYS: dict[str, tuple[int | None, int | None]] = {
    # Descriptors that the program has.
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "preadv": (295, 69), "lseek": (8, 62), "close": (3, 57), "close_range": (436, 436), "dup": (32, 23),
    "dup2": (33, None), "dup3": (292, 24), "fstat": (5, 80), "fsync": (74, 82), "fadvise64": (221, 223),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "pipe": (22, None),
    "pipe2": (293, 59), "eventfd2": (290, 19), "recvfrom": (45, 207), "shutdown": (48, 210),
    "getsockname": (51, 204),
    # Names of files: whether one exists, never its content. Imports need it.
    "newfstatat": (262, 79), "stat": (4, None), "lstat": (6, None), "statx": (332, 291), "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "getcwd": (79, 17), "getdents64": (217, 61),
    # Memory.
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233),
    "brk": (12, 214), "membarrier": (324, 283),
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
    "sendto": (44, 206),
}
# fmt: on
