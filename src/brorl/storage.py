"""Reads the user's paths and writes files. After a kill at any moment, a file has its old or its new content.

A failed write is a `StorageError` that names the file. A later process removes the `TemporaryFolder` of a killed one.
A path with a name of more than 255 bytes counts as missing here; `pathlib` would raise an OSError.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from math import isfinite
from pathlib import Path
from time import time
from typing import Any

from brorl.errors import StorageError, UserError, option


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
    """Split `id@revision` into hub id and revision (branch, tag or commit), which is None for a path that exists."""
    path, at, revision = name.partition("@")
    return (path, revision) if at and revision and not exists(Path(name).expanduser()) else (name, None)


def function_path(path: str) -> str:
    """Make the file in `file.py:function` absolute; `package.module:function` stays as it is."""
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


_LOCK = "used"
_GRACE_S = 60.0  # a younger folder may not have its lock yet, or its processes may still be ending


@contextmanager
def storage_errors(target: Path, then: str = "resume the run") -> Iterator[None]:
    """Turn an OSError of the block into a `StorageError` that names the file and the command to run after the fix."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"could not write {target}: {error.strerror or error}; free disk space or fix the permissions, then {then}"
        ) from error


@contextmanager
def output_folder(path: Path) -> Iterator[Path]:
    """Make the folder of `--output-dir` for the block. If the block fails, remove a new folder that is still empty."""
    is_new = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write to {option('output-dir', path)} ({error.strerror}); choose a folder that you may write to"
        ) from error
    try:
        yield path
    except BaseException:
        if is_new:
            with suppress(OSError):  # rmdir raises if the folder has files
                path.rmdir()
        raise


def replace_file(target: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to disk, and rename it."""
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def parquet_bytes(table: Any) -> bytes:
    """Return a pyarrow table as the content of a Parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def json_ready(value: Any) -> Any:
    """Return a value that JSON can represent: dataclasses as objects, keys as text, non-finite numbers as null."""
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
    """A folder whose lock marks it as used until this process ends, even if it is killed."""

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

    Folders of other users and folders without a lock file stay.
    """
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if time() - folder.stat().st_mtime < _GRACE_S:
                continue
            descriptor = _lock(folder / _LOCK)
            if descriptor is not None:
                TemporaryFolder(folder, descriptor).remove()


def _lock(file: Path, flags: int = 0) -> int | None:
    """Lock a file and return its descriptor; None on a system without file locks."""
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
