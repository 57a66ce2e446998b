"""Writing files: after a kill at any moment, a file has either its old content or its new content.

In: a path and its content. Out: the file on disk. A failed write is a `StorageError` that names the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from brorl.errors import StorageError


@contextmanager
def storage_errors(target: Path, then: str = "resume the run") -> Iterator[None]:
    """Raise a `StorageError` that names the file in place of an OSError.

    Args:
        target: The file or folder to write.
        then: The next command of the user, after the fix.

    Raises:
        StorageError: If the block raises an OSError.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"could not write {target}: {error.strerror or error}; free disk space or fix the permissions, then {then}"
        ) from error


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


def dotted(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every entry of nested mappings; an empty mapping is a value."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from dotted(item, f"{name}.{key}" if name else key)
    else:
        yield name, value
