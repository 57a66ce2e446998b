"""Attacks on the sandbox, executed inside of it by `level`: each raises OSError if it fails, or returns what it got."""

import ctypes
import os
import socket

_PTRACE_SEIZE, _IO_URING_SETUP = 0x4206, 425


def read_file(path: str) -> str:
    """Read the beginning of a file."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(40)


def write_file(path: str) -> str:
    """Write a file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write("written from the sandbox")
    return path


def connect(address: str | int) -> str:
    """Connect to a Unix socket by its path, or to a port of this machine."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.connect(address if isinstance(address, str) else ("127.0.0.1", address))
    return "connected"


def fork() -> str:
    """Start a process."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return f"started process {pid}"


def signal(pid: int) -> str:
    """Send a process the signal 0, which only tests the permission."""
    os.kill(pid, 0)
    return "allowed"


def trace(pid: int) -> str:
    """Become the debugger of a process, without stopping it."""
    return _call("ptrace", _PTRACE_SEIZE, pid, None, None)


def set_up_io_uring() -> str:
    """Make a queue of system calls that the kernel would carry out, past the filter."""
    return _call("syscall", _IO_URING_SETUP, 1, ctypes.create_string_buffer(120))


def execute(path: str) -> str:
    """Replace this program by another one."""
    os.execv(path, [path])


def _call(name: str, *arguments: object) -> str:
    result = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return f"returned {result}"
