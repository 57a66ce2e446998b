"""A Landlock ruleset, which makes the kernel deny a process access to files, the network and signals.

Sources: `Documentation/userspace-api/landlock.rst` in Linux, and `include/uapi/linux/landlock.h` for the constants.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterator, Sequence

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # asm-generic/unistd.h; the same on all architectures
_CREATE_RULESET_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION
_RULE_PATH_BENEATH = 1  # LANDLOCK_RULE_PATH_BENEATH
_LOG_SAME_EXEC_OFF = 1  # LANDLOCK_RESTRICT_SELF_LOG_SAME_EXEC_OFF: a program must not flood the audit log
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3  # LANDLOCK_ACCESS_FS_READ_FILE and LANDLOCK_ACCESS_FS_READ_DIR
# interface version -> what it adds (file rights, network rights, scopes, `restrict_self` flags)
_ADDED = {
    1: (0x1FFF, 0, 0, 0),  # LANDLOCK_ACCESS_FS_EXECUTE to LANDLOCK_ACCESS_FS_MAKE_SYM
    2: (1 << 13, 0, 0, 0),  # LANDLOCK_ACCESS_FS_REFER
    3: (1 << 14, 0, 0, 0),  # LANDLOCK_ACCESS_FS_TRUNCATE
    4: (0, 1 << 0 | 1 << 1, 0, 0),  # LANDLOCK_ACCESS_NET_BIND_TCP and LANDLOCK_ACCESS_NET_CONNECT_TCP
    5: (1 << 15, 0, 0, 0),  # LANDLOCK_ACCESS_FS_IOCTL_DEV
    6: (0, 0, 1 << 0 | 1 << 1, 0),  # LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET and LANDLOCK_SCOPE_SIGNAL
    7: (0, 0, 0, _LOG_SAME_EXEC_OFF),
}
_PACKAGES = ("site-packages", "dist-packages")


def landlock_version() -> int:
    """Return the version of the kernel's Landlock interface; 0 if there is none."""
    ask = ctypes.CDLL(None, use_errno=True).syscall
    return max(0, int(ask(_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION)))


class Ruleset:
    """A ruleset that allows only reading, in the given directories; OSError if the kernel rejects it.

    Packages below a directory stay unreadable. The fork server creates the ruleset once, and each fork enforces it. It
    works with version 1 of the interface and uses what later versions add; seccomp covers what older versions lack.
    """

    def __init__(self, directories: Sequence[str]) -> None:
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        version = landlock_version()
        added = [rights for since, rights in _ADDED.items() if since <= version]
        files, network, scopes, self._flags = map(sum, zip(*added, strict=True)) if added else (0, 0, 0, 0)
        attributes = struct.pack("=QQQ", files, network, scopes)  # struct landlock_ruleset_attr
        size = 24 if version >= 6 else 16 if version >= 4 else 8
        self._descriptor = self._call(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
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
    """Yield the paths to allow: the directory itself if it contains packages, else its entries except packages."""
    if os.path.basename(directory) in _PACKAGES:
        yield directory
        return
    for entry in os.scandir(directory):
        if entry.name not in _PACKAGES:
            yield entry.path
