"""Check whether a user's path exists.

No file name is longer than 255 bytes. Such a path returns False here, where `pathlib` raises an OSError. Other errors
of `pathlib` are raised, such as a missing permission.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path


def exists(path: str | Path) -> bool:
    """Return whether there is a file or a folder."""
    return _holds(Path(path).exists)


def is_file(path: str | Path) -> bool:
    """Return whether there is a file."""
    return _holds(Path(path).is_file)


def is_folder(path: str | Path) -> bool:
    """Return whether there is a folder."""
    return _holds(Path(path).is_dir)


def _holds(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise
