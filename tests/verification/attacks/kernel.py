"""Programs that use system calls for more rights, new namespaces, or rarely used parts of the kernel."""

from attacks.attack import Attack, program, read_attacks


def _call(name: str, *numbers: int | str, lowest: int = 0) -> Attack:
    """Return the attack that succeeds if a raw call returns `lowest` or more."""
    return program(name, f"if syscall({', '.join(map(str, numbers))}) >= {lowest}: print(BREACH)")


ATTACKS = (
    *read_attacks("kernel"),
    _call("bpf", 321, 280, 0, "(ctypes.c_uint64 * 16)(2 | 4 << 32, 4 | 1 << 32)", 128),
    _call("userfaultfd", 323, 282, 1),
    _call("add a key", 248, 217, "b'user'", "TOKEN.encode()", "b'x'", 1, -3),
    _call("session keyring", 250, 219, 1, 0),
    _call("read a keyring", 250, 219, 11, -3, 0, 0),
    _call("request a key", 249, 218, "b'user'", "b'brorl'", "b'x'", -3),
    _call("System V queue", 68, 186, "KEY", "0o1600"),
    _call("System V semaphore", 64, 190, "KEY", 1, "0o1600"),
    _call("POSIX queue", 240, 180, "TOKEN.encode()", "0o102", "0o600", 0),
    _call("POSIX semaphore's file", 257, 56, -100, "f'/dev/shm/brorl-{TOKEN}'.encode()", "0o102", "0o600"),
    _call("new user namespace", 272, 97, "0x10000000"),
    _call("new mount namespace", 272, 97, "0x20000"),
    _call("new network namespace", 272, 97, "0x40000000"),
    _call("change the root directory", 161, 51, "FOLDER.encode()"),
    _call("kernel module", 313, 273, -1, "b''", 0),
    _call("kernel log by a call", 103, 116, 10, 0, 0),
    _call("lock all memory", 151, 230, 3),
    _call("secret memory", 447, 447, 0),
    _call("descriptors of a thread's own", 436, 436, 1000, 1001, 2),
    _call("file of events on files", 294, 26, 0),
)
