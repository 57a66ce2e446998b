"""Parses the JSON text of references strictly, and describes JSON values and problems for messages."""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from brorl.format import short_repr

FORBID_UNKNOWN_KEYS: Any = {"extra": "forbid"}
"""The `__pydantic_config__` of a dataclass that `read_json` parses."""
JSON_NAMES = {
    list: "a list", dict: "an object", str: "text", int: "a number", float: "a number", bool: "true or false",
    type(None): "null",
}  # fmt: skip


def read_json(kind: Any, text: str, form: str) -> Any:
    """Parse a dataclass from JSON, strictly. Invalid text raises a `ValueError` with the problem and the `form`."""
    try:
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as errors:
        error = errors.errors(include_url=False)[0]
    place = ".".join(map(str, error["loc"]))
    problem = f"{error['msg'][:1].lower()}{error['msg'][1:]}"
    match error["type"]:
        case "value_error":  # the class itself raised it
            raise ValueError(str(error["ctx"]["error"]))
        case "json_invalid":
            description = f"is not JSON text ({error['ctx']['error']})"
        case "missing" | "missing_argument":
            description = f"has no {place}"
        case "extra_forbidden" | "unexpected_keyword_argument":
            description = f"has the unknown key {place}"
        case _:
            description = f"has {short_repr(error['input'])}{place and f' as {place}'} ({problem})"
    raise ValueError(f"{description}; expected {form}")


_adapter = cache(TypeAdapter)


def json_problem(error: Exception) -> str:
    """Describe briefly what `json` found wrong with its input."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return f"a number has more than {sys.get_int_max_str_digits():,} digits; write it as text"
