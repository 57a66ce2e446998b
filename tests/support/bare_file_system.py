"""A file system without links, permissions, locks or fsync: Drive in a notebook, GCS FUSE, CIFS, an old stick."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

MISSING = ("symlink", "chmod", "fsync", "flock")
ERRORS = (errno.EPERM, errno.ENOTSUP, errno.EINVAL, errno.EBADF)  # what such file systems answer


def take_away(monkeypatch: pytest.MonkeyPatch, code: int, missing: Sequence[str] = MISSING) -> None:
    """Let calls of the system fail with an error; fsync fails for folders alone with EINVAL, as CIFS does."""

    def fails(*_args: Any, **_options: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    fsync = os.fsync

    def fsync_of_files(descriptor: int) -> None:
        if code == errno.EINVAL and not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return fsync(descriptor)
        fails()

    for name in missing:
        module = fcntl if name == "flock" else os
        monkeypatch.setattr(module, name, fsync_of_files if name == "fsync" else fails)
