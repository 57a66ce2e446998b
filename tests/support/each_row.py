"""A test of a table: all rows in one test, which lists every row that fails."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import pytest


def each_row(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test for each row of a table. Rows share its fixtures, so it may have none that a row changes.

    A test of its own, as with `pytest.mark.parametrize`, costs more than a row that is checked in microseconds.
    """
    single = isinstance(names, str) and "," not in names
    columns = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [(row,) if single else tuple(row) for row in rows]
    assert table

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @wraps(check)
        def test(*args: Any, **fixtures: Any) -> None:
            failures = []
            for row in table:
                try:
                    check(*args, **dict(zip(columns, row, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(f"{row!r:.500}: {type(error).__name__}: {error}")
            assert not failures, f"{len(failures)} of {len(table)} rows fail:\n" + "\n".join(failures)

        signature = inspect.signature(check)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in columns]
        test.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return test

    return decorate
