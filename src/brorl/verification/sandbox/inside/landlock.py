"""Landlock: no access to files but reading the standard library, no network, no signals to other processes.

The ruleset is made once in the fork server and enforced in each fork. Every version of the interface from 1 on is used
as far as it goes; seccomp denies again what older ones do not cover.

Source: `Documentation/userspace-api/landlock.rst` of Linux.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterator, Sequence

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
    """A ruleset that allows to read directories, without the packages below; ready for forks of this process.

    Raises:
        OSError: If the kernel rejects it.
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
