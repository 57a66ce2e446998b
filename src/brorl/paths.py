"""Check whether a user's path exists, split the revision off a hub id, and make the path of a function absolute.

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


def split_revision(name: str) -> tuple[str, str | None]:
    """Return the hub id and the revision (branch, tag or commit) of `id@revision`; a path that exists has none."""
    path, at, revision = name.partition("@")
    return (path, revision) if at and revision and not exists(Path(name).expanduser()) else (name, None)


def of_function(path: str) -> str:
    """Return the path of a function, `file.py:function` or `package.module:function`, with that of a file absolute."""
    file, _, name = path.rpartition(":")
    local = Path(file).expanduser()
    return f"{local.absolute()}:{name}" if is_file(local) else path


def _holds(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise
