"""References as JSON text: objects with known keys, each with a value of a known type."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from brorl.format import short_repr

JSON_NAMES = {
    list: "a list", dict: "an object", str: "text", int: "a number", float: "a number", bool: "true or false",
    type(None): "null",
}  # fmt: skip


def read_object(
    text: str, form: str, needed: Mapping[str, type], optional: Mapping[str, type], what: str = ""
) -> dict[str, Any]:
    """Read the text of an object; see `check_object`.

    Raises:
        ValueError: With the problem and the form.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what}is not JSON text ({problem_of(error)}); expected {form}") from None
    return check_object(value, form, needed, optional, what)


def check_object(
    value: Any, form: str, needed: Mapping[str, type], optional: Mapping[str, type], what: str = ""
) -> dict[str, Any]:
    """Return an object if it has all needed keys, no unknown ones, and a value of its type for each.

    Args:
        value: A JSON value.
        form: Such an object, for errors.
        needed: Keys with the types of their values; `float` also accepts whole numbers.
        optional: Keys that can be left out, or null.
        what: The object, as the beginning of a sentence; empty if the caller begins it.

    Raises:
        ValueError: With the problem and the form.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{what}is {JSON_NAMES[type(value)]}, not an object; expected {form}")
    kinds = {**needed, **optional}
    if not {*needed} <= {*value} <= {*kinds}:
        given = ", ".join(map(short_repr, value)) or "none"
        raise ValueError(f"{what}has the keys {given} (of {', '.join(kinds)}); expected {form}")
    for name, one in value.items():
        kind = kinds[name]
        fits = type(one) is kind or (kind is float and type(one) is int) or (one is None and name in optional)
        if not fits:
            raise ValueError(f"{what}has {short_repr(one)} as {name}, not {JSON_NAMES[kind]}; expected {form}")
    return value


def problem_of(error: Exception) -> str:
    """Return what an error of `json` says of a text, in a few words."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return f"a number has more than {sys.get_int_max_str_digits():,} digits; write it as text"
