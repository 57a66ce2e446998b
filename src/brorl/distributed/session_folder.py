"""The temporary folder of a Ray cluster that a run starts, and those that killed runs have left behind.

In: nothing. Out: a new folder with a short path. Its lock marks it as used until this process ends, also if the process
is killed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time

_PREFIX = "brorl-ray-"
_LOCK = "used"
_GRACE_S = 60.0  # a younger folder may not have its lock yet, or its processes may still be ending


@dataclass(frozen=True)
class SessionFolder:
    """A locked folder.

    Attributes:
        path: Its path.
        descriptor: Open file that holds the lock; None where there are no locks.
    """

    path: str
    descriptor: int | None

    def remove(self) -> None:
        """Remove the folder and its files."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.descriptor is not None:
            os.close(self.descriptor)


def new_session_folder() -> SessionFolder:
    """Make a folder, after the removal of the folders of killed runs."""
    short = "/tmp" if Path("/tmp").is_dir() else None  # the paths of sockets have at most 107 characters
    parent = short or tempfile.gettempdir()
    remove_abandoned(Path(parent))
    path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    return SessionFolder(path, _lock(Path(path) / _LOCK, os.O_CREAT))


def remove_abandoned(parent: Path) -> None:
    """Remove the folders whose process has ended without doing so.

    Folders of other users, and those without a lock file, are left alone.

    Args:
        parent: The folder that holds them.
    """
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time() - folder.stat().st_mtime < _GRACE_S:
                continue
            descriptor = _lock(folder / _LOCK)
            if descriptor is not None:
                SessionFolder(str(folder), descriptor).remove()


def _lock(file: Path, flags: int = 0) -> int | None:
    """Lock a file, and return its descriptor; None where there are no locks.

    Raises:
        OSError: If another process holds the lock, or the file cannot be opened.
    """
    try:
        import fcntl
    except ImportError:  # on Windows
        return None
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
