"""Checks paths and writes files atomically: after a kill at any moment, a file has its old or its new content.

A failed write raises a `StorageError` that names the file. Operations that the file system does not support (links,
permissions, locks, fsync) are skipped with a one-line warning. A later process removes the `TemporaryFolder` of a
killed one. A path with a name longer than 255 bytes counts as missing; `pathlib` would raise an OSError.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from time import time
from typing import Any
from zlib import crc32

from brorl.errors import StorageError, UserError, option

_log = logging.getLogger(__name__)


def exists(path: str | Path) -> bool:
    """Return whether the path is a file or a folder."""
    return _holds(Path(path).exists)


def is_file(path: str | Path) -> bool:
    """Return whether the path is a file."""
    return _holds(Path(path).is_file)


def is_folder(path: str | Path) -> bool:
    """Return whether the path is a folder."""
    return _holds(Path(path).is_dir)


def cache_folder() -> Path:
    """Return the folder of files that later runs of this user can reuse, which may not exist yet.

    Raises:
        RuntimeError: If the user has no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "brorl"


def is_used(path: Path) -> bool:
    """Return whether the path is a file or a nonempty folder."""
    return any(path.iterdir()) if path.is_dir() else path.exists()


def refuse_used_output(path: Path) -> None:
    """Raise a UserError if `--output-dir` names a file or a nonempty folder."""
    if is_used(path):
        raise UserError(f"{option('output-dir', path)} exists and is not empty; choose a different folder")


def split_revision(name: str) -> tuple[str, str | None]:
    """Split `id@revision` into a hub id and a revision (branch, tag or commit), which is None for an existing path."""
    path, at, revision = name.partition("@")
    return (path, revision) if at and revision and not exists(Path(name).expanduser()) else (name, None)


def function_path(path: str) -> str:
    """Make the file in `file.py:function` absolute. Leave `package.module:function` unchanged."""
    file, _, name = path.rpartition(":")
    local = Path(file).expanduser()
    return f"{local.absolute()}:{name}" if is_file(local) else path


def function_file(path: str) -> Path | None:
    """Return the file of `file.py:function` or `package.module:function`, without importing it; None if not found."""
    name = path.rpartition(":")[0]
    if name.endswith((".py", ".pkl")):
        return Path(name) if is_file(name) else None
    top, *inner = name.split(".")
    places = [Path(folder, top, *inner) for folder in (str(Path.cwd()), *sys.path)]
    with suppress(ImportError, ValueError):  # a package with an unusual installation
        if (spec := find_spec(top)) is not None:
            places += [Path(folder, *inner) for folder in spec.submodule_search_locations or ()]
    files = (file for place in places for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"))
    return next(filter(is_file, files), None)


def size_and_sum(file: Path) -> str:
    """Return the size of a file in bytes and its CRC-32 in hexadecimal: `4096 1a2b3c4d`."""
    size = crc = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            size += len(block)
            crc = crc32(block, crc)
    return f"{size} {crc:08x}"


def _holds(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_WORKING = (*_FULL, errno.EIO, errno.EAGAIN)  # errors of operations that the file system supports
_BLOCK = 1 << 22  # bytes per read
_MAX_NAME_LENGTH = 255  # bytes


@contextmanager
def optional(what: str, folder: Path, without: str) -> Iterator[None]:
    """Run a block that some file systems (Drive, GCS FUSE, CIFS) do not support. If it fails, warn once and continue.

    The error still propagates if the disk is full or damaged, or if another process holds a lock.

    Args:
        what: What the block needs: "symbolic links".
        folder: A folder on the file system.
        without: The consequence of continuing without it.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _WORKING:
            raise
        key = (what, folder.stat().st_dev)
        if key not in _warned:
            _warned.add(key)
            line = f"the file system of {folder} does not support {what} ({error.strerror or error}): {without}"
            _log.warning("%s", line)


_warned: set[tuple[str, int]] = set()  # warnings already issued by `optional`: (operation, device)


def to_disk(path: Path, descriptor: int | None = None) -> None:
    """Flush a file or a folder's entries to disk. Pass `descriptor` if it is already open."""
    what, folder = ("fsync of files", path.parent) if path.is_file() else ("fsync of folders", path)
    with optional(what, folder, "a power failure can lose the latest writes"):
        opened = os.open(path, os.O_RDONLY) if descriptor is None else descriptor
        try:
            os.fsync(opened)
        finally:
            if descriptor is None:
                os.close(opened)


def point_at(link: Path, name: str) -> None:
    """Atomically link to a sibling file or folder. Without link support, write a file that contains its name."""
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    with optional("symbolic links", link.parent, f"{link.name} is a file that contains the folder's name"):
        temporary.symlink_to(name)  # relative, so the folder can be moved
    if not temporary.is_symlink():
        temporary.write_text(name, "utf-8")
    temporary.replace(link)
    to_disk(link.parent)


def followed(link: Path) -> Path:
    """Resolve a link, or a file written by `point_at`, to its folder. Return any other path unchanged."""
    with suppress(OSError, ValueError):  # a ValueError: the text is not a name
        if link.is_symlink():
            return link.with_name(link.readlink().name)
        if is_file(link) and link.stat().st_size <= _MAX_NAME_LENGTH:
            folder = link.with_name(link.read_text("utf-8"))
            return folder if is_folder(folder) else link
    return link


def lock(descriptor: int, path: Path) -> bool:
    """Lock an open file or folder until it is closed. Return whether locking is supported.

    Windows and some file systems do not support it. Raise a BlockingIOError if another process holds the lock.
    """
    try:
        import fcntl
    except ImportError:  # on Windows
        return False
    is_locked = False
    with optional("locks", path, "do not start a second process on it"):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = True
    return is_locked  # noqa: RET504  # the block may have ended early


_LOCK = "used"
_GRACE_S = 60.0  # a newer folder may not have its lock yet, or its processes may still be exiting


@contextmanager
def storage_errors(target: Path, then: str = "resume the run") -> Iterator[None]:
    """Turn an OSError in the block into a `StorageError` that names the file and the command to run after the fix."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"could not write {target}: {error.strerror or error}; {remedy(error)}, then {then}"
        ) from error


@contextmanager
def output_folder(path: Path) -> Iterator[Path]:
    """Create the `--output-dir` folder. If the block fails, remove the folder if it is new and still empty."""
    is_new = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write to {option('output-dir', path)} ({error.strerror}); choose a writable folder"
        ) from error
    try:
        yield path
    except BaseException:
        if is_new:
            with suppress(OSError):  # rmdir raises if the folder has files
                path.rmdir()
        raise


def replace_file(target: Path, content: bytes, *, is_shared: bool = False) -> None:
    """Write a file under a temporary name, flush it to disk, and rename it.

    If other processes may write the file at the same time (`is_shared`), the last of them wins.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp" if is_shared else f".{target.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            to_disk(temporary, file.fileno())
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def remedy(error: OSError) -> str:
    """Return the fix for a failed write."""
    if error.errno in _FULL:
        return "free disk space"
    return "fix the permissions" if error.errno in _FORBIDDEN else "check the file system"


def read_json_file(file: Path, advice: str) -> Any:
    """Return the content of a JSON file. The error about a damaged file ends with the advice."""
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}); {advice}") from error


def parquet_bytes(table: Any) -> bytes:
    """Serialize a pyarrow table to the bytes of a Parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def json_ready(value: Any) -> Any:
    """Convert a value for JSON: dataclasses to objects, keys to strings, non-finite numbers to null."""
    if is_dataclass(value) and not isinstance(value, type):
        return json_ready({name: getattr(value, name) for name in value.__dataclass_fields__})
    if isinstance(value, Mapping):
        return {str(k): json_ready(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(v) for v in value]
    if isinstance(value, bool | str | int) or value is None:
        return value
    return float(value) if isfinite(value) else None


def dotted_items(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested entries by dotted name: {"a": {"b": 1}} gives ("a.b", 1). An empty mapping counts as a value."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from dotted_items(item, f"{name}.{key}" if name else key)
    else:
        yield name, value


@dataclass(frozen=True)
class TemporaryFolder:
    """A folder that a lock marks as in use until this process ends, even if it is killed."""

    path: Path
    descriptor: int | None  # open file that holds the lock; None on a system without file locks

    @classmethod
    def new(cls, parent: Path, prefix: str) -> TemporaryFolder:
        """Remove the folders that killed processes left behind, then make a new one."""
        remove_abandoned(parent, prefix)
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        return cls(path, _lock(path / _LOCK, os.O_CREAT))

    def remove(self) -> None:
        """Remove the folder and its files."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.descriptor is not None:
            os.close(self.descriptor)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the temporary folders `parent/prefix...` whose processes ended without removing them.

    Leave other users' folders and folders without a lock file alone.
    """
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if time() - folder.stat().st_mtime < _GRACE_S:
                continue
            descriptor = _lock(folder / _LOCK)
            if descriptor is not None:
                TemporaryFolder(folder, descriptor).remove()


def _lock(file: Path, flags: int = 0) -> int | None:
    """Lock a file and return its descriptor, or None if locks are not supported."""
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        if lock(descriptor, file.parent):
            return descriptor
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
