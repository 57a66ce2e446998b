"""Writing files so that a kill at any instant leaves either the old content or the new.

In: a path and its content. Out: the file, on disk. What the disk does not take is a `StorageError` that names the file;
what JSON does not take is replaced.
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
    """Turn what goes wrong with the disk into a `StorageError` that names the file.

    Args:
        target: What is written.
        then: What to do once there is space again.

    Raises:
        StorageError: In place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"could not write {target}: {error.strerror or error}; free some space or fix the permissions, then {then}"
        ) from error


def replace_file(target: Path, content: bytes) -> None:
    """Write a file under a temporary name, force it to disk, then give it its name."""
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
    """Return a value as JSON can hold it: dataclasses as objects, keys as text, numbers that are not finite as null."""
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
